"""Layers that an engine merges, read in its source: our table has them."""

from pathlib import Path

import pytest

from scripts import fused_groups
from scripts.fused_groups import Source, beyond, differences

REGISTRY = """
MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("mistral", "MistralForCausalLM"),
    "NewForCausalLM": ("new", "NewForCausalLM"),
}
"""
LLAMA = """
class LlamaForCausalLM:
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "o_proj": ["o_proj"]}
    def load_weights(self):
        stacked_params_mapping = [(".gate_up_proj", ".gate_proj", 0), (".gate_up_proj", ".up_proj", 1)]
"""
MISTRAL = """
from .llama import LlamaForCausalLM
class MistralForCausalLM(LlamaForCausalLM):
    pass
"""
NEW = """
class NewForCausalLM:
    mapper = WeightsMapper(orig_to_new_stacked={".a_proj": (".ab_proj", 0), ".b_proj": (".ab_proj", 1)})
    def __init__(self):
        self.packed_modules_mapping["gate_up_proj"] = ["gate_proj", "up_proj"]
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    for name, text in (
        ("registry", REGISTRY),
        ("llama", LLAMA),
        ("mistral", MISTRAL),
        ("new", NEW),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(fused_groups, "VLLM_ARCHITECTURES", ["llama", "mistral", "opt"])
    return Source(tmp_path)


def test_merged_layers_are_found_in_every_form_that_they_are_written_in(source):
    groups = {frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"})}
    assert source.groups("llama") == source.groups("mistral") == groups
    assert source.groups("new") == {
        frozenset({"gate_proj", "up_proj"}),
        frozenset({"a_proj", "b_proj"}),
    }
    assert beyond(source) == {"new": "a_proj/b_proj"}


def test_what_the_table_lacks_is_said_by_architecture(source):
    assert differences(source) == {"opt": "no model of vLLM is called optforcausallm"}
    path = source.folder / "llama.py"
    path.write_text(LLAMA.replace('"k_proj", ', ""))
    other = differences(Source(source.folder))
    assert other["llama"] == other["mistral"] == "q_proj/v_proj"


@pytest.mark.engine
@pytest.mark.skipif(
    not Path(fused_groups.ENVIRONMENT).is_file(),
    reason=f"needs an inference engine in {fused_groups.ENVIRONMENT}: make engine-env",
)
def test_our_table_is_that_of_the_installed_engine():
    assert differences(Source(fused_groups.models_folder(fused_groups.ENVIRONMENT))) == {}
