"""The commands: what they leave in a folder, how they refuse, and that they go on after a stop."""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dmx
from dmx.data import DataConfig, encode, load_text
from dmx.errors import DmxError, RunError
from dmx.formats import MX_FORMATS
from dmx.models import byte_tokenizer
from experiments import compare, evaluate, search
from experiments.reporting.record import SCHEMA
from experiments.running import bench as _bench
from experiments.running.collect import check_comparable
from experiments.running.composing import build_root, check_overrides
from experiments.running.folder import FolderTaken, claim
from experiments.running.guard import no_lost_interrupts, stopping_at_an_interrupt
from tests.forked import Forked
from tests.settings import TINY

ROOT = Path(__file__).resolve().parents[2]
METRICS = (
    "element_bits",
    "bits_per_element",
    "whole_model_bits_per_element",
    "perplexity",
    "nll",
    "search_seconds",
    "eval_seconds",
    "zero_shot",
)
DESCENT = [*TINY, "search=differentiable"]
SEARCH = [*DESCENT, "search.steps=6", "search.descent.evaluate_every=3", "baselines=[bf16,kl]"]


def read_json(path):
    return json.loads(Path(path).read_text())


def numbers(folder):
    """What two equal runs have in common: everything but times."""

    def timeless(value):
        if isinstance(value, dict):
            return {k: timeless(v) for k, v in value.items() if not k.endswith("seconds")}
        return [timeless(v) for v in value] if isinstance(value, list) else value

    history = (folder / "history.jsonl").read_text().splitlines()
    return (
        timeless(read_json(folder / "assignment.json")),
        timeless([json.loads(row) for row in history]),
        timeless(read_json(folder / "record.json")["results"]),
    )


# ---------------------------------------------------------------- what a run leaves


