"""Clips that people write themselves and whose norm is a wrong one, told by the norm that they leave behind.

What was clipped to max_norm by the right norm has max_norm as its norm. Where another number is the round one instead
(the norm of each rank's own part, of one pipeline stage's, or of all ranks' parts with copies counted again), that is
the norm that was used: its square was not combined over the ranks that hold parts, some of them added nothing to it,
what all of them hold was counted by each, or the ranks' norms were averaged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import hypot
from statistics import median, median_low

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.causes.constants import is_constant
from gradcheck_dist.diagnosis.norms.clips import COMBINED, COPIES, SHARDS, SOME, is_round
from gradcheck_dist.diagnosis.norms.step_norms import Part, StepNorms, local_norm, norm_of, own_error
from gradcheck_dist.diagnosis.weights.cells import GONE, Cell, Held
from gradcheck_dist.events import Clip, Event, Exchange, GradientNorm, OptimizerStep
from gradcheck_dist.ledger.moved import plain_name
from gradcheck_dist.ledger.tracks import ParamKey, StepData

MOST_VAGUE = 5e-4
"""With a tolerance above this, some wrong norm is near to a number that people write too often."""
OWN = "what lies on this rank, which is all of it"
"""Of ranks that hold whole copies, or parts and copies, no wrong norm."""
OWN_OF_SOME = "what lies on this rank, of which some may be parts or copies"
MOST_UNSURE = 6
"""Of more parameters than this that may be parts or copies, not all ways to take them are tried."""
SAME_FACTOR = 1e-6
"""Relative difference up to which ranks clipped by one coefficient."""
FAR = 1e-3
"""Relative: a norm that is nearer to the right one than this convicts nobody."""


@dataclass(frozen=True)
class HandNorm:
    """A clip by hand by a wrong norm. `factors` are the ranks' coefficients, `norm` is what the norm that it took is
    now, `truth` what the norm of all gradients is now, `meaning` what was taken (clips.SHARDS, SOME, COPIES or one of
    COMBINED) over `over`. `event` is the line that scales, or the last event before it, on `rank`. `of_summands`: some
    gradient is one, on each rank."""

    factors: dict[int, float]
    norm: float
    truth: float
    meaning: str
    over: tuple[int, ...]
    event: Event | None
    rank: int
    of_summands: bool = False

    @property
    def ratio(self) -> float:
        """The norm that was used over the one of the gradients."""
        return self.norm / self.truth

    @property
    def of_copies(self) -> bool:
        """Whether each rank took a right norm, of copies that differ."""
        return self.meaning in (OWN, OWN_OF_SOME)

    def in_one_model(self, coordinate: Mapping[int, int]) -> list[str]:
        """Why a step is left open in which nothing is wrong that would make copies differ: ranks that share their
        tokens took norms of summands, or each clipped by another coefficient."""
        models: dict[int, list[float]] = defaultdict(list)
        for rank, factor in self.factors.items():
            models[coordinate.get(rank, rank)].append(factor)
        apart = self.of_summands or any(max(of) > min(of) * (1 + FAR) for of in models.values())
        if not self.of_copies or not apart or all(len(of) == 1 for of in models.values()):
            return []
        return [
            "ranks of one model are clipped by hand by unlike coefficients, though nothing else is wrong that would "
            "make their gradients differ: most likely the norm is taken of summands, of which the optimizer reads the "
            "sum (a DTensor's Partial gradient: take its full_tensor())"
        ]

    @property
    def text(self) -> str:
        used = ", ".join(f"x {factor:.4g} on rank {rank}" for rank, factor in sorted(self.factors.items())[:4])
        wrong = "by a wrong norm" if not self.of_copies else "by the norms of copies that differ"
        return f"gradients were clipped by hand {wrong} ({used}); weights are freed of it"


def wrong_norm(cases: Sequence[Case], judged: Sequence[Held], data: StepData, norms: StepNorms) -> HandNorm | None:
    """The clip by hand that took a wrong norm, where one surely explains all that is wrong with a step's weights; of
    ranks that hold copies one that took norms of copies which differ, whatever else is wrong."""
    ends = OptimizerStep | GradientNorm  # the norm may be taken once more behind the clip, to be logged
    unseen = [case for case in cases if case.culprit.unrecorded and isinstance(case.culprit.before, ends)]
    if not unseen or all(map(is_constant, unseen)):
        return None
    ranks = {rank for case in unseen for rank in norms.together(case.held[0].rank)}
    every = {rank for rank, _ in norms.parts}
    if not ranks <= every:
        return None
    # Where something else is wrong with most parameters, the others tell what the clip multiplied by.
    elsewhere = {(held.rank, held.param) for case in cases if case not in unseen for held in case.held}
    scaled: Sequence[Held] = [held for held in judged if held.cells and (held.rank, held.param) not in elsewhere]
    scaled = scaled or _shares(_behind_norm(unseen)) or _shares(unseen) or judged
    # Ranks that read other batches may hold shards of one model all the same.
    for one_model in (ranks, every) if ranks < every else (ranks,):
        if len(one_model) < 2 or any(isinstance(event, Clip) for rank in one_model for event in data.events[rank]):
            continue
        parts = {rank: [part for (of, _), part in norms.parts.items() if of == rank] for rank in one_model}
        whole = _hold_copies(one_model, data, norms, unseen[0].context.contributions.coordinate)
        for copies in (True, False) if not whole and one_model is ranks else (True,):
            if copies or len(unseen) == len(cases):
                coefficients = _coefficients(scaled if copies else judged, most=copies)
                found = _taken(unseen, parts, coefficients, data, norms, copies=copies)
                if found is not None:
                    return found
    return None


def _behind_norm(unseen: Sequence[Case]) -> list[Case]:
    """Those that begin where the norm was taken."""
    return [case for case in unseen if isinstance(case.culprit.event, GradientNorm)]


def _shares(unseen: Sequence[Case]) -> list[Held]:
    """What lines that nobody recorded did to gradients, apart from all else that is wrong with these; [] where several
    such lines wrote to one gradient."""
    found: dict[tuple[int, ParamKey], Held] = {}
    for case in unseen:
        cells: dict[int, list[Cell]] = defaultdict(list)
        for held, cell in case.cells:
            cells[id(held)].append(cell)
        mine = {(held.rank, held.param): replace(held, cells=cells[id(held)]) for held in case.held}
        if found.keys() & mine.keys():
            return []
        found |= mine
    return list(found.values())


def _taken(
    unseen: Sequence[Case],
    parts: dict[int, list[Part]],
    factors: dict[int, float],
    data: StepData,
    norms: StepNorms,
    *,
    copies: bool,
) -> HandNorm | None:
    """The norm that ranks took which clipped by these factors. `copies`: each took a right one of the copies that it
    has, which differ."""
    if parts.keys() != factors.keys():
        return None
    every = [part for of_rank in parts.values() for part in of_rank]
    tolerance, truth = own_error(every), norm_of(every)
    acted = [rank for rank, factor in factors.items() if factor < 1 - FAR]
    if not acted or max(factors.values()) > 1 + FAR or tolerance > MOST_VAGUE or not truth.known:
        return None
    if min(factors.values()) <= 0:
        return None  # nothing is left, which no clip does
    if truth.exact and is_round(truth.middle, tolerance):
        return None  # the right norm
    least = 2 * tolerance if copies else FAR
    apart = max(factors[rank] for rank in acted) > min(factors[rank] for rank in acted) * (1 + least)
    several = [] if copies else [*_candidates(parts, acted, factors, data), *_of_groups(parts, data, norms)]
    for meaning, over, norms_left in _own(parts, factors, data) if copies else several:
        left = [value for rank, value in norms_left.items() if rank in acted]
        norm = median(left)
        alike = max(left) <= min(left) * (1 + 2 * tolerance)
        far = norm < truth.low * (1 - FAR) or norm > truth.high * (1 + FAR)
        # What other factors on other ranks made one norm needs no round number to be what was clipped.
        # Of many ways to combine norms, one leaves a number of two digits by chance now and then.
        round_one = is_round(norm, tolerance, digits=1 if meaning in COMBINED else 2)
        sure = apart and (round_one or meaning == OWN) if copies else far and (apart or round_one)
        if alike and sure and max(norms_left.values()) <= norm * (1 + FAR):
            culprit = next((case.culprit for case in _behind_norm(unseen) or unseen), None)
            event = culprit.write or culprit.event if culprit is not None else None
            rank = culprit.rank if culprit is not None else min(factors)
            of_summands = any(part.partial for part in every)
            return HandNorm(factors, norm, truth.middle, meaning, over, event, rank, of_summands)
    return None


def _hold_copies(ranks: set[int], data: StepData, norms: StepNorms, coordinate: Mapping[int, int]) -> bool:
    """Whether each of these ranks has tokens of its own and holds all of the model: its own norm is a right one then,
    and where it is another rank's no longer, what made the copies differ is to blame."""
    held = [frozenset(key for of, key in norms.parts if of == rank) for rank in sorted(ranks)]
    alone = len({coordinate.get(rank, -1) for rank in ranks}) == len(ranks) > 1
    parts = (part for (rank, _), part in norms.parts.items() if rank in ranks)
    return alone and len(set(held)) == 1 and all(part.box is None or part.whole for part in parts)


