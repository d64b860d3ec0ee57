"""Result tables and pictures in docs/results and README.md, made from records alone.

python scripts/make_tables.py            write them
python scripts/make_tables.py --check    exit 1 if a page differs from what the records give, or a
                                         picture is missing (its bytes depend on library versions)
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dmx.errors import DmxError, RunError  # noqa: E402
from experiments.reporting.groups import group_rows  # noqa: E402
from experiments.reporting.pages import engines, humming, large, net  # noqa: E402
from experiments.reporting.pages.compare import compare_page  # noqa: E402
from experiments.reporting.pages.export import export_page  # noqa: E402
from experiments.reporting.pages.index import index_page  # noqa: E402
from experiments.reporting.pages.linear import linear_page  # noqa: E402
from experiments.reporting.pages.mor import mor_page  # noqa: E402
from experiments.reporting.pages.overview import readme_table  # noqa: E402
from experiments.reporting.pages.peers import COMMAND as PEERS  # noqa: E402
from experiments.reporting.pages.peers import peers_page  # noqa: E402
from experiments.reporting.pages.peers_tools import readme_tools  # noqa: E402
from experiments.reporting.pages.quality import quality_pages  # noqa: E402
from experiments.reporting.pages.scaling import scaling_page  # noqa: E402
from experiments.reporting.pages.tasks import tasks_page  # noqa: E402
from experiments.reporting.pages.tokens import PREFIX as TOKENS  # noqa: E402
from experiments.reporting.pages.tokens import tokens_page  # noqa: E402
from experiments.reporting.plots.canvas import png  # noqa: E402
from experiments.reporting.plots.pareto import pareto  # noqa: E402
from experiments.reporting.pooling import Presets  # noqa: E402
from experiments.reporting.record import Record  # noqa: E402
from experiments.reporting.scaling import SCHEMA as GROWTH  # noqa: E402
from experiments.reporting.stored import flatten, read_json  # noqa: E402

RESULTS = ROOT / "docs" / "results"
RECORDS = RESULTS / "records"
OVERVIEW, TOOLS = "overview", "other tools"
"""What README has between marks."""
UNIFORM_RECORD = "smollm2_135m_compare"
"""Where README takes the uniform formats from."""
LINEAR_SCHEMA = "mor.linear_bench/1"
SEARCHES = ROOT / "configs" / "search"

Made = dict[Path, "str | Figure"]
"""Path -> content; a picture is drawn where it is written."""


def presets() -> Presets:
    """What files of configs/search set, without what they inherit."""

    def settings(name: str) -> dict[str, Any]:
        content: Any = OmegaConf.to_container(OmegaConf.load(SEARCHES / f"{name}.yaml"))
        return {key: value for key, value in flatten(content).items() if key != "defaults"}

    return Presets(
        exact=settings("exact"),
        polished=settings("polished"),
        learned=settings("learned"),
        joint=settings("joint"),
    )


def between(text: str, name: str, content: str) -> str:
    """The text with other content between the marks of that name."""
    start, end = f"<!-- {name}: made by scripts/make_tables.py -->", f"<!-- end of {name} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise DmxError(
            f"README.md must hold {start} once and {end} once after it: what stands between them is "
            "replaced. Put both back."
        )
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n{content}\n\n{end}{after}"


def own_page(name: str, record: Record) -> Made:
    """The page, and the picture, of a record that has a page of its own."""
    title, path = name.replace("_", " "), RESULTS / f"{name}.md"
    if record.command not in ("compare", "evaluate", "search"):
        return {}
    if "evaluation" not in record.data:
        return {path: tasks_page(title, record)}
    figure = pareto(group_rows(record.rows), zoom=record.command == "compare")
    picture = path.with_suffix(".png")
    made: Made = {path: compare_page(title, record, picture.name if figure else None)}
    return made | ({picture: figure} if figure else {})


def read_records() -> tuple[dict[str, Record], dict[str, dict[str, Any]]]:
    """Records by name, and bodies of those that scripts wrote.

    Raises:
        DmxError: a file is damaged, of an unknown schema, or lacks something.
    """
    records: dict[str, Record] = {}
    others: dict[str, dict[str, Any]] = {}
    for path in sorted(RECORDS.glob("*.json")):
        body = read_json(path, "make the record again, or delete it")
        if body.get("schema") in (
            net.SCHEMA,
            LINEAR_SCHEMA,
            engines.SCHEMA,
            humming.SCHEMA,
            GROWTH,
            large.SCHEMA,
        ):
            others[path.stem] = body
        else:
            records[path.stem] = Record.load(path)
            if not records[path.stem].results:
                raise RunError(f"{path} has no rows. Make the record again, or delete it.")
    return records, others


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """Raise DmxError for a record that lacks what its page shows."""
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
        StopIteration,
    ) as error:
        if isinstance(error, DmxError):
            raise
        raise RunError(
            f"{where}: a record lacks what its page shows ({type(error).__name__}: {error}). Make it "
            "again with this version, or delete it."
        ) from error


def outputs() -> Made:
    """Everything that the records give."""
    records, others = read_records()
    made: Made = {}
    for name, record in records.items():
        if not name.startswith(("quality_", TOKENS)):
            with told_of(f"{RECORDS / name}.json"):
                made |= own_page(name, record)
    for name, body in others.items():
        if body["schema"] == LINEAR_SCHEMA:
            with told_of(f"{RECORDS / name}.json"):
                made[RESULTS / f"{name}.md"] = linear_page(name.replace("_", " "), body)
        if body["schema"] == humming.SCHEMA:
            with told_of(f"{RECORDS / name}.json"):
                made[RESULTS / f"{name}.md"] = humming.humming_page(name.replace("_", " "), body)
    if served := {n: b for n, b in others.items() if b["schema"] == engines.SCHEMA}:
        with told_of(f"{RECORDS}, records of serve_check"):
            made[RESULTS / "engines.md"] = engines.engines_page(served)
    if paths := {n: b for n, b in others.items() if b["schema"] == large.SCHEMA}:
        with told_of(f"{RECORDS}, records of scripts.benchmarks.large"):
            made[RESULTS / "large.md"] = large.large_page(paths)
    if growth := {n: b for n, b in others.items() if b["schema"] == GROWTH}:
        with told_of(f"{RECORDS}, records of scripts.benchmarks.growth"):
            text, figures = scaling_page(growth)
        made[RESULTS / "scaling.md"] = text
        made |= {RESULTS / name: figure for name, figure in figures.items()}
    if peers := {n: r for n, r in records.items() if r.command == PEERS}:
        made |= peers_outputs(peers, [r for r in records.values() if r.command == "compare"])
    if exports := [r for r in records.values() if r.command == "export"]:
        with told_of(f"{RECORDS}, records of exports"):
            made[RESULTS / "export.md"] = export_page(exports)
    if quality := [r for name, r in records.items() if name.startswith("quality_")]:
        with told_of(f"{RECORDS}/quality_*.json"):
            made |= quality_outputs(quality)
    if by_tokens := {n: r for n, r in records.items() if n.startswith(TOKENS)}:
        with told_of(f"{RECORDS}/{TOKENS}*.json"):
            text, figures = tokens_page(by_tokens)
        made[RESULTS / "tokens.md"] = text
        made |= {RESULTS / name: figure for name, figure in figures.items()}
    trainings = [r for r in records.values() if r.command == "train_mor"]
    nets = [body for body in others.values() if body["schema"] == net.SCHEMA]
    if trainings or nets:
        with told_of(f"{RECORDS}, records of train_mor and safety_net"):
            text, figures = mor_page(trainings, nets)
        made[RESULTS / "mor.md"] = text
        made |= {RESULTS / name: figure for name, figure in figures.items()}
    pages = {path.name: text for path, text in made.items() if isinstance(text, str)}
    with told_of(f"{RECORDS}, what README shows"):
        made |= readme_outputs(quality, records.get(UNIFORM_RECORD), list(peers.values()))
    made[RESULTS / "README.md"] = index_page(
        {name: text for name, text in pages.items() if name != "README.md"}
    )
    return made


def peers_outputs(peers: dict[str, Record], others: Sequence[Record] = ()) -> Made:
    """The page of other tools and its pictures.

    Args:
        others: of the same texts, for what no tool chose.

    Raises:
        RunError: a record lacks what the page shows; names the one that makes no page alone.
    """

    def made(records: list[Record]) -> Made:
        text, figures = peers_page(records, others)
        page: Made = {RESULTS / "peers.md": text}
        return page | {RESULTS / name: figure for name, figure in figures.items()}

    try:
        with told_of(f"{RECORDS}, records of scripts.peers"):
            return made(list(peers.values()))
    except RunError:
        for name, record in peers.items():
            with told_of(f"{RECORDS / name}.json"):
                made([record])
        raise


def quality_outputs(quality: list[Record]) -> Made:
    """The quality pages and their pictures."""
    pages = quality_pages(quality, presets())
    made: Made = {RESULTS / name: text for name, text in pages.texts.items()}
    return made | {RESULTS / name: figure for name, figure in pages.pictures.items()}


def readme_outputs(quality: list[Record], uniform: Record | None, peers: list[Record]) -> Made:
    """README with the tables of both; one that no record gives stays as it is."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    if quality:
        text = between(text, OVERVIEW, "\n".join(readme_table(quality, presets(), uniform)))
    if lines := readme_tools(peers):
        text = between(text, TOOLS, "\n".join(lines))
    return {readme: text}


def differing(made: Made, *, check: bool) -> dict[Path, bytes]:
    """Files that are not as the records give, with what they should say; of a picture `check` asks only that it is there."""
    wrong: dict[Path, bytes] = {}
    for path, content in made.items():
        if check and not isinstance(content, str) and path.exists():
            continue
        expected = content.encode() if isinstance(content, str) else png(content)
        if not path.exists() or path.read_bytes() != expected:
            wrong[path] = expected
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    try:
        made = outputs()
    except DmxError as error:
        print(error, file=sys.stderr)
        return 2
    wrong = differing(made, check=check)
    for path, content in wrong.items():
        if not check:
            path.write_bytes(content)
        print(f"{'differs from the records' if check else 'written'}: {path.relative_to(ROOT)}")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