def test_a_search_leaves_everything_and_shows_it_again(run, record_of, tmp_path):
    folder = tmp_path / "run"
    arguments = [*SEARCH, "budget=bits_4p5", "evaluation.quantized=[W+A,W]", f"run.folder={folder}"]
    code, out, err = run(search, *arguments)
    assert code == 0 and "Traceback" not in err
    for name in ("config.yaml", "record.json", "assignment.json", "history.jsonl", "report.html"):
        assert (folder / name).stat().st_size > 0, name
    assert str(folder / "report.html") in out and "dMX" in out
    assert "<html" in (folder / "report.html").read_text()

    record = read_json(folder / "record.json")
    assert record["schema"] == SCHEMA and record["command"] == "search"
    assert set(record) >= {
        "started",
        "finished",
        "wall_seconds",
        "versions",
        "device",
        "peak_memory_bytes",
        "seed",
        "model",
        "data",
        "requested",
        "actual",
        "results",
        "verdict",
        "warnings",
    }
    assert record["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert record["versions"]["dmx"] == dmx.__version__
    assert record["requested"]["budget"] == {"limit": 4.5, "unit": "element_bits"}
    assert record["requested"]["search"]["steps"] == record["actual"]["search"]["steps"] == 6
    assert record["actual"]["search"]["descent"]["cuda_graph"] == "off"
    assert record["actual"]["run"] == {"device": "cpu", "memory": "all"}
    assert record["actual"]["model"] == {"dtype": "float32"}
    page = (folder / "report.html").read_text()
    assert "All 6 checked settings ran as asked." in page and 'class="differs"' not in page
    assert record["actual"]["backend"] in ("cpp", "reference")
    assert record["model"]["note"] == "random weights"
    calibration = record["data"]["calibration"]
    assert calibration["batch_shape"] == [2, 32] and calibration["tokens"] == 3 * 64
    assert record["data"]["evaluation"]["windows"] == 6
    assert calibration["sha256"] != record["data"]["evaluation"]["sha256"]

    rows = {(row.label, row.method.quantized): row for row in record_of(folder).rows}
    assert set(rows) == {("bf16", None), *((n, o) for n in ("kl", "dMX") for o in ("W+A", "W"))}
    for row in rows.values():
        assert row.perplexity == pytest.approx(2.718281828459045**row.nll, rel=1e-9)
        assert len(row.window_nll) == row.windows == 6 and row.tokens == 6 * 63
        assert all(getattr(row, k) is not None or row.reasons[k] for k in METRICS)
    assert rows["dMX", "W+A"].element_bits <= 4.5
    assert rows["dMX", "W"].method.units == "fused"
    assert len((folder / "history.jsonl").read_text().splitlines()) == 6

    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    code, again, err = run(search, *arguments)
    assert code == 0 and "finished; showing it again" in err and again == out
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before

    (folder / "report.html").unlink()  # as if it was stopped between record and report
    assert run(search, *arguments)[0] == 0 and (folder / "report.html").stat().st_size > 0

    # the record's number is the model's under the file's formats
    found = dmx.Assignment.load(folder / "assignment.json")
    config = build_root(search.SearchRun, _composed("search", arguments))
    model = _bench.load_model(config.model).model
    text = load_text(DataConfig(name="synthetic", split="evaluation"))
    tokens = encode(byte_tokenizer(), text)[: 6 * 64]
    dmx.apply(model, found)
    expected = dmx.perplexity(model, tokens, window=64, batch_size=4)
    assert rows["dMX", "W+A"].perplexity == pytest.approx(expected, rel=1e-9)

    # and the second command starts from that file alone
    other = tmp_path / "evaluated"
    names = f"[bf16,mxfp4,{folder / 'assignment.json'}]"
    code, out, err = run(evaluate, *TINY, f"assignments={names}", f"run.folder={other}")
    assert code == 0, err
    by_label = {row.label: row.perplexity for row in record_of(other).rows}
    assert by_label["dMX"] == rows["dMX", "W+A"].perplexity
    assert by_label["bf16"] == rows["bf16", None].perplexity
    assert (other / "report.html").exists() and (other / "config.yaml").exists()


@pytest.mark.parametrize("name", ["uniform", "random", "kl"])
def test_every_search_without_steps_runs_from_the_command_line(name, run, record_of, tmp_path):
    folder = tmp_path / "run"
    code, _, err = run(search, *TINY, f"search={name}", "baselines=[]", f"run.folder={folder}")
    assert code == 0, err
    (row,) = record_of(folder).rows
    assert row.method.search == name and row.element_bits <= 5.0
    assert row.label == ("uniform mxfp4" if name == "uniform" else name)
    assert (folder / "report.html").exists()


def test_uniform_rows_hold_every_format(run, record_of, tmp_path):
    arguments = [*DESCENT, "search.steps=1", "baselines=[uniform]", f"run.folder={tmp_path / 'r'}"]
    assert run(search, *arguments)[0] == 0
    labels = [row.label for row in record_of(tmp_path / "r").rows]
    assert labels == [*(f"uniform {f}" for f in MX_FORMATS), "dMX"]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["budget.limit=3.9"], r"BudgetError: budget\.limit=3\.9 .*Reachable with .*: 4 to 6"),
        (
            ["budget.limit=many"],
            r"ConfigError: budget\.limit='many' has the wrong type: expected a number",
        ),
        (["budget.limit=null"], r"ConfigError: budget\.limit=null has the wrong type"),
        (["budget.limit=nan"], r"BudgetError: budget\.limit=nan is not a number of bits"),
        (["budget.unit=bits"], r"budget\.unit='bits'.*element_bits, bits_per_element"),
        (["search.name=klx"], r"FormatError: search\.name='klx'.*Did you mean 'kl'"),
        (["search.family=mxfp6"], r"FormatError: search\.family='mxfp6'.*Allowed: mxfp8_mxfp4"),
        (
            ["search.steps=1.5"],
            r"ConfigError: search\.steps=1\.5 has the wrong type: expected a whole number",
        ),
        (["search.steps=true"], r"ConfigError: search\.steps=true has the wrong type"),
        (
            ["learn.steps=1.5"],
            r"learn\.steps=1\.5 has the wrong type: expected a whole number or null",
        ),
        (
            ["search.exclude=[nothing]"],
            r"search\.exclude: pattern 'nothing' matches none",
        ),
        (["search.exclude=['*']"], r"ModelError: nothing to search"),
        (["+search.fixed={*.nope: mxfp4}"], r"search\.fixed: pattern '\*\.nope' matches none"),
        (["+search.fixed={*.o_proj: mxfp5}"], r"search\.fixed='mxfp5'.*Did you mean"),
        (["calibration.window=1"], r"ConfigError: calibration\.window=1 must be at least 2"),
        (
            ["calibration.window=4096"],
            r"DataError: calibration\.window=4096 is longer than .* 2048 positions",
        ),
        (
            ["evaluation.window=4096"],
            r"DataError: evaluation\.window=4096 is longer than .* 2048 positions",
        ),
        (["baselines=[best]"], r"FormatError: baselines='best'.*Allowed: bf16, uniform, mxfp4"),
        (["evaluation.quantized=[A]"], r"evaluation\.quantized='A'.*W\+A, W"),
        (
            ["evaluation.quantized=[]"],
            r"evaluation\.quantized is empty: evaluation\.quantized=\[W\+A\]",
        ),
        (["model.dtype=float8"], r"model\.dtype='float8' is unknown.*bfloat16"),
        (
            ["model.tiny.layers=two"],
            r"model\.tiny\.layers='two' has the wrong type: expected a whole number",
        ),
        (["+model.tiny.depth=2"], r"model\.tiny key='depth' is not allowed.*Allowed: .*layers"),
        (["data=files"], r"DataError: data\.files=\[\] with data\.name='files'"),
        (["budget=5.0"], r"budget=5\.0 is no file of configs/budget.*budget\.limit=<bits>"),
        (["search=polish"], r"FormatError: search='polish'.*Did you mean 'polished'"),
        (["model=a/b"], r"ConfigError: model=a/b is no file .*model\.id=<hub name or folder>"),
        (["search.family=mxfp4_mxfp6"], r"Did you mean 'mxfp6_mxfp4'"),
        (["baselines=bf16"], r"expected a list, of which each is a text: baselines=\[bf16\]"),
        (["run.device=gpu"], r"ConfigError: run\.device='gpu'.*Use auto, cpu or cuda"),
        (["run.device=meta"], r"ConfigError: run\.device='meta' is not supported"),
        (["run.threads=0"], r"ConfigError: run\.threads=0 must be at least 1"),
    ],
)
def test_a_wrong_setting_is_refused_before_weights_load(
    arguments, words, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(_bench, "load_model", lambda *_: pytest.fail("weights were loaded"))
    folder = tmp_path / "run"
    code, _, err = run(search, *TINY, *arguments, f"run.folder={folder}")
    assert code == 2 and "Traceback" not in err
    assert re.search(words, err), err
    assert not folder.exists()  # nothing is left in the way of the next try


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["budget.limit=5"], r"ConfigError: budget\.limit=5: .*budgets=\[4\.5,5\]"),
        (
            ["searches=[kl,exact]"],
            r"searches='exact' names settings.*search=exact searches=\[differentiable\]",
        ),
    ],
)
def test_a_comparison_refuses_what_is_of_a_search(arguments, words, run, tmp_path):
    code, _, err = run(compare, *TINY, *arguments, f"run.folder={tmp_path / 'run'}")
    assert code == 2 and "Traceback" not in err and re.search(words, err), err


