"""A reduction divides by another number than the loss was made for.

## What it does
Finds a data-parallel reduction that did what it documents, but whose divisor is not the one that the loss and the other
reductions of the run ask for: experts averaged over their own, smaller group, a divisor that counts an axis twice, one
FSDP unit whose divide factor differs. Other parameters came out right with the same losses, so the losses are right.
Also one that neither adds up nor averages (a divide factor of 4 over 2 ranks), where doing the one or the other would
make all weights right.

## Why it matters
Some parameters learn faster or slower than the rest, by a factor that depends on the mesh. Adam hides a constant factor
per parameter, the global gradient norm and the clip coefficient do not, and weight decay shifts for these parameters
alone. Loss curves stay close enough that such a fault was found only by comparing norms of single parameters.

## Example
    fully_shard(experts, mesh=mesh["edp"])          # averages over dp/ep ranks, but holds tokens of all dp ranks
    fully_shard(block, mesh=mesh["dp"])             # averages over dp ranks

    F.cross_entropy(logits, labels).backward()      # a mean over this rank's tokens
    for p in model.parameters():
        dist.all_reduce(p.grad)                     # a sum: R times the gradient of the mean over all ranks

## Fix
Give every reduction the same divisor, the number of ranks that hold other tokens (FSDP2; on gloo also force SUM):

    experts.set_gradient_divide_factor(dp_size)
    experts.set_force_sum_reduction_for_comms(True)

Behind losses that are means of each rank's own tokens, average: op=ReduceOp.AVG, or a division by the number of ranks.

In Megatron-LM and DeepSpeed: average experts over the expert-data-parallel group and divide by ep, or sum and divide by
the data-parallel size.

## References
- pytorch#160285, #155903; torchtitan#1551; Megatron-LM#5956, #7165; DeepSpeed#6545, #4957.
  Unverified: Megatron-LM#3023.
- torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, _get_gradient_divide_factors.
"""

from __future__ import annotations

from typing import TypeGuard

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.causes.experiments import between_names
from gradcheck_dist.diagnosis.causes.summed_means import bare_means
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.factors import Name
from gradcheck_dist.diagnosis.words import reduction
from gradcheck_dist.events import (
    BY_AUTOGRAD,
    DATA_PARALLEL,
    GATHERED,
    SHARDING,
    AmpUnscale,
    Event,
    GradWrite,
    Reduce,
    ScaleGrads,
)
from gradcheck_dist.ledger.reductions import nominal_factor
from gradcheck_dist.wording import plural

CODE = "GS104"
NAME = "wrong-divisor"
EXACT = 1e-3


def triggered(context: StepContext) -> bool:
    return any(context.axes.get(axis, 1) > 1 for axis in ("dp_replicate", "dp_shard", "cp"))


def judge(case: Case) -> Answer | None:
    event = case.reduce
    if case.summing is not None:
        return _sum_of_means(case, case.summing)
    if (odd := _odd_divisor(case)) is not None:
        return _of_odd_divisor(case, *odd)
    if event is None or not case.recorded or not case.culprit.wrong_constant or case.pattern.kind != "uniform":
        return None
    factor = nominal_factor(event)
    if not factor > 0 or not case.pattern.factor > 0:
        return None
    size = event.num_ranks
    wanted = case.pattern.factor / factor  # what it should divide by
    name = f" = {case.names[0].expression}" if case.names else ""
    return Answer(
        explanation=f"The {reduction(event)} over {plural(size, 'rank')} multiplies by {factor:.6g}, where the "
        f"losses and the other reductions ask for 1/{wanted:.6g}: these weights are x {case.pattern.factor:.6g}{name}.",
        fix=f"Let this reduction divide by {wanted:.6g} in all: {_dividing(event, wanted)}.",
        suggested_experiment=between_names(case.context, _counted_once(case)),
    )


def _sum_of_means(case: Case, culprit: Culprit) -> Answer | None:
    """A sum over ranks behind losses that take their mean themselves: who counts tokens for one, and does not count
    those of the other ranks, went wrong at the loss."""
    size, event = case.context.contributions.num_coordinates, culprit.event
    losses = [one.loss for one in case.context.contributions.by_key.values()]
    if case.pattern.kind != "uniform" or abs(case.pattern.factor / size - 1) > max(EXACT, 2 * case.pattern.tolerance):
        return None
    are_means = case.context.of_means or all(loss is not None and loss.reduction == "mean" for loss in losses)
    if not isinstance(event, Reduce) or not are_means:
        return None
    return Answer(
        explanation=f"{summed_means(case)} The gradient is {size} times the one of the mean over all ranks.",
        fix=f"Let the reduction average ({_average(event, size)}), or divide each loss by {size} as well.",
        culprit=culprit,
        suggested_experiment=between_names(case.context, _counted_once(case)),  # the passes may be as many
    )


