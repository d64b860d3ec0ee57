"""Our own loader of exported folders: back to fake-quantized modules and their assignment.

Weights are decoded from the files' bytes, so what is measured is what was written. Quantizing a
decoded weight again gives the same values: they lie on the grid already.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from dmx.applying.apply import apply
from dmx.applying.stored import StoredWeight, sample_of, to_bytes
from dmx.assignment.assignment import Assignment
from dmx.errors import AssignmentError, FormatError, ModelError
from dmx.exporting.exporter import FACTS_FILE
from dmx.exporting.layouts import Layout
from dmx.exporting.names import model_names
from dmx.exporting.plan import LAYOUTS
from dmx.exporting.reading import read_assignment
from dmx.exporting.rotating import read_transform, rotation_names
from dmx.files import read_json
from dmx.models.config import ModelConfig
from dmx.models.locating import explained
from dmx.models.weight_files import check_whole
from dmx.transforms.block import BlockRotation
from dmx.transforms.stage import Transform

FROM_FILES = "files"
"""What an assignment's `weights` are called that are the bytes of files."""
METHODS = {
    "compressed-tensors": "compressed_tensors",
    "quark": "quark",
    "humming": "humming",
    "torchao": "torchao",
    "modelopt": "modelopt_checkpoint",
}


@dataclass(frozen=True)
class LoadedExport:
    """A model of exported files, quantized as they say, in eval mode and in bf16."""

    model: nn.Module
    tokenizer: Any
    """None where the folder holds none."""
    assignment: Assignment
    target: str
    inputs: bool
    """Whether inputs are quantized."""


def is_exported(folder: Path) -> bool:
    """Whether `load_exported` reads this folder: weights, and a config of a layout known here."""
    return any(folder.glob("*.safetensors")) and _method(_config(folder)) in METHODS


def assignment_of_files(folder: Path) -> Assignment:
    """That of an exported folder, for the weights in its files: transformed and rounded as it says, they are rounded to
    nearest as they are."""
    exported = Assignment.load(folder / "assignment.json")
    return replace(exported, transform=None, weights=None)


def _config(folder: Path) -> dict[str, Any]:
    try:
        body = read_json(folder / "config.json")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} cannot be read ({error}).") from error
    return body if isinstance(body, dict) else {}


def _method(config: Mapping[str, Any]) -> str:
    return str((config.get("quantization_config") or {}).get("quant_method"))


