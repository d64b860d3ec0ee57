"""Which text: names of data sets, their splits, and what may be combined."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmx.errors import DataError

BOS = ("auto", "yes", "no")
JOINS = ("rows", "document")
SPLITS: dict[str, tuple[str, ...]] = {
    "embedded": ("calibration", "evaluation"),
    "wikitext2": ("train", "validation", "test"),
    "wikitext2_train_head": (),
    "fineweb": (),
    "c4": (),
    "fineweb+c4": (),
    "files": (),
    "synthetic": ("calibration", "evaluation"),
}
"""Name of a data set -> its splits, one of which must be named; () = it has none."""


@dataclass(kw_only=True)
class DataConfig:
    """One text. A data choice (`DataPair`) names two: for calibration and for evaluation."""

    name: str = "embedded"
    """embedded, wikitext2, wikitext2_train_head, fineweb, c4, fineweb+c4, files, synthetic."""
    split: str | None = None
    """wikitext2: train, validation, test. embedded, synthetic: calibration, evaluation."""
    files: list[str] = field(default_factory=list)
    """For name=files: .txt .raw .jsonl .jsonl.gz .parquet, read in this order."""
    column: str = "text"
    """The text field of .jsonl, .jsonl.gz and .parquet files."""
    join: str = "rows"
    """rows: rows joined by a blank line. document: the text as the author's file has it
    (wikitext2: wiki.*.raw read as one text; files: joined by nothing)."""
    max_characters: int | None = None
    """Keep the first so many characters; null = all."""
    seed: int = 0
    """For name=synthetic only."""

    def __post_init__(self) -> None:
        if self.name not in SPLITS:
            raise DataError(f"data.name={self.name!r} is unknown. Known: {', '.join(SPLITS)}.")
        if self.join not in JOINS:
            raise DataError(f"data.join={self.join!r} is unknown. Known: {', '.join(JOINS)}.")
        if self.join == "document" and self.name not in {"wikitext2", "files"}:
            raise DataError(
                f"data.join=document is for name=wikitext2 or files, not {self.name!r}. "
                "Use join=rows."
            )
        allowed = SPLITS[self.name]
        if self.split is not None and self.split not in allowed:
            known = f"one of {', '.join(allowed)}" if allowed else "null: it has no splits"
            raise DataError(f"data.split={self.split!r} for name={self.name}: must be {known}.")
        if self.split is None and allowed:
            raise DataError(
                f"data.split is missing for name={self.name}. Choose one of {', '.join(allowed)}."
            )
        if bool(self.files) != (self.name == "files"):
            raise DataError(
                f"data.files={self.files!r} with data.name={self.name!r}: files and name=files go "
                "together. Give both or neither; on the command line they are "
                "data.calibration.files=[...] and data.evaluation.files=[...], .name likewise."
            )
        if self.max_characters is not None and self.max_characters < 1:
            raise DataError(f"data.max_characters={self.max_characters} must be > 0 or null.")


@dataclass(kw_only=True)
class DataPair:
    """A data choice: what the search sees, what the result is measured on, what weights learn from."""

    calibration: DataConfig
    evaluation: DataConfig
    training: DataConfig | None = None
    """null = the calibration text"""
    bos: str = "auto"
    """What windows start with: auto: what the tokenizer itself puts before a text, BOS or nothing. yes, no."""

    def __post_init__(self) -> None:
        if self.bos not in BOS:
            raise DataError(f"data.bos={self.bos!r} is unknown. Known: {', '.join(BOS)}.")
