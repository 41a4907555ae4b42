"""Gradients are averaged over ranks although the loss already carries the whole normalisation.

## What it does
Finds a data-parallel reduction (DDP, FSDP, HSDP) whose operation divides by the number of ranks, or a sum that a line,
a communication hook or a backward pass of the trainer's divides by it, or an average that is made of messages which
nobody recorded, after a loss that was already divided by the tokens of all ranks. Every weight is 1/R of what it should
be, R being the size of the group.

## Why it matters
Adam divides a uniform factor away and clipping rescales it away, so the loss curve looks fine for weeks. But the clip
threshold now cuts at R times the intended norm, weight decay and epsilon weigh R times more than intended, SGD takes
steps R times too short, and a run on another number of ranks is another experiment.

## Example
    num_tokens = all_reduce(count_tokens(batch))          # tokens of all ranks
    loss = F.cross_entropy(logits, labels, reduction="sum") / num_tokens
    loss.backward()                                       # DDP averages: divides by R once more

## Fix
Either let the reduction sum,

    def sum_hook(_, bucket):
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, sum_hook)                            # DDP
    fsdp_module.set_gradient_divide_factor(1.0)                       # FSDP2; on gloo also
    fsdp_module.set_force_sum_reduction_for_comms(True)

or let the loss carry c = R/N instead of 1/N, so that the average undoes it:

    loss = F.cross_entropy(logits, labels, reduction="sum") * world_size / num_tokens

## References
- pytorch/torchtitan#2318, #2323, #2458; pytorch/torchtune#2172, #2687.
- torch/csrc/distributed/c10d/reducer.cpp; torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

from typing import TypeGuard

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.vocabulary import RANKS
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.named_counts import SAME, common_numbers, names_passes, names_ranks
from gradcheck_dist.events import BY_AUTOGRAD, DATA_PARALLEL, GATHERED, SHARDING, Event, LossNumber, Reduce
from gradcheck_dist.ledger.reductions import nominal_factor

CODE = "GS101"
NAME = "double-averaging"


def triggered(context: StepContext) -> bool:
    return any(context.axes.get(axis, 1) > 1 for axis in ("dp_replicate", "dp_shard", "cp"))


def judge(case: Case) -> Answer | None:
    event = case.reduce
    if case.culprit.write is not None:
        follows = case.culprit.before  # a buffer that is divided before it is summed, fairseq's way
        summed = event if event is not None else follows if isinstance(follows, Reduce) else None
        return _by_hand(case, summed) if summed is not None else None
    if (summands := _averaged_summands(case)) is not None:
        return summands
    if case.scaled_alike and case.combined_unseen:
        return _unseen(case)
    if event is not None and (in_hook := _in_hook(case, event)) is not None:
        return in_hook
    if (summed := _summed_behind(case)) is not None:
        return _in_front(case, summed)
    if event is None or not case.recorded or case.culprit.wrong_constant or case.pattern.kind != "uniform":
        return None
    factor = nominal_factor(event)
    if not factor < 1 or abs(case.pattern.factor / factor - 1) > max(1e-3, 2 * case.pattern.tolerance):
        return None
    size = event.num_ranks
    averages = abs(factor * size - 1) <= 1e-6
    alike = size if averages else 0
    divisor = f"{size}" if averages else f"{1 / factor:.6g}"
    does = f"averages over {size}" if averages else f"divides its sum by {divisor}, over {size}"
    name = case.names[0].expression if case.names else f"{factor:.6g}"
    wrapper = "the DTensor's redistribution" if event.hook == BY_AUTOGRAD else event.impl.upper()
    if event.impl == GATHERED:
        wrapper = f"the backward of {event.hook}"
    sum_instead = (
        'to_local(grad_placements=[Partial("sum")])'
        if event.hook == BY_AUTOGRAD
        else "set_gradient_divide_factor(1.0) on every FSDP module (on gloo with "
        "set_force_sum_reduction_for_comms(True))"
        if event.impl in SHARDING - {"fsdp1", GATHERED}
        else "a communication hook that sums"
        if event.impl in DATA_PARALLEL
        else "op=ReduceOp.SUM and no division after it"
        if event.impl == GATHERED
        else "op=ReduceOp.SUM"
    )
    or_loss = _or_loss(case, divisor, by="the average" if averages else "the division")
    return Answer(
        explanation=f"{_loss(case, alike)}, and {wrapper} then {does} ranks: the gradient is {name} of {_whose(case)}.",
        fix=_mended(case, alike, f"Use {sum_instead}{or_loss}."),
    )


def _divides_by(case: Case, size: int) -> bool:
    """Whether all weights are divided by a number of ranks; where these are as many as the accumulation steps, which of
    both was meant is not known."""
    single = [name.powers[0][0] for name in case.names if [abs(power) for _, power in name.powers] == [1]]
    others = set(single) - RANKS - {case.context.group_name(size)}
    is_size = abs(case.pattern.factor * size - 1) <= max(1e-3, 2 * case.pattern.tolerance)
    return size > 1 and not others and case.pattern.kind == "uniform" and is_size


def _averaged_summands(case: Case) -> Answer | None:
    """Gradients that are, or were, DTensors' summands, of which whoever reads them makes the mean."""
    size, tolerance = min((held.mean for held in case.held), default=1), max(1e-3, 2 * case.pattern.tolerance)
    if size < 2 or any(held.mean != size for held in case.held) or case.pattern.kind != "uniform":
        return None
    if any(
        abs(off - 1) > tolerance for off in (case.pattern.factor * size, *(cell.root_ratio for _, cell in case.cells))
    ):
        return None
    return Answer(
        explanation=f"{_loss(case)}, and the gradients are declared to be averaged over {size} ranks "
        f'(Partial("avg")), which whoever reads them does: they are 1/{size} of {_whose(case)}.',
        fix=f'Declare summands, to_local(grad_placements=[Partial("sum")]){_or_loss(case, size, by="the average")}.',
    )


