"""Imports point one way: parsed from the source, imports inside functions included."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Lower may not know higher. A package's own modules may import each other, without cycles.
RANKS = {
    "dmx.errors": 0,
    "dmx.formats": 1,
    "dmx.files": 1,
    "dmx.processes": 1,
    "dmx.progress": 2,
    "dmx.hub": 1,
    "dmx.state": 2,
    "dmx.numerics": 2,
    "dmx.kernels": 3,
    "dmx.data": 4,
    "dmx.models": 5,
    "dmx.assignment": 6,
    "dmx.transforms": 7,
    "dmx.applying": 8,
    "dmx.weights": 9,
    "dmx.evaluate": 9,
    "dmx.exporting": 9,
    "dmx.searching": 10,
    "dmx.__main__": 11,
    "dmx.tiny_models": 11,
}
ALONE = {"dmx.models", "dmx.data", "dmx.hub", "dmx.state"}
"""Models and data, and what they take of the ground, import nothing from the path from formats to exporting."""


def modules(package):
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(name, path, known):
    """Modules that a file imports, anywhere in it; `from a import b` is a.b where that is one."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in known else base


KNOWN = modules("dmx") | modules("mor") | modules("experiments")


@functools.cache
def graph():
    """Module -> what it imports. Not made at import: each worker would, whether it runs these tests or not."""
    return {name: set(imports(name, path, KNOWN)) for name, path in KNOWN.items()}


def part(module):
    return ".".join(module.split(".")[:2])


