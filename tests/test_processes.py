"""Two processes with the global batch of one give what one gives: histories, scores, choices and rounded weights."""

import json
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dmx.errors import DataError
from dmx.processes import Processes
from tests.forked import Forked, places

# The search of the test, run by every process; histories go into the folder of its argument.
SCRIPT = """
import json, sys, numpy as np, torch, dmx
from dmx.searching import search_space
from dmx.searching.adaptive import held_kls
from dmx.evaluate.perplexity import window_losses
from dmx.evaluate.zero_shot.requests import Request
from dmx.evaluate.zero_shot.scoring import Scorer
from dmx.processes import Processes
from dmx.searching.config import DescentConfig, PolishConfig
from dmx.models import ModelConfig, TinyConfig, load_model
torch.set_num_threads(1)
processes = Processes(torch.device(sys.argv[2]))
model = load_model(ModelConfig(id="tiny", dtype="float32", tiny=TinyConfig()), processes.own_device).model
generator = torch.Generator().manual_seed(0)
batches = [torch.randint(0, 288, (4, 32), generator=generator) for _ in range(3)]
for objective in ("cross_entropy", "kl"):
    config = dmx.SearchConfig(
        steps=12, objective=objective, polish=PolishConfig(rounds=2),
        descent=DescentConfig(
            penalty="exact", gradient_scale="elements", lr=1.0 if objective == "cross_entropy" else 30.0,
            evaluate_every=4, checkpoint_every=5,
        ),
    )
    folder = sys.argv[1] + "/" + objective
    dmx.search(model, batches, dmx.Budget(5.0), config, folder=folder)
for name in ("aumann_shapley", "kl_per_bit", "fisher"):
    found = dmx.search(
        model, batches, dmx.Budget(5.0), dmx.SearchConfig(name=name), folder=sys.argv[1] + "/" + name
    )
config = dmx.SearchConfig(name="adaptive")
space = search_space(model, config)
dearest, cheapest = ([i] * len(space.units) for i in (1, 0))
judged = held_kls(model, space, config, batches, [np.array(dearest), np.array(cheapest)])
dmx.gptq(model, found.assignment, batches, folder=sys.argv[1])
tokens = torch.randint(0, 288, (9 * 32,), generator=generator)
losses = window_losses(model, tokens, window=32, batch_size=2, processes=processes)
requests = [Request(t[:n].tolist(), t[n:].tolist()) for n, t in enumerate(tokens.split(11), start=1) if n < 9]
answers = Scorer(None, quiet=True).answers(model, requests, "", processes)
try:
    own = [batch.roll(processes.rank, 0) for batch in batches]
    dmx.search(model, own, dmx.Budget(5.0), dmx.SearchConfig(name="weight_mse"))
    refused = None
except dmx.errors.DataError as error:
    refused = str(error)
said = {"refused": refused, "judged": judged.tolist(), "losses": losses.tolist(), "answers": answers, "main": processes.agree(lambda: processes.rank)}
json.dump(said, open(f"{sys.argv[1]}/said{processes.rank}.json", "w"))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def test_two_processes_give_the_history_of_one(tmp_path, monkeypatch, device):
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, one is here")
    arguments = ("-c", SCRIPT, tmp_path / "two", device.type)
    started = [Forked(*arguments, environment=place) for place in places(2)]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "one"), device.type])
    exec(SCRIPT, {})
    for process in started:
        assert process.wait() == 0, process.outputs()[1][-2000:]
    for objective in ("cross_entropy", "kl"):
        rows = [
            [json.loads(r) for r in (tmp_path / n / objective / "history.jsonl").open()]
            for n in ("one", "two")
        ]
        assert len(rows[0]) == len(rows[1]) == 12
        for one, two in zip(*rows, strict=True):
            values = {k: v for k, v in one.items() if v is not None and k != "seconds"}
            assert {k for k, v in two.items() if v is not None} - {"seconds"} == set(values)
            for key, value in values.items():
                # Products of half the rows and means of two halves round otherwise, at 1e-7; a
                # value that this moves over a rounding edge of a format counts for 1e-5.
                share = 0.02 if key == "grad_norm" else 1e-4
                assert two[key] == pytest.approx(value, rel=share, abs=1e-5), (one["step"], key)
        one, two = (
            np.load(tmp_path / n / objective / "offsets.npz")["raw"] for n in ("one", "two")
        )
        np.testing.assert_allclose(two, one, rtol=0, atol=1e-3)
        rounds = [
            [json.loads(r) for r in (tmp_path / n / objective / "polish.jsonl").open()]
            for n in ("one", "two")
        ]
        for a, b in zip(*rounds, strict=True):
            assert b.pop("kl") == pytest.approx(a.pop("kl"), rel=1e-3)
            assert a == b
        # They part, and are held apart by more than the clamp: between 0 and 2.
        assert np.std(one[-1]) > 0.01 and ((one[-1] > 0) & (one[-1] < 2)).sum() > 1
    for name in ("aumann_shapley", "kl_per_bit", "fisher"):
        one, two = (sorted((tmp_path / n / name / "scores").glob("*.json")) for n in ("one", "two"))
        assert [path.name for path in one] == [path.name for path in two] and len(one) == 2
        known: list[float] = []
        for a, b in zip(one, two, strict=True):
            values = [json.loads(path.read_text())["result"]["values"] for path in (a, b)]
            # Shares along the path have signs, and are 0 at the dearest format.
            apart = 1e-3 * np.abs(values[0]).max() if name == "aumann_shapley" else 0
            np.testing.assert_allclose(values[1], values[0], rtol=1e-4, atol=apart)
            assert name == "aumann_shapley" or min(values[0]) > 0
            known += values[0]
        assert np.abs(known).max() > 0
    one, *two = (
        json.loads((tmp_path / n).read_text())
        for n in ("one/said0.json", "two/said0.json", "two/said1.json")
    )
    assert two[0] == two[1] and len(set(one["losses"])) == 9
    rounding = 0 if device.type == "cpu" else 1e-6
    assert two[0]["losses"] == pytest.approx(one["losses"], rel=rounding, abs=0)
    for a, b in zip(one["judged"], two[0]["judged"], strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    assert sum(one["judged"][0]) < sum(one["judged"][1])
    assert two[0]["main"] == 0
    assert one["refused"] is None and "processes were given different batches" in two[0]["refused"]
    for (value, hit), (other, other_hit) in zip(one["answers"], two[0]["answers"], strict=True):
        assert other == pytest.approx(value, rel=1e-5) and other_hit == hit and value < 0
    states = [sorted((tmp_path / n / "gptq_state").iterdir()) for n in ("one", "two")]
    for a, b in zip(*states, strict=True):
        one, two = load_file(a), load_file(b)
        assert list(one) == list(two)
        # A sum that rounds otherwise may move a weight that lies between two values, and all that make
        # good its error then.
        differ = sum(int((one[k] != two[k]).sum()) for k in one)
        assert differ <= 0.02 * sum(tensor.numel() for tensor in one.values())


OTHERWISE = {
    "linear_alone": "a linear layer is sharded by itself",
    "blocks_alone": "model.embed_tokens.weight is whole in every process",
    "cast": "its weights are cast to torch.bfloat16",
    "of_experts": "the experts of model.layers.0.mlp.experts lie in 3-D parameters",
}


def assert_same(whole, pieces, share, at=""):
    """Both take the same rows in the same order; sums of gradients may round otherwise."""
    if isinstance(whole, dict | list):
        keys = whole if isinstance(whole, dict) else range(len(whole))
        assert len(whole) == len(pieces)
        for key in keys:
            assert_same(whole[key], pieces[key], share, f"{at}.{key}")
    else:
        is_measured = isinstance(whole, float)
        assert pieces == (pytest.approx(whole, rel=share) if is_measured else whole), at


# What two processes make of a model that is wrapped or sharded; said into the file of its argument.
WRAPPED = """
import copy, json, sys, torch, dmx
import torch.distributed as dist
from dmx.applying.apply import applied
from dmx.evaluate.perplexity import window_losses
from dmx.evaluate.zero_shot.requests import Request
from dmx.evaluate.zero_shot.scoring import Scorer
from dmx.formats import MXFP4, NVFP4
from dmx.models import ModelConfig, load_model
from dmx.models.sharding import own_bytes
from dmx.processes import Processes
from dmx.searching import uniform_assignment
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from dmx.models import TinyConfig
from dmx.models.tiny import make_tiny
from tests.mixtures import mixture
torch.set_num_threads(1)
processes = Processes(torch.device(sys.argv[2]))
device = processes.own_device
def same(a, b):  # on a GPU products of other memory may add in another order
    return torch.equal(a, b) if device.type == "cpu" else torch.allclose(a, b, atol=1e-4)
