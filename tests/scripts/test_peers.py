"""Other tools' choices beside ours: what they are asked, how their answers are read, and, where .venv-peers is, the tools."""

import copy
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

import dmx
from dmx.applying.apply import applied
from dmx.data import DataConfig, load_text
from dmx.data.tokens import starting_with
from dmx.errors import RunError
from dmx.models import ModelConfig, TinyConfig, load_model
from dmx.searching import SearchConfig, search_space
from experiments.reporting.pages.peers import peers_page
from experiments.reporting.record import Record
from experiments.running.settings import CONFIGS
from scripts.claiming import claimed
from scripts.peers import __main__ as peers
from scripts.peers import answers, texts, tools
from scripts.peers.protocol import (
    ANSWER,
    ONLINE_ROTATION,
    TOKENS,
    WEIGHTS,
    Answer,
    Request,
    layer_bits,
)
from scripts.peers.rotated import RotatedParts
from scripts.peers.workers import (
    auto_round_worker,
    brevitas_worker,
    llmcompressor_worker,
    modelopt_worker,
    ours,
    quark_worker,
)
from scripts.peers.workers.common import Cell

FAMILY = ["mxfp4", "mxfp8_e4m3"]
COMMON = [
    "--calibration", "synthetic:calibration", "--evaluation", "synthetic:evaluation", "--token-window", "32",
    "--tokens", "64", "--window", "32", "--windows", "2",
]  # fmt: skip


# ---------------------------------------------------------------- without a peer


@pytest.fixture(scope="module")
def model():
    tiny = TinyConfig(hidden_size=32, intermediate_size=64, layers=1)
    return load_model(ModelConfig(id="t", dtype="float32", tiny=tiny)).model


@pytest.fixture(scope="module")
def space(model):
    return search_space(model, SearchConfig(name="kl_per_bit", family=FAMILY, units="fused"))


def answer_of(formats, **changes):
    usual = Answer(
        formats=formats,
        seconds=1.0,
        peak_memory_bytes=2**30,
        versions={"tool": "1.0"},
        said_bits=None,
        own_nll=None,
    )
    return dataclasses.replace(usual, **changes)


def all_of(space, block_format):
    return {layer: block_format for unit in space.units for layer in unit.layers}


def test_files_hold_what_was_written_and_nothing_else(tmp_path):
    answer = answer_of({"a": "mxfp4"}, own_nll=[1.5], notes=["n"])
    answer.save(tmp_path / ANSWER)
    assert Answer.load(tmp_path / ANSWER) == answer
    with pytest.raises(ValueError, match=r"missing or unknown: .*'device'.*'seconds'"):
        Request.load(tmp_path / ANSWER)
    for wrong in ({"seconds": None}, {"formats": 5}, {"notes": "n"}):
        answer_of(**{"formats": {}} | wrong).save(tmp_path / ANSWER)
        with pytest.raises(ValueError, match=rf"damaged \({next(iter(wrong))}=.*: delete it, and"):
            Answer.load(tmp_path / ANSWER)


def test_two_counts_of_bits_agree(model, space):
    layers = all_of(space, "mxfp4") | dict.fromkeys(space.units[0].layers, "mxfp8_e4m3")
    made = answers.assignment_of(answer_of(layers), space, model, 8.0, tool="t")
    assert made.bits["element_bits"] == pytest.approx(layer_bits(layers, space.own_elements))
    assert 4 < made.bits["element_bits"] < 8
    assert made.formats == layers and made.search.tool == "t" and made.search.seconds == 1.0


def test_an_answer_that_was_not_asked_for_is_refused(model, space):
    split = all_of(space, "mxfp4") | {space.units[0].layers[0]: "mxfp8_e4m3"}
    other = all_of(space, "mxfp4") | {space.units[0].layers[0]: "mxfp6_e2m3"}
    less = dict(list(all_of(space, "mxfp4").items())[1:])
    cases = [
        (split, "none of the space"),
        (other, "none of the space"),
        (less, "lacks or adds 1 layers"),
        (all_of(space, "mxfp8_e4m3"), "8.0000 element_bits, over the budget of 5"),
    ]
    for formats, match in cases:
        with pytest.raises(RunError, match=match):
            answers.assignment_of(answer_of(formats), space, model, 5.0)


def test_finished_weights_are_values_of_their_formats(tmp_path, generator):
    raw = torch.randn(8, 64, generator=generator)
    rounded = dmx.fake_quant(raw, "mxfp4", scale_rule="rceil")
    assert answers.weight_rule({"a": rounded}, {"a": "mxfp4"}) == "floor"  # values stay as they are
    with pytest.raises(RunError, match=r"no values of their formats .*floor: 1, first a"):
        answers.weight_rule({"a": raw}, {"a": "mxfp4"})
    save_file({"a.weight": rounded}, str(tmp_path / WEIGHTS))
    assert torch.equal(answers.finished_weights(tmp_path / WEIGHTS, ["a"])["a"], rounded)
    with pytest.raises(RunError, match=r"lacks or adds 1 tensors, first b\.weight"):
        answers.finished_weights(tmp_path / WEIGHTS, ["a", "b"])
    for content in (b"", (tmp_path / WEIGHTS).read_bytes()[:-1], None):
        if content is None:
            (tmp_path / WEIGHTS).unlink()
        else:
            (tmp_path / WEIGHTS).write_bytes(content)
        with pytest.raises(RunError, match=rf"missing or damaged: delete {ANSWER} beside it"):
            answers.finished_weights(tmp_path / WEIGHTS, ["a"])


def rotated_file(path, rotation, names, **parameters):
    held = parameters if rotation is None else parameters | {ONLINE_ROTATION: rotation.contiguous()}
    save_file(held, str(path), metadata={ONLINE_ROTATION: " ".join(names)})
    return path


