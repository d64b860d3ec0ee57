"""Zero-shot tasks: equal to lm-eval's own scoring, cached, refused when they cannot be had."""

import importlib.util
import json

import numpy as np
import pytest
import torch

import dmx
from dmx.errors import DataError, DmxError, ModelError, RunError
from dmx.evaluate.zero_shot import NonFiniteError, ZeroShot, scoring
from dmx.evaluate.zero_shot import requests as zero_shot_requests
from dmx.evaluate.zero_shot import tasks as zero_shot_tasks
from dmx.evaluate.zero_shot.cache import DECIDING_MODULES, result_cache
from dmx.formats import get_block_format
from dmx.searching import SearchConfig, uniform_assignment
from dmx.state import code_version

NAMES = ["arc_easy", "arc_challenge", "hellaswag_1k", "winogrande"]
needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="needs lm-eval: pip install -e '.[eval]'",
)


@pytest.fixture(scope="session")
def _kept():
    return {}


@pytest.fixture
def asked(dmx_data, tiny_random, _kept):
    """Eight items of each of the four tasks, without a cache; read once a session."""
    if "asked" not in _kept:
        _kept["asked"] = ZeroShot(tiny_random.tokenizer, limit=8, quiet=True)
    kept = _kept["asked"]
    kept.cache = result_cache(None)
    kept.scorer.batch_size, kept.scorer.fitting_tokens = None, None
    return kept


def mxfp4(model):
    return uniform_assignment(model, get_block_format("mxfp4"), SearchConfig(name="uniform"))


# ---------------------------------------------------------------- against lm-eval


@needs_lm_eval
@pytest.mark.parametrize("applied", [False, True])
def test_equals_lm_eval(asked, dmx_data, tiny_trained, applied):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = tiny_trained.model
    if applied:
        dmx.apply(model, mxfp4(model), cache_weights=True)
    ours = asked.evaluate(model)
    lm = HFLM(
        pretrained=model, tokenizer=tiny_trained.tokenizer, batch_size=4, softmax_dtype="float32"
    )
    manager = TaskManager(
        include_path=str(dmx_data.parent / "lm_eval_tasks"), include_defaults=False
    )
    theirs = simple_evaluate(lm, tasks=NAMES, limit=8, task_manager=manager, bootstrap_iters=0)
    assert list(ours) == NAMES
    for task in NAMES:
        metric = ours[task]["metric"]
        samples = sorted(theirs["samples"][task], key=lambda s: s["doc_id"])
        assert ours[task]["items"] == [s[metric] for s in samples]
        assert ours[task]["value"] == pytest.approx(theirs["results"][task][f"{metric},none"])


@needs_lm_eval
def test_log_likelihoods_equal_those_of_lm_eval(asked, tiny_trained):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    requests = asked.tasks[3].requests + asked.tasks[2].requests
    ours = asked.scorer.answers(tiny_trained.model, requests, "")
    lm = HFLM(
        pretrained=tiny_trained.model,
        tokenizer=tiny_trained.tokenizer,
        batch_size=4,
        softmax_dtype="float32",
    )
    instances = [i for k in (3, 2) for i in asked.tasks[k].task.instances]
    assert all(isinstance(i, Instance) for i in instances)
    theirs = lm.loglikelihood(instances, disable_tqdm=True)
    np.testing.assert_allclose([a for a, _ in ours], [a for a, _ in theirs], rtol=1e-5)
    assert [b for _, b in ours] == [b for _, b in theirs]