def blocks_and_all(model):
    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model)
def flat(model, **named):
    return FullyShardedDataParallel(model, device_id=device, **named)
def named(model):
    return flat(model, use_orig_params=True)
plain = make_tiny(TinyConfig()).to(device)
batches = list(torch.randint(0, 257, (2, 2, 32), generator=torch.Generator().manual_seed(3)))
config = dmx.SearchConfig(name="differentiable", steps=3, descent=dmx.searching.config.DescentConfig(raw_start=1.0))
def search(model):
    return dmx.search(model, batches, dmx.Budget(5.0), config).assignment
found = search(plain)
dist_model = DistributedDataParallel(copy.deepcopy(plain))
wrapped = search(dist_model)
learned = dmx.learn_weights(dist_model, wrapped, batches, dmx.LearnConfig(steps=2, warmup=1, lr=1e-3))
said = {"ddp": [wrapped.formats == found.formats, wrapped.unquantized, sorted(learned.formats)], "names": sorted(found.formats)}
def logits(model):
    return model(input_ids=batches[0].to(device)).logits.detach()
expected = logits(dmx.apply(copy.deepcopy(plain), wrapped))
said["ddp applied"] = same(logits(dmx.apply(dist_model, wrapped)), expected)
tokens = torch.randint(0, 257, (5 * 32,), generator=torch.Generator().manual_seed(4))
requests = [Request(t[:n].tolist(), t[n:].tolist()) for n, t in enumerate(tokens.split(11), start=1) if n < 6]
def measured(model):
    said = {"losses": window_losses(model, tokens, window=32, batch_size=2, processes=processes).tolist()}
    with applied(model, found, cache_weights=True):
        said["quantized"] = window_losses(model, tokens, window=32, batch_size=2, processes=processes).tolist()
        said["answers"] = Scorer(2, quiet=True).answers(model, requests, "", processes)
    own = dict(steps=3, descent=dmx.searching.config.DescentConfig(gradient_checkpointing=True, penalty="exact"))
    joint = dict(own, joint=dmx.searching.config.JointConfig(warmup=1))
    settings = {"weight_mse rotated": {"transform": "hadamard_block"}, "differentiable": own, "joint": joint, "kl_per_bit": {}, "fisher": {}, "weight_mse": {}}
    for name, named in settings.items():
        objective = {"objective": "kl"} if "steps" in named else {}
        config = dmx.SearchConfig(name=name.split()[0], **objective, **named)
        result = dmx.search(model, batches, dmx.Budget(5.0), config)
        if "transform" in named:
            with applied(model, result.assignment):
                said["rotated"] = window_losses(model, tokens, window=32, batch_size=2, processes=processes).tolist()
            learned = dmx.learn_weights(model, result.assignment, batches, dmx.LearnConfig(steps=1, warmup=1)).weights
            said["rotated learned"] = [learned["kl_before"], learned["kl_after"]]
        said[name] = [dict(result.assignment.formats), result.preference.tolist()]
        said[name] += [[row[k] for k in ("loss", "grad_norm", "soft_loss")] for row in result.history]
    wide = dmx.calibrate_inputs(model, uniform_assignment(model, NVFP4, config), batches)
    wide = dmx.share_scales(model, wide)
    said["ranges"] = [dict(wide.input_amax), dict(wide.weight_amax)]
    rounded = dmx.gptq(model, found, batches)
    with applied(model, rounded):
        said["gptq"] = window_losses(model, tokens, window=32, batch_size=2, processes=processes).tolist()
    if device.type == "cpu":
        said["gptq file"] = rounded.weights["sha256"]
    said["as it was"] = window_losses(model, tokens, window=32, batch_size=2, processes=processes).tolist()
    assert said["as it was"] == said["losses"]
    return said
