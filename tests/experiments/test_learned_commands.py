"""weights=learned in search and compare: rows, files, texts, and what is refused."""

import pytest

from dmx.assignment.assignment import Assignment
from dmx.weights.learn_config import LearnConfig
from experiments import compare, evaluate, search
from tests.forked import Forked
from tests.settings import TINY, TINY_LAYERS

LEARNING = [
    *TINY_LAYERS,
    "learn.steps=4",
    "learn.warmup=1",
    "learn.lr=1e-3",
    "training.batches=6",
]
DEFAULT_RATE = f"learn.lr={LearnConfig.lr}"


def test_compare_measures_learned_weights_of_every_search(run, record_of, tmp_path):
    arguments = [
        *LEARNING,
        "searches=[fisher,differentiable]",
        "search.steps=3",
        "budgets=[4.7]",
        "baselines=[]",
        "weights=[nearest,mse,local_hessian,learned]",
        "local_hessian.batches=2",
        "learn.held_batches=1",
        "seeds=2",
    ]
    code, _out, err = run(compare, *arguments, f"run.folder={tmp_path}/run")
    assert code == 0, err
    record = record_of(tmp_path / "run")
    rows = record.rows
    ends = ["", " + mse", " + local Hessian, 2 batches"]
    ends.append(" + learned weights, 4 steps, lr 0.001, warm-up 1, 1 batch kept to measure on")
    assert [r.label for r in rows[:8]] == [f"{n}{e}" for n in ("fisher", "dMX") for e in ends]
    assert len(rows) == 16
    assert all(len({r.nll for r in rows[i : i + 4]}) == 4 for i in (0, 4, 8, 12))
    assert len({r.method.kind for r in rows}) == 4, "compared with equal weights alone"
    mse = Assignment.load(tmp_path / "run" / rows[1].assignment)
    assert set(mse.scale_rules["weight"].values()) == {"mse"} and mse.weights == {"name": "mse"}
    assert set(mse.scale_rules["input"].values()) == {"floor"}
    learned = [r for r in rows if r.method.weights == "learned"]
    assert not any("is not used" in warning for warning in record.warnings)
    for row in learned:
        facts = row.weights
        assert (facts["steps"], facts["lr"], facts["seed"]) == (4, 1e-3, row.seed)
        assert facts["tokens"] == 4 * 2 * 32 and (facts["batches"], facts["held_batches"]) == (5, 1)
        assert facts["kl_before"] > 0 and facts["kl_after"] > 0 and facts["seconds"] > 0
        assert row.element_bits <= 4.7
    hashes = {r.seed: r.weights["batches_sha256"] for r in learned}
    assert len(set(hashes.values())) == 2, "another seed draws another sample"
    assert all(r.weights["batches_sha256"] == hashes[r.seed] for r in learned), "all the same one"
    text = record.data["training"]
    assert (text.name, text.batches, text.batch_shape) == ("synthetic/calibration", 6, (2, 32))
    assert text.sha256 == record.data["calibration"].sha256
    folder = tmp_path / "run" / "fisher-4.7-seed0"
    names = {path.name for path in folder.iterdir()}
    assert {"assignment.learned.json", "assignment.learned.weights.safetensors"} <= names
    assert not list((tmp_path / "run").rglob("learning_state*"))
    code, _out, err = run(
        evaluate,
        *TINY,
        f"assignments=[{folder}/assignment.learned.json]",
        "safety=calibrated",
        f"run.folder={tmp_path}/again",
    )
    assert code == 0, err
    again = record_of(tmp_path / "again").rows
    assert [r.label for r in again] == [
        f"fisher{ends[-1]}",
        f"fisher{ends[-1]} + net",
    ]
    assert again[0].nll == learned[0].nll


