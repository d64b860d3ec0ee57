"""Facts about number formats: what each one is. No tensors here.

An *element format* says how one value is stored; a *block format* is an element format plus a
scale that neighbours along the contraction axis share: in the MX formats 32 of them an 8-bit power
of two (E8M0), in `nvfp4` 16 of them an E4M3 number, which is relative to one float32 number of the
whole tensor, in `fp8` a whole row one float32 number. Layers that stay in 16 bits have the format
`bf16`, which is no block format. Every derived number (largest value, bias, bits, codes) is computed
from the bit fields, so there is one home for each.

Source: OCP Microscaling Formats (MX) v1.0, section 5 (formats) and 6.3 (shared scale); for nvfp4 and
fp8 the files of compressed-tensors 0.20 (`nvfp4-pack-quantized`, `float-quantized`).
"""

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

from dmx.errors import FormatError

Operand = Literal["weight", "input"]
"""One side of a linear layer's product."""
OPERANDS: tuple[Operand, ...] = get_args(Operand)

ScaleRule = Literal[
    "floor", "ceil", "even", "rceil", "mse", "amax/6", "4over6", "amax/448", "amax/448_float32"
]
"""How the scale follows from a block; see `dmx.numerics.scaling` and `dmx.numerics.scaled`. A format has
some of them: `BlockFormat.rules`."""
ALL_RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)
SCALE_RULES: tuple[ScaleRule, ...] = ("floor", "ceil", "even", "rceil")
"""Those of the MX formats that look at a block's amax alone."""
WEIGHT_RULES: tuple[ScaleRule, ...] = (*SCALE_RULES, "mse")
"""Those of the MX formats."""
RULE_OPERANDS: dict[ScaleRule, tuple[Operand, ...]] = {
    **dict.fromkeys(ALL_RULES, OPERANDS),
    "mse": ("weight",),
    "4over6": ("weight",),
    "amax/448_float32": ("input",),
}
"""The operands that a rule is for: one that looks at more than amax is for weights alone, and so are scales with more
digits than loaders keep of a file for inputs alone."""

BitUnit = Literal["element_bits", "bits_per_element"]
"""element_bits: nominal 4/6/8. bits_per_element: scales included, equals exported bytes."""
BIT_UNITS: tuple[BitUnit, ...] = get_args(BitUnit)

BLOCK_SIZE = 32
"""Of the MX formats."""

Specials = Literal["none", "nan", "ieee"]
"""Which codes of an element format are no numbers."""


@dataclass(frozen=True)
class ElementFormat:
    """A sign bit, `exponent_bits` and `mantissa_bits`; all facts below follow from these fields."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Specials = "none"
    """none: every code is a number. nan: all ones is NaN (E4M3). ieee: top exponent is Inf/NaN."""

    def __str__(self) -> str:
        return self.name

    @cached_property
    def bits(self) -> int:
        """Sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def bias(self) -> int:
        """Exponent field of the value 1."""
        return 2 ** (self.exponent_bits - 1) - 1

    @cached_property
    def emax(self) -> int:
        """Exponent of the binade of `max_normal`."""
        return 2**self.exponent_bits - 1 - self.bias - (self.specials == "ieee")

    @cached_property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias

    @cached_property
    def max_normal(self) -> float:
        """Largest finite value."""
        return float(2.0**self.emax * (1 + self.max_mantissa / 2**self.mantissa_bits))

    @cached_property
    def min_normal(self) -> float:
        """Smallest value with a mantissa of full length."""
        return float(2.0**self.emin)

    @cached_property
    def min_subnormal(self) -> float:
        """Smallest value above 0."""
        return float(2.0 ** (self.emin - self.mantissa_bits))

    # --- codes: right-aligned, the sign bit on top ---------------------------------------------

    @cached_property
    def n_codes(self) -> int:
        """Codes that there are, those of the special values included."""
        return 2**self.bits

    @cached_property
    def sign_code(self) -> int:
        """The sign bit, which is also the number of magnitudes."""
        return 2 ** (self.bits - 1)

    @cached_property
    def max_code(self) -> int:
        """Code of `max_normal`: the magnitudes above it are special."""
        specials = {"none": 0, "nan": 1, "ieee": 2**self.mantissa_bits}[self.specials]
        return self.sign_code - 1 - specials

    @cached_property
    def max_mantissa(self) -> int:
        """Mantissa field of `max_normal`; E4M3 gives its topmost one to NaN."""
        return self.max_code % 2**self.mantissa_bits

    @cached_property
    def inf_code(self) -> int | None:
        """Code of +Inf; None where there is none."""
        return self.max_code + 1 if self.specials == "ieee" else None

    @cached_property
    def nan_code(self) -> int:
        """Code of +NaN; formats without NaN use 0xFF, which is no code of theirs."""
        return 0xFF if self.specials == "none" else self.sign_code - 1

    @cached_property
    def nan_block_code(self) -> int:
        """What the elements of a NaN block are stored as: NaN, or 0 where the format has none and
        the block's scale code alone says it."""
        return 0 if self.specials == "none" else self.nan_code