def learn(model, folder, **named):
    assignment = uniform_assignment(model, MXFP4, dmx.SearchConfig(name="uniform"))
    config = dmx.LearnConfig(steps=4, warmup=2, **named)
    done = dmx.learn_weights(model, assignment, batches, config, folder=f"{sys.argv[1]}.{folder}").weights
    return [done[key] for key in ("kl_before", "kl_after", "sha256")]
pieces = load_model(ModelConfig(id="tiny", dtype="float32", tiny=TinyConfig()), device, processes).model
said["share"] = own_bytes(pieces) / own_bytes(plain)
said["whole model"], said["pieces"] = measured(plain), measured(pieces)
said["learned"] = [learn(plain, "whole", lr=1e-4), learn(pieces, "pieces", lr=1e-4)]
dist.barrier()
said["learned"].append(learn(plain, "pieces", lr=1e-4))  # steps of the other's checkpoint: there are none left
said["mode"] = [p.requires_grad for p in pieces.parameters()] == [p.requires_grad for p in plain.parameters()]
asked = {
    "search.transform=hadamard_full": lambda m: dmx.search(m, batches, dmx.Budget(5.0), dmx.SearchConfig(transform="hadamard_full")),
    "search.oom=halve": lambda m: dmx.search(m, batches, dmx.Budget(5.0), dmx.SearchConfig(oom="halve")),
    "learn.train=scales": lambda m: learn(m, "", train="scales"),
    "learn.block_steps=1": lambda m: learn(m, "", block_steps=1),
    "learn.optimizer_state=int8": lambda m: learn(m, "", optimizer_state="int8"),
}
said["asked"] = {}
for name, use in asked.items():
    try:
        use(pieces)
        said["asked"][name] = "not refused"
    except dmx.errors.ModelError as error:
        said["asked"][name] = str(error)
