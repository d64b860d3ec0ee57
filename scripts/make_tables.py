"""Result tables and pictures in docs/results and README.md, made from records alone.

python scripts/make_tables.py            write them
python scripts/make_tables.py --check    exit 1 if a page differs from what the records give, or a
                                         picture is missing (its bytes depend on library versions)
"""

import argparse
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from dmx.errors import DmxError  # noqa: E402
from experiments.reporting.markdown import markdown  # noqa: E402
from experiments.reporting.pages.mor import mor_page  # noqa: E402
from experiments.reporting.pages.quality import overview, quality_page  # noqa: E402
from experiments.reporting.plots import pareto  # noqa: E402
from experiments.reporting.quality_tables import pooled  # noqa: E402
from experiments.reporting.results import (  # noqa: E402
    SEPARATE_NOTE,
    Group,
    by_operands,
    difference_to,
    group_rows,
    spread_text,
)

RESULTS = ROOT / "docs" / "results"
RECORDS = RESULTS / "records"
START, END = "<!-- results: made by scripts/make_tables.py -->", "<!-- end of results -->"
README_RECORD = "smollm2_135m_compare"
BEST, BEST_END = "<!-- overview: made by scripts/make_tables.py -->", "<!-- end of overview -->"

HEAD = (
    "method", "budget", "seeds", "perplexity", "element_bits", "bits_per_element",
    "minus kl, nats/token", "minus kl_per_bit", "search, s",
)  # fmt: skip


def difference(group: Group, groups: list[Group], against: str) -> str:
    found = difference_to(group, groups, against)
    if found.mean is None or found.stderr is None:
        return "–"
    return f"{found.mean:+.4f} ± {found.stderr:.4f}"


def number(group: Group, metric: str, digits: int) -> str:
    mean = group.statistic(metric).mean
    return "–" if mean is None else f"{mean:.{digits}f}"


def table(record: dict[str, Any]) -> str:
    """Markdown; choices that are separate for weights and inputs stand in a table of their own."""
    joint, separate = by_operands(group_rows(record["results"]))
    text = "\n".join(table_lines(joint))
    if separate:
        text += "\n\n" * bool(joint) + "\n".join([f"{SEPARATE_NOTE}\n", *table_lines(separate)])
    return text


def table_lines(groups: list[Group]) -> list[str]:
    rows = [
        [
            group.name, f"≤ {group.budget[0]:g}" if group.budget else "",
            len(group.rows) if group.search not in (None, "uniform") else "",
            spread_text(group.statistic("perplexity")),
            number(group, "element_bits", 3), number(group, "bits_per_element", 3),
            difference(group, groups, "kl"), difference(group, groups, "kl_per_bit"),
            number(group, "search_seconds", 1),
        ]
        for group in groups
    ]  # fmt: skip
    return markdown(HEAD, rows) if rows else []


def conditions(record: dict[str, Any]) -> str:
    evaluation = record["data"]["evaluation"]
    calibration = record["data"].get("calibration")
    parts = [
        f"Model: {record['model']['id']}, {record['model']['dtype']}. {record['model']['note'] or ''}",
        f"Evaluation: {evaluation['name']}, {evaluation['windows']} windows of "
        f"{evaluation['window']} tokens.",
    ]
    if calibration:
        rows, length = calibration["batch_shape"]
        parts.append(
            f"Calibration: {calibration['name']}, {calibration['batches']} batches of {rows} x {length}."
        )
    search = record["requested"].get("search")
    if search:
        parts.append(
            f"Units: {search['units']}; family {search['family']}; scale rule {search['scale_rule']}; "
            f"dmx: {search['steps']} steps, {search['objective']}, lr {search['lr']:g}, momentum "
            f"{search['momentum']:g}; scans on {search['score_batches'] or 'all'} batches."
        )
    versions = ", ".join(f"{k} {record['versions'][k]}" for k in ("torch", "transformers"))
    parts.append(f"Device: {record['device']['name']}; {versions}; {record['finished'][:10]}.")
    parts.append(
        "± after a perplexity is the standard deviation over seeds, after a difference the paired "
        "standard error over windows."
    )
    return "\n".join(f"- {p.strip()}" for p in parts)


