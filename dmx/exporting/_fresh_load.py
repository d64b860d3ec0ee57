"""Run as a script in a process of its own: load a folder as its users will, and report logits.

Knows transformers and nothing of dmx: what passes here, passes anywhere. Reads a JSON job
(folder, tokens, device, threads, attention, out), writes `out` (safetensors: logits of the first
rows, loss of every row) and `out`.json (versions, what the loader said).
"""

import contextlib
import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

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


def main(job_file: str) -> None:
    from transformers import AutoModelForCausalLM

    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    started = time.perf_counter()
    # Loaders print progress to standard output; that one is for nobody here.
    with contextlib.redirect_stdout(sys.stderr):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            job["folder"],
            dtype=torch.bfloat16,
            attn_implementation=job["attention"],
            output_loading_info=True,
        )
        model, info = loaded
        if job["rotates"]:
            used = rotate_inputs(model, Path(job["folder"]))
            info["unexpected_keys"] = set(info["unexpected_keys"]) - used
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