E2M1 = ElementFormat("e2m1", 2, 1)
E2M3 = ElementFormat("e2m3", 2, 3)
E3M2 = ElementFormat("e3m2", 3, 2)
E4M3 = ElementFormat("e4m3", 4, 3, "nan")
E5M2 = ElementFormat("e5m2", 5, 2, "ieee")
ELEMENT_FORMATS = {f.name: f for f in (E2M1, E2M3, E3M2, E4M3, E5M2)}


@dataclass(frozen=True)
class ScaleFormat:
    """How the scale of a block is stored."""

    name: str
    bits: int
    rules: tuple[ScaleRule, ...]
    """How it may follow from a block; the first one where nothing is said."""
    input_rule: ScaleRule | None = None
    """Of inputs where nothing is said, if that is another one."""
    bias: int = 0
    """Of powers of two: code of the scale 1, the scale is `2**(code - bias)`."""
    nan_code: int = 0
    """Of scales that are codes: marks a block that is NaN as a whole."""
    element: ElementFormat | None = None
    """Of scales that are codes of an element format; None: powers of two, or plain float32."""
    global_bits: int = 0
    """Of one more number that the scales of a whole tensor are relative to; 0: there is none."""

    def __str__(self) -> str:
        return self.name

    @property
    def is_power_of_two(self) -> bool:
        """Whether the scales are exponents, as those of the MX formats."""
        return self.bias > 0


E8M0 = ScaleFormat("e8m0", 8, WEIGHT_RULES, bias=127, nan_code=255)
E4M3_OF_TENSOR = ScaleFormat(
    "e4m3", 8, ("amax/6", "4over6", "mse"), nan_code=E4M3.nan_code, element=E4M3, global_bits=32
)
FLOAT32 = ScaleFormat(
    "float32", 32, ("amax/448", "amax/448_float32"), input_rule="amax/448_float32"
)


@dataclass(frozen=True)
class BlockFormat:
    """Elements of one format, `block_size` of which share a scale along the contraction axis."""

    name: str
    element: ElementFormat
    scale: ScaleFormat = E8M0
    block_size: int = BLOCK_SIZE
    """0: a whole row, of whatever length."""

    def __str__(self) -> str:
        return self.name

    @property
    def rules(self) -> tuple[ScaleRule, ...]:
        """Scale rules that there are for it, the usual one of weights first."""
        return self.scale.rules

    def usual_rule(self, operand: Operand) -> ScaleRule:
        """The scale rule of an operand where nothing is said."""
        own = self.scale.input_rule if operand == "input" else None
        return own or self.rules[0]

    @property
    def is_mx(self) -> bool:
        """Whether its scales are powers of two, one for each 32 values."""
        return self.scale.is_power_of_two

    @cached_property
    def needs_input_amax(self) -> bool:
        """Whether inputs are quantized with a number of the whole tensor, which calibration fixes."""
        return self.scale.global_bits > 0

    @cached_property
    def element_bits(self) -> float:
        """Bits of one stored value, scale not counted (what the dMX paper counts)."""
        return float(self.element.bits)

    @cached_property
    def bits_per_element(self) -> float:
        """Bits of one stored value with its share of the scale: 4.25, 6.25, 8.25; nvfp4 4.5, fp8 8. What a
        scale of a row or of a tensor adds depends on the shape: `bits`."""
        return self.element.bits + self.scale.bits / (self.block_size or math.inf)

    def bits(self, unit: BitUnit, shape: tuple[int, int] | None = None) -> float:
        """Bits of one value in either unit.

        Args:
            shape: (out_features, in_features) of the weight; None: of a very large one.
        """
        if unit == "element_bits":
            return self.element_bits
        if shape is None or self.is_mx:
            return self.bits_per_element
        return self.element.bits + self.scale_bits(shape) / (shape[0] * shape[1])

    def scale_bits(self, shape: tuple[int, int]) -> int:
        """Bits of all scales of a weight (out_features, in_features)."""
        return shape[0] * self.blocks(shape[1]) * self.scale.bits + self.scale.global_bits

    def blocks(self, n: int) -> int:
        """Blocks that n values along the axis make; the last one may be short."""
        return -(-n // (self.block_size or max(n, 1)))


@dataclass(frozen=True)
class Unquantized:
    """The format of layers that stay as they are, in 16 bits; there is nothing to quantize to."""

    name: str
    element_bits: float = 16.0
    bits_per_element: float = 16.0

    def __str__(self) -> str:
        return self.name

    def bits(self, unit: BitUnit, shape: tuple[int, int] | None = None) -> float:
        """16 in either unit: there are no scales."""
        return self.element_bits if unit == "element_bits" else self.bits_per_element


Format = BlockFormat | Unquantized
"""What an assignment assigns to a layer."""


MXFP4 = BlockFormat("mxfp4", E2M1)
MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3)
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2)
MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", E4M3)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2)
NVFP4 = BlockFormat("nvfp4", E2M1, E4M3_OF_TENSOR, 16)
FP8 = BlockFormat("fp8", E4M3, FLOAT32, 0)
BF16 = Unquantized("bf16")