def _own(
    parts: dict[int, list[Part]], factors: dict[int, float], data: StepData
) -> Iterator[tuple[str, tuple[int, ...], dict[int, float]]]:
    """What all gradients would have as their norm if all ranks had clipped by a rank's factor, with the copies of those
    that did: of tensor-parallel ranks each knows of all parts and of its own copies. What began as one number in parted
    modules may be parts or copies that drifted apart, and is alike in all layers."""
    unsure = sorted({kind for of_rank in parts.values() for part in of_rank if (kind := _unsure(part, data))})
    unsure = unsure if len(unsure) <= MOST_UNSURE else []
    for copies in chain.from_iterable(combinations(unsure, number) for number in range(len(unsure) + 1)):
        left: dict[int, float] = {}
        for rank, factor in factors.items():
            pieces: dict[tuple[ParamKey, object], tuple[bool, float]] = {}
            for of_rank in parts.values():
                for part in of_rank:
                    alike = abs(factors[part.rank] - factor) <= SAME_FACTOR * factor
                    if alike or _unsure(part, data) not in copies:
                        found = (alike, part.norm * factor / factors[part.rank])
                        pieces[part.key, part.box] = max(found, pieces.get((part.key, part.box), (False, 0.0)))
            left[rank] = hypot(*(norm for _, norm in pieces.values()))
        yield OWN_OF_SOME if copies else OWN, (), left


