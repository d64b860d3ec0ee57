"""Other tools' mixed-precision configs as an Assignment, so that their results can be measured here.

Read are compressed-tensors, Quark and humming (`quantization_config`), ModelOpt (`quantized_layers` of
hf_quant_config.json) and auto-round (`layer_config`, or `quantization_config` with
`extra_config`). Each says for a layer name which format it gets; a format that this project does not have
is an error that names the layer, since leaving it out would measure something else.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.facts import SearchFacts
from dmx.assignment.space import SearchSpace
from dmx.assignment.targets import split_groups
from dmx.errors import AssignmentError, DmxError, FormatError
from dmx.exporting import humming
from dmx.exporting.names import config_names
from dmx.files import read_json
from dmx.formats import BLOCK_SIZE, MXFP4, BlockFormat, get_block_format
from dmx.models.linears import MERGED_LAYERS, linear_layers, own_elements

Chooser = Callable[[str], "BlockFormat | None"]
"""layer name -> format; None = not quantized"""
Names = tuple[str, ...]
"""Of the linear layers of a model."""
Named = Mapping[str, frozenset[str]]
"""Names and patterns that a config gives formats to -> the layers that are meant."""

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
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "FP8": "fp8",
}
_HUMMING = {dtype: block_format for block_format, dtype in humming.DTYPES.items()}
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
        FormatError: a layer has a format that this project does not have.
    """
    body = _read(source) if isinstance(source, str | Path) else dict(source)
    linears = linear_layers(model)
    try:
        in_files = config_names(model, body)
        tool, choose, named = _chooser(body, tuple(map(in_files, linears)))
        chosen = {name: choose(in_files(name)) for name in linears}
    except DmxError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
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
    lost = next((text for text, meant in named.items() if not meant), None)
    if lost is not None:
        raise AssignmentError(
            f"{tool} config: {lost!r} gives a format to no linear layer of {type(model).__name__}, which has "
            f"for example {', '.join(list(linears)[:2])}: it is for another model, or names layers as a "
            "runtime does that is not known here. Name them as the model does."
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
        body = read_json(path)
    except (OSError, ValueError) as error:
        raise AssignmentError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(body, dict):
        raise AssignmentError(f"{path} holds no JSON object.")
    return body


def _chooser(body: dict[str, Any], names: Names) -> tuple[str, Chooser, Named]:
    body = body.get("quantization_config") or body.get("quantization") or body
    method = str(body.get("quant_method", "")).lower()
    if "config_groups" in body and method in ("", "compressed-tensors"):
        return "compressed-tensors", *_compressed_tensors(body, names)
    if method == "humming":
        return "humming", *_humming(body, names)
    if "layer_quant_config" in body:
        return "quark", *_quark(body, names)
    if "quantized_layers" in body:
        return "modelopt", *_modelopt(body, names)
    if "layer_config" in body or "extra_config" in body or method == "auto-round":
        layers = body.get("layer_config") or body.get("extra_config") or {}
        return "auto-round", *_auto_round(layers, body, names)
    if body and all(isinstance(v, dict) and "bits" in v for v in body.values()):
        return "auto-round", *_auto_round(body, {}, names)
    raise AssignmentError(
        f"this is no config that is read here (keys {', '.join(list(body)[:6]) or 'none'}). Read "
        "are compressed-tensors, quark, humming, ModelOpt (quantized_layers), auto-round (layer_config), and "
        "assignment.json of this project."
    )


def _refuse(tool: str, layer: str, what: object) -> FormatError:
    return FormatError(
        f"{tool} config: {layer} has {what}, which is no format of this project; its result "
        "cannot be measured here."
    )


def _meant(test: Callable[[str], object], names: Names) -> frozenset[str]:
    """Layers whose names pass a test; where none does, those that a runtime merges into one that passes."""

    def merged(name: str) -> str:
        parent, _, last = name.rpartition(".")
        whole = next((whole for whole, parts in MERGED_LAYERS.items() if last in parts), last)
        return f"{parent}.{whole}".lstrip(".")

    own = frozenset(name for name in names if test(name))
    return own or frozenset(name for name in names if test(merged(name)))


def _any_of(layers: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*layers)


def _regex(pattern: str, tool: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise AssignmentError(
            f"{tool} config: {pattern!r} is no regular expression ({error}). Mend it: any name is .*, "
            "as in .*down_proj."
        ) from error


def _regex_or_name(target: str, names: Names, tool: str) -> frozenset[str]:
    """Layers that a whole name means, or `re:` and a pattern for the start of one."""
    if not target.startswith("re:"):
        return _meant(lambda name: name == target, names)
    return _meant(_regex(target[3:], tool).match, names)


def _glob(pattern: str, names: Names) -> frozenset[str]:
    """Layers that a pattern of a shell means, and those that lie in a module that it means."""
    patterns = (pattern, f"{pattern}.*")
    return _meant(lambda name: any(fnmatch.fnmatchcase(name, p) for p in patterns), names)


def _compressed_tensors(body: Mapping[str, Any], names: Names) -> tuple[Chooser, Named]:
    def meant(target: str) -> frozenset[str]:
        if target == "Linear":
            return frozenset(names)
        return _regex_or_name(target, names, "compressed-tensors")

    def specificity(target: str) -> int:
        return 2 if target == "Linear" else 1 if target.startswith("re:") else 0

    targets = [
        (target, group["weights"], meant(target))
        for group in body["config_groups"].values()
        for target in group["targets"]
    ]
    # The loader takes the most specific match: a whole name, then a pattern, then a class.
    targets.sort(key=lambda entry: specificity(entry[0]))
    ignored = _any_of(meant(target) for target in body.get("ignore") or ())

    def choose(name: str) -> BlockFormat | None:
        if name in ignored:
            return None
        weights = next((w for _, w, layers in targets if name in layers), None)
        if weights is None:
            return None
        is_float, bits = weights.get("type") == "float", weights.get("num_bits")
        is_mx = is_float and weights.get("group_size") == BLOCK_SIZE
        shape = (weights.get("strategy"), weights.get("group_size"), bits)
        if is_float and shape in _OTHER_COMPRESSED_TENSORS:
            return get_block_format(_OTHER_COMPRESSED_TENSORS[shape])
        scales = weights.get("scale_dtype")
        if not is_mx or bits not in _COMPRESSED_TENSORS or scales not in (None, "torch.uint8"):
            shown = f"{weights.get('type')} {bits} bits, group {weights.get('group_size')}"
            raise _refuse("compressed-tensors", name, f"{shown}, scales {scales or 'unsaid'}")
        return get_block_format(_COMPRESSED_TENSORS[bits])

    return choose, {target: layers for target, weights, layers in targets if weights}


def _quark(body: Mapping[str, Any], names: Names) -> tuple[Chooser, Named]:
    by_type = body.get("layer_type_quant_config") or {}
    fallback = by_type.get("Linear") or body.get("global_quant_config") or {}
    # Quark's own exclude are patterns of a shell; a runtime also reads re: and a regular expression.
    excluded = _any_of(
        _regex_or_name(p, names, "quark") if p.startswith("re:") else _glob(p, names)
        for p in body.get("exclude") or ()
    )
    own = [(p, c, _glob(p, names)) for p, c in (body["layer_quant_config"] or {}).items()]

    def choose(name: str) -> BlockFormat | None:
        if name in excluded:
            return None
        config = next((c for _, c, layers in own if name in layers), fallback)
        weight = config.get("weight")
        if isinstance(weight, list) and len(weight) == 1:
            weight = weight[0]
        if weight is None:
            return None
        is_group = weight.get("qscheme") == "per_group" and weight.get("group_size") == BLOCK_SIZE
        is_row = list(weight.get("block_size") or ()) == [1, BLOCK_SIZE]
        if not (is_group or is_row) or weight.get("dtype") not in _QUARK:
            shown = (
                f"{weight.get('dtype')} {weight.get('qscheme')}, group {weight.get('group_size')}"
            )
            raise _refuse("quark", name, shown)
        return get_block_format(_QUARK[weight["dtype"]])

    return choose, {p: layers for p, c, layers in own if c.get("weight")}


def _humming(body: Mapping[str, Any], names: Names) -> tuple[Chooser, Named]:
    """Patterns are for the start of a name; the first that fits decides."""
    dynamic: Mapping[str, Any] = body.get("dynamic") or {}
    meant = {key: _meant(_regex(key[2:], "humming").match, names) for key in dynamic}
    left = _any_of(layers for key, layers in meant.items() if key[:1] == "-")
    short = {
        "b_dtype": ("weight_dtype", "dtype"),
        "bs_dtype": ("weight_scale_dtype", "scale_dtype"),
        "weight_scale_group_size": ("group_size",),
    }

    def value(config: Mapping[str, Any], key: str) -> Any:
        return next((config[k] for k in (key, *short[key]) if k in config), None)

    def choose(name: str) -> BlockFormat | None:
        if name in left or humming.HEAD in name:
            return None
        own = [c for key, c in dynamic.items() if key[:1] == "+" and name in meant[key]]
        config = {**body, **(own[0] if own else {})}
        dtype, scale, group = (value(config, key) for key in short)
        if dtype not in _HUMMING or scale != "float8e8m0" or group != BLOCK_SIZE:
            raise _refuse("humming", name, f"{dtype}, scales {scale}, group {group}")
        return _HUMMING[dtype]

    return choose, {key: layers for key, layers in meant.items() if key[:1] == "+"}


def _modelopt(body: Mapping[str, Any], names: Names) -> tuple[Chooser, Named]:
    layers: Mapping[str, Any] = body["quantized_layers"]
    left = body.get("exclude_modules") or body.get("ignore") or ()
    excluded = _any_of(_glob(p, names) for p in left)
    named = {key: _meant(key.__eq__, names) for key in layers}

    def choose(name: str) -> BlockFormat | None:
        if name in excluded:
            return None
        config = next((layers[key] for key, meant in named.items() if name in meant), None)
        if config is None:
            return None
        algorithm = str(config.get("quant_algo")).upper()
        known = _MODELOPT.get(algorithm)
        own = get_block_format(known).block_size if known else BLOCK_SIZE
        group = config.get("group_size") or own
        if known is None or group != own:
            raise _refuse("modelopt", name, f"{algorithm}, group {group}")
        return get_block_format(known)

    return choose, named


def _auto_round(
    layers: Mapping[str, Any], default: Mapping[str, Any], names: Names
) -> tuple[Chooser, Named]:
    """Keys that are no layer's name are searched for in names, as auto-round does."""
    stated = default.get("block_name_to_quantize") or default.get("to_quant_block_names") or ""
    blocks = tuple(stated.split(",") if isinstance(stated, str) else stated)
    left = [_regex(p, "auto-round") for p in default.get("modules_to_not_convert") or ()]
    patterns = {key: _regex(key, "auto-round") for key in layers}

    def of(name: str) -> Mapping[str, Any] | None:
        """What is said of a layer apart from the rest."""
        if name in layers:
            return layers[name]
        if any(p.search(name) for p in left):
            return {"bits": 16}
        return next((layers[k] for k, p in patterns.items() if p.search(name)), None)

    def choose(name: str) -> BlockFormat | None:
        own = of(name)
        is_outside = blocks and not name.startswith(blocks)
        # auto-round leaves lm_head alone unless it is named
        if own is None and (
            not default.get("bits") or is_outside or name.rpartition(".")[2] == "lm_head"
        ):
            return None
        config = {**default, **(own or {})}
        bits, kind = int(config.get("bits", 16)), str(config.get("data_type", ""))
        if bits >= 16:
            return None
        key = f"{kind}{bits}" if kind == "mx_fp" else kind
        group = config.get("group_size", BLOCK_SIZE)
        if key not in _AUTO_ROUND or group != BLOCK_SIZE:
            raise _refuse("auto-round", name, f"{bits} bits of {kind or 'int'}, group {group}")
        return get_block_format(_AUTO_ROUND[key])

    named = {
        key: frozenset({key} & set(names)) or frozenset(filter(patterns[key].search, names))
        for key, config in layers.items()
        if int({**default, **config}.get("bits", 16)) < 16
    }
    return choose, named
