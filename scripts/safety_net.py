"""What the safety net costs and saves: fallback rate, injected outliers, and a curve over its
threshold.

    python scripts/safety_net.py --model smollm2_135m_instruct_gguf \
        --assignment outputs/search/.../assignment.json --json safety_net.json

1. Calibrated on FineWeb, measured on WikiText-2 test: fallback rate, perplexity with and without.
2. Outliers that full precision does not feel (channels between up_proj and down_proj scaled by
   2**17 and back, in several layers): perplexity clean, without and with the net.
3. Uniform MXFP4 under one threshold for all operands: perplexity over effective bits; other
   assignments beside it (--compare), at their own bits.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

import dmx
from dmx.applying.apply import applied
from dmx.assignment.assignment import Assignment
from dmx.data import DataConfig, encode, load_text, token_batches
from dmx.formats import BLOCK_FORMATS, get_block_format
from dmx.models import ModelConfig, load_model
from dmx.searching import SearchConfig, uniform_assignment
from experiments.reporting.pages.net import SCHEMA
from mor import SafetyNet
from mor.outliers import rescale_channels

QUANTILES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
"""Of the operands' largest errors in calibration, where no thresholds are given."""
CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def assignment_of(model: nn.Module, name: str) -> Assignment:
    """An assignment file, or a uniform one by format name."""
    if name in BLOCK_FORMATS:
        return uniform_assignment(model, get_block_format(name), SearchConfig(name="uniform"))
    return Assignment.load(name)


def named(assignment: Assignment) -> dict[str, str | None]:
    """What a page calls it: the search, or the one format."""
    search, formats = assignment.search.name, sorted(set(assignment.formats.values()))
    if search == "uniform":
        return {"search": None, "format": formats[0]}
    return {"search": search, "format": None}


class Measure:
    """Perplexity of a model under an assignment, with or without a net."""

    def __init__(self, model: nn.Module, tokens: Tensor, window: int, batch_size: int) -> None:
        self.model, self.tokens = model, tokens
        self.window, self.batch_size = window, batch_size

    def __call__(self, assignment: Assignment | None, net: SafetyNet | None = None) -> float:
        with applied(self.model, assignment, safety=net, cache_weights=net is None):
            return dmx.perplexity(
                self.model, self.tokens, window=self.window, batch_size=self.batch_size
            )


def clean_data(measure: Measure, assignment: Assignment, net: SafetyNet) -> dict[str, Any]:
    """Perplexities without and with the net, and its report."""
    without = measure(assignment)
    with_net = measure(assignment, net)
    report = net.report()
    report.pop("layers")
    return {
        "full_precision": measure(None),
        "without": without,
        "with": with_net,
        "report": report,
    }


def outliers(
    measure: Measure, assignment: Assignment, net: SafetyNet, layers: list[int], channels: int
) -> dict[str, Any]:
    """Perplexities clean and with channels of some MLPs scaled, without and with the net."""
    model = measure.model
    names = [f"model.layers.{i}.mlp" for i in layers]
    size = model.get_submodule(names[0]).up_proj.out_features  # type: ignore[union-attr]
    chosen = [int(c) for c in torch.linspace(3, size - 4, channels)]
    clean, full = measure(assignment), measure(None)
    for name in names:
        rescale_channels(model, name, chosen)
    try:
        net.reset()
        hurt_full, hurt, saved = measure(None), measure(assignment), measure(assignment, net)
        report = net.report()
    finally:
        for name in names:
            rescale_channels(model, name, chosen, -17)
    fell = {k: v for k, v in report.pop("layers").items() if any(v.values())}
    return {
        "layers": layers,
        "channels": channels,
        "full_precision": full,
        "full_precision_with_outliers": hurt_full,
        "clean": clean,
        "without": hurt,
        "with": saved,
        "report": report,
        "fell_back": fell,
    }


