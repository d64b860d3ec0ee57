"""Which runtime holds which formats: the one table that reports, searches and exports read.

A *target* is a file layout, a *loader* is a program that reads it. A layer in BF16 is simply left
out of the quantization of any target, so `bf16` is no format that a target must hold.

vLLM runs q/k/v and gate/up as one matrix product each, so every layer of such a group needs one
format; and all experts of a block as one layer, which needs one format for all their projections.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dmx.formats import BLOCK_FORMATS, ScaleRule
from dmx.models.experts import experts_path
from dmx.models.linears import fused_group

_VLLM_FORMATS = frozenset({"mxfp4", "mxfp8_e4m3"})
_TRANSFORMERS_FORMATS = _VLLM_FORMATS | {"mxfp6_e2m3"}
_QUARK_FORMATS = _TRANSFORMERS_FORMATS | {"mxfp6_e3m2"}
_ALL_FORMATS = _QUARK_FORMATS | {"mxfp8_e5m2"}
_CT_VLLM = _VLLM_FORMATS | {"fp8", "nvfp4"}
_CT_TRANSFORMERS = _TRANSFORMERS_FORMATS | _CT_VLLM
COMPRESSED_TENSORS_INPUTS = _CT_VLLM
"""What compressed-tensors quantizes inputs to, whatever their weights are in."""
COMPRESSED_TENSORS_INPUT_RULES: Mapping[str, tuple[ScaleRule, ...]] = {
    "mxfp4": ("even",),
    "mxfp8_e4m3": ("rceil",),
}
"""By which compressed-tensors scales inputs, whatever an assignment has: it rounds amax to one mantissa bit for both
formats. MXFP8's is `rceil` but for an amax of 448 times a power of two, which goes up."""
_VLLM_INPUT_RULES: Mapping[str, tuple[ScaleRule, ...]] = {
    "mxfp4": ("even", "rceil"),
    "mxfp8_e4m3": ("rceil",),
}
"""MXFP4's `even` is that of vLLM's emulation, which ran; FlashInfer, on Blackwell, rounds amax / largest value up for
both formats (read), and nothing else there quantizes inputs to MXFP8."""
_MODELOPT_FORMATS = frozenset({"nvfp4", "fp8"})
_DMX_FORMATS = frozenset(BLOCK_FORMATS)

VLLM_ARCHITECTURES = frozenset(
    [
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "phi",
        "phi3",
        "phimoe",
        "falcon",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "granite",
        "granitemoe",
        "cohere",
        "cohere2",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "deepseek_v2",
        "deepseek_v3",
        "longcat_flash",
        "lfm2",
        "lfm2_moe",
        "internlm2",
        "exaone",
        "exaone4",
        "smollm3",
        "stablelm",
        "starcoder2",
        "opt",
        "gpt_neox",
        "gpt_oss",
        "llama4_text",
        "ernie4_5",
        "ernie4_5_moe",
        "seed_oss",
        "apertus",
        "arcee",
        "nemotron",
    ]
)
"""Values of model_type whose merged modules were read in vLLM 0.20 and 0.32: `FUSED_GROUPS` is all that it merges there."""
VLLM_UNQUANTIZED = (".gate", ".router", ".router.layer", ".shared_expert_gate", ".weights_proj")
"""Ends of names of layers that vLLM 0.20 builds with quant_config=None: routers, gates of shared experts, weights of
an indexer. A few of its models quantize their router; it is left alone there, too."""


VLLM_OWN_NAMES = frozenset({"mixtral"})
"""Values of model_type whose experts vLLM 0.32 reads under the names of the models' own files,
`block_sparse_moe.experts.7.w1`, and not under those that transformers 5 gives them, `mlp.experts.7.gate_proj`."""


@dataclass(frozen=True)
class Loader:
    """A program that reads a target's files."""

    name: str
    formats: frozenset[str]
    """Block formats that it can read from this target; may be fewer than the target holds."""
    requires: str
    """Versions that it was seen to work with."""
    needs_fused_units: bool = False
    shares_scales: bool = False
    """It has one global scale for the NVFP4 weights of a fused group, and one for their input."""
    per_tensor: bool = False
    """Its FP8 has one scale for a weight and one for its input, instead of one a row and a token."""
    rotates_inputs: bool = False
    """It rotates inputs at run time where the files ask for it."""
    own_inputs: bool = True
    """It quantizes inputs to the format of the weight where the files ask for it."""
    left_alone: frozenset[str] | None = None
    """The weights' formats whose inputs it can leave alone; None: all."""
    input_formats: frozenset[str] = frozenset()
    """Formats that it quantizes an input to beside a weight in another; empty: in none."""
    beside: frozenset[str] | None = None
    """The weights' formats that it does so beside; None: all."""
    input_rules: Mapping[str, tuple[ScaleRule, ...]] = field(default_factory=dict)
    """MX format -> scale rules by which it is known to quantize inputs: of several the one that ran first, the others on
    some cards. Empty: not known, or as the files say."""
    notes: tuple[str, ...] = ()
    """What else its users should know."""
    architectures: frozenset[str] | None = None
    """Values of model_type of which it is known which layers it merges; None: it merges none."""
    unquantized: tuple[str, ...] = ()
    """Ends of names of layers that it builds without quantization."""
    takes_experts: bool = True
    """It is known how its files hold quantized experts."""
    renamed: frozenset[str] = frozenset()
    """Values of model_type whose tensors it reads under other names than the files have."""

    def builds_unquantized(self, layer: str) -> bool:
        """Whether it has no place for a quantized weight of this layer."""
        return layer.endswith(self.unquantized)

    def takes(self, weight: str, of_input: str) -> bool:
        """Whether it runs an input in a format beside a weight in one; bf16 is left alone."""
        if of_input == "bf16":
            return self.left_alone is None or weight in self.left_alone
        if of_input == weight:
            return self.own_inputs
        return of_input in self.input_formats and (self.beside is None or weight in self.beside)