def test_files_of_ones_own_configs_are_hydras_to_find(tmp_path):
    (tmp_path / "budget").mkdir()
    (tmp_path / "budget" / "mine.yaml").write_text("limit: 5.0\n")
    check_overrides([f"--config-dir={tmp_path}", "budget=mine"], "search")
    check_overrides(
        ["-m", "search=kl,fisher", "mor=[bf16,'tensor']", "sweep=null", "x=y"], "search"
    )
    with pytest.raises(DmxError, match="search='kk'"):
        check_overrides(["-m", "search=kl,kk"], "search")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_a_device_is_refused(run, tmp_path):
    code, _, err = run(search, *TINY, "run.device=cuda", f"run.folder={tmp_path / 'r'}")
    assert code == 2 and "run.device=cuda: no CUDA device here. Use run.device=cpu" in err


def test_text_shorter_than_a_window_is_refused_before_the_search(run, tmp_path, monkeypatch):
    monkeypatch.setattr(_bench, "search", lambda *_: pytest.fail("the search had begun"))
    for part, words in (
        (
            "calibration",
            "data.calibration with calibration.window=64 calibration.batch_size=2 calibration.batches=3: "
            "the text has 40 tokens, less than one window of 64",
        ),
        ("evaluation", "the evaluation text has 40 tokens, fewer than one window of 64"),
    ):
        code, _, err = run(
            search,
            *TINY,
            "calibration.window=64",
            f"data.{part}.max_characters=40",
            "baselines=[]",
            f"run.folder={tmp_path / part}",
        )
        assert code == 2 and f"DataError: {words}" in err


