"""How runtimes run what they load, by card: what reports, and cards and warnings of exports say beside who loads it.

A file's formats are not always what runs: vLLM decides by card whether it quantizes inputs, whatever the
folder says. Read in its source (order of kernels by compute capability); `RAN` is what ran so.
"""

from collections.abc import Iterable, Mapping

from dmx.assignment.targets import TARGETS
from dmx.formats import BLOCK_FORMATS, MX_FORMATS

WEIGHTS_ALONE = "weights alone"
NATIVE = "native"
NATIVE_INPUTS = "native, inputs quantized always"
INPUTS_IN_FP8 = "inputs in fp8 always (weights alone before 0.32, and by Marlin)"
"""Humming's choice for MXFP4 weights beside inputs of four bits, which Hopper's products do not take."""
BY_HUMMING = "weights alone, by Humming"
EMULATED = "emulated"
"""Dequantized, then multiplied."""
NOT_LOADED = "-"

SOURCE = "vLLM 0.32"
"""In whose source the table below was read."""
RAN = "compressed_tensors and humming ran on an H200 with vLLM 0.26, all with weights alone but for fp8 with inputs=true; nothing else on a card"
"""Which of it was seen on a card; every number: docs/results/engines.md."""
CARDS = ("Hopper", "Blackwell")
_AS_ASKED = "native with inputs=true, else weights alone"
_VLLM_MXFP4 = {"Hopper": INPUTS_IN_FP8, "Blackwell": NATIVE_INPUTS}
_QUARK_MXFP4 = {
    "Hopper": "weights alone, with inputs=true those in fp8 (left alone before 0.32)",
    "Blackwell": _AS_ASKED,
}
_VLLM_MXFP8 = {"Hopper": WEIGHTS_ALONE, "Blackwell": NATIVE_INPUTS}
_VLLM_NVFP4 = {"Hopper": WEIGHTS_ALONE, "Blackwell": _AS_ASKED}
_EVERYWHERE = dict.fromkeys(CARDS, NATIVE)
_SIX_BITS = dict.fromkeys(CARDS, BY_HUMMING)

_WITH = " with inputs in "


def kind_of(weight: str, of_input: str | None = None) -> str:
    """What layers are told apart by: the weight's format, and the input's where the files ask for another.

    Args:
        of_input: None, or bf16: left alone.
    """
    if of_input in (None, weight, "bf16"):
        return weight
    return f"{weight}{_WITH}{of_input}"


def kinds_of(pairs: Iterable[tuple[str, str | None]]) -> list[str]:
    """Kinds of layers of these formats of weight and input, each once, the cheapest weights first; none in bf16."""
    order = {f: i for i, f in enumerate(BLOCK_FORMATS)}
    found = {kind_of(*pair): order[pair[0]] for pair in pairs if pair[0] in order}
    return sorted(found, key=lambda kind: (found[kind], kind))


W4A8 = kind_of("mxfp4", "fp8")
_VLLM_W4A8 = {
    "Hopper": "native, from 0.32, else weights alone",
    "Blackwell": "native but slow, from 0.32, else inputs in mxfp4",
}
"""By Humming, whose FP8 products vLLM calls slow on data-center Blackwell."""

_VLLM = {
    "mxfp4": _VLLM_MXFP4,
    W4A8: _VLLM_W4A8,
    "mxfp8_e4m3": _VLLM_MXFP8,
    "nvfp4": _VLLM_NVFP4,
    "fp8": dict.fromkeys(CARDS, _AS_ASKED),
}
_VLLM_QUARK = {
    "mxfp4": _QUARK_MXFP4,
    "mxfp8_e4m3": _VLLM_MXFP8,
    **dict.fromkeys(("mxfp6_e2m3", "mxfp6_e3m2"), _SIX_BITS),
    **{kind_of("mxfp4", f): _SIX_BITS for f in ("mxfp6_e2m3", "mxfp6_e3m2")},
}
_HUMMING_FP8 = {"Hopper": "native, from 0.32", "Blackwell": "native but slow, from 0.32"}
_HUMMING = {f.name: dict.fromkeys(CARDS, WEIGHTS_ALONE) for f in MX_FORMATS}
_HUMMING |= {kind_of(f.name, "fp8"): _HUMMING_FP8 for f in MX_FORMATS}
_MODELOPT = {"nvfp4": _VLLM_NVFP4, "fp8": _EVERYWHERE}

HOW_IT_RUNS: dict[tuple[str, str], dict[str, dict[str, str]]] = {
    ("compressed_tensors, profile vllm", "vLLM"): _VLLM,
    ("quark", "vLLM"): _VLLM_QUARK,
    ("humming", "vLLM"): _HUMMING,
    ("modelopt_checkpoint", "vLLM"): _MODELOPT,
}
"""target and loader -> kind of layer (`kind_of`) -> card -> words. Loaders that are not here are `EMULATED`."""
LEFT_ALONE, IN_FP8 = "left alone", "in fp8"
_INPUTS = {
    WEIGHTS_ALONE: LEFT_ALONE,
    BY_HUMMING: LEFT_ALONE,
    INPUTS_IN_FP8: IN_FP8,
    _QUARK_MXFP4["Hopper"]: IN_FP8,
}
"""Words -> what becomes of inputs that the files ask for in the weight's format, where that is something else."""


def how_it_runs(target: str, loader: str, card: str, kinds: Iterable[str]) -> dict[str, str]:
    """kind of layer -> how a loader runs it on a card; `NOT_LOADED` where it does not load it.

    Args:
        target: of `dmx.assignment.targets.TARGETS`. card: of CARDS. kinds: as `kind_of` names them.
    """
    known = HOW_IT_RUNS.get((target, loader))
    read = {f for one in TARGETS[target].loaders if one.name == loader for f in one.formats}
    found = {}
    for kind in kinds:
        if known is not None and kind in known:
            found[kind] = known[kind][card]
        elif kind != "bf16":
            is_read = known is None and kind.partition(_WITH)[0] in read
            found[kind] = EMULATED if is_read else NOT_LOADED
    return found


def inputs_otherwise(
    target: str, loader: str, formats: Iterable[str]
) -> dict[str, dict[str, list[str]]]:
    """card -> words -> the formats of weights whose inputs a loader leaves alone there, or quantizes to another format,
    though the files ask for theirs; cards on which there are none have no entry."""
    found: dict[str, dict[str, list[str]]] = {}
    for card in CARDS:
        for f, word in how_it_runs(target, loader, card, formats).items():
            if word in _INPUTS:
                found.setdefault(card, {}).setdefault(_INPUTS[word], []).append(f)
    return found


def joined(words: Mapping[str, str]) -> str:
    """What is said of each format, formats of which the same is said together; in one word where it is said of all."""
    alike: dict[str, list[str]] = {}
    for block_format, word in words.items():
        alike.setdefault(word, []).append(block_format)
    if len(alike) == 1:
        return next(iter(alike))
    return "; ".join(f"{', '.join(formats)}: {word}" for word, formats in alike.items())
