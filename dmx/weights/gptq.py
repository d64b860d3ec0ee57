"""GPTQ after the search: weights rounded so that their errors cancel in what a layer gives.

Nearest rounding makes each weight's own error small. GPTQ makes the error of the layer's output
small, `||X W^T - X Q^T||^2`, with X the inputs that the product sees on calibration data. Columns
are rounded one after the other; what is lost in one is made good in those that are still free:

    H   = X^T X + damping * mean(diag) * I,   U upper with H^-1 = U^T U     (GPTQ's factor 2 cancels)
    e_i = (w_i - q_i) / U_ii,   w_j -= U_ij e_i  for j > i

With MX formats, 32 columns share a scale in each row. It is fixed when their first column is
reached, by the assignment's scale rule, from the weights as they then are. Columns keep their natural
order: GPTQ's order by activity would tear the blocks apart, which are contiguous along in_features.

A finished block may lie on a lattice that the scale rule would not choose for it (its largest value
has shrunk, or, under `ceil`, grown). It is quantized once more by the rule, and where that changes
a row, the errors of the block are computed again from its end: e solves U^T e = w - q there.
`fake_quant` gives its own results back, so that rounding the result again, by the same format and
rule, changes no value: exports and loaded files need nothing but the weights.

Quantizing the inputs X' to X loses something, too, which rounding to the original weights cannot
mend. `correct_inputs` rounds to weights that do, as far as a linear map can: those of the least
squares fit of X' W^T by X,

    W + W C^T H^-1,   C = X^T (X' - X)

Decoder blocks are rounded in their order, each on inputs that come from the rounded blocks before
it; inside a block, layers in the order in which they run. Layers with one input (q/k/v, gate/up)
share one Hessian. The inputs are quantized as the assignment says.

Source: GPTQ, arXiv 2210.17323, algorithm 1 and section 3.3 (lazy batches, Cholesky); block scales,
the second quantization and the correction for inputs are ours.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dmx.applying.layers import QuantLinear, apply, quantized_layers, restore
from dmx.applying.stored import StoredWeight, from_bytes, to_bytes
from dmx.assignment.assignment import Assignment
from dmx.data.batches import batches_sha256, list_batches
from dmx.errors import AssignmentError, ModelError, RunError
from dmx.files import write_atomic
from dmx.formats import BLOCK_SIZE, BlockFormat, ElementFormat, ScaleRule
from dmx.kernels import ops
from dmx.models.replay import PrefixReplay, decoder_blocks
from dmx.models.running import evaluating, model_logits
from dmx.numerics import amax_to_scale_exponent, round_to_element
from dmx.numerics.rounding import exact_power_of_two
from dmx.progress import progress
from dmx.weights.identity import weights_fingerprint

ROUNDINGS = ("nearest", "gptq")
STATE_FOLDER = "rounding_state"
LAZY_COLUMNS = 128
"""Columns whose errors reach the rest of the weight in one product; from the paper."""


@dataclass(kw_only=True)
class GptqConfig:
    """How GPTQ calibrates; used where `rounding` says gptq."""

    damping: float = 0.01
    """Share of the mean of the Hessian's diagonal that is added to it; > 0. From the paper."""
    inputs: bool = True
    """Calibrate on quantized inputs, as W+A runs; false = on full-precision inputs, as W runs."""
    correct_inputs: bool = False
    """Round to weights that also make good what quantizing the inputs loses: better as W+A, worse
    than nearest as W."""
    batches: int | None = 32
    """Calibration batches, the first so many; null = all."""

    def __post_init__(self) -> None:
        check_damping(self.damping)
        if self.batches is not None and self.batches < 1:
            raise RunError(f"gptq.batches={self.batches} must be at least 1, or null for all")


def check_damping(damping: float) -> None:
    if not (math.isfinite(damping) and damping > 0):
        raise RunError(
            f"gptq.damping={damping} must be a finite number > 0: columns that no input reaches make "
            "the Hessian singular without it. The paper's value is 0.01."
        )