def test_more_batches_than_calibration_gives_are_refused_before_anything_is_measured(run, tmp_path):
    folder = tmp_path / "run"
    few = "calibration.batches=2"
    for command, asked, name in (
        (search, ["search.polish.rounds=1", "search.polish.batches=9"], "polish.batches=9"),
        (search, ["search=fisher", "search.score_batches=3"], "score_batches=3"),
        (compare, ["searches=[kl]", "search.score_batches=3"], "score_batches=3"),
    ):
        code, _, err = run(command, *TINY, few, *asked, f"run.folder={folder}")
        assert code == 2 and f"search.{name}, but there are 2 batches" in err
        assert not folder.exists()


def test_a_corrected_command_may_use_the_folder_of_a_failed_start(run, tmp_path):
    """The text is read after the folder is taken; a wrong one leaves the settings and its error."""
    folder = tmp_path / "run"
    asked = [*SEARCH, f"run.folder={folder}"]
    assert run(search, *asked, "data.calibration.max_characters=40")[0] == 2
    assert {p.name for p in folder.iterdir()} == {"config.yaml", "error.json"}
    code, _, err = run(search, *asked)
    assert code == 0, err
    assert (folder / "record.json").exists() and not (folder / "error.json").exists()
    code, _, err = run(search, *asked, "data.calibration.max_characters=40")
    assert code == 2 and "holds another run" in err


def test_a_folder_that_holds_something_else_is_refused_and_left_alone(run, tmp_path):
    folder = tmp_path / "run"
    (folder / "mine").mkdir(parents=True)
    code, _, err = run(search, *SEARCH, f"run.folder={folder}")
    assert code == 2 and "is not empty and holds no run of this project" in err
    assert [p.name for p in folder.iterdir()] == ["mine"]
    (folder / "config.yaml").write_text("search: {steps: 7}\n")
    code, _, err = run(search, *SEARCH, f"run.folder={folder}")
    assert (
        code == 2 and "holds another run (its config.yaml differs: search.steps is 7 there, " in err
    )
    assert "Give the settings there to go on with it, choose" in err
    (folder / "config.yaml").write_bytes(b"\xff\xfe")
    assert "cannot be read" in run(search, *SEARCH, f"run.folder={folder}")[2]


@pytest.mark.parametrize(
    "held",
    [(), ("error.json",), ("config.yaml", "error.json", "pace.json"), (".config.yaml.x.tmp",)],
)
def test_of_commands_that_start_at_once_one_takes_the_folder(held, tmp_path):
    def claimed(folder, settings):
        try:
            claim(folder, settings)
        except FolderTaken as error:
            return str(error)
        return None

    for attempt in range(20):
        folder = tmp_path / str(attempt)
        for name in held:
            folder.mkdir(exist_ok=True)
            (folder / name).write_text("{}")
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i, f=folder: claimed(f, f"steps: {i}\n"), range(8)))
        (winner,) = [i for i, error in enumerate(found) if error is None]
        assert (folder / "config.yaml").read_text() == f"steps: {winner}\n"
        assert all("holds another run" in error for error in found if error)
        assert not (folder / "error.json").exists() and not (folder / "pace.json").exists()


def test_a_sweep_refused_before_it_takes_a_folder_leaves_another_run_alone(run, tmp_path):
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / "config.yaml").write_text("search: {steps: 7}\n")
    code, _, err = run(search, "-m", *SEARCH, "budget.limit=3.9", f"hydra.sweep.dir={tmp_path}")
    assert code and "budget.limit=3.9" in err
    assert [p.name for p in folder.iterdir()] == ["config.yaml"]


