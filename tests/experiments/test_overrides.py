"""Settings on a command line: paths are taken as they are, names that there are not answer with the nearest."""

import re
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from dmx.errors import DmxError
from experiments import search
from experiments.running.folder import FolderTaken, claim, hold, is_free_for, release
from experiments.running.overrides import understood
from experiments.search import SearchRun
from experiments.train_mor import TrainMorRun

PATHS = (
    *("lr=1", "größe", "a#b", "run(2)", "my runs", "[a]", "{a}", "a,b", "it's", "back\\", "~/a"),
    *("1", "1e3", "true", "null", "x:y", "a'b\\'c", 'a"b', "日本", "100%", "a&b;c", "@x", "a\\'"),
)


def read(argument, schema=SearchRun):
    (taken,) = understood([argument], schema)
    return OverridesParser.create().parse_override(taken).value()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["run.folder", "model.id"])
def test_paths_are_taken_as_they_are(key, path):
    assert read(f"{key}={path}") == path


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.text(min_size=1).filter(lambda t: t.strip() == t and "${" not in t and t[0] not in "'\""))
def test_any_text_is_taken_as_it_is(path):
    if path != "\x00" and "\x00" not in path and path.isprintable():
        assert read(f"run.folder={path}") == path


def test_what_is_quoted_or_null_or_a_sweep_stays_as_it_was():
    assert read("run.folder='lr=1'") == "lr=1" and read('model.id="a#b"') == "a#b"
    assert read("model.revision=null") is None and read("run.folder=") == ""
    assert understood(["-m", "model.id=a,b", "search.seed=0,1"], SearchRun)[1:] == [
        "model.id=a,b",
        "search.seed=0,1",
    ]
    others = ["--cfg", "job", "hydra.sweep.dir=a=b", "hydra/launcher=joblib", "model=tiny_llama"]
    assert understood(others, SearchRun) == others
    completion = ["-sc", "query=bash"]  # what a shell asks for is no setting
    assert understood(completion, SearchRun) == completion


@pytest.mark.parametrize(
    ("argument", "schema", "words"),
    [
        ("search.stepz=3", SearchRun, r"search key='stepz' is not allowed\. Did you mean 'steps'"),
        ("run.foldr=x", SearchRun, "run key='foldr' is not allowed. Did you mean 'folder'"),
        ("serch.name=kl", SearchRun, "setting='serch' is not allowed. Did you mean 'search'"),
        ("+budgets=[5]", SearchRun, "setting='budgets' is not allowed. Did you mean 'budget'"),
        ("train.window_=3", TrainMorRun, "train key='window_' is not .*Did you mean 'window'"),
        ("run.folder.x=3", SearchRun, "run.folder is one value; it has no parts"),
        ("data.calibration.files=[a=1.txt]", SearchRun, r"not to be understood.*\['a=1\.txt','b"),
        ("search.descent.lr=3)", SearchRun, "not to be understood"),
    ],
)
def test_what_is_not_understood_is_said_in_a_sentence(argument, schema, words):
    with pytest.raises(DmxError, match=words):
        understood([argument], schema)


def test_free_keys_stay_free():
    free = ["+architecture.num_hidden_layers=3", "+mor.x.threshold=0.1"]
    assert understood(free, TrainMorRun) == free
    assert understood(["+search.fixed.x=mxfp4"], SearchRun) == ["+search.fixed.x=mxfp4"]


def test_a_sweep_with_a_folder_of_its_own_names_the_setting_for_it():
    with pytest.raises(DmxError, match=r"run.folder=x with -m: .*hydra\.sweep\.dir=x"):
        understood(["-m", "run.folder=x", "search.seed=0,1"], SearchRun)


def test_a_command_writes_where_it_was_told_to(run, tmp_path):
    for name in ("größe (lr=1)#2", "1"):
        code, _, err = run(
            search,
            *("model=tiny_random", "data=synthetic", "search=random", "baselines=[]"),
            *("calibration.window=64", "calibration.batches=2", "evaluation.window=64"),
            *("evaluation.max_windows=2", f"run.folder={tmp_path}/{name}"),
        )
        assert code == 0, err
        assert (tmp_path / name / "record.json").exists()
    code, _, err = run(search, "search.stepz=3")
    assert code == 2 and "Did you mean 'steps'" in err
    code, _, err = run(search, "-m", "search.seed=0,1", f"run.folder={tmp_path}/mine")
    assert code == 2 and f"hydra.sweep.dir={tmp_path}/mine" in err


