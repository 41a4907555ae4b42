"""Reductions: by what each multiplies, as it is documented, and which ranks take part in one."""

from __future__ import annotations

from gradcheck_dist.events import SHARDING, Reduce


def summed_in(event: Reduce) -> str:
    """The dtype in which a reduction sums, "" where it is that of the gradients."""
    compressed = {"bf16_compress": "bfloat16", "fp16_compress": "float16"}
    return event.dtype or next((dtype for name, dtype in compressed.items() if name in (event.hook or "")), "")


def rounds_of(ready: dict[int, Reduce], summands_on: dict[int, frozenset[int]]) -> list[set[int]]:
    """The members of each reduction that some rank waits for; of a whole one once."""
    rounds: list[set[int]] = []
    known: set[int] = set()
    for rank in ready:
        if rank not in known:
            rounds.append(_members(rank, ready, summands_on))
            if all(member >= 0 for member in rounds[-1]):
                known |= rounds[-1]
    return rounds


def _members(rank: int, ready: dict[int, Reduce], summands_on: dict[int, frozenset[int]]) -> set[int]:
    """All ranks of one reduction: its group, under HSDP the groups of all replicas of all its members, and those that
    hold summands of what FSDP adds up before it (`summands_on`).

    A rank that waits for another reduction, or for none, is a member that is not ready; -1 - rank stands for it.
    """
    members: set[int] = set()
    opened: set[tuple[int, ...]] = set()
    todo: list[tuple[int, Reduce, tuple[int, ...]]] = [(rank, ready[rank], ())]
    while todo:
        current, wanted, over = todo.pop()
        event = ready.get(current)
        if current in members or -1 - current in members:
            continue
        if event is None or not _same_reduction(event, wanted, over):
            members.add(-1 - current)
            continue
        members.add(current)
        for group in (event.group, event.replicate_group if event.all_reduced else ()):
            if group not in opened:
                opened.add(group)
                todo += [(peer, event, group) for peer in group]
        if event.impl in SHARDING:
            todo += [(peer, event, ()) for peer in summands_on.get(current, ())]
    return members


def _same_reduction(event: Reduce, wanted: Reduce, over: tuple[int, ...]) -> bool:
    """Whether a peer that was found in the group `over` waits for the same: one over cp is none over dp."""
    if event.impl != wanted.impl or event.all_reduced != wanted.all_reduced:
        return False
    return not over or any(over == group or set(over) == set(group) for group in (event.group, event.replicate_group))


def nominal_factor(event: Reduce) -> float:
    """What each input is multiplied by, by the documented semantics of the reduction, when it has been reduced over all
    its axes; NaN when not known."""
    return shards_factor(event) * replicas_factor(event)


def shards_factor(event: Reduce) -> float:
    """What a reduction multiplies by before it comes to the replicas: under HSDP that is all that happens to what is
    left to a later one (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce)."""
    if event.op not in ("sum", "avg", "premul_sum"):
        return float("nan")
    return (event.premul or 1.0) / ((event.pre_divide or 1.0) * (len(event.group) if event.op == "avg" else 1))


def is_partial(event: Reduce) -> bool:
    """Whether the reduction over the replicas is left to a later one, which takes up what this one gave."""
    return event.impl in SHARDING and not event.all_reduced and bool(event.replicate_group)


def replicas_factor(event: Reduce) -> float:
    """What it multiplies by over the replicas and behind them."""
    averaged = event.replicate_op == "avg" and event.replicate_group
    return 1.0 / ((event.post_divide or 1.0) * (len(event.replicate_group) if averaged else 1))