@needs_lm_eval
@pytest.mark.parametrize(
    "pair",
    [
        ("Question: why?\nAnswer:", " because"),
        ("ends in spaces  ", "word"),
        ("", "no context"),
        ("", "<|endoftext|>starts with its prefix"),
        ("<|endoftext|>begun", " already"),
    ],
)
def test_tokens_are_split_as_lm_eval_does(tiny_random, pair):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=tiny_random.model, tokenizer=tiny_random.tokenizer)
    seen = []
    lm._loglikelihood_tokens = lambda requests, **_: seen.extend(requests) or []
    lm.loglikelihood([Instance("loglikelihood", {}, pair, 0)], disable_tqdm=True)
    (request,) = zero_shot_requests.encode_pairs(tiny_random.tokenizer, [pair])
    assert (request.context, request.continuation) == (seen[0][1], seen[0][2])


# ---------------------------------------------------------------- what comes back


@needs_lm_eval
def test_asked_tasks_come_back_in_order_with_their_source(dmx_data, tiny_random):
    found = dmx.zero_shot(
        tiny_random.model,
        tiny_random.tokenizer,
        ("winogrande", "hellaswag"),
        limit=4,
        quiet=True,
    )
    assert list(found) == ["winogrande", "hellaswag_1k"]
    for task, result in found.items():
        items = result["items"]
        assert result["count"] == len(items) == 4 and set(items) <= {0, 1}
        assert result["value"] == np.mean(items)
        assert result["stderr"] == pytest.approx(np.std(items, ddof=1) / 2)
        assert result["source"].startswith(f"DMX_DATA: lm_eval_tasks/{task}.yaml")
    assert [found[t]["metric"] for t in found] == ["acc", "acc_norm"]


@needs_lm_eval
def test_a_model_is_left_as_it_was(asked, tiny_random):
    model = tiny_random.model
    plain = asked.evaluate(model)
    dmx.apply(model, mxfp4(model))
    model.train()
    asked.evaluate(model)
    layers = dmx.applying.linear.quantized_layers(model).values()
    assert model.training and not any(x.cache_weights or x._cached is not None for x in layers)
    dmx.restore(model)
    assert asked.evaluate(model) == plain


@needs_lm_eval
def test_batches_do_not_change_answers(asked, tiny_random):
    requests = asked.tasks[0].requests
    reference = asked.scorer.answers(tiny_random.model, requests, "")
    for setting in (1, 3, 1000):
        asked.scorer.batch_size = setting
        found = asked.scorer.answers(tiny_random.model, requests, "")
        np.testing.assert_allclose([a for a, _ in found], [a for a, _ in reference], rtol=1e-5)


@needs_lm_eval
def test_a_batch_that_does_not_fit_is_halved_and_remembered(asked, tiny_random, monkeypatch):
    requests = asked.tasks[3].requests
    reference = asked.scorer.answers(tiny_random.model, requests, "")
    plain, tried = scoring._score, []

    def small(model, batch, longest):
        tokens = len(batch) * max(len(r.context) + len(r.continuation) for r in batch)
        tried.append((tokens, tokens <= 300))
        if tokens > 300:
            raise torch.OutOfMemoryError("no room")
        return plain(model, batch, longest)

    monkeypatch.setattr(scoring, "_score", small)
    found = asked.scorer.answers(tiny_random.model, requests, "")
    np.testing.assert_allclose([a for a, _ in found], [a for a, _ in reference], rtol=1e-5)
    assert asked.scorer.fitting_tokens & (asked.scorer.fitting_tokens - 1) == 0
    tried.clear()
    asked.scorer.answers(tiny_random.model, requests, "")
    assert all(fitted for _, fitted in tried)

    def none(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(scoring, "_score", none)
    with pytest.raises(ModelError, match="not even one request"):
        asked.scorer.answers(tiny_random.model, requests, "")


@needs_lm_eval
def test_long_requests_are_cut_from_the_left_and_say_so(dmx_data, make_tiny):
    small = make_tiny("llama", max_positions=256)
    with pytest.warns(UserWarning, match="longer than the model's 256 positions"):
        dmx.zero_shot(small.model, small.tokenizer, ["hellaswag"], limit=4, quiet=True)


@needs_lm_eval
def test_answers_that_are_not_numbers_are_refused(asked, tiny_random):
    with torch.no_grad():
        next(tiny_random.model.parameters()).fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="not finite"):
        asked.evaluate(tiny_random.model)


