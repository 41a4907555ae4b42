"""One module, evaluated on all ranks that it communicates with: derivatives by differences against autograd's."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.verify.attached import Attached
from gradcheck_dist.verify.beside import looked_beside
from gradcheck_dist.verify.difference import PRECISE, Derivative, Outcome, confirmed, differentiate, judge, steps
from gradcheck_dist.verify.exchange import Exchange
from gradcheck_dist.verify.function import Function
from gradcheck_dist.verify.functions import Functions
from gradcheck_dist.verify.held import held_alike, held_once, one_by_one, shares
from gradcheck_dist.verify.inner import Base, Terms, inner, random_direction
from gradcheck_dist.verify.meant import explained
from gradcheck_dist.verify.pieces import is_distributed, local, same
from gradcheck_dist.verify.result import ARRIVED, Result, Shape
from gradcheck_dist.verify.targets import Target

Gradient = dict[str, Tensor | None]
DIRECTIONS = ("along", "across")
INSIDE = {"float32": 2.0**-23, "TF32 or float16": 2.0**-10, "bfloat16": 2.0**-7}
ROUGH = 100.0
"""An error so many times that of rounding is the function's own."""
UNEVEN = "its forward is not smooth here: it rounds (as fake quantisation does), or a switch in it depends on its input"
REPEATS = (1.0, 3.0, 1 / 3)
"""Factors on the steps: who accuses must accuse with every one of them."""


