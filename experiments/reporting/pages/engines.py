"""docs/results/engines.md: records of scripts/serve_check, exported folders in an inference engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..markdown import markdown
from .by_runtime import CPU, LEFT_ALONE, by_runtime, of_one_model

SCHEMA = "dmx.serve_check/1"
Run = Mapping[str, Any]
"""A record: one engine on one machine, a row a folder."""
OURS = "scripts.serve_check."
LAYERS = (
    "folder",
    "format",
    "layers",
    "scheme",
    "kernel",
    "inputs",
    "the file asks",
    "equal to the bit",
    "largest relative error",
    "error if inputs were left alone",
)
MODELS = (
    "folder",
    "difference",
    "effect",
    "perplexity in the engine",
    "perplexity in dmx",
)
SPEEDS = (
    "folder",
    "prefill",
    "of bf16's",
    "decode",
    "of bf16's",
    "decode, least and most of three",
)
MEMORY = ("folder", "weights, MB", "of bf16's", "peak, MB", "of bf16's")
BASELINE = "bf16"
"""What records say of the target of a model in full precision."""


def engines_page(runs: Mapping[str, Run]) -> str:
    """A section a record.

    Args:
        runs: name -> record.
    """
    lines = [
        "# engines",
        "",
        _said(list(runs.values())),
        "",
        "Each linear layer is judged alone: its output in the engine against dmx's module on the engine's own input. "
        "What the engine did with inputs is what fits its output best, of: left alone, as the file says, and in the "
        "weight's format by each scale rule. Formats take turns, so perplexities say nothing of quality. "
        "Which folder to make for which card: [runtimes](../runtimes.md). transformers merges no layers, and so has more.",
        "",
    ]
    lines += [*by_runtime(of_one_model(runs.values())), ""]
    for name, run in runs.items():
        lines += [f"## {name.replace('_', ' ')}", "", *_section(run), ""]
    return "\n".join(lines).rstrip() + "\n"


def _said(runs: Sequence[Run]) -> str:
    """What holds, on cards and on the CPU apart."""
    places: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run["device"] == CPU):
        places.setdefault("the CPU" if run["device"] == CPU else "cards", []).extend(run["rows"])
    return " ".join(_said_of(place, rows) for place, rows in places.items())


def _said_of(place: str, rows: Sequence[Run]) -> str:
    groups = [group for row in rows if "failed" not in row for group in row["groups"]]
    counts = {key: sum(g[key] for g in groups) for key in ("layers", "within", "equal")}
    failed = sum("failed" in row for row in rows)
    broken = f", {failed} of which do not load here" if failed else ""
    return (
        f"On {place}, of {len(rows)} folders{broken}: {counts['within']} of {counts['layers']} linear layers give "
        f"dmx's output within the tolerance, {counts['equal']} of them bit for bit."
    )


def _section(run: Run) -> list[str]:
    good = [row for row in run["rows"] if "failed" not in row]
    bad = [row for row in run["rows"] if "failed" in row]
    lines = [*_where(run, good), ""]
    lines += markdown(LAYERS, (_layer(row, group) for row in good for group in row["groups"]))
    if beyond := [
        _beyond(row, g) for row in good for g in row["groups"] if g["within"] < g["layers"]
    ]:
        lines += ["", *beyond]
    text = f"{run['tokens']:,} tokens of {run['text'] or 'drawn bytes'}"
    lines += [
        "",
        f"The whole model, {text}, log-probabilities of each token, mean absolute difference: of the engine from dmx "
        "with inputs as the engine has them; and, as the effect of quantization, of the engine from itself in full "
        "precision. Nats. With quantized inputs a rounding that turns goes on through all layers, so the layers decide.",
        "",
        *markdown(MODELS, map(_model, good)),
    ]
    timed = [row for row in good if row["speed"]]
    baseline = next((row for row in good if row.get("target") == BASELINE), None)
    if timed:
        cells = (_speed(row, baseline) for row in good)
        lines += ["", *_speeds(timed), "", *markdown(SPEEDS, cells)]
    if timed or (run["device"] != CPU and any(row["weight_bytes"] for row in good)):
        cells = (_memory(row, baseline) for row in good)
        lines += ["", _memory_said(bool(timed)), "", *markdown(MEMORY, cells)]
    if bad:
        lines += ["", *(f"- {row['folder']} does not load: {row['failed']}" for row in bad)]
    return lines


def _beyond(row: Run, group: Run) -> str:
    """Layers of a group that are not within the tolerance."""
    return (
        f"- {row['folder']}, {group['formats']}: {group['layers'] - group['within']} of {group['layers']} layers beyond the "
        f"tolerance of {row['tolerance']:.2g}, by most {group['worst']}."
    )


def _where(run: Run, rows: Sequence[Run]) -> list[str]:
    """What ran on what."""
    first = rows[0] if rows else {}
    versions = ", ".join(f"{k} {v}" for k, v in sorted(first.get("versions", {}).items()))
    kernels = {g["kernel"] for row in rows for g in row["groups"]}
    tolerances = sorted({row["tolerance"] for row in rows})
    stand_ins = sorted(k for k in kernels if k.startswith(OURS) or k.startswith("Emulation"))
    lines = [
        f"- {run['note'] or 'no note'}; {versions}; {first.get('dtype')}; {first.get('device')}"
        + (f" ({run['processor']})" if first.get("device") == CPU else "")
        + f"; tolerance of a layer {' or, where inputs are rotated, '.join(f'{t:.2g}' for t in tolerances)}."
    ]
    if first.get("device") == CPU and stand_ins:
        lines.append(
            "- vLLM's CPU build has no inner products for MX and NVFP4, and none for FP8 weights alone. Loader, names, "
            "fused layers, schemes and the forward pass are vLLM's; the inner products are ours "
            f"({OURS}*) or vLLM's emulation (Emulation*): {', '.join(stand_ins)}."
        )
    return lines


def _layer(row: Run, group: Run) -> list[Any]:
    return [
        row["folder"],
        group["formats"],
        group["layers"],
        group["scheme"],
        group["kernel"],
        group["inputs"],
        "the same" if group["asked_inputs"] == group["inputs"] else group["asked_inputs"],
        group["equal"],
        f"{group['error']:.2g}",
        "" if group["inputs"] == LEFT_ALONE else f"{group['least_error_left_alone']:.2g}",
    ]


def _model(row: Run) -> list[Any]:
    effect = row["effect"]
    return [
        row["folder"],
        f"{row['difference']:.2g}",
        "" if effect is None else f"{effect:.2g}",
        f"{row['perplexity']:.4f}",
        f"{row['perplexity_dmx']:.4f}",
    ]


def _speeds(rows: Sequence[Run]) -> list[str]:
    speed = rows[0]["speed"]
    lines = [
        f"Tokens per second: {speed['prompts']} prompts of {speed['prompt']} tokens at once, and {speed['new']} tokens "
        "after each; median of three. Decoding's seconds are those of both less those of the prompts."
    ]
    if rows[0]["device"] == CPU:
        lines[0] += (
            " On the CPU the stand-ins keep decoded weights, so this shows that folders run, and nothing of what "
            "formats gain."
        )
    return lines


def _speed(row: Run, baseline: Run | None) -> list[Any]:
    """Of a folder, timed or not, and of the one in full precision, of the same record."""
    speed = row["speed"]
    if not speed:
        return [row["folder"], "not timed", "", "not timed", "", ""]
    beside = (baseline or {}).get("speed") or {}
    prefill, decode = (f"{stage}_tokens_per_second" for stage in ("prefill", "decode"))
    made = speed["prompts"] * (speed["new"] - 1)  # the first of each comes with its prompt
    each = sorted(made / seconds for seconds in speed["decode_seconds"])
    return [
        row["folder"],
        f"{speed[prefill]:,.0f}",
        _share(speed[prefill], beside.get(prefill)),
        f"{speed[decode]:,.0f}",
        _share(speed[decode], beside.get(decode)),
        f"{each[0]:,.0f} to {each[-1]:,.0f}",
    ]


def _memory_said(timed: bool) -> str:
    apart = " Speeds on a card are of another process." if timed else ""
    return (
        "Bytes of the process whose layers were read: of the weights, and the most at once, including the cache of "
        f"keys and values, whose size the engine's options set.{apart}"
    )


def _memory(row: Run, baseline: Run | None) -> list[Any]:
    weights, peak = row["weight_bytes"], _peak(row)
    of_weights = None if baseline is None else baseline["weight_bytes"]
    return [
        row["folder"],
        "" if weights is None else f"{weights / 1e6:,.1f}",
        "" if weights is None else _share(weights, of_weights),
        f"{peak / 1e6:,.0f}",
        _share(peak, None if baseline is None else _peak(baseline)),
    ]


def _peak(row: Run) -> int:
    found: int = row["peak_bytes"].get("card", row["peak_bytes"]["process"])
    return found


def _share(value: float, whole: float | None) -> str:
    """Empty where there is nothing beside it."""
    return f"{value / whole:.2f}" if whole else ""
