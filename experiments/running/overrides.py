"""Settings on a command line as their user means them: paths with signs of Hydra's grammar, and names that there are not.

Hydra reads `run.folder=lr=1`, `größe`, `a#b` and `run(2)` by a grammar of its own and answers with a page of its
parser. Settings that are text are taken as they are written; others are refused in a sentence that says how to quote.
"""

import re
import types
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from dmx.formats import check_choice

from .settings import CONFIGS, ConfigError

_OPEN = object()
"""What a field may hold where its keys are free."""


def understood(arguments: Sequence[str], schema: type) -> list[str]:
    """The arguments as Hydra takes them: text that it would read as something else is quoted.

    Args:
        schema: dataclass of all settings of the command.

    Raises:
        ConfigError: not to be understood; `run.folder` of a sweep. FormatError: no such setting.
    """
    if {"-sc", "--shell_completion"} & set(arguments):  # a shell asks for what completes a line
        return list(arguments)
    is_sweep = bool({"-m", "--multirun"} & set(arguments)) or "hydra.mode=MULTIRUN" in arguments
    settings = [a for a in arguments if "=" in a and not a.startswith("-")]
    for argument in settings:
        key, _, value = argument.partition("=")
        if is_sweep and key.lstrip("+") == "run.folder":
            raise ConfigError(
                f"{argument} with -m: every job of a sweep has a folder of its own. Name the folder of them "
                f"all: hydra.sweep.dir={value}"
            )
    return [_understood(a, schema, is_sweep) if a in settings else a for a in arguments]


def _understood(argument: str, schema: type, is_sweep: bool) -> str:
    key, _, value = argument.partition("=")
    name = key.lstrip("+~")
    if name.startswith("hydra.") or set("/@") & set(name):  # of Hydra itself, or of its groups
        return argument
    hint = None if (CONFIGS / name).is_dir() else _hint(schema, name)
    parsed = _parsed(argument)
    if hint not in (str, str | None) or "${" in value:
        if parsed is None:
            raise ConfigError(
                f"{argument}: not to be understood. Text with signs such as = ( ) # , : or letters beyond ASCII "
                f"is quoted, for the shell, too: \"{key}='...'\", in a list \"{key}=['a=1.txt','b.txt']\"."
            )
        return argument
    if is_sweep and parsed is not None and parsed.is_sweep_override():
        return argument
    is_meant = parsed is not None and (
        parsed.value() == value
        or value[:1] in ("'", '"')  # quoted by hand
        or (parsed.value() is None and hint is not str)
    )
    return argument if is_meant or not value else f"{key}={_quoted(value)}"


def _parsed(argument: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(argument)
    except HydraException:
        return None


def _quoted(text: str) -> str:
    """As Hydra's grammar quotes: backslashes count before a quote alone."""
    escaped = re.sub(r"(\\*)'", lambda match: 2 * match[1] + "\\'", text)
    escaped = re.sub(r"(\\+)$", lambda match: 2 * match[1], escaped)
    return QuotedString(text, Quote.single).with_quotes() if escaped == text else f"'{escaped}'"


def _hint(schema: type, name: str) -> Any:
    """Type of a setting; _OPEN below a field whose keys are free.

    Raises:
        FormatError: there is none of this name; says the nearest.
    """
    hint: Any = schema
    path = ""
    for part in name.split("."):
        cls = next((o for o in (hint, *get_args(hint)) if is_dataclass(o)), None)
        if cls is None:
            if hint is Any or _is_dict(hint):
                return _OPEN
            raise ConfigError(f"{name}: {path} is one value; it has no parts to set.")
        names = [f.name for f in fields(cls)]
        if cls is schema:
            names += [p.name for p in CONFIGS.iterdir() if p.is_dir()]
            names += ["hydra"]
        check_choice(
            part, tuple(dict.fromkeys(names)), f"{path or 'setting'} key" if path else "setting"
        )
        path = f"{path}.{part}" if path else part
        hint = get_type_hints(cls).get(part, _OPEN)
    return hint


def _is_dict(hint: Any) -> bool:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return any(option is Any or get_origin(option) is dict for option in options)