def test_the_parser_sees_imports_inside_functions_and_relative_ones(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("def f():\n    from ..a import b\n    import hydra.core\nfrom . import c\n")
    found = set(imports("dmx.x.module", path, {"dmx.a.b", "dmx.x.c"}))
    assert found == {"dmx.a.b", "hydra.core", "dmx.x.c"}


def test_every_part_of_dmx_has_its_place():
    parts = {part(name) for name in graph() if name.startswith("dmx.")}
    assert parts <= set(RANKS), f"give {parts - set(RANKS)} a place in RANKS"


@pytest.mark.parametrize("name", [n for n in KNOWN if n.startswith("dmx.")])
def test_dmx_imports_from_its_left_only(name):
    for target in graph()[name]:
        assert target != "dmx" or name == "dmx.__main__", (
            f"{name} imports the package that imports it"
        )
        if target.startswith("dmx.") and part(target) != part(name):
            assert RANKS[part(target)] < RANKS[part(name)], f"{name} imports {target}"


@pytest.mark.parametrize("name", [n for n in KNOWN if part(n) in ALONE])
def test_models_and_data_import_nothing_from_the_path(name):
    path = {p for p, rank in RANKS.items() if rank >= 2} - ALONE
    assert not {t for t in graph()[name] if part(t) in path}


def test_dmx_knows_neither_mor_nor_the_entry_points_nor_hydra():
    foreign = {"mor", "experiments", "hydra", "omegaconf", "tests"}
    for name, targets in graph().items():
        if name.startswith("dmx"):
            assert not {t for t in targets if t.split(".")[0] in foreign}, name


def test_mor_takes_dmx_through_its_base_alone():
    for name, targets in graph().items():
        if name.split(".")[0] == "mor":
            roots = {t.split(".")[0] for t in targets}
            assert not roots & {"experiments", "hydra", "omegaconf"}, name
            assert name == "mor._base" or "dmx" not in roots, name


FLOORS = ("dmx", "mor", "experiments.reporting", "experiments.running", "experiments")
"""From the ground up; the last one holds the entry points. Higher may know lower, never the reverse."""


def floor(module):
    """Index in FLOORS; None for other packages."""
    named = [i for i, name in enumerate(FLOORS) if f"{module}.".startswith(f"{name}.")]
    return min(named, default=None)


def test_the_floors_are_told_apart():
    names = ("dmx.formats", "mor", "experiments.reporting.record", "experiments.running", "torch")
    assert [floor(name) for name in names] == [0, 1, 2, 3, None]
    assert floor("experiments.search") == floor("experiments") == 4


@pytest.mark.parametrize("name", [n for n in KNOWN if n.startswith("experiments.")])
def test_experiments_import_from_their_floor_and_below_by_relative_names(name):
    for target in graph()[name]:
        assert floor(target) is None or floor(target) <= floor(name), f"{name} imports {target}"
    text = KNOWN[name].read_text()
    # The same files are installed as dmx.experiments.
    assert not re.search(r"^\s*(from|import) experiments\b", text, re.MULTILINE), name


def test_entry_points_do_not_know_each_other():
    entries = {n for n in KNOWN if floor(n) == 4 and n != "experiments"}
    assert {"experiments.search", "experiments.train_mor"} <= entries
    for name in entries:
        assert not graph()[name] & entries, name


def test_reports_and_training_rows_know_no_hydra_and_records_no_torch():
    torchless = {"dmx.errors", "dmx.files", "dmx.assignment.facts"}
    for name, targets in graph().items():
        roots = {t.split(".")[0] for t in targets}
        if name in torchless:
            assert "torch" not in roots, name
            assert {t for t in targets if t.startswith("dmx.")} <= torchless, name
        if floor(name) != 2:
            continue
        assert not roots & {"hydra", "omegaconf"}, name
        if name.endswith(".record"):
            assert not roots & {"torch", "matplotlib", "mor"}
            assert {t for t in targets if t.startswith("dmx")} <= torchless


def test_only_the_entry_points_know_hydra_and_nobody_knows_them():
    for name, targets in graph().items():
        if not name.startswith("experiments"):
            assert not {t for t in targets if t.split(".")[0] in ("hydra", "experiments")}, name


@pytest.mark.parametrize("name", ["search", "compare", "evaluate", "export", "train_mor"])
def test_an_entry_point_is_under_a_hundred_lines_with_its_schema(name):
    text = (ROOT / "experiments" / f"{name}.py").read_text()
    assert len(text.splitlines()) < 100 and "@dataclass" in text


def test_nothing_that_draws_is_imported_before_something_is_drawn_and_reports_need_no_commands():
    code = (
        "import importlib, sys\n"
        "import experiments.reporting.report, experiments.reporting.report_training\n"
        "import experiments.reporting.pages.quality, experiments.reporting.pages.mor\n"
        "assert 'hydra' not in sys.modules\n"
        "assert not any(m.startswith('experiments.running') for m in sys.modules)\n"
        "for name in ('search', 'compare', 'evaluate', 'train_mor'):\n"
        "    importlib.import_module(f'experiments.{name}')\n"
        "    assert 'matplotlib' not in sys.modules, name\n"
        "from experiments.reporting.plots.canvas import new_figure\n"
        "new_figure(1, 1)\n"
        "assert 'matplotlib' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_imports_go_in_a_circle():
    ours = {n: {t for t in ts if t in KNOWN and t != n} for n, ts in graph().items()}
    done, path = set(), []

    def visit(name):
        if name in path:
            pytest.fail(" -> ".join([*path[path.index(name) :], name]))
        if name not in done:
            path.append(name)
            for target in sorted(ours[name]):
                visit(target)
            done.add(path.pop())

    for name in ours:
        visit(name)


def test_no_function_of_the_package_hides_a_module_of_the_same_name():
    import dmx

    for name in dmx.__all__:
        assert f"dmx.{name}" not in KNOWN, f"import dmx.{name} would find the function"


def test_each_public_name_is_imported_when_it_is_used_from_where_it_is_declared():
    import dmx

    names = {f"dmx.{module}.{name}" for module, found in dmx._HOMES.items() for name in found}
    tree = ast.parse(Path(dmx.__file__).read_text())
    declared = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("dmx")
        for alias in node.names
    }
    assert names == declared
    assert sorted(name.rpartition(".")[2] for name in names) == sorted(dmx.__all__)
    assert all(callable(getattr(dmx, name)) for name in dmx.__all__)
    assert set(dmx.__all__) <= set(dir(dmx))
    with pytest.raises(AttributeError, match=r"'dmx' has no attribute 'serach'"):
        _ = dmx.serach
