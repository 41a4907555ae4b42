"""The smallest experiment that separates two explanations, as a command that is ready to run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from math import prod

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.factors import Name

Powers = Mapping[str, float]
"""Which degrees and counts an explanation's factor is made of, and to which power."""

ORDER = ("accumulation_steps", "microbatches", "num_tokens")
"""What is cheapest to change comes first; degrees of the mesh come after these."""
WORDS = {
    "accumulation_steps": "accumulation steps",
    "microbatches": "pipeline microbatches",
    "num_tokens": "another batch",
    "ranks_per_batch": "ranks that share each batch",
    "ranks_per_exchange": "ranks that exchange activations",
    "exchange_groups": "groups of ranks that exchange activations",
}
GROWING = ("dp_replicate", "dp_shard", "data_ranks", "exchange_groups", "cp", "tp", "pp", "ep", "ranks_per_batch")
"""Along what ranks the world may grow, the cheapest to change first."""
SPLITTING = frozenset({"cp", "tp", "pp", "ep", "ranks_per_batch", "ranks_per_exchange"})
SAME = 1e-9
OPTIONS = {"accumulation_steps": "--accum", "microbatches": "--microbatches"}
ACCUMULATION = re.compile(r"(?i)^(-{0,2}[\w.]*(?:accum|grad_acc)[\w.-]*)(=?)(\d*)$")
PROCESSES = re.compile(r"^(--nproc[-_]per[-_]node)(=?)(\d*)$")


def between_rivals(case: Case) -> str | None:
    """In words: what else fits, and what would tell it apart; None when nothing else does."""
    told = []
    for rival in case.culprit.rivals:
        experiment = separate(case.context, dict(rival.against), dict(rival.powers))
        if experiment is not None:
            told.append(f"it may as well be that {rival.words}, as sizes are equal in this run; to tell, {experiment}")
    return "; ".join(told) or None


def between_names(context: StepContext, names: list[Name]) -> str | None:
    """What tells names of one number apart, the first from the others; None when they are not several."""
    for other in names[1:]:
        experiment = separate(context, dict(names[0].powers), dict(other.powers))
        if experiment is not None:
            listed = ", ".join(name.expression for name in names[1:])
            return f"{names[0].expression} and {listed} are equal in this run; to tell, {experiment}"
    return None


def separate(context: StepContext, first: Powers, second: Powers) -> str | None:
    """What to run so that the two explanations no longer give one number; None when no size tells them apart."""
    differ = [name for name in (*first, *second) if first.get(name, 0) != second.get(name, 0)]
    for name in sorted(dict.fromkeys(differ), key=_rank):
        if name not in context.quantities:
            continue
        if name == "num_tokens":
            return f"run again on another batch: {command(context, name, 0)}"
        for one, more in _larger(context, name):
            grown = _grown(context, one, more)
            if abs(_gain(first, grown) / _gain(second, grown) - 1) > SAME:
                words = "processes" if one == "world_size" else WORDS.get(one, f"ranks along {one}")
                return f"run again with {more} {words}: {command(context, one, more)}"
    return None


def _larger(context: StepContext, name: str) -> list[tuple[str, int]]:
    """Sizes that change a number, the likeliest to run first: ranks come in groups, so the world grows along one axis;
    what splits a model's dimensions (heads, experts, layers) doubles, for these seldom fall into thirds."""
    if name != "world_size":
        value = int(context.quantities[name])
        return [(name, 2 * value if name in SPLITTING else value + 1)]
    if axes := [axis for axis in GROWING if context.quantities.get(axis, 1) > 1]:
        return [one for axis in axes for one in _larger(context, axis)]
    ranks = context.contributions.num_coordinates
    return [(name, context.world_size // ranks * (ranks + 1))] if ranks > 1 and context.world_size % ranks == 0 else []


def _grown(context: StepContext, name: str, value: int) -> Powers:
    """By what each number becomes larger where one of them becomes `value`."""
    gain = value / context.quantities[name]
    return {name: gain} if name in ORDER else {name: gain, "world_size": gain}


def _gain(powers: Powers, grown: Powers) -> float:
    return float(prod(grown.get(name, 1.0) ** power for name, power in powers.items()))


def _rank(name: str) -> tuple[int, str]:
    return (ORDER.index(name) if name in ORDER else len(ORDER), name)


def command(context: StepContext, name: str, value: int) -> str:
    """The run's own command with one size changed; where no option for it is found, the change stands behind it."""
    current = int(context.quantities.get(name, 1))
    world = context.world_size // max(current, 1) * value
    if context.scenario:
        option = f"{OPTIONS[name]} {value}" if name in OPTIONS else "--seed 1" if name == "num_tokens" else ""
        return f"gradcheck scenario {shlex.quote(context.scenario)} {option or f'--nproc {world}'}"
    if not context.command:
        return "gradcheck run -- YOUR COMMAND"
    if name in ORDER:
        changed = _changed(context.command, ACCUMULATION, current, value) if name == "accumulation_steps" else None
    else:
        changed = _changed(context.command, PROCESSES, context.world_size, world)
    words = shlex.join(changed or context.command)
    known = bool(changed) and name not in SPLITTING  # the number of processes does not say what they are for
    note = "" if known or name == "num_tokens" else f"   # with {value} {WORDS.get(name, f'ranks along {name}')}"
    return f"gradcheck run -- {words}{note}"


def _changed(words: Sequence[str], option: re.Pattern[str], current: int, value: int) -> list[str] | None:
    """The command with the option's value replaced, "--option 4" or "--option=4"; None when it does not stand there."""
    for index, word in enumerate(words):
        found = option.match(word)
        if found is None:
            continue
        if found[2] and found[3] == str(current):
            return [*words[:index], f"{found[1]}={value}", *words[index + 1 :]]
        if not found[2] and not found[3] and index + 1 < len(words) and words[index + 1] == str(current):
            return [*words[: index + 1], str(value), *words[index + 2 :]]
    return None