def test_search_with_its_own_text_resumes_after_a_kill_to_the_same_file(run, record_of, tmp_path):
    file = tmp_path / "more.txt"
    file.write_text(
        "The bridge reads a letter. Every garden holds the quiet engine near it. " * 300
    )
    command = [
        *LEARNING,
        "budget.limit=4.7",
        "search=fisher",
        "baselines=[kl]",
        "weights=learned",
        "data.training.name=files",
        f"data.training.files=[{file}]",
        "training.window=16",
        "training.batch_size=3",
        "learn.checkpoint_every=1",
        "learn.steps=40",
    ]
    code, out, err = run(search, *command, f"run.folder={tmp_path}/whole")
    assert code == 0, err
    assert "assignment.learned.json" in out
    record = record_of(tmp_path / "whole")
    ends = ["", " + learned weights, 40 steps, lr 0.001, warm-up 1"]
    assert [r.label for r in record.rows] == [f"{n}{e}" for n in ("kl", "fisher") for e in ends]
    text = record.data["training"]
    assert (text.name, text.source, text.batch_shape) == ("files", "files: more.txt", (3, 16))
    assert text.shared == {"words": 13, "sequences": 0, "total": text.shared["total"]}
    assert not [w for w in record.warnings if "sequences" in w]
    folder = tmp_path / "stopped"
    process = Forked("-m", "experiments.search", *command, f"run.folder={folder}")
    process.kill_once(lambda: list(folder.glob("*/learning_state.safetensors")))
    assert not (folder / "record.json").exists()
    code, _out, err = run(search, *command, f"run.folder={folder}")
    assert code == 0, err
    assert [r.nll for r in record_of(folder).rows] == [r.nll for r in record.rows]
    name = "assignment.learned.weights.safetensors"
    assert (tmp_path / "whole" / name).read_bytes() == (folder / name).read_bytes()


def test_what_no_number_of_steps_becomes_is_said_and_kept(run, record_of, tmp_path):
    command = [*TINY_LAYERS, "search=fisher", "baselines=[]", "weights=learned", "budget.limit=4.7"]
    command += ["training.batches=3", "learn.held_batches=1", f"run.folder={tmp_path}/run"]
    code, _out, err = run(search, *command)
    assert code == 0, err
    assert "learn.steps=null is 20: 10 passes over 2 batches" in " ".join(err.split())
    record = record_of(tmp_path / "run")
    assert record.requested["learn"]["steps"] is None
    assert record.actual["learn"] == {"steps": 20}
    (facts,) = (row.weights for row in record.rows if row.method.weights == "learned")
    assert facts["steps"] == 20
    said = f"KL {facts['kl_before']:.4f} before, {facts['kl_after']:.4f} after"
    assert said in " ".join(err.split())


def test_weights_of_searches_that_chose_alike_are_made_once(run, record_of, tmp_path):
    command = [*LEARNING, "searches=[kl_per_bit,adaptive,fisher]", "budgets=[4.7]", "baselines=[]"]
    command += ["weights=[gptq,learned]", "gptq.batches=2", f"run.folder={tmp_path}/run"]
    code, _out, err = run(compare, *command)
    assert code == 0, err
    rows = record_of(tmp_path / "run").rows
    kl, adaptive, _fisher = ({r.method.weights: r for r in rows[i : i + 2]} for i in (0, 2, 4))
    for stage in ("gptq", "learned"):
        assert adaptive[stage].weights == kl[stage].weights, "their seconds, too"
        assert adaptive[stage].nll == kl[stage].nll
        (said,) = (line for line in err.splitlines() if f"adaptive-4.7-seed0/assignment, {stage}:" in line and "taken" in line)  # fmt: skip
        assert f"kl_per_bit-4.7-seed0/assignment.{stage}.json" in said
        path = tmp_path / "run" / adaptive[stage].assignment
        assert Assignment.load(path).search.name == "adaptive" and Assignment.load(path).content("weights")  # fmt: skip
    # Of a row that is there already, too: as a run that goes on has it.
    (tmp_path / "run" / "record.json").unlink()
    for path in [*(tmp_path / "run").glob("rows/adaptive*"), *(tmp_path / "run").glob("adaptive*/assignment.learned*")]:  # fmt: skip
        path.unlink()
    code, _out, err = run(compare, *command)
    assert code == 0 and "chose as kl_per_bit" in " ".join(err.split())
    again = record_of(tmp_path / "run").rows
    assert [(r.nll, r.weights) for r in again] == [(r.nll, r.weights) for r in rows]


