"""The linear layers of a model, by name: which there are, which run as one product, how large they are."""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from dmx.errors import ModelError

MERGED_LAYERS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Names of runtimes for layers that they run as one, which configs of other tools use, too -> its parts."""
FUSED_GROUPS = (
    *MERGED_LAYERS.values(),
    ("in_proj_qkv", "in_proj_z"),  # linear attention of Qwen3.5
    ("in_proj_b", "in_proj_a"),
    ("q_a_proj", "kv_a_proj_with_mqa"),  # MLA: DeepSeek, GLM-4-MoE-Lite, LongCat
    ("w1", "w3"),  # LFM2, InternLM2
    ("c_fc_0", "c_fc_1"),  # EXAONE
)
"""Last components of sibling modules that read one input, and that vLLM joins to one linear layer. One name never
means two things among the architectures that `dmx.assignment.targets.VLLM_ARCHITECTURES` names.

Source: vLLM 0.20 and 0.32, `packed_modules_mapping` and `stacked_params_mapping` of `model_executor/models`;
`scripts/fused_groups.py` compares them with an installed one.
"""


_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Attributes under which torch.compile, FSDP and checkpointing hold the module that they wrap."""


def plain_model(model: nn.Module) -> nn.Module:
    """The model inside torch.compile, DataParallel, DistributedDataParallel and FSDP; itself where it is plain."""
    while True:
        parallel = isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel))
        at = "module" if parallel else next((w for w in _WRAPPERS if w in model._modules), None)
        if at is None:
            return model
        model = model.get_submodule(at)


def plain_name(name: str) -> str:
    """Of a module or tensor: its name without those of wrappers around parts of the model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Name, as in the plain model, -> module of every linear layer, in the order of the model."""
    return {plain_name(name): m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def fused_group(name: str) -> str:
    """Of a layer: the group that shares one input and one choice, `parent.{q_proj,k_proj,v_proj}`; the
    layer itself where it is in none. The only place that builds such names, which nobody parses."""
    parent, _, last = name.rpartition(".")
    for group in FUSED_GROUPS:
        if last in group:
            return f"{parent}.{{{','.join(group)}}}"
    return name


def match_layers(patterns: Iterable[str], names: Sequence[str], setting: str) -> dict[str, str]:
    """name -> first pattern that matches it. Globs match whole names, never substrings.

    Raises:
        ModelError: a pattern that matches no layer.
    """
    matched: dict[str, str] = {}
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        if not hits:
            raise ModelError(
                f"{setting}: pattern {pattern!r} matches none of the {len(names)} linear layers, "
                f"for example {', '.join(names[:3])}. Globs match whole names: '*.down_proj'."
            )
        for hit in hits:
            matched.setdefault(hit, pattern)
    return matched


def own_elements(linears: Mapping[str, nn.Linear], names: Iterable[str]) -> dict[str, int]:
    """Weight elements of each named layer; a weight that several share counts with the first."""
    sizes, seen = {}, set()
    for name in names:
        weight = linears[name].weight
        sizes[name] = 0 if id(weight) in seen else weight.numel()
        seen.add(id(weight))
    return sizes
