"""Quality of searches by calibration tokens and by seconds: `dmx compare` once for each number of tokens and scale rule.

    python -m scripts.benchmarks.tokens --out outputs/tokens                          # 512 to 524,288 tokens, a card
    python -m scripts.benchmarks.tokens --out outputs/tokens --tokens 4096 262144 512 32768 --rules floor \\
        --searches kl_per_bit fisher differentiable adaptive --most-batches 32 \\
        -- evaluation.max_windows=128                                                 # a card, about ten minutes
    python -m scripts.benchmarks.tokens --out outputs/tokens --tokens 512 2048 \\
        -- run.device=cpu model.dtype=float32 evaluation.max_windows=8                # what a CPU can

A cell that is there is shown and not run again, one that was stopped goes on; one of other settings is refused. Cells are
run in the order given. The same command in several processes shares them: a cell that another process runs is left to it.
Records are published in --records, by default docs/results/records, as tokens_<rule>_<tokens>.json;
`python scripts/make_tables.py` makes the page. What stands after `--` is given to `dmx compare` as it is.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from dmx.errors import DmxError, RunError
from dmx.files import check_writable

from ..claiming import claimed
from ..publish_record import publish, published, read_run

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENS = (512, 2048, 8192, 32768, 131072, 524288)
RULES = ("floor", "even")
SEARCHES = ("fisher", "kl_per_bit", "aumann_shapley", "differentiable", "adaptive")
WINDOW = 512
SCANNED = 32768
"""Tokens that scores are measured on, at most: a scan of half a million would take hours and gain nothing."""


def rows_of(tokens: int, most_batches: int) -> int:
    """Of a batch."""
    return max(1, tokens // (WINDOW * most_batches))


def holds(tokens: int, rows: int) -> bool:
    """Whether so many tokens are whole batches, each no more than scores are measured on."""
    return tokens > 0 and tokens % (WINDOW * rows) == 0 and WINDOW * rows <= SCANNED


def cell(tokens: int, rule: str, folder: Path, asked: argparse.Namespace) -> list[str]:
    """Arguments of `dmx compare` for one number of tokens and one scale rule."""
    rows = rows_of(tokens, asked.most_batches)
    batches = tokens // (WINDOW * rows)
    scored = min(batches, SCANNED // (WINDOW * rows))
    rules = (
        [] if rule == "floor" else [f"search.scale_rules.{o}={rule}" for o in ("weight", "input")]
    )
    return [
        "model=smollm2_135m_instruct_gguf", "search=adaptive", "search.family=mxfp8_mxfp4", "budgets=[5.0]",
        f"searches=[{','.join(asked.searches)}]", f"seeds={asked.seeds}", "baselines=[bf16]",
        f"calibration.window={WINDOW}", f"calibration.batch_size={rows}", f"calibration.batches={batches}",
        f"search.score_batches={scored}", "evaluation.window=1024", *rules, f"run.folder={folder}", *asked.more,
    ]  # fmt: skip


def parse() -> argparse.Namespace:
    """What cannot be measured or written is refused before anything runs."""
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, more = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folders of the runs")
    parser.add_argument("--records", type=Path, default=ROOT / "docs" / "results" / "records")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--searches", nargs="+", default=SEARCHES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--most-batches",
        type=int,
        default=128,
        help="more tokens than these hold make batches of more rows",
    )
    asked = parser.parse_args(own)
    if asked.most_batches < 1:
        parser.error(f"--most-batches {asked.most_batches}: at least 1")
    if wrong := [n for n in asked.tokens if not holds(n, rows_of(n, asked.most_batches))]:
        parser.error(
            f"--tokens {wrong[0]}: whole batches of {rows_of(wrong[0], asked.most_batches)} windows of {WINDOW} tokens, "
            f"each of at most {SCANNED} tokens"
        )
    for name in ("out", "records"):
        try:
            check_writable(folder := getattr(asked, name), f"--{name}")
        except RunError as error:
            parser.error(f"--{name} {folder}: {error}")
    asked.more = more
    return asked


def main() -> int:
    asked = parse()
    unpublished = 0
    for tokens in asked.tokens:
        for rule in asked.rules:
            name = f"tokens_{rule}_{tokens}"
            folder = asked.out.absolute() / name
            with claimed(asked.out / f"{name}.lock") as is_ours:
                if not is_ours:
                    print(f"{name}: another process runs it", flush=True)
                    continue
                command = [sys.executable, "-m", "experiments.compare"]
                command += cell(tokens, rule, folder, asked)
                if code := subprocess.run(command, cwd=ROOT).returncode:
                    return code
            try:
                publish(published(read_run(folder)), name, asked.records, force=True)
            except DmxError as error:  # the run itself is there, and the other cells need not wait
                unpublished += 1
                by_hand = (
                    f"python -m scripts.publish_record {folder} {name} --records {asked.records}"
                )
                print(f"{name}: {error} By hand: {by_hand}", file=sys.stderr)
    return 2 if unpublished else 0


if __name__ == "__main__":
    sys.exit(main())