def test_a_refused_start_of_a_sweep_writes_nothing_into_the_folder_of_another_run(run, tmp_path):
    folder = tmp_path / "0"
    folder.mkdir()
    (folder / "config.yaml").write_text("search: {steps: 7}\n")
    for _ in range(2):
        code, _, err = run(search, "-m", *SEARCH, f"hydra.sweep.dir={tmp_path}")
        assert code and "holds another run" in err
        assert [p.name for p in folder.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("place", ["file", "file/run", "/proc/nowhere"])
def test_a_folder_without_the_right_to_write_is_refused(place, run, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = run(search, *SEARCH, f"run.folder={tmp_path / place}")
    assert code == 2 and re.search(r"RunError: .*(cannot write|cannot be read).*folder", err), err
    assert "Traceback" not in err


def test_a_damaged_row_names_its_file(run, tmp_path):
    folder = tmp_path / "run"
    arguments = [*SEARCH, f"run.folder={folder}"]
    assert run(search, *arguments)[0] == 0
    (folder / "record.json").unlink()
    (row,) = (folder / "rows").glob("bf16*.json")
    whole = row.read_text()
    row.write_text(whole[: len(whole) // 2])
    code, _, err = run(search, *arguments)
    assert code == 2 and f"{row.name} is damaged" in err and "Delete it to measure again" in err
    row.unlink()
    assert run(search, *arguments)[0] == 0 and read_json(row)["method"]["search"] is None
    (folder / "record.json").write_text("{")
    code, _, err = run(search, *arguments)
    assert code == 2 and "record.json" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("[]", r"ConfigError: assignments is empty: give paths .*mxfp4"),
        ("[no/where]", r"AssignmentError: assignment=no/where: cannot be read"),
        ("[nowhere.json]", r"AssignmentError: assignment=nowhere\.json: cannot be read"),
        ("[mxfp5]", r"FormatError: assignments='mxfp5' is no block format\. Did you mean 'mxfp"),
        ("[{damaged}]", r"AssignmentError: .*is no JSON file .*search again"),
    ],
)
def test_evaluate_refuses_what_it_cannot_read_before_weights_load(
    names, words, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(_bench, "load_model", lambda *_: pytest.fail("weights were loaded"))
    damaged = tmp_path / "damaged.json"
    damaged.write_text('{"schema": "dmx.assign')
    names = names.format(damaged=damaged)
    code, _, err = run(evaluate, *TINY, f"assignments={names}", f"run.folder={tmp_path / 'r'}")
    assert code == 2 and re.search(words, err), err


def test_evaluate_refuses_what_does_not_fit_the_model_before_weights_load(
    run, tmp_path, monkeypatch
):
    folder = tmp_path / "run"
    assert run(search, *TINY, "search=random", "baselines=[]", f"run.folder={folder}")[0] == 0
    path = folder / "assignment.json"
    monkeypatch.setattr(_bench, "load_model", lambda *_: pytest.fail("weights were loaded"))
    for setting, words in (
        ("model.tiny.layers=1", "AssignmentError: the assignment is for another model"),
        (
            "evaluation.window=4096",
            "DataError: evaluation.window=4096 is longer than the model's 2048",
        ),
    ):
        given = (*TINY, setting, f"assignments=[{path}]", f"run.folder={tmp_path / 'e'}")
        code, _, err = run(evaluate, *given)
        assert code == 2 and words in err


def test_every_run_of_one_process_notes_its_own_warnings_once(run, tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / name
        settings = ("search=random", "baselines=[]", "budget.limit=7", f"run.folder={folder}")
        code, _, err = run(search, *TINY, *settings)
        assert code == 0 and err.count("is not below the dearest assignment") == 1
        (warning,) = read_json(folder / "record.json")["warnings"]
        assert warning.startswith("budget.limit=7 element_bits is not below")


def test_runs_that_measured_no_perplexity_are_joined_with_those_that_did(tmp_path):
    model = SimpleNamespace(id="m", architecture_sha256="0")
    texts = [{}, *({"evaluation": SimpleNamespace(sha256=x, window=64)} for x in "aab")]
    records = {
        tmp_path / str(i): SimpleNamespace(model=model, data=data) for i, data in enumerate(texts)
    }
    bare, one, same, other = records.items()
    check_comparable(dict([bare, one, same]))
    with pytest.raises(RunError, match=r"3 used another evaluation text than the first run"):
        check_comparable(dict([bare, one, other]))


# ---------------------------------------------------------------- as a process of its own


def start(module, *arguments, cwd):
    return Forked("-m", f"experiments.{module}", *arguments, cwd=cwd)


@pytest.mark.parametrize(
    ("module", "arguments", "code", "words"),
    [
        ("search", ["budget.limit=3"], 2, "BudgetError: budget.limit=3 element_bits is below"),
        (
            "search",
            ["search.stepz=3"],
            2,
            "search key='stepz' is not allowed. Did you mean 'steps'",
        ),
        (
            "evaluate",
            ["assignments=[mxfp5]"],
            2,
            "FormatError: assignments='mxfp5' is no block format. Did you mean",
        ),
    ],
)
def test_an_error_is_one_clear_message_and_an_exit_code(module, arguments, code, words, tmp_path):
    process = start(module, *TINY, *arguments, "run.folder=r", cwd=tmp_path)
    out, err = process.communicate()
    assert process.poll() == code, err
    assert words in " ".join(err.split()) and "Traceback" not in err and out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_run_that_was_stopped_twice_goes_on_to_the_same_result(run, tmp_path):
    steps = 30  # enough to be still at it when the signal comes, also on a busy machine
    arguments = [
        *DESCENT,
        f"search.steps={steps}",
        "search.descent.raw_start=1.0",
        "search.descent.evaluate_every=7",
        "search.descent.checkpoint_every=3",
        "calibration.batch_size=16",
        "calibration.window=64",
        "baselines=[bf16]",
        "budget=bits_4p5",
    ]
    whole, died = tmp_path / "whole", tmp_path / "died"
    assert run(search, *arguments, f"run.folder={whole}")[0] == 0

    done = 0
    for stop, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)):
        process = start("search", *arguments, f"run.folder={died}", cwd=tmp_path)
        deadline = time.monotonic() + 120
        while _steps_logged(died) <= done:  # written after a checkpoint
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.002)
        process.send_signal(stop)
        _, err = process.communicate(timeout=60)
        assert process.poll() == code, err
        assert stop == signal.SIGKILL or "goes on from here" in " ".join(err.split())
        assert not (died / "assignment.json").exists() and not (died / "record.json").exists()
        before, done = done, _steps_logged(died)
        assert before < done < steps

    assert run(search, *arguments, f"run.folder={died}")[0] == 0
    assert numbers(died) == numbers(whole)


def _steps_logged(folder):
    """Lines of a run's history, 0 before it has one."""
    history = folder / "history.jsonl"
    return len(history.read_text().splitlines()) if history.exists() else 0


def test_a_ctrl_c_that_python_drops_is_raised_again():
    class Deleted:
        def __del__(self):
            raise KeyboardInterrupt

    with no_lost_interrupts(), pytest.raises(KeyboardInterrupt):
        Deleted()
        for _ in range(1000):  # not one long sleep: it is raised once a call returns
            time.sleep(0.01)


def test_a_ctrl_c_that_a_librarys_cleaning_up_hides_is_one():
    def task(cfg):
        try:
            raise KeyboardInterrupt
        finally:
            raise ValueError("cannot close an open file")  # as zipfile does under np.savez

    with pytest.raises(ValueError, match="cannot close"):
        task(None)
    with pytest.raises(KeyboardInterrupt):
        stopping_at_an_interrupt(task, None)
    with pytest.raises(ZeroDivisionError):
        stopping_at_an_interrupt(lambda cfg: 1 / 0, None)


def _composed(name, overrides):
    from hydra import compose, initialize_config_dir

    from experiments.running.settings import CONFIGS

    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(name, overrides)