def tasks_page(record: dict[str, Any]) -> str:
    """Zero-shot metrics of a record of `experiments.evaluate`, each with its difference to bf16."""
    rows = [row for row in record["results"] if row["zero_shot"]]
    first = rows[0]["zero_shot"]
    head = ["method", "element_bits"]
    for task, facts in first.items():
        head += [f"{task}, {facts['metric']}, %", "minus bf16"]
    body = []
    for row in rows:
        cells = [row["label"], f"{row['element_bits']:.3f}"]
        for task, base in first.items():
            found = row["zero_shot"][task]
            items = np.array(found["items"], dtype=float) - np.array(base["items"])
            error = items.std(ddof=1) / len(items) ** 0.5
            cells += [f"{100 * found['value']:.1f} ± {100 * found['stderr']:.1f}"]
            cells += ["–" if row is rows[0] else f"{100 * items.mean():+.1f} ± {100 * error:.1f}"]
        body.append(cells)
    lines = [
        *markdown(head, body),
        "", f"- Model: {record['model']['id']}, {record['model']['dtype']}. {record['model']['note'] or ''}".rstrip(),
        f"- Device: {record['device']['name']}; {record['wall_seconds']:.0f} s for all rows; "
        f"torch {record['versions']['torch']}; {record['finished'][:10]}.",
        "- Items: " + ", ".join(f"{task} {facts['count']}" for task, facts in first.items()) + ". Differences are "
        "paired by item, ± their standard error. Weights and inputs quantized.",
    ]  # fmt: skip
    return "\n".join(lines)


def linear_page(record: dict[str, Any]) -> str:
    """Times of scripts/benchmarks/mor.py: one linear layer, forward and backward."""
    head = ("in = out", "recipe", "ms", "low, high", "times bf16's speed", "target")
    body = []
    for row in record["rows"]:
        if row.get("failed"):
            body.append([row["size"], row["recipe"], "not run", "", "", ""])
            continue
        reached = {None: "", True: ", reached", False: ", missed"}[row["reached"]]
        target = "" if row["target"] is None else f"{row['target']:g}{reached}"
        body.append([
            row["size"], row["recipe"], f"{row['ms']:.3f}",
            f"{row['ms_low']:.3f}, {row['ms_high']:.3f}", f"{row['speedup']:.3f}", target,
        ])  # fmt: skip
    thread = "autograd's own" if record.get("engine_thread", True) else "the calling"
    lines = [
        *markdown(head, body),
        "", f"- {record['device']}, torch {record['torch']}, {record['rows'][0]['tokens']} tokens, bf16; "
        f"backward passes in {thread} thread.",
    ]  # fmt: skip
    return "\n".join(lines)


EXPORT_HEAD = (
    "model", "target", "layers a format", "inputs", "element_bits", "quantized bytes",
    "fake-quantized", "files", "logits", "largest difference", "KL, nats/token",
)  # fmt: skip


def export_cells(record: dict[str, Any]) -> list[Any]:
    """One export: perplexity of the model in memory and of the files, as the loader measured it."""
    facts, (memory, files) = record["export"], record["results"]
    found = facts["verification"]
    profile = f", {facts['profile']}" if facts["profile"] else ""
    formats = ", ".join(f"{count} {name}" for name, count in sorted(facts["formats"].items()))
    return [
        record["model"]["id"], facts["target"] + profile, formats,
        "by the loader" if facts["inputs"] else "no", f"{memory['element_bits']:.4f}",
        f"{facts['bytes']['quantized_bytes']:,}", memory["perplexity"], files["perplexity"],
        "equal" if found["equal"] else "differ", f"{found['max_difference']:.4g}",
        f"{found['kl']:.3g}",
    ]  # fmt: skip


def export_page(records: list[dict[str, Any]]) -> str:
    """docs/results/export.md."""
    records = sorted(
        records, key=lambda r: (-r["data"]["evaluation"]["tokens"], r["model"]["id"], r["started"])
    )
    lines = []
    for record in records:
        model, text = record["model"], record["data"]["evaluation"]
        lines += [
            f"{model['id']}: {(model['note'] or 'no note').strip().rstrip('.')}. Text: {text['name']}, {text['windows']} "
            f"windows of {text['window']} tokens. Device: {record['device']['name']}."
        ]
    versions: dict[str, str] = {}
    rules: dict[str, str] = {}
    for record in records:
        facts = record["export"]
        versions |= facts["verification"]["versions"]
        if facts["input_rule"]:
            rules[facts["target"]] = facts["input_rule"]
    return "\n".join([
        "# export", "",
        "Exported, loaded by the target's own loader in a fresh process, and measured there; formats "
        "drawn by chance, so perplexities say nothing of quality. Weights only, or with inputs that "
        "the loader quantizes by its own rule.", "",
        *markdown(EXPORT_HEAD, map(export_cells, records)), "",
        *(f"- {line}" for line in dict.fromkeys(lines)),
        f"- Versions: {', '.join(f'{k} {v}' for k, v in sorted(versions.items()))}; "
        f"{max(r['finished'] for r in records)[:10]}.",
        *(f"- Inputs, {target}: {rule}." for target, rule in sorted(rules.items())),
    ]) + "\n"  # fmt: skip


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    return buffer.getvalue()


