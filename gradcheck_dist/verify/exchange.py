"""Numbers between ranks through the rendezvous store: no collective, and nobody waits for ever.

Every rank of a group asks for the same tags, each once; values are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradcheck_dist.wording import numbered

TIMEOUT = timedelta(seconds=120)
_PREFIX = "gradcheck/verify"


class OutOfStepError(Exception):
    """A rank did not come to where the others wait."""


class Exchange:
    """What this rank and the ranks of a group tell each other. `ranks` is (rank,) when it is alone."""

    def __init__(self, rank: int, ranks: Sequence[int], store: Any = None, prefix: str = "") -> None:
        self.rank, self.ranks = rank, tuple(sorted(ranks))
        self._store, self._prefix = store, prefix

    @classmethod
    def of_world(cls, prefix: str) -> Exchange:
        """All ranks of the job; this rank alone when there is no job or no store."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, (0,))
        rank, size = dist.get_rank(), dist.get_world_size()
        return cls(rank, range(size), dist.distributed_c10d._get_default_store(), prefix)

    @property
    def alone(self) -> bool:
        return len(self.ranks) == 1

    def of(self, ranks: Sequence[int]) -> Exchange:
        """The same for some of the ranks."""
        return Exchange(self.rank, ranks, self._store, self._prefix)

    def tagged(self, prefix: str) -> Exchange:
        """The same, every tag below `prefix`."""
        return Exchange(self.rank, self.ranks, self._store, f"{self._prefix}/{prefix}")

    def gather(self, tag: str, value: Any) -> list[Any]:
        """What every rank of the group says under this tag, in the order of ranks.

        Raises:
            OutOfStepError: a rank has said nothing for two minutes.
        """
        if self.alone:
            return [value]
        self._store.set(self._key(tag, self.rank), json.dumps(value))
        keys = [self._key(tag, rank) for rank in self.ranks]
        try:
            self._store.wait(keys, TIMEOUT)
        except (RuntimeError, dist.DistError) as error:
            missing = [rank for rank, key in zip(self.ranks, keys, strict=True) if not self._store.check([key])]
            raise OutOfStepError(
                f"{numbered('rank', missing) if missing else 'a rank'} did not come to {tag!r} within "
                f"{TIMEOUT.seconds} s: ranks must step their optimizers together to be checked together"
            ) from error
        return [json.loads(self._store.get(key)) for key in keys]

    def _key(self, tag: str, rank: int) -> str:
        return f"{_PREFIX}/{self._prefix}/{tag}/{rank}"


def connected(rank: int, seen: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ranks that `rank` communicates with directly or through others; seen[r] are those that rank r saw."""
    found, size = {rank}, 0
    while len(found) != size:
        size = len(found)
        for other, ranks in enumerate(seen):
            if found & {other, *ranks}:
                found |= {other, *ranks}
    return tuple(sorted(found))
