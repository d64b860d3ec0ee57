"""The command `dmx`: `dmx search ...` is `python -m experiments.search ...` of a clone.

    dmx search model=smollm2_135m budget.limit=5.0
    accelerate launch -m dmx train-mor experiment=pretrain_49m

A wheel carries the entry points as `dmx.experiments` and their settings as `dmx/configs`; an editable
installation finds them beside the package, in the clone that it points at. They stand above
everything in `dmx`, so no module of `dmx` imports them; this command alone does, by name and when
it is called. Nothing heavy is imported before: `dmx --help` is there at once.

Hydra completes its arguments in a shell: eval "$(dmx -sc install=bash)", see docs/sweeps.md.
"""

import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import dmx
from dmx.errors import DmxError
from dmx.formats import check_choice

COMMANDS = {
    "search": "search a format per layer under a budget; measure it beside its opponents",
    "compare": "several searches, budgets and seeds on one model, in one table",
    "evaluate": "measure assignments on a text and on tasks",
    "export": "write a model as another runtime loads it, and load it again to be sure",
    "train-mor": "train a language model with FP8 where it is good enough, BF16 where it is not",
}
_COMPLETION = ("-sc", "--shell_completion")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the sub-command that the command line names; ends with its exit code.

    Args:
        arguments: without the program's name; None = those of this process.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_usage())
        sys.exit(0 if given else 2)
    if given[0] in ("-V", "--version"):
        print(f"dmx {dmx.__version__}")
    elif not set(_COMPLETION).isdisjoint(given):
        _complete([a for a in given if a not in COMMANDS])
    else:
        try:
            check_choice(given[0], tuple(COMMANDS), "command")
        except DmxError as error:
            _refuse(f"{error} `dmx --help` says what each does.")
        _run(given[0], f"dmx {given[0]}", given[1:])


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join((
        "usage: dmx COMMAND [SETTING=VALUE ...]", "", (dmx.__doc__ or "").splitlines()[0], "",
        *lines, "",
        "dmx COMMAND --help shows the settings of a command, -m a,b,c sweeps over values;",
        "dmx --version; dmx -sc install=bash prints what completes arguments in a shell.",
    ))  # fmt: skip


def _run(command: str, program: str, arguments: Sequence[str]) -> None:
    sys.argv = [program, *arguments]  # Hydra reads it, and names the program by it
    importlib.import_module(f"{_home()}.{command.replace('-', '_')}").main()


def _home() -> str:
    """Package of the entry points."""
    package = Path(__file__).resolve().parent
    if (package / "experiments").is_dir():
        return "dmx.experiments"
    clone = package.parent
    if not (clone / "experiments" / "search.py").is_file():
        _refuse(
            f"no entry points beside {package}: it is neither a wheel of dmx nor in a clone. Install "
            "it with pip install ."
        )
    sys.path.insert(0, str(clone))  # before any other `experiments` that is installed
    return "experiments"


def _complete(arguments: Sequence[str]) -> None:
    """What a shell asks for: Hydra's script, or the candidates for the line in COMP_LINE.

    Hydra's script calls the program alone and leaves the sub-command in the line, so that is taken
    out here; while it is being typed, the sub-commands are the candidates.
    """
    words = re.split(r"\s+", os.environ.get("COMP_LINE", "").lstrip(), maxsplit=2)
    if not any(a.startswith("query=") for a in arguments):
        _run("running.completion", "dmx", arguments)
    elif len(words) < 3:
        print(" ".join(name for name in COMMANDS if name.startswith(words[-1])))
    elif words[1] in COMMANDS:
        os.environ["COMP_LINE"] = f"dmx {words[2]}"
        _run(words[1], "dmx", arguments)


def _refuse(text: str) -> NoReturn:
    print(f"dmx: {text}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
