"""Ranks that share their tokens each keep their own part of a replicated parameter's gradient.

## What it does
Finds parameters whose gradient on each rank holds that rank's summand alone, although the summands of all ranks that
share these tokens (tensor, sequence or expert parallel) make the gradient: norm weights under sequence parallelism, a
router behind a `to_local()`, anything replicated that sees only a part of the activations. A matrix that is embedding
on the first pipeline stage and output head on the last is one parameter too, and both stages' parts are its gradient.
Also a bias that each tensor-parallel rank adds to its summand of a row-parallel layer's output, before the sum: its
parts are equal, and no rank's copy looks wrong.

## Why it matters
Each rank steps with another part, about 1/sqrt(tp) of the norm: the copies of the parameter drift apart, and every
checkpoint keeps the copy of whichever rank wrote it. Nothing in the loss shows it.

## Example
    class Norm(nn.Module):                       # its input is Shard(1): every rank sees a part of the sequence
        def forward(self, x):
            return F.rms_norm(x, x.shape[-1:], self.weight)
    ...                                          # and nobody all-reduces Norm.weight.grad over tp

## Fix
    for p in sequence_parallel_parameters:       # plain torch, after the last backward
        dist.all_reduce(p.grad, group=tp_group)
With DTensors: `parallelize_module(model, tp_mesh, {"norm": SequenceParallel()})`, and no `to_local()` without
`grad_placements=[Partial()]`. Megatron-LM: mark the parameter `sequence_parallel = True`, and
`allreduce_layernorm_grads` sums it.

## References
- Tied embeddings over stages: Megatron-LM, arXiv 1909.08053, embedding all-reduce; NVIDIA/Megatron-LM#844, #656.
- NVIDIA/Megatron-LM#1446; pytorch/torchtitan#2387, #2416, #4054; hpcaitech/ColossalAI#4926;
  NVIDIA/TransformerEngine#435; pytorch/torchtitan#2217.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.equal_summands import equal_summands
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.finding import Factor
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.factors import exact_fraction, name_number
from gradcheck_dist.wording import numbered, plural

CODE = "GS703"
NAME = "unsummed-parts"
GONE, EXACT = 1e-3, 1e-9
DEGREES = ("tp", "cp", "ep")
"""What parts a gradient over ranks that share their tokens: neither accumulation steps nor stages do."""


def triggered(context: StepContext) -> bool:
    return any(len(one.ranks) > 1 for one in context.contributions.by_key.values())


def audit(facts: StepFacts) -> Iterator[Remark]:
    """Summands that are equal on all ranks look like copies of the whole gradient."""
    for found in equal_summands(facts.data, facts.held):
        names = sorted({name.split(" ")[0] for _, name in found.params})
        ranks = found.sum.ranks
        yield Remark(
            answer=Answer(
                explanation=f"{numbered('Rank', ranks)} hold copies of {names[0]}"
                + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                + ", and each adds it to its own summand of what is then summed over them: in all it counts "
                f"{len(ranks)} times, and its gradient is the sum of {len(ranks)} equal parts, of which each rank has "
                "one. Divided beforehand the output is right, and the gradient divided as well.",
                fix="Add it once, after the sum: a row-parallel layer's bias after the all-reduce or reduce-scatter. "
                "Else all-reduce (sum) its gradient over these ranks.",
            ),
            pattern=f"{len(ranks)} equal parts of one gradient that nobody sums",
            params=found.params,
            ranks=ranks,
            rank=ranks[0],
            event=found.sum.first,
            factor=Factor(observed=1 / len(ranks), exact=f"1/{len(ranks)}"),
        )


def judge(case: Case) -> Answer | None:
    if not case.culprit.absent:
        return None
    wrong = [(held, cell) for held, cell in case.cells if not cell.right]
    if not wrong or any(abs(cell.ratio) > GONE for _, cell in wrong):
        return None
    for held, cell in wrong:
        if held.replay.basis.summands.get(cell.key, 1) < 2:
            return None
        own = [one for one in held.cells if one.key == cell.key and abs(one.ratio) > GONE]
        if not own and held.has_zero_summand(cell.key):
            continue
        coordinate = case.context.contributions.coordinate
        if not own or any(coordinate.get(held.replay.basis.origin[one.column]) != cell.key[0] for one in own):
            return None
    ranks = sorted({rank for held, _ in wrong for rank in held.ranks})
    num = len({held.param for held, _ in wrong})
    if all(held.replay.basis.origin[cell.column] < 0 for held, cell in wrong):
        share, pattern = _share(case, wrong, "copy", ())
        return Answer(
            explanation=f"On {numbered('rank', ranks)} lie two copies of one matrix, on two pipeline stages, "
            "each with the gradient of its own stage alone; the sum of both, which is the gradient, was never taken. "
            "The copies drift apart.",
            fix="Add up the gradients of the two copies after the last backward and give both the sum, or let both "
            "stages use one parameter.",
            factor=share,
            pattern=pattern,
        )
    share, pattern = _share(case, wrong, "rank", DEGREES)
    return Answer(
        explanation=f"On {numbered('rank', ranks)} there is only each rank's own summand of the gradient of "
        f"{plural(num, 'parameter')}; the sum over the ranks that share these tokens, which "
        "is the gradient, was never taken. The copies drift apart. (They began alike, as copies do; shards that every "
        "rank drew from one seed do so, too, and lack nothing.)",
        fix="All-reduce (sum) the gradients of these parameters over the ranks that share these tokens after the last "
        "backward: the tensor-parallel group, or, for a matrix that is tied over pipeline stages, the stages that hold "
        "it. A DTensor layout does it for the former.",
        factor=share,
        pattern=pattern,
    )


def _share(
    case: Case, wrong: Sequence[tuple[Held, Cell]], holder: str, degrees: Sequence[str]
) -> tuple[Factor | None, str | None]:
    """What each holder has of the gradient, in a number and in words; None where that is not one number. `degrees` may
    give it a name. Summands of zero tell nothing of it."""
    counts = {
        (sum(one.ratio > GONE for one in of_key), len(of_key))
        for held, cell in wrong
        for of_key in [[one for one in held.cells if one.key == cell.key]]
    }
    if len(counts) > 1:
        counts = {(own, parts) for own, parts in counts if own}
    if len(counts) != 1:
        return None, None
    (own, parts) = counts.pop()
    known = {name: degree for name, degree in case.context.quantities.items() if name in degrees}
    names = name_number(own / parts, known, EXACT, max_factors=1)
    expression = names[0].expression if names else None
    share = Factor(observed=own / parts, exact=exact_fraction(own / parts, EXACT), expression=expression)
    return share, f"each {holder} holds {own} of {parts} summands"