def test_rows_of_an_earlier_start_are_warned_of_too(run, record_of, tmp_path):
    command = [*TINY_LAYERS, "search=fisher", "baselines=[]", "weights=learned", "budget.limit=4.7"]
    command += ["training.batches=3", "learn.held_batches=1", "learn.steps=2", "learn.lr=1.0"]
    warned = []
    for _ in range(2):
        code, _out, err = run(search, *command, f"run.folder={tmp_path}/run")
        assert code == 0, err
        warned.append(record_of(tmp_path / "run").warnings)
        (tmp_path / "run" / "record.json").unlink()  # stopped before it was written
    assert warned[0] == warned[1]
    assert sum("no better than what it started from" in text for text in warned[0]) == 1


def test_evaluation_text_in_the_text_for_learning_is_warned_of(run, record_of, tmp_path):
    file = tmp_path / "same.txt"
    file.write_text(
        "one two three four five six seven eight nine ten eleven twelve thirteen. " * 200
    )
    own = [
        "data=files",
        *(f"data.{use}.files=[{file}]" for use in ("calibration", "evaluation")),
    ]
    arguments = [a for a in LEARNING if not a.startswith("data")]
    code, _out, err = run(
        search,
        *arguments,
        *own,
        "budget.limit=4.7",
        "search=fisher",
        "baselines=[]",
        "weights=learned",
        f"run.folder={tmp_path}/run",
    )
    assert code == 0, err
    assert "shares 2,588 of its 2,588 sequences of 13 words" in err
    record = record_of(tmp_path / "run")
    few = "6 batches to learn from: too few to hold one back"
    assert err.count(few) == 1 and err.index(few) < err.index("fisher"), "before the search"
    assert sum(few in warning for warning in record.warnings) == 1
    assert any("sequences of 13 words" in w for w in record.warnings)
    assert record.data["training"].shared == {"words": 13, "sequences": 2588, "total": 2588}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("learn.steps=0", "learn.steps=0 must be a whole number, at least 1, or null"),
        ("learn.masters=float16", "learn.masters"),
        ("training.window=1", "training.window=1 must be at least 2"),
        ("training.window=100000", "training.window=100000 is longer than the model's"),
        ("training.batches=100000", "100000 needed"),
        ("learn.held_batches=6", "learn.held_batches=6 of 6 batches leaves none"),
        ("data.training.name=wikitext3", "data.name='wikitext3' is unknown"),
        ("weights=[learnt]", "learned"),
        (
            ("learn.train=scales", DEFAULT_RATE, "search.family=[nvfp4,fp8]"),
            "learn.train=scales, and the search may choose nvfp4: only MX formats",
        ),
        (
            ("learn.train=scales", DEFAULT_RATE, "+search.fixed={*.o_proj: fp8}"),
            "learn.train=scales, and the search may choose fp8: only MX formats",
        ),
        (
            ("weights=[local_hessian]", "search.family=[nvfp4,fp8]"),
            "weights=local_hessian, and weights may be in nvfp4: only MX formats",
        ),
        (
            ("weights=[gptq]", "gptq.scales=search", "search.family=[nvfp4,fp8]"),
            "gptq.scales=search, and weights may be in nvfp4: only MX formats",
        ),
        ("gptq.inputs=false", "gptq.inputs=False is for weights=gptq, and weights=learned"),
        (
            ("weights=[mse,gptq]", "local_hessian.batches=2"),
            "local_hessian.batches=2 is for weights=local_hessian, and weights=mse,gptq",
        ),
    ],
)
def test_what_cannot_learn_is_refused_before_anything_is_searched(bad, says, run, tmp_path):
    arguments = [
        "searches=[fisher]",
        "budgets=[4.7]",
        "weights=[learned]",
        *([bad] if isinstance(bad, str) else bad),
    ]
    code, _out, err = run(compare, *LEARNING, *arguments, f"run.folder={tmp_path}/run")
    assert code == 2 and says in err.replace("\n", " ")
    assert not list(tmp_path.rglob("*.safetensors")) and not list(tmp_path.rglob("scores"))
