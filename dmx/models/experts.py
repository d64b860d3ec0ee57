"""Mixtures of experts: the experts of a block as linear layers, while a model is searched, applied or exported.

transformers 5 keeps the experts of a block in 3-D parameters, `gate_up_proj` (experts, 2 * middle, in) and
`down_proj` (experts, out, middle). Everything here works on linear layers, so that such a module makes room for
one whose projections are linear layers around views of the same memory, in one of two forms:

    stacked   a layer for each parameter, of its name: `model.layers.0.mlp.experts.gate_up_proj`, whose weight is
              (experts * 2 * middle, in). All experts of a block share a format.
    split     a layer for each projection of each expert, of the names that files have:
              `model.layers.0.mlp.experts.7.gate_proj`, `.up_proj` and `.down_proj`

Both compute what the module computed, with the sums in the order of transformers' own grouped product. The
router is no linear layer in transformers 5 and stays as it is.
"""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from math import lcm
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dmx.errors import ModelError
from dmx.models.backbone import text_config
from dmx.models.linears import plain_name
from dmx.models.products import Groups, product
from dmx.models.streaming import rest
from dmx.models.swap import set_module

Form = Literal["stacked", "split"]
KNOWN_EXPERTS = ("Qwen2MoeExperts", "Qwen3MoeExperts", "MixtralExperts", "OlmoeExperts")
"""Classes of transformers whose forward is that of the modules here; a test compares each."""
_ALWAYS_SAID = {"is_transposed": False, "has_bias": False}
"""What such a class says of its parameters in every transformers 5."""
_LATER_SAID = {"is_concatenated": True, "has_gate": True, "has_post_expert_norm": False}
"""What it says from the version on that knows another way; one that does not say it, as 5.0 all three and 5.17 the last,
has no other way."""
_LAST_OF_EXPERT = ("down_proj", ".w2")
"""Ends of names of the layer that gives an expert's output."""
_ORIGINALS = "_dmx_experts"
_MEMBER = re.compile(r"(?P<experts>.*\bexperts)\.(?P<expert>\d+)\.(?P<kind>.+)")
_STACKED = re.compile(r"(?P<experts>.*\bexperts)\.(?P<kind>gate_up_proj|down_proj)")


def experts_modules(model: nn.Module) -> dict[str, nn.Module]:
    """path -> module of the experts that lie in 3-D parameters of a known layout, also while linear layers stand there."""
    if (there := model.__dict__.get(_ORIGINALS)) is not None:
        originals: dict[str, nn.Module] = there[1]
        return originals
    return {
        plain_name(path): module
        for path, module in model.named_modules()
        if type(module).__name__ in KNOWN_EXPERTS and not unlike_known(module)
    }


def unlike_known(module: nn.Module) -> list[str]:
    """What a module says of its parameters that those of KNOWN_EXPERTS do not, each as `has_bias=True, expected False`."""
    found = {key: getattr(module, key, None) for key in _ALWAYS_SAID}
    found |= {key: getattr(module, key, value) for key, value in _LATER_SAID.items()}
    expected = _ALWAYS_SAID | _LATER_SAID
    return [f"{k}={v!r}, expected {expected[k]}" for k, v in found.items() if v != expected[k]]


def has_linear_experts(model: nn.Module) -> bool:
    """Whether the model is in one of the forms."""
    return _ORIGINALS in model.__dict__


def experts_path(layer: str) -> str | None:
    """Of a layer in the experts of a block, in either form: the path of these experts; else None."""
    found = _MEMBER.fullmatch(layer) or _STACKED.fullmatch(layer)
    return found["experts"] if found else None


def of_all_experts(layer: str) -> str:
    """One name for the layers of a kind in all experts of a block, `...experts.*.gate_proj`; itself for other layers."""
    found = _MEMBER.fullmatch(layer)
    return f"{found['experts']}.*.{found['kind']}" if found else layer


def active_factors(model: nn.Module, layers: Collection[str]) -> dict[str, int]:
    """layer -> what each of its weight elements counts where those are counted that a token meets, in one unit for all
    layers: of experts, experts per token over experts.

    Raises:
        ModelError: the model has experts, and its config does not say how many a token meets.
    """
    paths = {layer: path for layer in layers if (path := experts_path(layer)) is not None}
    if not paths:
        return {}
    config: Any = text_config(model)
    per_token = getattr(config, "num_experts_per_tok", None)
    if type(per_token) is not int or per_token < 1:
        raise ModelError(
            f"search.weighting=active: the config of {type(model).__name__} says num_experts_per_tok={per_token!r}, "
            "expected how many experts a token meets. Use search.weighting=elements."
        )
    counts = {path: _expert_count(model, path) for path in set(paths.values())}
    whole = lcm(*counts.values())
    return {
        layer: per_token * whole // counts[paths[layer]] if layer in paths else whole
        for layer in layers
    }