def _unsure(part: Part, data: StepData) -> str:
    """The name, without the layer's number, of what has several values on ranks and began as one number on all; "" of
    all else."""
    name = plain_name(part.key[1])
    if name == part.key[1] or data.tracks[part.key][part.rank].param.start is not None:
        return ""
    return ".".join(word for word in name.split(".") if not word.isdigit())


def _coefficients(judged: Sequence[Held], *, most: bool) -> dict[int, float]:
    """By what each rank's weights are off, all alike, or `most` of them, but for contributions that are gone; {} where
    some rank's are not."""
    if most:
        return _of_most(judged)
    ratios: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for held in judged:
        for rank in held.ranks:
            ratios[rank] += [(cell.ratio, cell.margin) for cell in held.cells]
    found = {rank: median(ratio for ratio, _ in of_rank) for rank, of_rank in ratios.items() if of_rank}
    if any(abs(ratio - found[rank]) > margin + FAR for rank, of_rank in ratios.items() for ratio, margin in of_rank):
        return {}
    return found


def _of_most(judged: Sequence[Held]) -> dict[int, float]:
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for held in judged:
        there = [(cell.ratio, cell.margin) for cell in held.cells if abs(cell.ratio) > GONE]
        best = min(there, key=lambda one: one[1], default=None)
        if best is not None and all(abs(ratio - best[0]) <= margin + best[1] for ratio, margin in there):
            found[held.rank].append(best)
    result: dict[int, float] = {}
    for rank, values in found.items():
        middle = median_low(value for value, _ in values)
        if sum(abs(value - middle) <= 2 * margin + FAR * middle for value, margin in values) <= len(values) / 2:
            return {}
        result[rank] = middle
    return result