def test_a_rotated_model_is_the_same_function(model, tmp_path, generator):
    """Residual rotated, norms folded, head untied, a layer's inputs rotated online; and nothing of it stays."""
    model = copy.deepcopy(model)
    model.lm_head.weight = model.model.embed_tokens.weight
    ids = torch.randint(0, 200, (2, 16), generator=generator)
    before = {name: p.clone() for name, p in model.named_parameters(remove_duplicate=False)}

    def turned(size):
        return torch.linalg.qr(torch.randn(size, size, generator=generator))[0]

    turn, online = turned(32), turned(64)
    final = before["model.norm.weight"]
    layers = {n: before[f"{n}.weight"] for n, m in model.named_modules() if "proj" in n}
    for name, weight in layers.items():
        norm = "post_attention" if "mlp" in name else "input"
        if "down" in name or "o_proj" in name:
            layers[name] = turn.T @ (weight @ online if "down" in name else weight)
        else:
            layers[name] = weight * before[f"model.layers.0.{norm}_layernorm.weight"] @ turn
    parameters = {n: torch.ones(32) for n in before if "norm" in n}
    parameters["model.embed_tokens.weight"] = before["model.embed_tokens.weight"] @ turn
    parameters["lm_head.weight"] = before["lm_head.weight"] * final @ turn
    down = "model.layers.0.mlp.down_proj"
    parts = RotatedParts.load(
        rotated_file(tmp_path / "r", online, [down], **parameters), model, list(layers)
    )
    with torch.no_grad():
        wanted = model(ids).logits
        for name, weight in layers.items():
            model.get_submodule(name).weight.copy_(weight)
        with parts.inside(model):
            made = model(ids).logits
        for name in layers:
            model.get_submodule(name).weight.copy_(before[f"{name}.weight"])
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(model(ids).logits, wanted)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_inputs_are_rotated_before_they_are_quantized(model, space, generator):
    assignment = answers.assignment_of(answer_of(all_of(space, "mxfp4")), space, model, 5.0)
    online = torch.linalg.qr(torch.randn(64, 64, generator=generator))[0]
    down = "model.layers.0.mlp.down_proj"
    given, quantized = [], []
    hook = model.get_submodule(down).register_forward_pre_hook(lambda _, x: given.append(x[0]))
    parts = RotatedParts({}, online, (down,))
    with torch.no_grad(), parts.inside(model), applied(model, assignment, inputs=True):
        layer = model.get_submodule(down)
        quantizer = layer.input_quantizer
        layer.input_quantizer = lambda x: quantizer(quantized.append(x) or x)
        model(torch.randint(0, 200, (1, 16), generator=generator))
    hook.remove()
    assert torch.equal(quantized[0], given[0] @ online)
    assert not model.get_submodule(down)._forward_pre_hooks


def test_the_published_command_line_has_what_its_authors_say(tmp_path):
    def asked(method, **options):
        request = SimpleNamespace(
            method=method, formats=FAMILY, model="m", dtype="bfloat16", seed=3, limit=4.5, device="cuda", options=options
        )  # fmt: skip
        cell = SimpleNamespace(request=request, tokens=torch.zeros(64, 32), folder=tmp_path)
        return " ".join(brevitas_worker.arguments(cell, 64))

    usual = asked("dmx")
    for words in (
        "--custom-quantizer learned_float --custom-trainer rotation_learned_bitwidth",
        "--target_bit_width 4.5 --bw_learning_rate 1.0 --delay_start 0.6",
        "--max_steps 400 --per_device_train_batch_size 8",
        "--compile-ptq",
    ):
        assert words in usual
    assert "--rotation" not in usual.split() and "--compile-ptq" not in asked("dmx", compile="no")
    assert "--max_steps 7 " in asked("dmx", steps="7")
    assert "--rotation fused_no_fx --rotation-mode had" in asked("dmx_rotated")


def test_finished_weights_of_experts_and_rotated_biases_are_refused():
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2, bias=False)}
    )
    answers.check_readable(model, ["b"], biases=False)
    answers.check_readable(model, ["a", "b"], biases=True)
    with pytest.raises(RunError, match=r"1 layers have a bias, first a: .* its formats alone\."):
        answers.check_readable(model, ["a", "b"], biases=False)
    with pytest.raises(RunError, match=r"experts in one tensor, first mlp\.gate_up_proj: .* Ask"):
        answers.check_readable(model, ["a", "mlp.gate_up_proj"], biases=True)


def test_a_cell_that_cannot_be_read_ends_no_other(tmp_path, capsys):
    command = ["tiny_qwen3_moe", "--out", str(tmp_path), *COMMON, "--rules", "floor"]
    names = ["ours_weights:adaptive_rotated_learned", "ours:kl_per_bit"]
    assert peers.main([*command, "--peers", *names]) == 1
    assert "experts in one tensor" in capsys.readouterr().err
    assert len(list(tmp_path.glob("cells/*/record.json"))) == 1


