"""Rotation of the residual stream, folded into the weights: equal logits, no outlier channels.

With an orthogonal Q and RMS norms without weights, a Llama-like model computes the same function
when the residual stream h (a row vector) is h Q everywhere:

    fold    W <- W diag(norm weight), norm weight <- 1      for each layer that reads a norm
    read    y = h W^T = (h Q) (W Q)^T                       q, k, v, gate, up, lm_head: W <- W Q
    write   (a W^T + b) Q = a (Q^T W)^T + b Q               o, down: W <- Q^T W, b <- b Q
    embed   E <- E Q

because |h Q| = |h|. Q = diag(random signs) H. With H the Hadamard matrix of the hidden size, each
channel after it is a mix of all channels before it, and none stands out. With `block_size`, H is
block-diagonal: an outlier is spread over its own block alone, and the other blocks keep their small
scales. That suits formats with a scale a block: on SmolLM2-135M (2 windows of WikiText-2, all
MXFP4, weights and inputs) perplexity goes from 71 to 65 with blocks of 32, and to 105 with the
whole width; inputs alone from 33 to 23 and to 26. (That checkpoint's weights come from 4-bit blocks
of 32, which any rotation loses.)

Within a head, attention is linear in the values, so each value head is rotated by a Hadamard matrix
in v_proj, and back in o_proj; query heads that share a value head are rotated alike.

Nothing runs at inference, and the result saves, loads and exports as any model. Tied embeddings
are untied: the final norm goes into the head alone.

Source: QuaRot, arXiv 2404.00456, sections 3.1 and 4 (stages 1a and 1b without the online
transforms; its Q has no blocks); SliceGPT, arXiv 2401.15024, section 3 for folding norms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from dmx.errors import ModelError
from dmx.models.running import evaluating, model_logits
from dmx.models.streaming import rest
from dmx.transforms.hadamard import hadamard_transform
from dmx.transforms.stream import Block, Stream, find_stream

_ROWS_AT_ONCE = 2**24
"""Elements of a weight that are in float64 at a time (128 MiB), where its rows are independent."""
_LOGITS_MAY_DIFFER = {torch.float32: 0.01}
"""RMS of the change of the logits, in units of their deviation, that rounding can explain."""
_LOGITS_MAY_DIFFER_IN_HALF = 0.3


@torch.no_grad()
def rotate_residual(
    model: Any, *, block_size: int | None = None, seed: int = 0, value_heads: bool = True
) -> Callable[[], None]:
    """Rotate a model in place; its logits stay equal up to rounding.

    Everything is computed in float64 and rounded once to the dtype of the model. Modules stay,
    their Parameters are replaced; the originals live on in the result alone, so a caller that drops
    it frees them. Unties the embeddings (model.config.tie_word_embeddings becomes false).

    Args:
        model: Llama, SmolLM2, Qwen2, Qwen3 or another causal model of transformers of that make.
        block_size: channels that are mixed with each other; divides the hidden size. None = all.
        seed: of the signs.
        value_heads: rotate the value heads, too: each as a whole, or with a block_size in blocks of
            the largest size that divides it and head_dim.

    Returns:
        undo: puts the original Parameters, ties and flags back, to the bit, on the device and in
        the dtype that the model has then. ModelError if the model was changed in the meantime.

    Raises:
        ModelError: a structure that is not known here, or a size without a Hadamard matrix. The
            model is then as it was.
    """
    stream = find_stream(model)
    width = stream.embedding.embedding_dim
    if block_size is not None and (block_size < 1 or width % block_size):
        raise ModelError(
            f"block_size={block_size} does not divide the hidden size {width} of "
            f"{type(model).__name__}. Choose one that does, or None for the whole width."
        )
    sizes = _Sizes(block_size or width, block_size, value_heads)
    for size in (sizes.stream, *(sizes.of_heads(block) for block in stream.blocks)):
        hadamard_transform(torch.zeros(size))  # an error now, not halfway
    generator = torch.Generator().manual_seed(seed)
    signs = 1.0 - 2.0 * torch.randint(2, (width,), generator=generator, dtype=torch.float64)

    before = _few_logits(model, stream)
    rest(model)
    originals = _Originals(model)
    try:
        _rotate(stream, signs, sizes, originals)
        originals.untie()
        _check_equal(model, before, _few_logits(model, stream))
    except BaseException:
        originals.put_back()
        raise
    return originals.put_back


# ---------------------------------------------------------------- rotating


@dataclass(frozen=True)
class _Sizes:
    """Orders of the Hadamard matrices."""

    stream: int
    block_size: int | None
    value_heads: bool

    def of_heads(self, block: Block) -> int:
        """1 leaves the heads as they are: the matrix of order 1 is a one."""
        if not self.value_heads:
            return 1
        return gcd(block.head_dim, self.block_size or block.head_dim)


def _rotate(stream: Stream, signs: Tensor, sizes: _Sizes, originals: "_Originals") -> None:
    """Replace Parameters, block by block; see the top of the file for the formulas."""

    def rotated(rows: Tensor, gain: Tensor | None = None, **options: Any) -> Tensor:
        return _rotate_rows(rows, signs, sizes.stream, gain, **options)

    originals.replace(stream.embedding, "weight", rotated(stream.embedding.weight))
    for block in stream.blocks:
        heads = sizes.of_heads(block)
        for norm, readers in block.norms:
            for linear in readers:
                if linear is block.v_proj:
                    rows = rotated(linear.weight, norm.weight, dtype=torch.float64)
                    originals.replace(linear, "weight", _rotate_features(rows.T, heads).T)
                    if linear.bias is not None:
                        originals.replace(
                            linear, "bias", _rotate_features(linear.bias.double(), heads)
                        )
                else:
                    originals.replace(linear, "weight", rotated(linear.weight, norm.weight))
            originals.replace(norm, "weight", torch.ones_like(norm.weight))
        for linear in (block.o_proj, block.down_proj):
            weight = linear.weight.double()
            if linear is block.o_proj:
                weight = _rotate_features(weight, heads)
            originals.replace(linear, "weight", rotated(weight.T).T)
            if linear.bias is not None:
                originals.replace(linear, "bias", rotated(linear.bias[None])[0])
    head, norm = stream.head, stream.norm
    # Of a tied head this is still the original table; from here on it is a Parameter of its own.
    originals.replace(head, "weight", rotated(head.weight, norm.weight))
    originals.replace(norm, "weight", torch.ones_like(norm.weight))


def _rotate_rows(
    rows: Tensor,
    signs: Tensor,
    size: int,
    gain: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`rows @ diag(gain) @ Q` in float64, rounded once to `dtype`, by default that of the rows.

    Args:
        rows: (rows, width). signs: (width,) float64. gain: (width,), a norm's weight.
    """
    diagonal = signs.to(rows.device)
    if gain is not None:
        diagonal = diagonal * gain.to(rows.device, torch.float64)
    result = torch.empty(rows.shape, dtype=dtype or rows.dtype, device=rows.device)
    step = max(1, _ROWS_AT_ONCE // rows.shape[1])
    for source, target in zip(rows.split(step), result.split(step), strict=True):
        target.copy_(_rotate_features(source.double() * diagonal, size))
    return result


def _rotate_features(x: Tensor, size: int) -> Tensor:
    """(..., n): each run of `size` features times the Hadamard matrix of that order."""
    return hadamard_transform(x.unflatten(-1, (-1, size))).flatten(-2)


class _Originals:
    """What a rotation replaced."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.replaced: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self.tie_flag: bool | None = None
        self.tied_keys: dict[str, str] | None = None

    def replace(self, module: nn.Module, name: str, values: Tensor) -> None:
        """Put values in place of a Parameter, in its dtype and layout, with its requires_grad."""
        old = module.get_parameter(name)
        new = nn.Parameter(values.to(old.dtype).contiguous(), requires_grad=old.requires_grad)
        setattr(module, name, new)
        self.replaced.append((module, name, old, new))

    def untie(self) -> None:
        """So that saving, loading and `tie_weights` treat the head as the Parameter that it is."""
        self.tie_flag = self.model.config.tie_word_embeddings
        self.tied_keys = self.model.all_tied_weights_keys
        self.model.config.tie_word_embeddings = False
        self.model.all_tied_weights_keys = {}

    def put_back(self) -> None:
        """The original Parameters, ties and flags again; ModelError where the model was changed."""
        present = {id(module) for module in self.model.modules()}
        for module, name, _, new in self.replaced:
            if id(module) not in present or module._parameters[name] is not new:
                raise ModelError(
                    "the rotation cannot be undone: the model's layers were replaced after it, or "
                    "it was undone before. Undo later changes first (dmx.restore(model))."
                )
        rest(self.model)
        for module, name, old, new in self.replaced:
            old.data = old.data.to(new.device, new.dtype)  # itself, unless the model has moved
            setattr(module, name, old)
        if self.tied_keys is not None:
            self.model.config.tie_word_embeddings = self.tie_flag
            self.model.all_tied_weights_keys = self.tied_keys


# ---------------------------------------------------------------- checking


def _few_logits(model: Any, stream: Stream) -> Tensor:
    """(16, vocabulary) float32 logits of some fixed tokens, in eval mode."""
    rows = stream.embedding.num_embeddings
    ids = torch.arange(1, 17, device=stream.embedding.weight.device)[None] * 7919 % rows
    with evaluating(model):
        return model_logits(model, ids)[0].float()


def _check_equal(model: Any, before: Tensor, after: Tensor) -> None:
    """The names of a model do not prove what its forward pass does; its logits do."""
    change = float((after - before).square().mean().sqrt() / before.std())
    allowed = _LOGITS_MAY_DIFFER.get(model.dtype, _LOGITS_MAY_DIFFER_IN_HALF)
    if not change <= allowed:
        raise ModelError(
            f"{type(model).__name__} cannot be rotated: its logits change by {change:.3g} of their "
            f"deviation, rounding explains at most {allowed}. Its blocks have the names of Llama's "
            "and compute something else. Search it without the rotation."
        )
