"""Inner products that vLLM's CPU build lacks, in plain torch: `register()` before a model is loaded.

    MXFP4, MXFP6; NVFP4 and FP8 with inputs left alone    ours, below; MXFP4 beside FP8 inputs, too
    MXFP8; NVFP4 with inputs quantized                    vLLM's emulation classes, which it offers on cards alone
    rotations of inputs (`transform_config`)              ours: Hadamard's; vLLM's own for matrices of the file
    humming's layout, inputs left alone or in FP8         ours; the schemes of its layers are humming's own
    FP8 with inputs quantized                             vLLM's own; static ones beside scales of rows: ours, around it

Loader, names, fused layers, choice of the scheme and the forward pass stay vLLM's. A weight is decoded once, at
loading, to the dtype of the model. On a card none of this is used.

Internal interfaces of vLLM 0.32: `register_linear_kernel`; for FP8 weights alone its table of kernels, for NVFP4
weights alone the class that `init_nvfp4_linear_kernel` forces, whose name is replaced. And Quark's, ModelOpt's and humming's schemes may
run in float32, as compressed-tensors' may: there sums in another order do not turn the rounding of inputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from decoding import E2M1, E2M3, E3M2, decoded, e8m0, fp8_tokens, rounded_inputs
from torch import Tensor
from vllm import _custom_ops as custom_ops
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearKernel
from vllm.model_executor.kernels.linear.mxfp6.base import MxFp6LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.model_executor.kernels.linear.scaled_mm import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.quantization.compressed_tensors.transform.module import (
    HadamardTransform,
)
from vllm.model_executor.layers.quantization.humming import (
    HummingConfig,
    HummingLinearMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.platforms.interface import PlatformEnum
from vllm.utils.import_utils import has_humming


class _Decoded:
    """A kernel that keeps the weight decoded, in the dtype of the model."""

    config: Any

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        key = getattr(config, "activation_quant_key", None)
        return key is None or key == FP8_TOKENS or key in INPUTS, f"inputs in {key}"

    def weight_of(self, layer: Any) -> Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = self.weight_of(layer).to(torch.get_default_dtype())
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)

    def input_of(self, x: Tensor) -> Tensor:
        return x

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(self.input_of(x), layer.weight.to(x.dtype), bias)


INPUTS = {
    quant_utils.kMxfp4Dynamic: E2M1,
    quant_utils.kMxfp6E2M3Dynamic: E2M3,
    quant_utils.kMxfp6E3M2Dynamic: E3M2,
}
"""What a scheme may ask of inputs."""
FP8_TOKENS = quant_utils.kFp8DynamicTokenSym
"""What else, beside MXFP4 weights: as the file says, and Humming on cards does."""


class _Mx(_Decoded):
    """Inputs are rounded where the scheme asks for it; schemes of compressed-tensors ask whatever the file
    says, so `rounds_inputs` decides there."""

    rounds_inputs = False

    def input_of(self, x: Tensor) -> Tensor:
        key = self.config.activation_quant_key
        if key == FP8_TOKENS:
            return fp8_tokens(x)
        if key is None or not self.rounds_inputs:
            return x
        return rounded_inputs(x, INPUTS[key])


class Mxfp4(_Mx, MxFp4LinearKernel):
    """MXFP4 weights."""

    def weight_of(self, layer: Any) -> Tensor:
        return decoded(layer.weight.data, e8m0(layer.weight_scale.data), E2M1)


class Mxfp6(_Mx, MxFp6LinearKernel):
    """MXFP6 weights of either element."""

    def weight_of(self, layer: Any) -> Tensor:
        element = E2M3 if self.config.weight_quant_key == quant_utils.kMxfp6E2M3Static else E3M2
        return decoded(layer.weight.data, e8m0(layer.weight_scale.data), element)


class Nvfp4WeightsAlone(_Decoded, NvFp4LinearKernel):
    """NVFP4 weights, inputs left alone."""

    def weight_of(self, layer: Any) -> Tensor:
        scales = layer.weight_scale.data.float() * layer.weight_global_scale.data.float()
        return decoded(layer.weight.data, scales, E2M1)


class Fp8WeightsAlone(_Decoded, FP8ScaledMMLinearKernel):
    """FP8 weights with a scale a row, inputs left alone."""

    def __init__(self, config: Any, layer_param_names: Any) -> None:
        self.config = config  # the base class makes a quantizer of inputs

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def weight_of(self, layer: Any) -> Tensor:
        return layer.weight.data.t().float() * layer.weight_scale.data.float().view(-1, 1)

    def apply_scaled_mm(self, **operands: Any) -> Tensor:
        raise AssertionError("apply_weights is replaced")


class Fp8StaticInputs(kernels.ChannelWiseTorchFP8ScaledMMLinearKernel):
    """vLLM's product for weights with a scale a row, which cuts the one scale of static inputs as if each token had its
    own, and fails."""

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        if not config.activation_quant_key.scale.static:
            return False, "inputs have a scale a token"
        return super().can_implement(config)

    def apply_scaled_mm(self, *, A: Tensor, As: Tensor, **operands: Any) -> Tensor:
        return super().apply_scaled_mm(A=A, As=As.reshape(1, 1).expand(len(A), 1), **operands)


def hadamard(x: Tensor, inplace: bool = True) -> Tensor:
    """Sylvester's along the last axis, over the root of its size: what vLLM has on cards alone."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < x.shape[-1]:
        rows = torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)
        matrix = torch.cat(rows)
    assert not inplace
    return F.linear(x.float(), matrix.float() / x.shape[-1] ** 0.5).to(x.dtype)


