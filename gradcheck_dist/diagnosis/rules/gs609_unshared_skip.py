"""Some ranks threw a reduced gradient away and skipped the step, while others that reduced it with them took it.

## What it does
Collectives of one group are matched by their order. Where one rank's optimizer came after as many reductions as another
rank had run when it emptied its gradients without a step, the same gradient moved one copy and not the other.

## Why it matters
The decision was taken on what one rank sees: its own loss, the norm of its own shard, a NaN in its batch. Copies, or
shards of one model, are a step apart from then on, and so are the steps of their schedules; no gradient looks wrong.

## Example
    loss.backward()                       # reduced over all ranks
    if loss.item() < threshold:           # this rank's loss
        optimizer.step()
    optimizer.zero_grad()

## Fix
    spike = torch.tensor(float(loss.item() >= threshold))
    dist.all_reduce(spike, op=dist.ReduceOp.MAX)
    if not spike:
        optimizer.step()

## References
- ecmwf/WeatherGenerator#2718: a spike or NaN of one rank's loss, decided on rank 0 alone.
- torch.nn.parallel.DistributedDataParallel: gradients are averaged, the step is every rank's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.events import Backward, Event, OptimizerStep, Reduce, ZeroGrad
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import numbered

CODE = "GS609"
NAME = "unshared-skip"


@dataclass(frozen=True)
class _Skipped:
    """Of one group: who emptied what it had reduced, by which event (or behind which one), and who stepped with it."""

    event: Event
    skipped: tuple[int, ...]
    took: tuple[int, ...]


def could_audit(facts: StepFacts) -> bool:
    return any(len(of_rank) > 1 for of_rank in _reductions(facts))


def audit(facts: StepFacts) -> Iterator[Remark]:
    found = [one for of_rank in _reductions(facts) if (one := _skipped(facts, of_rank)) is not None]
    if not found:
        return
    first = found[0]
    skipped = sorted({rank for one in found for rank in one.skipped})
    took = sorted({rank for one in found for rank in one.took} - set(skipped))
    yield Remark(
        answer=Answer(
            explanation=f"{numbered('Rank', skipped)} did not step with gradients reduced with "
            f"{numbered('rank', took)}, which did. What ranks hold of the model is a step apart from here on.",
            fix="Let all ranks that train one model decide alike: all-reduce (MAX) what the decision rests on.",
        ),
        pattern=f"skipped on {numbered('rank', skipped)}, taken on {numbered('rank', took)}",
        params=frozenset(key for key, of_key in facts.data.tracks.items() if not of_key.keys().isdisjoint(skipped)),
        ranks=tuple(sorted({*skipped, *took})),
        rank=first.skipped[0],
        event=first.event,
        explains=lambda finding: finding.code != CODE,  # what one rank's step holds belongs to two steps of another's
    )


def _reductions(facts: StepFacts) -> Iterator[dict[int, list[Reduce]]]:
    """Of each group: its ranks' reductions until the optimizer came, of ranks whose optimizers read the same
    parameters; where owners step parts of the model, each has its own order."""
    found: dict[tuple[tuple[int, ...], frozenset[ParamKey]], dict[int, list[Reduce]]] = defaultdict(dict)
    keys: dict[int, dict[int, ParamKey]] = defaultdict(dict)
    for key, of_rank in facts.data.tracks.items():
        for rank, track in of_rank.items():
            keys[rank][track.param.id] = key
    for rank, events in facts.data.events.items():
        step = next((event for event in events if isinstance(event, OptimizerStep)), None)
        if step is None:
            continue
        read = frozenset(keys[rank][one] for one in facts.data.params_of(rank, step.params) if one in keys[rank])
        for event in events:
            if isinstance(event, Reduce) and len(event.group) > 1 and event.seq < step.seq:
                found[event.group, read].setdefault(rank, []).append(event)
    yield from found.values()


def _skipped(facts: StepFacts, of_rank: dict[int, list[Reduce]]) -> _Skipped | None:
    least = min(map(len, of_rank.values()))
    took = tuple(sorted(rank for rank, events in of_rank.items() if len(events) == least))
    skipped: dict[int, Event] = {}
    for rank, events in sorted(of_rank.items()):
        if len(events) > least and (emptied := _emptied(facts, rank, events, least)) is not None:
            skipped[rank] = emptied
    return _Skipped(next(iter(skipped.values())), tuple(skipped), took) if skipped else None


def _emptied(facts: StepFacts, rank: int, events: Sequence[Reduce], least: int) -> Event | None:
    """Where a rank emptied all that it had reduced when others stepped, before it went on; where no such event was
    recorded, that reduction, as long as nothing right of its passes was read."""
    last, then = events[least - 1], events[least]
    reduced = {param for event in events[:least] for param in facts.data.params_of(rank, event.params)}
    zeroed = [event for event in facts.data.events[rank] if isinstance(event, ZeroGrad)]
    for event in zeroed:
        if last.seq < event.seq < then.seq and reduced <= set(facts.data.params_of(rank, event.params)):
            return event
    place = facts.contributions.coordinate.get(rank, rank)
    passes = {
        (place, event.accumulation_step, event.microbatch)
        for event in facts.data.events[rank]
        if isinstance(event, Backward) and event.seq < last.seq
    }
    gone = [cell for held in facts.held if rank in held.ranks for cell in held.cells if cell.key in passes]
    return last if all(abs(cell.ratio) <= cell.margin for cell in gone) else None
