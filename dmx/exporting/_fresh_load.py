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
