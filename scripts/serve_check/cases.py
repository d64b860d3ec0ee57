"""Folders of every layout that we export for vLLM, to run it on: formats take turns, so they say nothing of quality.

python -m scripts.serve_check.cases tiny_llama /tmp/tiny
python -m scripts.serve_check.cases smollm2_135m_instruct_gguf /tmp/smollm2
python -m scripts.serve_check.cases llama_1b_random /tmp/llama --only ct4_w fp8_wa    # for speed
python -m scripts.serve_check /tmp/smollm2/ct* --baseline /tmp/smollm2/bf16 --json smollm2.json
"""

import argparse
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import nn

import dmx
from dmx.assignment.assignment import Assignment, make_assignment
from dmx.assignment.space import build_space
from dmx.formats import (
    BF16,
    FP8,
    MX_FORMATS,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    NVFP4,
    BlockFormat,
)
from dmx.models import ModelConfig, TinyConfig, load_model
from dmx.models.linears import fused_group
from dmx.transforms.stage import Transform
from scripts.benchmarks.shapes import LLAMA_1B, Shape, make_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "model"
FOUR_EIGHT = (MXFP4, MXFP8_E4M3)
FOUR_TO_EIGHT = (MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3)
TINY = {"hidden_size": 256, "intermediate_size": 512, "heads": 4, "kv_heads": 2, "layers": 3}
"""The least that vLLM's attention and its kernels on a CPU take."""


@dataclass(frozen=True)
class Case:
    """What is exported."""

    formats: tuple[BlockFormat, ...]
    """In turn, a fused group as one."""
    target: str
    inputs: bool = False
    weights: str = "nearest"
    """nearest, gptq, learned; the last for a few steps."""
    transform: str | None = None
    """Of inputs, at run time: hadamard_block, hadamard_selected, of every second input, or learned, with drawn
    rotations."""
    static_inputs: bool = False
    """Inputs in fp8 have one scale, measured."""
    input_format: str | None = None
    """Of all inputs; None: the weights'."""
    architecture: str = "llama"
    """Of the tiny model."""


CT, QUARK, MODELOPT = "compressed_tensors", "quark", "modelopt_checkpoint"
W4A8 = Case((MXFP4, FP8), CT, inputs=True, input_format="fp8")
CASES = {
    "ct4_w": Case((MXFP4,), CT),
    "ct8_w": Case((MXFP8_E4M3,), CT),
    "ct48_w": Case(FOUR_EIGHT, CT),
    "ct48_wa": Case(FOUR_EIGHT, CT, inputs=True),
    "ct48_gptq_w": Case(FOUR_EIGHT, CT, weights="gptq"),
    "ct48_learned_w": Case(FOUR_EIGHT, CT, weights="learned"),
    "ct48_hadamard_w": Case(FOUR_EIGHT, CT, transform="hadamard_block"),
    "ct48_hadamard_wa": Case(FOUR_EIGHT, CT, inputs=True, transform="hadamard_block"),
    "ct48_hadamard_selected_w": Case(FOUR_EIGHT, CT, transform="hadamard_selected"),
    "ct48_rotated_w": Case(FOUR_EIGHT, CT, transform="learned"),
    "ct48_rotated_wa": Case(FOUR_EIGHT, CT, inputs=True, transform="learned"),
    "nvfp4_fp8_w": Case((NVFP4, FP8), CT),
    "nvfp4_fp8_gptq_w": Case((NVFP4, FP8), CT, weights="gptq"),
    "nvfp4_fp8_learned_w": Case((NVFP4, FP8), CT, weights="learned"),
    "nvfp4_fp8_wa": Case((NVFP4, FP8), CT, inputs=True),
    "nvfp4_mxfp4_w": Case((NVFP4, MXFP4), CT),
    "fp8_w": Case((FP8,), CT),
    "fp8_wa": Case((FP8,), CT, inputs=True),
    "fp8_static_wa": Case((FP8,), CT, inputs=True, static_inputs=True),
    "mxfp4_fp8_w4a8": W4A8,
    "mxfp4_fp8_rotated_w4a8": replace(W4A8, transform="learned"),
    "modelopt_nvfp4_fp8_wa": Case((NVFP4, FP8), MODELOPT, inputs=True, static_inputs=True),
    "humming_w": Case(MX_FORMATS, "humming"),
    "humming_fp8_inputs": Case(MX_FORMATS, "humming", inputs=True, input_format="fp8"),
    "quark4668_w": Case(FOUR_TO_EIGHT, QUARK),
    "quark4668_wa": Case(FOUR_TO_EIGHT, QUARK, inputs=True),
    "quark46_wa": Case((MXFP4, MXFP6_E2M3), QUARK, inputs=True),
    "ct48_w_qwen2": Case(FOUR_EIGHT, CT, architecture="qwen2"),  # biases
    "quark4668_w_qwen3": Case(FOUR_TO_EIGHT, QUARK, architecture="qwen3"),  # norms of q and k
    "ct48_w_smollm2": Case(FOUR_EIGHT, CT, architecture="smollm2"),  # tied embeddings
}
MORE_FAMILIES = {
    "ct4_wa": Case((MXFP4,), CT, inputs=True),
    "ct8_wa": Case((MXFP8_E4M3,), CT, inputs=True),
    "quark46_w": Case((MXFP4, MXFP6_E2M3), QUARK),
    "nvfp4_fp8_bf16_w": Case((NVFP4, FP8, BF16), CT),
    "ct468_w": Case((MXFP4, MXFP6_E2M3, MXFP8_E4M3), CT),  # for transformers alone
}
"""Of layers that CASES has in other mixtures: for the table of one model by runtime."""
ALL = CASES | MORE_FAMILIES
RANDOM: dict[str, Shape] = {"llama_1b_random": LLAMA_1B}
"""Shapes whose weights are drawn: their speed is that of the trained model."""
OF_TINY_ALONE = ("ct48_w_qwen2", "quark4668_w_qwen3", "ct48_w_smollm2")


