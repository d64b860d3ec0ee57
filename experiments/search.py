"""Search a format per layer under a budget; writes assignment.json, history.jsonl, record.json, report.html.

    python -m experiments.search model=smollm2_135m data=wikitext2 budget.limit=5.0
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from dmx.assignment import Assignment
from dmx.data import encode, load_text, token_batches
from dmx.formats import MX_FORMATS
from dmx.models import LoadedModel, load_model, meta_model
from dmx.searching import SearchConfig, search, search_space, uniform_assignment
from experiments._config import SearchRun, build_root
from experiments._results import verdicts
from experiments._run import Run, console, entry_point, tokens_sha256


@entry_point("search")
def main(cfg: DictConfig) -> None:
    config = build_root(SearchRun, cfg)
    # The budget's range follows from shapes alone: a wrong budget is refused before weights load.
    search_space(meta_model(config.model), config.search).check_budget(config.budget)
    run = Run(cfg, config.run, "search")
    if run.is_finished:
        console.print(f"{run.folder} holds this run, finished; showing it again")
        run.show_finished()
        return
    calibration, evaluation = load_text(config.data.calibration), load_text(config.data.evaluation)
    loaded = load_model(config.model, run.device)
    settings = config.calibration
    batches = token_batches(
        encode(loaded.tokenizer, calibration), settings.window, settings.batch_size,
        seed=settings.seed, n_batches=settings.batches,
    )  # fmt: skip
    tokens = encode(loaded.tokenizer, evaluation)
    run.facts = {
        "model": loaded.provenance,
        "data": {
            "calibration": {
                "name": calibration.name, "source": calibration.source,
                "sha256": calibration.sha256, "tokens": sum(b.numel() for b in batches),
                "batches": len(batches), "batch_shape": list(batches[0].shape),
            },
            "evaluation": {
                "name": evaluation.name, "source": evaluation.source,
                "sha256": tokens_sha256(tokens), "tokens": len(tokens),
                "windows": min(
                    len(tokens) // config.evaluation.window,
                    config.evaluation.max_windows or len(tokens),
                ),
                "window": config.evaluation.window,
            },
        },
    }  # fmt: skip
    _fill_rows(run, config, loaded, batches, tokens)
    run.actual |= {
        "device": str(run.device),
        "dtype": loaded.provenance["dtype"],
        "steps": config.search.steps if config.search.name == "differentiable" else 0,
    }
    found = verdicts(run.rows)
    run.finish(seed=config.search.seed, verdict=found[0] if len(found) == 1 else None)


def _fill_rows(
    run: Run, config: SearchRun, loaded: LoadedModel, batches: list[Tensor], tokens: Tensor
) -> None:
    """The search and its baselines, each measured with the same windows."""
    model = loaded.model

    def add(label: str, name: str, make: Callable[[], tuple[Assignment, float]] | None) -> None:
        """Rows of one assignment, for each set of operands."""
        path = f"{name}.json"
        for operands in config.evaluation.operands if make is not None else ["W+A"]:
            def measured(operands: str = operands) -> dict[str, Any]:
                found = _saved(run, path, make) if make is not None else None
                return run.measure(
                    model, tokens, config.evaluation, label=label, operands=operands,
                    assignment=found[0] if found else None, path=path if found else None,
                    search=found[0].search["name"] if found else None,
                    search_seconds=found[1] if found and found[0].search["name"] != "uniform" else None,
                    seed=config.search.seed if found else None,
                )  # fmt: skip

            run.row(f"{name}-{operands}", measured)

    def searched(settings: SearchConfig) -> Callable[[], tuple[Assignment, float]]:
        def make() -> tuple[Assignment, float]:
            folder = run.folder if settings.name == "differentiable" else None
            result = search(model, batches, config.budget, settings, folder=folder)
            return result.assignment, result.seconds

        return make

    label = "dmx" if config.search.name == "differentiable" else config.search.name
    if "bf16" in config.baselines:
        add("bf16", "bf16", None)
    if "uniform" in config.baselines:
        for block_format in MX_FORMATS:
            add(
                f"uniform {block_format}", f"uniform-{block_format}",
                lambda f=block_format: (uniform_assignment(model, f, config.search), 0.0),
            )  # fmt: skip
    if "kl" in config.baselines and config.search.name != "kl":
        # `kl` takes no steps, so the continuous quantizer's limits do not bind it.
        add("kl", "kl", searched(dataclasses.replace(config.search, name="kl")))
    add(label, "assignment", searched(config.search))


def _saved(
    run: Run, path: str, make: Callable[[], tuple[Assignment, float]]
) -> tuple[Assignment, float]:
    """The assignment of a file of this run, searched for if it is not there yet."""
    target = run.path(path)
    if target.exists():
        assignment = Assignment.load(target)
        return assignment, float(assignment.search.get("seconds", 0.0))
    assignment, seconds = make()
    assignment = dataclasses.replace(assignment, search={**assignment.search, "seconds": seconds})
    assignment.save(target)
    return assignment, seconds


if __name__ == "__main__":
    main()
