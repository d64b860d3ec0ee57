"""Scale rules by operand and format, as settings and as an assignment states them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dmx.assignment.file import ScaleRules
from dmx.errors import FormatError
from dmx.formats import (
    BLOCK_FORMATS,
    OPERANDS,
    BlockFormat,
    Format,
    Operand,
    ScaleRule,
    check_rule,
    get_block_format,
)

AUTO = "auto"
"""Of inputs, where nothing is said: the rules of the target's runtime."""


def rule_of(
    stated: ScaleRules | ScaleRule, operand: Operand, block_format: BlockFormat
) -> ScaleRule:
    """The rule of a format where an operand is quantized to it: its usual one where nothing is said.

    Args:
        stated: rules of some formats, or one rule for all that have it.
    """
    if isinstance(stated, str):
        return stated if stated in block_format.rules else block_format.usual_rule(operand)
    return stated.get(operand, {}).get(block_format.name, block_format.usual_rule(operand))


def rules_of(
    stated: ScaleRules | ScaleRule, operand: Operand, formats: Iterable[Format]
) -> tuple[ScaleRule | None, ...]:
    """The rule of each of these formats where an operand is quantized to it; None for bf16."""
    return tuple(
        rule_of(stated, operand, f) if isinstance(f, BlockFormat) else None for f in formats
    )


@dataclass(kw_only=True)
class ScaleRulesConfig:
    """The scale rules that an assignment will have: for an operand one rule for all formats that have it, or
    format -> rule; the others have their usual one."""

    weight: str | dict[str, str] = "floor"
    """floor | ceil | even | rceil | mse, of nvfp4 amax/6 | 4over6 | mse, or for example {mxfp4: even}"""
    input: str | dict[str, str] = AUTO
    """auto | floor | ceil | even | rceil, of nvfp4 amax/6, of fp8 amax/448_float32 | amax/448, likewise. auto: what the
    runtime of search.target computes, as far as it is known, else floor; so are formats that a dict does not name"""

    def __post_init__(self) -> None:
        self.by_format()

    def by_format(self) -> ScaleRules:
        """Rules of all formats.

        Raises:
            FormatError: a format or a rule that there is not, or not for that operand.
        """
        rules: dict[Operand, dict[str, Any]] = {}
        for operand in OPERANDS:
            stated, where = getattr(self, operand), f"search.scale_rules.{operand}"
            is_one = isinstance(stated, str)
            if not is_one and not isinstance(stated, dict):
                raise FormatError(
                    f"{where}={stated!r} must be a rule or a dict of format -> rule: {where}=even, "
                    f"'{where}={{mxfp4: even}}'"
                )
            rules[operand] = {f.name: f.usual_rule(operand) for f in BLOCK_FORMATS.values()}
            if operand == "input" and stated == AUTO:
                continue
            if is_one:
                check_rule(stated, operand, where)
                rules[operand] |= {
                    f.name: stated for f in BLOCK_FORMATS.values() if stated in f.rules
                }
                continue
            for name, rule in stated.items():
                block_format = get_block_format(name, setting=where)
                check_rule(rule, operand, f"{where}.{name}", block_format)
                rules[operand][block_format.name] = rule
        return rules

    def for_runtime(self, known: Mapping[str, ScaleRule]) -> "ScaleRulesConfig":
        """With what auto stands for.

        Args:
            known: MX format -> rule by which the runtime quantizes inputs; empty: not known.
        """
        if self.input == AUTO:
            return replace(self, input=dict(known) or "floor")
        if isinstance(self.input, str) or not known:
            return self
        named = {get_block_format(name).name for name in self.input}
        unnamed = {name: rule for name, rule in known.items() if name not in named}
        return replace(self, input={**unnamed, **self.input})

    def check_used(self, formats: Mapping[Operand, Iterable[Format]]) -> None:
        """Raise FormatError for one rule for all formats that none of an operand's has; floor and auto are what
        is said where nothing is."""
        for operand in OPERANDS:
            blocks = [f for f in formats[operand] if isinstance(f, BlockFormat)]
            stated = getattr(self, operand)
            if stated in ("floor", AUTO) or not isinstance(stated, str):
                continue
            if blocks and not any(stated in f.rules for f in blocks):
                has = "; ".join(f"{f}: {', '.join(f.rules)}" for f in blocks)
                raise FormatError(
                    f"search.scale_rules.{operand}={stated} is a rule of none of the formats that are "
                    f"searched. They have: {has or 'none'}. Name one of these, or leave it out."
                )
