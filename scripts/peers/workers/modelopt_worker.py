"""ModelOpt: AutoQuantize by gradient or KL divergence chooses formats.

Its MX quantizers are a CUDA extension that is compiled on first use. Without a card, or where it does not compile,
`fused_amax_convert`, the one function of that extension that is called, is ours, whose rule `rceil` rounds scales as it
does.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .common import Cell, main

ELEMENTS = {"mxfp4": (2, 1), "mxfp6_e2m3": (2, 3), "mxfp8_e4m3": (4, 3)}
"""Format -> exponent and mantissa bits, as ModelOpt names elements. Its own MXFP6 preset is E3M2."""


def config_of(block_format: str, has_inputs: bool) -> dict[str, Any]:
    """Weights, and with `has_inputs` inputs, in one MX format, as ModelOpt's own presets say it."""
    quantizer = {
        "num_bits": ELEMENTS[block_format],
        "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": (8, 0)},
    }
    names = ["*weight_quantizer", "*input_quantizer"] if has_inputs else ["*weight_quantizer"]
    return {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            *({"quantizer_name": name, "cfg": quantizer} for name in names),
        ],
        "algorithm": None,
    }


def formats_of(
    recipes: Mapping[str, str], members: Mapping[str, list[str]], names: Mapping[str, str]
) -> dict[str, str]:
    """What the best recipe gives each layer, by our names.

    Args:
        recipes: ModelOpt's name of a decision -> the text of its format.
        members: the same name -> layers that the decision is for.
        names: ModelOpt's name of a format -> ours.

    Raises:
        ValueError: a format that was no candidate, such as none at all.
    """
    found = {}
    for decision, text in recipes.items():
        known = text.partition("(")[0]
        if known not in names:
            raise ValueError(f"{decision}: {text} is none of {', '.join(names)}")
        found |= dict.fromkeys(members[decision], names[known])
    return found


class StandIn:
    """Of the extension: `Types` gives a format's name, `fused_amax_convert` quantizes and dequantizes."""

    class Types:
        """Any attribute is its own name."""

    def fused_amax_convert(
        self, inputs: Tensor, block_size: int, element: str, scale: str, amax: Any
    ) -> Tensor:
        """As the extension does it, by our arithmetic."""
        from dmx.numerics import fake_quant

        ours = {"E2M1": "mxfp4", "E2M3": "mxfp6_e2m3", "E3M2": "mxfp6_e3m2"}
        ours |= {"E4M3": "mxfp8_e4m3", "E5M2": "mxfp8_e5m2"}
        assert block_size == 32 and scale == "E8M0"
        return fake_quant(inputs, ours[element], scale_rule="rceil")


def _stand_in(cell: Cell) -> None:
    """Put ours in the place of the extension where there is none."""
    from modelopt.torch.quantization import tensor_quant

    why = "its MX quantizers have no CPU path"
    if cell.request.device.startswith("cuda"):
        if tensor_quant.get_cuda_ext_mx() is not None:
            return
        why = "its CUDA extension did not compile"
    for name in {*tensor_quant.mx_format_map.values()}:
        setattr(StandIn.Types, name, name)
    extension = StandIn()
    tensor_quant.get_cuda_ext_mx = lambda *_, **__: extension
    cell.notes.append(f"{why}: its CUDA function was ours (rule rceil)")


def _loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = output.loss
    return loss


def search(cell: Cell) -> None:
    """Answers with AutoQuantize's formats."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.quantization.algorithms import AutoQuantizeGradientSearcher as Gradient
    from modelopt.torch.quantization.algorithms import AutoQuantizeKLDivSearcher as Divergence

    asked = cell.request
    _stand_in(cell)
    unit_of = {layer: unit[0] for unit in asked.units for layer in unit}
    for searcher in (Gradient, Divergence):
        searcher.quant_grouping_rules = [lambda _, name: unit_of.get(name)]
    model = cell.model()
    batches = [{**batch, "labels": batch["input_ids"]} for batch in cell.batches()]
    candidates = [config_of(f, asked.has_inputs) for f in asked.formats]
    spaces = [
        {
            "module_name_patterns": cell.layers,
            "quantization_formats": candidates,
            "allow_no_quant": False,
        }
    ]
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    kept = [name for name in linears if name not in unit_of]
    by_divergence = asked.method == "kl_div"

    def work() -> Any:
        return mtq.auto_quantize(
            model,
            constraints={
                "effective_bits": asked.limit,
                "cost": {"excluded_module_name_patterns": kept},
            },
            quantization_formats=candidates,
            module_search_spaces=spaces,
            data_loader=batches,
            forward_step=lambda m, b: m(**b).logits if by_divergence else m(**b),
            loss_func=None if by_divergence else _loss,
            disabled_layers=kept,
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
            method=asked.method,
            verbose=True,
        )

    quantized, state = cell.timed(work)
    peak = cell.peak()
    stats, best = state["candidate_stats"], state["best"]
    members = {decision: stat["module_names"] for decision, stat in stats.items()}
    names = {f"CUSTOM_MODULE_0_{i}": f for i, f in enumerate(asked.formats)}
    recipes = {d: str(r) for d, r in best["recipe"].items() if set(members[d]) <= set(unit_of)}
    cell.answer(
        formats_of(recipes, members, names),
        ("nvidia-modelopt",),
        peak=peak,
        said_bits=float(best["constraints"]["effective_bits"]),
        own_nll=cell.own_nll(quantized),
    )


if __name__ == "__main__":
    main(search)