class Measured:
    """A module whose function could be evaluated on every rank. `expects`: something inside is known to differ from the
    derivative, so that small deviations are explained too."""

    def __init__(
        self, function: Terms, base: Base, exchange: Exchange, told: list[dict[str, Any]], *, expects: bool = False
    ) -> None:
        self.expects = expects
        self.function, self._base, self.exchange = function, base, exchange
        self.site = base.site
        self._gradient = {key: _less(grad, base.added[key]) for key, grad in base.gradient.items()}
        own = told[exchange.ranks.index(exchange.rank)]
        self._own = own["variables"]
        self._whole, self._torn = shares(function, own, told)
        self.scalar = all(term.numel() == 1 for term in base.outputs)
        self.held_once = all(fact["outputs"].count(None) == 0 for fact in told) and held_once(told)
        self._holders = {
            key: [
                rank for rank, fact in zip(exchange.ranks, told, strict=True) if same(mine, fact["variables"].get(key))
            ]
            or [exchange.rank]
            for key, mine in own["variables"].items()
        }
        # Of each variable the ranks by what they hold of it; none where ranks have other variables.
        ranks = dict(zip(exchange.ranks, told, strict=True))
        alike = all(fact["variables"].keys() == self._own.keys() for fact in told)
        self._held_alike = {key: held_alike(key, ranks) for key in self._own} if alike else {}
        self._epsilon = max(fact["epsilon"] for fact in told)
        own_epsilon = torch.finfo(function.dtype).eps if function.dtype is not None else self._epsilon
        self._ladders = sorted({self._epsilon, own_epsilon})
        self._precision = _precision(function.dtype, self._epsilon)

    @functools.cached_property
    def functions(self) -> Functions | None:
        """The autograd functions that are applied inside; None where it cannot be run with them watched."""
        found, call = Functions(), self.function.module_call
        if not isinstance(call, Function):
            return None
        try:
            call.within = found.recording
            call.differentiated(1.0)
        except Exception:  # the user's module may raise anything
            return None
        finally:
            call.within = None
        found.judge()
        return found

    def results(self, targets: list[Target]) -> list[Result]:
        first, second = self.function.value({}), self.function.value({})
        self.center = first
        self._noise = [self.function.magnitude(self._base), abs(first - second)]
        found = [self._result(target) for target in targets]
        if self.expects or not any(one.explained for one in found):
            return found
        self.expects = True
        return [self._result(one.target) if one.outcome == "undetermined" else one for one in found]

    def _result(self, target: Target) -> Result:
        results = []
        for factor in REPEATS:
            results.append(self._measure(target, factor))
            if results[-1].outcome != "wrong":
                break
        if len(results) > 1 and results[-1].outcome != "wrong":
            return replace(results[-1], outcome="undetermined", reason=UNEVEN)
        if results[0].outcome == "wrong" and results[0].kinked:
            results[0] = looked_beside(self, target, results[0])
        if results[0].outcome == "undetermined" and self.expects:
            why = explained(self, target, replace(results[0], outcome="wrong"))
            return why if why.explained else results[0]
        return explained(self, target, results[0]) if results[0].outcome == "wrong" else results[0]

    def agrees(self, target: Target, tag: str, gradient: Gradient | None = None, only: int | None = None) -> bool:
        """Whether a gradient is the derivative along every direction; not where there is none of either.

        Args:
            gradient: in place of what backward gave.
            only: the rank whose variables alone are changed, and whose share alone is looked at.
        """
        where = f"{self.function.path}/{target.label}/{tag}"
        tries = [self._try(target, kind, f"{where}/{kind}", 1.0, gradient, only) for kind in DIRECTIONS]
        return "right" in (_together([getattr(one, way) for one in tries]) for way in ("complete", "partial", "mixed"))

    def outcome(
        self, target: Target, tag: str, parts: dict[str, tuple[Tensor | None, Tensor | None]]
    ) -> tuple[Outcome, bool]:
        """What a gradient is, less what arriving zeros bring, and whether there is a kink."""
        gradient = {key: _less(grad, added) for key, (grad, added) in parts.items()}
        where = f"{self.function.path}/{target.label}/{tag}"
        tries = [self._try(target, kind, f"{where}/{kind}", 1.0, gradient) for kind in DIRECTIONS]
        partial = _together([one.partial for one in tries])
        found = partial if partial == "right" else _together([one.complete for one in tries])
        return found, any(one.numeric.kinked for one in tries)

    def _measure(self, target: Target, stretch: float) -> Result:
        where = f"{self.function.path}/{target.label}/{stretch:.3f}/{self.expects}"
        tries = [self._try(target, kind, f"{where}/{kind}", stretch) for kind in DIRECTIONS]
        complete = _together([one.complete for one in tries])
        partial = _together([one.partial for one in tries])
        if complete == "wrong" and partial != "right" and _together([one.mixed for one in tries]) == "right":
            complete = "right"
        # Copies that got unlike gradients hold summands: what is wrong is told of their sum.
        told = [replace(one, observed=one.summed) for one in tries] if complete == "wrong" else tries
        best = max(told, key=lambda one: abs(one.numeric.value) - one.numeric.error)
        outcome, shape = complete, _shape(told, self._agree) if complete == "wrong" else ""
        if shape == "cut" and any(_is_nonzero(self._base.added[key]) for key in target.keys):
            shape = "constant"
        reason, unsummed, seen = "", False, tuple[list[float], ...]()
        each = self._counted_each(tries) if complete == "wrong" else "wrong"
        if each != "wrong":
            outcome, shape, reason = each, "", _why(best) if each == "undetermined" else ""
        elif complete not in ("right", "zero") and partial == "right" and not self.exchange.alone:
            outcome, shape = "right", "partial"
            unsummed = target.kind == "input" and self._whole
            seen = tuple(self._own[key] for key in target.keys)
        elif complete == "wrong" and self._torn and not isinstance(self.function, Attached):
            outcome, reason, seen = "undetermined", ARRIVED, self._torn
        elif outcome == "undetermined":
            reason = _why(best)
        ratio = best.observed / best.numeric.value if best.numeric.value and shape in ("scaled", "cut") else None
        return Result(
            self.function.path,
            target,
            outcome,
            observed=best.observed,
            numerical=best.numeric.value,
            error=best.numeric.error,
            factor=ratio,
            precision=self._precision,
            shape=shape,
            ranks=self.exchange.ranks,
            reason=reason,
            left_unsummed=unsummed,
            seen=seen,
            kinked=any(one.numeric.kinked for one in tries),
        )

    def _counted_each(self, tries: list[_Try]) -> Outcome:
        """The outcome if a loss that all ranks hold alike counts once a rank: whether the total is one loss or the sum
        of them is the trainer's own, and an average behind it may make up for it. "wrong" for anything else."""
        copies = len(self.exchange.ranks)
        if not (self._whole and self.scalar):
            return "wrong"
        return _together(
            [self._judged(one.observed / copies, one.numeric, one.natural / copies, one.size) for one in tries]
        )

    @property
    def _agree(self) -> float:
        return 8 * self._epsilon

    def _try(
        self,
        target: Target,
        kind: str,
        tag: str,
        stretch: float,
        given: Gradient | None = None,
        only: int | None = None,
    ) -> _Try:
        """One direction: with the finest steps, and with larger ones where these do not agree with autograd."""
        function, gradient = self.function, self._gradient if given is None else given
        moves = only is None or only == self.exchange.rank
        directions = {key: self.direction(key, kind) for key in target.keys} if moves else {}
        shares = {key: 1 / len(self._holders[key]) if only is None else 1.0 for key in target.keys}
        projected = {key: inner(grad, d) for key, d in directions.items() if (grad := gradient[key]) is not None}
        # The perturbed variables are rounded too.
        rounded = sum(_squares(gradient[key], function.variables[key]) * shares[key] for key in directions)
        facts = [
            sum(value * shares[key] for key, value in projected.items()),
            sum(projected.values()),
            sum(_squares(gradient[key], d) * shares[key] for key, d in directions.items()),
            self._noise[0] + rounded,
            self._noise[1],
            self.center,
        ]
        found: list[Derivative] = []
        for epsilon in self._ladders:
            sizes = [size * stretch for size in steps(epsilon)]
            points = [sign * size for size in sizes for sign in (1, -1)]
            values = [
                function.value({key: function.variables[key] + t * d for key, d in directions.items()}) for t in points
            ]
            apart = [projected.get(key, 0.0) for key in target.keys] if self._held_alike and only is None else []
            told = self.exchange.gather(f"{tag}/{epsilon}", [*facts, *values, *apart])
            by_rank = {rank: one[len(one) - len(apart) :] for rank, one in zip(self.exchange.ranks, told, strict=True)}
            if only is not None:
                told = [told[self.exchange.ranks.index(only)]]
            complete, partial, squares, magnitude, jitter, center, *sums = map(sum, zip(*told, strict=True))
            at = dict(zip(points, sums[: len(points)], strict=True))
            mixed = one_by_one([self._held_alike[key] for key in target.keys], by_rank) if apart else complete
            natural, size = sqrt(squares), sqrt(magnitude)
            found.append(differentiate(at.__getitem__, sizes, epsilon, size, jitter, center))
            numeric = found[-1]
            if "right" in [self._judged(analytic, numeric, natural, size) for analytic in (complete, partial, mixed)]:
                break  # what rounds coarsely inside cannot agree so well by chance
        else:
            numeric = confirmed(found[-1], *found[:-1])
        return _Try(
            complete,
            mixed,
            numeric,
            self._judged(complete, numeric, natural, size),
            self._judged(partial, numeric, natural, size),
            self._judged(mixed, numeric, natural, size),
            natural,
            size,
        )

    def _judged(self, analytic: float, numeric: Derivative, natural: float, size: float) -> Outcome:
        return judge(analytic, numeric, natural, size, self._agree)

    def direction(self, key: str, kind: str) -> Tensor:
        """Relative to the variable's own size: along its gradient where every holder knows it whole, else random."""
        value, grad = self.function.variables[key], self._gradient[key]
        spread = is_distributed(value)
        size = float(_full(value.double().square().mean()).sqrt()) or 1.0
        leader = "" if spread else str(self._holders[key][0])
        if kind == "along" and grad is not None and (spread or self.exchange.alone):
            if spread:
                grad = grad.redistribute(placements=value.placements)  # type: ignore[attr-defined]
            norm = float(_full(grad.double().square().sum()).sqrt())
            highest = float(_full(grad.abs().max()))
            if norm > 0 and highest > 0:
                return grad * min(size * sqrt(value.numel()) / norm, 8 * size / highest)
        seed = f"{self.function.path} {key} {kind} {leader}"
        return random_direction(value, seed) * size


