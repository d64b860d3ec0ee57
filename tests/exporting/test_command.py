"""python -m experiments.export: what it leaves, and its refusals in one line."""

import sys

import pytest
from hydra import compose, initialize_config_dir

import dmx
from dmx.assignment import Assignment
from experiments import export
from experiments._config import CONFIGS, build_root, register
from tests.exporting.conftest import VLLM, mixed, needs


@pytest.fixture
def run(monkeypatch, capfd):
    def command(*arguments):
        base = ["model=tiny_random", "data=synthetic", "run.device=cpu"]
        monkeypatch.setattr(sys, "argv", ["export", *base, *map(str, arguments)])
        code = 0
        try:
            export.main()
        except SystemExit as error:
            code = error.code
        out, err = capfd.readouterr()
        return code, out, " ".join(err.split())

    return command


@needs("compressed-tensors")
def test_a_file_is_exported_and_measured(run, make_tiny, tmp_path, loaded_here):
    path = mixed(make_tiny("llama").model, VLLM).save(tmp_path / "a.json")
    folder = tmp_path / "out"
    code, out, err = run(
        f"assignment={path}", f"export.folder={folder}", "windows=2", "window=48"
    )  # fmt: skip
    assert code == 0 and "equal bit for bit" in err and "perplexity on 96 tokens" in err
    assert f"{folder}: compressed_tensors, profile transformers" in out
    assert Assignment.load(folder / "assignment.json") == Assignment.load(path)
    assert dmx.load_exported(folder).tokenizer is not None


def test_a_uniform_format_by_name(run, tmp_path):
    code, out, _ = run(
        "assignment=mxfp6_e3m2", "export.target=quark", "export.verify=false",
        f"export.folder={tmp_path / 'out'}",
    )  # fmt: skip
    assert code == 0 and out.strip().endswith("out: quark")
    assert set(dmx.load_exported(tmp_path / "out").assignment.formats.values()) == {"mxfp6_e3m2"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["assignment=mxfp8_e5m2"], "FormatError: export.target=compressed_tensors"),
        (["assignment=missing.json"], "AssignmentError: assignment=missing.json: cannot be read"),
        (["export.target=gguf"], "FormatError: export.target='gguf' is not allowed"),
        (["windows=-1"], "ConfigError: windows=-1 must be at least 0"),
        (["windows=1", "export.verify=false"], "ConfigError: windows=1 needs export.verify=true"),
        (["windows=9", "window=1000000"], "need 9000000 tokens"),
        (["export.max_shard_gigabytes=0"], "ConfigError: export.max_shard_gigabytes=0 must be"),
    ],
)
def test_refusals_are_one_line(arguments, words, run, tmp_path):
    code, _, err = run(*arguments, f"export.folder={tmp_path / 'out'}")
    assert code == 2 and words in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_the_config_composes_with_its_defaults():
    register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        built = build_root(export.ExportRun, compose("export", ["model=smollm2_135m"]))
    folder = built.export.folder
    assert built.export == export.ExportConfig(folder=folder) and built.windows == 0
