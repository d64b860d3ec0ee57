"""What an engine computed, against dmx's own modules on the engine's own inputs.

Each linear layer is judged alone, by

    y = F.linear(q(x), W)      W: the file's weight as dmx decodes it, x and y: as the engine had them

for several q: inputs left alone, as the file says, and in the weight's format by each scale rule. The q with the least
error says what the engine does with inputs, which it decides by its hardware and kernel. Then the whole model runs
in dmx with these q, and log-probabilities of the same tokens are compared.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dmx.applying.linear import QuantLinear
from dmx.applying.quantizers import BlockQuantizer
from dmx.assignment.assignment import Assignment
from dmx.assignment.runtimes import kinds_of
from dmx.errors import ModelError
from dmx.exporting.exporter import FACTS_FILE
from dmx.exporting.loading import is_exported, load_exported
from dmx.exporting.names import model_names
from dmx.formats import BLOCK_FORMATS, FP8, NVFP4, BlockFormat
from dmx.models.weight_files import check_whole
from dmx.numerics.rounding import round_to_element

LEFT_ALONE = "left alone"
FP8_INVERSE = "fp8 amax/448_float32, by a product with the inverse"
NVFP4_INVERSE = "nvfp4 amax/6, by products with inverses"
RULES = ("floor", "even", "rceil")
"""Of inputs, that engines are known to take; the first is the specification's."""
InputQuantizer = Callable[[Tensor], Tensor]


@dataclass
class Folder:
    """A model as its folder has it, in dmx; `inputs` are the quantizers that the file asks for."""

    model: nn.Module
    formats: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, InputQuantizer] = field(default_factory=dict)
    target: str = "bf16"
    says_inputs: bool = False


def load_folder(folder: Path, dtype: torch.dtype, device: str) -> Folder:
    """An exported folder, or a model in full precision.

    Raises:
        ModelError: it is neither. FormatError: a layout that dmx does not read.
    """
    if not is_exported(folder):
        from transformers import AutoModelForCausalLM

        try:
            plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except (OSError, ValueError, ImportError) as error:
            raise ModelError(
                f"{folder} was not exported by dmx, and transformers cannot load it: {error}"
            ) from error
        return Folder(plain.to(device).eval())
    loaded = load_exported(folder, device=device, attn_implementation="sdpa")
    layers = {n: m for n, m in loaded.model.named_modules() if isinstance(m, QuantLinear)}
    inputs = {n: m.input_quantizer for n, m in layers.items() if m.input_quantizer is not None}
    for layer in layers.values():
        layer.input_quantizer = None
        layer.cache_weights = True  # decoded once, not for each way with inputs and each batch
    model = loaded.model.to(dtype)
    return Folder(model, loaded.assignment.formats, inputs, loaded.target, loaded.inputs)


def parts_of(name: str, fused: Mapping[str, list[str]]) -> list[str]:
    """Layers of the checkpoint that make up a layer of the engine."""
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{part}" for part in fused.get(leaf, [leaf])]


def candidates(layer: nn.Module, asked: InputQuantizer | None) -> dict[str, InputQuantizer | None]:
    """Name -> what an engine may do with inputs of a layer."""
    found: dict[str, InputQuantizer | None] = {LEFT_ALONE: None}
    weight = getattr(getattr(layer, "weight_quantizer", None), "block_format", None)
    of_input, amax = getattr(asked, "block_format", None), getattr(asked, "amax", None)
    if asked is not None:
        found[_name(of_input, getattr(asked, "scale_rule", None))] = asked
    if FP8 in (of_input, weight):
        rule = FP8.usual_rule("input")
        found.setdefault(_name(FP8, rule), BlockQuantizer(FP8, rule))
        static = amax if of_input is FP8 else None
        found[FP8_INVERSE] = functools.partial(fp8_by_inverse, amax=static)
    if of_input is NVFP4 and amax is not None:
        found[NVFP4_INVERSE] = functools.partial(nvfp4_by_inverses, amax=amax)
    for block_format in dict.fromkeys((of_input, weight)):
        if isinstance(block_format, BlockFormat) and block_format.is_mx:
            for rule in RULES:
                quantizer = BlockQuantizer(block_format, rule)  # type: ignore[arg-type]
                found.setdefault(_name(block_format, rule), quantizer)
    return found


