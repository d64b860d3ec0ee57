"""Counts of the code's structure: files, functions, the import graph, documented names.

    python scripts/structure.py            # this checkout
    python scripts/structure.py ../other   # another one, for a before and after

A room is a module or, at the level of packages, what lies directly in a package; an arrow is one
room that imports another, imports inside functions included; a ring is a set of modules that
reach each other. Names count as public when neither they nor anything above them starts with `_`.
"""

import argparse
import ast
import re
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

PACKAGES = ("dmx", "mor", "experiments")
BESIDE = ("tests", "scripts")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One source file, parsed."""

    name: str
    is_package: bool
    lines: int
    tree: ast.Module
    format_off: int


def read_modules(root: Path, package: str) -> dict[str, Module]:
    """Dotted name -> module, of every source file of a package."""
    modules = {}
    for path in sorted((root / package).rglob("*.py")):
        text = path.read_text()
        name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        lines = len(text.splitlines())
        modules[name] = Module(
            name, path.name == "__init__.py", lines, ast.parse(text), format_off(text)
        )
    return modules


def format_off(text: str) -> int:
    """Comments that take code from the formatter."""
    return len(re.findall(r"# fmt: (?:skip|off)$", text, flags=re.MULTILINE))


def imported(module: Module, known: Mapping[str, Module]) -> Iterator[str]:
    """Modules of the checkout that a file imports, anywhere in it."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join(
                [*(above if node.level else []), *([node.module] if node.module else [])]
            )
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                name = whole if whole in known else base
                if name in known and name != module.name:
                    yield name


def rings(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other, by reachability; the graphs here are small."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        ahead = list(graph[start])
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead.extend(graph[name])
        reach[start] = seen
    groups = {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in graph
        if name in reach[name]
    }
    return [sorted(group) for group in groups]


def functions(tree: ast.Module) -> Iterator[Function]:
    """Every function and method of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def public_functions(node: ast.AST) -> Iterator[Function]:
    """Functions of a module and methods of its classes that a user may call by name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function) and not child.name.startswith("_"):
            yield child
        elif isinstance(child, ast.ClassDef) and not child.name.startswith("_"):
            yield from public_functions(child)


def _length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _spread(values: list[int]) -> str:
    ninetieth = sorted(values)[int(0.9 * (len(values) - 1))]
    return f"{statistics.median(values):.0f} / {ninetieth} / {max(values)}"


def room(name: str) -> str:
    """What lies directly in a package: `dmx.searching` of `dmx.searching.polish`."""
    return ".".join(name.split(".")[:2])


def measure(root: Path, packages: tuple[str, ...]) -> dict[str, str]:
    """The counts of some packages of a checkout, as text by name."""
    everything = {n: m for package in PACKAGES for n, m in read_modules(root, package).items()}
    modules = {n: m for n, m in everything.items() if n.split(".")[0] in packages}
    graph = {n: set(imported(m, everything)) & set(modules) for n, m in modules.items()}
    arrows = {
        (room(a), room(b)) for a, targets in graph.items() for b in targets if room(a) != room(b)
    }
    lengths = [_length(f) for m in modules.values() for f in functions(m.tree)]
    public = list(chain.from_iterable(public_functions(m.tree) for m in modules.values()))
    documented = sum(ast.get_docstring(f) is not None for f in public)
    names = {room(n) for n in modules if n not in PACKAGES}
    return {
        "files": str(len(modules)),
        "lines": f"{sum(m.lines for m in modules.values()):,}",
        "file, median / p90 / largest": _spread([m.lines for m in modules.values() if m.lines]),
        "function, median / p90 / largest": _spread(lengths),
        "rooms and arrows between them": f"{len(names)}, {len(arrows)}",
        "arrows between modules": str(sum(map(len, graph.values()))),
        "rings": str(len(rings(graph))),
        "public functions documented": f"{documented / len(public):.0%} of {len(public)}",
        "format-off marks": str(sum(m.format_off for m in modules.values())),
    }


def main() -> None:
    """Print one table, a column a group of packages."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    root = parser.parse_args().root
    columns = {
        "dmx": measure(root, ("dmx",)),
        "dmx + mor": measure(root, ("dmx", "mor")),
        "experiments": measure(root, ("experiments",)),
        "all": measure(root, PACKAGES),
    }
    print(f"| | {' | '.join(columns)} |")
    print(f"|---{'|---' * len(columns)}|")
    for key in columns["all"]:
        print(f"| {key} | {' | '.join(column[key] for column in columns.values())} |")
    beside = (path for folder in BESIDE for path in (root / folder).rglob("*.py"))
    marks = sum(format_off(path.read_text()) for path in beside)
    print(f"\nformat-off marks in {' and '.join(BESIDE)}: {marks}")


if __name__ == "__main__":
    main()