def curve(
    measure: Measure, thresholds: list[float], compare: list[str], batches: list[Tensor]
) -> list[dict[str, Any]]:
    """Uniform MXFP4 under the net at several thresholds, and assignments at their own bits.

    Args:
        thresholds: empty = `QUANTILES` of the operands' largest errors on `batches`.
        compare: files, or formats' names.
    """
    uniform = assignment_of(measure.model, "mxfp4")
    if not thresholds:
        calibrated = SafetyNet.calibrate(measure.model, uniform, batches).calibrated
        errors = [e.largest_error for layer in calibrated.values() for e in layer.values()]
        quantiles = torch.tensor(errors).quantile(torch.tensor(QUANTILES))
        thresholds = [float(t) for t in quantiles]
    rows: list[dict[str, Any]] = []
    for threshold in thresholds:
        net = SafetyNet.constant(threshold)
        perplexity = measure(uniform, net)
        report = net.report()
        rows.append(
            {
                **named(uniform),
                "threshold": threshold,
                "fallback_rate": report["fallback_rate"],
                "perplexity": perplexity,
                "element_bits": report["effective_element_bits"],
                "weight_element_bits": report["weight"]["effective_element_bits"],
                "input_element_bits": report["input"]["effective_element_bits"],
            }
        )
    for name in ["mxfp4", *compare]:
        assignment = assignment_of(measure.model, name)
        bits = assignment.bits["element_bits"]
        rows.append(
            {
                **named(assignment),
                "threshold": None,
                "fallback_rate": None,
                "perplexity": measure(assignment),
                "element_bits": bits,
                "weight_element_bits": bits,
                "input_element_bits": bits,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="smollm2_135m_instruct_gguf", help="of configs/model")
    parser.add_argument("--assignment", default="mxfp6_e2m3", help="file, or a format's name")
    parser.add_argument("--compare", nargs="*", default=[], help="more of these for the curve")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-windows", type=int)
    parser.add_argument("--calibration-batches", type=int, default=16)
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 9, 15, 21, 27])
    parser.add_argument("--channels", type=int, default=32, help="outliers in each of the layers")
    parser.add_argument("--margin", type=float, default=1.25)
    parser.add_argument("--thresholds", type=float, nargs="*", default=[], help="of the curve")
    parser.add_argument("--json", help="write all numbers there")
    a = parser.parse_args()
    config = ModelConfig(
        **OmegaConf.to_container(OmegaConf.load(CONFIGS / f"model/{a.model}.yaml"))
    )  # type: ignore[arg-type]
    loaded = load_model(config, a.device)
    text = load_text(DataConfig(name="wikitext2", split="test"))
    tokens = encode(loaded.tokenizer, text)
    if a.max_windows is not None:
        tokens = tokens[: a.max_windows * a.window]
    fineweb = encode(loaded.tokenizer, load_text(DataConfig(name="fineweb")))
    batches = token_batches(
        fineweb, min(a.window, 1024), a.batch_size, seed=0, n_batches=a.calibration_batches
    )
    measure = Measure(loaded.model, tokens, a.window, a.batch_size)
    assignment = assignment_of(loaded.model, a.assignment)
    net = SafetyNet.calibrate(loaded.model, assignment, batches, margin=a.margin)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "model": loaded.provenance,
        "assignment": a.assignment,
        **named(assignment),
        "margin": a.margin,
        "device": torch.cuda.get_device_name() if a.device.startswith("cuda") else a.device,
        "window": a.window,
        "tokens": len(tokens),
    }
    parts = {
        "clean": lambda: clean_data(measure, assignment, net),
        "outliers": lambda: outliers(measure, assignment, net, a.layers, a.channels),
        "curve": lambda: curve(measure, a.thresholds, a.compare, batches),
    }
    for name, make in parts.items():
        result[name] = make()
        print(name, json.dumps(result[name], indent=1), flush=True)
        if a.json:
            Path(a.json).write_text(json.dumps(result, indent=1, default=str))


if __name__ == "__main__":
    main()
