"""What the workers of all runtimes share: jobs in processes of their own, and the operands of linear layers.

Run in a runtime's own environment, beside one of the workers; knows neither a runtime nor dmx. Several jobs get a
process each, forked after the imports, which take most of the time of a small model. On a card give a worker one job: a
process that saw the card cannot be forked. A job that failed leaves `out`.txt, with what it said.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor


class Operands:
    """Inputs and outputs of linear layers, of their first call. Inputs are kept before the layer has run: a kernel may write
    over its own, as vLLM's rotation on a card does (`hadacore_transform`).

    Args:
        linear_layers: model -> name -> module.
    """

    def __init__(self, linear_layers: Callable[[Any], dict[str, Any]]) -> None:
        self.kept: dict[str, Tensor] = {}
        self._linear_layers = linear_layers
        self._handles: list[Any] = []

    def watch(self, model: Any) -> None:
        for name, layer in self._linear_layers(model).items():
            self._handles += [
                layer.register_forward_pre_hook(self._keep_input(name)),
                layer.register_forward_hook(self._keep_output(name)),
            ]

    def release(self, model: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep_input(self, name: str) -> Any:
        def hook(module: Any, given: tuple[Any, ...]) -> None:
            self._keep(f"{name}.x", given[0])

        return hook

    def _keep_output(self, name: str) -> Any:
        def hook(module: Any, given: tuple[Any, ...], result: Any) -> None:
            self._keep(f"{name}.y", result[0] if isinstance(result, tuple) else result)

        return hook

    def _keep(self, name: str, tensor: Tensor) -> None:
        if name not in self.kept:
            self.kept[name] = tensor.detach().cpu().clone()


Main = Callable[[str], None]
"""Does the job in a file."""


def run(main: Main, job_file: str) -> int:
    """Exit code of a job; what a failed one said is left in `out`.txt."""
    try:
        main(job_file)
    except Exception:
        out = json.loads(Path(job_file).read_text())["out"]
        Path(out + ".txt").write_text(traceback.format_exc())
        traceback.print_exc()
        return 1
    return 0


def run_apart(main: Main, job_file: str) -> None:
    """The job in a process of its own."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    code = 1
    try:
        code = run(main, job_file)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what was imported before the fork must not clean up twice


def start(main: Main) -> None:
    """The jobs that the command line names."""
    if len(sys.argv) == 2:
        run(main, sys.argv[1])
    for path in sys.argv[1:] if len(sys.argv) > 2 else ():
        run_apart(main, path)
