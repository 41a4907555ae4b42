"""What is said of losses that a run's passes add up and that were taken for terms with coefficients.

Where all of them weigh as much as the main one, each is a mean over its own tokens, and right. A coefficient is a
number of the program's, which no weight tells from a wrong one: it is told. One that changes from step to step follows
counts (a term that is divided by another term's tokens) or a schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradcheck_dist.ledger.solve import EPSILON

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
    from gradcheck_dist.ledger.several_terms import Terms

SAME = 2e-3
TELLS = "gradcheck_dist.mark_loss(loss_sum, num_tokens, term=..., coefficient=...) on each loss tells"


def tell_terms(verdicts: Sequence[StepVerdict]) -> None:
    """A remark on such terms where each weighs as much as the main loss, else a reason."""
    with_terms = [(verdict, verdict.own_terms) for verdict in verdicts if verdict.own_terms is not None]
    shares: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, terms in with_terms:
        for name, share in terms.shares.items():
            shares[terms.main][name].append(share)
    near = _near(with_terms)
    for main, found in shares.items():
        first = next(verdict for verdict, terms in with_terms if terms.main == main)
        alike = all(max(of_name) <= min(of_name) * (1 + near) for of_name in found.values())
        weigh = ", ".join(f"{name} weighs {_in_words(of_name, near)}" for name, of_name in sorted(found.items()))
        told = (
            f"each pass adds up several losses: the one at {main} weighs what the objective asks for, and of that, as "
            f"means over their own tokens, {weigh}"
        )
        if alike and all(abs(share - 1) <= near for of_name in found.values() for share in of_name):
            first.remarks.append(f"{told}: taken for objectives of their own (inferred)")
        elif alike:
            first.reasons.append(f"{told}, on each rank and in each step: right if these are coefficients. {TELLS}")
        else:
            first.reasons.append(
                f"{told}, another part in each step: coefficients that change, or a loss is divided by another number "
                f"than its own tokens. {TELLS}"
            )


def _in_words(shares: Sequence[float], near: float) -> str:
    if max(shares) <= min(shares) * (1 + near):
        return f"x {shares[0]:.4g}"
    return f"x {min(shares):.4g} to x {max(shares):.4g}"


def _near(with_terms: Sequence[tuple[StepVerdict, Terms]]) -> float:
    """How far apart one coefficient may be in several steps."""
    dtypes = {one.loss.dtype for verdict, _ in with_terms for one in verdict.contributions.by_key.values() if one.loss}
    return max([SAME, *(8 * EPSILON.get(dtype, EPSILON["bfloat16"]) for dtype in dtypes)])
