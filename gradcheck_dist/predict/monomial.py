"""Products of powers of symbols whose exponents may grow with the accumulation step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

Exponent = tuple[int, int]
"""(a, b): the exponent a + b (K-1-k) in accumulation step k of K."""


@dataclass(frozen=True)
class Monomial:
    """number * product of symbol^(a + b (K-1-k)). Exact; closed under multiplication and division."""

    powers: tuple[tuple[str, Exponent], ...] = ()
    number: Fraction = Fraction(1)

    def __mul__(self, other: Monomial) -> Monomial:
        merged = dict(self.powers)
        for symbol, (constant, slope) in other.powers:
            have = merged.get(symbol, (0, 0))
            merged[symbol] = (have[0] + constant, have[1] + slope)
        kept = sorted((symbol, exponent) for symbol, exponent in merged.items() if exponent != (0, 0))
        return Monomial(tuple(kept), self.number * other.number)

    def inverse(self) -> Monomial:
        return Monomial(tuple((symbol, (-a, -b)) for symbol, (a, b) in self.powers), 1 / self.number)

    def __truediv__(self, other: Monomial) -> Monomial:
        return self * other.inverse()

    def value(self, values: Mapping[str, Fraction], num_accumulation: int, k: int) -> Fraction:
        """The number in accumulation step k.

        Raises:
            KeyError: a symbol has no value (n_c, N_r: they belong to one contribution).
        """
        result = self.number
        for symbol, (constant, slope) in self.powers:
            result *= values[symbol] ** (constant + slope * (num_accumulation - 1 - k))
        return result

    def __str__(self) -> str:
        over: list[str] = []
        under: list[str] = []
        for symbol, (constant, slope) in self.powers:
            side = over if constant > 0 or (constant == 0 and slope > 0) else under
            sign = 1 if side is over else -1
            side.append(_power(symbol, sign * constant, sign * slope))
        if self.number.numerator != 1 or not over:
            over.insert(0, str(self.number.numerator))
        if self.number.denominator != 1:
            under.insert(0, str(self.number.denominator))
        top = " * ".join(over) if over != ["1"] or not under else "1"
        return top if not under else f"{top}/{under[0]}" if len(under) == 1 else f"{top}/({' * '.join(under)})"


def _power(symbol: str, constant: int, slope: int) -> str:
    if slope == 0:
        return symbol if constant == 1 else f"{symbol}^{constant}"
    steps = "K-1-k" if slope == 1 else f"{slope}(K-1-k)"
    if constant == 0:
        return f"{symbol}^({steps})"
    return f"{symbol}^(K-k)" if (constant, slope) == (1, 1) else f"{symbol}^({constant}+{steps})"


ONE = Monomial()


def symbol(name: str, constant: int = 1, slope: int = 0) -> Monomial:
    """name^(constant + slope (K-1-k))."""
    return Monomial(((name, (constant, slope)),))


def number(value: Fraction | int | float) -> Monomial:
    return Monomial((), Fraction(value).limit_denominator(10**9))