def _unseen(case: Case) -> Answer | None:
    """An average over the ranks that nobody recorded, such as one made by hand out of single messages."""
    size = case.context.contributions.num_coordinates
    if not _divides_by(case, size):
        return None
    return Answer(
        explanation=f"{_loss(case, size)}, and between these two lines, by nothing recorded, gradients are averaged "
        f"over {size} ranks: they are 1/{size} of {_whose(case)}.",
        fix=_mended(case, size, f"Add them up without dividing by {size}{_or_loss(case, size)}."),
    )


def _in_hook(case: Case, event: Reduce) -> Answer | None:
    """A communication hook of the trainer's that calls a sum, or what nobody knows, and makes an average of it."""
    size, factor, tolerance = event.num_ranks, case.culprit.factor, max(1e-3, 2 * case.pattern.tolerance)
    if event.impl != "ddp" or event.hook is None or not _divides_by(case, size):
        return None
    if factor is None or abs(factor * size - 1) > tolerance or case.culprit.nominal not in (None, 1, 1 / size):
        return None
    if any(abs(cell.root_ratio - 1) > tolerance for _, cell in case.cells):
        return None
    return Answer(
        explanation=f"{_loss(case, size)}, and the communication hook {event.hook} then averages over {size} ranks: "
        f"the gradient is {case.names[0].expression if case.names else f'1/{size}'} of {_whose(case)}.",
        fix=_mended(case, size, f"Let the hook return the sum{_or_loss(case, size, by='its average')}."),
    )


def _summed_behind(case: Case) -> Reduce | None:
    """The sum over ranks in front of which unrecorded code of a backward pass (a hook) multiplied these gradients."""
    culprit = case.culprit
    if culprit.kind != "backward" or culprit.absent or not (culprit.before is None or _is_sum(culprit.before)):
        return None
    found = [[e.event for e in held.replay.history(held.rank) if _is_sum(e.event)] for held in case.held]
    return found[0][0] if found and all(found) else None


def _is_sum(event: Event | None) -> TypeGuard[Reduce]:
    return isinstance(event, Reduce) and event.num_ranks > 1 and abs(nominal_factor(event) - 1) <= 1e-6


