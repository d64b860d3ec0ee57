"""The file of an assignment: JSON, schema `dmx.assignment/2`, strictly checked on the way in.

Files of schema 1 are read, too: `upgraded` says them in the words of schema 2.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from dmx.assignment.budget import Budget
from dmx.assignment.facts import SearchFacts
from dmx.assignment.space import Units
from dmx.errors import AssignmentError, BudgetError, FormatError
from dmx.files import read_json
from dmx.formats import (
    BIT_UNITS,
    OPERANDS,
    Operand,
    ScaleRule,
    check_rule,
    get_block_format,
    get_format,
)
from dmx.models.experts import experts_path

ScaleRules = Mapping[Operand, Mapping[str, ScaleRule]]
"""operand -> format name -> rule"""

SCHEMA = "dmx.assignment/2"
FIRST_SCHEMA = "dmx.assignment/1"
FIELDS = (
    "model",
    "formats",
    "input_formats",
    "shapes",
    "unquantized",
    "units",
    "scale_rules",
    "transform",
    "weights",
    "bits",
    "budget",
    "search",
)
"""Keys beside `schema`, in the order of the file."""
_RANGES = ("input_amax", "weight_amax")
OPTIONAL_FIELDS = (*_RANGES, "experts", "expert_tokens")
"""Keys that stand there only where they say something, after the others."""
ArtifactKind = Literal["transform", "weights"]
ARTIFACTS: tuple[ArtifactKind, ...] = get_args(ArtifactKind)
"""Parts that may name a file beside this one."""

_OBJECT, _OPTIONAL = (dict, "an object"), ((dict, type(None)), "an object or null")
_KINDS: dict[str, tuple[Any, str]] = {
    "model": _OBJECT,
    "scale_rules": _OBJECT,
    "bits": _OBJECT,
    "search": _OBJECT,
    "budget": _OPTIONAL,
    "transform": _OPTIONAL,
    "weights": _OPTIONAL,
    "unquantized": (list, "a list"),
}


def read_body(path: Path) -> Any:
    """What the JSON file holds, unchecked.

    Raises:
        AssignmentError: it cannot be read, or is no JSON.
    """
    try:
        return read_json(path)
    except OSError as error:
        raise AssignmentError(
            f"assignment={path}: cannot be read ({error.strerror}). Give the path of an "
            "assignment.json that a search wrote."
        ) from error
    except ValueError as error:
        raise AssignmentError(
            f"assignment={path}: is no JSON file ({error}). It is damaged: search again, or "
            "copy it again from where it came."
        ) from error


def upgraded(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body of schema 1 as schema 2: its one scale rule for every format that it uses, `rounding`
    under the name `weights`, the search's `operands` as `choices`. What is missing stays so."""
    new = {**body, "schema": SCHEMA}
    if "rounding" in new:
        new["weights"] = new.pop("rounding")
    if "scale_rule" in new:
        rule = new.pop("scale_rule")
        new["scale_rules"] = {
            operand: dict.fromkeys(_used(new, operand), rule) for operand in OPERANDS
        }
    if isinstance(new.get("search"), dict) and "operands" in new["search"]:
        new["search"] = {("choices" if k == "operands" else k): v for k, v in new["search"].items()}
    return new


def _used(body: Mapping[str, Any], operand: Operand) -> list[str]:
    """Names of the formats that a body gives an operand, as far as it is sound."""
    inputs = body.get("input_formats") if operand == "input" else None
    formats = inputs or body.get("formats")
    names = formats.values() if isinstance(formats, dict) else ()
    return list(dict.fromkeys(n for n in names if isinstance(n, str) and n != "bf16"))


def used_rules(
    stated: ScaleRules | ScaleRule, formats: Mapping[str, str], inputs: Mapping[str, str] | None
) -> dict[Operand, dict[str, ScaleRule]]:
    """operand -> format -> scale rule of the formats that are used, their usual one where nothing is said.

    Args:
        stated: rules of some formats, or one rule for all that have it.
        formats, inputs: those of the assignment.

    Raises:
        FormatError: a rule that there is not, or not for that operand.
    """
    rules: dict[Operand, dict[str, ScaleRule]] = {}
    for operand in OPERANDS:
        used = [
            get_block_format(name)
            for name in _used({"formats": formats, "input_formats": inputs}, operand)
        ]
        if isinstance(stated, str):
            for f in used[:1]:
                check_rule(stated, operand, f"scale_rules.{operand}.{f}")
            known = {f.name: stated for f in used if stated in f.rules}
        else:
            known = dict(stated.get(operand, {}))
        rules[operand] = {f.name: known.get(f.name, f.usual_rule(operand)) for f in used}
        for f in used:
            check_rule(rules[operand][f.name], operand, f"scale_rules.{operand}.{f}", f)
    return rules


