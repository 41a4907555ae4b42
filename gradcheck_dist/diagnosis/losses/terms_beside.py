"""What is said of summands of a loss that nobody declared: a balance loss, a penalty, a distillation term.

Such a term has a coefficient that is not recorded, so nobody is accused. But its weight is: what arrived at it in each
pass, times what happened to that pass's gradient behind its root. The sum over a step's passes is what the optimizer
trains with, and a term that is added in every accumulation step, beside a main loss that is divided by their number,
shows there as so many times what was written (huggingface/transformers, modeling_mixtral.py: `loss +=
router_aux_loss_coef * aux_loss`, where the trainer divides the main loss alone).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import Event, LossTerm
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.wording import plural

SAME = 1e-3
"""Weights nearer to one another than this, relative, are one number that was written."""
MOST_TOLD = 3


def losses_beside(
    contributions: Contributions, events: Mapping[int, Sequence[Event]], held: Sequence[Held] = ()
) -> list[str]:
    """What is said where other losses than those that count tokens enter the same backward passes.

    Args:
        events: of the step, by rank.
        held: weights of the counted losses; what happened behind their roots happened to the terms, too.
    """
    told = _weights(contributions, events, held)
    problems = []
    beside = [one.gradient for one in contributions.by_key.values() if one.gradient and one.gradient.other_losses]
    if beside:
        site = beside[0].site
        where = f"; backward at {site.file}:{site.line}" if site is not None else ""
        weighs = f"with all constants, {told.of(False)}" if told.of(False) else "what they weigh is not judged"
        problems.append(
            f"a backward pass holds {plural(max(one.other_losses for one in beside), 'other term')} beside the losses "
            f"that count tokens: {weighs}. gradcheck_dist.mark_loss(..., term=, coefficient=) on each tells what is "
            f"meant{where}"
        )
    if told.of(True):
        problems.append(
            "losses that a function attaches to activations enter backward beside those that count tokens: "
            f"{told.of(True)}. gradcheck_dist.mark_loss(..., term=, coefficient=) on what it is given tells what is "
            "meant"
        )
    return problems


class _Told(NamedTuple):
    """What the terms of a step weigh, in words; `attached` and others."""

    attached: list[str]
    summands: list[str]

    def of(self, attached: bool) -> str:
        texts = list(dict.fromkeys(self.attached if attached else self.summands))
        whole = "; ".join(texts[:MOST_TOLD]) + ("; ..." if len(texts) > MOST_TOLD else "")
        right = " (right if that is its coefficient, whatever the number of passes)" if "together" in whole else ""
        return whole + right


def _weights(contributions: Contributions, events: Mapping[int, Sequence[Event]], held: Sequence[Held]) -> _Told:
    """The weights of the terms in a step's gradient, where all its passes give a term the same one."""
    behind = behind_roots(held)
    terms: dict[int, dict[ContributionKey, LossTerm]] = defaultdict(dict)
    for key, contribution in contributions.by_key.items():
        for event in events.get(contribution.loss_rank, ()) if contribution.loss_rank is not None else ():
            if isinstance(event, LossTerm) and (event.accumulation_step, event.microbatch) == key[1:]:
                terms[event.ordinal][key] = event
    told = _Told([], [])
    for of_term in terms.values():
        if not (of_term.keys() == contributions.by_key.keys() <= behind.keys()):
            continue
        # Behind their roots, where a loss scale and what is multiplied because an average follows are gone.
        weights = [event.weight * behind[key] for key, event in of_term.items()]
        if not weights[0] or any(abs(one / weights[0] - 1) > SAME for one in weights):
            continue
        passes, whole = len({key[1:] for key in of_term}), sum(weights)
        each = f"{whole / passes:.4g} in each of {passes} passes, together " if passes > 1 else ""
        term = next(iter(of_term.values()))
        (told.attached if term.attached else told.summands).append(f"{term.op} weighs {each}{whole:.4g}")
    return told


def behind_roots(held: Sequence[Held]) -> dict[ContributionKey, float]:
    """What a contribution's gradient was multiplied by between its backward root and the optimizer."""
    found: dict[ContributionKey, list[float]] = defaultdict(list)
    for one in held:
        for cell in one.cells:
            if cell.root_ratio:
                found[cell.key].append(cell.ratio / cell.root_ratio)
    return {key: median(values) for key, values in found.items()}
