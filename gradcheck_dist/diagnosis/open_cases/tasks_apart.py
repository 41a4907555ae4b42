"""Losses of one forward pass that are differentiated apart, of which some count nothing: a program combines them.

Gradient surgery takes each task's gradient, empties the buffers, and puts a mean, a projection or a sum with computed
weights in their place. Where all tasks count tokens these are looked at together (diagnosis/losses/tasks.py); beside
tasks that count nothing the one that does tells alone what came of it.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.events import Backward, ZeroGrad
from gradcheck_dist.ledger.tracks import Slot, StepData


def tasks_apart(case: Case, data: StepData) -> str | None:
    """Why one number on all weights, behind the losses, accuses nobody there."""
    by_lines = case.culprit.unrecorded or case.culprit.kind == "grad_write"
    if case.context.relative or not by_lines or case.pattern.kind != "uniform":
        return None
    counted = case.context.contributions
    slots = {(rank, *key[1:]) for key, one in counted.by_key.items() if one.num_tokens for rank in one.ranks}
    if not slots or not all(_beside_others(rank, slot, data) for rank, *slot in slots):
        return None
    return (
        "losses of one forward pass are differentiated one by one, their gradients are kept apart, and what runs "
        f"between there and the optimizer leaves x {case.pattern.factor:.6g} of the one that counts tokens: a mean of "
        "tasks, a projection or weights that are computed from gradients do that, and so does a wrong constant. Which "
        "it is is not known. Add the losses up for some steps to have the rest judged"
    )


def _beside_others(rank: int, slot: list[int], data: StepData) -> bool:
    """Whether a pass of this rank is one of several of its forward pass, whose gradients never lie in `.grad`
    together."""
    forwards: dict[int, list[Slot]] = {}
    apart = set[Slot]()
    emptied = True
    for event in data.events.get(rank, []):
        if isinstance(event, ZeroGrad):
            emptied = True
        elif isinstance(event, Backward):
            of = event.accumulation_step if event.first_of_forward is None else event.first_of_forward
            one = (event.accumulation_step, event.microbatch)
            forwards.setdefault(of, []).append(one)
            if emptied or event.returned:
                apart.add(one)
            emptied = event.returned and emptied
    mine = (slot[0], slot[1])
    return any(mine in of and len(of) > 1 and apart.issuperset(of) for of in forwards.values())
