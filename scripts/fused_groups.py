"""Which layers the installed vLLM merges, beside our table of them: `dmx.models.linears.FUSED_GROUPS`.

python scripts/fused_groups.py                      of .venv-engine
python scripts/fused_groups.py vllm-env/bin/python

Read in its source, nothing is imported: `packed_modules_mapping`, `stacked_params_mapping` and `orig_to_new_stacked` of the
class of each architecture, and of those that it inherits from. Exit code 1 if an architecture that
`dmx.assignment.targets.VLLM_ARCHITECTURES` names merges layers that the table does not, or is gone.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dmx.assignment.targets import VLLM_ARCHITECTURES  # noqa: E402
from dmx.models.linears import FUSED_GROUPS  # noqa: E402

ENVIRONMENT = os.environ.get("DMX_ENGINE_PYTHON", str(ROOT / ".venv-engine/bin/python"))
Groups = frozenset[frozenset[str]]
"""Last components of names of layers that are merged."""
OF_VISION = frozenset("qkv")
"""Parts of `attn.qkv` of vision towers, which stay in BF16."""
KNOWN: Groups = frozenset([*map(frozenset, FUSED_GROUPS), OF_VISION])
_NAMES = ("packed_modules_mapping", "stacked_params_mapping", "orig_to_new_stacked")


def models_folder(python: str) -> Path:
    """Of the models of the vLLM that an interpreter has."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip()) / "vllm" / "model_executor" / "models"


def _merged(name: str, value: ast.expr) -> Iterator[tuple[str, str]]:
    """(merged layer, part) of one of the tables; what is computed, not written out, is passed over."""
    if name == "packed_modules_mapping" and isinstance(value, ast.Dict):
        for key, parts in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(parts, ast.List):
                yield from ((str(key.value), ast.literal_eval(part)) for part in parts.elts)
    elif name == "orig_to_new_stacked" and isinstance(value, ast.Dict):
        for key, to in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(to, ast.Tuple):
                yield str(ast.literal_eval(to.elts[0])), str(key.value)
    elif name == "stacked_params_mapping" and isinstance(value, ast.List):
        for row in value.elts:
            if isinstance(row, ast.Tuple) and all(isinstance(x, ast.Constant) for x in row.elts):
                merged, part, *_ = ast.literal_eval(row)
                yield merged, part


def _tables(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Assignments of the tables, entries that are assigned later, and arguments of their names."""
    for node in nodes:
        if isinstance(node, ast.keyword) and node.arg in _NAMES:
            yield node.arg, node.value
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, ast.Subscript):  # self.packed_modules_mapping["gate_up_proj"] = [...]
            target, value = target.value, ast.Dict([target.slice], [node.value])
        else:
            value = node.value
        name = getattr(target, "id", getattr(target, "attr", None))
        if name in _NAMES:
            yield name, value


class Source:
    """vLLM's models, by file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._nodes: dict[str, list[ast.AST]] = {}

    def nodes(self, module: str) -> list[ast.AST]:
        """Of a file."""
        if module not in self._nodes:
            tree = ast.parse((self.folder / f"{module}.py").read_text())
            self._nodes[module] = list(ast.walk(tree))
        return self._nodes[module]

    def architectures(self) -> dict[str, str]:
        """Name of a class, in small letters -> module that has it."""
        found: dict[str, str] = {}
        for node in self.nodes("registry"):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                for key, to in zip(node.value.keys, node.value.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(to, ast.Tuple):
                        found[str(key.value).lower()] = str(ast.literal_eval(to.elts[0]))
        return found

    def modules_of(self, module: str) -> set[str]:
        """A module and those of the classes that its classes inherit from."""
        waiting, found = [module], set()
        while waiting:
            now = waiting.pop()
            if now in found or not (self.folder / f"{now}.py").is_file():
                continue
            found.add(now)
            nodes = self.nodes(now)
            bases = {
                b.id
                for n in nodes
                if isinstance(n, ast.ClassDef)
                for b in n.bases
                if isinstance(b, ast.Name)
            }
            waiting += [
                n.module
                for n in nodes
                if isinstance(n, ast.ImportFrom) and n.level == 1 and n.module
                if bases & {alias.asname or alias.name for alias in n.names}
            ]
        return found - {"interfaces", "utils"}

    def groups(self, module: str) -> Groups:
        """What a module's classes merge."""
        found: set[frozenset[str]] = set()
        for one in self.modules_of(module):
            for name, value in _tables(self.nodes(one)):
                parts: dict[str, set[str]] = {}
                for merged, part in _merged(name, value):
                    place, _, last = part.strip(".").rpartition(".")
                    parts.setdefault(f"{place} {merged}", set()).add(last)
                found |= {frozenset(group) for group in parts.values() if len(group) > 1}
        return frozenset(found)


def classes_of(model_type: str) -> list[str]:
    """What transformers calls the models of a model_type that generate text, in small letters; of a model that only hubs
    have, what it would."""
    from transformers.models.auto import modeling_auto

    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    names = [table[model_type].lower() for table in tables if model_type in table]
    return names or [f"{model_type.replace('_', '')}forcausallm"]


def differences(source: Source) -> dict[str, str]:
    """model_type of ours -> what vLLM merges otherwise, or that it has no such model."""
    there = source.architectures()
    found: dict[str, str] = {}
    for kind in sorted(VLLM_ARCHITECTURES):
        modules = {there[name] for name in classes_of(kind) if name in there}
        if not modules:
            found[kind] = f"no model of vLLM is called {' or '.join(classes_of(kind))}"
        other = {group for module in modules for group in source.groups(module)} - KNOWN
        if other:
            found[kind] = said(other)
    return found


def said(groups: set[frozenset[str]] | Groups) -> str:
    return ", ".join("/".join(sorted(group)) for group in sorted(groups, key=sorted))


def beyond(source: Source) -> Mapping[str, str]:
    """Module of an architecture that is not ours -> what it merges that the table does not have."""
    ours = {name for kind in VLLM_ARCHITECTURES for name in classes_of(kind)}
    modules = {module for name, module in source.architectures().items() if name not in ours}
    other = {module: source.groups(module) - KNOWN for module in sorted(modules)}
    return {module: said(groups) for module, groups in other.items() if groups}


def main() -> int:
    source = Source(models_folder(sys.argv[1] if len(sys.argv) > 1 else ENVIRONMENT))
    wrong = differences(source)
    for kind, what in wrong.items():
        print(f"{kind}: {what}")
    print(
        f"{len(VLLM_ARCHITECTURES) - len(wrong)} of {len(VLLM_ARCHITECTURES)} architectures as in our table."
    )
    for module, what in beyond(source).items():
        print(f"not ours, merges more: {module}: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