def linear_alone(model):
    fully_shard(model.model.layers[0].mlp.up_proj)
    return blocks_and_all(model)
def blocks_alone(model):
    for block in model.model.layers:
        fully_shard(block)
    return model
def cast(model):
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
def of_experts(model):
    return blocks_and_all(mixture())
said["otherwise"] = {}
for shard in (linear_alone, blocks_alone, cast, of_experts):
    try:
        search(shard(copy.deepcopy(plain)))
        said["otherwise"][shard.__name__] = "not refused"
    except dmx.errors.ModelError as error:
        said["otherwise"][shard.__name__] = str(error)
uses = {
    "search": search, "apply": lambda m: dmx.apply(m, found), "gptq": lambda m: dmx.gptq(m, found, batches),
    "learn": lambda m: dmx.learn_weights(m, found, batches),
    "export": lambda m: dmx.export(m, found, sys.argv[1] + ".x", target="quark", verify=False),
}
for shard in (blocks_and_all, flat, named):
    model = shard(copy.deepcopy(plain))
    for name, use in uses.items():
        if shard is blocks_and_all and name != "export":
            continue
        try:
            use(model)
            said[f"{shard.__name__} {name}"] = "not refused"
        except dmx.errors.ModelError as error:
            said[f"{shard.__name__} {name}"] = str(error)
    model = shard(dmx.apply(copy.deepcopy(plain), found))
    said[f"{shard.__name__} applied before"] = same(logits(model), expected)
json.dump(said, open(sys.argv[1] + "." + str(dist.get_rank()), "w"))
dist.barrier()
dist.destroy_process_group()
"""


def test_a_model_under_ddp_or_fsdp2_gives_what_a_whole_one_gives_and_fsdp1_is_refused(
    tmp_path, device
):
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices, one is here")
    arguments = ("-c", WRAPPED, tmp_path / "said", device.type)
    started = [Forked(*arguments, environment=place) for place in places(2)]
    for process in started:
        assert process.wait(300) == 0, process.outputs()[1][-2000:]
    for rank in range(2):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        names = said.pop("names")
        assert said.pop("ddp") == [True, ["lm_head"], names] and said.pop("ddp applied")
        assert not [name for name in names if "module" in name]
        for shard in ("blocks_and_all", "flat", "named"):
            assert said.pop(f"{shard} applied before"), "sharded with the assignment applied"
        assert said.pop("share") <= 0.55 and said.pop("mode")
        share = 1e-5 if device.type == "cpu" else 1e-3
        assert_same(said.pop("whole model"), said.pop("pieces"), share)
        whole, pieces, resumed = said.pop("learned")
        assert resumed[2] == pieces[2] and resumed[1] == pytest.approx(pieces[1], rel=share)
        assert pieces[1] < pieces[0]
        assert pieces[:2] == pytest.approx(whole[:2], rel=share)
        for setting, message in said.pop("asked").items():
            assert message.startswith(f"{setting}: the model is sharded over processes"), message
        otherwise = said.pop("otherwise")
        for name, found in OTHERWISE.items():
            assert otherwise[name].startswith(f"the model is sharded over processes, and {found}")
        assert len(said) == 11
        for use, message in said.items():
            assert "is sharded over processes" in message, (use, message)
            assert "Give the model before it is sharded" in message


def test_one_process_needs_nothing_set_up():
    processes = Processes(torch.device("cpu"))
    batch = torch.arange(8).reshape(4, 2)
    assert processes.is_main and torch.equal(processes.own_rows(batch), batch)
    assert processes.mean(torch.tensor(3.0)) == 3


def test_rows_that_cannot_be_shared_evenly_are_refused():
    processes = Processes(torch.device("cpu"))
    processes.size = 3
    with pytest.raises(DataError, match=r"4 rows cannot be shared by 3 processes: choose a batch"):
        processes.own_rows(torch.zeros(4, 2, dtype=torch.int64))
    processes.size, processes.rank = 2, 1
    assert processes.own_rows(torch.arange(8).reshape(4, 2)).tolist() == [[4, 5], [6, 7]]
