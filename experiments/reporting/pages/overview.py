"""The rows that README shows: a few settings of the main model by element bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dmx.weights.learn_config import MOST_STEPS, PASSES

from ..groups import Group, group_rows
from ..markdown import markdown
from ..pooling import (
    Presets,
    Table,
    Tables,
    main_place,
    model_name,
    pooled,
    text_name,
    unquantized,
)
from ..record import USUAL_FAMILY, Limit, Method, Record
from .cells import best_heuristic, formats_of, mean_perplexity
from .glance import Setting, inputs_notes, only_format, settings_of

README_LIMITS = (4.0, 4.5, 5.0, 5.5)
"""element_bits of the budgets that README shows."""
_DMX = Method(search="differentiable", quantized="W+A", family=USUAL_FAMILY, units="layer")
_ROUNDED = replace(_DMX, weights="gptq")
_LEARNED = Method(
    search="joint",
    weights="learned",
    quantized="W+A",
    family=USUAL_FAMILY,
    units="layer",
    path="line",
    scale_rules="mxfp4 even",
)
README_METHODS = (
    _DMX,
    _ROUNDED,
    replace(_ROUNDED, transform="hadamard_block"),
    _LEARNED,
    replace(_LEARNED, transform="hadamard_block", stage="950 steps"),
    replace(_LEARNED, input_format="mxfp8_e4m3"),
)
"""Scale rules are those of the weights, as in `Setting.key`."""
SERVED_METHOD = replace(
    _LEARNED,
    family="mxfp8_mxfp4",
    units="fused",
    scale_rules="mxfp4 even, mxfp8_e4m3 rceil",
)
"""Formats and units that vLLM loads; a line of the table."""
SCALED_METHOD = replace(
    _LEARNED, family="nvfp4 fp8 bf16", units="fused", scale_rules="floor", stage="300 steps"
)
"""Such formats too, whose budgets count scales; a sentence below the table."""
README_FORMATS = ("mxfp4", "mxfp6_e2m3")
"""Of the uniform formats those that searches choose from."""


def readme_table(records: Sequence[Record], presets: Presets, uniform: Record | None) -> list[str]:
    """Perplexity by element bits: bf16 and uniform formats at theirs, searches at a few budgets.

    Args:
        records: what is pooled.
        uniform: a record with one format everywhere, of the same model and text.
    """
    tables = pooled(records, presets)
    place, settings = main_place(tables), {s.key: s for s in settings_of(tables)}
    full = unquantized(tables, *place)[:1]
    lines: list[tuple[str, Mapping[float, float]]] = []
    lines += [("bf16", {16.0: mean_perplexity(g)}) for g in full]
    flat = group_rows(uniform.rows) if uniform else []
    known = {str(g.method.format): g for g in flat if g.method.format in README_FORMATS}
    bits = {g.statistic("element_bits").mean or 0.0: mean_perplexity(g) for g in known.values()}
    lines.append((f"uniform {', '.join(known)}", bits))
    shown: list[Setting] = []
    for method in README_METHODS:
        if (setting := settings.get(Table.of("", "", method).shared)) is not None:
            shown.append(setting)
            lines += _setting_lines(setting, method)
    served = {s.key: s for s in settings_of(tables, "fused")}
    if (setting := served.get(Table.of("", "", SERVED_METHOD).shared)) is not None:
        shown.append(setting)
        lines += _setting_lines(setting, SERVED_METHOD)
    columns = sorted({x for _, values in lines for x in values})
    rows = [[name, *(_cell(values.get(x)) for x in columns)] for name, values in lines if values]
    note = (
        f"Perplexity of {place[0]} on {place[1]}, bits without scales; lower is better. Best heuristic: of "
        "those that were run at each budget."
    )
    if any(setting.key.weights == "learned" for setting in shown):
        note += (
            f" Weights learned in {MOST_STEPS} steps, or {PASSES} passes over a shorter text, where nothing else is said, "
            "scale rule even for MXFP4."
        )
    if flat_at := {b.limit for s in shown for b in s.budgets if s.at(b).is_flat}:
        limits = " and ".join(f"{limit:g}" for limit in sorted(flat_at))
        note += f" At {limits} bits all layers have one format, whatever chose."
    note = " ".join([note, *inputs_notes(shown)])
    text = next(r.data["evaluation"] for r in records if (model_name(r), text_name(r)) == place)
    if uniform is not None and (other := uniform.data["evaluation"]).sha256 != text.sha256:
        own = next(mean_perplexity(g) for g in flat if g.method.is_unquantized)
        note += (
            f" Uniform formats: of an earlier reading of the text, {other.tokens:,} tokens instead of "
            f"{text.tokens:,}; bf16 has {own:.2f} there."
        )
    table = markdown(["", *(f"{x:g} bits" for x in columns)], rows)
    scaled = served.get(Table.of("", "", SCALED_METHOD).shared)
    below = [_scaled_text(scaled, _rounded(tables, place)), ""] if scaled else []
    return [*table, "", *below, note]


def _setting_lines(setting: Setting, method: Method) -> list[tuple[str, Mapping[float, float]]]:
    """A line of the method; before it, of the settings without a transform, one of the best heuristic."""
    ours, theirs = {}, {}
    for x in README_LIMITS:
        budget = Limit(x, "element_bits")
        pair = setting.at(budget)
        group = next((g for g in setting.groups if g.budget == budget and _is(g, method)), None)
        if group or pair.is_flat:
            ours[x] = mean_perplexity(group or pair.known[0])
        if best := best_heuristic(budget, setting.groups):
            theirs[x] = mean_perplexity(best)
    named = method.without("path", "scale_rules", "input_format")
    is_served = method == SERVED_METHOD
    served = (_family_text(method), "fused units") if is_served else ()
    label = named.without("family").label if is_served else named.label
    name = ", ".join(filter(None, (label, setting.bits_text, *served)))
    if method not in (_DMX, _LEARNED, SERVED_METHOD):
        return [(name, ours)]
    return [(f"best heuristic{name.removeprefix(named.base)}", theirs), (name, ours)]


def _family_text(method: Method) -> str:
    """Its candidate formats."""
    return "/".join(f.name for f in formats_of(method))


def _scaled_text(setting: Setting, rounded: Sequence[Group]) -> str:
    """Perplexities of a family whose budgets count scales, then of its formats everywhere alike."""
    pairs = {b: pair for b in setting.budgets if all(pair := setting.at(b)) and not pair.is_flat}
    ours, theirs = (
        ", ".join(_cell(mean_perplexity(pair.known[i])) for pair in pairs.values()) for i in (0, 1)
    )
    limits = ", ".join(f"{budget.limit:g}" for budget in pairs)
    said = [f"dMX {ours} at {limits} bits with scales (best heuristic {theirs})"] if pairs else []
    for budget in setting.budgets:
        if (pair := setting.at(budget)).is_flat:
            best = min(pair.known, key=mean_perplexity)
            seeds = ", one seed" if len(best.seeds) == 1 else ""
            said.append(f"{only_format(best)} everywhere {_at_bits(best)}{seeds}")
    family = _family_text(setting.key)
    known = [g for g in rounded if g.method.format in family.split("/")]
    if known:
        nearest = ", ".join(f"{g.method.format} {_at_bits(g)}" for g in known)
        said.append(f"to nearest, {nearest}")
    where = ", ".join(filter(None, (family, "fused units", "learned weights", setting.key.stage)))
    return f"{where}: {'; '.join(said)}."


def _at_bits(group: Group) -> str:
    return f"{_cell(mean_perplexity(group))} at {group.statistic('bits_per_element').mean:.3g}"


def _rounded(tables: Tables, place: tuple[str, str]) -> list[Group]:
    """One format everywhere, weights and inputs, and nothing else done."""
    plain = Method(search="uniform", quantized="W+A")
    return [
        group
        for table, groups in tables.items()
        if (table.model, table.text) == place
        for group in groups
        if group.method.kind == plain.kind and group.method.is_uniform
    ]


def _is(group: Group, method: Method) -> bool:
    """Whether it is that search with no setting of its own."""
    names = ("search", "polish", "path", "settings")
    return all(getattr(group.method, name) == getattr(method, name) for name in names)


def _cell(perplexity: float | None) -> str:
    return "" if perplexity is None else f"{perplexity:.{1 if perplexity >= 100 else 2}f}"
