"""What ranks combine though all of them hold it alike already: copies, or what they computed with shards of one seed.

Of a sum of copies each rank goes on with a multiple of its own, and the gradient is that of one of them. Shards that
were drawn from one seed make summands that are as alike. Before these stands a function that hands their input on and
sums its gradient, so that backward comes to it next; from a sum of copies it comes to what made them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from gradcheck_dist.events import MAX_EXCHANGES, MAX_EXCHANGES_ALIKE, Event, Exchange
from gradcheck_dist.ledger.exchange_parts import ALIKE, are_alike, are_near, flat, nearness
from gradcheck_dist.ledger.exchanges import SCATTER, SUM, SWAP, Passed, given_and_arrived, matched, passed, sides_of

SUMS = (("all_reduce",), ("reduce_scatter_tensor",), ("reduce_scatter",), ("reduce_scatter_single",))


def summed_copies(events: Mapping[int, list[Event]]) -> Iterator[dict[int, Exchange]]:
    """The sums of what all ranks hold alike, of which backward hands on what arrives, by rank: in groups of ranks that
    sum unlike summands, too."""
    unlike = {one.ranks for one in passed(events) if one.forward in (SUM, SCATTER)}
    found: dict[tuple[object, ...], dict[int, Exchange]] = defaultdict(dict)
    for rank, of_rank in events.items():
        for event in of_rank:
            if isinstance(event, Exchange) and event.collectives == ("all_reduce",) and event.group in unlike:
                place = (event.group, event.accumulation_step, event.microbatch, event.index, event.function)
                found[place][rank] = event
    for of_group in found.values():
        first = next(iter(of_group.values()))
        whole = set(of_group) == set(first.group) and sum(first.input_counts) > 1
        if whole and _sums_copies(of_group) and all(_after_a_sum(events[rank], own) for rank, own in of_group.items()):
            yield of_group


def swapped_copies(events: Mapping[int, list[Event]]) -> Iterator[Passed]:
    """The exchanges of parts between ranks that all hold the same, where what comes back for each rank's copy is the
    same as well: what is computed between (experts) sees every token once for each rank, and so does its gradient."""
    for one in passed(events):
        read = given_and_arrived(one.events) if one.forward == SWAP and one.outcome == "right" else None
        if read is None:
            continue
        sent, arrived, near = read
        copies = [dict(enumerate([part] for part in parts)) for parts in arrived.values()]
        alike = are_alike(sent, near) and all(are_alike(of_rank, near) for of_rank in copies)
        if alike and flat(sent).any() and any(flat(of_rank).any() for of_rank in copies):
            yield one


def _after_a_sum(events: list[Event], own: Exchange) -> bool:
    """Whether backward comes to another sum of these ranks next. Of a function as many applications are recorded as
    come first, and none before it is known to communicate in backward: only where one that came later is there."""
    place = (own.group, own.accumulation_step, own.microbatch)
    beside = [
        event
        for event in events
        if isinstance(event, Exchange) and (event.group, event.accumulation_step, event.microbatch) == place
    ]
    following = next((event for event in beside if event.seq > own.seq), None)
    known = any(not event.collectives and event.seq < own.seq for event in beside)
    return known and following is not None and following.collectives in SUMS


def _sums_copies(of_group: dict[int, Exchange]) -> bool:
    read = {rank: sides_of(event) for rank, event in of_group.items()}
    if any(sides is None for sides in read.values()):
        return False
    given, made, arrived, back = ({rank: sides[i] for rank, sides in read.items() if sides} for i in range(4))
    total = {rank: [len(given) * part for part in parts] for rank, parts in given.items()}
    summed = are_alike(given, ALIKE) and are_near(made, total, ALIKE) and bool(flat(made).any())
    return summed and are_near(back, arrived, ALIKE)


def leads_on_unseen(events: Mapping[int, list[Event]], one: Passed) -> bool:
    """Whether what an exchange gave may have been given to another one that was not recorded any more."""
    for rank, own in one.events.items():
        exchanges = [event for event in events[rank] if isinstance(event, Exchange)]
        counts = Counter(event.function for event in exchanges)
        last: dict[str, int] = {}
        for event in exchanges:
            if event.group == own.group:
                last[event.function] = max(event.index, last.get(event.function, -1))
        full = [index for function, index in last.items() if counts[function] >= MAX_EXCHANGES_ALIKE]
        full += [max(last.values())] if len(exchanges) >= MAX_EXCHANGES else []
        if any(index <= own.index for index in full):
            return True
    return False


def sums_alike(events: Mapping[int, list[Event]], one: Passed) -> bool:
    """Whether what leads from the output of an exchange enters a sum of inputs that are alike on all ranks: what ranks
    compute there with shards that were drawn from one seed. Backward comes to that sum just before."""
    place = (one.first.group, one.first.accumulation_step, one.first.microbatch)
    before: dict[int, Exchange] = {}
    for rank, own in one.events.items():
        same = [e for e in events[rank] if isinstance(e, Exchange) and e.seq < own.seq
                and (e.group, e.accumulation_step, e.microbatch) == place]  # fmt: skip
        if not same or not same[-1].collectives or same[-1].operation:
            return False
        before[rank] = same[-1]
    read = {rank: sides_of(event) for rank, event in before.items()}
    if len({(event.function, event.index) for event in before.values()}) > 1 or None in read.values():
        return False
    given, made = ({rank: parts[i] for rank, parts in read.items() if parts} for i in range(2))
    near = nearness(next(iter(before.values())).dtype)
    wanted = {
        rank: [len(before) * given[rank][at if len(parts) > 1 else 0]] for at, (rank, parts) in enumerate(given.items())
    }
    return are_alike(given, near) and are_near(made, wanted, near) and bool(flat(made).any())


def fed_alike(events: Mapping[int, list[Event]]) -> set[tuple[int, int]]:
    """By (rank, set of parameters): from what something was computed that a function combined over ranks, though it was
    alike on all of them. Of copies that would be of no use; shards of one seed begin so."""
    return {
        (rank, event.params)
        for of_group in matched(events)
        if all(event.collectives for event in of_group.values()) and _given_alike(of_group)
        for rank, event in of_group.items()
        if event.params is not None
    }


def _given_alike(events: Mapping[int, Exchange]) -> bool:
    read = {rank: sides_of(event) for rank, event in events.items()}
    given = {rank: parts[0] for rank, parts in read.items() if parts}
    near = nearness(next(iter(events.values())).dtype)
    return len(given) == len(events) > 1 and are_alike(given, near) and bool(flat(given).any())