def _in_front(case: Case, event: Reduce) -> Answer | None:
    """What such code divides by is the number of ranks that are summed over, behind losses that are right."""
    size, factor, tolerance = event.num_ranks, case.culprit.factor, max(1e-3, 2 * case.pattern.tolerance)
    if not _divides_by(case, size) or factor is None or abs(factor * size - 1) > tolerance:
        return None
    if any(abs(cell.root_ratio - 1) > tolerance for _, cell in case.cells):
        return None
    name = case.names[0].expression if case.names else f"1/{size}"
    return Answer(
        explanation=f"{_loss(case)}, and the backward pass (a hook in it) then divides by {size} what is summed over "
        f"{size} ranks: the gradient is {name} of {_whose(case)}.",
        fix=f"Drop this division{_or_loss(case, size)}.",
    )


def _by_hand(case: Case, event: Reduce) -> Answer | None:
    """A sum over ranks that a line of the trainer's divides by their number."""
    size = event.num_ranks
    if not _divides_by(case, size) or abs(nominal_factor(event) - 1) > max(1e-3, 2 * case.pattern.tolerance):
        return None
    if case.culprit.spared is not None:
        return None  # the line makes others right, and leaves these as they were
    name = case.names[0].expression if case.names else f"1/{size}"
    factor = case.culprit.write.factor if case.culprit.write is not None else None
    if factor and abs(factor * size - 1) > 1e-3:
        divisor = 1 / factor
        return Answer(
            explanation=f"This line divides the sum over {size} ranks by {divisor:.6g}, {size} times what would be "
            f"right: by the number of ranks besides, or by a count that holds all tokens {size} times. The gradient is "
            f"{name} of {_whose(case)}.",
            fix=f"Divide by {divisor / size:.6g}: by the tokens of all ranks, once.",
        )
    return Answer(
        explanation=f"{_loss(case, size)}, and this line divides the sum over {size} ranks by {size} as well: the "
        f"gradient is {name} of {_whose(case)}.",
        fix=_mended(case, size, f"Drop this division{_or_loss(case, size)}."),
    )


def _or_loss(case: Case, size: object, by: str = "it") -> str:
    """The other way out, by the loss: none where other parameters, which the same loss reaches, are right."""
    if not case.everywhere:
        return ""
    return f", or multiply the loss by {size} so that {by} undoes it"


def _undone(case: Case, size: int) -> LossNumber | None:
    """Where the program multiplies all losses by the number of ranks, as an average asks for, though they weigh no
    more for it: they divide by that many times the tokens."""
    context = case.context
    if context.objective != "global-token-mean" or context.relative or context.of_means or not case.everywhere:
        return None
    numbers = common_numbers(context.contributions)
    if not size or any(abs(one.factor * size - 1) <= SAME for one in numbers):
        return None  # the line that takes it out again is told by itself
    found = [one for one in numbers if abs(one.factor / size - 1) <= SAME]
    return next((one for one in found if names_ranks(one) or not names_passes(one)), None)


def _mended(case: Case, size: int, fix: str) -> str:
    if _undone(case, size) is None:
        return fix
    return (
        "Divide by the tokens of all ranks, each counted once, and by nothing else: ranks that share a batch (tensor "
        f"or pipeline parallel ones) count the same tokens. Or: {fix[0].lower()}{fix[1:]}"
    )


def _loss(case: Case, size: int = 0) -> str:
    """What the losses have by themselves; `size` ranks are averaged over, 0 for no matter."""
    objective = case.context.objective
    if size and (number := _undone(case, size)) is not None:
        return (
            f"The loss is multiplied by {size} at {number.site.short} ({number.written}), which an average over {size} "
            f"ranks undoes, but divides by {size} times the tokens of all ranks"
        )
    if case.context.relative:
        return "Other gradients are not divided by the ranks (what the losses divide by is not known)"
    if case.context.of_means:
        return "The losses are means that already weigh what they should"
    if objective == "global-token-mean":
        return "The loss already divides by the tokens of all ranks"
    return f"The loss already has the whole weight that {objective} asks for"


def _whose(case: Case) -> str:
    return "the others'" if case.context.relative else "the objective's"
