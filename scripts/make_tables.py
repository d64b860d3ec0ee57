"""Result tables and pictures in docs/results and README.md, made from records alone.

python scripts/make_tables.py            write them
python scripts/make_tables.py --check    exit 1 if a file differs from what the records give
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments._plots import pareto  # noqa: E402
from experiments._results import Group, difference_to, group_rows, spread_text  # noqa: E402

RESULTS = ROOT / "docs" / "results"
RECORDS = RESULTS / "records"
START, END = "<!-- results: made by scripts/make_tables.py -->", "<!-- end of results -->"
README_RECORD = "smollm2_135m_compare"

HEAD = (
    "| method | budget | seeds | perplexity | element_bits | bits_per_element | minus kl, nats/token "
    "| minus kl_per_bit | search, s |\n|---|---|---|---|---|---|---|---|---|"
)


def difference(group: Group, groups: list[Group], against: str) -> str:
    found = difference_to(group, groups, against)
    if found.mean is None or found.stderr is None:
        return "–"
    return f"{found.mean:+.4f} ± {found.stderr:.4f}"


def number(group: Group, metric: str, digits: int) -> str:
    mean = group.statistic(metric).mean
    return "–" if mean is None else f"{mean:.{digits}f}"


def table(record: dict[str, Any]) -> str:
    groups = group_rows(record["results"])
    lines = [HEAD]
    for group in groups:
        budget = f"≤ {group.budget[0]:g}" if group.budget else ""
        seeds = len(group.rows) if group.search not in (None, "uniform") else ""
        cells = [
            group.name, budget, seeds, spread_text(group.statistic("perplexity")),
            number(group, "element_bits", 3), number(group, "bits_per_element", 3),
            difference(group, groups, "kl"), difference(group, groups, "kl_per_bit"),
            number(group, "search_seconds", 1),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


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


def outputs() -> dict[Path, str | bytes]:
    """Path -> content of everything that the records give."""
    made: dict[Path, str | bytes] = {}
    for path in sorted(RECORDS.glob("*.json")):
        record = json.loads(path.read_text())
        if record.get("schema") != "dmx.record/1" or record["command"] not in (
            "compare",
            "evaluate",
            "search",
        ):
            continue
        name = path.stem
        text = f"# {name.replace('_', ' ')}\n\n{conditions(record)}\n\n{table(record)}\n"
        figure = pareto(group_rows(record["results"]), zoom=record["command"] == "compare")
        if figure is not None:
            figure.savefig(RESULTS / f"{name}.png", dpi=110, bbox_inches="tight")
            text += f"\n![perplexity over bits]({name}.png)\n"
        made[RESULTS / f"{name}.md"] = text
        if name == README_RECORD:
            readme = ROOT / "README.md"
            before, _, rest = readme.read_text().partition(START)
            _, _, after = rest.partition(END)
            made[readme] = (
                f"{before}{START}\n\n{table(record)}\n\n{conditions(record)}\n\n{END}{after}"
            )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    wrong = []
    for path, content in outputs().items():
        current = path.read_text() if path.exists() else None
        if current == content:
            continue
        wrong.append(path.relative_to(ROOT))
        if not check:
            path.write_text(str(content))
    for path in wrong:
        print(f"{'differs from the records' if check else 'written'}: {path}")
    return 1 if check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