HUMMING_ELEMENTS = {"float4e2m1": E2M1, "float6e2m3": E2M3, "float6e3m2": E3M2}
HUMMING_EIGHT_BITS = {"float8e4m3": torch.float8_e4m3fn, "float8e5m2": torch.float8_e5m2}


class Humming(_Decoded):
    """What vLLM's method for humming's layout does once the tensors are loaded, which needs a card. Inputs are as the layer's
    schema, of the file, says."""

    def __init__(self, weight_schema: Any, input_schema: Any) -> None:
        self.name = str(weight_schema.b_dtype)
        mode = getattr(input_schema.input_quant_mode, "value", None)
        if mode not in (None, "none", "dynamic_token"):
            raise NotImplementedError(
                f"inputs of humming's layout by {mode}: stand-ins are there for none and dynamic_token"
            )
        self.rounds_inputs = mode == "dynamic_token"

    def weight_of(self, layer: Any) -> Tensor:
        codes = layer.weight.data.contiguous().view(torch.uint8)
        scales = e8m0(layer.weight_scale.data.view(torch.uint8))
        if self.name in HUMMING_ELEMENTS:
            return decoded(codes, scales, HUMMING_ELEMENTS[self.name])
        values = codes.view(HUMMING_EIGHT_BITS[self.name]).float()
        return (values.unflatten(-1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)

    def input_of(self, x: Tensor) -> Tensor:
        return fp8_tokens(x) if self.rounds_inputs else x


def register_humming() -> None:
    """In the place of what needs a card in vLLM's method for that layout, where the library that reads its schemes is."""
    if not has_humming():
        return

    def process_weights_after_loading(self: HummingLinearMethod, layer: Any) -> None:
        self.kernel = Humming(self.weight_schema, self.input_schema)
        self.kernel.process_weights_after_loading(layer)

    def apply(
        self: HummingLinearMethod, layer: Any, x: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)

    HummingLinearMethod.process_weights_after_loading = process_weights_after_loading
    HummingLinearMethod.apply = apply


def register(*, rounds_inputs: bool) -> None:
    """Offer these kernels to vLLM on the CPU.

    Args:
        rounds_inputs: MXFP4 and MXFP6 layers quantize their inputs where the scheme asks for it, as on a card with
            block-scaled products; else they leave them alone, as Marlin does.
    """
    _Mx.rounds_inputs = rounds_inputs
    for kernel, kind in (
        (Mxfp4, "mxfp4"),
        (Mxfp6, "mxfp6"),
        (kernels.EmulationMxfp8LinearKernel, "mxfp8"),
        (kernels.EmulationNvFp4LinearKernel, "nvfp4"),
    ):
        kernels.register_linear_kernel(kernel, PlatformEnum.CPU, kind)
    kernels._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU].append(Fp8WeightsAlone)
    kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].insert(0, Fp8StaticInputs)
    # It offers to take inputs that the activation before it quantized, by a kernel of cards.
    per_tensor = kernels.PerTensorTorchFP8ScaledMMLinearKernel
    per_tensor.input_quant_key = FP8ScaledMMLinearKernel.input_quant_key
    kernels.MarlinNvFp4LinearKernel = Nvfp4WeightsAlone
    custom_ops.hadacore_transform = hadamard
    register_humming()
    HadamardTransform.cpu_linear = staticmethod(F.linear)  # vLLM forgets it there
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    for config in (QuarkConfig, ModelOptMixedPrecisionConfig, HummingConfig):
        config.get_supported_act_dtypes = lambda self: dtypes