# ---------------------------------------------------------------- one weight


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """U of the formulas above, (n, n) float32, upper; computed in float64.

    Args:
        hessian: (n, n) float32, a sum of x^T x. Columns without input have zeros; damping makes
            them independent of the others, so they are rounded to nearest.

    Raises:
        RunError: not finite, or not positive definite even with the damping.
    """
    h = hessian.double()
    mean = h.diagonal().mean()
    if not bool(mean.isfinite()):
        raise RunError(
            "gptq: the Hessian is not finite: the inputs of a layer overflow on the calibration "
            "data. Use another dtype (bfloat16) or other data."
        )
    if not bool(mean > 0):
        return torch.eye(len(h), device=h.device)
    h.diagonal().add_(damping * mean)
    # H turned by 180 degrees has a lower factor; turned back it is upper: H = M M^T, U = M^-1.
    lower, failed = torch.linalg.cholesky_ex(h.flip(0, 1))
    if bool(failed):
        raise RunError(f"gptq.damping={damping}: the Hessian has no Cholesky factor. Raise it.")
    identity = torch.eye(len(h), dtype=torch.float64, device=h.device)
    return torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True).float()


def _round_columns(x: Tensor, factor: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor]:
    """The inner loop over the columns of one block of 32, in units of its scale.

    Args:
        x: (columns, rows) float32; used up. factor: (columns, columns), the block's part of U.

    Returns:
        Element values and errors e, both (columns, rows).
    """
    values, errors = torch.empty_like(x), torch.empty_like(x)
    diagonal = factor.diagonal()
    for i in range(len(x)):
        values[i] = round_to_element(x[i], element)
        torch.sub(x[i], values[i], out=errors[i]).div_(diagonal[i])
        x[i + 1 :].addr_(factor[i, i + 1 :], errors[i], alpha=-1)
    return values, errors


RoundColumns = Callable[[Tensor, Tensor, ElementFormat], tuple[Tensor, Tensor]]