def _expert_count(model: nn.Module, path: str) -> int:
    """Of a block, in either form or in a module list."""
    module: Any = model.get_submodule(path)
    return getattr(module, "num_experts", None) or len(module)


def form_of(model: nn.Module, layers: Collection[str]) -> Form | None:
    """The form in which a model has layers of these names; None where they name no experts of 3-D parameters."""
    paths = set(experts_modules(model))
    for layer in layers:
        if experts_path(layer) in paths:
            return "stacked" if _STACKED.fullmatch(layer) else "split"
    return None


def expert_layers(stacked: str, experts: int) -> list[str]:
    """The layers in split form whose weights make that of a layer in stacked form, in the order of its rows."""
    found = _STACKED.fullmatch(stacked)
    assert found is not None
    kinds = ("gate_proj", "up_proj") if found["kind"] == "gate_up_proj" else ("down_proj",)
    return [f"{found['experts']}.{e}.{kind}" for e in range(experts) for kind in kinds]


def stacked_experts(model: nn.Module) -> dict[str, int]:
    """Layer in stacked form -> how many experts lie in it, of a model that is in this form."""
    return {
        f"{plain_name(path)}.{kind}": module.num_experts
        for path, module in model.named_modules()
        if isinstance(module, StackedExperts)
        for kind in ("gate_up_proj", "down_proj")
    }


class StackedLinear(nn.Linear):
    """The layer of a 3-D parameter: one weight for all experts of a block, (experts * out, in)."""

    groups: Groups | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(rows, in) sorted by expert -> (rows, out)."""
        return product(x, self.weight, None, self.groups)


class _ExpertLayers(nn.Module):
    """What both forms have in common: rows go to their experts and come back."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.num_experts: int = experts.num_experts
        self.act_fn = experts.act_fn
        self.train(experts.training)

    def run(self, rows: Tensor, groups: Groups) -> Tensor:
        """(rows, in) sorted by expert -> (rows, out)."""
        raise NotImplementedError

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(tokens, in), the experts of each token (tokens, k) and their weights -> (tokens, out)."""
        k = top_k_index.shape[-1]
        expert, order = torch.sort(top_k_index.reshape(-1))
        counts = torch.zeros(self.num_experts, dtype=torch.int32, device=expert.device)
        counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32))
        groups = Groups(counts.cumsum(0, dtype=torch.int32))
        rows = self.run(hidden_states[order // k], groups)
        rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return rows[back].unflatten(0, (-1, k)).sum(dim=1).to(hidden_states.dtype)


class StackedExperts(_ExpertLayers):
    """The experts of a block in stacked form."""

    def __init__(self, experts: Any) -> None:
        super().__init__(experts)
        self.gate_up_proj = _linear(
            experts.gate_up_proj.detach().flatten(0, 1), experts, stacked=True
        )
        self.down_proj = _linear(experts.down_proj.detach().flatten(0, 1), experts, stacked=True)

    def run(self, rows: Tensor, groups: Groups) -> Tensor:
        self.gate_up_proj.groups = self.down_proj.groups = groups  # type: ignore[assignment]
        gate, up = self.gate_up_proj(rows).chunk(2, dim=-1)
        result: Tensor = self.down_proj(self.act_fn(gate) * up)
        return result

    def weights(self) -> tuple[Tensor, Tensor]:
        """The 3-D parameters as they now are."""
        gate_up, down = (
            layer.weight.detach().unflatten(0, (self.num_experts, -1))
            for layer in (self.gate_up_proj, self.down_proj)
        )
        return gate_up, down


class SplitExpert(nn.Module):
    """One expert."""

    def __init__(self, experts: Any, index: int) -> None:
        super().__init__()
        gate, up = experts.gate_up_proj.detach()[index].chunk(2)
        self.gate_proj, self.up_proj = _linear(gate, experts), _linear(up, experts)
        self.down_proj = _linear(experts.down_proj.detach()[index], experts)
        self.act_fn = experts.act_fn

    def forward(self, x: Tensor) -> Tensor:
        """(rows, in) -> (rows, out)"""
        result: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result


class SplitExperts(_ExpertLayers):
    """The experts of a block in split form; one that no row reaches is not run."""

    def __init__(self, experts: Any) -> None:
        super().__init__(experts)
        for index in range(self.num_experts):
            self.add_module(str(index), SplitExpert(experts, index))

    def experts(self) -> list[SplitExpert]:
        """In their order."""
        each: Any = [self.get_submodule(str(e)) for e in range(self.num_experts)]
        return each

    def run(self, rows: Tensor, groups: Groups) -> Tensor:
        ends = groups.ends.tolist()
        bounds = zip(self.experts(), [0, *ends], ends, strict=False)
        return torch.cat([expert(rows[i:j]) for expert, i, j in bounds if i < j])

    def weights(self) -> tuple[Tensor, Tensor]:
        """The 3-D parameters as they now are."""
        each = self.experts()
        gate_up = [torch.cat([e.gate_proj.weight, e.up_proj.weight]) for e in each]
        return torch.stack(gate_up).detach(), torch.stack(
            [e.down_proj.weight for e in each]
        ).detach()


def _linear(weight: Tensor, experts: Any, *, stacked: bool = False) -> nn.Linear:
    """A layer around a view of a parameter."""
    layer = (StackedLinear if stacked else nn.Linear)(1, 1, bias=False, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight, experts.gate_up_proj.requires_grad)
    return layer


@contextmanager
def counting_tokens(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """path of the experts of a block -> how many tokens each expert is given while the model runs inside, (experts,) int64
    on the CPU; {} without experts.

    Args:
        model: with its experts in a form, if they lie in 3-D parameters.
    """
    blocks: dict[str, Tensor] = {}
    handles = []

    def chosen(path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        blocks[path] += torch.bincount(args[1].reshape(-1), minlength=len(blocks[path])).cpu()

    def given(path: str, expert: int, module: nn.Module, args: tuple[Any, ...]) -> None:
        blocks[path][expert] += args[0].shape[:-1].numel()

    for name, module in model.named_modules():
        path = plain_name(name)
        if isinstance(module, _ExpertLayers):
            blocks[path] = torch.zeros(module.num_experts, dtype=torch.int64)
            handles.append(module.register_forward_pre_hook(partial(chosen, path)))
        elif isinstance(module, nn.ModuleList) and name.endswith("experts"):
            blocks[path] = torch.zeros(len(module), dtype=torch.int64)
            handles += [
                expert.register_forward_pre_hook(partial(given, path, index))
                for index, expert in enumerate(module)
            ]
    try:
        yield blocks
    finally:
        for handle in handles:
            handle.remove()


def kind_of_expert(layer: str) -> tuple[str, bool] | None:
    """Of an expert's layer: the experts that it is one of, and whether it is the last of its own; None for others."""
    path = experts_path(layer)
    return None if path is None else (path, layer.endswith(_LAST_OF_EXPERT))


