"""How runtimes run what they load, by card: what reports, and cards and warnings of exports say beside who loads it.

A file's formats are not always what runs: vLLM decides by card whether it quantizes inputs, whatever the
folder says. Read in its source (order of kernels by compute capability); `RAN` is what ran so.
"""

from collections.abc import Iterable, Mapping

from dmx.assignment.targets import TARGETS

WEIGHTS_ALONE = "weights alone"
NATIVE = "native"
NATIVE_INPUTS = "native, inputs quantized always"
BY_HUMMING = "by Humming where it is installed, else emulated and slow"
EMULATED = "emulated"
"""Dequantized, then multiplied."""
NOT_LOADED = "-"

SOURCE = "vLLM 0.32"
"""In whose source the table below was read."""
RAN = "compressed_tensors and humming ran so on an H200 with vLLM 0.26, nothing else on a card"
"""Which of it was seen on a card; every number: docs/results/engines.md."""
CARDS = ("Hopper", "Blackwell")
_VLLM_MX = {"Hopper": WEIGHTS_ALONE, "Blackwell": NATIVE_INPUTS}
_AS_ASKED = "native with inputs=true, else weights alone"
_VLLM_NVFP4 = {"Hopper": WEIGHTS_ALONE, "Blackwell": _AS_ASKED}
_EVERYWHERE = dict.fromkeys(CARDS, NATIVE)
_SIX_BITS = dict.fromkeys(CARDS, BY_HUMMING)

_VLLM_TWO = {"mxfp4": _VLLM_MX, "mxfp8_e4m3": _VLLM_MX}
_VLLM = {**_VLLM_TWO, "nvfp4": _VLLM_NVFP4, "fp8": dict.fromkeys(CARDS, _AS_ASKED)}
_VLLM_QUARK = {**_VLLM_TWO, "mxfp6_e2m3": _SIX_BITS, "mxfp6_e3m2": _SIX_BITS}
_HUMMING = {f: dict.fromkeys(CARDS, WEIGHTS_ALONE) for f in (*_VLLM_QUARK, "mxfp8_e5m2")}
_MODELOPT = {"nvfp4": _VLLM_NVFP4, "fp8": _EVERYWHERE}

HOW_IT_RUNS: dict[tuple[str, str], dict[str, dict[str, str]]] = {
    ("compressed_tensors, profile vllm", "vLLM"): _VLLM,
    ("quark", "vLLM"): _VLLM_QUARK,
    ("humming", "vLLM"): _HUMMING,
    ("modelopt_checkpoint", "vLLM"): _MODELOPT,
}
"""target and loader -> format -> card -> words. Loaders that are not here are `EMULATED`."""


def how_it_runs(target: str, loader: str, card: str, formats: Iterable[str]) -> dict[str, str]:
    """format -> how a loader runs a layer of it on a card; `NOT_LOADED` where it does not load it.

    Args:
        target: of `dmx.assignment.targets.TARGETS`. card: of CARDS.
    """
    known = HOW_IT_RUNS.get((target, loader))
    read = {f for one in TARGETS[target].loaders if one.name == loader for f in one.formats}
    if known is None:
        known = {f: dict.fromkeys(CARDS, EMULATED) for f in read}
    return {f: known[f][card] if f in known else NOT_LOADED for f in formats if f != "bf16"}


def inputs_left_alone(target: str, loader: str, formats: Iterable[str]) -> dict[str, list[str]]:
    """card -> the formats of weights whose inputs a loader leaves alone there though the files ask for quantized ones;
    cards on which it leaves none have no entry."""
    left = {
        card: [
            f
            for f, word in how_it_runs(target, loader, card, formats).items()
            if word == WEIGHTS_ALONE
        ]
        for card in CARDS
    }
    return {card: those for card, those in left.items() if those}


def joined(words: Mapping[str, str]) -> str:
    """What is said of each format, formats of which the same is said together; in one word where it is said of all."""
    alike: dict[str, list[str]] = {}
    for block_format, word in words.items():
        alike.setdefault(word, []).append(block_format)
    if len(alike) == 1:
        return next(iter(alike))
    return "; ".join(f"{', '.join(formats)}: {word}" for word, formats in alike.items())
