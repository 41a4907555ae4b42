"""What takes a named factor out of a loss."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.weights.factors import Name, expression_of


def taken_out(equal: Sequence[Name], what: str, those: str) -> str | None:
    """What mends a factor that degrees and counts make: by its first name, and others that are equal in this run.

    Args:
        equal: names of the factor that nothing separates.
        what: what has the factor, after "Divide" ("each loss").
        those: the same after "a division of" ("the losses").

    Returns:
        None where the names have none, or some multiply and others divide: then one of two numbers may be meant.
    """
    signs = {power > 0 for name in equal for _, power in name.powers}
    if len(signs) != 1:
        return None
    first, *others = (expression_of(tuple((part, abs(power)) for part, power in name.powers)) for name in equal)
    alike = f" (or by {' or '.join(others)}, which {'is' if len(others) == 1 else 'are'} equal here)" if others else ""
    if signs == {True}:
        return f"Divide {what} by {first}{alike} as well, or take out what multiplies it by that."
    return f"Take out a division of {those} by {first}{alike}: one too many is done, here or further on."
