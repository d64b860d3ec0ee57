"""Brevitas: the published dMX (arXiv 2606.04115), by its own entry point and plugins, its rotations off (`dmx`) or
learned beside the offsets (`dmx_rotated`), which gives a finished model.

The plugins, `custom_trainer.py` and `learned_float_quantizer.py` of `brevitas_examples/papers/dMX`, are in the repository
and in no wheel: `--option dmx=FOLDER` names a copy. Every layer has an offset of its own; the penalty drives a plain
average over layers, inputs and weights, towards a target from above, and nothing holds the budget: an answer over it is
lowered as our projection does, by the learned offsets.

Settings and constants are those of the published benchmark for models of 1 to 2 billion parameters
(`mxfp8_mixed_precision.yaml`), its quantizers compiled among them (`--option compile=no` leaves that out). It takes new rows
at every step; here the given ones are seen again.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from ..protocol import COMPILE, PLUGINS, PUBLISHED, layer_bits
from .common import Cell, main

QUANTIZERS = {
    ("mxfp4", "mxfp8_e4m3"): "learned_float",
    ("mxfp4", "mxfp6_e2m3"): "mxfp6_learned_float",
}
_FORMATS = {(2, 1): "mxfp4", (2, 3): "mxfp6_e2m3", (4, 3): "mxfp8_e4m3"}
STEPS, ROWS = 400, 8
"""Optimizer steps, and sequences of a step."""
ROTATES = "dmx_rotated"
"""The method that learns rotations, too."""
ROTATIONS = (
    "--rotation fused_no_fx --rotation-mode had --rotation-orphan-sink --rotation-sdpa-regions --replace-rmsnorm"
    " --rotation_lr 1.5 --optimizer_dtype float32"
)
RECOMPILE_LIMIT = 1000
"""Graphs of one function: every quantizer has its own."""


def arguments(cell: Cell, rows: int) -> list[str]:
    """The published benchmark's command line for what is asked; without rotations where they are not."""
    asked = cell.request
    quantizer = QUANTIZERS[tuple(asked.formats)]
    steps = asked.options.get("steps", STEPS)
    batch = min(ROWS, rows)
    shared = "quant-format float_ocp_e2m1 quant-granularity per_group quant-type sym scale-precision po2_scale group-size 32"
    words = shared.split()
    text = [f"--model {asked.model} --dtype {asked.dtype} --seed {asked.seed} --no-eval"]
    for side in ("weight", "input"):
        text.append(f"--{side}-bit-width 4")
        text += [f"--{side}-{k} {v}" for k, v in zip(words[::2], words[1::2], strict=True)]
    text.append("--input-scale-type dynamic --scale-rounding-func-type floor --fine-tune")
    text.append(f"--custom-quantizer {quantizer} --custom-trainer rotation_learned_bitwidth")
    text.append(
        f"--seqlen {cell.tokens.shape[1]} --nsamples {rows} --nsamples-rot-calibration {rows}"
    )
    text.append(f"--target_bit_width {asked.limit} --bw_learning_rate 1.0 --delay_start 0.6")
    text.append(f"--max_steps {steps} --per_device_train_batch_size {batch}")
    text.append("--lr_scheduler_type cosine --report_to none")
    text.append(f"--output_dir {cell.folder / 'trainer'}")
    if asked.method == ROTATES:
        text.append(ROTATIONS)
    if is_compiled(cell):
        text.append("--compile-ptq")
    if not asked.device.startswith("cuda"):
        text.append("--use_cpu True")
    return " ".join(text).split()


def is_compiled(cell: Cell) -> bool:
    """Whether its quantizers are."""
    return COMPILE not in cell.request.options


def register(plugins: Path) -> None:
    """The published quantizers and trainer by their bare names: compiled code looks their modules up, which a plugin that
    is loaded by its path is not among."""
    sys.path.insert(0, str(plugins))
    for plugin in PLUGINS:
        import_module(plugin)


def uncompiled(model: nn.Module) -> nn.Module:
    """The same model, its quantizers as they were before: measuring it would compile every one of them again."""
    for module in model.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, OptimizedModule):
                setattr(module, name, child._orig_mod)
    return model


def format_of(exponent: float, mantissa: float) -> str:
    """Our name of an element.

    Raises:
        ValueError: it is none of ours.
    """
    found = (round(exponent), round(mantissa))
    if found not in _FORMATS:
        raise ValueError(f"exponent and mantissa of {exponent} and {mantissa} bits are no format")
    return _FORMATS[found]