def parse(body: Any, source: str) -> dict[str, Any]:
    """The arguments of an Assignment from the body of its file.

    Args:
        source: where the body came from, for messages.

    Raises:
        AssignmentError: of another schema, damaged, or edited; says where.
    """
    schema = body.get("schema") if isinstance(body, dict) else type(body).__name__
    if schema == FIRST_SCHEMA:
        body = upgraded(body)
    elif schema != SCHEMA:
        raise AssignmentError(
            f"{source}: schema {schema!r}, expected {SCHEMA!r} (or {FIRST_SCHEMA!r}). Only files of "
            "this project's searches are read here."
        )
    try:
        _check_keys(body)
        _check_layers(body["formats"], body["shapes"], body["input_formats"])
        _check_parts(body)
        return _arguments(body, source)
    except FormatError as error:
        raise AssignmentError(str(error)) from error
    except BudgetError as error:
        raise AssignmentError(f"{source}: {error}") from error
    except ValueError as error:
        raise AssignmentError(
            f"{source}: {error}. The file is damaged or edited; search again, or copy it again."
        ) from error


# Each of the checks raises ValueError (FormatError and BudgetError are such) with what is wrong.


def _check_keys(body: Mapping[str, Any]) -> None:
    missing = [k for k in FIELDS if k not in body]
    unknown = sorted(set(body) - {*FIELDS, *OPTIONAL_FIELDS, "schema"})
    if missing or unknown:
        raise ValueError(f"missing keys {missing}, unknown keys {unknown}")


def _check_layers(formats: Any, shapes: Any, inputs: Any) -> None:
    if not isinstance(formats, dict) or not formats or not isinstance(shapes, dict):
        raise ValueError("formats and shapes must be non-empty objects")
    if set(formats) != set(shapes):
        other = sorted(set(formats) ^ set(shapes))[:3]
        raise ValueError(f"formats and shapes name other layers: {other}")
    if inputs is not None and (not isinstance(inputs, dict) or set(inputs) != set(formats)):
        raise ValueError("input_formats must be null or name the layers of formats")
    for layer, shape in shapes.items():
        valid = isinstance(shape, list) and len(shape) == 2
        if not valid or not all(type(n) is int and n > 0 for n in shape):
            raise ValueError(f"shape of {layer} is {shape!r}, expected [out_features, in_features]")
    for layer, name in [*formats.items(), *(inputs or {}).items()]:
        if not isinstance(name, str):
            raise ValueError(f"format of {layer} is {name!r}, expected a name")


def _check_parts(body: Mapping[str, Any]) -> None:
    """All that is beside the layers, but for what is made of it: rules and search."""
    for key, (kinds, expected) in _KINDS.items():
        if not isinstance(body[key], kinds):
            raise ValueError(f"{key} is {body[key]!r}, expected {expected}")
    for kind in ARTIFACTS:
        if body[kind] is not None and (why := _malformed(body[kind])):
            raise ValueError(f"{kind} is {body[kind]!r}: {why}")
    for key in _RANGES:
        if (amax := body.get(key)) is not None:
            named = isinstance(amax, dict) and set(amax) <= set(body["formats"])
            if not named or not all(
                type(v) in (int, float) and 0 <= v < 1e39 for v in amax.values()
            ):
                raise ValueError(f"{key} must be null or give layers of formats a number >= 0")
    _check_experts(body)
    left = body["unquantized"]
    if not all(isinstance(layer, str) for layer in left):
        raise ValueError("unquantized must hold layer names")
    if len(set(left)) < len(left):
        raise ValueError(f"unquantized names {next(k for k in left if left.count(k) > 1)} twice")
    if both := sorted(set(left) & set(body["formats"])):
        raise ValueError(f"{both[0]} stands both in formats and in unquantized")
    if body["units"] not in get_args(Units):
        raise ValueError(f"units {body['units']!r}, allowed: {', '.join(get_args(Units))}")
    if (budget := body["budget"]) is not None:
        if set(budget) != {"limit", "unit"}:
            raise ValueError(f"budget has the keys {sorted(budget)}, expected limit and unit")
        try:
            Budget(**budget)
        except FormatError as error:  # of its unit; says no file, as those of formats do
            raise BudgetError(str(error)) from error
    for unit in (*BIT_UNITS, "whole_model_bits_per_element"):
        stated = body["bits"].get(unit)
        # A whole model may take more than 16: a tied head that is quantized leaves its table behind.
        most = 16 if unit in BIT_UNITS else 64
        if type(stated) not in (int, float) or not 0 < stated <= most:
            raise ValueError(f"bits.{unit} is {stated!r}")