class GraphedColumns:
    """`_round_columns` on a GPU, captured for each shape and element: its many small launches take
    far longer than what they launch. Results are overwritten by the next call."""

    def __init__(self) -> None:
        self._captured: dict[
            Any, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
        ] = {}

    def __call__(self, x: Tensor, factor: Tensor, element: ElementFormat) -> tuple[Tensor, Tensor]:
        key = (x.shape, element)
        if key not in self._captured:
            self._captured[key] = self._capture(x, factor, element)
        graph, inputs, results = self._captured[key]
        for kept, given in zip(inputs, (x, factor), strict=True):
            kept.copy_(given)
        graph.replay()
        return results

    def _capture(self, x: Tensor, factor: Tensor, element: ElementFormat) -> Any:
        inputs = (x.clone(), factor.clone())
        side = torch.cuda.Stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            _round_columns(*inputs, element)
        torch.cuda.current_stream(x.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = _round_columns(*inputs, element)
        return graph, inputs, results


@torch.no_grad()
def round_weight(
    weight: Tensor,
    factor: Tensor,
    block_format: BlockFormat,
    scale_rule: ScaleRule,
    *,
    round_columns: RoundColumns = _round_columns,
) -> Tensor:
    """Round one weight, or the stacked weights of layers that share their input.

    Args:
        weight: (out, in) fp32, bf16 or fp16. factor: (in, in) float32 of `inverse_factor`.
        round_columns: a `GraphedColumns` gives the same bits sooner on a GPU.

    Returns:
        (out, in) float32, values of the format; `fake_quant` by it and the rule gives the same.
    """
    element = block_format.element
    assert element is not None
    free = weight.detach().float().T.contiguous()  # (in, out): a column of the weight is a row
    rounded, columns = torch.empty_like(free), len(free)
    for start in range(0, columns, LAZY_COLUMNS):
        end = min(start + LAZY_COLUMNS, columns)
        errors = torch.empty_like(free[start:end])
        for first in range(start, end, BLOCK_SIZE):
            last = min(first + BLOCK_SIZE, end)
            block, own = free[first:last], factor[first:last, first:last]
            exponent = amax_to_scale_exponent(block.abs().amax(0), element, scale_rule)
            # Powers of two: the loop in units of the scale gives the bits of the loop without.
            values, error = round_columns(block * exact_power_of_two(-exponent), own, element)
            scale = exact_power_of_two(exponent)
            values, error = values * scale, error * scale
            ruled = ops.fake_quant(values, block_format, axis=0, scale_rule=scale_rule)
            again = torch.linalg.solve_triangular(own.T, block - ruled, upper=False)
            error = torch.where((ruled != values).any(0), again, error)
            rounded[first:last], errors[first - start : last - start] = ruled, error
            free[last:end].addmm_(factor[first:last, last:end].T, error, alpha=-1)
        free[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return rounded.T.contiguous()


def corrected_weight(weight: Tensor, factor: Tensor, cross: Tensor) -> Tensor:
    """`weight + weight C^T H^-1`: the best weight for inputs that are quantized.

    Args:
        weight: (out, in) float32. factor: of `inverse_factor`. cross: C, (in, in) float32.
    """
    return weight + weight @ cross.T @ factor.T @ factor


# ---------------------------------------------------------------- a whole model


class _Recorder:
    """Stands in for the input quantizer of a layer and sums products of what it gets and gives.

    Attributes:
        hessian: X^T X of the quantized inputs X, (in, in) float32.
        cross: X^T (X' - X) with the inputs X' as they were; None unless asked for, or without a
            quantizer.
    """

    def __init__(self, layer: QuantLinear, *, with_cross: bool) -> None:
        self.quantizer = layer.input_quantizer
        shape, device = (layer.in_features, layer.in_features), layer.weight.device
        self.hessian = torch.zeros(shape, device=device)
        needs_cross = with_cross and self.quantizer is not None
        self.cross = torch.zeros(shape, device=device) if needs_cross else None

    @property
    def block_format(self) -> BlockFormat:
        assert self.quantizer is not None
        return self.quantizer.block_format

    def __call__(self, x: Tensor) -> Tensor:
        seen = x if self.quantizer is None else self.quantizer(x)
        flat = seen.reshape(-1, seen.shape[-1]).float()
        self.hessian.addmm_(flat.T, flat)
        if self.cross is not None:
            self.cross.addmm_(flat.T, x.reshape(flat.shape).float() - flat)
        return seen


class _Stop(Exception):
    """Ends a forward pass of which the rest is not needed."""


@dataclass(frozen=True)
class _Stage:
    """Layers that are rounded together; `shares_input`: all run on one tensor."""

    names: list[str]
    shares_input: bool


def _seen_through(layer: QuantLinear) -> tuple[Any, ...]:
    """What the input of a layer goes through before its product; equal for equal values."""
    rotation = layer.input_transform
    matrix = rotation.matrix.cpu().numpy().tobytes() if rotation is not None else None
    return layer.input_quantizer, matrix


class _Rounding:
    """One run of GPTQ over a model to which the assignment is applied.

    A *part* is the layers of one decoder block, or, at the end, those outside all of them; each
    leaves a file in the folder, from which a stopped run goes on.
    """

    def __init__(
        self, model: nn.Module, assignment: Assignment, batches: Sequence[Tensor],
        damping: float, correct_inputs: bool, folder: Path | None, fingerprint: str,
    ) -> None:  # fmt: skip
        self.model, self.assignment = model, assignment
        self.damping, self.correct_inputs = damping, correct_inputs
        device = next(model.parameters()).device
        self.batches = [batch.to(device) for batch in batches]
        self.folder = None if folder is None else folder / STATE_FOLDER
        self.fingerprint = fingerprint
        on_gpu = device.type == "cuda"
        self.round_columns: RoundColumns = GraphedColumns() if on_gpu else _round_columns
        self.blocks = list(decoder_blocks(model) or [])
        layers = {
            name: layer
            for name, layer in quantized_layers(model).items()
            if layer.weight_quantizer is not None
        }
        names = {id(layer): name for name, layer in layers.items()}
        self.parts = [
            {
                names[id(m)]: m
                for m in block.modules()
                if id(m) in names and isinstance(m, QuantLinear)
            }
            for block in self.blocks
        ]
        inside = {name for part in self.parts for name in part}
        self.parts.append({name: layer for name, layer in layers.items() if name not in inside})
        self.done: dict[str, StoredWeight] = {}

    # --- passes --------------------------------------------------------------------------------

    def _first_inputs(self) -> list[Tensor]:
        """Input of the first block for every batch; also learns the blocks' other arguments."""
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        handles = [
            block.register_forward_pre_hook(
                lambda _m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
            )
            for block in self.blocks
        ]
        outputs: list[Any] = []
        handles += [
            b.register_forward_hook(lambda _m, _i, y: outputs.append(y)) for b in self.blocks
        ]
        try:
            model_logits(self.model, self.batches[0])
        finally:
            for handle in handles:
                handle.remove()
        chained = len(seen) == len(self.blocks) == len(outputs) and all(
            bool(args) and isinstance(args[0], Tensor) and (i == 0 or args[0] is outputs[i - 1])
            for i, (args, _) in enumerate(seen)
        )
        if not chained:
            raise ModelError(
                f"{type(self.model).__name__} cannot be rounded by gptq: its blocks do not each take "
                "the output of the one before as their first argument. Use rounding=nearest."
            )
        # Batches have one shape and no padding, so that the other arguments are those of the first.
        self.others = [(args[1:], kwargs) for args, kwargs in seen]
        first: list[Tensor] = []

        def keep(_module: nn.Module, args: tuple[Any, ...]) -> None:
            first.append(args[0])
            raise _Stop

        handle = self.blocks[0].register_forward_pre_hook(keep)
        try:
            for batch in self.batches:
                _until_stopped(partial(model_logits, self.model, batch))
        finally:
            handle.remove()
        return first

    def _stages(self, part: dict[str, QuantLinear], run: Callable[[], object]) -> "list[_Stage]":
        """Layers by the input that they share, in the order in which they run; layers that did not
        run on this batch, as experts may, come last."""
        order: list[tuple[str, Tensor]] = []
        handles = [
            layer.register_forward_pre_hook(lambda _m, args, n=name: order.append((n, args[0])))
            for name, layer in part.items()
        ]
        try:
            run()
        finally:
            for handle in handles:
                handle.remove()
        stages: dict[int, list[str]] = {}
        for name, x in order:
            stages.setdefault(id(x), []).append(name)
        idle = [name for name in part if name not in {n for n, _ in order}]
        if len(order) + len(idle) > len(part):  # a layer that runs twice has no one place
            return [_Stage(list(part), shares_input=False)]
        found = [_Stage(names, shares_input=True) for names in stages.values()]
        return [*found, *([_Stage(idle, shares_input=False)] if idle else [])]

    def _record(
        self, part: dict[str, QuantLinear], stage: "_Stage", then: "_Stage | None",
        runs: Iterable[Callable[[], object]],
    ) -> list[tuple[list[str], _Recorder]]:  # fmt: skip
        """Run all batches and record a stage; passes end where the next one begins.

        Returns:
            Groups of layers that see the same values, and what was recorded of these.
        """
        groups: dict[Any, list[str]] = {}
        for name in stage.names:
            alone = None if stage.shares_input else name
            groups.setdefault((alone, *_seen_through(part[name])), []).append(name)
        first = [part[names[0]] for names in groups.values()]
        recorders = [_Recorder(layer, with_cross=self.correct_inputs) for layer in first]

        def stop(*_: object) -> None:
            raise _Stop

        # Layers that rest in one batch may come first in another.
        later = then.names if then is not None and then.shares_input else []
        handles = [part[name].register_forward_pre_hook(stop) for name in later]
        try:
            for layer, recorder in zip(first, recorders, strict=True):
                layer.input_quantizer = recorder
            for run in runs:
                _until_stopped(run)
        finally:
            for layer, recorder in zip(first, recorders, strict=True):
                layer.input_quantizer = recorder.quantizer
            for handle in handles:
                handle.remove()
        return list(zip(groups.values(), recorders, strict=True))

    # --- rounding ------------------------------------------------------------------------------

    def _round(self, part: dict[str, QuantLinear], names: list[str], seen: _Recorder) -> None:
        """Round the layers of one group; those of one format together."""
        factor = inverse_factor(seen.hessian, self.damping)
        by_format: dict[BlockFormat, list[str]] = {}
        for name in names:
            by_format.setdefault(self.assignment.block_format(name), []).append(name)
        for block_format, together in by_format.items():
            rule = self.assignment.rule("weight", block_format)
            weights = [part[name].weight.detach() for name in together]
            target = torch.cat(weights).float()
            if seen.cross is not None:
                target = corrected_weight(target, factor, seen.cross)
            rounded = round_weight(
                target, factor, block_format, rule, round_columns=self.round_columns
            )
            sizes = [len(weight) for weight in weights]
            for name, weight, own in zip(together, weights, rounded.split(sizes), strict=True):
                self._set(part, name, StoredWeight.of(own, weight, block_format, rule))

    def _set(self, part: dict[str, QuantLinear], name: str, stored: StoredWeight) -> None:
        self.done[name] = stored
        part[name].weight_quantizer, part[name]._cached = stored, None

    def _round_part(
        self, part: dict[str, QuantLinear], runs: Sequence[Callable[[], object]],
        advance: Callable[[str], None], *, one_by_one: bool,
    ) -> None:  # fmt: skip
        whole = [_Stage(list(part), shares_input=False)]
        stages = self._stages(part, runs[0]) if one_by_one else whole
        for stage, then in zip_longest(stages, stages[1:]):
            for names, seen in self._record(part, stage, then, runs):
                self._round(part, names, seen)
            for name in stage.names:
                advance(name)

    @torch.no_grad()
    def run(self) -> dict[str, StoredWeight]:
        """layer -> its rounded weight."""
        saved = self._resume()
        total = sum(map(len, self.parts))
        with progress("gptq", total, done=sum(map(len, self.parts[:saved]))) as advance:
            if saved == len(self.parts) or total == len(self.done):
                return self.done
            hidden = self._first_inputs() if self.blocks else []
            for k, block in enumerate(self.blocks):
                part, (args, kwargs) = self.parts[k], self.others[k]
                runs = [partial(block, x, *args, **kwargs) for x in hidden]
                if k >= saved:
                    if part:
                        self._round_part(part, runs, advance, one_by_one=True)
                    self._save(k)
                hidden = [run() for run in runs]
                for layer in part.values():
                    layer._cached = None  # one block of quantized weights at a time
            rest = self.parts[-1]
            if rest:
                replay, last = PrefixReplay(self.model), len(self.blocks) - 1
                if self.blocks:
                    runs = [
                        partial(replay.logits_after, batch, last, [x])
                        for batch, x in zip(self.batches, hidden, strict=True)
                    ]
                else:
                    runs = [partial(model_logits, self.model, batch) for batch in self.batches]
                self._round_part(rest, runs, advance, one_by_one=False)
            self._save(len(self.parts) - 1)
        return self.done

    # --- state on disk -------------------------------------------------------------------------

    def _path(self, part: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{part:04d}.safetensors"

    def _save(self, part: int) -> None:
        if self.folder is not None:
            content = to_bytes({n: self.done[n] for n in self.parts[part]}, self.fingerprint)
            write_atomic(self._path(part), lambda file: file.write(content))

    def _resume(self) -> int:
        """Take the parts that an earlier start rounded; returns how many.

        Raises:
            RunError: a file is damaged, or of another rounding.
        """
        for k, part in enumerate(self.parts):
            if self.folder is None or not (path := self._path(k)).exists():
                return k
            way_out = "Choose another folder, or delete it to round again."
            try:
                with safe_open(path, framework="pt") as file:
                    fingerprint = (file.metadata() or {}).get("fingerprint")
                formats = {name: self.assignment.formats[name] for name in part}
                found = from_bytes(path.read_bytes(), formats, self.assignment.shapes)
            except (OSError, SafetensorError, AssignmentError) as error:
                raise RunError(f"{path} is damaged ({error}). {way_out}") from error
            if fingerprint != self.fingerprint:
                raise RunError(
                    f"{path} is of a rounding with other settings, data, model or assignment. {way_out}"
                )
            for name, stored in found.items():
                self._set(part, name, stored)
        return len(self.parts)


def _until_stopped(run: Callable[[], object]) -> None:
    with suppress(_Stop):
        run()


def gptq(
    model: nn.Module,
    assignment: Assignment,
    batches: Iterable[Tensor],
    *,
    damping: float = 0.01,
    inputs: bool = True,
    correct_inputs: bool = False,
    folder: str | Path | None = None,
) -> Assignment:
    """The assignment with weights rounded by GPTQ; formats and bits stay.

    Args:
        model: that the assignment was made for, without it applied; it is left as it was.
        batches: int64 token ids (batch, length), all of one shape, as for `search`.
        damping, inputs, correct_inputs: see `GptqConfig`.
        folder: keeps the state of a stopped run (`rounding_state`), from which the same call goes
            on with the same numbers; it may be deleted afterwards.

    Returns:
        An assignment whose `weights` says how; its tensors are written by `save`.

    Raises:
        AssignmentError: it is rounded already, or for another model. ModelError: applied already,
        layers that share one weight, blocks that do not run one after the other. DataError: the
        batches. RunError: damping, a Hessian that cannot be used, or a folder of another rounding.
    """
    check_damping(damping)
    if assignment.weights is not None:
        raise AssignmentError(
            f"the assignment is rounded already ({assignment.weights.get('name')}). Give the one "
            "that the search left."
        )
    listed = list_batches(batches, model)
    facts = {
        "name": "gptq", "damping": damping, "inputs": inputs, "correct_inputs": correct_inputs,
        "tokens": sum(b.numel() for b in listed), "batches": len(listed),
        "batches_sha256": batches_sha256(listed),
    }  # fmt: skip
    fingerprint = weights_fingerprint(model, assignment, facts)
    where = None if folder is None else Path(folder)
    device = next(model.parameters()).device
    # Whatever mode the caller is in, as for `search`.
    with evaluating(model), torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        apply(model, assignment, inputs=inputs, cache_weights=True)
        try:
            _check_no_shared_weights(model)
            rounding = _Rounding(
                model, assignment, listed, damping, correct_inputs, where, fingerprint
            )
            rounded = rounding.run()
        finally:
            restore(model)
    in_order = {name: rounded[name] for name in assignment.formats if name in rounded}
    return assignment.with_artifact("weights", to_bytes(in_order, fingerprint), facts)


def _check_no_shared_weights(model: nn.Module) -> None:
    owners: dict[int, str] = {}
    for name, layer in quantized_layers(model).items():
        owner = owners.setdefault(id(layer.weight), name)
        if owner != name and layer.weight_quantizer is not None:
            raise ModelError(
                f"{owner} and {name} share one weight, which gptq would round twice. Leave them in "
                "BF16 (search.exclude), or use rounding=nearest."
            )
