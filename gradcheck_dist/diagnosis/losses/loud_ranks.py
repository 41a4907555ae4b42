"""Losses that count no tokens, all right but on some ranks, which multiply theirs by one number.

In one step that number may be a batch's own (an importance, a reward). In several steps it is the rank's: all ranks
run one line, and no objective asks for ranks that weigh more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from gradcheck_dist.diagnosis.losses.elements import OPEN, SAME, Counted, Expect, Judge, by_other, count_by
from gradcheck_dist.diagnosis.losses.weighted_tokens import drop_of_constants
from gradcheck_dist.diagnosis.losses.written_coefficients import is_called_a_weight
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.diagnosis.weights.loops import one_loop
from gradcheck_dist.diagnosis.weights.named_counts import numbers_of
from gradcheck_dist.events import LossNumber
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.wording import numbered

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

LEAST_STEPS = 2
OTHER_COUNTS = 0.02
"""Relative: how near to a ratio of what ranks' losses go over a factor may be one."""


class LoudRanks(NamedTuple):
    """Data ranks whose losses all weigh `factor` times what they should, in one step."""

    ranks: tuple[int, ...]
    factor: float

    def is_like(self, other: LoudRanks | None) -> bool:
        """Whether another step shows the same."""
        return other is not None and self.ranks == other.ranks and abs(self.factor / other.factor - 1) <= SAME


def loud_ranks(
    objective: str, data: StepData, contributions: Contributions, measured: list[Held], judge: Judge, expect: Expect
) -> tuple[Counted, LoudRanks] | None:
    """What the losses go over and the ranks that are too loud, or too quiet; None where something else is wrong, or
    how much ranks' losses go over may be the reason."""
    losses = [c.loss for c in contributions.by_key.values()]
    if len({loss.op if loss is not None else None for loss in losses}) > 1 or not one_loop(data, contributions):
        return None
    gradients = [c.gradient for c in contributions.by_key.values()]
    if any(gradient is None for gradient in gradients):
        return None
    computed = any(gradient.computed for gradient in gradients if gradient is not None)
    for words in ("entries", "elements"):
        counted = count_by(words, contributions)
        if counted is None:
            continue
        for asked in dict.fromkeys((objective, *OPEN)):
            counted.expected = expect(asked, counted.tokens)
            cells = [cell for held in judge(measured, counted.contributions, counted.expected) for cell in held.cells]
            found = _loud(cells, counted.tokens)
            # What a function of the data weighs may differ between ranks; what one rank's line multiplies by may not.
            if found is not None and (not computed or _is_written(contributions, found)):
                return by_other(counted, asked, objective, expect), found
    return None


def _loud(cells: list[Cell], tokens: dict[ContributionKey, int]) -> LoudRanks | None:
    of_rank: dict[int, list[Cell]] = defaultdict(list)
    for cell in cells:
        of_rank[cell.key[0]].append(cell)
    loud = {rank: found for rank, found in of_rank.items() if not all(cell.right for cell in found)}
    if not loud or len(loud) == len(of_rank):
        return None
    factor = median(cell.ratio for found in loud.values() for cell in found)
    alike = all(
        abs(cell.ratio - factor) <= max(cell.margin, SAME * factor) for found in loud.values() for cell in found
    )
    counts = {rank: sum(num for key, num in tokens.items() if key[0] == rank) for rank in of_rank}
    ratios = {counts[rank] / counts[other] for rank in loud for other in counts.keys() - loud.keys() if counts[other]}
    by_count = any(
        abs(factor / made - 1) <= OTHER_COUNTS for ratio in ratios - {1.0} if ratio for made in (ratio, 1 / ratio)
    )
    return LoudRanks(tuple(sorted(loud)), factor) if alike and factor > 0 and not by_count else None


def _is_written(contributions: Contributions, found: LoudRanks) -> bool:
    """Whether a line multiplies the losses of these ranks alone by the number, and calls it no weight."""
    lines = {
        key: {
            number
            for number in numbers_of(one)
            if abs(number.factor / found.factor - 1) <= SAME and not is_called_a_weight(number)
        }
        for key, one in contributions.by_key.items()
    }
    loud = [of_pass for key, of_pass in lines.items() if key[0] in found.ranks]
    others = set[LossNumber]().union(*(of_pass for key, of_pass in lines.items() if key[0] not in found.ranks))
    return bool(set[LossNumber].intersection(*loud) - others)


def waits_for_others(verdict: StepVerdict, earlier: Sequence[StepVerdict]) -> bool:
    """Whether what a step is accused of rests on such ranks, and the steps before it do not bear that out."""
    if verdict.loud is None:
        return False
    return len(earlier) + 1 < LEAST_STEPS or not all(verdict.loud.is_like(one.loud) for one in earlier)


def leave_loud_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse no such rank that is loud in one recorded step alone, or by other numbers in others."""
    loud = [verdict for verdict in verdicts if verdict.loud is not None]
    first = loud[0].loud if loud else None
    if first is None or (len(loud) >= LEAST_STEPS and all(first.is_like(verdict.loud) for verdict in verdicts)):
        return
    for verdict in loud:
        assert verdict.loud is not None
        ranks = numbered("data rank", verdict.loud.ranks)
        drop_of_constants(
            verdict,
            f"what the loss counts is not known, and on {ranks} it weighs x {verdict.loud.factor:.4g} of what it does "
            "elsewhere. Recorded steps that all show the same, two or more, would tell that from a number of a batch's "
            "own. Record more steps, or declare the loss: gradcheck_dist.mark_loss(loss_sum, num_samples)",
        )
