"""Whether a clip's total norm is the norm of the gradients that were there, and if not, the norm of what it is.

Right is the norm over the same call on all ranks that train one model, over all that was clipped, or over all
gradients: clipping groups of parameters apart is a choice, clipping what happens to lie on a rank is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

from gradcheck_dist.diagnosis.norms import ClipCall, Interval, Part, StepNorms, local_norm, norm_of
from gradcheck_dist.events import Clip

CLIP_EPSILON = 1e-6
"""torch/nn/utils/clip_grad.py: coefficient = max_norm / (total_norm + 1e-6), clamped to 1."""
ACTS = 1e-3
"""A coefficient this close to 1 changes nothing that matters."""

RIGHT = "right"
SHARDS = "the parts that lie on this rank"
STAGE = "the parameters of this rank's call alone"
COPIES = "all ranks' parts, copies counted again on every rank"
UNNAMED = ""


@dataclass(frozen=True)
class JudgedClip:
    """A clip with the norm of the gradients that it should have used. `meaning` says what its own norm is a norm of."""

    call: ClipCall
    truth: Interval
    meaning: str

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
    """Every clip whose norm can be compared: 2-norms of gradients that were wholly seen."""
    judged = (_judge(norms, call) for call in norms.clips if _comparable(call.event) and call.parts)
    return [one for one in judged if one is not None]


def _comparable(event: Clip) -> bool:
    return event.norm_type == 2.0 and not event.partial and isfinite(event.total_norm) and event.total_norm > 0


def _judge(norms: StepNorms, call: ClipCall) -> JudgedClip | None:
    ranks = norms.together(call.rank)
    calls = [one for one in norms.clips if one.rank in ranks]
    peers = [one for one in calls if one.place == call.place]
    same = {(part.rank, part.key): part for one in peers for part in one.parts}
    clipped = {(part.rank, part.key): part for one in calls for part in one.parts} | same
    everything = {place: part for place, part in norms.parts.items() if place[0] in ranks} | clipped
    truths = [norm_of(parts.values()) for parts in (same, clipped, everything)]
    value, tolerance = call.event.total_norm, call.tolerance
    for truth in truths:
        if truth.holds(value, tolerance):
            return JudgedClip(call, truth, RIGHT)
    if not all(truth.known for truth in truths) or not truths[1].exact:
        return None  # what was not seen, or not as one number, convicts nobody
    return JudgedClip(call, truths[1], _meaning(norms, call, same.values(), peers))


def _meaning(norms: StepNorms, call: ClipCall, same: Iterable[Part], peers: Sequence[ClipCall]) -> str:
    value, tolerance = call.event.total_norm, call.tolerance
    own = {part.key for part in call.parts}
    mine = norm_of(part for part in same if part.key in own)
    local = local_norm(call.parts)
    if mine.exact and mine.holds(value, tolerance):
        return STAGE
    if abs(value / local - 1) <= tolerance:
        return SHARDS
    if abs(value / sqrt(sum(local_norm(one.parts) ** 2 for one in peers)) - 1) <= tolerance:
        return COPIES
    return UNNAMED


def is_round(value: float, tolerance: float = 1e-4) -> bool:
    """Whether a number is one that people write: at most two digits, such as 1.0, 0.5 or 0.25; where it is not known
    well enough for chance to miss these, at most one."""
    if not isfinite(value) or value <= 0:
        return False
    written = float(f"{value:.1e}" if tolerance < 5e-4 else f"{value:.0e}")
    return abs(value / written - 1) <= tolerance
