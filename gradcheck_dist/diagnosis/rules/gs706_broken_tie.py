"""Parameters that were one when the model was built, and are trained as several.

## What it does
Notes modules that the program gave one parameter (an output head that shares the embedding's matrix) and that hold one
each when they are trained, with gradients that each come from its own use alone. torch replaces parameters module by
module and knows of no ties: `parallelize_module`, `to_empty` of a model from the meta device,
`load_state_dict(assign=True)`. Where the program itself sets a parameter of its own later, that is meant, and where it
writes something into these gradients, it may add up what belongs together.

## Why it matters
Each copy gets a part of the gradient, and an optimizer state of its own. Where they still share memory (a state that
holds one tensor under both names, with assign=True), the optimizer moves that once for each. Else they part with the
first step: the model has more parameters than was meant, the embedding learns from its own use alone, and a checkpoint
that is loaded into a tied model keeps one of them. Nothing fails, and the loss falls.

## Example
    model.head.weight = model.embed.weight
    parallelize_module(model, mesh, {"embed": RowwiseParallel(...), "head": ColwiseParallel(...)})
    # two DTensors from here on

## Fix
Tie them again behind that line and before the optimizer is made:

    model.head.weight = model.embed.weight      # both need the same placements
Here both are Shard(0). What shall be two parameters gets a tensor of its own before: `model.head.weight =
nn.Parameter(model.embed.weight.detach().clone())`.

## References
- torch/distributed/tensor/parallel/style.py, `register_parameter`; torch/nn/modules/module.py, `_apply` and
  `_load_from_state_dict`, measured with torch 2.13.
- pytorch/torchtitan#2252, Modalities/modalities#357 (to_empty); pytorch/pytorch#188346 (assign=True);
  foundation-model-stack/foundation-model-stack#331 (tensor parallel).
- Press and Wolf, "Using the Output Embedding to Improve Language Models", arXiv 1608.05859.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import WRITTEN, BrokenTie, GradWrite
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import plural

CODE = "GS706"
NAME = "broken-tie"


def could_audit(facts: StepFacts) -> bool:
    return any(True for _ in facts.events_of(BrokenTie))


def audit(facts: StepFacts) -> Iterator[Remark]:
    trained = facts.trained_on(facts.data.events.keys())
    found: dict[frozenset[ParamKey], list[tuple[int, BrokenTie]]] = {}
    for rank, event in facts.events_of(BrokenTie):
        params = facts.params_in(rank, event.params) & trained
        if len(params) > 1 and not _is_written(facts, rank, event):
            found.setdefault(params, []).append((rank, event))
    for params, events in found.items():
        rank, first = events[0]
        names = in_short(sorted(key[1] for key in params))
        where = "torch gave each module one of its own there" if first.site else "torch gave each module one of its own"
        then = (
            "and the optimizer moves the memory that they still share once for each, with a state (and a weight decay) "
            "of its own"
            if all(event.in_one_memory for _, event in events)
            else "and they part with the first step"
        )
        yield Remark(
            answer=Answer(
                explanation=f"{names} were one parameter when the model was built, and {where}, as parallelize_module, "
                f"to_empty and load_state_dict(assign=True) do. Each gets the gradient of its own use alone, {then}; "
                "weights are told of each by itself.",
                fix=f"Tie them again behind that, before the optimizer is made ({_tied(facts, rank, first)}; with the "
                "same placements where they are DTensors); or give each a tensor of its own where that is meant.",
            ),
            pattern=f"{plural(len(params), 'parameter')} in the place of one that is tied",
            params=params,
            ranks=tuple(sorted({rank for rank, _ in events})),
            rank=rank,
            event=first,
        )


def _is_written(facts: StepFacts, rank: int, tie: BrokenTie) -> bool:
    """Whether a line writes something into these gradients: one copy's to the other's, perhaps."""
    ids = set(facts.data.params_of(rank, tie.params))
    writes = (event for event in facts.data.events[rank] if isinstance(event, GradWrite) and event.op == WRITTEN)
    return any(event.params is None or ids & set(facts.data.params_of(rank, event.params)) for event in writes)


def _tied(facts: StepFacts, rank: int, event: BrokenTie) -> str:
    """The assignment that makes them one."""
    names = {of_key[rank].param.id: key[1] for key, of_key in facts.data.tracks.items() if rank in of_key}
    first, *rest = [names[one] for one in sorted(facts.data.params_of(rank, event.params)) if one in names]
    return " = ".join([*rest, first])
