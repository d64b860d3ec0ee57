"""Brevitas: the published dMX (arXiv 2606.04115), by its own entry point and plugins, its rotations off (`dmx`) or
learned beside the offsets (`dmx_rotated`), which gives a finished model.

The plugins, `custom_trainer.py` and `learned_float_quantizer.py` of `brevitas_examples/papers/dMX`, are in the repository
and in no wheel: `--option dmx=FOLDER` names a copy. Every layer has an offset of its own; the penalty drives a plain
average over layers, inputs and weights, towards a target from above, and nothing holds the budget: an answer over it is
lowered as our projection does, by the learned offsets.

Its settings are those of the published benchmark for models of 1 to 2 billion parameters (`mxfp8_mixed_precision.yaml`),
its quantizers compiled among them (`--option compile=no` leaves that out: two to four times the seconds a step).
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule

from ..protocol import COMPILE, INPUT_ROTATION, REST, layer_bits
from .common import Cell, main

QUANTIZERS = {
    ("mxfp4", "mxfp8_e4m3"): "learned_float",
    ("mxfp4", "mxfp6_e2m3"): "mxfp6_learned_float",
}
_FORMATS = {(2, 1): "mxfp4", (2, 3): "mxfp6_e2m3", (4, 3): "mxfp8_e4m3"}
STEPS, ROWS = 400, 8
"""Of the published benchmark: optimizer steps, and sequences of a step."""
ROTATED = "dmx_rotated"
"""The method that learns rotations, too."""
ROTATIONS = (
    "--rotation fused_no_fx --rotation-mode had --rotation-orphan-sink --rotation-sdpa-regions --replace-rmsnorm"
    " --rotation_lr 1.5 --optimizer_dtype float32"
)
"""Of the published benchmark."""
RECOMPILED = 1000
"""Of the published benchmark: graphs of one function, of which every quantizer has its own."""


def arguments(cell: Cell, rows: int) -> list[str]:
    """The published benchmark's command line, less attention and bf16, and rotations where they are not asked for."""
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
    if asked.method == ROTATED:
        text.append(ROTATIONS)
    if is_compiled(cell):
        text.append("--compile-ptq")
    if not asked.device.startswith("cuda"):
        text.append("--use_cpu True")
    return " ".join(text).split()


def is_compiled(cell: Cell) -> bool:
    """Whether its quantizers are, as the published benchmark has them."""
    return COMPILE not in cell.request.options


def register(plugins: Path) -> None:
    """The published quantizers and trainer by their bare names, as the published benchmark does: compiled code looks
    their modules up, which a plugin that is loaded by its path is not among."""
    sys.path.insert(0, str(plugins))
    import_module("learned_float_quantizer")
    import_module("custom_trainer")


def uncompiled(model: nn.Module) -> nn.Module:
    """The model with its quantizers as they were: measuring it would compile every one of them again."""
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

    register(Path(cell.request.options["dmx"]))
    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILED)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, RECOMPILED)
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
    is_rotated = cell.request.method == ROTATED
    if is_rotated:
        cell.save_weights({name: dequantized(layer) for name, layer in layers.items()})
        save_rest(model, cell.layers, cell.folder / REST)
    cell.notes.append(
        f"its own entry point and plugins; rotations {'learned' if is_rotated else 'off'}; "
        f"quantizers {'' if is_compiled(cell) else 'not '}compiled; "
        f"{len(changed)} layers lowered to hold the budget"
    )
    cell.answer(within, ("brevitas",), peak=peak, own_nll=cell.own_nll(model))


def layer_of(model: nn.Module, name: str) -> Any:
    """The quantized layer, of one that rotates its inputs the layer after that."""
    module: Any = model.get_submodule(name)
    return module.layer if hasattr(module, "rotation_forward") else module


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
    """Give a layer and its inputs the lowest format, as its offset would."""
    inputs = layer.input_quant.fused_activation_quant_proxy.tensor_quant
    for quant in (layer.weight_quant.tensor_quant, inputs):
        for width in (quant.exponent_bit_width_impl, quant.mantissa_bit_width_impl):
            if hasattr(width, "bit_width_offset"):
                width.bit_width_offset.data.zero_()


@torch.no_grad()
def dequantized(layer: Any) -> Tensor:
    """The weight that its products see."""
    weight: Tensor = layer.quant_weight().value
    return weight.to(layer.weight.dtype)


def save_rest(model: nn.Module, layers: list[str], path: Path) -> None:
    """The parameters that are no layer's, and the rotation of the inputs of those that have one."""
    inside = tuple(f"{name}." for name in layers)
    held = {n: p.detach() for n, p in model.named_parameters() if not n.startswith(inside)}
    rotating = [name for name in layers if hasattr(model.get_submodule(name), "rotation_forward")]
    if rotating:
        first: Any = model.get_submodule(rotating[0])
        features = first.layer.weight.shape[1]
        one = torch.eye(features, device=first.layer.weight.device)
        held[INPUT_ROTATION] = first.rotation_forward(one)
    kept = {name: tensor.cpu().contiguous() for name, tensor in held.items()}
    save_file(kept, str(path), metadata={INPUT_ROTATION: " ".join(rotating)})


if __name__ == "__main__":
    main(run)
