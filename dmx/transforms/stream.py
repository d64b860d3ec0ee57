"""What reads and writes the residual stream of a Llama-like model: found by name, checked by value.

Nothing is taken for granted: a Parameter without a known place, a norm that computes something else, or a number
by which a forward pass could scale the stream is an error that names it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dmx.errors import ModelError

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Norm of a block -> the layers that read it."""
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
"""Layers of a block that add to the residual stream."""
UNTOUCHED = ("self_attn.q_norm", "self_attn.k_norm")
"""May hold Parameters: they act on the outputs of q and k, which the rotation leaves alone."""


@dataclass(frozen=True)
class Block:
    """The layers and norms of one decoder block."""

    norms: tuple[tuple[Any, tuple[nn.Linear, ...]], ...]
    """Each norm and the layers that read it."""
    v_proj: nn.Linear
    o_proj: nn.Linear
    down_proj: nn.Linear
    head_dim: int


@dataclass(frozen=True)
class Stream:
    """Everything that reads or writes the residual stream."""

    embedding: nn.Embedding
    blocks: tuple[Block, ...]
    norm: Any
    head: nn.Linear


def find_stream(model: Any) -> Stream:
    """The one place that knows names; ModelError names the first thing that does not fit."""
    find = _Finder(model)
    blocks_list = find("model.layers", nn.ModuleList)
    embedding, head = find("model.embed_tokens", nn.Embedding), find("lm_head", nn.Linear)
    norm = find("model.norm")
    width = embedding.embedding_dim
    find.check_norm("model.norm", width)
    find.check_plain("model")
    find.check_size("lm_head", head.in_features, width)

    blocks = []
    for index in range(len(blocks_list)):
        path = f"model.layers.{index}"
        find.check_plain(path)
        norms = []
        for norm_name, reader_names in READERS.items():
            find.check_norm(f"{path}.{norm_name}", width)
            readers = tuple(find(f"{path}.{name}", nn.Linear) for name in reader_names)
            norms.append((find(f"{path}.{norm_name}"), readers))
            for name, reader in zip(reader_names, readers, strict=True):
                find.check_size(f"{path}.{name}", reader.in_features, width)
        o_proj, down_proj = (find(f"{path}.{name}", nn.Linear) for name in WRITERS)
        for name, writer in zip(WRITERS, (o_proj, down_proj), strict=True):
            find.check_size(f"{path}.{name}", writer.out_features, width)
        (q_proj, _, v_proj), _ = (readers for _, readers in norms)
        head_dim = getattr(find(f"{path}.self_attn"), "head_dim", 0)
        # q_proj may hold a gate besides the queries, which o_proj's input would tell
        find.check_size(f"{path}.self_attn.o_proj's input", o_proj.in_features, q_proj.out_features)
        if not head_dim or v_proj.out_features % head_dim or o_proj.in_features % head_dim:
            raise find.error(
                f"{path}.self_attn.head_dim is {head_dim}: v_proj ({v_proj.out_features}) and "
                f"o_proj ({o_proj.in_features}) are no whole number of heads"
            )
        blocks.append(Block(tuple(norms), v_proj, o_proj, down_proj, head_dim))
    find.check_nothing_else(embedding, head)
    return Stream(embedding, tuple(blocks), norm, head)


class _Finder:
    """Finds modules by path, and notes which Parameters they hold."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.known: set[int] = set()
        if not hasattr(model, "all_tied_weights_keys"):
            raise self.error("it is no model of transformers 5 or later")

    def error(self, found: str) -> ModelError:
        """What to raise for a model of another make."""
        return ModelError(
            f"{type(self.model).__name__} cannot be rotated: {found}. The rotation of the residual "
            "stream knows models built as Llama, SmolLM2, Qwen2 and Qwen3 are. Search this one "
            "without it."
        )

    def __call__(self, path: str, kind: type[nn.Module] | None = None) -> Any:
        """The module at a path; of that very class, where one is given."""
        try:
            module = self.model.get_submodule(path)
        except AttributeError:
            raise self.error(f"it has no {path}") from None
        if kind is not None and type(module) is not kind:
            way_out = "; call dmx.restore(model) first" if isinstance(module, kind) else ""
            raise self.error(
                f"{path} is a {type(module).__name__}, not a plain nn.{kind.__name__}{way_out}"
            )
        return module if kind is None else self.with_values(path, module)

    def with_values(self, path: str, module: nn.Module) -> Any:
        """A module whose own Parameters will be replaced: plain, floating point, not on meta."""
        for name, parameter in module.named_parameters(recurse=False):
            self.known.add(id(parameter))
            if type(parameter) is not nn.Parameter or not parameter.is_floating_point():
                raise self.error(
                    f"{path}.{name} is a {type(parameter).__name__} of {parameter.dtype}"
                )
            if parameter.is_meta:
                raise self.error(f"{path}.{name} is on the meta device and has no values")
        return module

    def check_size(self, what: str, found: int, expected: int) -> None:
        """Raise ModelError for a width that does not fit the stream."""
        if found != expected:
            raise self.error(f"{what} has {found} features where {expected} are expected")

    def check_norm(self, path: str, width: int) -> None:
        """Computes weight * x / rms(x)? Asked of the module itself: names of classes tell less."""
        norm = self.with_values(path, self(path))
        kind = type(norm).__name__
        if [name for name, _ in norm.named_parameters()] != ["weight"]:
            held = ", ".join(name for name, _ in norm.named_parameters()) or "no Parameter"
            raise self.error(f"{path} is a {kind} with {held}, not an RMS norm with one weight")
        weight = norm.weight
        self.check_size(path, weight.numel(), width)
        # A mean that is not 0 shows a LayerNorm; large values, so that epsilon does not count.
        x = 16 * (1 + torch.randn(4, width, generator=torch.Generator().manual_seed(0)))
        x = x.to(weight.device, weight.dtype)
        expected = weight.float() * x.float() * x.float().square().mean(-1, keepdim=True).rsqrt()
        rounding = max(4 * torch.finfo(weight.dtype).eps, 1e-5)
        if not torch.allclose(norm(x).float(), expected, rtol=rounding, atol=1e-6):
            raise self.error(f"{path} is a {kind}, which does not compute weight * x / rms(x)")

    def check_plain(self, path: str) -> None:
        """No numbers or buffers of its own, by which a forward pass could scale the stream."""
        module = self(path)
        own = {name: value for name, value in vars(module).items() if isinstance(value, float)}
        own |= dict(module.named_buffers(recurse=False))
        own |= dict(module.named_parameters(recurse=False))
        if own:
            name, value = next(iter(own.items()))
            shown = value if isinstance(value, float) else f"a {type(value).__name__}"
            raise self.error(f"{path}.{name} ({shown}) may scale the residual stream")

    def check_nothing_else(self, embedding: nn.Embedding, head: nn.Linear) -> None:
        """Every Parameter has a known place, and one place only but for tied embeddings."""
        seen: dict[int, str] = {}
        for path, parameter in self.model.named_parameters(remove_duplicate=False):
            if id(parameter) not in self.known and not path.removesuffix(".weight").endswith(
                UNTOUCHED
            ):
                raise self.error(f"the Parameter {path} has no place in it")
            tied = embedding.weight is head.weight is parameter
            if id(parameter) in seen and not tied:
                raise self.error(f"{path} and {seen[id(parameter)]} share one Parameter")
            seen[id(parameter)] = path
