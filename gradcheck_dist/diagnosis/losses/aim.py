"""What the weights of a step are compared with, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from gradcheck_dist.diagnosis.losses.loud_ranks import LoudRanks
from gradcheck_dist.diagnosis.losses.samples import DECLARED
from gradcheck_dist.ledger.contributions import UNKNOWN, ContributionKey, Contributions
from gradcheck_dist.objectives import DEFAULT_OBJECTIVE

MEANS_WEIGH = "Each pass's {times}: a coefficient, a sum or another count may be meant."


@dataclass
class Aim:
    """The contributions as they are counted and what each should weigh. `relative`: only compared with one another.
    `of_means`: each counts as one mean, whatever it is a mean of. `aside`: which loss was declared in vain.
    `times`: what each pass's elements weigh of their part in one mean, `unlike`: whether these are several numbers,
    `shares`: by what passes weigh unlike, in words.
    `as_written`: several losses of a pass are judged by one, without what is written before it in their sum.
    `of_samples`: each contribution counts its sequences; `of_elements`: what its one mean or sum goes over,
    `of_weighted`: tokens that weights of their own multiply. `loud`: ranks on which alone these weigh wrong.
    `untold`: of passes whose gradients were emptied it is not known whether they are lost.
    `again`: passes that bring no tokens, since their loss is differentiated again, and where these entered;
    `shared_out`: all of them together weigh what one should.
    `other`: what these weights leave open where nobody declared an objective, and what the one that was asks for."""

    contributions: Contributions
    expected: dict[ContributionKey, Fraction]
    tokens: dict[ContributionKey, int]
    relative: bool = False
    of_means: bool = False
    aside: str = ""
    times: str = ""
    unlike: bool = False
    shares: str = ""
    as_written: bool = False
    of_samples: bool = False
    of_elements: bool = False
    of_weighted: bool = False
    loud: LoudRanks | None = None
    untold: bool = False
    again: Mapping[ContributionKey, ContributionKey] = field(default_factory=dict)
    shared_out: bool = False
    other: tuple[str, dict[ContributionKey, Fraction]] | None = None
    reasons: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.relative:
            self.reasons.append(self._why_relative())

    def filled(self, weights: Mapping[ContributionKey, Fraction]) -> dict[ContributionKey, Fraction]:
        """What a pass that brings no tokens weighs is what these weighed where they entered."""
        return {**weights, **{key: weights[first] for key, first in self.again.items() if first in weights}}

    def decide(self, objective: str, *, declared: bool) -> None:
        """Settle on the objective that was declared, or leave open which one is meant."""
        if self.of_samples and declared and objective == DEFAULT_OBJECTIVE:
            self.reasons.append(DECLARED)
        if self.other is not None and declared:
            self.expected = self.other[1]
        elif self.other is not None:
            self.reasons.append(self.other[0])

    def _why_relative(self) -> str:
        means = f"{self.shares} " if self.shares else ""
        means += f"{MEANS_WEIGH.format(times=self.times)} " if self.times else ""
        if any(c.gradient is not None and c.gradient.computed for c in self.contributions.by_key.values()):
            return (
                "losses are multiplied by what has a gradient itself (a learned weight, a focal factor), or go through "
                "a curve, before backward: how much each should weigh is a function of the data, so weights are "
                "relative to each contribution's own gradient and compared with one another"
                + (f". {means.rstrip(' .')}" if means else "")
            )
        losses = [c.loss for c in self.contributions.by_key.values() if c.loss is not None]
        ops = sorted({loss.op for loss in losses if loss.reduction == UNKNOWN} - {UNKNOWN})
        named = f" ({', '.join(ops)})" if ops else ""
        low, high = (float(one(self.expected.values(), default=1)) for one in (min, max))
        here = f"x {low:.4g}" if low == high else f"x {low:.4g} to x {high:.4g}"
        return (
            f"what the loss{named} counts is not known, so its own normalisation is not judged: weights are relative "
            f"to each contribution's own gradient ({here} here) and compared with one another. "
            + means
            + (
                self.aside
                or "gradcheck_dist.mark_loss(loss_sum, num_samples) where it is computed completes the picture"
            )
        )
