"""What may still have become of a gradient after it was last seen."""

from __future__ import annotations

from gradcheck_dist.diagnosis.causes.case import Case, factor_in_words
from gradcheck_dist.events import OWN_OPTIMIZER, OptimizerStep
from gradcheck_dist.ledger.tracks import StepData


def not_read_yet(case: Case, data: StepData) -> str | None:
    """Why a factor on all weights accuses nobody: what came after the gradient was last seen is not known."""
    if not _may_be_made_up(case, data):
        return None
    words = factor_in_words(case)
    named = f" = {words}" if case.names else ""
    if data.complete:
        return (
            f"all weights are x {case.pattern.factor:.6g}{named} in .grad, and what steps is no optimizer of "
            "torch.optim: whether it divides by that number as it updates parameters is not known. Divide the loss "
            "or .grad by it, and not the update, to have that judged"
        )
    return (
        f"all weights are x {case.pattern.factor:.6g}{named} so far: whether more was to come before the optimizer is "
        "not known"
    )


def _may_be_made_up(case: Case, data: StepData) -> bool:
    """Whether one factor on all weights may be right in the end.

    Where the optimizer was never seen to come, further contributions, or a division by hand, could have. An optimizer
    of the trainer's own may divide as it updates (`p -= lr / batch_size * p.grad`); none multiplies.
    """
    if case.pattern.kind != "uniform" or not case.everywhere or case.terms:
        return False
    return not data.complete or (case.pattern.factor > 1 and own_optimizer(data))


def own_optimizer(data: StepData) -> bool:
    """Whether what steps is no optimizer of torch.optim."""
    steps = [event for of_rank in data.events.values() for event in of_rank if isinstance(event, OptimizerStep)]
    return any(event.optimizer == OWN_OPTIMIZER for event in steps)
