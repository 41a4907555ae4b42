"""A checkpointed region draws other random numbers in backward than in forward.

## What it does
Compares the state of the random number generators where a checkpointed region begins in forward with the state where
it is run again in backward. Regions that draw nothing are left out. torch's `checkpoint` is watched, in both variants.

## Why it matters
Dropout draws another mask in backward. The gradient is that of a network which was never evaluated: right in scale,
wrong in direction, and no weight shows it. Training goes on, with more noise than dropout is meant to bring.

## Example
    y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)   # block holds a Dropout

## Fix
    y = checkpoint(block, x, use_reentrant=False)           # preserve_rng_state is True by default
It may be off where nothing in the region draws. Tensor-parallel trainers that keep generators of their own must restore
these as well (Megatron-LM: `tensor_parallel.random.checkpoint`).

## References
- torch.utils.checkpoint, `preserve_rng_state`; pytorch/torchtitan#1323, #2380; allenai/OLMo-core#828, where the
  loss after 150 steps was 2.49 instead of 2.19.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.events import Recompute
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import plural

CODE = "GS704"
NAME = "recomputed-otherwise"


def could_audit(facts: StepFacts) -> bool:
    return any(True for _ in facts.events_of(Recompute))


def audit(facts: StepFacts) -> Iterator[Remark]:
    by_line: dict[object, list[tuple[int, Recompute]]] = defaultdict(list)
    for rank, event in facts.events_of(Recompute):
        by_line[(event.site.file, event.site.line) if event.site else None].append((rank, event))
    for found in by_line.values():
        params: set[ParamKey] = set()
        for rank, event in found:
            params |= facts.params_in(rank, event.params)
        rank, first = found[0]
        regions = plural(len(found), "checkpointed region")
        yield Remark(
            answer=Answer(
                explanation=f"{regions} drew random numbers in forward and ran again in backward from another state of "
                "the generators: dropout took other masks there. The gradients are those of a network that was never "
                "evaluated; their weights are right.",
                fix="Leave preserve_rng_state at True where the checkpointed function draws random numbers; restore "
                "generators of your own as well.",
            ),
            pattern=f"{regions} recomputed with other random numbers",
            params=frozenset(params),
            ranks=tuple(sorted({rank for rank, _ in found})),
            rank=rank,
            event=first,
        )
