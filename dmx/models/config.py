"""Which model, in which dtype, and from where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dmx.errors import ModelError
from dmx.models.dtype import AUTO, DTYPES
from dmx.models.tiny import TinyConfig


@dataclass(kw_only=True)
class ModelConfig:
    """Which model, in which dtype, and from where."""

    id: str
    """Hub name, or a local folder; for `package` and `tiny` a label of your own."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null = the default branch. The record keeps the commit."""
    dtype: str = "bfloat16"
    """bfloat16, float16, float32, or auto: bfloat16, but float32 on a CPU that is slow in bfloat16."""
    gguf_file: str | None = None
    """A GGUF file in the hub repository, folder or package; its weights are dequantized."""
    package: str | None = None
    """An installed Python package whose folder holds gguf_file; it is not imported."""
    package_install: str | None = None
    """What to give pip for `package`, for the error message."""
    digit_pretokenizer: bool = False
    """Split digits one by one again: the rule that the conversion from GGUF drops for SmolLM2."""
    attn_implementation: str | None = None
    """sdpa, eager, flash_attention_2...; null = transformers' choice."""
    tiny: TinyConfig | None = None
    note: str | None = None
    """A sentence that goes to the record with every number."""

    def __post_init__(self) -> None:
        if isinstance(self.tiny, dict):
            self.tiny = TinyConfig(**self.tiny)
        known = (*DTYPES, AUTO)
        if self.dtype not in known:
            raise ModelError(f"model.dtype={self.dtype!r} is unknown. Known: {', '.join(known)}.")
        if self.package is not None and self.gguf_file is None:
            raise ModelError(
                f"model.package={self.package!r} needs model.gguf_file: the file in its folder."
            )
        if self.tiny is not None and (self.package or self.gguf_file):
            raise ModelError("model.tiny makes a model; it takes neither package nor gguf_file.")
        made = "model.tiny" if self.tiny is not None else "model.package" if self.package else None
        if made and (os.sep in self.id or Path(self.id).is_dir()):
            raise ModelError(
                f"model.id={self.id} would not be read: the model comes from {made}, and id is a label "
                "there. Choose a configuration that reads folders and hub names: model=smollm2_135m "
                f"model.id={self.id}."
            )
