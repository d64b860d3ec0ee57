"""What a run says of how long it will take, and of the work that it was."""

import copy
import dataclasses
import json

import pytest
import torch

from dmx.errors import ModelError, RunError
from dmx.models.plain import plain_step
from dmx.processes import Processes
from experiments import search
from experiments.reporting.texts import work_text
from experiments.running import bench, pace
from experiments.running.bench import EVALUATION
from experiments.running.pace import OVERHEAD, Sizes, expected_stages
from experiments.running.timed_work import APART, TimedWork, plain_step_times
from tests.experiments.test_configs import built

SIZES = Sizes(blocks=3_000, output=1_000, units=10, batches=4, evaluation=64)
LEARNING_STEPS = 30
TINY = (
    "model=tiny_random",
    "data=synthetic",
    "calibration.window=64",
    "calibration.batch_size=1",
    "calibration.batches=2",
    "evaluation.window=64",
    "evaluation.max_windows=2",
    "search.steps=2",
)


def stages(*overrides, sizes=SIZES):
    return {
        s.name: s.steps
        for s in expected_stages(built("data=synthetic", *overrides).plan, sizes, LEARNING_STEPS)
    }


def test_an_evaluation_is_half_a_plain_step_for_as_many_tokens():
    work = stages("baselines=[bf16,mxfp4,mxfp6_e2m3]", "search=random")
    assert list(work) == [f"evaluation of {n}" for n in ("bf16", "mxfp4", "mxfp6_e2m3", "random")]
    assert set(work.values()) == {OVERHEAD["evaluation"] * 32}


def test_a_scan_runs_what_follows_each_unit_and_reads_what_an_earlier_one_scored():
    # 4 batches x 10 units, each half of the blocks and the output layer, of 2 x 4,000
    once = OVERHEAD["scan"] * 4 * 10 * (1_500 + 1_000) / 8_000
    both = stages("baselines=[kl,kl_per_bit]", "search=random")
    assert both["kl"] == both["kl_per_bit"] == pytest.approx(once)
    assert stages("baselines=[]", "search=kl_per_bit")["kl_per_bit"] == pytest.approx(2 * once)
    assert stages("baselines=[]", "search=kl", "search.score_batches=1")["kl"] == once / 4


def test_a_step_of_the_search_has_the_gradients_of_the_weights_too():
    work = stages("baselines=[]", "search=differentiable", "search.steps=50")
    assert work["differentiable"] == pytest.approx(OVERHEAD["search"] * 50 * 11_000 / 8_000)
    assert work["evaluation of differentiable"] == OVERHEAD["evaluation"] * 32


def test_an_adaptive_search_scores_twice_descends_and_judges_where_batches_are_enough():
    few = stages("baselines=[]", "search.steps=50")  # the default takes no step on so few batches
    assert few["adaptive"] == stages("baselines=[]", "search=kl_per_bit")["kl_per_bit"]
    sizes = dataclasses.replace(SIZES, batches=8)
    others = {"kl_per_bit": (), "fisher": (), "differentiable": ("search.steps=24",)}
    parts = [
        stages("baselines=[]", f"search={n}", *more, sizes=sizes)[n] for n, more in others.items()
    ]
    many = stages("baselines=[]", sizes=sizes)["adaptive"]
    assert many == pytest.approx(sum(parts) + OVERHEAD["evaluation"] * 2 * 5 / 2)
    read = stages("baselines=[fisher]", sizes=sizes)["adaptive"]
    assert read == pytest.approx(many - parts[1])


def test_learned_weights_are_two_models_and_a_row_of_the_search_alone_where_asked():
    sizes = dataclasses.replace(SIZES, training=2.0, learned_batches=20, held_batches=3)
    asked = ("baselines=[kl]", "search=differentiable", "search.steps=50", "weights=learned")
    alone = stages(*asked, "baseline_weights=nearest", sizes=sizes)
    # per step 3 x 3,000 + 3 x 1,000 of 8,000, a new batch 3,000 for 20 of 30 steps, 3 twice before and after
    work = OVERHEAD["learning"] * 2.0 * (30 * 12_000 / 8_000 + 20 * 3_000 / 8_000 + 2 * 3)
    assert alone["weights of differentiable"] == pytest.approx(work)
    assert alone["evaluation of differentiable, learned"] == OVERHEAD["evaluation"] * 32
    assert "weights of kl" not in alone and "evaluation of kl, learned" not in alone
    both = stages(*asked, sizes=sizes)
    assert both["weights of kl"] == both["weights of differentiable"]
    assert both["evaluation of kl, learned"] == OVERHEAD["evaluation"] * 32


