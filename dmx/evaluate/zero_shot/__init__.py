"""Zero-shot accuracy on multiple-choice tasks, with the prompts and metrics of lm-eval."""

from dmx.evaluate.zero_shot.evaluation import ZeroShot, check_settings, zero_shot
from dmx.evaluate.zero_shot.scoring import NonFiniteError
from dmx.evaluate.zero_shot.tasks import METRICS, TASKS, Result

__all__ = [
    "METRICS",
    "TASKS",
    "NonFiniteError",
    "Result",
    "ZeroShot",
    "check_settings",
    "zero_shot",
]
