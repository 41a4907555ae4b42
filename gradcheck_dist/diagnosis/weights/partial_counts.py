"""Token counts of a part of the step: what a loss is divided by when its count was taken over too few.

A count that is all-reduced over the wrong group, or taken before the other accumulation steps or microbatches have
run, makes the weights follow N / N_g: N tokens of the step, N_g those of the part that the contribution was counted in.
Parts are blocks of data ranks (neighbours, or every so manieth, as the axes of a mesh lie), groups that reduced
something (nodes of unequal sizes), one accumulation step, one microbatch, and what these have in common.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gradcheck_dist.ledger.contributions import ContributionKey


@dataclass(frozen=True)
class Partition:
    """Which part of the step each contribution is counted in. `words` name the parts, `num_parts` counts them."""

    words: str
    part: Mapping[ContributionKey, tuple[int, int, int]]
    num_parts: int

    def tokens_of(self, tokens: Mapping[ContributionKey, int]) -> dict[ContributionKey, int]:
        """N_g of each contribution."""
        total: dict[tuple[int, int, int], int] = {}
        for key, count in tokens.items():
            total[self.part[key]] = total.get(self.part[key], 0) + count
        return {key: total[self.part[key]] for key in tokens}


def partitions(
    keys: Sequence[ContributionKey], recorded: Iterable[Collection[int]] = (), everyone: Iterable[int] = ()
) -> list[Partition]:
    """All ways to count a part of the step, but for those that have objectives of their own (each rank's tokens, each
    contribution's), simplest first. `recorded`: the data ranks of each group that reduced something. `everyone`: all
    data ranks, also those that have no tokens."""
    ranks, steps, microbatches = ({key[axis] for key in keys} for axis in range(3))
    ranks |= set(everyone)
    found: dict[tuple[tuple[int, int, int], ...], Partition] = {}
    for group in _groups(ranks, recorded):
        for own_step in (False, True)[: 1 + (len(steps) > 1)]:
            for own_microbatch in (False, True)[: 1 + (len(microbatches) > 1)]:
                part = {
                    key: (group.of[key[0]], key[1] if own_step else 0, key[2] if own_microbatch else 0) for key in keys
                }
                num_parts = len(set(part.values()))
                alone = group.num_parts == len(ranks) and not (own_step or own_microbatch)
                if num_parts in (1, len(keys)) or alone:
                    continue
                times = [name for name, own in (("accumulation step", own_step), ("microbatch", own_microbatch)) if own]
                words = f"{group.words}{f' and the same {_and(times)}' if times else ''}"
                one = Partition(words, part, num_parts)
                found.setdefault(tuple(part.values()), one)
    return list(found.values())


@dataclass(frozen=True)
class _Groups:
    """Which group each data rank is in, numbered in the order of their first ranks."""

    of: Mapping[int, int]

    @property
    def num_parts(self) -> int:
        return len(set(self.of.values()))

    @property
    def words(self) -> str:
        if self.num_parts == 1:
            return "all data ranks"
        if self.num_parts == len(self.of):
            return "the same data rank"
        groups = [
            [str(rank) for rank, group in sorted(self.of.items()) if group == index] for index in range(self.num_parts)
        ]
        shown = " | ".join(", ".join(group) for group in groups[:4]) + (" | ..." if len(groups) > 4 else "")
        return f"data ranks {shown}"


def _groups(ranks: Collection[int], recorded: Iterable[Collection[int]]) -> list[_Groups]:
    """Blocks of one size, as the axes of a mesh lie, then the recorded groups that share no rank."""
    num = len(ranks)
    blocks = []
    for size in (size for size in range(num, 0, -1) if num % size == 0):
        blocks.append({rank: rank // size for rank in ranks})
        if size not in (1, num):
            blocks.append({rank: rank % (num // size) for rank in ranks})
    groups = [frozenset(ranks) & frozenset(group) for group in recorded]
    for first in groups:
        apart = [first]
        apart += [group for group in groups if not any(group & other for other in apart)]
        numbered: dict[object, int] = {}
        own = {rank: next((group for group in apart if rank in group), rank) for rank in sorted(ranks)}
        blocks.append({rank: numbered.setdefault(group, len(numbered)) for rank, group in own.items()})
    return [_Groups(of) for of in blocks]


def _and(words: Sequence[str]) -> str:
    return " and ".join(words)