def test_a_plain_step_leaves_the_model_as_it_was(tiny_random):
    model = tiny_random.model.train()
    tokens = torch.randint(0, 256, (1, 16))
    times = plain_step_times(model, tokens, 2, warm=True)
    assert len(times) == 2 and all(t > 0 for t in times)
    assert model.training and all(p.grad is None for p in model.parameters())
    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        plain_step(model, tokens)  # a pass without a backward one would be no plain step


class Machine:
    """Whose plain step takes `step` seconds, and whose clock goes on with what it does."""

    def __init__(self, step=1.0):
        self.now, self.step, self.timed = 0.0, step, 0

    def clock(self):
        return self.now

    def do(self, steps):
        self.now += steps * self.step

    def time_steps(self):
        self.timed += 2
        self.do(2)
        return [self.step, self.step]

    def work(self, folder, has_rows=False):
        return TimedWork(
            folder / "pace.json", Processes.alone(), self.time_steps, self.clock,
            before=self.time_steps(), has_rows=has_rows,
        )  # fmt: skip


def test_a_stage_is_counted_in_the_plain_steps_on_both_sides_of_it(tmp_path):
    machine = Machine(step=1.5)
    work = machine.work(tmp_path)
    with work.stage("evaluation of bf16"):
        machine.do(40)
    with work.stage("kl"):
        machine.do(50)
        machine.step = 3.0  # something else runs there now
        machine.do(50)
    with work.stage("evaluation of kl"):
        machine.do(40)
    work.end()
    assert [part.stages for part in work.parts] == [
        ("evaluation of bf16",), ("kl",), ("evaluation of kl",),
    ]  # fmt: skip
    assert [part.step_seconds for part in work.parts] == [1.5, 2.25, 3.0]
    assert [part.steps for part in work.parts] == [40, 100, 40]
    assert work.seconds == 90 * 1.5 + 90 * 3  # those of the timed steps are none of the work's
    assert machine.timed == 2 * 4


def test_short_stages_are_counted_together_and_the_last_one_always(tmp_path):
    machine = Machine()
    work = machine.work(tmp_path)
    for name in ("a", "b", "c"):
        with work.stage(name):
            machine.do(APART / 2)
    work.end()
    work.end()  # nothing is left
    assert [part.stages for part in work.parts] == [("a", "b"), ("c",)]
    assert work.steps == work.seconds == 1.5 * APART and machine.timed == 2 * 3


@pytest.mark.parametrize("stopped", ["kl", "evaluation of kl"])
def test_what_was_timed_before_a_stop_stays(tmp_path, stopped):
    before = Machine()
    work = before.work(tmp_path)
    for name, steps in (("a", 50), ("short", 3)):
        with work.stage(name):
            before.do(steps)
    with pytest.raises(KeyboardInterrupt), work.stage(stopped):
        before.do(70)
        raise KeyboardInterrupt
    machine = Machine(step=4.0)  # another one, or a busier one
    work = machine.work(tmp_path, has_rows=True)
    assert work.steps == 53
    with work.stage(stopped):
        machine.do(30)
    work.end()
    assert work.steps == 83 and work.seconds == 53 + 4 * 30
    # an evaluation begins anew; of the search a part was done that nobody timed
    assert work.untimed == ([] if stopped.startswith(EVALUATION) else [stopped])
    again = Machine().work(tmp_path, has_rows=True)
    assert again.parts == work.parts and again.untimed == work.untimed


