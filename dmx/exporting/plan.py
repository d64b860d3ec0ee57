"""The plan of an export: what is written for each layer, under which formats and rules.

It is made and checked once, from the assignment alone; the tensors of a model are planned by it
(`tensors`), written, and compared with it afterwards (`verify`).
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from dmx.applying.sharing import share_scales, shares_scales, sharing_groups
from dmx.applying.splitting import split_assignment
from dmx.applying.stored import ROUNDED_TO_NEAREST, StoredWeight, stored_weights
from dmx.assignment.assignment import Assignment
from dmx.assignment.runtimes import (
    HOW_IT_RUNS,
    IN_FP8,
    LEFT_ALONE,
    RAN,
    SOURCE,
    inputs_otherwise,
)
from dmx.assignment.targets import TARGETS, Loader, Target, obstacles, split_groups
from dmx.errors import FormatError
from dmx.exporting import compressed_tensors, humming, modelopt, quark, torchao
from dmx.exporting._fresh_load import EXPERTS
from dmx.exporting.layouts import Layers, Layout, check_packages, layers_of, left_in_bf16
from dmx.exporting.names import has_own_names
from dmx.exporting.packing import check_in_features
from dmx.exporting.recipes import RECIPES, recipe_text
from dmx.formats import BF16, FP8, check_choice
from dmx.models.backbone import text_config
from dmx.models.experts import experts_modules, experts_path
from dmx.models.linears import fused_group
from dmx.transforms.stage import RUN_TIME_TRANSFORMS, Transform

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        compressed_tensors.LAYOUT,
        quark.LAYOUT,
        humming.LAYOUT,
        modelopt.LAYOUT,
        torchao.LAYOUT,
    )
}
EXPORT_TARGETS = ("assignment", *LAYOUTS, *RECIPES)
PROFILES = ("vllm", "transformers")
"""Of compressed_tensors, the strictest first."""


@dataclass(frozen=True)
class Plan:
    """An export that its target holds."""

    target: str
    profile: str | None
    inputs: bool
    """The runtime is asked to quantize inputs, too."""
    verify: bool
    """The files are loaded again in a fresh process."""
    assignment: Assignment
    """With the contents of its artifacts read."""
    layout: Layout | None
    """None: names alone, no weights."""
    layers: Layers
    """The layers that are quantized."""
    kept: tuple[str, ...]
    """Linear layers that stay in BF16."""
    rotation: Transform | None
    """That the runtime does to inputs; None: none."""
    stored: Mapping[str, StoredWeight]
    """Weights that are written as the assignment keeps them; others are rounded to nearest."""
    stacked: Mapping[str, StoredWeight] = field(default_factory=dict)
    """Of experts that the given assignment names as one, whose parts are in `stored`."""

    def for_model(self, model: nn.Module) -> "Plan":
        """With what depends on the weights: scales that the runtime has one of for a fused group.

        Warns:
            The assignment in the folder is then another than the one that was given.
        """
        if self.layout is None:
            return self
        holds = self.holds
        if not holds.shares_scales or shares_scales(self.assignment, per_tensor=holds.per_tensor):
            return self
        groups = sharing_groups(self.assignment, per_tensor=holds.per_tensor)
        what = "NVFP4 and FP8 weights" if holds.per_tensor else "NVFP4 weights"
        warnings.warn(
            f"{_setting(self.target, self.profile)}: the {what} of {len(groups)} fused groups get one global "
            "scale each, as the runtime has it, and round otherwise than the assignment says so far; "
            "the assignment in the folder says it (weight_amax). search.target=vllm or dmx.share_scales "
            "do it beforehand.",
            stacklevel=2,
        )
        shared = share_scales(model, self.assignment, per_tensor=holds.per_tensor)
        return replace(self, assignment=shared, layers=layers_of(shared, inputs=self.inputs))

    def stacked_layers(self, model: nn.Module) -> list[str]:
        """The quantized layers that a model of transformers keeps in 3-D parameters."""
        paths = set(experts_modules(model))
        return [layer for layer in self.layers if experts_path(layer) in paths]

    @property
    def holds(self) -> Target:
        """What the target holds, and who reads it; of targets that write weights alone."""
        return TARGETS[self.key]

    @property
    def key(self) -> str:
        """The name of `holds`."""
        return target_key(self.target, self.profile)

    def reader(self, model: nn.Module) -> str:
        """What the fresh process loads the files with; see `dmx.exporting._fresh_load`."""
        assert self.layout is not None
        is_apart = has_own_names(model, self.holds) and self.layout is LAYOUTS["compressed_tensors"]
        return EXPERTS if is_apart or self.stacked_layers(model) else self.layout.reader

    @property
    def transform(self) -> str:
        """Name of the transform that the weights are written under; none for names alone."""
        named = None if self.layout is None else self.assignment.transform
        return "none" if named is None else str(named["name"])

    @property
    def input_rule(self) -> str | None:
        """How the loader scales inputs, in words; None where it quantizes none."""
        return self.layout.input_rule(self.layers) if self.layout and self.inputs else None


def make_plan(
    assignment: Assignment,
    *,
    target: str,
    profile: str | None = None,
    inputs: bool = False,
    verify: bool = True,
) -> Plan:
    """All that can be said and refused without a model; arguments are those of `dmx.export`.

    Raises:
        FormatError: the target cannot hold the assignment; says which layers, and which target can.
        AssignmentError: a file that it needs is missing or damaged. RunError: verify=true needs a
            package that is not installed, or in a version too old for a format.
    """
    check_choice(target, EXPORT_TARGETS, "target")
    given, stacked = assignment, {}
    if target != "assignment":
        check_experts(assignment, target)
        assignment = split_assignment(assignment)
    if given.experts and target in LAYOUTS:
        whole = stored_weights(given)
        stacked = {layer: whole[layer] for layer in given.experts if layer in whole}
    profile = _choose_profile(assignment, target, profile, inputs)
    _check_transform(assignment, target, profile)
    layout = LAYOUTS.get(target)
    layers = layers_of(assignment, inputs=inputs)
    if layout is not None:
        check_holds(assignment, target, profile, inputs=inputs)
        layout.check(layers, inputs)
        if not inputs:
            _warn_of_inputs(assignment)
        else:
            _warn_of_cards(assignment, target, profile, layers)
        if verify:
            check_packages(layout, layers)
    elif inputs:
        raise FormatError(
            f"inputs=true: target={target} writes names alone, and its tool decides on inputs. "
            "Leave inputs out."
        )
    elif target in RECIPES:
        recipe_text(assignment, target)
        _warn_of_weights(assignment, target)
    assignment = assignment.with_contents()
    return Plan(
        target=target,
        profile=profile,
        inputs=inputs,
        verify=verify,
        assignment=assignment,
        layout=layout,
        layers=layers,
        kept=tuple(left_in_bf16(assignment)),
        rotation=Transform.of(assignment) if layout and _is_rotated(assignment) else None,
        stored={} if layout is None else stored_weights(assignment),
        stacked=stacked,
    )


def _warn_of_weights(assignment: Assignment, target: str) -> None:
    """Of weights that names alone do not bring along."""
    stage = (assignment.weights or {}).get("name")
    if stage is not None and stage not in ROUNDED_TO_NEAREST:
        warnings.warn(
            f"target={target} writes names alone: its tool quantizes the model's own weights, not those that the "
            f"assignment has of {stage}, with which it was measured. Use a target with weights ({', '.join(LAYOUTS)}) "
            "for them.",
            stacklevel=3,
        )


HOLD_EXPERTS = ("assignment", "compressed_tensors", "quark")


def check_experts(assignment: Assignment, target: str) -> None:
    """Raise FormatError where it is not known how a target names experts, or that they run."""
    experts = [layer for layer in assignment.quantized if experts_path(layer) is not None]
    if not experts:
        return
    if target not in HOLD_EXPERTS:
        raise FormatError(
            f"target={target}: how it holds quantized experts is not known here ({len(experts)} layers, first "
            f"{experts[0]}). Targets that hold them: {', '.join(HOLD_EXPERTS)}. Or search again with "
            "search.exclude=['*.experts.*']."
        )
    if target in LAYOUTS and _is_rotated(assignment):
        raise FormatError(
            f"target={target} cannot rotate the inputs of experts at run time, first {experts[0]}. Use "
            "target=assignment, or search again with search.transform=none."
        )


def check_verifiable(plan: Plan, model: nn.Module) -> None:
    """Raise FormatError where no fresh process can load the experts that are quantized."""
    experts = plan.stacked_layers(model) if plan.layout is not None and plan.verify else []
    if experts and plan.target == "quark":
        raise FormatError(
            f"target=quark, verify=true: amd-quark loads no quantized experts into transformers ({len(experts)} layers, "
            f"first {experts[0]}), and nothing else there reads its files. Set verify=false: names and bytes are compared "
            "with the plan all the same, and dmx.load_exported reads the folder. Or use target=compressed_tensors."
        )


def check_names(plan: Plan, model: nn.Module) -> None:
    """Refuse a model whose experts the runtime reads under other names than the files have; warn where another that reads
    the layout does."""
    if plan.layout is None:
        return
    kind = getattr(text_config(model), "model_type", None)

    def why(loader: Loader) -> str | None:
        return (
            f"{loader.name} reads the experts of {kind!r} under other names than transformers 5 gives them and these "
            "files hold"
            if kind in loader.renamed
            else None
        )

    out = "target=compressed_tensors, profile=vllm writes the names that it reads."
    _refuse_or_warn(plan.target, plan.profile, why, out, out)


def _refuse_or_warn(
    target: str,
    profile: str | None,
    why: Callable[[Loader], str | None],
    way_out: str,
    way_of_another: str,
) -> None:
    """Raise FormatError for what stands in the way of the loader that an export is made for; warn of what stands in
    another's, which reads the layout, too.

    Args:
        why: a loader cannot load the files; None where it can.
        way_out, way_of_another: sentences for the one and the other.
    """
    own = _own_loader(target, profile)
    for loader in TARGETS[target_key(target, profile)].loaders:
        if (said := why(loader)) is None:
            continue
        if loader is own:
            raise FormatError(f"{_setting(target, profile)}: {said}. {way_out}")
        warnings.warn(
            f"{_setting(target, profile)}: {said}, and cannot load these files, {own.name} can. For {loader.name}, "
            f"{way_of_another}",
            stacklevel=5,
        )


def _warn_of_inputs(assignment: Assignment) -> None:
    """Of what files of weights alone lose that the assignment was made for."""
    unequal = [k for k, (_, of_input) in assignment.unequal.items() if of_input is not BF16]
    if unequal:
        counted = ", and both count in the assignment's bits"
        if assignment.search.input_format is not None:
            counted = f" ({assignment.search.input_format})"
        warnings.warn(
            f"inputs=false: {len(unequal)} layers have an input in another format than the weight"
            f"{counted}; the files hold the weights alone, at "
            f"{assignment.average_bits(['weight'])['element_bits']:.4f} element_bits. Set "
            "inputs=true to have the runtime quantize inputs.",
            stacklevel=3,
        )
    if (assignment.weights or {}).get("correct_inputs"):
        warnings.warn(
            "inputs=false: the assignment's weights were rounded to make good what quantized "
            "inputs lose, and are worse than nearest without. Set inputs=true, or round again "
            "with gptq.correct_inputs=false.",
            stacklevel=3,
        )


_WAYS_OUT = {
    LEFT_ALONE: " For such a card search with search.input_format=bf16 and export with inputs=false.",
    IN_FP8: " For such a card search with search.target=vllm and search.input_format=fp8.",
}
"""What becomes of all inputs -> how to search for that."""


def _warn_of_cards(
    assignment: Assignment, target: str, profile: str | None, layers: Layers
) -> None:
    """Of cards on which an engine that loads the files treats inputs otherwise than they ask."""
    key = target_key(target, profile)
    holds, rest = TARGETS[key], assignment.unquantized
    equal = {layer.weight.name for layer in layers.values() if layer.input == layer.weight}
    for loader in holds.loaders:
        if (key, loader.name) not in HOW_IT_RUNS or obstacles(
            assignment.formats, holds, loader, rest, assignment.input_formats
        ):
            continue
        for card, ways in inputs_otherwise(key, loader.name, sorted(equal)).items():
            said = "; ".join(
                f"those of {', '.join(formats)} {way}" for way, formats in ways.items()
            )
            whole = sum(map(len, ways.values())) == len(equal)
            way_out = _WAYS_OUT[next(iter(ways))] if whole and len(ways) == 1 else ""
            warnings.warn(
                f"{_setting(target, profile)}, inputs=true: on {card} {loader.name} has inputs otherwise than the files ask: "
                f"{said} (read in the source of {SOURCE}; {RAN}).{way_out}",
                stacklevel=3,
            )


def target_key(target: str, profile: str | None) -> str:
    """Name of a target in `dmx.assignment.targets.TARGETS`."""
    return target if profile is None else f"{target}, profile {profile}"


def _setting(target: str, profile: str | None) -> str:
    return f"target={target}" + (f", profile={profile}" if profile else "")


def _for_transformers(profile: str | None) -> str:
    """The way out of what vLLM alone cannot hold."""
    return ("" if profile else "target=compressed_tensors, ") + "profile=transformers"


def check_holds(
    assignment: Assignment, target: str, profile: str | None, *, inputs: bool = False
) -> None:
    """Raise FormatError unless the target holds every format; says which layers, and which can."""
    holds = TARGETS[target_key(target, profile)]
    formats = assignment.formats
    setting = _setting(target, profile)
    refused = {n: f for n, f in formats.items() if f != "bf16" and f not in holds.formats}
    if refused:
        rest = assignment.unquantized
        fitting = [
            name
            for name, other in TARGETS.items()
            if any(not obstacles(formats, other, loader, rest) for loader in other.loaders)
        ]
        names = ", ".join(sorted(set(refused.values())))
        raise FormatError(
            f"{setting} does not hold {names}: {len(refused)} layers, first "
            f"{', '.join(list(refused)[:3])}. Targets that hold this assignment: "
            f"{'; '.join(fitting)}. Or search again with search.target."
        )
    if holds.needs_fused_units and (split := split_groups(formats, assignment.unquantized)):
        raise FormatError(
            f"{setting} needs one format in each fused group (vLLM runs q/k/v, gate/up and the like as "
            f"one product each); {len(split)} groups are split, first {split[0]}. Use "
            f"{_for_transformers(profile)}, or search again with search.units=fused and search.experts=block."
        )
    _check_built(assignment, target, profile)
    if profile == "vllm" and not inputs:
        _check_fp8_experts(assignment, setting)
    if holds.shares_scales:
        _check_scales(assignment, setting, inputs, per_tensor=holds.per_tensor)
    if inputs:
        _check_unequal(assignment, target, profile)
        _check_no_lone_inputs(assignment)
    for layer, block_format in assignment.block_formats("weight").items():
        check_in_features(layer, assignment.shapes[layer][1], block_format)


def _check_built(assignment: Assignment, target: str, profile: str | None) -> None:
    """Refuse quantized layers that the runtime builds without quantization; warn where another that reads the layout does."""

    def why(loader: Loader) -> str | None:
        unbuilt = [layer for layer in assignment.quantized if loader.builds_unquantized(layer)]
        if not unbuilt:
            return None
        return (
            f"{loader.name} builds {len(unbuilt)} of the layers without quantization, first "
            f"{unbuilt[0]}"
        )

    again = "search again with search.target={}, which leaves them in BF16."
    way_out = f"Use {_for_transformers(profile)}, or {again.format('vllm')}"
    _refuse_or_warn(target, profile, why, way_out, again.format("vllm_quark"))


def _check_fp8_experts(assignment: Assignment, setting: str) -> None:
    """Raise FormatError for experts in FP8 beside inputs that are left alone: vLLM has no such product."""
    formats = assignment.block_formats("weight")
    lone = [layer for layer, f in formats.items() if f is FP8 and experts_path(layer) is not None]
    if lone:
        raise FormatError(
            f"{setting}, inputs=false: vLLM runs experts in fp8 with quantized inputs alone ({len(lone)} layers, first "
            f"{lone[0]}). Use inputs=true, or profile=transformers."
        )


def _check_scales(assignment: Assignment, setting: str, inputs: bool, *, per_tensor: bool) -> None:
    """Raise FormatError where layers of a fused group have scales that differ and cannot be shared."""
    if not shares_scales(assignment, per_tensor=per_tensor) and stored_weights(assignment):
        group, layers = next(iter(sharing_groups(assignment, per_tensor=per_tensor).items()))
        raise FormatError(
            f"{setting} has one global scale for the weights of each fused group, and those of the "
            f"assignment are stored with more, one for each layer or row, first {group} ({len(layers)} "
            "layers). Use target=compressed_tensors, profile=transformers; or share the scales before the "
            f"weights are made: dmx.share_scales(model, assignment{', per_tensor=True' * per_tensor})."
        )
    seen: dict[str, tuple[str, float | None]] = {}
    for layer in assignment.block_formats("input") if inputs else ():
        amax = assignment.amax_of_input(layer)
        first, known = seen.setdefault(fused_group(layer), (layer, amax))
        if amax != known:
            raise FormatError(
                f"{setting}, inputs=true: {first} and {layer} read one input, and input_amax says {known} and "
                f"{amax}; the runtime has one. Measure again: dmx.calibrate_inputs(model, assignment, batches)."
            )


def _check_unequal(assignment: Assignment, target: str, profile: str | None) -> None:
    """Raise FormatError where the loader of a target cannot run an input beside its weight."""
    loader = _own_loader(target, profile)
    held, unequal = loader.input_formats, assignment.unequal
    refused = {
        n: (w, x) for n, (w, x) in unequal.items() if x is BF16 or not loader.takes(w.name, x.name)
    }
    if not refused:
        if profile == "vllm":
            _check_w4a8(assignment, _setting(target, profile))
        return
    layer, (weight, of_input) = next(iter(refused.items()))
    setting = _setting(target, profile)
    if of_input is BF16:
        way_out = "inputs=false"
        if target == "torchao":
            way_out = "inputs=false with target=compressed_tensors or quark"
        raise FormatError(
            f"{setting}, inputs=true: the assignment leaves inputs in bf16 ({len(refused)} layers, first "
            f"{layer}), and the runtime would quantize them. Use {way_out}."
        )
    can = f"in {', '.join(sorted(held))} alone" if held else "in none"
    where = (
        "in another format" if loader.beside is None else f"in {', '.join(sorted(loader.beside))}"
    )
    raise FormatError(
        f"{setting}, inputs=true: runs inputs {can} beside weights {where}; {len(refused)} "
        f"layers ask for others, first {layer}: weight {weight}, input {of_input}. Use {_ways_of_inputs(assignment)}"
        "target=assignment or inputs=false, or search again with search.choices=joint and "
        "search.input_format=null."
    )


def _ways_of_inputs(assignment: Assignment) -> str:
    """Targets that hold inputs in these formats beside these weights, with a comma after each."""
    ways = {
        "target=compressed_tensors with profile=transformers": TARGETS[
            "compressed_tensors, profile transformers"
        ],
        "target=quark": TARGETS["quark"],
    }
    given, rest = assignment.input_formats, assignment.unquantized
    return "".join(
        f"{way}, "
        for way, holds in ways.items()
        if not obstacles(assignment.formats, holds, holds.held_to, rest, given)
    )


def _check_w4a8(assignment: Assignment, setting: str) -> None:
    """Raise FormatError for inputs in fp8 beside weights in mxfp4 for which vLLM chooses another scheme than W4A8."""
    layers = [n for n, (_, of_input) in assignment.unequal.items() if of_input is FP8]
    if experts := [n for n in layers if experts_path(n) is not None]:
        raise FormatError(
            f"{setting}, inputs=true: inputs in fp8 beside experts in mxfp4 are the choice of vLLM's kernel, whatever the "
            f"files say ({len(experts)} layers, first {experts[0]}). Use inputs=false, or search again with "
            "search.exclude=['*.experts.*']."
        )
    if static := [n for n in layers if assignment.amax_of_input(n) is not None]:
        raise FormatError(
            f"{setting}, inputs=true: vLLM runs inputs in fp8 beside weights in mxfp4 with a scale a token alone, and "
            f"{len(static)} layers have one for all, first {static[0]}: it would ignore it. Leave static_inputs out."
        )


def _check_no_lone_inputs(assignment: Assignment) -> None:
    """Raise FormatError for quantized inputs beside weights in BF16: no layout names such a layer."""
    lone = [n for n in assignment.block_formats("input") if n not in assignment.quantized]
    if lone:
        raise FormatError(
            f"inputs=true: {len(lone)} layers have a quantized input beside a weight in bf16, first "
            f"{lone[0]}, and files leave such layers alone. Use inputs=false or target=assignment, or "
            "search again with search.choices=joint."
        )


def _own_loader(target: str, profile: str | None) -> Loader:
    """The loader that an export is checked against."""
    return TARGETS[target_key(target, profile)].held_to


def _choose_profile(
    assignment: Assignment, target: str, profile: str | None, inputs: bool
) -> str | None:
    if target != "compressed_tensors":
        if profile is not None:
            raise FormatError(f"profile={profile}: target={target} has no profiles; leave it out.")
        return None
    if profile is not None:
        check_choice(profile, PROFILES, "profile")
        return profile
    if _is_rotated(assignment):
        return PROFILES[0]
    for name in PROFILES[:-1]:
        loader = _own_loader(target, name)
        given = assignment.input_formats if inputs else None
        holds = TARGETS[target_key(target, name)]
        refused = obstacles(assignment.formats, holds, loader, assignment.unquantized, given)
        fixed = bool(stored_weights(assignment)) and not shares_scales(assignment)
        if not refused and not (holds.shares_scales and fixed):
            return name
    return PROFILES[-1]


def _is_rotated(assignment: Assignment) -> bool:
    """Whether inputs are rotated at run time."""
    return (assignment.transform or {}).get("name") in RUN_TIME_TRANSFORMS


def check_biases(plan: Plan, model: nn.Module) -> None:
    """Raise FormatError for layers with a bias whose input is to be rotated: vLLM has no such layer."""
    if plan.rotation is None:
        return
    rotated = [layer for layer in plan.layers if plan.rotation.rotates(layer)]
    biased = [layer for layer in rotated if model.get_submodule(layer).bias is not None]
    if biased:
        raise FormatError(
            f"{_setting(plan.target, plan.profile)} cannot rotate the inputs of layers with a bias "
            f"({len(biased)} layers, first {biased[0]}): vLLM refuses them. Use target=assignment, or search "
            "again with search.transform=hadamard_full or none, or with search.exclude for these layers."
        )


def _check_transform(assignment: Assignment, target: str, profile: str | None) -> None:
    """Raise FormatError for what a target cannot hold: folded weights are like any others, and inputs are
    rotated by vLLM alone."""
    name = (assignment.transform or {}).get("name")
    if name is None or target == "assignment":
        return
    layers = assignment.quantized
    where = f"{len(layers)} layers, first {layers[0]}"
    if target in RECIPES:
        raise FormatError(
            f"target={target} names formats for the weights as they are, and these were chosen for "
            f"weights rotated by transform {name} ({where}). Use a target with weights, or search "
            "again with search.transform=none."
        )
    if not _is_rotated(assignment):
        return
    if profile == "vllm":
        lone = [layer for layer in assignment.transformed if layer not in assignment.quantized]
        if lone:
            raise FormatError(
                f"{_setting(target, profile)}: {len(lone)} layers have a weight in bf16 and a rotated input, "
                f"first {lone[0]}; files hold the rotation of quantized layers alone. Use target=assignment, "
                "or search again with search.choices=joint."
            )
    else:
        ignored = " (transformers ignores rotations without a word)" if profile else ""
        raise FormatError(
            f"{_setting(target, profile)} cannot rotate inputs at run time, which transform {name} needs "
            f"({where}){ignored}. Use target=compressed_tensors with profile=vllm, target=assignment for "
            "this project, or search again with "
            "search.transform=hadamard_full, which is folded into the weights, or none."
        )