def in_turn(
    model: nn.Module, formats: Iterable[BlockFormat], input_format: str | None = None
) -> Assignment:
    """Formats one after another, in the order of the units."""
    formats = tuple(formats)
    space = build_space(model, formats, units="fused", input_format=input_format)
    return make_assignment(space, np.arange(len(space.units)) % len(formats), model)


def transform_of(name: str, assignment: Assignment) -> Transform:
    """Every input rotated, by a matrix of its own where they are learned; every second where they are selected."""
    inputs = list(dict.fromkeys(map(fused_group, assignment.quantized)))
    if name == "hadamard_selected":
        return Transform(name, inputs=frozenset(inputs[::2]))
    if name != "learned":
        return Transform(name)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(32, 32, generator=generator, dtype=torch.float64) for _ in inputs]
    return Transform(
        name,
        rotations={n: torch.linalg.qr(x)[0].float() for n, x in zip(inputs, drawn, strict=True)},
    )


def assigned(case: Case, model: nn.Module, vocabulary: int) -> Assignment:
    """The case's assignment, with its weights."""
    assignment = in_turn(model, case.formats, case.input_format)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(vocabulary, (2, 32), generator=generator)]
    if case.transform is not None:
        assignment = transform_of(case.transform, assignment).attach(assignment, model)
    if NVFP4 in case.formats:
        assignment = dmx.share_scales(model, assignment, per_tensor=case.target == MODELOPT)
    if case.inputs or (NVFP4 in case.formats and case.weights != "nearest"):  # as a search does
        assignment = dmx.calibrate_inputs(model, assignment, batches, static=case.static_inputs)
    if case.weights == "gptq":
        return dmx.gptq(model, assignment, batches)
    if case.weights == "learned":
        return dmx.learn_weights(model, assignment, batches, dmx.LearnConfig(steps=2, warmup=0))
    return assignment


def tiny(architecture: str) -> nn.Module:
    """Random, with weights large enough for log-probabilities that feel quantization."""
    config = ModelConfig(
        id=f"tiny_{architecture}", tiny=TinyConfig(architecture=architecture, **TINY)
    )
    model = load_model(config).model
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.data *= 8 if "lm_head" in name else 4
    return model


def write(model: Any, case: Case, folder: Path, tokenizer: Any = None) -> None:
    """The exported folder. It is not loaded again: the engine will."""
    assignment = assigned(case, model, min(256, int(model.config.vocab_size)))
    dmx.export(
        model,
        assignment,
        folder,
        target=case.target,
        inputs=case.inputs,
        verify=False,
        tokenizer=tokenizer,
    )


def write_tiny(place: Path, names: Collection[str] = tuple(CASES)) -> None:
    """A folder a case, and bf16: the Llama in full precision."""
    chosen = {name: case for name, case in ALL.items() if name in names}
    models = {name: tiny(name) for name in {"llama", *(c.architecture for c in chosen.values())}}
    models["llama"].save_pretrained(place / "bf16")  # type: ignore[operator]
    for name, case in chosen.items():
        write(models[case.architecture], case, place / name)


def write_model(config: str, place: Path, names: Collection[str] = tuple(CASES)) -> None:
    """The same of a model of configs/model, in its own tokens, or of random weights in a model's shape."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if config in RANDOM:
        model, tokenizer = make_model(RANDOM[config], device), None
    else:
        body: Any = OmegaConf.to_container(OmegaConf.load(CONFIGS / f"{config}.yaml"))
        loaded = load_model(ModelConfig(**body))
        model, tokenizer = loaded.model.to(device), loaded.tokenizer
        tokenizer.save_pretrained(place / "bf16")
    model.save_pretrained(place / "bf16")  # type: ignore[operator]
    failed = []
    for name, case in ALL.items():
        if name in names and name not in OF_TINY_ALONE:
            try:
                write(model, case, place / name, tokenizer)
            except Exception as error:  # the others are worth having: time on a card is short
                failed.append(f"{name}: {type(error).__name__}: {error}")
    if failed:
        raise SystemExit("\n".join(failed))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", help=f"tiny_llama, a file of configs/model, or {', '.join(RANDOM)}"
    )
    parser.add_argument("place", type=Path, help="a new folder")
    parser.add_argument("--only", nargs="+", choices=tuple(ALL), default=tuple(CASES))
    asked = parser.parse_args()
    asked.place.mkdir(parents=True)
    if asked.model == "tiny_llama":
        write_tiny(asked.place, asked.only)
    else:
        write_model(asked.model, asked.place, asked.only)


if __name__ == "__main__":
    main()
