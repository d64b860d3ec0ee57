"""Other tools' mixed-precision configs as an Assignment, so that their results can be measured here.

Read are compressed-tensors and Quark (`quantization_config`), ModelOpt (`quantized_layers` of
hf_quant_config.json) and auto-round (`layer_config`, or `quantization_config` with
`extra_config`). Each says for a layer name which format it gets; a format that is not MX is an
error that names the layer, since leaving it out would measure something else.
"""

import fnmatch
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.facts import SearchFacts
from dmx.assignment.space import SearchSpace
from dmx.assignment.targets import split_groups
from dmx.errors import AssignmentError, DmxError, FormatError
from dmx.formats import BLOCK_SIZE, MXFP4, BlockFormat, get_block_format
from dmx.models.linears import linear_layers, own_elements

Chooser = Callable[[str], "BlockFormat | None"]
"""layer name -> format; None = not quantized"""

_QUARK = {
    "fp4": "mxfp4",
    "fp6_e2m3": "mxfp6_e2m3",
    "fp6_e3m2": "mxfp6_e3m2",
    "fp8_e4m3": "mxfp8_e4m3",
    "fp8_e5m2": "mxfp8_e5m2",
}
_COMPRESSED_TENSORS = {4: "mxfp4", 6: "mxfp6_e2m3", 8: "mxfp8_e4m3"}
_OTHER_COMPRESSED_TENSORS = {
    ("tensor_group", 16, 4): "nvfp4",
    ("channel", None, 8): "fp8",
}
"""Strategy, group size and bits -> format."""
_MODELOPT = {
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
    "MXFP6": "mxfp6_e3m2",
    "MXFP8": "mxfp8_e4m3",
}
_AUTO_ROUND = {
    "mx_fp4": "mxfp4",
    "mx_fp4e2m1": "mxfp4",
    "mx_fp6": "mxfp6_e2m3",
    "mx_fp6e2m3": "mxfp6_e2m3",
    "mx_fp6e3m2": "mxfp6_e3m2",
    "mx_fp8": "mxfp8_e4m3",
    "mx_fp8e4m3": "mxfp8_e4m3",
    "mx_fp8e5m2": "mxfp8_e5m2",
}


def read_assignment(source: str | Path | Mapping[str, Any], model: nn.Module) -> Assignment:
    """The assignment that another tool's config means for a model; the model may be on meta.

    Args:
        source: the config, its JSON file, or a folder with config.json or hf_quant_config.json.

    Raises:
        AssignmentError: not a config that is read here, or it names no layer of the model.
        FormatError: a layer has a format that is not an MX format of this project.
    """
    body = _read(source) if isinstance(source, str | Path) else dict(source)
    linears = linear_layers(model)
    try:
        tool, choose = _chooser(body)
        chosen = {name: choose(name) for name in linears}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, DmxError):
            raise
        raise AssignmentError(
            f"the config is damaged or of a version that is not read here ({error!r})."
        ) from error
    formats = {name: f for name, f in chosen.items() if f is not None}
    for name in formats:
        if linears[name].in_features % BLOCK_SIZE:
            raise FormatError(
                f"{tool} config: {name} has in_features={linears[name].in_features}, no multiple of "
                f"{BLOCK_SIZE}"
            )
    if not formats:
        raise AssignmentError(
            f"{tool} config: it quantizes none of the {len(linears)} linear layers of "
            f"{type(model).__name__}, for example {', '.join(list(linears)[:2])}. Give the model "
            "that it was made for."
        )
    names = {name: f.name for name, f in formats.items()}
    left = [name for name in linears if name not in formats]
    space = SearchSpace(
        units=(),
        formats=(MXFP4,),
        granularity="layer" if split_groups(names, left) else "fused",
        shapes={n: (linears[n].out_features, linears[n].in_features) for n in formats},
        fixed=formats,
        fixed_elements=own_elements(linears, formats),
        unquantized=tuple(left),
        model_elements=sum(p.numel() for p in model.parameters()),
    )
    return make_assignment(
        space, np.array([], dtype=np.int64), model, search=SearchFacts(name="imported", tool=tool)
    )


def _read(source: str | Path) -> dict[str, Any]:
    path = Path(source)
    if path.is_dir():
        files = [path / n for n in ("hf_quant_config.json", "config.json") if (path / n).is_file()]
        if not files:
            raise AssignmentError(f"{path} holds neither config.json nor hf_quant_config.json.")
        path = files[0]
    try:
        body: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AssignmentError(f"{path} cannot be read as JSON: {error}") from error
    return body