def lowered(
    formats: Mapping[str, str],
    offsets: Mapping[str, float],
    elements: Mapping[str, int],
    limit: float,
) -> dict[str, str]:
    """The formats within the limit of average bits: raised layers of the smallest offset are lowered first."""
    kept = dict(formats)
    raised = sorted((n for n, f in kept.items() if f != "mxfp4"), key=lambda n: (offsets[n], n))
    for name in raised:
        if layer_bits(kept, elements) <= limit:
            break
        kept[name] = "mxfp4"
    return kept


def run(cell: Cell) -> None:
    """Answers with the formats of the learned offsets, and with rotations with the weights that they are of."""
    from brevitas_examples.common.parse_utils import parse_args
    from brevitas_examples.llm import main as entry
    from brevitas_examples.llm.llm_args import create_args_parser

    register(Path(cell.request.options[PUBLISHED]))
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = RECOMPILE_LIMIT
    # Beside it torch 2.11 stops at 256, fewer than there are quantizers.
    dynamo.accumulated_recompile_limit = RECOMPILE_LIMIT
    rows = [{"input_ids": row.cpu().numpy()} for row in cell.tokens]
    entry.get_dataset_for_model = lambda *_, **__: rows
    parsed, extra = parse_args(
        create_args_parser(), arguments(cell, len(rows)), override_defaults={}
    )
    _, trained = cell.timed(lambda: entry.quantize_llm(parsed, extra))
    peak = cell.peak()
    model = uncompiled(trained).eval()
    layers = {name: layer_of(model, name) for name in cell.layers}
    formats, offsets, elements = read(layers)
    within = lowered(formats, offsets, elements, cell.request.limit)
    changed = [name for name in formats if formats[name] != within[name]]
    for name in changed:
        lower(layers[name])
    is_rotated = cell.request.method == ROTATES
    if is_rotated:
        cell.save_weights({name: dequantized(layer) for name, layer in layers.items()})
        save_rotated_model(cell, model)
    cell.notes.append(
        f"its own entry point and plugins; rotations {'learned' if is_rotated else 'off'}; "
        f"quantizers {'' if is_compiled(cell) else 'not '}compiled; "
        f"{len(changed)} layer{'s' * (len(changed) != 1)} lowered to hold the budget"
    )
    cell.answer(within, ("brevitas",), peak=peak, own_nll=cell.own_nll(model))


def layer_of(model: nn.Module, name: str) -> Any:
    """The quantized layer of that name, inside its RotatedModule where its input is rotated online."""
    module: Any = model.get_submodule(name)
    return module.layer if is_online(module) else module


def is_online(module: nn.Module) -> bool:
    """Whether it is a RotatedModule."""
    return hasattr(module, "rotation_forward")


def read(
    layers: Mapping[str, Any],
) -> tuple[dict[str, str], dict[str, float], dict[str, int]]:
    """Of each layer of a trained model: format, learned offset and weight elements."""
    formats, offsets, elements = {}, {}, {}
    for name, layer in layers.items():
        quant = layer.weight_quant.tensor_quant
        exponent, mantissa = quant.exponent_bit_width_impl(), quant.mantissa_bit_width_impl()
        formats[name] = format_of(float(exponent), float(mantissa))
        offsets[name] = float(quant.mantissa_bit_width_impl.bit_width_offset.detach())
        elements[name] = layer.weight.numel()
    return formats, offsets, elements


def lower(layer: Any) -> None:
    """Give a layer and its input the lowest format. Their widths share one offset while it is learned and not after."""
    inputs = layer.input_quant.fused_activation_quant_proxy.tensor_quant
    for quant in (layer.weight_quant.tensor_quant, inputs):
        for width in (quant.exponent_bit_width_impl, quant.mantissa_bit_width_impl):
            if hasattr(width, "bit_width_offset"):
                width.bit_width_offset.data.zero_()


@torch.no_grad()
def dequantized(layer: Any) -> Tensor:
    """The weight that its products see; (out_features, in_features), dtype of the weight."""
    weight: Tensor = layer.quant_weight().value
    return weight.to(layer.weight.dtype)


def save_rotated_model(cell: Cell, model: nn.Module) -> None:
    """The parameters that are no layer's weight, and the online rotation with the layers whose inputs it is of.

    Raises:
        ValueError: online rotations differ.
    """
    layers = cell.layers
    inside = tuple(f"{name}." for name in layers)
    held = {n: p for n, p in model.named_parameters() if not n.startswith(inside)}
    online = [name for name in layers if is_online(model.get_submodule(name))]
    sizes = {layer_of(model, name).in_features for name in online}
    if len(sizes) > 1:
        raise ValueError(f"inputs of {sorted(sizes)} features are rotated: one size is read here")
    rotation = None
    if online:
        first: Any = model.get_submodule(online[0])
        one = torch.eye(first.layer.in_features, device=first.layer.weight.device)
        rotation = first.rotation_forward(one)
    cell.save_rotated(held, rotation, online)


if __name__ == "__main__":
    main(run)