@pytest.mark.parametrize(
    ("rotation", "online", "changed", "message"),
    [
        (None, [], {"x.y": torch.ones(1)}, r"lacks or adds 1 parameters, first x\.y"),
        (None, [], {"norm.weight": None}, "lacks or adds 2 parameters, first none"),
        (None, [], {"down.weight": torch.ones(4, 8)}, r"lacks or adds 1 parameters, first down\.weight"),
        (None, [], {"norm.weight": torch.ones(3)}, r"norm\.weight of the shape \(3,\), the model \(4,\)"),
        (None, [], {"norm.weight": torch.full((4,), math.nan)}, r"norm\.weight that is not finite"),
        (None, ["down"], {}, "names layers of an online rotation and has none"),
        (torch.eye(8), [], {}, r"for layers of \[\]"),
        (torch.eye(8), ["norm"], {}, "other layers"),
        (torch.eye(8), ["down", "down"], {}, "or of one twice"),
        (torch.eye(3), ["down"], {}, r"shape \(3, 3\) for layers of \[8\] in_features"),
        (torch.eye(16), ["down"], {}, r"shape \(16, 16\) for"),
        (torch.ones(2, 4), ["down"], {}, r"shape \(2, 4\) for"),
        (torch.ones(0, 0), ["down"], {}, r"shape \(0, 0\) for"),
        (torch.eye(8).double(), ["down"], {}, "not float32"),
        (torch.full((8, 8), math.inf), ["down"], {}, "not finite"),
    ],
)  # fmt: skip
def test_parts_that_a_model_cannot_have_are_refused(tmp_path, rotation, online, changed, message):
    model = torch.nn.ModuleDict(
        {"down": torch.nn.Linear(8, 4, bias=False), "norm": torch.nn.LayerNorm(4, bias=False)}
    )
    parameters = {"norm.weight": torch.ones(4)} | changed
    held = {n: p for n, p in parameters.items() if p is not None} or {"none": torch.ones(1)}
    path = rotated_file(tmp_path / "r", rotation, online, **held)
    with pytest.raises(RunError, match=message):
        RotatedParts.load(path, model, ["down"])


def test_a_damaged_file_of_a_rotated_model_is_named(tmp_path):
    path = rotated_file(tmp_path / "r", None, [], a=torch.ones(4))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match=rf"missing or damaged: delete {ANSWER} beside it"):
        RotatedParts.load(path, torch.nn.Linear(1, 1), [])


MX = {"group_size": 32, "data_type": "mx_fp", "act_group_size": 32, "act_data_type": "mx_fp"}


def test_auto_rounds_layer_config_is_read():
    config = {"a": {"bits": 8, "act_bits": 8, **MX}, "b": {"bits": 6, "act_bits": 6, **MX}}
    found = {"a": "mxfp8_e4m3", "b": "mxfp6_e2m3"}
    assert auto_round_worker.formats_of(config, ["a", "b"], True) == found
    alone = {name: of | {"act_bits": 16} for name, of in config.items()}
    assert auto_round_worker.formats_of(alone, ["a", "b"], False) == found
    with pytest.raises(ValueError, match="a: weight"):
        auto_round_worker.formats_of(config, ["a"], False)
    for wrong in ({"act_bits": 16}, {"data_type": "int"}, {"group_size": 16, "act_group_size": 16}):
        with pytest.raises(ValueError, match="a: weight"):
            auto_round_worker.formats_of({"a": config["a"] | wrong}, ["a"], True)
    assert auto_round_worker.shared_layers([["q", "k"], ["o"]]) == [["q", "k"]]


def test_modelopts_recipes_are_read():
    members = {"q.quant_recipe": ["q", "k"], "o.quant_recipe": ["o"]}
    names = {"CUSTOM_MODULE_0_0": "mxfp4", "CUSTOM_MODULE_0_1": "mxfp8_e4m3"}
    recipes = {
        "q.quant_recipe": "CUSTOM_MODULE_0_1(effective-bits: 8.0)",
        "o.quant_recipe": "CUSTOM_MODULE_0_0(effective-bits: 4.0)",
    }
    found = modelopt_worker.formats_of(recipes, members, names)
    assert found == {"q": "mxfp8_e4m3", "k": "mxfp8_e4m3", "o": "mxfp4"}
    with pytest.raises(ValueError, match=r"NONE\(effective-bits: 16.0\) is none of"):
        none = {"o.quant_recipe": "NONE(effective-bits: 16.0)"}
        modelopt_worker.formats_of(none, members, names)


def test_llm_compressor_is_given_every_layer_by_name():
    given = {"q": "mxfp4", "k": "mxfp4", "o": "mxfp8_e4m3"}
    assert llmcompressor_worker.groups_of(given, True) == {"MXFP4": ["q", "k"], "MXFP8": ["o"]}
    assert list(llmcompressor_worker.groups_of(given, False)) == ["MXFP4A16", "MXFP8A16"]


def test_quark_is_given_one_list_of_blocks_and_the_layers_in_them():
    layers = [
        f"model.layers.{i}.{name}" for i in range(2) for name in ("mlp.up_proj", "mlp.down_proj")
    ]
    assert quark_worker.places_of(layers) == ("model.layers", ["mlp.up_proj", "mlp.down_proj"])
    with pytest.raises(ValueError, match=r"blocks of \['decoder', 'model\.layers'\]"):
        quark_worker.places_of([*layers, "decoder.0.fc1"])
    with pytest.raises(ValueError, match="lm_head is in no numbered block"):
        quark_worker.places_of(["lm_head"])


def test_published_offsets_are_read_and_lowered_into_the_budget():
    assert brevitas_worker.format_of(4.0, 3.0) == "mxfp8_e4m3"
    with pytest.raises(ValueError, match=r"3\.0 and 2\.0 bits are no format"):
        brevitas_worker.format_of(3.0, 2.0)
    formats = {"a": "mxfp8_e4m3", "b": "mxfp8_e4m3", "c": "mxfp4"}
    offsets, elements = {"a": 2.9, "b": 2.1, "c": 1.0}, {"a": 1, "b": 1, "c": 2}
    assert brevitas_worker.lowered(formats, offsets, elements, 6.0) == formats
    assert brevitas_worker.lowered(formats, offsets, elements, 5.5) == formats | {"b": "mxfp4"}


def test_what_stands_in_for_modelopts_extension_is_our_rule_rceil(generator):
    x = torch.randn(4, 64, generator=generator)
    found = modelopt_worker.StandIn().fused_amax_convert(x, 32, "E2M1", "E8M0", None)
    assert torch.equal(found, dmx.fake_quant(x, "mxfp4", scale_rule="rceil"))


