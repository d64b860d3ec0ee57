"""Which part of a model reads text, which blocks it runs in order, and which layers tokens reach.

Nothing is taken from lengths or names of lists alone: the model is asked (`get_decoder`, its config), and
where it has weights, it is run.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dmx.errors import ModelError
from dmx.models.linears import linear_layers
from dmx.models.memory import MicroBatch
from dmx.models.running import evaluating, run_whole


def text_backbone(model: nn.Module) -> nn.Module:
    """The decoder that reads token ids, as transformers names it; the model itself where it names none."""
    ask = getattr(model, "get_decoder", None)
    found = ask() if callable(ask) else None
    return found if isinstance(found, nn.Module) else model


def decoder_blocks(model: nn.Module) -> nn.ModuleList | None:
    """The list of blocks that a language model runs in order; None where it has none.

    Of the outermost lists of the text backbone whose blocks hold linear layers: the one as long as its config
    says, else the longest. Lists inside blocks (experts) do not count.
    """
    lists = [m for m in outermost_lists(text_backbone(model)).values() if _has_linears(m)]
    config = text_config(model)
    depth = getattr(config, "num_hidden_layers", None)
    stated = [blocks for blocks in lists if len(blocks) == depth]
    return max(stated or lists, key=len, default=None)


def outermost_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """name -> module list that lies in no other, in the order of the model."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and not inside:
            found[path] = module
    return found


def unread_layers(model: nn.Module) -> list[str]:
    """Linear layers outside the text backbone of a model that reads more than text, its head apart.

    By structure alone, so that a model on meta will do; `unreached_layers` finds out by running.
    """
    config = getattr(model, "config", None)
    if config is None or text_config(model) is config:
        return []
    backbone = text_backbone(model)
    inside = {id(module) for module in backbone.modules()}
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    return [
        name
        for name, layer in linear_layers(model).items()
        if id(layer) not in inside and layer is not head
    ]


@torch.no_grad()
def unreached_layers(
    model: nn.Module,
    batches: Iterable[Tensor],
    micro: MicroBatch | None = None,
    *,
    whole: bool = False,
) -> list[str]:
    """Linear layers that no token of the batches runs.

    Args:
        batches: (batch, length) int64.
        micro: rows that run at a time, None: whole batches.
        whole: run all batches, for others that look on; else it ends with the batch that leaves no layer.

    Raises:
        ModelError: the model does not run on token ids alone.
    """
    linears = linear_layers(model)
    waiting = dict(linears)

    def reached(name: str, *_: Any) -> None:
        waiting.pop(name, None)

    handles = [m.register_forward_pre_hook(partial(reached, n)) for n, m in linears.items()]
    device = next(model.parameters()).device
    try:
        with evaluating(model):
            for batch in batches:
                _run(model, batch.to(device), micro)
                if not (waiting or whole):
                    break
    finally:
        for handle in handles:
            handle.remove()
    return [name for name in linears if name in waiting]


def _run(model: nn.Module, tokens: Tensor, micro: MicroBatch | None) -> None:
    try:
        run_whole(model, tokens, micro)
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{type(model).__name__} does not run on token ids alone: model(input_ids=...).logits ends in "
            f"{type(error).__name__}: {error}. Searched are models that read text and predict the next token."
        ) from error


def text_config(model: nn.Module) -> Any:
    """The part of the config that is about text; None where a model has no config."""
    config = getattr(model, "config", None)
    ask = getattr(config, "get_text_config", None)
    return ask() if callable(ask) else config


def _has_linears(module: nn.Module) -> bool:
    return any(isinstance(m, nn.Linear) for m in module.modules())
