"""Run as a script in a process of its own: load a folder as its users will, and report logits.

Knows transformers and nothing of dmx: what passes here, passes anywhere. Reads a JSON job
(folder, tokens, device, threads, attention, out), writes `out` (safetensors: logits of the first
rows, loss of every row) and `out`.json (versions, what the loader said).
"""

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor


def rows_of(model: Any, tokens: Tensor, kept: int) -> dict[str, Tensor]:
    """Logits of the first `kept` rows and the mean loss of every row.

    Args:
        tokens: (rows, window) int64.

    Returns:
        logits (kept, window, vocabulary) in the model's dtype; losses (rows,) float64, nats/token.
    """
    device = next(model.parameters()).device
    logits, losses = [], []
    with torch.no_grad():
        for i, row in enumerate(tokens.to(device)):
            out = model(input_ids=row[None], use_cache=False).logits
            losses.append(F.cross_entropy(out[0, :-1].float(), row[1:]).double())
            if i < kept:
                logits.append(out.cpu())
    return {"logits": torch.cat(logits), "losses": torch.stack(losses).cpu()}


def rotate_inputs(model: Any, folder: Path) -> set[str]:
    """Has compressed-tensors rotate inputs as the folder's transform_config says, which transformers ignores.

    Matrices are those of the files over the root of their size, as vLLM takes them.

    Returns:
        Names of the tensors of the files that were used.
    """
    from compressed_tensors.transform import TransformConfig, apply_transform_config

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    groups = config["transform_config"]["config_groups"]
    for group in groups.values():  # the weights in the files are rotated already
        group["apply"] = [one for one in group["apply"] if one["location"] == "input"]
    apply_transform_config(model, TransformConfig(config_groups=groups))
    dense = tuple(f".{name}_input" for name, g in groups.items() if g["type"] == "random-matrix")
    modules = {n: m for n, m in model.named_modules() if dense and n.endswith(dense)}
    used = set()
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            module = modules.get(name.removesuffix(".weight"))
            if module is not None:
                module.weight.data.copy_(tensor / tensor.shape[0] ** 0.5)
                used.add(name)
    if missing := {f"{name}.weight" for name in modules} - used:
        raise KeyError(f"matrices are missing: {sorted(missing)[:3]}")
    return used


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def files_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder."""
    files: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        files |= load_file(path)
    return files


def modelopt_weights(folder: Path) -> dict[str, Tensor]:
    """State dict in bf16 of a folder in ModelOpt's layout, by ModelOpt's formulas."""
    stated = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    files, state = files_of(folder), {}
    for layer, how in stated["quantized_layers"].items():
        codes, scale = files.pop(f"{layer}.weight"), files.pop(f"{layer}.weight_scale").float()
        files.pop(f"{layer}.input_scale", None)
        if how["quant_algo"] == "FP8":
            state[f"{layer}.weight"] = (codes.float() * scale).bfloat16()
            continue
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
        values = _E2M1[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
        scale = scale * files.pop(f"{layer}.weight_scale_2")
        blocks = values.unflatten(-1, (-1, how["group_size"])) * scale[..., None]
        state[f"{layer}.weight"] = blocks.flatten(-2).bfloat16()
    return state | files


def small_floats(dtype: str) -> Tensor:
    """(2**bits,) float32: values of humming's `float6e2m3` and its like by code; without Inf and NaN."""
    bits, exponent_bits, mantissa_bits = map(int, re.findall(r"\d+", dtype))
    code = torch.arange(2**bits)
    fraction = (code % 2**mantissa_bits) / 2**mantissa_bits
    exponent = code // 2**mantissa_bits % 2**exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    value = torch.exp2((exponent.clamp(min=1) - bias).float()) * (fraction + (exponent > 0))
    return torch.where(code >= 2 ** (bits - 1), -value, value)


def humming_weights(folder: Path) -> dict[str, Tensor]:
    """State dict in bf16 of a folder in humming's layout, the format of a layer by the first pattern for its name."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    chosen = {key[2:]: own for key, own in config["dynamic"].items() if key[0] == "+"}
    files = files_of(folder)
    state = {}
    for name in [name for name, tensor in files.items() if tensor.dtype == torch.int32]:
        layer = name.removesuffix(".weight")
        own = next(own for pattern, own in chosen.items() if re.match(pattern, layer))
        values = small_floats(own["b_dtype"])
        bits = len(values).bit_length() - 1
        words = files.pop(name).long() & 0xFFFFFFFF
        wide = torch.stack((words, torch.cat((words[:, 1:], words[:, :1]), 1) << 32), -1).sum(-1)
        position = torch.arange(words.shape[1] * 32 // bits) * bits
        codes = wide[:, position // 32] >> (position % 32) & (len(values) - 1)
        scale = files.pop(f"{layer}.weight_scale").float()
        blocks = values[codes].unflatten(-1, (-1, config["weight_scale_group_size"]))
        state[name] = (blocks * scale[..., None]).flatten(-2).bfloat16()
    return state | files


def decompressed(folder: Path) -> dict[str, Tensor]:
    """State dict in bf16 of a folder of compressed-tensors, layer by layer by its own decompressors.

    transformers itself reads one format for all experts of a model, if that."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    files = files_of(folder)
    for group in QuantizationConfig.model_validate(config).config_groups.values():
        compressor = BaseCompressor.get_value_from_registry(group.format or config["format"])
        for layer in group.targets:
            own = {name for name in files if name.rpartition(".")[0] == layer} - {f"{layer}.bias"}
            tensors = {name.rpartition(".")[2]: files.pop(name) for name in own}
            files[f"{layer}.weight"] = compressor.decompress(tensors, group)["weight"].bfloat16()
    return files


