"""What a model must be to be searched: plain floating-point nn.Linear layers hold its blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from dmx.errors import ModelError
from dmx.models.backbone import outermost_lists, text_backbone
from dmx.models.experts import KNOWN_EXPERTS, experts_modules, unlike_known
from dmx.models.linears import linear_layers, plain_name
from dmx.models.sharding import check_pieces, is_piece, is_sharded, reshard

UNSEARCHED_SHARE = 0.01
"""A block may hold this share of its parameters outside nn.Linear (norms hold far less)."""
_QUANTIZED_PACKAGES = (
    "bitsandbytes",
    "auto_gptq",
    "gptqmodel",
    "awq",
    "hqq",
    "optimum.quanto",
    "torchao",
    "compressed_tensors",
    "transformers.integrations",
)


def check_searchable(model: Any, *, allow_unsearched: bool = False) -> None:
    """Raise ModelError unless the model's blocks are plain floating-point nn.Linear layers.

    Works on the meta device. Refused: quantized models, PEFT models, models without nn.Linear,
    and blocks with more than UNSEARCHED_SHARE of their parameters outside nn.Linear
    (Mixture-of-Experts models of transformers 5), unless `allow_unsearched`.
    """
    name = type(model).__name__
    check_not_quantized(getattr(model, "config", None), name)
    for path, module in model.named_modules():
        package = type(module).__module__
        is_peft = package.startswith("peft.") or getattr(module, "_hf_peft_config_loaded", False)
        if is_peft:
            raise ModelError(
                f"{name} has PEFT adapters ({path or 'the model itself'}). Merge them first "
                "(merge_and_unload) and search the merged model."
            )
        is_layer = bool(module._parameters)
        if is_layer and package.startswith(_QUANTIZED_PACKAGES):
            raise _already_quantized(name, f"{path} is a {package}.{type(module).__name__}")
        if isinstance(module, nn.Linear):
            kind = type(module.weight)  # torchao keeps nn.Linear and changes its weight's type
            if kind.__module__.startswith(_QUANTIZED_PACKAGES):
                raise _already_quantized(name, f"{path}.weight is a {kind.__name__}")
            if not module.weight.is_floating_point():
                raise _already_quantized(name, f"{path}.weight is {module.weight.dtype}")
    if not any(isinstance(module, nn.Linear) for module in model.modules()):
        raise ModelError(f"{name} has no nn.Linear layer: there is nothing to search.")
    if not allow_unsearched:
        _check_blocks(model, name)


def check_differentiable(model: nn.Module) -> None:
    """Raise ModelError for weights that no pass with gradients can use, or that are not whole here."""
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise ModelError(
                f"{name} was made in torch.inference_mode(), and no gradient can pass it. Load the model outside of "
                "it, or copy it there: copy.deepcopy(model)."
            )
    check_held(model)


def check_held(model: nn.Module) -> None:
    """Raise ModelError where this process holds a part of a weight only, unless as `dmx.models.sharding` splits a model."""
    if not is_sharded(model):
        check_whole(model)
        return
    check_pieces(model)
    if paths := experts_modules(model):
        raise ModelError(
            f"the model is sharded over processes, and the experts of {next(iter(paths))} lie in 3-D parameters, which "
            "are not searched in pieces. Give the model whole: every process then holds all of it (run.shard=off)."
        )


def check_whole(model: nn.Module) -> None:
    """Raise ModelError where this process holds a part of a weight only, as under FSDP and tensor parallelism."""
    reshard(model)
    for name, parameter in model.named_parameters():
        if is_piece(parameter) or name.endswith("_flat_param") or not parameter.numel():
            raise _sharded(plain_name(name))
    for name, linear in linear_layers(model).items():
        # FSDP1 leaves flat pieces under the old names; packed weights of another quantizer are integers.
        weight = linear.weight
        is_whole = weight.shape == (linear.out_features, linear.in_features)
        if weight.is_floating_point() and not is_whole:
            raise _sharded(f"{name}.weight")


def _sharded(name: str) -> ModelError:
    return ModelError(
        f"{name} is sharded over processes. Give the model before it is sharded: names are the same, the assignment "
        "fits both, and a model with it applied can be sharded. Searches, weights and evaluation also take one under "
        "fully_shard (FSDP2) over all processes; FSDP1, tensor parallelism and exports do not."
    )


def _check_blocks(model: nn.Module, name: str) -> None:
    for path, block in _blocks(model):
        searched = _parameter_ids(block, nn.Linear)
        aside = _parameter_ids(block, nn.Embedding) | _router_ids(block)
        sizes = {
            key: parameter.numel()
            for key, parameter in block.named_parameters()
            if id(parameter) not in aside
        }
        outside = {
            key: n for key, n in sizes.items() if id(block.get_parameter(key)) not in searched
        }
        total = sum(sizes.values())
        share = sum(outside.values()) / total if total else 0.0
        if share > UNSEARCHED_SHARE:
            largest = sorted(outside, key=lambda key: -outside[key])[:3]
            shown = ", ".join(f"{path}.{key}".lstrip(".") for key in largest)
            raise ModelError(
                f"{name}: {share:.1%} of the parameters of {path or 'the model'} lie outside "
                f"nn.Linear (largest: {shown}), at most {UNSEARCHED_SHARE:.0%} is allowed. They "
                f"would stay in full precision.{_of_experts(block)} Set allow_unsearched=true to search the rest."
            )


def _of_experts(block: nn.Module) -> str:
    """What to say of experts that are not known here; nothing where there are none."""
    kinds = sorted({_kind(m) for m in block.modules() if type(m).__name__.endswith("Experts")})
    if not kinds:
        return ""
    return f" Experts are searched of {', '.join(KNOWN_EXPERTS)}; these are {', '.join(kinds)}."


def _kind(experts: nn.Module) -> str:
    """The class; of one whose name is known, also what is not as it is known."""
    name = type(experts).__name__
    unlike = unlike_known(experts) if name in KNOWN_EXPERTS else []
    return f"{name} of another layout ({'; '.join(unlike)})" if unlike else name


def _router_ids(block: nn.Module) -> set[int]:
    """Parameters of the modules that choose experts: they stay in full precision whatever is searched."""
    routers = [m for m in block.modules() if type(m).__name__.endswith("Router")]
    return {id(p) for router in routers for p in router.parameters()}


def _parameter_ids(block: nn.Module, kind: type[nn.Module]) -> set[int]:
    return {id(p) for m in block.modules() if isinstance(m, kind) for p in m.parameters(False)}


def _blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children of the outermost module lists of the text backbone; the model itself where there are
    none."""
    backbone = text_backbone(model)
    at = next(path for path, module in model.named_modules() if module is backbone)
    blocks = [
        (f"{at}.{path}.{key}".lstrip("."), child)
        for path, blocks in outermost_lists(backbone).items()
        for key, child in blocks.named_children()
    ]
    return blocks or [("", model)]


def check_not_quantized(model_config: Any, name: str) -> None:
    found = getattr(model_config, "quantization_config", None)
    if found is not None:
        as_dict = found if isinstance(found, dict) else vars(found)
        raise _already_quantized(name, f"its config says {as_dict.get('quant_method', 'so')}")


def _already_quantized(name: str, why: str) -> ModelError:
    return ModelError(
        f"{name} is already quantized ({why}). A search needs the full-precision weights: "
        "give the original model."
    )
