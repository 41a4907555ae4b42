"""A group of an optimizer has a parameter more than once, and steps it as often.

## What it does
Notes parameters that got a gradient and that stand in one parameter group of an optimizer of torch.optim more than
once, as what two modules share does in a list of both modules' parameters. Optimizers of one's own may step each once,
and are not meant.

## Why it matters
The gradient is right, and `step()` takes it for each time that the parameter is listed: SGD moves these parameters
twice as far as the others, and Adam's averages take in each gradient twice. torch only warns.

## Example
    actor, critic = Head(trunk, 4), Head(trunk, 1)
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()])   # the trunk's twice

## Fix
List each parameter once. A module that holds all of them names each once by itself:

    optimizer = torch.optim.Adam(nn.ModuleList([actor, critic]).parameters())

## References
- pytorch/pytorch#40967 (torch's warning), thu-ml/tianshou#395; measured with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import OptimizerStep
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import plural

CODE = "GS709"
NAME = "repeated-parameter"


def could_audit(facts: StepFacts) -> bool:
    return any(True for _ in facts.events_of(OptimizerStep))


def audit(facts: StepFacts) -> Iterator[Remark]:
    trained = facts.trained_on(facts.data.events.keys())
    params: set[ParamKey] = set()
    found: list[tuple[int, OptimizerStep]] = []
    for rank, event in facts.events_of(OptimizerStep):
        if repeated := facts.params_in(rank, event.repeated) & trained:
            params |= repeated
            found.append((rank, event))
    if not found:
        return
    rank, first = found[0]
    is_one = len(params) == 1
    yield Remark(
        answer=Answer(
            explanation=f"{in_short(sorted(name for _, name in params))} {'stands' if is_one else 'stand'} in a group "
            f"of {first.optimizer} more than once, which takes the gradient each time that it comes to "
            f"{'it' if is_one else 'them'}: {'it is' if is_one else 'they are'} stepped as often as listed.",
            fix="List each parameter once: what modules share is among the parameters of each of them, and once among "
            "those of a module that holds them (torch.nn.ModuleList).",
        ),
        pattern=f"{plural(len(params), 'parameter')} more than once in a group of the optimizer",
        params=frozenset(params),
        ranks=tuple(sorted({rank for rank, _ in found})),
        rank=rank,
        event=first,
    )
