"""What multiples in schemas cost their compiler: time for each remainder that there is, of each, or of all at once.
Knows nothing of schemas beyond that."""

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MAX_MULTIPLE = 10_000  # of multipleOf, without its decimal point: compiling takes time for each remainder that there is


def scaled(value: int | float) -> int:
    """2.5 is told as 25: what multiples are counted in."""
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert not sign and isinstance(exponent, int)
    return int("".join(map(str, digits)) + "0" * max(0, exponent))


@dataclass(slots=True)
class Budget:
    """What the schemas of one grammar ask of its compiler, all together."""

    multiples: int = 0  # their sum
    common_multiple: int = 1  # of all of them: what a number must be that meets them all
    can_join: bool = False  # somewhere a value has to meet several schemas

    def spend(self, multiple: int | float) -> bool:
        """False: it is too much."""
        self.common_multiple = math.lcm(self.common_multiple, Fraction(Decimal(repr(multiple))).numerator)
        self.multiples += scaled(multiple)
        return self.multiples <= MAX_MULTIPLE

    @property
    def is_kept(self) -> bool:
        return not self.can_join or self.common_multiple <= MAX_MULTIPLE