MX_FORMATS = (MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2)
BLOCK_FORMATS = {f.name: f for f in (*MX_FORMATS, NVFP4, FP8)}
FORMATS: dict[str, Format] = {**BLOCK_FORMATS, BF16.name: BF16}
ALIASES = {"mxfp4_e2m1": "mxfp4", "mxfp6": "mxfp6_e2m3", "mxfp8": "mxfp8_e4m3"}


@dataclass(frozen=True)
class Family:
    """The formats that one offset moves between, smallest first, at offsets evenly in [0, 2]."""

    name: str
    formats: tuple[Format, ...]

    def __str__(self) -> str:
        return self.name

    @cached_property
    def width(self) -> float:
        """Offset from one stop to the next."""
        return 2.0 / (len(self.formats) - 1)

    @cached_property
    def stops(self) -> tuple[float, ...]:
        """Offset of each format."""
        return tuple(self.width * index for index in range(len(self.formats)))

    def steps(self, unit: BitUnit) -> tuple[float, ...]:
        """Bits that each format adds to the one before it."""
        return tuple(b.bits(unit) - a.bits(unit) for a, b in pairwise(self.formats))

    @property
    def is_mx(self) -> bool:
        """Whether all scales are powers of two, one for each 32 values."""
        return all(isinstance(f, BlockFormat) and f.is_mx for f in self.formats)

    @property
    def setting(self) -> str | list[str]:
        """As `search.family` and files hold it: the known name, else the names of the formats."""
        return self.name if self.is_known else [f.name for f in self.formats]

    @property
    def is_known(self) -> bool:
        """Whether it is one of `FAMILIES`, whose neighbours have a common element path."""
        return FAMILIES.get(self.name) == self


FAMILIES = {
    f.name: f
    for f in (
        Family("mxfp8_mxfp4", (MXFP4, MXFP8_E4M3)),
        Family("mxfp6_mxfp4", (MXFP4, MXFP6_E2M3)),
        Family("mxfp8_mxfp6_mxfp4", (MXFP4, MXFP6_E2M3, MXFP8_E4M3)),
    )
}
FAMILY_SIZES = (2, 3, 4)
"""Formats that a family may have."""

SoftPath = Literal["element", "line"]
"""How the continuous quantizer moves between neighbours: through their element formats, or straight from
the values of one to those of the other; see `dmx.numerics.continuous`."""
AskedPath = Literal["auto", "element", "line"]
PATHS: tuple[AskedPath, ...] = get_args(AskedPath)


def _nearest(name: str, known: list[str]) -> str:
    parts = sorted(name.lower().split("_"))  # the right words in another order come first
    close = [k for k in known if sorted(k.split("_")) == parts]
    close = close or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    return f" Did you mean {close[0]!r}?" if close else ""


def get_format(name: str | Format, *, setting: str = "format") -> Format:
    """Format by name or alias, `bf16` included; the only lookup by string.

    Raises:
        FormatError: no such format; says the nearest name and all that exist.
    """
    if isinstance(name, Format):
        return name
    key = ALIASES.get(name, name)
    if key not in FORMATS:
        known = [*FORMATS, *ALIASES]
        raise FormatError(
            f"{setting}={name!r} is no block format.{_nearest(str(name), known)} "
            f"Allowed: {', '.join(known)}."
        )
    return FORMATS[key]


def get_block_format(name: str | Format, *, setting: str = "block_format") -> BlockFormat:
    """As `get_format`, but refuses bf16, which has no quantizer."""
    block_format = get_format(name, setting=setting)
    if isinstance(block_format, Unquantized):
        raise FormatError(
            f"{setting}={block_format.name!r} cannot be quantized to: it names layers that stay "
            f"in 16 bits. Allowed: {', '.join(BLOCK_FORMATS)}."
        )
    return block_format