def _chooser(body: dict[str, Any]) -> tuple[str, Chooser]:
    body = body.get("quantization_config") or body.get("quantization") or body
    method = str(body.get("quant_method", "")).lower()
    if "config_groups" in body and method in ("", "compressed-tensors"):
        return "compressed-tensors", _compressed_tensors(body)
    if "layer_quant_config" in body:
        return "quark", _quark(body)
    if "quantized_layers" in body:
        return "modelopt", _modelopt(body)
    if "layer_config" in body or "extra_config" in body or method == "auto-round":
        layers = body.get("layer_config") or body.get("extra_config") or {}
        return "auto-round", _auto_round(layers, body)
    if body and all(isinstance(v, dict) and "bits" in v for v in body.values()):
        return "auto-round", _auto_round(body, {})
    raise AssignmentError(
        f"this is no config that is read here (keys {', '.join(list(body)[:6]) or 'none'}). Read "
        "are compressed-tensors, quark, ModelOpt (quantized_layers), auto-round (layer_config), and "
        "assignment.json of this project."
    )


def _refuse(tool: str, layer: str, what: object) -> FormatError:
    return FormatError(
        f"{tool} config: {layer} has {what}, which is no MX format of this project; its result "
        "cannot be measured here."
    )


def _compressed_tensors(body: Mapping[str, Any]) -> Chooser:
    def matches(name: str, target: str) -> bool:
        if target.startswith("re:"):
            return re.match(target[3:], name) is not None
        return target in (name, "Linear")

    def specificity(target: str) -> int:
        return 2 if target == "Linear" else 1 if target.startswith("re:") else 0

    targets = [
        (target, group["weights"])
        for group in body["config_groups"].values()
        for target in group["targets"]
    ]
    # The loader takes the most specific match: a whole name, then a pattern, then a class.
    targets.sort(key=lambda pair: specificity(pair[0]))

    def choose(name: str) -> BlockFormat | None:
        if any(matches(name, target) for target in body.get("ignore") or ()):
            return None
        weights = next((w for target, w in targets if matches(name, target)), None)
        if weights is None:
            return None
        is_float, bits = weights.get("type") == "float", weights.get("num_bits")
        is_mx = is_float and weights.get("group_size") == BLOCK_SIZE
        shape = (weights.get("strategy"), weights.get("group_size"), bits)
        if is_float and shape in _OTHER_COMPRESSED_TENSORS:
            return get_block_format(_OTHER_COMPRESSED_TENSORS[shape])
        if not is_mx or bits not in _COMPRESSED_TENSORS:
            shown = f"{weights.get('type')} {bits} bits, group {weights.get('group_size')}"
            raise _refuse("compressed-tensors", name, shown)
        return get_block_format(_COMPRESSED_TENSORS[bits])

    return choose


def _quark(body: Mapping[str, Any]) -> Chooser:
    by_type = body.get("layer_type_quant_config") or {}
    fallback = by_type.get("Linear") or body.get("global_quant_config") or {}

    def choose(name: str) -> BlockFormat | None:
        if any(fnmatch.fnmatch(name, pattern) for pattern in body.get("exclude") or ()):
            return None
        layers = body["layer_quant_config"] or {}
        config = next((c for p, c in layers.items() if fnmatch.fnmatch(name, p)), fallback)
        weight = config.get("weight")
        if isinstance(weight, list) and len(weight) == 1:
            weight = weight[0]
        if weight is None:
            return None
        is_group = weight.get("qscheme") == "per_group" and weight.get("group_size") == BLOCK_SIZE
        is_row = list(weight.get("block_size") or ()) == [1, BLOCK_SIZE]
        if not (is_group or is_row) or weight.get("dtype") not in _QUARK:
            raise _refuse("quark", name, f"{weight.get('dtype')} {weight.get('qscheme')}")
        return get_block_format(_QUARK[weight["dtype"]])

    return choose


def _modelopt(body: Mapping[str, Any]) -> Chooser:
    layers = body["quantized_layers"]

    def choose(name: str) -> BlockFormat | None:
        if any(fnmatch.fnmatch(name, p) for p in body.get("exclude_modules") or ()):
            return None
        config = layers.get(name)
        if config is None:
            return None
        algorithm = str(config.get("quant_algo")).upper()
        if algorithm not in _MODELOPT:
            raise _refuse("modelopt", name, algorithm)
        return get_block_format(_MODELOPT[algorithm])

    return choose


def _auto_round(layers: Mapping[str, Any], default: Mapping[str, Any]) -> Chooser:
    def choose(name: str) -> BlockFormat | None:
        own = layers.get(name)
        if own is None:
            own = next(
                (c for p, c in layers.items() if _is_pattern(p) and re.search(p, name)), None
            )
        if own is None and (not default.get("bits") or name.rpartition(".")[2] == "lm_head"):
            return None  # auto-round leaves lm_head alone unless it is named
        config = {**default, **(own or {})}
        bits, kind = int(config.get("bits", 16)), str(config.get("data_type", ""))
        if bits >= 16:
            return None
        key = f"{kind}{bits}" if kind == "mx_fp" else kind
        if key not in _AUTO_ROUND:
            raise _refuse("auto-round", name, f"{bits} bits of {kind or 'int'}")
        return get_block_format(_AUTO_ROUND[key])

    return choose


def _is_pattern(name: str) -> bool:
    return any(character in name for character in "*[]^$|+?\\")
