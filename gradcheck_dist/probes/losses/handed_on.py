"""Passes that begin with a gradient which earlier passes left at a cut in the graph.

A loss in chunks detaches the hidden states, differentiates the head's loss chunk by chunk, and hands what arrived at
the hidden states on to the body, in a pass that no loss begins (torchtitan's ChunkedLossWrapper, GradCache). A few rows
of what arrived at each cut are kept; where they are found again in what the body's pass begins with, times one number,
the tokens of those passes are this one's too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from gradcheck_dist.events import HandedOn
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.backward.graph_leaves import leaves_in_front
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.losses.closed_form import evenly
from gradcheck_dist.probes.losses.loss_graph import FACTORS, MAX_FACTORS, name_of, operands_of
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.backward_pass import BackwardPass
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded, kept_away

NUM_ROWS, MAX_ELEMENTS = 3, 1 << 24
FITS = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Relative difference within which a row is a multiple of another one; of other types ROUNDED."""
ROUNDED = 2e-2


class Arrived(NamedTuple):
    """Rows of what a pass left at a cut."""

    accumulation_step: int
    microbatch: int
    rows: Tensor


class Cuts:
    """What passes left at cuts since the last one that handed something on. No cut is held, not weakly
    either, but while a pass is under way: who swaps tensors (Module.to) could not do it."""

    def __init__(self) -> None:
        self.made = False  # a tensor was cut off since then
        self.met: list[Tensor] = []  # in the pass that is under way
        self.seen: dict[tuple[int, int], Tensor] = {}  # by (id, address): which rows have a gradient already
        self.arrived: list[Arrived] = []
        self.step = 0

    def of_step(self, step: int) -> None:
        """What an earlier step left (an adversary's input) is handed on by nobody."""
        if self.step != step:
            self.step, self.seen, self.arrived = step, {}, []

    def clear(self) -> None:
        self.made = False
        self.met, self.seen, self.arrived = [], {}, []


def install(recorder: Recorder, patches: Patches) -> None:
    cuts = Cuts()

    def watch_cutting(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def requires_grad_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = original(self, *args, **kwargs)
            if not isinstance(self, Parameter) and not torch.compiler.is_compiling():
                note(recorder, cuts, self)
            return result

        return requires_grad_

    def begin(recorder: Recorder, current: BackwardPass, roots: Sequence[Root], has_gradients: bool) -> None:
        begins(recorder, cuts, current, roots, has_gradients)

    def end(recorder: Recorder, current: BackwardPass) -> None:
        ends(recorder, cuts, current)

    patches.replace(Tensor, "requires_grad_", watch_cutting)
    autograd.OPEN_LISTENERS.append(begin)
    autograd.CLOSE_LISTENERS.append(end)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))
    patches.on_restore(lambda: autograd.CLOSE_LISTENERS.remove(end))


@guarded("handed_on")
def note(recorder: Recorder, cuts: Cuts, tensor: Tensor) -> None:
    """A tensor shall have a gradient."""
    if recorder.sampling and not recorder.suspended and tensor.requires_grad and tensor.is_leaf and tensor.dim() > 1:
        cuts.made = True


@guarded("handed_on")
def ends(recorder: Recorder, cuts: Cuts, current: BackwardPass) -> None:
    """A pass is over: keep some rows of what it left at cuts, if a loss was seen in it."""
    met, cuts.met = cuts.met, []
    if not (met and recorder.sampling and current.arrived):
        return
    for tensor in met:
        grad = _local(tensor.grad) if tensor.grad is not None else None
        if grad is None or grad.dim() < 2 or grad.numel() > MAX_ELEMENTS or not is_plain(grad):
            continue
        rows = grad.detach().reshape(-1, grad.shape[-1])
        has_one, place = (rows != 0).any(1), (id(tensor), _local(tensor).data_ptr())
        before = cuts.seen.get(place)
        known = before is not None and before.shape == has_one.shape
        new = (has_one & ~before if known and before is not None else has_one).nonzero().squeeze(1)
        cuts.seen[place] = has_one
        if len(new):
            some = evenly(new, NUM_ROWS)
            cuts.arrived.append(Arrived(recorder.accumulation_step, current.microbatch, rows[some].double()))


def _cut_off(recorder: Recorder, root: Root) -> list[Tensor]:
    """Leaves behind a root that are no parameters, on the CPU."""
    return [
        leaf
        for leaf in leaves_in_front(root, through_functions=True)
        if not isinstance(leaf, Parameter) and _local(leaf).is_cpu and recorder.registry.find(leaf) is None
    ]


@guarded("handed_on")
def begins(recorder: Recorder, cuts: Cuts, current: BackwardPass, roots: Sequence[Root], has_gradients: bool) -> None:
    """A pass begins: look at the gradient with which it begins, where it may be one that was left at a cut."""
    if not cuts.made or not recorder.sampling or len(roots) != 1:
        return
    root = roots[0]
    cuts.of_step(recorder.step)
    cuts.met = _cut_off(recorder, root)
    if not cuts.arrived:
        return
    node: Any = root.grad_fn
    if has_gradients and root.numel() > 1 and node is not None:
        number = root.output_nr
        handle = node.register_prehook(lambda grads: came(recorder, cuts, current, grads[number]))
        current.handles.append(handle)
        return
    for _ in range(MAX_FACTORS):
        operands = operands_of(node)
        if name_of(node) not in FACTORS or len(operands) != 1:
            break
        node = operands[0]
    if getattr(type(node), "_forward_cls", None) is not None:

        def passed(grads: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> None:
            given = [grad for grad in grads if grad is not None]
            came(recorder, cuts, current, given[0] if len(given) == 1 else None)

        current.handles.append(node.register_hook(kept_away(recorder, "handed_on", passed)))


@guarded("handed_on")
def came(recorder: Recorder, cuts: Cuts, current: BackwardPass, gradient: Tensor | None) -> None:
    """The gradient with which a pass begins is there."""
    if gradient is None or not cuts.arrived or recorder.current is not current:
        return
    local = _local(gradient).detach()
    multiple = multiple_of(cuts.arrived, local) if local.is_cpu and local.dim() > 1 else None
    if multiple is not None:
        recorder.emit(
            HandedOn,
            site=current.site,
            accumulation_step=recorder.accumulation_step,
            microbatch=current.microbatch,
            multiple=multiple,
            passes=tuple(dict.fromkeys((one.accumulation_step, one.microbatch) for one in cuts.arrived)),
        )
        cuts.clear()


def _local(tensor: Tensor) -> Tensor:
    """What of a distributed tensor lies on this rank."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def multiple_of(arrived: Sequence[Arrived], gradient: Tensor) -> float | None:
    """The number that rows which arrived are multiplied by in a gradient; None where one of them is not in it, or they
    are multiplied by different ones."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    if rows.numel() > MAX_ELEMENTS or any(one.rows.shape[1] != rows.shape[1] for one in arrived):
        return None
    rows = rows[(rows != 0).any(1)].double()
    if not len(rows):
        return None
    fits, wanted = FITS.get(gradient.dtype, ROUNDED), torch.cat([one.rows for one in arrived])
    products = wanted @ rows.T
    sizes, norms = wanted.square().sum(1).sqrt(), rows.square().sum(1).sqrt()
    found = (products.abs() / norms).argmax(1)
    multiples = products.gather(1, found[:, None]).squeeze(1) / sizes.square()
    apart = (rows[found] - multiples[:, None] * wanted).square().sum(1).sqrt()
    if (apart > fits * norms[found]).any() or (multiples - multiples[0]).abs().max() > fits * multiples[0].abs():
        return None
    return float(multiples.median())