def family_name(formats: Sequence[str]) -> str:
    """Of block formats, cheapest first: the known name of such a list, else their names one by one."""
    for family in FAMILIES.values():
        if [f.name for f in family.formats] == list(formats):
            return family.name
    return " ".join(formats)


def get_family(asked: str | Sequence[str] | Family, *, setting: str = "search.family") -> Family:
    """Family by name, or by its formats, cheapest first; bf16 may be one.

    Raises:
        FormatError: no such family, or no list that can be one; says what is allowed.
    """
    if isinstance(asked, Family):
        return asked
    if isinstance(asked, list | tuple):
        formats = tuple(get_format(name, setting=setting) for name in asked)
        _check_family(formats, setting)
        name = family_name([f.name for f in formats])
        return FAMILIES.get(name) or Family(name, formats)
    if asked not in FAMILIES:
        raise FormatError(
            f"{setting}={asked!r} is no format family.{_nearest(str(asked), list(FAMILIES))} "
            f"Allowed: {', '.join(FAMILIES)}, or a list of two to four formats, cheapest first: "
            f"{setting}=[mxfp4,mxfp6_e2m3]."
        )
    return FAMILIES[asked]


def _check_family(formats: tuple[Format, ...], setting: str) -> None:
    """Raise FormatError unless these formats can be a family."""
    given = f"{setting}=[{','.join(map(str, formats))}]"
    if len(formats) not in FAMILY_SIZES:
        raise FormatError(
            f"{given} has {len(formats)} formats. A family has two to four formats, cheapest "
            f"first: {setting}=[mxfp4,mxfp6_e2m3]."
        )
    for low, high in pairwise(formats):
        if not low.element_bits < high.element_bits:
            raise FormatError(
                f"{given}: {high} ({high.element_bits:g} bits) does not have more bits than {low} "
                f"({low.element_bits:g}) before it. Name formats of rising bits, cheapest first."
            )


def soft_path(
    family: Family,
    rules: Sequence[ScaleRule | None],
    asked: AskedPath = "auto",
    operand: str | None = None,
) -> SoftPath:
    """Path of the continuous quantizer for one operand.

    Args:
        rules: scale rule of each format there. asked: auto = the element path where there is one. operand: whose rules
            they are, for the error.

    Raises:
        FormatError: the element path was asked for and there is none.
    """
    has_element = family.is_known and all(rule == "floor" for rule in rules)
    if asked == "element" and not has_element:
        by_rule = family.is_known and operand is not None
        way_out = f", or search.scale_rules.{operand}=floor for it" if by_rule else ""
        raise FormatError(
            f"search.descent.path=element: there is no element path between {', '.join(map(str, family.formats))} "
            f"with the scale rules {', '.join(rule or 'none' for rule in rules)}. It exists for {', '.join(FAMILIES)} with floor "
            f"alone. Use search.descent.path=auto or search.descent.path=line{way_out}."
        )
    return "element" if has_element and asked != "line" else "line"


SWITCH = ("auto", "on", "off")
"""What a setting may say that is decided by what is there unless it is said."""


def check_choice(value: object, allowed: tuple[str, ...], setting: str) -> None:
    """Raise FormatError unless value is one of `allowed`; says the nearest."""
    if value not in allowed:
        raise FormatError(
            f"{setting}={value!r} is not allowed.{_nearest(str(value), list(allowed))} "
            f"Allowed: {', '.join(allowed)}."
        )


def check_rule(
    value: object, operand: Operand, setting: str, block_format: BlockFormat | None = None
) -> None:
    """Raise FormatError unless value is a scale rule for this operand; says which are.

    Args:
        block_format: that must have the rule; None: any does.
    """
    rules = ALL_RULES if block_format is None else block_format.rules
    check_choice(value, tuple(r for r in rules if operand in RULE_OPERANDS[r]), setting)


def scale_rule_of(
    block_format: BlockFormat, asked: ScaleRule | None, setting: str = "scale_rule"
) -> ScaleRule:
    """The rule that is asked for, the format's usual one of weights for None.

    Raises:
        FormatError: the format does not have it; says which it has.
    """
    if asked is None:
        return block_format.rules[0]
    if asked not in block_format.rules:
        check_choice(asked, ALL_RULES, setting)
        raise FormatError(
            f"{setting}={asked!r} is not for {block_format}. Allowed: {', '.join(block_format.rules)}."
        )
    return asked
