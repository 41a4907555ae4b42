"""Passes that reach the parameters of several optimizers, beside passes that train one of these alone.

A generator's pass goes through its discriminator. What it leaves there is in the gradient of the discriminator's next
step, unless its parameters are frozen meanwhile or emptied behind. A loss of both models looks the same, so what is
left is a remark; and what is emptied was not lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gradcheck_dist.diagnosis.losses.returned import arrived
from gradcheck_dist.diagnosis.losses.several_losses import line_of
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.events import Backward, OptimizerStep, ZeroGrad
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.wording import plural

Owner = int
"""An optimizer, by the order in which a rank's optimizers step."""


@dataclass
class Across:
    """What passes of each line, in words, left of their gradients: `left` in which optimizers' parameters, and in
    `passed` they left nothing of what they brought. `owners` tell whose a rank's parameters are."""

    owners: dict[tuple[int, int], Owner]
    left: dict[str, dict[Owner, set[ParamKey]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    passed: dict[str, set[Owner]] = field(default_factory=lambda: defaultdict(set))

    def pairs(self, *, emptied: bool) -> Iterator[tuple[str, str, Owner]]:
        """Lines that leave gradients in some optimizer's parameters which no other line trains, and in those of
        another one, or, where these are `emptied`, nothing of what they brought; a line that trains these alone; and
        whose they are."""
        alone = {line: next(iter(of)) for line, of in self.left.items() if len(of) == 1 and not self.passed[line]}
        for line, of in self.left.items():
            reached = self.passed[line] - set(of) if emptied else set(of)
            if set(of) - set(alone.values()):
                yield from ((line, other, owner) for other, owner in alone.items() if owner in reached)


def across(data: StepData, contributions: Contributions, measured: Sequence[Held]) -> Across | None:
    """What passes left in the parameters of several optimizers; None where a step has one."""
    found = Across(_owners(data))
    if len(set(found.owners.values())) < 2:
        return None
    lines = {key: line_of(one.gradient) for key, one in contributions.by_key.items()}
    brought = _emptied(data, contributions)
    for held in measured:
        param = data.tracks[held.param][held.rank].param.id
        owner = found.owners.get((held.rank, param))
        if owner is None:
            continue
        there = arrived([held])
        for key in there & lines.keys():
            found.left[lines[key]][owner].add(held.param)
        for key in brought.get((held.rank, param), set()) & lines.keys() - there:
            found.passed[lines[key]].add(owner)
    return found


def left_across(found: Across | None) -> list[str]:
    """The lines that leave gradients in another optimizer's parameters, in words."""
    if found is None:
        return []
    return [
        f"the passes at {line} leave gradients in the parameters of {len(found.left[line])} optimizers, and those at "
        f"{other} train one's alone ({plural(len(found.left[line][owner]), 'parameter')}). A generator's pass should "
        "leave nothing in its discriminator: requires_grad_(False) before it, or zero_grad() behind it"
        for line, other, owner in found.pairs(emptied=False)
    ]


def without_emptied_across(
    found: Across | None, data: StepData, contributions: Contributions, measured: list[Held]
) -> list[Held]:
    """What was measured, and nothing is asked of what such lines brought to another optimizer's parameters where these
    were emptied behind them."""
    passing = {(line, owner) for line, _, owner in found.pairs(emptied=True)} if found is not None else set()
    if found is None or not passing:
        return measured
    lines = {key: line_of(one.gradient) for key, one in contributions.by_key.items()}
    freed = []
    for held in measured:
        owner = found.owners.get((held.rank, data.tracks[held.param][held.rank].param.id), -1)
        keys = held.replay.basis.keys
        visible = [
            seen and (lines.get(key, ""), owner) not in passing for seen, key in zip(held.visible, keys, strict=True)
        ]
        freed.append(replace(held, visible=visible))
    return freed


def _owners(data: StepData) -> dict[tuple[int, int], Owner]:
    found: dict[tuple[int, int], Owner] = {}
    for rank, events in data.events.items():
        steps = [event for event in events if isinstance(event, OptimizerStep) and event.inside is None]
        for index, event in enumerate(steps):
            for param in data.params_of(rank, event.params):
                found.setdefault((rank, param), index)
    return found


def _emptied(data: StepData, contributions: Contributions) -> dict[tuple[int, int], set[ContributionKey]]:
    """For each of a rank's parameters the passes that brought a gradient which was emptied before it was read."""
    found: dict[tuple[int, int], set[ContributionKey]] = defaultdict(set)
    for rank, events in data.events.items():
        waiting: dict[int, set[ContributionKey]] = defaultdict(set)
        for event in events:
            if isinstance(event, Backward):
                key = (contributions.coordinate.get(rank, rank), event.accumulation_step, event.microbatch)
                for param in data.params_of(rank, event.params):
                    waiting[param].add(key)
            elif isinstance(event, ZeroGrad | OptimizerStep):
                for param in data.params_of(rank, event.params):
                    brought = waiting.pop(param, set())
                    if isinstance(event, ZeroGrad):
                        found[rank, param] |= brought
    return found
