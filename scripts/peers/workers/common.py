"""What runners have in common: reading the request, the model and the tokens, measuring, answering.

Imports no peer; torch, transformers and safetensors are in every peer's environment.
"""

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..protocol import (
    ANSWER,
    FAILURE,
    ONLINE_ROTATION,
    REQUEST,
    ROTATED,
    TOKENS,
    WEIGHTS,
    Answer,
    Request,
    end_with,
)


class Cell:
    """One request being answered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.request = Request.load(folder / REQUEST)
        tensors = load_file(str(folder / TOKENS))
        self.tokens: Tensor = tensors["tokens"].to(self.request.device)
        """(rows, window) int64"""
        self._evaluation: Tensor = tensors["evaluation"][: self.request.own_windows]
        self.notes: list[str] = []
        self._seconds = 0.0
        self._peak = 0

    @property
    def layers(self) -> list[str]:
        """That are to have a format."""
        return [layer for unit in self.request.units for layer in unit]

    def model(self) -> Any:
        """The model in eval mode."""
        from transformers import AutoModelForCausalLM

        asked = self.request
        dtype = getattr(torch, asked.dtype)
        model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype)
        return model.to(asked.device).eval()

    def tokenizer(self) -> Any:
        """The model's."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.request.model)

    def batches(self) -> list[dict[str, Tensor]]:
        """A row a batch, as transformers' models take them."""
        return [
            {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])}
            for row in self.tokens
        ]

    def timed(self, work: Callable[[], Any]) -> Any:
        """What the work returns; its time adds to the answer's, and on a GPU its peak is the answer's if it is the highest."""
        cuda = self.request.device.startswith("cuda")
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = work()
        if cuda:
            torch.cuda.synchronize()
            self._peak = max(self._peak, torch.cuda.max_memory_allocated())
        self._seconds += time.perf_counter() - start
        return result

    def peak(self) -> int:
        """Of the allocator of the GPU in timed work, or of the process so far."""
        if self.request.device.startswith("cuda"):
            return self._peak
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def own_nll(self, made: nn.Module | Callable[[], nn.Module]) -> list[float] | None:
        """nats/token of each asked window in the tool's own model. None: not asked for, or it failed, as a note says:
        an answer is not lost for its check."""
        if not len(self._evaluation):
            return None
        try:
            model = made if isinstance(made, nn.Module) else made()
            device = torch.device(self.request.device)
            if any(p.device.type != device.type for p in model.parameters()):
                model.to(device)  # a tool may leave it on the CPU
            with torch.no_grad():
                return [self._window_nll(model, row) for row in self._evaluation]
        except Exception as error:
            self.notes.append(f"its own measurement failed ({type(error).__name__}: {error})"[:300])
            return None

    def _window_nll(self, model: nn.Module, row: Tensor) -> float:
        ids = row.to(self.request.device)
        logits = model(input_ids=ids[None]).logits[0].float()
        return float(F.cross_entropy(logits[:-1], ids[1:]))

    def save_weights(self, weights: dict[str, Tensor]) -> None:
        """layer -> dequantized weight."""
        held = {f"{name}.weight": w.detach().cpu().contiguous() for name, w in weights.items()}
        save_file(held, str(self.folder / WEIGHTS))

    def save_rotated(
        self, parameters: Mapping[str, Tensor], rotation: Tensor | None, online: Sequence[str]
    ) -> None:
        """Of a rotated model.

        Args:
            parameters: all that are no layer's weight.
            rotation: as ONLINE_ROTATION has it, of the inputs of the layers `online`.
        """
        held = parameters if rotation is None else {**parameters, ONLINE_ROTATION: rotation}
        # Copies: tied tensors share memory, which safetensors refuses.
        kept = {n: t.detach().to("cpu", copy=True).contiguous() for n, t in held.items()}
        save_file(kept, str(self.folder / ROTATED), metadata={ONLINE_ROTATION: " ".join(online)})

    def answer(
        self,
        formats: dict[str, str],
        packages: Sequence[str],
        *,
        peak: int,
        said_bits: float | None = None,
        own_nll: list[float] | None = None,
    ) -> None:
        """Leave the answer.

        Args:
            packages: whose versions it names; torch and transformers go without saying.
            peak: `peak()` after the timed work, before the own measurement.
        """
        names = (*packages, "torch", "transformers")
        Answer(
            formats={layer: formats[layer] for layer in self.layers},
            seconds=self._seconds,
            peak_memory_bytes=peak,
            versions={name: version_of(name) for name in names},
            said_bits=said_bits,
            own_nll=own_nll,
            notes=self.notes,
        ).save(self.folder / ANSWER)


def version_of(package: str) -> str:
    """Of its distribution, or, where there is only a folder of its code, as that says it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(import_module(package).__version__)


def main(run: Callable[[Cell], None]) -> None:
    """Answer the cell that the command line names; a failure is left in its folder, too. A second argument is that of
    `end_with`."""
    folder = Path(sys.argv[1])
    for descriptor in sys.argv[2:]:
        end_with(int(descriptor))
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    try:
        cell = Cell(folder)
        torch.manual_seed(cell.request.seed)
        run(cell)
    except BaseException:
        (folder / FAILURE).write_text(traceback.format_exc())
        raise