def _check_experts(body: Mapping[str, Any]) -> None:
    tokens = body.get("expert_tokens")
    if tokens is not None and not (
        isinstance(tokens, dict)
        and all(isinstance(counts, list) for counts in tokens.values())
        and all(type(n) is int and n >= 0 for counts in tokens.values() for n in counts)
    ):
        raise ValueError("expert_tokens must be null or give experts a list of counts >= 0")
    if (experts := body.get("experts")) is None:
        return
    shapes = body["shapes"]
    if not isinstance(experts, dict) or not set(experts) <= {*shapes, *body["unquantized"]}:
        raise ValueError("experts must be null or give layers the number of their experts")
    for layer, count in experts.items():
        rows = shapes.get(layer, [0])[0]
        if type(count) is not int or count < 1 or rows % count or experts_path(layer) is None:
            raise ValueError(
                f"experts of {layer} is {count!r}, expected a divisor of its {rows} rows, and a name as "
                "model.layers.0.mlp.experts.down_proj"
            )


def _arguments(body: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Of an Assignment, from a body that was checked; `source` names the setting of formats."""
    inputs = body["input_formats"]
    formats = {k: get_format(v, setting=f"{source}: {k}").name for k, v in body["formats"].items()}
    if inputs is not None:
        inputs = {k: get_format(v, setting=f"{source}: {k}").name for k, v in inputs.items()}
    rules = _parse_rules(body["scale_rules"], source)
    return {key: body[key] for key in FIELDS} | {
        "formats": formats,
        "input_formats": inputs,
        "shapes": {k: (v[0], v[1]) for k, v in body["shapes"].items()},
        "unquantized": tuple(body["unquantized"]),
        "scale_rules": used_rules(rules, formats, inputs),
        "search": SearchFacts.from_dict(body["search"]),
        **{key: body.get(key) for key in OPTIONAL_FIELDS},
    }


def _parse_rules(body: Mapping[str, Any], source: str) -> ScaleRules:
    """Raises ValueError (FormatError is one) for other operands, formats or rules than there are."""
    if unknown := sorted(set(body) - set(OPERANDS)):
        raise ValueError(f"scale_rules has unknown keys {unknown}, allowed: {', '.join(OPERANDS)}")
    rules: dict[Operand, dict[str, ScaleRule]] = {}
    for operand in OPERANDS:
        by_format = body.get(operand, {})
        if not isinstance(by_format, dict):
            raise ValueError(f"scale_rules.{operand} is {by_format!r}, expected an object")
        setting = f"{source}: scale_rules.{operand}"
        named = {name: get_block_format(name, setting=setting) for name in by_format}
        for name, rule in by_format.items():
            check_rule(rule, operand, f"{setting}.{name}", named[name])
        rules[operand] = {named[name].name: rule for name, rule in by_format.items()}
    return rules


def _malformed(named: Mapping[str, Any]) -> str:
    """What is wrong with a transform or weights object; empty when nothing is."""
    if not isinstance(named.get("name"), str):
        return "it has no name"
    if "file" not in named and "sha256" not in named:
        return ""
    file, digest = named.get("file"), named.get("sha256")
    if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
        return "file must name a file beside the assignment"
    if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
        return "sha256 must be 64 hexadecimal digits"
    return ""
