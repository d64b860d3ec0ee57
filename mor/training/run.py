"""One step, one validation, and what a stopped run goes on from.

Weights are float32, products run under autocast in BF16, MoR decides inside that. Everything that
a step needs follows from the seed and the step's number, so a run that died goes on from its last
checkpoint with the same numbers.
"""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mor._base import evaluating, write_atomic
from mor.config import MorError
from mor.outliers import FrozenChannels, largest_channel, rescale_channels
from mor.swap import decision_state, load_decision_state
from mor.training.config import TrainConfig

CHECKPOINT = "checkpoint.pt"


def batch_indices(step: int, n_windows: int, batch_size: int, seed: int) -> Tensor:
    """Windows of a step: each pass is a new permutation, its incomplete last batch is dropped."""
    per_epoch = n_windows // batch_size
    epoch, position = divmod(step, per_epoch)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(n_windows, generator=generator)
    return order[position * batch_size : (position + 1) * batch_size]


def next_token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean negative log likelihood of each row, float32: (B, T, V), (B, T) -> (B,), nats/token.

    One row at a time, and again in the backward pass: float32 copies of all logits would be most of
    a step's memory (batches of 32 x 1024 tokens and a vocabulary of 49,152: 6.4 GB each).
    """

    def row_loss(row: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(row[:-1].float(), targets[1:])

    losses = [
        checkpoint(row_loss, row, targets, use_reentrant=False)
        for row, targets in zip(logits, tokens, strict=True)
    ]
    return torch.stack(losses)


class TrainingRun:
    """Model, optimizer and outlier of a run, and its checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        optimizer: Any,
        config: TrainConfig,
        accelerator: Accelerator,
        folder: Path,
        steps: int,
        seed: int,
    ) -> None:
        self.model, self.wrapped, self.optimizer = model, wrapped, optimizer
        self.config, self.accelerator = config, accelerator
        self.path = folder / CHECKPOINT
        self.seed = seed
        # A checkpoint of another schedule or order would be continued with wrong numbers.
        self.identity = {
            "steps": steps,
            "seed": seed,
            "batch_size": config.batch_size,
            "lr": config.lr,
            "window": config.window,
            "outlier_step": config.outlier.step,
        }
        self.held: FrozenChannels | None = None
        self.balance = float(getattr(model.config, "router_aux_loss_coef", None) or 0.0)
        """Weight of the loss that keeps experts in equal use; 0 without experts."""
        self.routed = {"output_router_logits": True} if self.balance else {}
        self.has_mor = any(hasattr(m, "handle") for m in model.modules())

    @classmethod
    def prepare(
        cls,
        model: nn.Module,
        config: TrainConfig,
        accelerator: Accelerator,
        folder: Path,
        steps: int,
        seed: int,
    ) -> "TrainingRun":
        """A run of a model as it is, with AdamW; both go to the accelerator's device.

        Raises:
            MorError: activation checkpointing is asked of a model without it.
        """
        if config.activation_checkpointing:
            _enable_activation_checkpointing(model)
        optimizer = torch.optim.AdamW(
            _parameter_groups(model, config.weight_decay),
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
        )
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        return cls(model, wrapped, optimizer, config, accelerator, folder, steps, seed)

    def step(self, step: int, windows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One optimizer step; loss and gradient norm, 0-d, on the device."""
        outlier = self.config.outlier
        if step == outlier.step:
            rescale_channels(self.model, outlier.layer, self._channels(), outlier.exponent)
            self._hold()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        indices = batch_indices(step, len(windows), self.config.batch_size, self.seed)
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        batch = windows[indices[rank::processes]].to(self.accelerator.device, non_blocking=True)
        self.wrapped.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self.accelerator.autocast():
            output = self.wrapped(input_ids=batch, use_cache=False, **self.routed)
        loss = next_token_losses(output.logits, batch).mean()
        balance = self.balance * output.aux_loss if self.routed else 0.0
        # Backward passes with Python in them would wait for autograd's own thread at every layer.
        with torch.autograd.set_multithreading_enabled(False):
            self.accelerator.backward(loss + balance)
        if self.held is not None:
            self.held.clear_gradients()
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
        if self.held is not None:
            self.held.restore()
        return self.accelerator.reduce(loss.detach(), reduction="mean"), norm.detach()

    @torch.no_grad()
    def validate(self, windows: Tensor) -> Tensor:
        """(windows,) float64 mean loss of each, on the CPU; each process reads all of them."""
        rows = []
        with evaluating(self.model):
            for batch in windows.split(self.config.batch_size):
                batch = batch.to(self.accelerator.device)
                with self.accelerator.autocast():
                    logits = self.model(input_ids=batch, use_cache=False).logits
                rows.append(next_token_losses(logits, batch))
        return torch.cat(rows).double().cpu()

    def _channels(self) -> list[int]:
        # Scaled up, the largest is the largest still: a resumed run finds the same one.
        outlier = self.config.outlier
        return outlier.channels or [largest_channel(self.model, outlier.layer)]

    def _hold(self) -> None:
        self.held = FrozenChannels(self.model, self.config.outlier.layer, self._channels())

    def save(self, step: int, seconds: float) -> None:
        """Everything that the run needs to go on before `step`; by the main process only."""
        if not self.accelerator.is_main_process:
            return
        state = {
            "identity": self.identity,
            "step": step,
            "seconds": seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "mor": decision_state(self.model) if self.has_mor else None,
            "is_held": self.held is not None,
        }
        write_atomic(self.path, lambda file: torch.save(state, file))

    def resume(self) -> tuple[int, float]:
        """Step to go on with, seconds spent so far; 0, 0.0 without a checkpoint.

        Raises:
            MorError: it is damaged, or of another run.
        """
        if not self.path.exists():
            return 0, 0.0
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise MorError(
                f"{self.path} is damaged ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}). Delete it to train from the start."
            ) from error
        if not isinstance(state, dict) or not isinstance(state.get("identity"), dict):
            raise MorError(
                f"{self.path} is damaged (it holds no training state). Delete it to train from the "
                "start."
            )
        saved = state["identity"] | {"mor": state.get("mor") is not None}
        asked = self.identity | {"mor": self.has_mor}
        if saved != asked:
            raise MorError(
                f"{self.path} is the checkpoint of another run ({saved}, asked {asked}). Choose "
                "another folder, or delete it."
            )
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if state["mor"] is not None:
                load_decision_state(self.model, state["mor"])
            if state["is_held"]:
                self._hold()
            return int(state["step"]), float(state["seconds"])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MorError(
                f"{self.path} is damaged ({type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}). Delete it to train from the start."
            ) from error


def _enable_activation_checkpointing(model: nn.Module) -> None:
    # transformers renames this; both forms mean the same.
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        enable: Any = getattr(model, name, None)
        if enable is not None:
            enable({"use_reentrant": False})
            return
    raise MorError(f"{type(model).__name__} has no activation checkpointing to switch on")


def _parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
