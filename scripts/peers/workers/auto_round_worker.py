"""auto-round: AutoScheme chooses formats, SignRound rounds the weights of given ones.

Both take a data loader in place of the data sets that auto-round would fetch. AutoScheme's candidates and layers go in
as its own schemes and `shared_layers`; it counts element bits with `ignore_scale_zp_bits`.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .common import Cell, main

SCHEMES = {"mxfp4": "MXFP4", "mxfp6_e2m3": "MXFP6", "mxfp8_e4m3": "MXFP8"}
_BITS = {4: "mxfp4", 6: "mxfp6_e2m3", 8: "mxfp8_e4m3"}


def scheme_of(block_format: str, has_inputs: bool) -> dict[str, Any]:
    """auto-round's scheme of weights, and with `has_inputs` inputs, in one MX format."""
    from auto_round.schemes import preset_name_to_scheme

    scheme = dataclasses.asdict(preset_name_to_scheme(SCHEMES[block_format]))
    scheme = {k: v for k, v in scheme.items() if v is not None}
    return scheme if has_inputs else scheme | {"act_bits": 16}


def formats_of(
    layer_config: Mapping[str, Mapping[str, Any]], layers: list[str], has_inputs: bool
) -> dict[str, str]:
    """What auto-round's layer_config gives each layer, by our names.

    Raises:
        ValueError: a layer has no MX format, or another for its input, or one where inputs are left alone.
    """
    found = {}
    for name in layers:
        config = layer_config[name]
        weight = (config["data_type"], config["bits"], config["group_size"])
        inputs = (config["act_data_type"], config["act_bits"], config["act_group_size"])
        is_asked = weight == inputs if has_inputs else inputs[1] == 16
        if not is_asked or weight[0] != "mx_fp" or weight[2] != 32 or weight[1] not in _BITS:
            raise ValueError(f"{name}: weight {weight}, input {inputs}")
        found[name] = _BITS[weight[1]]
    return found


def shared_layers(units: list[list[str]]) -> list[list[str]]:
    """Units of several layers, as AutoScheme takes them."""
    return [unit for unit in units if len(unit) > 1]


def _feed(loader: list[dict[str, Tensor]]) -> None:
    """auto-round reads these batches wherever it would fetch a data set."""
    import auto_round.auto_scheme.delta_loss as scoring
    import auto_round.calib_dataset as calibration

    for module in (scoring, calibration):
        module.get_dataloader = lambda *_, **__: loader  # type: ignore[attr-defined]


def _average(elements: Mapping[str, int], config: Mapping[str, Mapping[str, Any]]) -> float:
    return sum(n * config[k]["bits"] for k, n in elements.items()) / sum(elements.values())


def _common(cell: Cell) -> dict[str, Any]:
    rows, window = cell.tokens.shape
    return {
        "nsamples": rows,
        "seqlen": window,
        "batch_size": 1,
        "device_map": cell.request.device,
        # Without it auto-round casts the model to float32, whatever it was given.
        "amp": cell.request.dtype != "float32",
        "enable_torch_compile": False,
        "seed": cell.request.seed,
    }


def _said(cell: Cell) -> str:
    amp = "on" if _common(cell)["amp"] else "off"
    return f"data loader of the given tokens in place of its own data set; amp {amp}"


def _kept(cell: Cell, model: nn.Module) -> dict[str, dict[str, int]]:
    """Linear layers that are to have no format, as auto-round takes them."""
    asked = set(cell.layers)
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    return {name: {"bits": 16, "act_bits": 16} for name in linears if name not in asked}


def auto_scheme(cell: Cell) -> None:
    """Answers with AutoScheme's formats."""
    os.environ["AR_AUTO_SCHEME_CACHE"] = str(cell.folder / "scores")
    from auto_round import AutoRound, AutoScheme

    asked, common = cell.request, _common(cell)
    _feed(cell.batches())
    model = cell.model()
    scheme = AutoScheme(
        avg_bits=asked.limit,
        options=[scheme_of(f, asked.has_inputs) for f in asked.formats],
        shared_layers=shared_layers(asked.units),
        ignore_scale_zp_bits=True,
        batch_size=1,
        nsamples=common["nsamples"],
        seqlen=common["seqlen"],
        low_gpu_mem_usage=False,
        enable_torch_compile=False,
    )
    tool = AutoRound(
        model, cell.tokenizer(), scheme=scheme, iters=0, disable_opt_rtn=True, **common
    )
    cell.timed(tool.post_init)
    peak = cell.peak()
    config = {k: dict(v) for k, v in tool.layer_config.items()}
    elements = {name: model.get_submodule(name).weight.numel() for name in cell.layers}
    own = cell.own_nll(lambda: tool.quantize()[0])
    cell.notes.append(f"{_said(cell)}; no torch.compile")
    cell.answer(
        formats_of(config, cell.layers, asked.has_inputs),
        ("auto-round",),
        peak=peak,
        said_bits=_average(elements, config),
        own_nll=own,
    )


def sign_round(cell: Cell) -> None:
    """Answers with weights that SignRound rounded, inputs quantized meanwhile unless they are left alone."""
    from auto_round import AutoRound

    asked = cell.request
    assert asked.given is not None
    model = cell.model()
    layers: dict[str, Any] = {n: scheme_of(f, asked.has_inputs) for n, f in asked.given.items()}
    tool = AutoRound(
        model,
        cell.tokenizer(),
        scheme="MXFP4",
        layer_config=layers | _kept(cell, model),
        iters=int(asked.options.get("iters", 200)),
        dataset=cell.batches(),
        **_common(cell),
    )
    quantized, _ = cell.timed(tool.quantize)
    peak = cell.peak()
    weights = {name: quantized.get_submodule(name).weight for name in cell.layers}
    cell.save_weights(weights)
    cell.notes.append(_said(cell))
    cell.answer(asked.given, ("auto-round",), peak=peak, own_nll=cell.own_nll(quantized))


METHODS = {"auto_scheme": auto_scheme, "sign_round": sign_round}

if __name__ == "__main__":
    main(lambda cell: METHODS[cell.request.method](cell))
