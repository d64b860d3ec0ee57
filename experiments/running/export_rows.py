"""What the record of an export says: its rows and its facts."""

from collections import Counter
from typing import Any

from torch import nn

from dmx.assignment.assignment import Assignment
from dmx.evaluate.perplexity import perplexity_of
from dmx.exporting import Exported
from experiments.running.config import EvaluationConfig
from experiments.running.run import Run

_OVER = "perplexity_reason", "nll_reason"


def export_facts(done: Exported, assignment: Assignment) -> dict[str, Any]:
    """`export` of the record. `formats` counts layers; `verification` has the losses, the
    difference and the versions."""
    found = done.verification
    return {
        "target": done.target, "profile": done.profile, "inputs": done.inputs,
        "formats": dict(Counter(assignment.formats.values())), "input_rule": done.input_rule, "bytes": done.bytes or None,
        "verification": None if found is None else found.to_dict(),
    }  # fmt: skip


def actual_settings(done: Exported, model: nn.Module) -> dict[str, Any]:
    """What ran, under the names of the settings."""
    parameter = next(model.parameters())
    actual: dict[str, Any] = {
        "target": done.target, "inputs": done.inputs, "profile": done.profile,
        "run": {"device": str(parameter.device)},
        "model": {"dtype": str(parameter.dtype).removeprefix("torch.")},
    }  # fmt: skip
    if done.bytes:  # names alone are not loaded
        actual["verify"] = done.verification is not None
    return actual


def export_rows(
    run: Run, done: Exported, model: nn.Module, assignment: Assignment, windows: int
) -> None:
    """Rows of the model in memory and of the files, as the fresh process measured them.

    Args:
        windows: of the evaluation text that were compared; 0 = tokens of no text, whose perplexity
            means nothing.
    """
    found = done.verification
    sides = (
        ("fake-quantized", None if found is None else found.reference_loss),
        ("exported files", None if found is None else found.loss),
    )
    for label, loss in sides:
        row = run.measure(
            model, None, EvaluationConfig(), label=label, assignment=assignment,
            operands="W+A" if done.inputs else "W", path="assignment.json",
            search=assignment.search.name,
        )  # fmt: skip
        if windows and found is not None and loss is not None:
            row = {k: v for k, v in row.items() if k not in _OVER} | {
                "perplexity": perplexity_of(loss), "nll": loss, "windows": windows,
                "tokens": found.tokens - windows, "window_nll": None,
            }  # fmt: skip
        else:
            row |= dict.fromkeys(_OVER, "no text was compared: windows=0")
        run.rows.append(row)


def verdict_text(done: Exported) -> str:
    name = f"{done.target}{f', profile {done.profile}' if done.profile else ''}"
    found = done.verification
    if found is None:
        return f"Written for {name}; not loaded again." if done.bytes else f"Names for {name}."
    if found.equal:
        return (
            f"Written for {name}, loaded by {found.loader} in a fresh process: logits of "
            f"{found.tokens} tokens equal the fake-quantized model's bit for bit."
        )
    return (
        f"Written for {name}, loaded by {found.loader} in a fresh process: with inputs quantized by "
        f"its rule, logits of {found.tokens} tokens differ by up to {found.max_difference:.4g}, KL "
        f"{found.kl:.3e} nats/token."
    )
