"""Losses that are means over elements: mean squared error, binary cross-entropy, a distance or margin with `.mean()`.

A root may be one of them or a sum of several. They count no tokens. What multiplies a mean in the backward root is
known all the same, by the gradient that arrives at it: 1 where the trainer divides by nothing and weighs it by nothing.
Losses of several kinds whose gradients add up by design (a discriminator's, on real and on generated data) are no means
of one kind: they are told by calls from elsewhere, or by targets that are one number, or one class, for a whole pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.losses.loss_graph import name_of, op_of, saved
from gradcheck_dist.probes.losses.loss_terms import Edge
from gradcheck_dist.probes.losses.reductions import (
    WITH_REDUCTION,
    Reduced,
    divided_by,
    element_weights,
    has_own_weights,
    leads_to,
    num_factors,
    num_kept,
    num_unmasked,
    numbers_at,
    of_reduction,
    only_body,
    reduced_at,
    summands,
)
from gradcheck_dist.probes.losses.sequences import sequences
from gradcheck_dist.probes.recording.backward_pass import ReducedTerm
from gradcheck_dist.probes.recording.branches import Calls, of_one_loop
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, kept_away
from gradcheck_dist.probes.recording.sites import calls

HALF = 0.5


class _Passes:
    """`closed_at`: the sequence number of autograd nodes when the last pass was over; what is older was computed before
    it. `begin` tells whether the last pass of the step, if there was one, was called from the same place."""

    def __init__(self) -> None:
        self.closed_at = 0
        self._step = -1
        self._calls: Calls = ()

    def begin(self, step: int, here: Calls) -> bool:
        is_of_loop = self._step != step or of_one_loop(self._calls, here)
        self._step, self._calls = step, here
        return is_of_loop


class Passes:
    """A gradient that is given to the caller may only be looked at (its norm balances losses, or is a penalty), so it
    does not stand between passes that accumulate."""

    def __init__(self) -> None:
        self._every, self._accumulating = _Passes(), _Passes()

    def begin(self, recorder: Recorder, current: BackwardPass) -> tuple[bool, int]:
        """Whether a pass is called from where the one before it in this step was, and when that one was over."""
        here = calls()
        if recorder.in_pipeline:  # whose microbatches are no tasks, though some schedules run all forwards first
            return self._accumulating.begin(recorder.step, here), 0
        is_of_loop = self._every.begin(recorder.step, here)
        if current.returned:
            return is_of_loop, self._every.closed_at
        return self._accumulating.begin(recorder.step, here), self._accumulating.closed_at

    def close(self, current: BackwardPass) -> None:
        for passes in (self._every,) if current.returned else (self._every, self._accumulating):
            passes.closed_at = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]


def watch(recorder: Recorder, current: BackwardPass, root: Root, passes: Passes) -> None:
    """Note what arrives at the means and sums that a root adds up, where all of them were computed since the last pass
    of the same loop. How many elements they go over is noted in steps that are sampled; in others, only a root that is
    one of them is watched."""
    elements = recorder.sampling
    is_of_loop, closed_at = passes.begin(recorder, current)
    top, above, parts = summands(root.grad_fn, root.output_nr)
    if not is_of_loop or (len(parts) > 1 and not elements):
        return
    reduced = [found for edge, _ in parts if (found := reduced_at(edge)) is not None]
    bodies = [found.body or found.node for found in reduced]
    if len({found.node for found in reduced}) < len(parts) or len(set(bodies)) < len(parts):
        if elements and current.computed:  # one term may be reduced part by part
            _watch_sequences(recorder, current, top, num_factors(above))
        return
    if any(found.node._sequence_nr() < closed_at for found in reduced):
        return
    for (_, factors), found, body in zip(parts, reduced, bodies, strict=True):
        numbers = [*above, *factors]
        divisors = divided_by([*numbers, *found.numbers])
        term = ReducedTerm(op_of(body), num_factors(numbers, len(found.numbers)), divisors)
        current.reduced.append(term)
        _hook(recorder, current, found.node, functools.partial(_arrived, term, found))
        if not elements:
            _hook(recorder, current, found.node, functools.partial(_told_without_samples, term, found))
        else:
            _hook(recorder, current, body, functools.partial(_reached, term, found))
    if len(parts) > 1:
        _hook(recorder, current, top[0], functools.partial(_summed, current))


def watch_weighted(recorder: Recorder, current: BackwardPass, root: Root, ids: Container[Any]) -> None:
    """Note what multiplies all elements of the one mean or sum of a counted loss (`ids`, by its node) that a root is or
    adds up, where tensors weigh these apart, or the tokens that they are sums of (advantages of sequences, lengths)."""
    top, above, parts = summands(root.grad_fn, root.output_nr)
    parts = parts if len(parts) > 1 else [(top, [])]
    reduced = [(found, factors) for edge, factors in parts if (found := reduced_at(edge)) is not None]
    weighs = [(found, factors) for found, factors in reduced if found.weighs_alone or found.weighs_sums]
    if len(parts) > 1:
        weighs = [(found, factors) for found, factors in weighs if leads_to((found.body, 0), ids) is not None]
    if len(weighs) == 1 and (len(parts) == 1 or len(current.direct) == 1):
        found, factors = weighs[0]
        term = ReducedTerm(op_of(found.body), num_factors([*above, *factors]), of_one=found.of_one)
        term.num_sums = found.num if found.weighs_sums else None
        current.reduced.append(term)
        _hook(recorder, current, found.node, functools.partial(_arrived, term, found))


def _watch_sequences(recorder: Recorder, current: BackwardPass, top: Edge, factors: Any) -> None:
    """Note what arrives at the elements behind a list of parts that are reduced one by one."""
    body = only_body(top)
    if body is not None:
        term = ReducedTerm(op_of(body), factors)
        current.reduced.append(term)
        _hook(recorder, current, body, functools.partial(_of_sequences, recorder, term))


def _of_sequences(recorder: Recorder, term: ReducedTerm, grads: tuple[Tensor | None, ...]) -> None:
    if grads[0] is not None:
        weights = getattr(grads[0], "_local_tensor", grads[0]).detach().double()
        term.elements = sequences(recorder, weights) or {}


def watch_whole(recorder: Recorder, current: BackwardPass, root: Root, ids: Mapping[Any, int]) -> None:
    """Note what arrives at the sum of losses that a root is a multiple of, and what multiplies those that count tokens
    there. `ids`: these losses, by their nodes."""
    top, _, parts = summands(root.grad_fn, root.output_nr, joined=True)
    if len(parts) > 1:
        current.before = [(ids.get(leads_to(edge, ids)), numbers_at(factors)) for edge, factors in parts]
        _hook(recorder, current, top[0], functools.partial(_summed, current))


def _hook(recorder: Recorder, current: BackwardPass, node: Any, hook: Callable[..., None]) -> None:
    current.handles.append(node.register_prehook(kept_away(recorder, "unseen", hook)))


def _summed(current: BackwardPass, grads: tuple[Tensor | None, ...]) -> None:
    if grads[0] is not None and grads[0].numel() == 1:
        current.whole = getattr(grads[0], "_local_tensor", grads[0]).detach().reshape(())


def _arrived(term: ReducedTerm, found: Reduced, grads: tuple[Tensor | None, ...]) -> None:
    gradient, node = grads[0], found.node
    if gradient is None or gradient.numel() != 1:
        return
    term.arrived = gradient.detach()
    weight = term.arrived
    if found.weighs_alone:
        term.beneath = (weight / found.num if found.is_mean else weight).reshape(())
        term.reduced_by = "mean" if found.is_mean else "sum"
        term.num_kept = num_kept(found)
    elif found.masks_sums or term.num_sums is not None:
        term.beneath = (weight / found.num if found.is_mean else weight).reshape(())
        if term.num_sums is not None:  # lengths that divide alone are no weights of the data
            term.num_sums = term.num_sums * has_own_weights(found)
            term.of_means = found.has_lengths
        term.reduced_by = "mean" if found.is_mean else "sum"
        term.num_kept, term.of_sums = num_unmasked(found), True
    has_target = name_of(node) in WITH_REDUCTION
    target = saved(node, "_saved_target") if has_target else None
    if has_target and target is None:  # a checkpoint's: what it holds is not known
        weight = torch.full_like(weight, torch.nan)
    if target is not None and target.numel() > 1:
        one_kind = (target == target.flatten()[0]).all()
        if name_of(node).startswith("BinaryCrossEntropy"):
            one_kind |= (target > HALF).all() | (target < HALF).all()
        weight = torch.where(one_kind, torch.nan, weight)
    if not found.is_mean:
        term.arrived = weight
    elif found.is_margin or (compares := found.compares) is True:
        term.mean_weight = weight
    elif isinstance(compares, Tensor):
        term.mean_weight = torch.where(compares, weight, torch.nan)


def _told_without_samples(term: ReducedTerm, found: Reduced, grads: tuple[Tensor | None, ...]) -> None:
    """What each element weighs where nothing multiplies them beneath the reduction."""
    unseen_target = name_of(found.node) in WITH_REDUCTION and saved(found.node, "_saved_target") is None
    if grads[0] is not None and grads[0].numel() == 1 and not (found.is_weighted or found.numbers or unseen_target):
        term.elements = of_reduction(found, grads[0].detach())


def _reached(term: ReducedTerm, found: Reduced, grads: tuple[Tensor | None, ...]) -> None:
    if grads[0] is not None and term.arrived is not None:
        term.elements = element_weights(found, term.arrived, grads[0])