def fp8_by_inverse(x: Tensor, amax: float | None = None) -> Tensor:
    """FP8 as vLLM's plain code has it, which the CPU runs: another value than dmx's, and its CUDA kernel's, where a
    quotient lies on a midpoint.

    Args:
        amax: that the one, static scale is made for; None: a scale a token.
    """
    if amax is None:
        scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    else:
        scale = torch.tensor(amax / 448, dtype=torch.float32, device=x.device)
    codes = (x.float() * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def nvfp4_by_inverses(x: Tensor, amax: float) -> Tensor:
    """NVFP4 with a global scale as vLLM's plain code has it, and its CUDA kernel with approximate inverses: another value
    than dmx's where a quotient lies on a midpoint, and no least scale of a block.

    Args:
        amax: of the input that the global scale is made for.
    """
    inv_global = torch.tensor(6 * 448 / amax, dtype=torch.float32, device=x.device)
    blocks = x.float().unflatten(-1, (-1, NVFP4.block_size))
    ratio = blocks.abs().amax(-1, keepdim=True) * torch.tensor(1 / 6, dtype=torch.float32)
    scale = (inv_global * ratio).clamp(max=448).to(torch.float8_e4m3fn).float()
    inverse = torch.where(scale == 0, 0, 1 / (scale * (1 / inv_global)))
    codes = round_to_element(blocks * inverse, NVFP4.element)
    return (codes * (scale / inv_global)).flatten(-2).to(x.dtype)


def _name(block_format: BlockFormat | None, rule: str | None) -> str:
    return " ".join(str(part) for part in (block_format, rule) if part is not None)


def product(layer: Any, x: Tensor, quantizer: InputQuantizer | None) -> Tensor:
    """The layer on x, with another quantizer of inputs than its own."""
    if getattr(layer, "input_transform", None) is not None:
        x = layer.input_transform(x)
    if quantizer is not None:
        x = quantizer(x)
    weight = layer.quantized_weight() if isinstance(layer, QuantLinear) else layer.weight
    return F.linear(x, weight, layer.bias)


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|; 0 where they are equal, be they zero."""
    a, b = a.double(), b.double()
    return 0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm())


@torch.no_grad()
def compare_layers(
    folder: Folder, tensors: Mapping[str, Tensor], fused: Mapping[str, list[str]]
) -> dict[str, dict[str, Any]]:
    """engine's layer -> formats, what was done with inputs, relative error, whether equal to the bit.

    Sets the input quantizers of the layers in `folder.model` to what was found.
    """
    modules, named = dict(folder.model.named_modules()), model_names(folder.model)
    device = next(folder.model.parameters()).device
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted({key.rpartition(".")[0] for key in tensors if key.endswith((".x", ".y"))}):
        x, y = tensors[f"{name}.x"].to(device), tensors[f"{name}.y"].to(device)
        parts = [named(part) for part in parts_of(name, fused)]
        if all(part in modules and not isinstance(modules[part], nn.Linear) for part in parts):
            continue  # routers of experts, which are no linear layers here
        if unknown := [part for part in parts if part not in modules]:
            raise ModelError(
                f"the engine's layer {name} is {unknown[0]} of the checkpoint by its table of merged layers, "
                "and the model has no such layer: this architecture cannot be compared"
            )
        ways = candidates(modules[parts[0]], folder.inputs.get(parts[0]))
        errors: dict[str, float] = {}
        for way, quantizer in ways.items():
            value = torch.cat([product(modules[part], x, quantizer) for part in parts], -1)
            errors[way] = relative(y, value)
            if errors[way] == 0:
                break  # no other can be closer
        best = min(errors, key=lambda way: errors[way])
        for part in parts:
            if isinstance(modules[part], QuantLinear):
                modules[part].input_quantizer = ways[best]  # type: ignore[assignment]
        rows[name] = {
            "formats": "/".join(dict.fromkeys(folder.formats.get(p, "bf16") for p in parts)),
            "inputs": best,
            "asked_inputs": _asked(folder, parts[0]),
            "error": errors[best],
            "equal": errors[best] == 0,
            "error_left_alone": errors[LEFT_ALONE],
            "tokens": x.shape[0],
        }
    return rows


def check_finite(layers: Mapping[str, Mapping[str, Any]], **values: Tensor) -> None:
    """Raise ModelError for outputs of layers, or log-probabilities, that cannot be compared.

    Args:
        layers: of `compare_layers`. values: log-probabilities, by who computed them.
    """
    for name, row in layers.items():
        if not math.isfinite(row["error"]):
            raise ModelError(f"the output of {name} is not finite, or zero in dmx alone")
    for who, found in values.items():
        if not bool(found.isfinite().all()):
            raise ModelError(f"log-probabilities of {who} are not finite")


def _asked(folder: Folder, layer: str) -> str:
    quantizer = folder.inputs.get(layer)
    if quantizer is None:
        return LEFT_ALONE
    return _name(getattr(quantizer, "block_format", None), getattr(quantizer, "scale_rule", None))


AT_ONCE = {"cpu": 1, "cuda": 16}
"""Rows that a model sees at once: one leaves a card idle."""


@torch.no_grad()
def log_probabilities(model: Any, tokens: Tensor, at_once: int | None = None) -> Tensor:
    """(rows, window - 1) float64: of each token after the first, given those before it.

    Args:
        at_once: rows of a pass; None: what suits the device.
    """
    device = next(model.parameters()).device
    found = []
    for rows in tokens.to(device).split(at_once or AT_ONCE[device.type]):
        for row, given in zip(rows, model(input_ids=rows, use_cache=False).logits, strict=True):
            own = given[:-1].float().log_softmax(-1)  # of one row: a vocabulary is large
            found.append(own.gather(-1, row[1:, None])[:, 0].double())
    return torch.stack(found).cpu()


def noise(model: Any, tokens: Tensor, ours: Tensor) -> float:
    """Mean absolute difference of log-probabilities that rounding errors alone make, in dmx: the input of every linear
    layer is off by one epsilon of its dtype. With quantized inputs it may be large: a rounding that turns goes on
    through the layers.

    Args:
        ours: log-probabilities of the model as it is.
    """
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)

    def disturb(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = given[0]
        drawn = torch.randn(x.shape, generator=generator, device=x.device)
        return ((x * (1 + torch.finfo(x.dtype).eps * drawn)).to(x.dtype), *given[1:])

    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    handles = [layer.register_forward_pre_hook(disturb) for layer in layers]
    try:
        return float((log_probabilities(model, tokens) - ours).abs().mean())
    finally:
        for handle in handles:
            handle.remove()


ALIKE = ("formats", "scheme", "kernel", "inputs", "asked_inputs")


def groups_of(layers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Layers of the same formats, scheme, kernel and inputs as one, with their worst."""
    groups: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for name, row in layers.items():
        groups.setdefault(repr([row[key] for key in ALIKE]), []).append((name, row))
    found = []
    for members in groups.values():
        worst = max(members, key=lambda member: member[1]["error"])
        found.append(
            {
                **{key: worst[1][key] for key in ALIKE},
                "layers": len(members),
                "equal": sum(row["equal"] for _, row in members),
                "within": sum(row["ok"] for _, row in members),
                "worst": worst[0],
                "error": worst[1]["error"],
                "least_error_left_alone": min(row["error_left_alone"] for _, row in members),
            }
        )
    return sorted(found, key=lambda group: repr(group["formats"]))


def perplexity(log_probabilities: Tensor) -> float:
    return math.exp(-float(log_probabilities.mean()))


def facts_of(folder: Path) -> dict[str, Any]:
    """Content of the file that an export leaves; {} where there is none, ModelError where it is damaged."""
    path = folder / FACTS_FILE
    if not path.is_file():
        return {}
    check_whole(path)
    facts = json.loads(path.read_text())
    if not isinstance(facts, dict):
        raise ModelError(f"{path} is damaged: it is no JSON object. Export again.")
    return facts


def stated_in(folder: Path) -> dict[str, Any]:
    """What an export says of itself, whether or not a runtime loads it: target, profile, inputs, transform, formats of
    layers, cheapest first, and the same with those of inputs where they are others. Of a folder that dmx did not write nothing."""
    facts = facts_of(folder)
    formats: set[str] = set()
    kinds: list[str] = []
    if (folder / "assignment.json").is_file():
        assignment = Assignment.load(folder / "assignment.json")
        formats = set(assignment.formats.values())
        of_inputs = (assignment.input_formats or {}) if facts.get("inputs") else {}
        kinds = kinds_of((f, of_inputs.get(layer)) for layer, f in assignment.formats.items())
    return {
        "target": facts.get("target"),
        "profile": facts.get("profile"),
        "asks_inputs": bool(facts.get("inputs")),
        "transform": facts.get("transform", "none"),
        "formats": [f for f in (*BLOCK_FORMATS, "bf16") if f in formats],
        "kinds": kinds + ["bf16"] * ("bf16" in formats),
    }
