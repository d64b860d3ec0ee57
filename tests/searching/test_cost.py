"""What makes a search cheap changes no number: reused prefixes, checkpointing, few saved tensors."""

import itertools

import numpy as np
import pytest
import torch

from dmx.assignment.budget import Budget
from dmx.models.replay import PrefixReplay, prefix_replay_is_exact
from dmx.models.running import model_logits
from dmx.searching import disturbances, search_space
from dmx.searching.bank import searching_model
from dmx.searching.differentiable import DifferentiableSearch
from dmx.searching.disturbances import split_evenly
from dmx.searching.offsets import anneal
from dmx.searching.scan import Scan
from tests.settings import search_config


@pytest.fixture
def tiny(make_tiny):
    model = make_tiny("llama", layers=3).model.eval()
    generator = torch.Generator().manual_seed(0)
    return model, [torch.randint(256, (2, 48), generator=generator) for _ in range(2)]


def kl_scores(model, batches, config):
    space = search_space(model, config)
    scan = Scan(model, batches, space, config, fingerprint={}, folder=None)
    return scan.kl(range(len(space.formats)))


@pytest.mark.parametrize(
    ("units", "dtype"), [("layer", "float32"), ("fused", "float32"), ("fused", "bfloat16")]
)
def test_a_scan_with_reused_prefixes_gives_the_scores_of_the_naive_one(
    units, dtype, make_tiny, tiny, monkeypatch
):
    model, batches = make_tiny("llama", dtype=dtype, layers=3).model.eval(), tiny[1]
    config = search_config(name="kl", units=units, family="mxfp8_mxfp6_mxfp4")
    monkeypatch.setitem(disturbances.STACKED_LOGITS, "cpu", 3 * 2 * 48 * 288)  # three at once
    assert prefix_replay_is_exact(model, batches[0][:1])
    reused = kl_scores(model, batches, config)
    monkeypatch.setattr(disturbances, "prefix_replay_is_exact", lambda *_: False)
    naive = kl_scores(model, batches, config)
    # Stacked batches may round otherwise inside matrix products.
    tolerance = 1e-4 if dtype == "float32" else 0.05
    np.testing.assert_allclose(reused, naive, rtol=tolerance, atol=1e-7)
    assert naive[:, 0].max() > 20e-7


def test_a_block_alone_runs_once_for_each_disturbance(tiny):
    """Blocks before the disturbed one never run again."""
    model, batches = tiny
    calls = [0] * 3
    for i, block in enumerate(model.model.layers):

        def count(*_, i=i):
            calls[i] += 1

        block.register_forward_hook(count)
    passes = PrefixReplay(model)
    with torch.no_grad():
        full = passes.reference(batches[0])
        assert calls == [1, 1, 1]
        output = passes.block_output(1)
        assert calls == [1, 2, 1]
        assert torch.equal(output, passes._arguments[2][0][0])  # what the next block was given
        assert torch.equal(passes.logits_after(batches[0], 1, [output]), full)
        assert calls[2] == 2


def test_disturbances_are_shared_out_evenly():
    jobs = [(i, 0) for i in range(7)]
    assert [len(p) for p in split_evenly(jobs, 5)] == [3, 4]
    for n, size in itertools.product(range(1, 12), range(1, 14)):
        parts = split_evenly(jobs[:n], size)
        assert list(itertools.chain(*parts)) == jobs[:n]
        assert all(0 < len(p) <= size for p in parts)


def gradient_of(model, batches, *, checkpointing):
    """Gradient of the raw offsets, and how often each block ran."""
    config = search_config(raw_start=1.0, steps=1, gradient_checkpointing=checkpointing)
    calls = [0] * len(model.model.layers)
    handles = []
    for i, block in enumerate(model.model.layers):

        def count(*_, i=i):
            calls[i] += 1

        handles.append(block.self_attn.register_forward_hook(count))
    search = DifferentiableSearch(
        model,
        batches,
        search_space(model, config),
        Budget(5.0),
        config,
        folder=None,
        fingerprint="",
    )
    gradients = []
    gradient = search._gradient
    search._gradient = lambda *a: gradients.append(gradient(*a)) or gradients[-1]
    search._measure = lambda *_: {}
    search.run()
    for handle in handles:
        handle.remove()
    return gradients[0][1], calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpointed_blocks_run_twice_and_the_gradient_is_the_same(dtype, make_tiny, tiny):
    model, batches = make_tiny("llama", dtype=dtype, layers=3).model.eval(), tiny[1]
    plain, once = gradient_of(model, batches, checkpointing=False)
    recomputed, twice = gradient_of(model, batches, checkpointing=True)
    assert once == [1, 1, 1] and twice == [2, 2, 2]
    assert plain.abs().max() > 0
    torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-8)


def test_a_step_saves_no_more_than_the_plain_model(tiny):
    """No derivative tensors: a searched layer keeps its input, its weight and eight numbers."""
    model, batches = tiny
    config = search_config()
    space = search_space(model, config)

    def saved_bytes(run):
        seen = {}

        def pack(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run()
        return sum(size for size, _ in seen.values())

    model.requires_grad_(False)
    handle = model.get_input_embeddings().register_forward_hook(
        lambda _m, _i, out: out.detach().requires_grad_()
    )
    plain = saved_bytes(lambda: model_logits(model, batches[0]).sum())
    # The plain model with frozen weights keeps no inputs of linear layers; ours needs them.
    inputs = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not model.lm_head:
            module.register_forward_pre_hook(lambda _m, args: inputs.append(args[0]))
    model_logits(model, batches[0])
    own = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in inputs}
    with searching_model(model, space, config.format_family, "floor") as bank:
        raw = torch.ones(len(space.units), requires_grad=True)
        bank.set_soft(anneal(raw, 0.4, config.format_family))
        searched = saved_bytes(lambda: model_logits(model, batches[0]).sum())
    handle.remove()
    assert searched <= plain + sum(own.values()) + 4096


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"penalty": "exact", "gradient_scale": "elements"},
    ],
    ids=str,
)
def test_a_step_waits_for_the_device_once(options, tiny, monkeypatch):
    """One transfer to the host a step, beside the model's own and between measurements."""
    model, batches = tiny
    config = search_config(steps=5, raw_start=1.0, **options)
    space = search_space(model, config)
    search = DifferentiableSearch(
        model, batches, space, Budget(5.0), config, folder=None, fingerprint=""
    )
    gradient, parts = torch.linspace(-1e-3, 1e-3, len(space.units)), torch.arange(3.0)
    transfers = []
    cpu = torch.Tensor.cpu
    with (
        monkeypatch.context() as patch,
        searching_model(model, space, config.format_family, "floor") as bank,
    ):
        patch.setattr(torch.Tensor, "cpu", lambda x: transfers.append(x.shape) or cpu(x))
        for name in ("tolist", "item", "__float__", "__bool__"):
            patch.setattr(
                torch.Tensor,
                name,
                lambda *_, name=name: pytest.fail(f"a step reads a tensor by {name}"),
            )
        search.step = 1  # no measurement at this one
        row = search.take_step(bank, lambda *_: (parts, gradient), 0)
    assert len(transfers) == 1
    assert (row["loss"], row["penalty"], row["soft_bits"]) == (0.0, 1.0, 2.0)
    assert np.array_equal(search.raw_rows[-1], search.raw.detach().numpy())
