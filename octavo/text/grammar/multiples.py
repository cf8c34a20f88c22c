"""Limits on multipleOf in schemas: the compiler takes time for each possible remainder, of each multiple or of several at once."""

import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MAX_MULTIPLE = 10_000  # largest multipleOf, without its decimal point


def scaled(value: int | float) -> int:
    """The number without its decimal point, which is how multiples are counted: 25 for 2.5."""
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert not sign and isinstance(exponent, int)
    return int("".join(map(str, digits)) + "0" * max(0, exponent))


@dataclass(slots=True)
class Budget:
    """The multiples in all schemas of one grammar."""

    multiples: int = 0  # their sum
    common_multiple: int = 1  # their least common multiple
    can_join: bool = False  # some value may have to satisfy several schemas at once

    def spend(self, multiple: int | float) -> bool:
        """Count one multiple. False: the limit is exceeded."""
        self.common_multiple = math.lcm(self.common_multiple, Fraction(Decimal(repr(multiple))).numerator)
        self.multiples += scaled(multiple)
        return self.multiples <= MAX_MULTIPLE

    @property
    def is_kept(self) -> bool:
        return not self.can_join or self.common_multiple <= MAX_MULTIPLE