def between(text: str, start: str, end: str, content: str) -> str:
    """The text with other content between its two marks."""
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise DmxError(
            f"README.md must hold {start} once and {end} once after it: what stands between them is "
            "replaced. Put both back."
        )
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n\n{content}\n\n{end}{after}"


def own_page(name: str, record: dict[str, Any]) -> dict[Path, str | bytes]:
    """Path -> content of the page, and of the picture, of a record that has a page of its own."""
    title, path = f"# {name.replace('_', ' ')}", RESULTS / f"{name}.md"
    if "parts_us" in record:
        return {path: f"{title}\n\n{linear_page(record)}\n"}
    known = record.get("schema") == "dmx.record/1"
    if not known or record["command"] not in ("compare", "evaluate", "search"):
        return {}
    if not record["requested"].get("eval", {}).get("perplexity", True):
        return {path: f"{title}\n\n{tasks_page(record)}\n"}
    made: dict[Path, str | bytes] = {}
    text = f"{title}\n\n{conditions(record)}\n\n{table(record)}\n"
    figure = pareto(group_rows(record["results"]), zoom=record["command"] == "compare")
    if figure is not None:
        made[RESULTS / f"{name}.png"] = png(figure)
        text += f"\n![perplexity over bits]({name}.png)\n"
    return made | {path: text}


def read_json(path: Path) -> dict[str, Any]:
    """Raises DmxError for a file that holds no JSON object."""
    try:
        record = json.loads(path.read_text())
    except ValueError as error:
        raise DmxError(
            f"{path} is damaged ({error}). Make the record again, or delete it."
        ) from error
    if not isinstance(record, dict):
        raise DmxError(f"{path} is no record: a JSON object is asked for. Delete it.")
    return record


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """Raise DmxError for a record that lacks what its page shows."""
    try:
        yield
    except (
        LookupError, TypeError, ValueError, AttributeError, ArithmeticError, StopIteration,
    ) as error:  # fmt: skip
        raise DmxError(
            f"{where}: a record lacks what its page shows ({type(error).__name__}: {error}). Make it "
            "again with this version, or delete it."
        ) from error


def outputs() -> dict[Path, str | bytes]:
    """Path -> content of everything that the records give."""
    made: dict[Path, str | bytes] = {}
    readme = (ROOT / "README.md").read_text()
    records = {path.stem: read_json(path) for path in sorted(RECORDS.glob("*.json"))}
    quality = [record for name, record in records.items() if name.startswith("quality_")]
    for name, record in records.items():
        if not name.startswith("quality_"):
            with told_of(f"{RECORDS / name}.json"):
                made |= own_page(name, record)
    if record := records.get(README_RECORD):
        with told_of(f"{RECORDS / README_RECORD}.json"):
            readme = between(readme, START, END, f"{table(record)}\n\n{conditions(record)}")
    if exports := [r for r in records.values() if r.get("command") == "export"]:
        with told_of(f"{RECORDS}, records of exports"):
            made[RESULTS / "export.md"] = export_page(exports)
    if quality:
        with told_of(f"{RECORDS}/quality_*.json"):
            text, figure = quality_page(quality)
            best = "\n".join(overview(pooled(quality)))
        made[RESULTS / "quality.md"] = text
        readme = between(readme, BEST, BEST_END, best)
        if figure is not None:
            made[RESULTS / "quality.png"] = png(figure)
    trainings = [r for r in records.values() if r.get("command") == "train_mor"]
    nets = [r for r in records.values() if "clean" in r]
    if trainings or nets:
        with told_of(f"{RECORDS}, records of train_mor and safety_net"):
            text, figures = mor_page(trainings, nets)
        made[RESULTS / "mor.md"] = text
        made |= {RESULTS / name: png(figure) for name, figure in figures.items()}
    return made | {ROOT / "README.md": readme}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    wrong = []
    try:
        made = outputs()
    except DmxError as error:
        print(error, file=sys.stderr)
        return 2
    for path, content in made.items():
        if isinstance(content, bytes):
            same = path.exists() and (check or path.read_bytes() == content)
        else:
            same = path.exists() and path.read_text() == content
        if same:
            continue
        wrong.append(path.relative_to(ROOT))
        if not check:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for path in wrong:
        print(f"{'differs from the records' if check else 'written'}: {path}")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
