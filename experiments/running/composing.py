"""From the command line to dataclasses: what Hydra composes is checked and built here.

Every field of a command's schema is registered with its defaults, those of the library's dataclasses
too, so that each can be set on the command line and an unknown one is an error. Types and ranges are
checked when the dataclasses are built, before anything is loaded.
"""

import dataclasses
import types
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from dmx.errors import setting_text
from dmx.formats import check_choice
from dmx.searching.config import DescentConfig

from .cards import visible_cards
from .settings import CONFIGS, ConfigError

_OWN_NAMES = {
    "model": "model.id=<hub name or folder>",
    "budget": "budget.limit=<bits>",
    "data": "data=files data.calibration.files=[...] data.evaluation.files=[...]",
}
"""Groups whose files are examples -> how to give one's own."""
RENAMED = {
    "evaluation.operands": "evaluation.quantized",
    "rounding": "weights",
    "search.operands": "search.choices",
    "search.scale_rule": "search.scale_rules.weight and search.scale_rules.input",
    "search.polish_rounds": "search.polish.rounds",
    "search.polish_batches": "search.polish.batches",
    "search.transform_file": "search.rotation.file",
    "search.rotation_lr": "search.rotation.lr",
    "search.rotation_momentum": "search.rotation.momentum",
    **{f"search.{f.name}": f"search.descent.{f.name}" for f in dataclasses.fields(DescentConfig)},
}
"""Settings of earlier versions -> what they are called now."""

_T = TypeVar("_T")


def check_overrides(arguments: Sequence[str], command: str) -> None:
    """Refuse, in a sentence, what Hydra answers with pages: files of configs/ that do not exist, settings
    under an earlier name, and one budget for a comparison.

    Raises:
        ConfigError, FormatError
    """
    for argument in arguments:
        key, has_value, value = argument.lstrip("+~").partition("=")
        if has_value:
            _check_renamed(key, value)
    elsewhere = ("--config", "-cd", "-cp", "-cn", "hydra.searchpath")
    if any(a.lstrip("+").startswith(elsewhere) for a in arguments):
        return  # other files than ours
    for argument in arguments:
        group, has_value, value = argument.partition("=")
        if command == "compare" and group.split(".")[0] == "budget":
            raise ConfigError(f"{argument}: experiments.compare takes several: budgets=[4.5,5]")
        if not has_value or not (CONFIGS / group).is_dir() or set("($") & set(value):
            continue
        if group.startswith("hydra/"):  # plugins have more of them
            continue
        known = tuple(sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))
        for name in value.strip("[]'\"").split(","):
            name = name.strip(" '\"").removeprefix("./").removesuffix(".yaml")
            if name in ("", "null", *known):
                continue
            if group in _OWN_NAMES:
                raise ConfigError(
                    f"{group}={name} is no file of configs/{group}. For your own: {_OWN_NAMES[group]}. "
                    f"Files: {', '.join(known)}."
                )
            check_choice(name, known, group)


def _check_renamed(setting: str, value: Any) -> None:
    if new := RENAMED.get(setting):
        ways = " ".join(f"{name}={value}" for name in new.split(" and "))
        raise ConfigError(f"{setting}={value}: {setting} is called {new} now: {ways}")


_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    types.NoneType: "null",
}


def _type_text(hint: Any) -> str:
    """A type in words: `a whole number or auto`."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type_text, parts))
    if origin is Literal:
        return " or ".join(map(setting_text, parts))
    if origin in (list, tuple):
        return f"a list, of which each is {_type_text(parts[0])}"
    return _IN_WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def build(cls: type[_T], node: dict[str, Any], setting: str = "") -> _T:
    """A dataclass from composed values; nested ones too.

    Raises:
        ConfigError: an unknown key or a value of the wrong type; says which and what is allowed.
    """
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in node.items():
        path = f"{setting}.{key}" if setting else key
        if key not in names:
            _check_renamed(path, value)
        check_choice(key, tuple(names), f"{setting or 'config'} key")
        hint = hints[key]
        nested = _nested(hint)
        if nested is not None and isinstance(value, dict):
            if nested is not hint:  # optional: what is null was not given
                value = {k: v for k, v in value.items() if v is not None}
            values[key] = build(nested, value, path) if value or nested is hint else None
        elif _fits(value, hint):
            values[key] = value
        elif get_origin(hint) is Literal:
            check_choice(value, get_args(hint), path)
        else:
            way_out = (
                f": {path}=[{value}]" if get_origin(hint) is list and _fits([value], hint) else ""
            )
            found = repr(value) if isinstance(value, str) else setting_text(value)
            raise ConfigError(
                f"{path}={found} has the wrong type: expected {_type_text(hint)}{way_out}"
            )
    missing = [
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.name not in values
        and f.default is dataclasses.MISSING
        and f.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ConfigError(f"{setting or 'config'}: {', '.join(missing)} not set")
    return cls(**values)


def _nested(hint: Any) -> type[Any] | None:
    """The dataclass of a field, which may be an optional one."""
    options = (hint, *get_args(hint))
    return next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)


def build_root(cls: type[_T], cfg: DictConfig) -> _T:
    """A command's schema from all that was composed; what belongs to Hydra alone is left out.

    Raises:
        ConfigError: as `build`.
    """
    node = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(node, dict)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return build(cls, {str(k): v for k, v in node.items() if k in known or k in RENAMED})


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value fits a type hint made of scalars, lists, dicts, Literals and None."""
    origin = get_origin(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(v, get_args(hint)[0]) for v in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, get_args(hint)[1]) for v in value.values())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def defaults(cls: type) -> dict[str, Any]:
    """Field -> default, as plain values; fields of dataclasses hold those of their fields, optional ones
    null for each, so that all can be set. Scalars without a default must come from a file or the command
    line."""
    node: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for f in dataclasses.fields(cls):
        value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        nested = _nested(hints[f.name])
        if value is None and nested is not None:
            node[f.name] = dict.fromkeys(inner.name for inner in dataclasses.fields(nested))
        elif value is not dataclasses.MISSING:
            node[f.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
        elif nested is not None:
            node[f.name] = defaults(nested)
    return node


def register(command: str, schema: type) -> None:
    """The fields of a command's schema with their defaults, as the first entry of its root config."""
    ConfigStore.instance().store(name=f"_{command}", node=defaults(schema), package="_global_")
    OmegaConf.register_new_resolver("visible_gpus", visible_gpus, replace=True)


def visible_gpus() -> int:
    """How many runs `hydra/launcher=gpus` starts at once; 1 where there is no GPU."""
    return max(1, len(visible_cards()))