@pytest.mark.gpu
@needs_lm_eval
def test_gpu_answers_are_near_those_of_the_cpu(asked, tiny_trained):
    requests = asked.tasks[0].requests
    cpu = asked.scorer.answers(tiny_trained.model, requests, "")
    gpu = asked.scorer.answers(tiny_trained.model.to("cuda"), requests, "")
    np.testing.assert_allclose([a for a, _ in gpu], [a for a, _ in cpu], rtol=1e-3)


# ---------------------------------------------------------------- cache


@needs_lm_eval
def test_a_kept_result_is_used_and_another_model_is_not_it(
    asked, tiny_random, tmp_path, monkeypatch
):
    asked.cache = result_cache(tmp_path)
    model = tiny_random.model
    first = asked.evaluate(model)
    assert len(list(tmp_path.iterdir())) == len(NAMES)
    with monkeypatch.context() as patch:
        patch.setattr(scoring, "_score", None)  # nothing may be measured
        assert asked.evaluate(model) == first
    dmx.apply(model, mxfp4(model), inputs=False)
    asked.evaluate(model)
    assert len(list(tmp_path.iterdir())) == 2 * len(NAMES)
    dmx.restore(model)
    dmx.apply(model, mxfp4(model))
    asked.evaluate(model)
    assert len(list(tmp_path.iterdir())) == 3 * len(NAMES)
    dmx.restore(model)
    with torch.no_grad():
        next(model.parameters()).add_(0.01)
    asked.evaluate(model)
    assert len(list(tmp_path.iterdir())) == 4 * len(NAMES)


@needs_lm_eval
@pytest.mark.parametrize("damage", ["cut", "value", "foreign"])
def test_a_damaged_cache_file_is_an_error_that_names_it(asked, tiny_random, tmp_path, damage):
    asked.cache = result_cache(tmp_path)
    asked.evaluate(tiny_random.model)
    path = next(tmp_path.glob("winogrande-*.json"))
    body = json.loads(path.read_text())
    if damage == "cut":
        path.write_text(path.read_text()[:-20])
    elif damage == "value":
        body["result"]["value"] = 1.0
        path.write_text(json.dumps(body))
    else:
        other = next(tmp_path.glob("arc_easy-*.json"))
        path.write_text(other.read_text())
    with pytest.raises(RunError, match=f"{path.name}.*damaged.*Delete it"):
        asked.evaluate(tiny_random.model)


@pytest.mark.parametrize("part", ["kernels/ops.py", "zero_shot/scoring.py", "transforms/block.py"])
def test_a_kept_result_depends_on_all_code_that_decides_it(part):
    def changed(path):
        return path.read_bytes() + (b"\nchanged = 1\n" if path.match(f"*/{part}") else b"")

    assert any(code_version(m) != code_version(m, changed) for m in DECIDING_MODULES)


@needs_lm_eval
def test_foreign_quantizers_are_not_cached(asked, tiny_random, tmp_path):
    class Guard:
        def guard(self, quantizer, layer_name, operand):
            return lambda x: quantizer(x)

    asked.cache = result_cache(tmp_path)
    dmx.apply(tiny_random.model, mxfp4(tiny_random.model), safety=Guard())
    asked.evaluate(tiny_random.model)
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- refusals


def test_without_lm_eval_the_error_says_how_to_get_it(tiny_random, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else found(name, *a)
    )
    with pytest.raises(DmxError, match=r"pip install 'lm-eval>=0.4.13'"):
        dmx.zero_shot(tiny_random.model, tiny_random.tokenizer)