def _odd_divisor(case: Case) -> tuple[int, Reduce, float] | None:
    """The reduction that neither adds up nor averages, and behind which these weights would be right if it did the one
    or the other, with its rank and what it multiplies by; None where a loss alone can be wrong."""
    found = [
        [(held.rank, event) for e in held.replay.history(held.rank) if _joins(event := e.event)] for held in case.held
    ]
    if case.terms or case.culprit.kind != "loss" or case.culprit.unrecorded or case.pattern.kind != "uniform":
        return None
    events, tolerance = [pair for of_held in found for pair in of_held], max(EXACT, 2 * case.pattern.tolerance)
    if not all(found) or len({(event.num_ranks, event.hook, _known_factor(event)) for _, event in events}) > 1:
        return None
    rank, event = min(events, key=lambda pair: (pair[0], pair[1].seq))
    factor = _known_factor(event) or _of_hook(case, event)
    if factor is None:
        return None
    usual = (factor, factor * event.num_ranks)  # by these it is off what a sum and an average multiply by
    if any(abs(off - 1) <= tolerance for off in usual):
        return None
    return (rank, event, factor) if any(abs(case.pattern.factor / off - 1) <= tolerance for off in usual) else None


def _joins(event: Event | None) -> TypeGuard[Reduce]:
    return isinstance(event, Reduce) and event.num_ranks > 1


def _known_factor(event: Reduce) -> float | None:
    factor = nominal_factor(event)
    return factor if factor > 0 else None


def _of_hook(case: Case, event: Reduce) -> float | None:
    """What a communication hook multiplies by that does what nobody documents: all that happens behind the losses.
    None where lines of the program write to the gradients as well."""
    done = [e.event for held in case.held for e in held.replay.history(held.rank)]
    factors = [cell.ratio / cell.root_ratio for _, cell in case.cells if cell.root_ratio]
    if event.hook is None or any(isinstance(one, GradWrite | AmpUnscale | ScaleGrads) for one in done):
        return None
    alike = len(factors) == len(case.cells) and max(factors) - min(factors) <= 2 * case.pattern.tolerance * factors[0]
    return factors[0] if alike and min(factors) > 0 else None


def _of_odd_divisor(case: Case, rank: int, event: Reduce, factor: float) -> Answer:
    wanted = case.pattern.factor / factor
    name = f" = {case.names[0].expression}" if case.names else ""
    return Answer(
        explanation=f"The {reduction(event)} over {plural(event.num_ranks, 'rank')} multiplies by {factor:.6g} in all, "
        f"which is neither their sum nor their average, where the losses ask for 1/{wanted:.6g}: these weights are x "
        f"{case.pattern.factor:.6g}{name}.",
        fix=f"Let this reduction divide by {wanted:.6g} in all: {_dividing(event, wanted, 'every')}. Or let each loss "
        f"carry the inverse, x {1 / case.pattern.factor:.6g}.",
        culprit=Culprit("reduce", rank, event, nominal=factor, factor=factor, wrong_constant=True),
    )


def summed_means(case: Case) -> str:
    """What is said of a sum that no division follows, though each rank's losses are a mean of their own; "" where there
    is none."""
    if case.summing is None or case.summing.event is None:
        return ""
    size, loss, total = case.context.contributions.num_coordinates, case.culprit.event, case.summing.event
    over = "elements" if case.context.of_means else "tokens"
    return (
        f"Each rank's losses{_at(loss)} are a whole mean over its own {over}, and the reduction{_at(total)} adds up "
        f"those of {size} ranks: nothing divides by {size}."
    )


def undivided_means(case: Case) -> tuple[str, str]:
    """What is said of means that nothing divides, neither by the passes of a rank nor by the ranks, and what mends it;
    both are missing, each by itself. "" where one is enough, or other numbers are off."""
    contributions = case.context.contributions
    total, ranks = len(contributions.by_key), contributions.num_coordinates
    passes = total // max(ranks, 1)
    if min(passes, ranks) < 2 or passes * ranks != total or not bare_means(contributions):
        return "", ""
    if abs(case.pattern.factor / total - 1) > max(EXACT, 2 * case.pattern.tolerance):
        return "", ""
    return (
        f"Each loss is a whole mean over its own tokens, and {total} of them are added up: nothing divides by the "
        f"{passes} passes of a rank, and nothing by the {ranks} ranks.",
        f"Two divisions are missing: divide each loss by {passes}, and let the reduction average over {ranks} ranks "
        "(op=ReduceOp.AVG, or a division after it).",
    )


def _at(event: Event | None) -> str:
    site = event.site if event is not None else None
    return f" at {site.short}" if site is not None else ""


def _counted_once(case: Case) -> list[Name]:
    """Of the factor's names those that are one number or one over it."""
    return [name for name in case.names if [abs(power) for _, power in name.powers] == [1]]


def _dividing(event: Reduce, divisor: float, which: str = "an") -> str:
    if event.hook is not None and event.op == "unknown":
        return f"look what the communication hook {event.hook} divides by"
    if event.impl in SHARDING - {"fsdp1", GATHERED}:
        return (
            f"set_gradient_divide_factor({divisor:.6g}) on {which} FSDP module (on gloo with "
            "set_force_sum_reduction_for_comms(True))"
        )
    if event.impl in DATA_PARALLEL:
        return "a communication hook that does so, or the rest of the division behind the last backward"
    return f"op=ReduceOp.SUM, and / {divisor:.6g} after it"


def _average(event: Reduce, size: int) -> str:
    if event.hook == BY_AUTOGRAD:
        return 'to_local(grad_placements=[Partial("avg")])'
    if event.impl in SHARDING - {"fsdp1", GATHERED}:
        return f"set_gradient_divide_factor({size}) on every FSDP module, or none at all"
    return "DDP's own, without the hook" if event.impl in DATA_PARALLEL else f"op=ReduceOp.AVG, or / {size} after it"