@dataclass(frozen=True)
class _Try:
    """One direction: autograd's derivative, the differences', and whether they are one, whole or as a summand. `summed`
    is autograd's where copies that got unlike gradients hold summands."""

    observed: float
    summed: float
    numeric: Derivative
    complete: Outcome
    partial: Outcome
    mixed: Outcome
    natural: float
    size: float


def _less(gradient: Tensor | None, added: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or added is None else gradient - added


def _squares(one: Tensor | None, other: Tensor) -> float:
    """The sum of the squares of an inner product's summands, of this rank's part."""
    if one is None or local(one).shape != local(other).shape:
        return 0.0
    return float((local(one).double() * local(other).double()).square().sum())


def _why(one: _Try) -> str:
    scale = max(abs(one.observed), abs(one.numeric.value))
    deviation = abs(one.observed - one.numeric.value)
    if one.numeric.error > ROUGH * max(one.numeric.rounding, PRECISE * scale / ROUGH):
        return UNEVEN
    if not scale or 5 * one.numeric.error >= deviation:
        return "at this precision the differences are too coarse to decide"
    return f"off by {deviation / scale:.2%}: more than rounding, less than is called wrong"


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if is_distributed(value) else value  # type: ignore[attr-defined, no-any-return]


def _is_nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(local(gradient).any())


def _precision(dtype: torch.dtype | None, epsilon: float) -> str:
    """In words: the dtype, and the coarser one that the arithmetic inside has."""
    name = "training's own precision" if dtype is None else str(dtype).removeprefix("torch.")
    inside = next((word for word, own in INSIDE.items() if own == epsilon), f"epsilon {epsilon:.1g}")
    return name if dtype is not None and epsilon <= torch.finfo(dtype).eps else f"{name}, {inside} inside"


def _together(outcomes: list[Outcome]) -> Outcome:
    for outcome in ("wrong", "right", "zero"):
        if outcome in outcomes:
            return outcome  # type: ignore[return-value]
    return "undetermined"


def _shape(tries: list[_Try], agree: float) -> Shape:
    """What kind of wrong it is."""
    if all(one.observed == 0.0 for one in tries):
        return "cut"
    if all(abs(one.numeric.value) <= 5 * one.numeric.error for one in tries):
        return "flat"
    ratios = [
        (one.observed / one.numeric.value, one.numeric.error / abs(one.numeric.value))
        for one in tries
        if one.numeric.value and one.numeric.error < 0.1 * abs(one.numeric.value)
    ]
    if not ratios:
        return "other"
    factor = ratios[0][0]
    alike = all(abs(ratio - factor) <= (0.01 + 5 * error + 3 * agree) * abs(factor) for ratio, error in ratios)
    return "scaled" if alike else "other"
