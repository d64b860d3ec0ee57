"""Which run of a stage of the weights this is."""

import json
from typing import Any

from torch import nn

from dmx.assignment.assignment import Assignment
from dmx.files import sha256
from dmx.models.identity import model_fingerprint


def weights_fingerprint(model: nn.Module, assignment: Assignment, facts: dict[str, Any]) -> str:
    """Hash of everything that the numbers depend on, but for the machine."""
    body = {
        "facts": facts, "formats": dict(assignment.formats),
        "input_formats": assignment.input_formats and dict(assignment.input_formats),
        "scale_rules": {k: dict(v) for k, v in assignment.scale_rules.items()},
        "transform": assignment.transform and dict(assignment.transform),
        **({"input_amax": dict(assignment.input_amax)} if assignment.input_amax else {}),
        **({"weight_amax": dict(assignment.weight_amax)} if assignment.weight_amax else {}),
        **model_fingerprint(model),
    }  # fmt: skip
    return sha256(json.dumps(body, sort_keys=True).encode())