def test_the_peak_of_a_card_is_that_of_timed_work(monkeypatch):
    highest = [0]
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: highest.__setitem__(0, 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: highest[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cell = object.__new__(Cell)
    cell.request, cell._seconds, cell._peak = SimpleNamespace(device="cuda"), 0.0, 0
    for timed, untimed in ((100, 900), (60, 500)):
        cell.timed(partial(highest.__setitem__, 0, timed))
        highest[0] = untimed
    assert cell.peak() == 100


def test_our_descent_is_that_of_the_preset():
    preset = OmegaConf.load(CONFIGS / "search" / "exact.yaml")
    assert dict(preset.descent) == ours.EXACT and preset.objective == "kl"
    polished = OmegaConf.load(CONFIGS / "search" / "polished.yaml")
    assert polished.polish.rounds == ours.ROUNDS


def test_our_searches_are_told_a_rule_and_to_leave_inputs_alone():
    request = Request(
        method="adaptive", model="", dtype="float32", device="cpu", formats=FAMILY, units=[["a"]],
        limit=5.0, seed=0, given=None, own_windows=0, options={"rule": "even"},
    )  # fmt: skip
    told = ours.config_of(SimpleNamespace(request=request)).scale_rules.by_format()
    assert {told[o]["mxfp4"] for o in ("weight", "input")} == {"even"}
    usual = dataclasses.replace(request, options={})
    told = ours.config_of(SimpleNamespace(request=usual)).scale_rules.by_format()
    assert {told[o]["mxfp4"] for o in ("weight", "input")} == {"floor"}
    alone = dataclasses.replace(request, options={"inputs": "bf16"})
    config = ours.config_of(SimpleNamespace(request=alone))
    assert config.input_format == "bf16" and not alone.has_inputs and usual.has_inputs


def test_our_stages_of_weights_are_told_likewise(model, space, generator):
    names = [layer for unit in space.units for layer in unit.layers]
    given = {name: FAMILY["down" in name] for name in names}
    tokens = torch.randint(0, model.config.vocab_size, (8, 16), generator=generator)
    weights = {}
    for method, common in (("gptq", {}), ("learned", {"learn_steps": "2"})):
        learns = [{"learn_inputs": "bf16"}] if method == "learned" else []
        for told in ({}, {"rule": "even"}, {"inputs": "bf16"}, *learns):
            request = Request(
                method=method, model="", dtype="float32", device="cpu", formats=FAMILY, units=[["a", "b"]], limit=5.0,
                seed=0, given=given, own_windows=0, options=common | told,
            )  # fmt: skip
            saved = {}
            cell = SimpleNamespace(
                request=request, tokens=tokens, notes=[], timed=lambda work: work(), peak=lambda: 0,
                save_weights=saved.update, answer=lambda formats, *_, **__: None,
            )  # fmt: skip
            ours.weights(cell, model)
            answers.weight_rule(saved, given)
            weights[method, *told.items()] = torch.cat([w.flatten() for w in saved.values()])
    # On given formats it is all the same who says that inputs are left alone.
    left_alone = weights.pop(("learned", ("learn_inputs", "bf16")))
    assert torch.equal(left_alone, weights["learned", ("inputs", "bf16")])
    for a, b in itertools.combinations(weights.values(), 2):
        assert not torch.equal(a, b)


def test_our_rotated_model_is_the_one_that_the_command_makes(tmp_path, monkeypatch):
    """A tied head and all; losses as those of the assignment that learned."""
    command = [
        "tiny_smollm2",
        "--out",
        str(tmp_path),
        *COMMON,
        "--rules",
        "floor",
        "--units",
        "layer",
        "--own-windows",
        "2",
    ]
    name = "ours_weights:adaptive_rotated_learned"
    peer = dataclasses.replace(tools.PEERS["ours_weights"], own_rule="floor")
    monkeypatch.setitem(tools.PEERS, "ours_weights", peer)  # for the windows in its folder
    monkeypatch.setattr(peers, "run_worker", lambda peer, folder, pythons: ours.run(Cell(folder)))
    made = []
    learn = ours.learn_weights

    def learns(model, *given):
        made.append((model, learn(model, *given)))
        return made[-1][1]

    monkeypatch.setattr(ours, "learn_weights", learns)
    assert peers.main([*command, "--peers", name, "--option", "learn_steps=2"]) == 0
    (folder,) = tmp_path.glob("cells/*")
    record = Record.load(folder / "record.json")
    assert record.actual["rotates"] and record.actual["chose_formats"]
    assert 4 < record.rows[0].element_bits <= 5
    windows = load_file(folder / TOKENS)["evaluation"]
    ((model, assignment),) = made
    assert assignment.transform["name"] == "hadamard_block"
    with torch.no_grad(), applied(model, assignment, inputs=True):
        logits = model(windows).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert math.log(record.rows[0].perplexity) == pytest.approx(float(loss), abs=1e-5)


@pytest.mark.parametrize("rows, batches", [(1, 1), (16, 16), (64, 32), (96, 32), (500, 125)])
def test_batches_of_a_search_have_rows_alike(rows, batches):
    found = ours.batches_of(torch.arange(rows)[:, None])
    assert [len(b) for b in found] == [rows // batches] * batches
    assert torch.equal(torch.cat(found), torch.arange(rows)[:, None])


def test_asking_for_what_is_not_there_says_what_is(monkeypatch, tmp_path):
    assert tools.asked("modelopt") == [("modelopt", m) for m in ("gradient", "kl_div")]
    with pytest.raises(RunError, match=r"no such peer\. There are ours, "):
        tools.asked("other")
    with pytest.raises(RunError, match="modelopt has gradient, kl_div"):
        tools.asked("modelopt:other")
    assert tools.check_can("ours:fisher", ["nvfp4", "fp8"], "fused", []) == "has no nvfp4, fp8"
    dmx_as_published = "brevitas:dmx"
    cases = [
        (
            ["mxfp4", "mxfp6_e2m3", "mxfp8_e4m3"],
            "layer",
            "takes mxfp4/mxfp8_e4m3 or mxfp4/mxfp6_e2m3 alone",
        ),
        (FAMILY, "fused", "chooses for layer units alone"),
        (FAMILY, "layer", "needs --option dmx=..."),
    ]
    for family, units, why in cases:
        assert tools.check_can(dmx_as_published, family, units, []) == why
    assert tools.check_can(dmx_as_published, FAMILY, "layer", ["dmx"]) is None
    monkeypatch.setenv("DMX_PEERS", str(tmp_path))
    with pytest.raises(
        RunError, match=r"modelopt is not installed: .* `make peers PEERS=modelopt`"
    ):
        tools.python_of("modelopt", {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["--peers", "brevitas:dmx", "--option", "dmx=x", "compile=yes"],
            "--option compile=yes must be no, where it is given.",
        ),
        (
            ["--peers", "brevitas:dmx", "--units", "layer", "--option", "dmx=nowhere"],
            "--option dmx=nowhere: there is no learned_float_quantizer.py. Give a copy of",
        ),
        (
            ["--budgets", "nan"],
            "--budgets nan: layers of mxfp4/mxfp8_e4m3 have 4 to 8 element_bits.",
        ),
        (["--budgets", "5", "3.9"], "--budgets 3.9: layers of mxfp4/mxfp8_e4m3 have 4 to 8"),
        (["--budgets", "9"], "Give a number from 4 to 8, or other candidates"),
        (["--family", "mxfp4", "other"], "--family="),
        (["--family", "mxfp8_e4m3", "mxfp4"], "Name formats of rising bits, cheapest first."),
        (["--family", "nvfp4", "mxfp8_e4m3"], "nothing to run"),
        (["--at-once", "0"], "--at-once 0 must be at least 1"),
        (["--seeds", "0", "-1"], "--seeds -1 must be at least 0"),
        (["--seeds", "9" * 20], f"--seeds {'9' * 20} must be at most"),
        ([*COMMON, "--window", "3000"], "--window 3000 is longer than the model's 2048 positions"),
        (
            [*COMMON, "--token-window", "4096", "--tokens", "4096"],
            "--token-window 4096 is longer than the model's 2048 positions. Give at most 2048.",
        ),
        (
            ["--peers", "ours_weights:kl_per_bit_learned", "--option", "learn_steps=٣"],
            "--option learn_steps=٣ must be a whole number",
        ),
        (["--windows", "0"], "--windows 0 must be at least 1"),
        (["--own-windows", "-1"], "--own-windows -1 must be at least 0"),
        (["--peers", "ours:"], "--peers ours:: ours has kl_per_bit,"),
        (
            ["--option", "rule=round"],
            "--option rule=round must be floor or ceil or even or rceil, where it is given.",
        ),
        (["--out", "/proc/peers"], "/proc/peers"),
        (["--device", "tpu"], "--device 'tpu'"),
        (
            ["--python", "ours=python3"],
            "--python ours=python3: give PEER=PATH, a peer of modelopt,",
        ),
        (
            ["--python", "modelopt=/no/python"],
            "--python modelopt=/no/python: it does not run ([Errno 2] No such file or directory: '/no/python'). "
            "Give an interpreter that has nvidia-modelopt==",
        ),
        (["--python", f"auto_round={sys.executable}"], "is not there (importlib.metadata.Package"),
        (["--python", "modelopt=/bin/true"], "it has nothing to say of them. Give an"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_is_loaded(tmp_path, capsys, given, message):
    assert (
        peers.main(["tiny_random", "--out", str(tmp_path), "--peers", "ours:fisher", *given]) == 2
    )
    assert message in capsys.readouterr().err


def test_cells_at_once_are_processes_of_the_same_command(tmp_path, monkeypatch):
    started = []

    class Process:
        def __init__(self, command, env, pass_fds):
            assert command[-2:] == ["--ends-with", str(*pass_fds)]
            self.code = len(started)
            started.append((command, env))

        def wait(self):
            return self.code

        poll = wait

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(peers.subprocess, "Popen", Process)
    given = [
        "tiny_random",
        "--out",
        str(tmp_path),
        "--peers",
        "ours:fisher",
        "--at-once",
        "2",
        *COMMON,
    ]
    assert peers.main(given) == 1, "one of them failed"
    for command, _ in started:
        own = peers.parse(command[command.index("scripts.peers") + 1 :])
        assert (own.at_once, own.beside, own.peers, own.out) == (1, 1, ["ours:fisher"], tmp_path)
    assert peers.run_together(given, 3, "cuda") == 2
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in started] == ["4,7", "4,7", "4", "7", "4"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_is_not_there_is_said_before_anything_is_loaded(tmp_path, capsys):
    assert peers.main(["none", "--out", str(tmp_path), "--device", "cuda"]) == 2
    assert "--device cuda: no CUDA device here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "known"),
    [
        (["--rules", "flor"], "'floor'"),
        (["--tasks", "arc"], "'arc_easy'"),
        (["--dtype", "float8"], "'bfloat16', 'float16', 'float32'"),
        (["--dtype", "auto"], "'bfloat16'"),
        (["--calibration", "fineweb:train"], "'fineweb', 'c4', 'fineweb+c4', 'synthetic:calib"),
        (["--evaluation", "wikitext2"], "'wikitext2:test'"),
        (["--evaluation", "files"], "'wikitext2:test'"),
    ],
)
def test_rules_tasks_dtypes_and_texts_are_names(capsys, wrong, known):
    with pytest.raises(SystemExit):
        peers.main(["none", "--out", "x", *wrong])
    said = capsys.readouterr().err
    assert f"argument {wrong[0]}: invalid choice: '{wrong[1]}'" in said and known in said


def test_a_text_that_is_not_there_is_said_under_its_option(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DMX_DATA", str(tmp_path))
    command = ["tiny_random", "--out", str(tmp_path / "out"), "--peers", "ours:fisher", *COMMON]
    for given, said in (
        (["--calibration", "c4"], f"--calibration c4: {tmp_path}/calibration/c4-584.jsonl.gz does"),
        (
            ["--evaluation", "wikitext2:train"],
            "--evaluation wikitext2:train: local copies (DMX_DATA is set) hold only its start. Use "
            "--evaluation wikitext2_train_head, or unset",
        ),
    ):
        assert peers.main([*command, *given]) == 2
        assert said in capsys.readouterr().err
    monkeypatch.delenv("DMX_DATA")
    monkeypatch.setattr("dmx.data.sources.hub_is_reachable", lambda: False)
    assert peers.main([*command, "--calibration", "fineweb"]) == 2
    assert "(--calibration embedded:calibration needs neither)" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--at-once", "2"]])
def test_more_tokens_than_a_text_has_are_refused_before_a_model_is_loaded(
    tmp_path, monkeypatch, capsys, more
):
    monkeypatch.setattr(peers, "Bench", None)
    monkeypatch.setattr(peers, "run_together", None)
    command = ["tiny_random", "--out", str(tmp_path), "--peers", "ours:fisher", *COMMON, *more]
    text = load_text(DataConfig(name="synthetic", split="calibration")).text
    rows = len(text) // 96  # of bytes
    given = ["--tokens", "96", str(96 * (rows + 1)), "--token-window", "96"]
    assert peers.main([*command, *given]) == 2
    assert (
        f"--tokens {96 * (rows + 1)}: --calibration synthetic:calibration fills {rows} rows of --token-window 96, "
        f"{96 * rows} tokens. Give no more, other rows, or another text." in capsys.readouterr().err
    )
    given = ["--window", "10000000"]
    assert peers.main([*command, *given]) == 2
    said = "--window 10000000: --evaluation synthetic:evaluation has "
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_tokens_that_rows_start_with_count():
    tokens = starting_with(torch.zeros(30), (1,))
    text = texts.Texts(
        calibration=None, evaluation=None, tokens=tokens, measured=tokens, token_window=16
    )  # fmt: skip
    text.check_enough([32], "c4", 31, "c4")  # two rows of 15 and their start
    with pytest.raises(RunError, match="--tokens 48: --calibration c4 fills 2 rows"):
        text.check_enough([16, 48], "c4", 31, "c4")
    with pytest.raises(RunError, match="fills 0 rows of --token-window 1, 0 tokens"):
        dataclasses.replace(text, token_window=1).check_enough([1], "c4", 31, "c4")
    with pytest.raises(RunError, match="--window 32: --evaluation c4 has 30 tokens, which fill"):
        text.check_enough([32], "c4", 32, "c4")


def test_a_given_interpreter_has_the_tool_in_its_version(monkeypatch):
    monkeypatch.setattr(tools, "pins_of", lambda _: {"pytest": pytest.__version__})
    path = Path(sys.executable)
    assert tools.given_pythons([f"modelopt={path}"]) == {"modelopt": path}
    assert tools.python_of("modelopt", {"modelopt": path}) == path
    monkeypatch.setattr(tools, "pins_of", lambda _: {"pytest": "0.1"})
    with pytest.raises(
        RunError, match=rf"it has pytest=={pytest.__version__}\. Give .* pytest==0\.1"
    ):
        tools.given_pythons([f"modelopt={path}"])


def test_what_no_method_takes_is_refused_before_a_model_is_loaded(capsys):
    for more, said in (
        (
            ["--option", "iter=5"],
            "--option iter=5: what is asked for takes inputs=VALUE, iters=VALUE.",
        ),
        (
            ["--option", "iters"],
            "--option iters: what is asked for takes inputs=VALUE, iters=VALUE.",
        ),
        (["--option", "iters=5", "iters=6"], "--option iters is given twice, 5 and 6: give one."),
        (["--option", "iters=many"], "--option iters=many must be a whole number, at least 1"),
        (["--option", "iters=0"], "--option iters=0 must be a whole number, at least 1"),
        (["--option", "inputs=fp8"], "--option inputs=fp8 must be bf16, where it is given."),
        (["--token-window", "0"], "--token-window 0: a row needs at least 2 tokens"),
        (["--tokens", "300"], "--tokens 300: rows have --token-window 256 tokens."),
    ):
        assert peers.main(["none", "--out", "x", "--peers", "auto_round:sign_round", *more]) == 2
        assert said in capsys.readouterr().err
    both = ["--peers", "ours_weights:learned", "--option", "inputs=bf16", "learn_inputs=bf16"]
    assert peers.main(["none", "--out", "x", *both]) == 2
    assert "learn_inputs: inputs=bf16 leaves inputs alone" in capsys.readouterr().err


def test_learned_weights_are_of_what_their_formats_were_told():
    given = peers.parse(["none", "--out", "x"])
    grid = peers.Grid(given, None, {"rule": "even", "learn_steps": "5", "iters": "9"}, {})
    point = {"family": tuple(FAMILY), "limit": 5.0, "tokens": 64, "units": "fused", "seed": 0}
    learned = peers.Cell(peer="ours_weights", method="kl_per_bit_learned", **point)
    assert grid._requested(learned)["option"] == {"rule": "even", "learn_steps": "5"}
    # Of AutoScheme's formats, which no rule was told, weights alone are.
    of_others = peers.Cell(peer="ours_weights", method="learned", **point)
    assert (
        grid._requested(of_others)["option"] == grid._options(of_others) == grid._options(learned)
    )


@pytest.mark.parametrize(
    ("theirs", "said"),
    [([3.0, 2.0], ""), ([3.0, 2.3], "up to 0.3 nats/token"), ([3.0, math.nan], "from ours")],
)
def test_losses_of_its_own_that_are_not_ours_are_warned_of(theirs, said):
    assert peers.misread(None) == ()
    text = " ".join(peers.misread({"theirs": theirs, "ours": [3.01, 2.0]}))
    assert said in text and bool(said) == bool(text)


def test_a_cell_is_asked_once_measured_and_kept(monkeypatch, tmp_path, capsys):
    asked = []

    def run_worker(peer, folder, pythons):
        request = Request.load(folder / "request.json")
        asked.append((peer, request.method))
        if len(asked) == 1:
            raise RunError("it died")
        formats = {layer: request.formats[0] for unit in request.units for layer in unit}
        if request.given is not None:
            weights = load_model(peers.model_of(peers.parse(["tiny_random", "--out", "x"]))).model
            quantized = {
                f"{n}.weight": dmx.fake_quant(weights.get_submodule(n).weight.data, f)
                for n, f in request.given.items()
            }
            save_file(quantized, str(folder / WEIGHTS))
        answer_of(formats, own_nll=[5.5] * request.own_windows or None).save(folder / ANSWER)

    found = []
    monkeypatch.setattr(peers, "python_of", lambda peer, pythons: found.append(peer))
    monkeypatch.setattr(peers, "run_worker", run_worker)
    short = {}
    for split in ("calibration", "evaluation"):
        text = load_text(DataConfig(name="synthetic", split=split))
        short[split] = dataclasses.replace(text, text=text.text[:4096])
    monkeypatch.setattr(texts, "load_text", lambda config: short[config.split])
    command = ["tiny_random", "--out", str(tmp_path), "--peers", "auto_round:sign_round", *COMMON]
    command += ["--quantized", "W+A", "W", "--rules", "floor"]
    assert peers.main(command) == 1 and "it died" in capsys.readouterr().err
    assert peers.main(command) == 0
    assert "nats/token from ours: it may be read wrongly" in capsys.readouterr().out
    scheme = ("auto_round", "auto_scheme")
    assert asked == [scheme, scheme, ("auto_round", "sign_round")]
    assert found == ["auto_round"] * 4, "that a tool is there is asked before a cell and its search"
    (busy,) = tmp_path.glob("claims/auto_round-sign_round*")
    with claimed(busy):
        assert peers.main(command) == 0
    assert f"{busy.name}: another process runs it" in capsys.readouterr().out
    assert peers.main(command) == 0 and len(asked) == 3
    assert not list(tmp_path.glob("cells/*/failed.json"))
    assert peers.main([*command, "--windows", "1"]) == 1 and len(asked) == 3
    assert "with windows=2, not windows=1: give another --out" in capsys.readouterr().err
    assert not list(tmp_path.glob("cells/*/failed.json"))
    done = tmp_path / "model" / "done.json"
    own = done.read_text()
    done.write_text(json.dumps(json.loads(own) | {"id": "another"}))
    assert peers.main([*command, "--seeds", "1"]) == 1
    assert "/model has the model" in capsys.readouterr().err
    done.write_text("{")
    assert peers.main([*command, "--seeds", "1"]) == 1
    assert "done.json is not a JSON object" in capsys.readouterr().err
    done.write_text(own)
    (tmp_path / "cells" / busy.name.replace("-0", "-2")).write_text("no folder")
    assert peers.main([*command, "--seeds", "2"]) == 1
    assert "File exists" in capsys.readouterr().err

    records = [Record.load(p) for p in sorted(tmp_path.glob("cells/*/record.json"))]
    nearest, rounded = ([row.nll for row in record.rows] for record in records)
    assert nearest == rounded  # these weights are those to nearest
    assert nearest[0] != nearest[1]
    assert [row.element_bits for row in records[0].rows] == [4, 4]
    page, _ = peers_page(records)
    assert "| auto-round AutoScheme | 5 | 4.000 | 1 |" in page
    assert "| auto-round SignRound (weights) | 5 | 4.000 | 1 |" in page
    assert "| auto-round AutoScheme | mxfp4/mxfp8_e4m3 | float32 | 1 | 2 | 5.50000 |" in page
    assert "Against the best other tool" not in page  # nothing of ours is there

    cell = next(tmp_path.glob("cells/*auto_scheme*"))
    whole = json.loads((cell / "record.json").read_text())
    for wrong in ('{"x', *(json.dumps(whole | of) for of in ({"results": []}, {"actual": {}}))):
        (cell / "record.json").write_text(wrong)
        assert peers.main([*command, "--peers", "auto_round:auto_scheme"]) == 1
        said = "record.json is damaged or of another version: delete it, and"
        assert said in capsys.readouterr().err
    (cell / "record.json").unlink()
    (cell / ANSWER).write_text('{"x')
    assert peers.main([*command, "--peers", "auto_round:auto_scheme"]) == 1
    assert f"{ANSWER} is damaged" in capsys.readouterr().err


WORKER = """#!{python}
import sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from scripts.claiming import claimed
from scripts.peers.protocol import end_with
descriptor = int(sys.argv[-1])
assert descriptor > 2  # none of the standard ones
end_with(descriptor)
with claimed(Path({folder!r}, "runs"), wait=True):
    Path({folder!r}, "began").touch()
    time.sleep(60)
"""
"""Of a peer that takes its time."""


@pytest.fixture
def slow(tmp_path):
    """An interpreter that runs WORKER whatever it is asked."""
    python = tmp_path / "python"
    place = {"python": sys.executable, "root": str(tools.ROOT), "folder": str(tmp_path)}
    python.write_text(WORKER.format(**place))
    python.chmod(0o755)
    return python


def ends_with(folder, target, *arguments):
    """Whether what a process started ends when that process is killed."""
    command = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    command.start()
    while not (folder / "began").exists():
        assert command.is_alive()
        time.sleep(0.01)
    command.kill()
    command.join()
    killed = time.monotonic()
    with claimed(folder / "runs", wait=True):
        return time.monotonic() - killed < 30


def test_a_worker_ends_with_the_command_that_started_it(tmp_path, monkeypatch, slow):
    monkeypatch.setattr(peers, "python_of", lambda peer, given: slow)
    assert ends_with(tmp_path, peers.run_worker, "ours", tmp_path, {})


def test_cells_at_once_end_with_the_command_that_started_them(tmp_path, monkeypatch, slow):
    monkeypatch.setattr(sys, "executable", str(slow))
    assert ends_with(tmp_path, peers.run_together, ["x"], 2, "cpu")


# ---------------------------------------------------------------- in their environments

HOME = Path(os.environ.get("DMX_PEERS", tools.ROOT / ".venv-peers"))


def installed(peer, *methods):
    environment = tools.PEERS[peer].environment
    there = (HOME / str(environment) / "bin" / "python").is_file()
    why = f"{peer} is not in {HOME}: make peers PEERS={environment}"
    marks = [pytest.mark.peers, pytest.mark.skipif(not there, reason=why)]
    return [pytest.param(f"{peer}:{m}", marks=marks, id=f"{peer}:{m}") for m in methods]


TOLD = pytest.mark.parametrize("told", [[], ["--option", "inputs=bf16"]], ids=["W+A", "W"])


@TOLD
@pytest.mark.parametrize(
    "name",
    [
        *installed("auto_round", "auto_scheme"),
        *installed("modelopt", "gradient", "kl_div"),
    ],
)
def test_a_peers_choice_is_read_rightly(name, told, tmp_path):
    """Its own model, quantized as it was told, has the losses of ours with the formats that were read."""
    command = ["tiny_llama", "--out", str(tmp_path), "--peers", name, *told, *COMMON]
    assert peers.main(command) == 0
    (record,) = (Record.load(p) for p in tmp_path.glob("cells/*/record.json"))
    own = record.actual["own"]
    assert own["theirs"] == pytest.approx(own["ours"], abs=1e-4)
    assert len(set(record.actual["formats"].values())) == 2
    bits = record.rows[0].element_bits
    assert 4 < bits <= 5 and record.actual["said_bits"] == pytest.approx(bits, abs=1e-3)


PUBLISHED = os.environ.get("DMX_PUBLISHED")
"""Folder of brevitas_examples/papers/dMX in a copy of Brevitas's repository."""


@pytest.mark.parametrize("name", installed("brevitas", "dmx"))
@pytest.mark.skipif(not PUBLISHED, reason="DMX_PUBLISHED names no folder of the published plugins")
@pytest.mark.parametrize("more", [[], ["compile=no"]], ids=["compiled", "not compiled"])
def test_the_published_dmx_runs_and_is_read_rightly(name, more, tmp_path):
    command = ["tiny_llama", "--out", str(tmp_path), "--peers", name, *COMMON, "--units", "layer"]
    assert peers.main([*command, "--option", f"dmx={PUBLISHED}", "steps=3", *more]) == 0
    (record,) = (Record.load(p) for p in tmp_path.glob("cells/*/record.json"))
    own = record.actual["own"]
    assert own["theirs"] == pytest.approx(own["ours"], abs=1e-4)


@pytest.mark.parametrize("name", installed("brevitas", "dmx_rotated"))
@pytest.mark.skipif(not PUBLISHED, reason="DMX_PUBLISHED names no folder of the published plugins")
def test_the_published_dmx_with_rotations_is_read_rightly(name, tmp_path):
    """The rotated model runs here, its online rotations too, and loses what its own does."""
    command = ["tiny_llama", "--out", str(tmp_path), "--peers", name, *COMMON, "--units", "layer"]
    more = [f"dmx={PUBLISHED}", "steps=3", "compile=no"]
    assert peers.main([*command, "--option", *more]) == 0
    (record,) = (Record.load(p) for p in tmp_path.glob("cells/*/record.json"))
    assert record.actual["gives"] == "weights" and record.actual["chose_formats"]
    own = record.actual["own"]
    assert own["theirs"] == pytest.approx(own["ours"], abs=1e-4)


@TOLD
@pytest.mark.parametrize(
    "name",
    [
        *installed("auto_round", "sign_round"),
        *installed("llmcompressor", "gptq"),
        *installed("quark", "gptq", "qronos"),
    ],
)
def test_finished_weights_are_read(name, told, tmp_path, monkeypatch):
    """Of formats that are given here: the search before is not what is tested."""
    run_worker = peers.run_worker

    def search_apart(peer, folder, pythons):
        request = Request.load(folder / "request.json")
        if request.given is not None:
            return run_worker(peer, folder, pythons)
        names = [layer for unit in request.units for layer in unit]
        formats = {
            n: request.formats["layers.0.self_attn.q" in n or ".0.self_attn.k" in n] for n in names
        }
        formats |= {n: request.formats[1] for n in names if ".0.self_attn.v" in n}
        answer_of(formats).save(folder / ANSWER)

    monkeypatch.setattr(peers, "run_worker", search_apart)
    command = ["tiny_llama", "--out", str(tmp_path), "--peers", name, *COMMON]
    if "sign_round" in name:
        told = ["--option", *told[1:], "iters=2"]
    assert peers.main([*command, *told]) == 0
    scheme, finished = (Record.load(p) for p in sorted(tmp_path.glob("cells/*/record.json")))
    assert finished.actual["gives"] == "weights"
    own = finished.actual["own"]
    if (
        own is None
    ):  # rules that are none of ours; SignRound keeps nearest where it finds nothing better
        assert finished.rows[0].nll != scheme.rows[0].nll
    else:
        assert own["theirs"] == pytest.approx(own["ours"], abs=1e-4)
