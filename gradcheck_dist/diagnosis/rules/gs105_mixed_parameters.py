"""Gradients of different parameters are summed as if they were copies of one.

## What it does
Compares a few values of every parameter over the ranks that reduce its gradient together, at the begin and at the end
of the first recorded step. Where other parameters are equal on these ranks and this one is not, ranks hold experts,
shards or heads of their own under one name, and the reduction mixes their gradients. Zeros, ones and other constants
tell nothing, small differences are no other parameter, and experts that all began alike cannot be told from copies.
Ranks that bring other elements of one tensor to a reduction by hand (the shards of FSDP2) hold no copies either. Nor do
ranks that register the modules of one model in another order each, for DDP joins parameters by their number.

## Why it matters
Every expert or shard steps by the mean over all of them. They are pulled in the same direction and never specialise,
and nothing in a loss curve or norm shows it: the step just goes where no loss points.

## Example
    for p in model.parameters():                 # the experts too
        dist.all_reduce(p.grad)                  # over the world, instead of over the expert's replicas

## Fix
Reduce such a parameter over the ranks that hold the same one only: the expert-data-parallel group for experts, the
data-parallel group (without tp) for hand-written tensor-parallel shards. If they are meant to be copies, broadcast them
from one rank before training.

## References
- Expert data parallelism: DeepSpeed-MoE, arXiv 2201.05596; Megatron-LM core, expert_data_parallel_group.
- Orders of ranks: apache/mxnet#17056; deepspeedai/DeepSpeed#2343.
- Expert groups in the field: NVIDIA/Megatron-LM#5956, #6080; deepspeedai/DeepSpeed#5259.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.audits.unlike import first_of
from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Event, Reduce
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import numbered, plural

CODE = "GS105"
NAME = "mixed-parameters"
UNREDUCED = "GS103"
SCALED = frozenset({"GS000", "GS101", "GS102", "GS104", "GS303"})
"""Rules that tell a number by which weights are off: what is mixed has no right one."""
SAME_FACTOR = 1e-3
"""Relative; counted again is counted a whole number of times."""


def could_audit(facts: StepFacts) -> bool:
    return facts.mixed.tells


def audit(facts: StepFacts) -> Iterator[Remark]:
    found = facts.mixed
    if not found.unlike or found.began_apart:
        return
    rank, event = first_of(found.unlike)
    names = sorted({one.param[1] for one in found.unlike})
    holders = max((one.holders for one in found.unlike), key=len)
    groups = " | ".join(",".join(map(str, ranks)) for ranks in holders)
    shown = in_short(names)
    beside = f"; the other {len(found.alike)} that are reduced are equal on their ranks" if found.alike else ""
    copies = facts.context.ranks_per_batch(event.group) if isinstance(event, Reduce) else 1
    # Not so where ranks of a batch hold summands (sequence parallel), or are averaged.
    counted = any(
        abs(cell.ratio / copies - 1) <= max(SAME_FACTOR, cell.tolerance / copies)
        for one in facts.held if one.param in found.alike
        for cell in one.cells
    )  # fmt: skip
    again = f" What is equal on all of them is counted {copies} times, once for each rank of a batch." * (
        copies > 1 and counted
    )

    wrong_ranks = UNREDUCED in facts.found and _never_arrive(facts) <= {one.param for one in found.unlike}
    if wrong_ranks:
        again += " The ranks that do hold equal ones are left out: what they want of it never arrives."

    def follows(finding: Finding) -> bool:
        """Whether a finding is that the same line adds up copies of one gradient, or that it goes over other ranks
        than those that hold copies."""
        if finding.code == UNREDUCED:
            return wrong_ranks
        at, factor = finding.first_event, finding.factor.observed
        here = at is not None and event.site is not None and (at.file, at.line) == (event.site.file, event.site.line)
        counted = finding.code in ("GS000", "GS102", "GS104") and factor is not None
        return here and counted and abs((factor or 0.0) / copies - 1) <= SAME_FACTOR

    step = facts.context.step
    since = f"in step {step}" if step else "from the first step on"
    apart = (
        " Or they are copies that a step before the recorded ones set apart (one without a reduction): what began at "
        "zero is each rank's own updates alone then. Recorded from the first step on (--steps 0:3), this is told."
    ) * bool(step)
    what = (
        "They are experts, shards or heads of their own, or copies that were never made equal; in both cases the sum "
        "belongs to no parameter."
    )
    fix = (
        f"Reduce them over ranks that hold the same parameter only ({groups}"
        f"{' and those that are left out: another process group' * wrong_ranks}). If they are meant to be copies, "
        "broadcast them from one rank before the first step."
    )
    if (other := _other_order(facts, rank, event)) is not None:
        what, fix = (
            other,
            (
                "Let every rank register its modules in one order: none that comes from a set, or from a dict that is "
                "filled in the rank's own order."
            ),
        )
    yield Remark(
        answer=Answer(
            explanation=f"The gradients of {shown} are combined over {numbered('rank', found.ranks)}, which hold "
            f"different values under these names (ranks with equal ones: {groups}), {since}{beside}. "
            f"{what}{again}{apart}",
            fix=fix,
        ),
        pattern=f"gradients of {plural(len(names), 'parameter')} are combined over ranks that hold "
        f"different ones: {groups}",
        params=frozenset(one.param for one in found.unlike),
        ranks=found.concerned,
        rank=rank,
        event=event,
        explains=follows,
        rescales=SCALED,
    )


def _never_arrive(facts: StepFacts) -> set[ParamKey]:
    """The parameters that lack some contributions wholly."""
    return {one.param for one in facts.held for cell in one.cells if abs(cell.ratio) <= max(SAME_FACTOR, cell.margin)}


def _other_order(facts: StepFacts, rank: int, event: Event) -> str | None:
    """What the wrapper joins, where ranks have the same names in another order; None where they do not."""
    if not isinstance(event, Reduce) or event.wrapper is None:
        return None
    mine = _in_order(facts, rank, event)
    for peer in event.group:
        theirs = _in_order(facts, peer, event)
        if mine != theirs and sorted(mine) == sorted(theirs):
            one, other = next((one, other) for one, other in zip(mine, theirs, strict=True) if one != other)
            return (
                f"The wrapper joins parameters in the order in which modules were registered, which is another one on "
                f"rank {peer}: rank {rank}'s {one} with what is {other} there."
                + " DDP makes copies of these when it is made, too."
                * (event.impl == "ddp")
            )
    return None


def _in_order(facts: StepFacts, rank: int, event: Reduce) -> list[str]:
    """The names of what a rank's wrapper reduces, in the order in which it was registered."""
    reduces = (one for one in facts.data.events[rank] if isinstance(one, Reduce) and one.wrapper == event.wrapper)
    ids = {param for one in reduces for param in facts.data.params_of(rank, one.params)}
    tracks = [of_rank[rank] for of_rank in facts.data.tracks.values() if rank in of_rank]
    return [param.name for param in sorted((track.param for track in tracks), key=lambda p: p.id) if param.id in ids]
