"""A run of a sweep takes a GPU that no other run holds, of those that it was left to see. No GPU is needed."""

import os

import pytest
import torch

from experiments.running import cards


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two GPUs, and no run on them."""
    monkeypatch.delenv(cards.VISIBLE, raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(cards, "locks_folder", lambda: tmp_path)
    monkeypatch.setattr(cards, "_held", None)
    monkeypatch.setattr(cards, "uuids", dict)
    yield monkeypatch
    if (held := cards.held_card()) is not None:
        os.close(held.descriptor)


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (None, ["0", "1"]),
        ("3", ["3"]),
        ("2, 0", ["2", "0"]),
        ("GPU-8932f937,MIG-1f2e", ["GPU-8932f937", "MIG-1f2e"]),
        ("1,-1,0", ["1"]),
        ("", []),
        ("NoDevFiles", []),
    ],
)
def test_the_cards_are_those_that_cuda_would_see(said, seen, machine):
    if said is not None:
        machine.setenv(cards.VISIBLE, said)
    assert cards.visible_cards() == seen


def test_each_takes_a_card_of_its_own_while_there_is_one(tmp_path):
    taken = [cards.take_card(["0", "GPU-b"], tmp_path, {}) for _ in range(5)]
    assert [(c.name, c.sharing) for c in taken] == [
        ("0", 0),
        ("GPU-b", 0),
        ("0", 1),
        ("GPU-b", 1),
        ("0", 2),
    ]
    os.close(taken[1].descriptor)
    taken[1] = cards.take_card(["0", "GPU-b"], tmp_path, {})
    assert (taken[1].name, taken[1].sharing) == ("GPU-b", 0), "one that was given back is free"
    for card in taken:
        os.close(card.descriptor)


def test_a_process_sees_the_card_that_it_took_and_keeps_it(machine):
    machine.setenv(cards.VISIBLE, "5,7")
    other = cards.take_card(["5"], cards.locks_folder(), {})
    first, second = cards.own_card("auto"), cards.own_card("cuda")
    os.close(other.descriptor)
    assert first is second and first.name == "7"
    assert os.environ[cards.VISIBLE] == "7" and cards.visible_cards() == ["7"]


@pytest.mark.parametrize("held", ["GPU-1f", "GPU-1f2e", "1"])
def test_a_card_is_one_by_its_number_and_by_its_uuid(held, machine):
    known = {"0": "GPU-0a3b", "1": "GPU-1f2e"}
    machine.setattr(cards, "uuids", lambda: known)
    machine.setenv(cards.VISIBLE, "1,0")
    other = cards.take_card([held], cards.locks_folder(), known)
    assert cards.own_card("auto").name == "0"
    os.close(other.descriptor)
    assert cards.whole_name("GPU-", known) == "GPU-", "of two"
    assert cards.whole_name("MIG-1f2e", known) == "MIG-1f2e"


@pytest.mark.parametrize(
    ("said", "order", "found"),
    [
        ("0, GPU-a, NVIDIA H200\n1, GPU-b, NVIDIA H200\n", "", {"0": "GPU-a", "1": "GPU-b"}),
        ("0, GPU-a, A, x\n1, GPU-b, B\n", "", {}),
        ("0, GPU-a, A, x\n1, GPU-b, B\n", "PCI_BUS_ID", {"0": "GPU-a", "1": "GPU-b"}),
        ("No devices were found\n", "", {}),
        (None, "", {}),
    ],
)
def test_numbers_have_uuids_where_they_are_those_of_cuda(said, order, found, monkeypatch, tmp_path):
    if said is not None:
        (tmp_path / "said").write_text(said)
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n/bin/cat {tmp_path}/said\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert cards.uuids() == found


@pytest.mark.parametrize(
    ("device", "setting"),
    [
        ("cuda:1", {}),
        ("cpu", {}),
        ("auto", {"WORLD_SIZE": "2"}),
        ("auto", {cards.VISIBLE: "1"}),
        ("auto", {cards.VISIBLE: ""}),
    ],
)
def test_what_leaves_no_choice_is_left_alone(device, setting, machine):
    for name, value in setting.items():
        machine.setenv(name, value)
    before = os.environ.get(cards.VISIBLE)
    assert cards.own_card(device) is None
    assert os.environ.get(cards.VISIBLE) == before


def test_a_process_that_cuda_has_started_in_keeps_what_it_sees(machine):
    machine.setattr(torch.cuda, "is_initialized", lambda: True)
    assert cards.own_card("auto") is None and cards.VISIBLE not in os.environ
