"""Write a model under an assignment as another runtime loads it, and load it again to be sure.

python -m experiments.export assignment=outputs/run/assignment.json export.target=quark
python -m experiments.export assignment=a.json export.target=compressed_tensors windows=8
"""

from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

import dmx
from dmx.assignment import Assignment
from dmx.data import DataPair, encode, load_text
from dmx.evaluate.perplexity import perplexity_of
from dmx.exporting import EXPORT_TARGETS, PROFILES
from dmx.formats import ALIASES, BLOCK_FORMATS, check_choice, get_mx_format
from dmx.models import ModelConfig, load_model
from dmx.searching import SearchConfig, uniform_assignment
from experiments._config import ConfigError, RunConfig, _defaults, build_root
from experiments._run import console, entry_point


@dataclass(kw_only=True)
class ExportConfig:
    """Where to, and for whom."""

    folder: str
    """Must not exist."""
    target: str = "compressed_tensors"
    """assignment | compressed_tensors | quark | torchao, or names alone: llm_compressor |
    modelopt | auto_round | llama_cpp."""
    profile: str | None = None
    """Of compressed_tensors: vllm | transformers; null = the strictest that holds the formats."""
    inputs: bool = False
    """Have the runtime quantize inputs, too."""
    verify: bool = True
    """Load the folder in a fresh process and compare logits."""
    max_shard_gigabytes: float = 5.0
    """Of one safetensors file."""

    def __post_init__(self) -> None:
        check_choice(self.target, EXPORT_TARGETS, "export.target")
        if self.profile is not None:
            check_choice(self.profile, PROFILES, "export.profile")
        if not self.max_shard_gigabytes > 0:
            raise ConfigError(
                f"export.max_shard_gigabytes={self.max_shard_gigabytes} must be above 0"
            )


@dataclass(kw_only=True)
class ExportRun:
    """python -m experiments.export"""

    model: ModelConfig
    data: DataPair
    assignment: str
    """Path of an assignment.json; or the name of an MX format for a uniform one."""
    export: ExportConfig
    windows: int
    """> 0: verify on so many windows of the evaluation text, and say both perplexities."""
    window: int
    """tokens a window"""
    run: RunConfig

    def __post_init__(self) -> None:
        if self.windows < 0 or self.window < 2:
            raise ConfigError(f"windows={self.windows} must be at least 0, window={self.window} 2")
        if self.windows and not self.export.verify:
            raise ConfigError(f"windows={self.windows} needs export.verify=true")


_GROUPS = {"model": ModelConfig, "run": RunConfig}
ConfigStore.instance().store(
    name="_export",
    node={name: _defaults(cls) for name, cls in _GROUPS.items()}
    | {"export": _defaults(ExportConfig)},
    package="_global_",
)


@entry_point("export")
def main(cfg: DictConfig) -> None:
    config = build_root(ExportRun, cfg)
    asked = config.assignment
    uniform = asked in BLOCK_FORMATS or asked in ALIASES
    given = None if uniform else Assignment.load(asked)
    text = load_text(config.data.evaluation) if config.windows else None
    if config.run.threads is not None:
        import torch

        torch.set_num_threads(config.run.threads)
    loaded = load_model(config.model, config.run.torch_device())
    if given is None:
        block_format = get_mx_format(asked, setting="assignment")
        given = uniform_assignment(loaded.model, block_format, SearchConfig(name="uniform"))
    tokens = None
    if text is not None:
        stream = encode(loaded.tokenizer, text)
        count = config.windows * config.window
        if len(stream) < count:
            raise ConfigError(
                f"windows={config.windows} of window={config.window} need {count} tokens, "
                f"the evaluation text has {len(stream)}. Lower one of them."
            )
        tokens = stream[:count].reshape(config.windows, config.window)
    target = config.export
    done = dmx.export(
        loaded.model,
        given,
        Path(target.folder),
        target=target.target,
        profile=target.profile,
        inputs=target.inputs,
        verify=target.verify,
        tokenizer=loaded.tokenizer,
        tokens=tokens,
        max_shard_bytes=int(target.max_shard_gigabytes * 1e9),
    )
    found = done.verification
    if found is not None:
        same = "equal bit for bit" if found.equal else f"differ by up to {found.max_difference:.4g}"
        console.print(f"loaded with {found.loader}: logits {same}", highlight=False)
        console.print(
            f"perplexity on {found.tokens} tokens: {perplexity_of(found.loss)!r} from the files, "
            f"{perplexity_of(found.reference_loss)!r} from the fake-quantized model",
            highlight=False,
        )
    print(f"{done.folder}: {done.target}{f', profile {done.profile}' if done.profile else ''}")


if __name__ == "__main__":
    main()
