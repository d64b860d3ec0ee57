"""Budgets: how many bits an assignment may take on average."""

import math
import numbers
from dataclasses import dataclass

from dmx.errors import BudgetError
from dmx.formats import BIT_UNITS, BitUnit, check_choice


@dataclass
class Budget:
    """Upper bound of the average bits of the quantized weights; of both operands where they choose
    separately. Inputs in one fixed format do not count."""

    limit: float
    """> 0, in `unit`."""
    unit: BitUnit = "element_bits"
    """element_bits: nominal 4/6/8. bits_per_element: scales included (4.25/6.25/8.25)."""

    def __post_init__(self) -> None:
        check_choice(self.unit, BIT_UNITS, "budget.unit")
        number = isinstance(self.limit, numbers.Real) and not isinstance(self.limit, bool)
        if not number or not math.isfinite(self.limit) or self.limit <= 0:
            raise BudgetError(
                f"budget.limit={self.limit!r} is not a number of bits. Give a finite number > 0, "
                f"for example 5.0, with budget.unit one of {', '.join(BIT_UNITS)}."
            )
        self.limit = float(self.limit)  # numpy numbers are no JSON