# ---------------------------------------------------------------- two commands in one folder


def test_a_second_command_is_refused_while_the_first_lives(tmp_path):
    claim(tmp_path, "a: 1\n")
    held = hold(tmp_path)
    claim(tmp_path, "a: 1\n")  # the settings are the same
    with pytest.raises(FolderTaken, match=r"is in use: the same command is running in it"):
        hold(tmp_path)
    release(held)
    release(hold(tmp_path))


def test_how_a_model_is_held_is_no_part_of_what_a_folder_is_of(tmp_path):
    def said(seed=0, **run):
        return OmegaConf.to_yaml({"run": {"folder": "a", **run}, "search": {"seed": seed}})

    claim(tmp_path, said())  # of before there were these settings
    for held in ({"shard": "on", "memory": "all"}, {"shard": "off", "memory": "block"}):
        claim(tmp_path, said(**held))
        assert is_free_for(tmp_path, said(**held))
    for other in (said(seed=1, shard="on"), said(device="cuda")):
        assert not is_free_for(tmp_path, other)
        with pytest.raises(FolderTaken, match="holds another run"):
            claim(tmp_path, other)


def test_a_folder_of_other_settings_is_refused_by_their_names(tmp_path):
    def said(**gptq):
        return OmegaConf.to_yaml({"run": {"folder": "a"}, "gptq": {"damping": 0.01, **gptq}})

    claim(tmp_path / "natural", said(order="natural"))
    claim(tmp_path / "before", said())
    with pytest.raises(
        FolderTaken, match=r"differs: gptq\.order is natural there, activity here\)"
    ):
        claim(tmp_path / "natural", said(order="activity"))
    with pytest.raises(
        FolderTaken, match=r"differs: gptq\.order is not set there, activity here\)"
    ):
        claim(tmp_path / "before", said(order="activity"))
    many = said(order="activity", damping=None, inputs=True, batches=3, scales="rule")
    shown = "gptq.damping is 0.01 there, null here; gptq.order is natural there, activity here; gptq.inputs is not set there, true here; 2 more"
    with pytest.raises(FolderTaken, match=re.escape(shown)):
        claim(tmp_path / "natural", many)
    (tmp_path / "before" / "config.yaml").write_text("{")
    with pytest.raises(FolderTaken, match=r"\(its config\.yaml differs\)"):
        claim(tmp_path / "before", said())


def test_auto_is_floor_where_a_folder_of_before_says_so(tmp_path):
    def said(rule, target="any", weight="floor"):
        rules = {"weight": weight, "input": rule}
        search = {"target": target, "scale_rules": rules, "seed": 0}
        return OmegaConf.to_yaml({"search": search})

    claim(tmp_path, said("floor", weight={"mxfp4": "even"}))
    claim(tmp_path, said("auto", weight={"mxfp4": "even"}))
    assert not is_free_for(tmp_path, said("even", weight={"mxfp4": "even"}))
    claim(tmp_path / "vllm", said("floor", "vllm"))
    assert not is_free_for(tmp_path / "vllm", said("auto", "vllm"))


def test_the_folder_of_a_killed_command_is_free_at_once(tmp_path):
    claim(tmp_path, "a: 1\n")
    holder = (
        "import sys; from pathlib import Path; from experiments.running.folder import hold\n"
        "hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(FolderTaken):
            hold(tmp_path)
        process.kill()
        process.wait()
        release(hold(tmp_path))


def test_a_command_in_a_folder_that_is_in_use_is_refused(run, tmp_path):
    arguments = (
        *("model=tiny_random", "data=synthetic", "search=random", "baselines=[]"),
        *("calibration.window=64", "calibration.batches=2", "evaluation.window=64"),
        *("evaluation.max_windows=2", f"run.folder={tmp_path}/run"),
    )
    assert run(search, *arguments)[0] == 0
    (tmp_path / "run/record.json").unlink()
    held = hold(tmp_path / "run")
    code, _, err = run(search, *arguments)
    assert code == 2 and "is in use" in err and not (tmp_path / "run/error.json").exists()
    release(held)
    assert run(search, *arguments)[0] == 0 and (tmp_path / "run/record.json").exists()