@dataclass(frozen=True)
class Target:
    """A file layout that an assignment can be exported to."""

    formats: frozenset[str]
    """Block formats that the layout can hold."""
    loaders: tuple[Loader, ...]
    needs_fused_units: bool = False
    """True: the export refuses an assignment with a split fused group, whatever loads it."""
    own_names: frozenset[str] = frozenset()
    """Values of model_type whose experts the files have one by one, under the names of the models' own files."""

    @property
    def held_to(self) -> Loader:
        """The loader that an export of it is checked against: of a layout for runtimes that merge layers the first of
        them, of others the first that merges none and so takes what the layout holds."""
        return next(x for x in self.loaders if x.needs_fused_units == self.needs_fused_units)

    @property
    def shares_scales(self) -> bool:
        """Whether one of its loaders does."""
        return any(loader.shares_scales for loader in self.loaders)

    @property
    def per_tensor(self) -> bool:
        """Whether one of its loaders is."""
        return any(loader.per_tensor for loader in self.loaders)


_CT = "transformers >= 5 + compressed-tensors >= 0.20"
_VLLM = "vLLM >= 0.26"
_VLLM_QUARK = "vLLM >= 0.32"

TARGETS: dict[str, Target] = {
    "assignment.json": Target(
        _DMX_FORMATS,
        (Loader("dmx", _DMX_FORMATS, "dmx", rotates_inputs=True, input_formats=_DMX_FORMATS),),
    ),
    "compressed_tensors, profile vllm": Target(
        _CT_VLLM,
        (
            Loader(
                "transformers",
                _CT_VLLM,
                _CT,
                input_formats=COMPRESSED_TENSORS_INPUTS,
                input_rules=COMPRESSED_TENSORS_INPUT_RULES,
            ),
            Loader(
                "vLLM",
                _CT_VLLM,
                _VLLM,
                needs_fused_units=True,
                shares_scales=True,
                rotates_inputs=True,
                input_formats=frozenset({"fp8"}),
                beside=frozenset({"mxfp4"}),
                input_rules=_VLLM_INPUT_RULES,
                notes=("inputs in fp8 beside mxfp4: vLLM >= 0.32 + humming-kernels",),
                architectures=VLLM_ARCHITECTURES,
                unquantized=VLLM_UNQUANTIZED,
            ),
        ),
        needs_fused_units=True,
        own_names=VLLM_OWN_NAMES,
    ),
    "compressed_tensors, profile transformers": Target(
        _CT_TRANSFORMERS,
        (
            Loader(
                "transformers",
                _CT_TRANSFORMERS,
                _CT,
                input_formats=COMPRESSED_TENSORS_INPUTS,
                input_rules=COMPRESSED_TENSORS_INPUT_RULES,
            ),
        ),
    ),
    "quark": Target(
        _QUARK_FORMATS,
        (
            Loader(
                "vLLM",
                _QUARK_FORMATS,
                _VLLM_QUARK,
                needs_fused_units=True,
                input_formats=frozenset({"mxfp6_e2m3", "mxfp6_e3m2"}),
                beside=frozenset({"mxfp4"}),
                input_rules=dict.fromkeys(sorted(_QUARK_FORMATS), ("even",)),
                notes=("before 0.32 no MXFP8",),
                architectures=VLLM_ARCHITECTURES,
                unquantized=VLLM_UNQUANTIZED,
                renamed=VLLM_OWN_NAMES,
            ),
            Loader(
                "transformers + amd-quark",
                _QUARK_FORMATS,
                "transformers >= 5 + amd-quark >= 0.13",
                input_formats=_QUARK_FORMATS,
            ),
        ),
    ),
    "humming": Target(
        _ALL_FORMATS,
        (
            Loader(
                "vLLM",
                _ALL_FORMATS,
                "vLLM >= 0.26 + humming-kernels",
                needs_fused_units=True,
                own_inputs=False,
                input_formats=frozenset({"fp8"}),
                takes_experts=False,
                notes=(
                    "run from a folder of a tiny model alone; the first start compiles for minutes",
                    "inputs in fp8: vLLM >= 0.32",
                ),
                architectures=VLLM_ARCHITECTURES,
                unquantized=(*VLLM_UNQUANTIZED, "lm_head"),
            ),
        ),
        needs_fused_units=True,
        own_names=VLLM_OWN_NAMES,
    ),
    "modelopt_checkpoint": Target(
        _MODELOPT_FORMATS,
        tuple(
            Loader(
                name,
                _MODELOPT_FORMATS,
                requires,
                needs_fused_units=True,
                shares_scales=True,
                per_tensor=True,
                left_alone=frozenset({"nvfp4"}),
                takes_experts=False,
                architectures=VLLM_ARCHITECTURES if name == "vLLM" else None,
                notes=("run on a CPU alone" if name == "vLLM" else "never run from these folders",),
                unquantized=VLLM_UNQUANTIZED if name == "vLLM" else (),
            )
            for name, requires in (
                ("vLLM", "vLLM >= 0.26"),
                ("SGLang", "SGLang with modelopt_mixed"),
                ("TensorRT-LLM", "TensorRT-LLM >= 1.0"),
            )
        ),
        needs_fused_units=True,
        own_names=VLLM_OWN_NAMES,
    ),
    "torchao": Target(
        _ALL_FORMATS,
        (
            Loader(
                "transformers",
                _ALL_FORMATS,
                "transformers >= 5 + torchao >= 0.18",
                notes=("inputs quantized", "emulated product"),
            ),
        ),
    ),
}
"""Target name -> what it holds and who loads it. Tests load each with the loaders that run on a CPU."""