def with_stacked_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with `...experts.7.gate_proj.weight` and the like as 3-D parameters."""
    ends = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    blocks: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name in [name for name in state if ".experts." in name]:
        path, _, rest = name.rpartition(".experts.")
        expert, _, kind = rest.partition(".")
        if kind in ends:
            blocks.setdefault(f"{path}.experts", {})[int(expert), kind] = state.pop(name)
    for path, parts in blocks.items():
        each = range(1 + max(expert for expert, _ in parts))
        gate, up, down = (
            torch.stack([parts[e, f"{kind}_proj.weight"] for e in each])
            for kind in ("gate", "up", "down")
        )
        state |= {f"{path}.gate_up_proj": torch.cat([gate, up], 1), f"{path}.down_proj": down}
    return state


_OWN_NAMES = {
    r"\.block_sparse_moe\.(?=(gate|experts)\.)": ".mlp.",
    r"(?<=\.experts\.)(\d+)\.w1\.": r"\1.gate_proj.",
    r"(?<=\.experts\.)(\d+)\.w3\.": r"\1.up_proj.",
    r"(?<=\.experts\.)(\d+)\.w2\.": r"\1.down_proj.",
}
"""Of Mixtral's files -> what transformers calls them."""


def transformers_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict under the names of transformers, where files have the model's own."""
    if not any(".block_sparse_moe." in name for name in state):
        return state
    renamed = {}
    for name, tensor in state.items():
        for own, new in _OWN_NAMES.items():
            name = re.sub(own, new, name)
        renamed[name] = tensor
    return renamed


class Reader(NamedTuple):
    """What reads a folder that transformers does not load as it is."""

    weights: Callable[[Path], dict[str, Tensor]]
    """folder -> state dict in bf16"""
    whose: str
    """Whose arithmetic that is, in words."""


TRANSFORMERS, MODELOPT, HUMMING, EXPERTS = "transformers", "modelopt", "humming", "experts"
READERS = {
    MODELOPT: Reader(modelopt_weights, "modelopt's formulas"),
    HUMMING: Reader(humming_weights, "humming's formulas"),
    EXPERTS: Reader(decompressed, "compressed-tensors' own decompressors"),
}
"""All but `TRANSFORMERS`, which loads folders as they are."""


def load_dequantized(
    folder: Path, attention: str | None, reader: str
) -> tuple[Any, dict[str, Any]]:
    """A model of weights that were dequantized, and what was missing or unexpected."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    options = {} if attention is None else {"attn_implementation": attention}
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)
    state = transformers_names(READERS[reader].weights(folder))
    if any(name.endswith(".experts.gate_up_proj") for name in model.state_dict()):
        state = with_stacked_experts(state)
    info = model.load_state_dict(state, strict=False)
    model.tie_weights()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return model, {
        "missing_keys": set(info.missing_keys) - tied,
        "unexpected_keys": set(info.unexpected_keys),
    }


def load(job: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model as its users load it, and what was missing, unexpected or mismatched."""
    from transformers import AutoModelForCausalLM

    folder = Path(job["folder"])
    if job["reader"] in READERS:
        return load_dequantized(folder, job["attention"], job["reader"])
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        attn_implementation=job["attention"],
        output_loading_info=True,
    )
    model, info = loaded
    if job["rotates"]:
        used = rotate_inputs(model, folder)
        info["unexpected_keys"] = set(info["unexpected_keys"]) - used
    return model, info


def main(job_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    started = time.perf_counter()
    # Loaders print progress to standard output; that one is for nobody here.
    with contextlib.redirect_stdout(sys.stderr):
        model, info = load(job)
        model = model.to(job["device"]).eval()
        problems = {key: sorted(map(str, value)) for key, value in info.items() if value}
        rows = rows_of(model, load_file(job["tokens"])["tokens"], job["kept"])
    save_file(rows, job["out"])
    names = ("torch", "transformers", "safetensors", *job["packages"])
    report = {
        "versions": {name: metadata.version(name) for name in names},
        "problems": problems,
        "seconds": time.perf_counter() - started,
    }
    Path(job["out"] + ".json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
