"""What an assignment says of the search that made it."""

from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

Kept = Literal["scores", "fisher", "descent"]
"""Whose choice an adaptive search took; scores: those of kl_per_bit."""
KEPT_OF: dict[str, str] = {"scores": "kl_per_bit", "fisher": "fisher", "descent": "differentiable"}
"""The search that chooses so by itself."""


@dataclass(frozen=True, kw_only=True)
class SearchFacts:
    """How an assignment came about. A field at its default is left out of the file."""

    name: str | None = None
    """Of the search; "imported" for another tool's choice; None where nobody said."""
    family: str | tuple[str, ...] | None = None
    """The formats that were searched: a name, or block formats, cheapest first."""
    seed: int | None = None
    polish_rounds: int = 0
    """Asked for, not run."""
    weighting: Literal["elements", "active", "layers"] = "elements"
    """What a layer counts in the averages of `Assignment.bits`: its weight elements, those of them that a token meets,
    or one."""
    choices: Literal["joint", "separate"] = "joint"
    """separate: weights and inputs of a unit chose their formats apart."""
    input_format: str | None = None
    """The format of every input, where the weights' alone were chosen; the averages of `Assignment.bits`
    then count weights alone."""
    shared_weights: bool = False
    """Some layers share one weight, which the averages count once."""
    tool: str | None = None
    """The other tool whose choice was imported."""
    kl: float | None = None
    """After the polish, on its batches; nats/token."""
    path: Literal["element", "line"] | None = None
    """Of a descent: how the continuous quantizer of the weights moved between formats."""
    input_path: Literal["element", "line"] | None = None
    """Of the inputs, where it was another."""
    kept: Kept | None = None
    """Of name=adaptive."""
    kept_because: str | None = None
    """What was measured of all, or why there was no descent."""
    searched_under: str | None = None
    """Scale rule that a descent of earlier versions knew, where the assignment's own rules are others."""
    steps: int | None = None
    """Optimizer steps of a search that descends."""
    seconds: float | None = None
    """Wall time. Scores that were kept, of another search or a start that was stopped, count as long as their scan took;
    in earlier versions nothing (`score_seconds` is None)."""
    score_seconds: float | None = None
    """Of `seconds`, those of score scans, whoever made them; None: it needed none."""
    cuda_graph: str | None = None
    """on | off: whether steps were replayed from a captured graph."""
    peak_memory_bytes: int | None = None
    """Largest device memory allocated by the search."""

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as JSON holds it."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        said = {f.name: said[f.name] for f in fields(self) if said[f.name] != f.default}
        return {key: list(v) if isinstance(v, tuple) else v for key, v in said.items()}

    @classmethod
    def from_dict(cls, body: dict[str, Any]) -> Self:
        """Inverse of `to_dict`.

        Raises:
            ValueError: an unknown key, or a value of the wrong type; says which are allowed.
        """
        hints = get_type_hints(cls)
        if unknown := sorted(set(body) - set(hints)):
            raise ValueError(f"search has unknown keys {unknown}, allowed: {', '.join(hints)}")
        said: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in body.items()}
        for key, value in said.items():
            if not _is_of(value, hints[key]):
                raise ValueError(f"search.{key} is {value!r}, expected {_words(hints[key])}")
        return cls(**said)


def _is_of(value: object, hint: Any) -> bool:
    """Whether a value has the type of an annotation, as far as annotations above go."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, one) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(one, str) for one in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def _words(hint: Any) -> str:
    """An annotation for a reader: `str or list of names or null`."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(_words(one) for one in get_args(hint))
    if origin is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if origin is tuple:
        return "list of names"
    return "null" if hint is type(None) else str(hint.__name__)
