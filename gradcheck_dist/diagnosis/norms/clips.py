"""Whether a clip's total norm is the norm of the gradients that were there, and if not, the norm of what it is.

Right is the norm over the same call on all ranks that train one model, over all that was clipped, or over all
gradients: clipping groups of parameters apart is a choice, clipping what happens to lie on a rank is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import hypot, isfinite, sqrt

from gradcheck_dist.diagnosis.norms.step_norms import ClipCall, Interval, Part, StepNorms, local_norm, norm_of
from gradcheck_dist.ledger.tracks import ParamKey

CLIP_EPSILON = 1e-6
"""torch/nn/utils/clip_grad.py: coefficient = max_norm / (total_norm + 1e-6), clamped to 1."""
ACTS = 1e-3
"""A coefficient this close to 1 changes nothing that matters."""

RIGHT = "right"
SHARDS = "the parts that lie on this rank"
STAGE = "the parameters of this rank's call alone"
SOME = "the parts that lie on some of the ranks"
COPIES = "all ranks' parts, copies counted again on every rank"
COMBINED: dict[str, Callable[[Sequence[float]], float]] = {
    "the mean of the ranks' own norms": lambda norms: sum(norms) / len(norms),
    "the root of the mean of the squares of the ranks' own norms": lambda norms: hypot(*norms) / sqrt(len(norms)),
    "the largest of the ranks' own norms": max,
    "the sum of the ranks' own norms, without squares": sum,
}
"""What ranks make of their own norms where these are the norms of parts."""
UNNAMED = ""
MAX_AXES = 5
"""Axes that are combined with one another in a search for the ranks of a norm."""


@dataclass(frozen=True)
class JudgedClip:
    """A clip with the norm of the gradients that it should have used. `meaning` says what its own norm is a norm of;
    `ranks` are those over which it was combined, where it is one of SOME."""

    call: ClipCall
    truth: Interval
    meaning: str
    ranks: frozenset[int] = frozenset()

    @property
    def right(self) -> bool:
        return self.meaning == RIGHT

    @property
    def ratio(self) -> float:
        """The norm that was used over the one of the gradients."""
        return self.call.event.total_norm / self.truth.middle

    @property
    def right_coefficient(self) -> float:
        return min(1.0, self.call.event.max_norm / (self.truth.middle + CLIP_EPSILON))

    @property
    def matters(self) -> bool:
        """Whether the gradients were scaled otherwise than by the right norm."""
        right = self.right_coefficient
        return abs(self.call.event.coefficient - right) > max(ACTS, 2 * self.call.tolerance) * right


def judge_clips(norms: StepNorms) -> list[JudgedClip]:
    """Every clip whose norm can be compared: 2-norms of gradients that were wholly seen. Worked out once a step."""
    if norms.judged is None:
        norms.judged = [one for ranks in norms.linked for one in _judge_model(norms, ranks)]
    return norms.judged


def _comparable(call: ClipCall) -> bool:
    event = call.event
    finite = isfinite(event.total_norm) and event.total_norm > 0
    return event.norm_type == 2.0 and not event.partial and finite and bool(call.parts) and not event.repeated


def _judge_model(norms: StepNorms, ranks: frozenset[int]) -> Iterator[JudgedClip]:
    """The clips of all ranks that train one model."""
    calls = [call for call in norms.clips if call.rank in ranks]
    places: dict[tuple[object, ...], list[ClipCall]] = defaultdict(list)
    for call in calls:
        places[call.place].append(call)
    everything = norms.parts
    if not ranks >= {rank for rank, _ in norms.parts}:
        everything = {at: part for at, part in norms.parts.items() if at[0] in ranks}
    clipped = everything  # one call a rank, of all that it holds: the same parts
    if len(places) > 1 or sum(len(call.parts) for call in calls) < len(everything):
        clipped = {(part.rank, part.key): part for call in calls for part in call.parts}
    for peers in places.values():
        same = clipped
        if len(places) > 1:
            same = {(part.rank, part.key): part for call in peers for part in call.parts}
        truths = [norm_of(same.values())]
        for wider in ((clipped,), (everything, clipped)):
            more = any(not held.keys() <= same.keys() for held in wider if held is not same)
            joined = {at: part for held in (*wider, same) for at, part in held.items()} if more else same
            truths.append(norm_of(joined.values()) if more else truths[0])
        meanings = _Meanings(peers, same.values(), norms)
        for call in peers:
            if _comparable(call) and (judged := _judge(call, truths, meanings)) is not None:
                yield judged


def _judge(call: ClipCall, truths: Sequence[Interval], meanings: _Meanings) -> JudgedClip | None:
    value, tolerance = call.event.total_norm, call.tolerance
    for truth in truths:
        if truth.holds(value, tolerance):
            return JudgedClip(call, truth, RIGHT)
    if not all(truth.known for truth in truths) or not truths[1].exact or meanings.incomplete:
        return None  # what was not seen, or not as one number, convicts nobody
    return JudgedClip(call, truths[1], *meanings.of(call))


class _Meanings:
    """What wrong norms of one call are the norms of."""

    def __init__(self, peers: Sequence[ClipCall], same: Iterable[Part], norms: StepNorms) -> None:
        self.incomplete = bool(norms.blind)  # some rank, which may hold a part of the model, recorded no norm
        self._axes = norms.axes
        self._same = list(same)
        self._peers = peers
        self._of_keys: dict[frozenset[ParamKey], Interval] = {}

    def of(self, call: ClipCall) -> tuple[str, frozenset[int]]:
        """One of the meanings, UNNAMED when none fits, and the ranks of SOME."""
        value, tolerance = call.event.total_norm, call.tolerance
        own = frozenset(part.key for part in call.parts)
        if own not in self._of_keys:
            self._of_keys[own] = norm_of(part for part in self._same if part.key in own)
        mine = self._of_keys[own]
        if mine.exact and mine.holds(value, tolerance):
            return STAGE, frozenset()
        if abs(value / local_norm(call.parts) - 1) <= tolerance:
            return SHARDS, frozenset()
        if abs(value / self._with_copies - 1) <= tolerance:
            return COPIES, frozenset()
        for ranks in self._reached(call.rank):
            parts = [part for part in self._same if part.rank in ranks]
            joined = norm_of(parts)
            if (joined.exact and joined.holds(value, tolerance)) or abs(value / local_norm(parts) - 1) <= tolerance:
                return SOME, ranks
        for meaning, combined in self._combined.items():
            if abs(value / combined - 1) <= tolerance:
                return meaning, frozenset()
        return UNNAMED, frozenset()

    def _reached(self, rank: int) -> Iterator[frozenset[int]]:
        """The ranks over which a norm goes that is combined along some of the axes, the fewest first."""
        every = {peer.rank for peer in self._peers}
        sets = {
            _reach(rank, chosen)
            for number in range(1, len(self._axes))
            for chosen in combinations(self._axes[:MAX_AXES], number)
        }
        yield from sorted(
            (ranks for ranks in sets if 1 < len(ranks & every) < len(every)), key=lambda one: (len(one), sorted(one))
        )

    @cached_property
    def _with_copies(self) -> float:
        return sqrt(sum(local_norm(call.parts) ** 2 for call in self._peers))

    @cached_property
    def _combined(self) -> dict[str, float]:
        own = [local_norm(call.parts) for call in self._peers]
        return {meaning: combine(own) for meaning, combine in COMBINED.items()} if len(own) > 1 else {}


def _reach(rank: int, axes: Iterable[frozenset[frozenset[int]]]) -> frozenset[int]:
    groups = [group for axis in axes for group in axis]
    found = {rank}
    while more := {other for group in groups if group & found for other in group} - found:
        found |= more
    return frozenset(found)


def is_round(value: float, tolerance: float = 1e-4, digits: int = 2) -> bool:
    """Whether a number is one that people write: at most two `digits`, such as 1.0, 0.5 or 0.25; where it is not known
    well enough for chance to miss these, at most one."""
    if not isfinite(value) or value <= 0:
        return False
    written = float(f"{value:.{digits - 1 if tolerance < 5e-4 else 0}e}")
    return abs(value / written - 1) <= tolerance