def install_experts(model: nn.Module, form: Form | None) -> Callable[[], None]:
    """Put experts of 3-D parameters into a form, in place; a model on meta will do.

    Args:
        form: None leaves the model as it is.

    Returns:
        undo: puts the original modules back. Both do nothing on a model that is in the form already.

    Raises:
        ModelError: the model is in the other form.
    """
    there = model.__dict__.get(_ORIGINALS)
    if there is not None and form not in (None, there[0]):
        raise ModelError(
            f"the experts of this model are in {there[0]} form, for another assignment or search; {form} form is "
            "needed here. Call dmx.restore(model) first."
        )
    originals = experts_modules(model) if form is not None and there is None else {}
    if not originals:
        return lambda: None
    rest(model)
    make = StackedExperts if form == "stacked" else SplitExperts
    # Parameters made in inference mode could not serve a later pass with gradients.
    with torch.inference_mode(False):
        made = {path: make(module) for path, module in originals.items()}
    for path, module in made.items():
        set_module(model, path, module)
    object.__setattr__(model, _ORIGINALS, (form, originals))
    # Not a closure: copies of the model then put their own modules back.
    return partial(_put_back, model)


def _put_back(model: nn.Module) -> None:
    rest(model)
    _, originals = model.__dict__.pop(_ORIGINALS)
    for path, module in originals.items():
        now: Any = model.get_submodule(path)
        first, before = next(now.parameters()), module.gate_up_proj
        if (first.device, first.dtype) != (before.device, before.dtype):  # the model has moved
            module.gate_up_proj.data, module.down_proj.data = now.weights()
        module.train(now.training)
        set_module(model, path, module)


@contextmanager
def linear_experts(model: nn.Module, form: Form | None) -> Iterator[None]:
    """The model with its experts in a form inside, as it was after; see `install_experts`."""
    undo = install_experts(model, form)
    try:
        yield
    finally:
        undo()
