"""Quality of searches by calibration tokens and by seconds: `dmx compare` once for each number of tokens and scale rule.

    python -m scripts.benchmarks.tokens --out outputs/tokens                          # 512 to 524,288 tokens, a card
    python -m scripts.benchmarks.tokens --out outputs/tokens --tokens 512 2048 \\
        -- run.device=cpu model.dtype=float32 evaluation.max_windows=8                # what a CPU can

A cell that is there is shown and not run again, one that was stopped goes on; one of other settings is refused. Records are copied to --records, by default into
docs/results/records, as tokens_<rule>_<tokens>.json; `python scripts/make_tables.py` makes the page. What stands after
`--` is given to `dmx compare` as it is.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from dmx.files import write_text

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENS = (512, 2048, 8192, 32768, 131072, 524288)
RULES = ("floor", "even")
SEARCHES = ("fisher", "kl_per_bit", "aumann_shapley", "differentiable", "adaptive")
WINDOW = 512
MOST_BATCHES = 128
"""More tokens than these hold make batches of more rows."""
SCANNED = 32768
"""Tokens that scores are measured on, at most: a scan of half a million would take hours and gain nothing."""


def cell(tokens: int, rule: str, folder: Path, seeds: int, more: list[str]) -> list[str]:
    """Arguments of `dmx compare` for one number of tokens and one scale rule."""
    rows = max(1, tokens // (WINDOW * MOST_BATCHES))
    batches = tokens // (WINDOW * rows)
    scored = min(batches, SCANNED // (WINDOW * rows))
    rules = (
        [] if rule == "floor" else [f"search.scale_rules.{o}={rule}" for o in ("weight", "input")]
    )
    return [
        "model=smollm2_135m_instruct_gguf", "search=adaptive", "search.family=mxfp8_mxfp4", "budgets=[5.0]",
        f"searches=[{','.join(SEARCHES)}]", f"seeds={seeds}", "baselines=[bf16]",
        f"calibration.window={WINDOW}", f"calibration.batch_size={rows}", f"calibration.batches={batches}",
        f"search.score_batches={scored}", "evaluation.window=1024", *rules, f"run.folder={folder}", *more,
    ]  # fmt: skip


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, more = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folders of the runs")
    parser.add_argument("--records", type=Path, default=ROOT / "docs" / "results" / "records")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rules", nargs="+", default=RULES)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args(own)
    if wrong := [n for n in asked.tokens if n < WINDOW or n % WINDOW]:
        parser.error(f"--tokens {wrong[0]}: a multiple of {WINDOW}, the window of the calibration")
    for tokens in asked.tokens:
        for rule in asked.rules:
            name = f"tokens_{rule}_{tokens}"
            folder = asked.out.absolute() / name
            arguments = cell(tokens, rule, folder, asked.seeds, more)
            command = [sys.executable, "-m", "experiments.compare", *arguments]
            if code := subprocess.run(command, cwd=ROOT).returncode:
                return code
            write_text(asked.records / f"{name}.json", (folder / "record.json").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