def test_rows_without_times_are_work_that_is_not_counted_and_damaged_ones_are_refused(tmp_path):
    assert Machine().work(tmp_path, has_rows=True).untimed == ["its rows"]
    part = {"stages": ["kl"], "seconds": 1.0, "before": [], "after": []}
    kept = {"parts": [part], "running": None, "untimed": []}
    for text in (json.dumps(kept), "{"):
        (tmp_path / "pace.json").write_text(text)
        with pytest.raises(RunError, match=r"pace\.json is damaged .* Delete it"):
            Machine().work(tmp_path)


def test_a_run_says_at_once_how_long_it_takes_and_at_its_end_what_it_was(
    run, tmp_path, monkeypatch
):
    arguments = (*TINY, "baselines=[bf16,mxfp4]", "pace=true", f"run.folder={tmp_path}/out")

    def stopped(*_, **__):
        raise ModelError("the search stops here")

    search_of = bench.search
    monkeypatch.setattr(bench, "search", stopped)
    code, _, err = run(search, *arguments)
    assert code != 0 and err.index("a plain step of 1 x 64 tokens takes") < err.index("bf16")
    before = json.loads((tmp_path / "out" / "pace.json").read_text())
    assert before["running"] == "adaptive"

    monkeypatch.setattr(bench, "search", search_of)
    code, _, err = run(search, *arguments)
    assert code == 0, err
    assert "What it did of adaptive was not timed." in err
    assert "search.polish.rounds=auto is 0: 2 calibration batches are too few" in err
    ran = json.loads((tmp_path / "out" / "record.json").read_text())["actual"]["search"]
    assert ran["polish"]["rounds"] == 0 and ran["kept"] == "scores"
    pace = json.loads((tmp_path / "out" / "record.json").read_text())["pace"]
    assert pace["plain_step_shape"] == [1, 64] and pace["not_expected"] == []
    assert pace["expected_plain_steps"] == pytest.approx(sum(pace["expected_stages"].values()))
    names = [name for part in pace["parts"] for name in part["stages"]]
    assert names == list(pace["expected_stages"])
    kept = [{key: part[key] for key in before["parts"][0]} for part in pace["parts"]]
    assert before["parts"] and kept[: len(before["parts"])] == before["parts"]
    assert pace["plain_steps"] is None
    steps = sum(part["plain_steps"] for part in pace["parts"])
    assert f"{steps:.0f} plain steps without what an earlier start did of adaptive" in err
    said = work_text(pace)
    assert said in err and said in (tmp_path / "out" / "report.html").read_text()


def test_stages_of_unknown_work_are_named(run, tmp_path):
    code, _, err = run(
        search,
        *TINY,
        "baselines=[]",
        "pace=true",
        "search=polished",
        "search.polish.rounds=1",
        f"run.folder={tmp_path}/out",
    )
    assert code == 0, err
    assert "and the polish, which is not counted" in err
    pace = json.loads((tmp_path / "out" / "record.json").read_text())["pace"]
    counted = sum(part["plain_steps"] for part in pace["parts"])
    assert pace["plain_steps"] == pytest.approx(counted) and counted > 0
    assert pace["plain_steps"] == pytest.approx(pace["seconds"] / pace["plain_step_seconds"])
    assert f"{counted:.0f} plain steps of" in work_text(pace) and work_text(pace) in err


def test_without_being_asked_a_run_is_not_timed(run, tmp_path):
    code, _, err = run(
        search, *TINY[:-1], "baselines=[]", "search=random", f"run.folder={tmp_path}/out"
    )
    assert code == 0 and "plain step" not in err
    assert json.loads((tmp_path / "out" / "record.json").read_text())["pace"] is None
    assert not built("data=synthetic").pace


@pytest.mark.parametrize(("seconds", "says"), [(3.0, True), (1.2, False)])
def test_slow_products_in_bfloat16_are_said(monkeypatch, tiny_random, seconds, says):
    monkeypatch.setattr(pace, "bf16_slowness", lambda: seconds)
    model = copy.deepcopy(tiny_random.model).bfloat16()
    advice = pace.dtype_advice(model)
    assert ("3.0 times those in float32" in advice and "model.dtype=auto" in advice) is says
    assert pace.dtype_advice(model.float()) == ""