def split_groups(formats: Mapping[str, str], unquantized: Iterable[str] = ()) -> list[str]:
    """Fused groups whose layers differ in format, as `parent.{q_proj,k_proj,v_proj}`, in layer
    order; the experts of a block, by their path, are such a group. A group that is quantized in part is split, too.

    Args:
        formats: layer name -> block format name.
        unquantized: layers in BF16 that `formats` does not name.
    """
    whole = {**dict.fromkeys(unquantized, "bf16"), **formats}
    formats_of: dict[str, set[str]] = {}
    for layer, block_format in whole.items():
        group = experts_path(layer) or fused_group(layer)
        formats_of.setdefault(group, set()).add(block_format)
    return [group for group, members in formats_of.items() if len(members) > 1]


def obstacles(
    formats: Mapping[str, str],
    target: Target,
    loader: Loader,
    unquantized: Iterable[str] = (),
    inputs: Mapping[str, str] | None = None,
    *,
    is_rotated: bool = False,
) -> list[str]:
    """Why `loader` cannot read this assignment from `target`; empty when it can.

    Args:
        formats, unquantized: those of a whole assignment.
        inputs: its input_formats, where inputs are quantized, too; those in bf16 are left alone anywhere.
        is_rotated: its inputs are rotated at run time.
    """
    used = set(formats.values()) - {"bf16"}
    reasons = []
    if missing := sorted(used - target.formats):
        reasons.append(f"the layout does not hold {_join(missing)}")
    if unread := sorted((used & target.formats) - loader.formats):
        reasons.append(f"{loader.name} does not read {_join(unread)} from it")
    fused = target.needs_fused_units or loader.needs_fused_units
    if fused and (split := split_groups(formats, unquantized)):
        reasons.append(f"{len(split)} fused groups hold different formats, first {split[0]}")
    if unbuilt := [k for k, f in formats.items() if f != "bf16" and loader.builds_unquantized(k)]:
        reasons.append(
            f"{loader.name} builds {len(unbuilt)} of the layers without quantization, first {unbuilt[0]}"
        )
    if is_rotated and not loader.rotates_inputs:
        reasons.append(f"{loader.name} does not rotate inputs")
    unequal = {k: f for k, f in (inputs or {}).items() if f not in (formats[k], "bf16")}
    given = {k: f for k, f in (inputs or {}).items() if f != formats[k]}
    if refused := [k for k, f in given.items() if not loader.takes(formats[k], f)]:
        pair = f"in {given[refused[0]]} beside weights in {formats[refused[0]]}"
        reasons.append(
            f"{loader.name} does not run inputs {pair} ({len(refused)} layers, first {refused[0]})"
        )
    elif unequal and fused and (split := split_groups(inputs or {}, unquantized)):
        reasons.append(f"{len(split)} fused groups differ in their inputs, first {split[0]}")
    return reasons


def _join(names: Iterable[str]) -> str:
    return ", ".join(names)


def _loader(target: str, name: str) -> Loader:
    return next(loader for loader in TARGETS[target].loaders if loader.name == name)


SEARCH_TARGETS = {
    "vllm": _loader("compressed_tensors, profile vllm", "vLLM"),
    "vllm_quark": _loader("quark", "vLLM"),
    "vllm_humming": _loader("humming", "vLLM"),
    "vllm_modelopt": _loader("modelopt_checkpoint", "vLLM"),
    "transformers": _loader("compressed_tensors, profile transformers", "transformers"),
}
"""What `search.target` restricts a search to, so that nobody finds out at export; `any` restricts
nothing."""
