"""The quantized linear layer, around the very Parameters of the layer that it replaces.

They keep their names, so that state dicts, optimizers and tied weights do not notice. Weights are
quantized in the forward pass.
"""

import torch
from torch import Tensor, nn

from dmx.applying.quantizers import Quantizer
from dmx.applying.stored import StoredWeight
from dmx.models.linears import linear_layers
from dmx.models.products import groups_of, product
from dmx.models.swap import adopt
from dmx.transforms.block import BlockRotation


class QuantLinear(nn.Linear):
    """`F.linear(input_quantizer(x), weight_quantizer(weight), bias)`; x is rotated before where the
    weight is."""

    input_transform: BlockRotation | None
    weight_quantizer: Quantizer | None
    input_quantizer: Quantizer | None
    cache_weights: bool
    _cached: tuple[int, int, Tensor] | None

    @classmethod
    def wrap(
        cls,
        linear: nn.Linear,
        weight_quantizer: Quantizer | None,
        input_quantizer: Quantizer | None,
        *,
        cache_weights: bool = False,
    ) -> "QuantLinear":
        """A quantized layer around the Parameters of `linear`; None leaves an operand as it is."""
        layer = adopt(cls, linear)
        layer.weight_quantizer = weight_quantizer
        layer.input_quantizer = input_quantizer
        layer.cache_weights = cache_weights
        layer._cached = None
        return layer

    def quantized_weight(self) -> Tensor:
        """The weight that the product sees; (out_features, in_features), dtype of the weight."""
        if self.weight_quantizer is None:
            return self.weight
        if not self.cache_weights or (torch.is_grad_enabled() and self.weight.requires_grad):
            return self.weight_quantizer(self.weight)
        key = (self.weight.data_ptr(), self.weight._version)
        if self._cached is None or self._cached[:2] != key:
            # A tensor made in inference mode could not serve a later pass with gradients.
            with torch.inference_mode(False), torch.no_grad():
                self._cached = (*key, self.weight_quantizer(self.weight.detach()))
        return self._cached[2]

    def forget_quantized(self) -> None:
        """Keep no quantized weight on the device, which the weight leaves."""
        self._cached = None
        if isinstance(self.weight_quantizer, StoredWeight):
            self.weight_quantizer.rest()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if self.input_transform is not None:
            x = self.input_transform(x)
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        return product(x, self.quantized_weight(), self.bias, groups_of(self))

    def extra_repr(self) -> str:
        """Adds the formats of both operands."""
        names = [
            f"{operand}={quantizer.block_format if quantizer is not None else 'full'}"
            for operand, quantizer in (
                ("weight", self.weight_quantizer),
                ("input", self.input_quantizer),
            )
        ]
        return ", ".join([super().extra_repr(), *names])


def quantized_layers(model: nn.Module) -> dict[str, QuantLinear]:
    """layer name -> layer of an applied model."""
    return {n: m for n, m in linear_layers(model).items() if isinstance(m, QuantLinear)}