@needs_lm_eval
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ["piqa"]}, "'piqa' is not in .*DMX_DATA is set.*There: arc_challenge"),
        ({"tasks": ["wikitext"]}, "loglikelihood_rolling; only multiple choice"),
        ({"tasks": []}, "at least one"),
        ({"tasks": ["winogrande", "winogrande"]}, "different names"),
        ({"tasks": "winogrande"}, "must be a list"),
        ({"limit": 0}, "limit=0"),
        ({"batch_size": "big"}, "batch_size='big'"),
    ],
)
def test_settings_that_cannot_be_are_refused(dmx_data, tiny_random, settings, message):
    with pytest.raises(DataError, match=message):
        dmx.zero_shot(tiny_random.model, tiny_random.tokenizer, **settings)


@needs_lm_eval
def test_other_tasks_than_asked_are_refused(dmx_data, monkeypatch):
    plain = zero_shot_tasks._load_data
    monkeypatch.setattr(
        zero_shot_tasks, "_load_data", lambda m, names, data: plain(m, ["arc_easy"], data)
    )
    refused = pytest.raises(DataError, match="asked for and lm-eval returned")
    with zero_shot_tasks.quiet_lm_eval(), refused:
        zero_shot_tasks.load_tasks(["arc_easy", "winogrande"])


@needs_lm_eval
def test_offline_without_local_tasks_says_both_ways_out(
    no_dmx_data, offline, tiny_random, tmp_path, monkeypatch
):
    from datasets import config
    from lm_eval.tasks._index import TaskIndex

    every = TaskIndex._iter_yaml_files  # 13,000 files, which take 15 s
    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", lambda root: every(root / "winogrande"))
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(DataError, match="Connect to the network, or point DMX_DATA"):
        dmx.zero_shot(tiny_random.model, tiny_random.tokenizer, ["winogrande"], limit=2)


@needs_lm_eval
def test_data_without_task_files_beside_it_is_refused(tmp_path, tiny_random, monkeypatch):
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("DMX_DATA", str(tmp_path / "data"))
    with pytest.raises(DataError, match=r"lm_eval_tasks .*does not exist"):
        dmx.zero_shot(tiny_random.model, tiny_random.tokenizer)
    (tmp_path / "lm_eval_tasks").mkdir()
    (tmp_path / "copy").mkdir()
    monkeypatch.setenv("DMX_DATA", str(tmp_path / "copy"))
    with pytest.raises(DataError, match="folder called data"):
        dmx.zero_shot(tiny_random.model, tiny_random.tokenizer)


# ---------------------------------------------------------------- the command


@needs_lm_eval
def test_the_command_fills_the_rows_and_the_report(dmx_data, tmp_path, monkeypatch, capfd):
    from experiments import evaluate
    from experiments.reporting.record import Record

    folder = tmp_path / "run"
    arguments = [
        "evaluate",
        "model=tiny_random",
        "run.device=cpu",
        "eval=zero_shot",
        "eval.perplexity=false",
        "eval.limit=4",
        "eval.tasks=[arc_easy,hellaswag]",
        "assignments=[bf16,mxfp4]",
        "evaluation.quantized=[W+A,W]",
        f"run.folder={folder}",
    ]
    monkeypatch.setattr("sys.argv", arguments)
    evaluate.main()
    rows = Record.load(folder / "record.json").rows
    assert [row.method.quantized for row in rows] == [None, "W+A", "W"]
    for row in rows:
        assert list(row.zero_shot) == ["arc_easy", "hellaswag_1k"]
        assert not row.reason("zero_shot") and row.perplexity is None
        assert row.reason("perplexity") == "not asked for"
    page = (folder / "report.html").read_text()
    assert "Item by item" in page and "minus the best other" in page
    assert "hellaswag_1k" in capfd.readouterr().out


def test_a_command_that_measures_nothing_is_refused():
    from experiments.running.settings import ConfigError, EvalConfig

    with pytest.raises(ConfigError, match="measure nothing"):
        EvalConfig(perplexity=False)
