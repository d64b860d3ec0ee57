"""Measure assignments on a text; writes record.json and report.html.

python -m experiments.evaluate assignments=[bf16,mxfp4,outputs/run/assignment.json] data=wikitext2
python -m experiments.evaluate assignments=[bf16,mxfp4] eval=zero_shot
"""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from dmx.assignment import Assignment
from dmx.data import encode, load_text
from dmx.formats import ALIASES, BLOCK_FORMATS, get_mx_format
from dmx.models import LoadedModel, load_model
from dmx.searching import SearchConfig, uniform_assignment
from experiments._config import EvaluateRun, build_root
from experiments._run import Run, entry_point, tokens_sha256
from experiments._zero_shot import measure_zero_shot


@entry_point("evaluate")
def main(cfg: DictConfig) -> None:
    config = build_root(EvaluateRun, cfg)
    # Read every file before anything is loaded: a damaged one must show at once.
    files = {
        name: Assignment.load(name)
        for name in config.assignments
        if name not in BLOCK_FORMATS and name not in ALIASES
    }
    with Run(cfg, config.run, "evaluate") as run:
        if run.show_if_finished():
            return
        text = load_text(config.data.evaluation) if config.eval.perplexity else None
        loaded = load_model(config.model, run.device)
        for given in files.values():
            given.check(loaded.model)
        run.facts = {"model": loaded.provenance, "data": {}}
        tokens = None
        if text is not None:
            tokens = encode(loaded.tokenizer, text)
            run.facts["data"]["evaluation"] = {
                "name": text.name, "source": text.source, "sha256": tokens_sha256(tokens),
                "tokens": len(tokens), "windows": len(tokens) // config.evaluation.window,
                "window": config.evaluation.window,
            }  # fmt: skip
        for index, name in enumerate(config.assignments):
            assignment: Assignment | None = None
            kind: str | None = None
            path: str | None = None
            if name in files:
                assignment, label = (
                    files[name],
                    str(files[name].search.get("name") or Path(name).stem),
                )
                label = "dmx" if label == "differentiable" else label
                kind = files[name].search.get("name")
                path = f"assignment-{index}.json"
                shutil.copyfile(name, run.path(path))
            elif name == "bf16":
                label = "bf16"
            else:
                block_format = get_mx_format(name, setting="assignments")
                assignment = uniform_assignment(
                    loaded.model, block_format, SearchConfig(name="uniform")
                )
                label, kind = f"uniform {block_format}", "uniform"
                path = f"uniform-{block_format}.json"
                assignment.save(run.path(path))
            for operands in config.evaluation.operands if assignment is not None else ["W+A"]:
                measured = partial(
                    _measure, run, loaded, tokens, config,
                    label=label, operands=operands, assignment=assignment, path=path, search=kind,
                )  # fmt: skip
                run.row(f"{index}-{operands}", measured)
        run.actual |= {"device": str(run.device), "dtype": loaded.provenance["dtype"]}
        run.finish(seed=None, verdict=None)


def _measure(
    run: Run, loaded: LoadedModel, tokens: Tensor | None, config: EvaluateRun, *,
    label: str, operands: str, assignment: Assignment | None, path: str | None, search: str | None,
) -> dict[str, Any]:  # fmt: skip
    row = run.measure(
        loaded.model, tokens, config.evaluation,
        label=label, operands=operands, assignment=assignment, path=path, search=search,
    )  # fmt: skip
    return row | measure_zero_shot(
        run, loaded.model, loaded.tokenizer, config.eval, assignment, operands, label=label
    )


if __name__ == "__main__":
    main()