def _candidates(
    parts: dict[int, list[Part]], acted: Sequence[int], factors: dict[int, float], data: StepData
) -> Iterator[tuple[str, tuple[int, ...], dict[int, float]]]:
    """What may have been taken for the norm, over which ranks, and what it is now, on each rank where ranks took their
    own: those that the clip left alone are below its norm."""
    yield SHARDS, (), {rank: local_norm(of_rank) for rank, of_rank in parts.items()}
    for seen in _seen(parts, data):
        yield SHARDS, (), seen
    if len(acted) < len(factors) or max(factors.values()) > min(factors.values()) * (1 + FAR):
        return
    stages: dict[frozenset[ParamKey], list[int]] = defaultdict(list)
    for rank, of_rank in sorted(parts.items()):
        stages[frozenset(part.key for part in of_rank)].append(rank)
    for ranks in stages.values() if len(stages) > 1 else ():
        norm = norm_of(part for rank in ranks for part in parts[rank])
        if norm.known and norm.exact:
            yield SOME, tuple(ranks), {acted[0]: norm.middle}
    yield from _counted_apart(parts, acted[0])
    groups = {tuple(sorted(parts))}
    groups |= {event.group for of_rank in data.events.values() for event in of_rank if isinstance(event, Exchange)}
    for group in sorted(groups, key=len, reverse=True):
        if len(group) > 1 and set(group) <= parts.keys():
            own = [local_norm(parts[rank]) for rank in group]
            yield COPIES, group, {acted[0]: hypot(*own)}
            for meaning, combine in COMBINED.items():
                yield meaning, group, {acted[0]: combine(own)}


def _of_groups(
    parts: dict[int, list[Part]], data: StepData, norms: StepNorms
) -> Iterator[tuple[str, tuple[int, ...], dict[int, float]]]:
    """The norm over one axis of several: each rank's of what lies on its group of ranks."""
    combined = {event.group for of_rank in data.events.values() for event in of_rank if isinstance(event, Exchange)}
    axes = [*norms.axes, frozenset(map(frozenset, combined))]
    for groups in axes:
        members = sorted(rank for group in groups for rank in group)
        if members == sorted(parts) and 1 < len(groups) < len(parts):
            left = {rank: norm_of(part for one in group for part in parts[one]) for group in groups for rank in group}
            if all(norm.exact for norm in left.values()):
                first = next(group for group in groups if members[0] in group)
                yield SHARDS, tuple(sorted(first)), {rank: norm.middle for rank, norm in left.items()}


def _counted_apart(parts: dict[int, list[Part]], rank: int) -> Iterator[tuple[str, tuple[int, ...], dict[int, float]]]:
    """What all ranks hold counted once, and what only some hold (experts) by each of these."""
    everywhere = set.intersection(*({part.key for part in of_rank} for of_rank in parts.values()))
    own = {at: [part for part in of_rank if part.key not in everywhere] for at, of_rank in parts.items()}
    if everywhere and all(own.values()) and all(part.whole for of_rank in parts.values() for part in of_rank):
        common = local_norm(part for part in parts[rank] if part.key in everywhere)
        yield COPIES, tuple(sorted(parts)), {rank: hypot(common, *map(local_norm, own.values()))}


def _seen(parts: dict[int, list[Part]], data: StepData) -> Iterator[dict[int, float]]:
    """For each line that takes norms, what that of the gradients which it was given is now on each rank: a rank may
    leave out copies that another one counts. Only where ranks hold one parameter, so that it is scaled apart."""
    lines: dict[tuple[str, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for rank in parts:
        for event in data.events[rank]:
            if isinstance(event, GradientNorm) and event.site is not None:
                lines[event.site.file, event.site.line][rank] |= set(data.params_of(rank, event.params))
    if not any(len(of_rank.keys() & parts.keys()) > 1 for of_rank in data.tracks.values()):
        return
    for of_line in lines.values():
        if of_line.keys() == parts.keys():
            yield {
                rank: local_norm(part for part in of_rank if data.tracks[part.key][rank].param.id in of_line[rank])
                for rank, of_rank in parts.items()
            }


def clipped_apart(factors: Mapping[int, float], data: StepData, norms: StepNorms) -> bool:
    """Whether ranks that are multiplied by these factors surely clipped by hand, each by its norm of all parts and of
    its own copies, to one number."""
    parts = {rank: [part for (of, _), part in norms.parts.items() if of == rank] for rank in factors}
    if not all(parts.values()) or any(isinstance(event, Clip) for rank in parts for event in data.events[rank]):
        return False
    return _taken([], parts, dict(factors), data, norms, copies=True) is not None


def freed_by_rank(measured: list[Held], clip: HandNorm) -> list[Held]:
    """What was measured, freed of the clip."""
    return [held.freed(clip.factors[held.rank]) if held.observed is not None else held for held in measured]
