"""AMD Quark: weights of formats that another method chose, by its algorithms that look at inputs; its planner has no MX format."""

from collections.abc import Sequence
from typing import Any

from .common import Cell, main

SPECS = {
    "mxfp4": "OCP_MXFP4Spec",
    "mxfp6_e2m3": "OCP_MXFP6E2M3Spec",
    "mxfp8_e4m3": "OCP_MXFP8E4M3Spec",
}
ALGORITHMS = {"gptq": "GPTQConfig", "gptaq": "GPTAQConfig", "qronos": "QronosConfig"}
ROUNDED = "mxfp4"
"""The one format that its algorithms keep: they observe a block as a channel, and `calculate_fp8_quant_parameters` and
`calculate_int_quant_params` then take amax / largest value for a scale, which is no power of two."""


def places_of(layers: Sequence[str]) -> tuple[str, list[str]]:
    """Path of the blocks, and names of layers within a block, in order.

    Raises:
        ValueError: layers are in no numbered block, or in several lists of them.
    """
    paths, inner = set(), dict[str, None]()
    for layer in layers:
        parts = layer.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is None:
            raise ValueError(f"{layer} is in no numbered block, and Quark works block by block")
        paths.add(".".join(parts[:number]))
        inner[".".join(parts[number + 1 :])] = None
    if len(paths) != 1:
        raise ValueError(f"layers are in blocks of {sorted(paths)}: Quark takes one list of blocks")
    return paths.pop(), list(inner)


def layer_config(block_format: str, has_inputs: bool) -> Any:
    """Weights once, with `has_inputs` inputs as they come, as its own MX schemes set them."""
    from quark.torch.quantization.config import config

    spec = getattr(config, SPECS[block_format])
    weight, inputs = (
        spec(ch_axis=-1, is_dynamic=dynamic).to_quantization_spec() for dynamic in (False, True)
    )
    return config.QLayerConfig(weight=weight, input_tensors=inputs if has_inputs else None)


def quantized(
    model: Any, given: dict[str, str], has_inputs: bool, algorithm: Any = None, loader: Any = None
) -> Any:
    """The model with these layers quantized, the others as they are."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import QConfig, QLayerConfig

    config = QConfig(
        global_quant_config=QLayerConfig(),
        layer_quant_config={layer: layer_config(f, has_inputs) for layer, f in given.items()},
        exclude=["lm_head"],
        algo_config=[] if algorithm is None else [algorithm],
    )
    return ModelQuantizer(config).quantize_model(model, loader)


def weights(cell: Cell) -> None:
    """Answers with weights: of MXFP4 by the algorithm that the request names, of other formats to nearest."""
    from quark.torch.quantization.config import config  # its kernels compile on first use
    from torch.utils.data import DataLoader

    asked = cell.request
    assert asked.given is not None
    given = dict(asked.given)
    layers = {layer: f for layer, f in given.items() if f == ROUNDED}
    if others := sorted(set(given.values()) - {ROUNDED}):
        cell.notes.append(f"weights of {', '.join(others)} to nearest")
    model = cell.model()
    if layers:
        path, inner = places_of(list(layers))
        algorithm = getattr(config, ALGORITHMS[asked.method])(
            inside_layer_modules=inner, model_decoder_layers=path
        )
        loader = DataLoader(cell.batches(), batch_size=None)
        made = cell.timed(lambda: quantized(model, layers, asked.has_inputs, algorithm, loader))
        found = {name: made.get_submodule(name).weight.data for name in layers}
        del made
        model = cell.model()
        for name, weight in found.items():
            model.get_submodule(name).weight.data = weight
    made = cell.timed(lambda: quantized(model, given, asked.has_inputs))
    peak = cell.peak()
    modules = {name: made.get_submodule(name) for name in cell.layers}
    cell.save_weights({name: m._weight_quantizer(m.weight) for name, m in modules.items()})
    cell.answer(given, ("amd-quark",), peak=peak, own_nll=cell.own_nll(made))


if __name__ == "__main__":
    main(weights)