def load_exported(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    inputs: bool | None = None,
    attn_implementation: str | None = None,
) -> LoadedExport:
    """Read a folder of `dmx.export`, or of another tool whose formats this project has.

    Args:
        inputs: quantize inputs too; None = as the folder was exported.
        attn_implementation: None = transformers' choice.

    Raises:
        ModelError: no such folder, or its tensors are not those its config asks for.
        FormatError: a format or layout that is not read here. AssignmentError: names do not fit.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} holds no config.json; give a folder that dmx.export wrote.")
    body = _config(folder)
    method = _method(body)
    if method not in METHODS:
        raise FormatError(
            f"{folder}: quant_method {method!r} is not read here. Read are: {', '.join(METHODS)}."
        )
    layout = LAYOUTS[METHODS[method]]
    with explained(ModelConfig(id=str(folder)), on_hub=False):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    del config.quantization_config
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options)
    model = made.eval()
    if (folder / "assignment.json").is_file():
        assignment = assignment_of_files(folder)
        assignment.check(model)
    else:
        assignment = read_assignment(body, model)
    names = rotation_names(body["quantization_config"])
    matrices = (
        {names[name]: tensor for name, tensor in _tensors(folder) if name in names} if names else {}
    )
    transform = read_transform(body["quantization_config"], matrices, assignment.quantized)
    with assignment.linear_experts(model):
        stored, input_amax = _fill(model, folder, layout, assignment, transform, set(names))
        assignment = transform.attach(assignment, model)
    if input_amax and assignment.input_amax is None:
        assignment = replace(assignment, input_amax=input_amax)
    if stored:
        in_order = {name: stored[name] for name in assignment.quantized}
        content = to_bytes(in_order, "files")
        assignment = assignment.with_artifact("weights", content, {"name": FROM_FILES})
    if inputs is None:
        facts = folder / FACTS_FILE
        inputs = _stated_inputs(facts) if facts.is_file() else True
    apply(model.to(device), assignment, inputs=inputs)
    return LoadedExport(model, _tokenizer(folder), assignment, layout.name, inputs)


def _stated_inputs(facts: Path) -> bool:
    check_whole(facts)
    stated = read_json(facts)
    if not isinstance(stated, dict) or not isinstance(stated.get("inputs"), bool):
        raise ModelError(f"{facts} is damaged: it says nothing of inputs. Export again.")
    return bool(stated["inputs"])


def _fill(
    model: Any,
    folder: Path,
    layout: Layout,
    assignment: Assignment,
    transform: Transform,
    others: set[str],
) -> tuple[dict[str, StoredWeight], dict[str, float]]:
    """Put the files' values into the model, strictly: nothing missing, nothing left over.

    Args:
        transform: that weights in the files were rotated by; in the model they are rotated back.
        others: tensors of the files that are not the model's.

    Returns:
        The quantized weights as the files hold them, {} where all are in MX formats; layer -> what the
        global scale of its input is made for.
    """
    formats = assignment.block_formats("weight")
    of_inputs = assignment.block_formats("input")
    input_amax: dict[str, float] = {}
    waiting: dict[str, dict[str, Tensor]] = {layer: {} for layer in formats}
    state = dict(model.state_dict())
    left = set(state)
    stored: dict[str, StoredWeight] = {}
    # Decoded and quantized again, other formats than MX would not give the same values to the bit.
    keeps = transform.name != "none" or any(not f.is_mx for f in formats.values())
    named = model_names(model)
    for name_there, tensor in _tensors(folder):
        if name_there in others:
            continue
        name = named(name_there)
        layer, _, last = name.rpartition(".")
        specs = layout.specs(formats[layer], assignment.shapes[layer]) if layer in waiting else {}
        if last in specs:
            waiting[layer][last] = tensor
            if len(waiting[layer]) == len(specs):
                tensors = waiting.pop(layer)
                weight = layout.decode(tensors, formats[layer], torch.bfloat16)
                _copy(state, f"{layer}.weight", _rotated_back(weight, layer, transform))
                left.discard(f"{layer}.weight")
                if layout.decode_stored is not None and keeps:
                    stored[layer] = layout.decode_stored(tensors, formats[layer])
                    stored[layer].sample = sample_of(weight)
        elif layer in of_inputs and last in layout.input_amax:
            input_amax[layer] = layout.input_amax[last](tensor, of_inputs[layer])
        elif name in state:
            _copy(state, name, tensor)
            left.discard(name)
        else:
            raise ModelError(f"{folder}: tensor {name_there} belongs to no layer of the model")
    filled = {state[name].data_ptr() for name in set(state) - left}
    missing = sorted(n for n in left if state[n].data_ptr() not in filled)  # tied ones are filled
    if missing or waiting:
        raise ModelError(
            f"{folder}: tensors are missing for {', '.join([*missing, *waiting][:3])}. Get the "
            "files again."
        )
    return stored, input_amax


def _rotated_back(weight: Tensor, layer: str, transform: Transform) -> Tensor:
    """A weight of the files without the rotation that they hold it under."""
    if not transform.rotates(layer):
        return weight
    return BlockRotation(transform.rotation(layer).mT.contiguous()).of_weight(weight)


def _copy(state: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    if state[name].shape != tensor.shape:
        raise AssignmentError(
            f"{name} is {tuple(tensor.shape)} in the files and {tuple(state[name].shape)} in the "
            "model of its config.json"
        )
    with torch.no_grad():
        state[name].copy_(tensor)


def _tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelError(f"{folder} holds no safetensors files.")
    for path in paths:
        check_whole(path)
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not (folder / "tokenizer_config.json").is_file():
        return None
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
