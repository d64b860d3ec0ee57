"""Scale rules by operand and format, as settings and as an assignment states them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dmx.assignment.file import FLOOR, ScaleRules
from dmx.errors import FormatError
from dmx.formats import (
    MX_FORMATS,
    OPERANDS,
    BlockFormat,
    Operand,
    ScaleRule,
    check_rule,
    get_block_format,
)


def rule_of(
    stated: ScaleRules | ScaleRule, operand: Operand, block_format: BlockFormat
) -> ScaleRule:
    """The rule of a format where an operand is quantized to it: `floor` where nothing is said.

    Args:
        stated: rules of some formats, or one rule for all.
    """
    if isinstance(stated, str):
        return stated
    return stated.get(operand, {}).get(block_format.name, FLOOR)


def rules_of(
    stated: ScaleRules | ScaleRule, operand: Operand, formats: Iterable[BlockFormat]
) -> tuple[ScaleRule, ...]:
    """The rule of each of these formats where an operand is quantized to it."""
    return tuple(rule_of(stated, operand, f) for f in formats)


@dataclass(kw_only=True)
class ScaleRulesConfig:
    """The scale rules that an assignment will have: for an operand one rule for all formats, or format ->
    rule, `floor` for those that are not named."""

    weight: str | dict[str, str] = "floor"
    """floor | ceil | even | rceil | mse, or for example {mxfp4: even}"""
    input: str | dict[str, str] = "floor"
    """floor | ceil | even | rceil, likewise: what the target's runtime computes"""

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
            rules[operand] = dict.fromkeys((f.name for f in MX_FORMATS), FLOOR)
            by_format = dict.fromkeys(rules[operand], stated) if is_one else stated
            for name, rule in by_format.items():
                check_rule(rule, operand, where if is_one else f"{where}.{name}")
                rules[operand][get_block_format(name, setting=where).name] = rule
        return rules
