"""Passes that begin with a gradient which earlier passes left at a cut in the graph.

A loss in chunks detaches the hidden states, differentiates the head's loss chunk by chunk, and hands what arrived at
the hidden states on to the body, in a pass that no loss begins (torchtitan's ChunkedLossWrapper, GradCache). A few rows
of what arrived at each cut are kept; where they are found again in what the body's pass begins with, times one number,
the tokens of those passes are this one's too. On an accelerator that number is read later, so that what is kept is gone
with the first pass that may hand it on; where that did not, nothing is said of the step's later ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from gradcheck_dist.events import HandedOn
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.backward.graph_leaves import leaves_in_front
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.losses.loss_graph import FACTORS, MAX_FACTORS, name_of, operands_of
from gradcheck_dist.probes.parameters.stand_ins import is_host, is_plain
from gradcheck_dist.probes.recording.backward_pass import BackwardPass
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded, kept_away

NUM_ROWS, MAX_ELEMENTS, MAX_ELSEWHERE = 3, 1 << 24, 1 << 28
"""Rows that are kept of what a pass left; elements of a gradient on the host, and on an accelerator."""
BLOCK = 1 << 22
"""Elements that are looked at as float64 at a time."""
FITS = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Relative difference within which a row is a multiple of another one; of other types ROUNDED."""
ROUNDED = 2e-2


class Arrived(NamedTuple):
    """Rows of what a pass left at a cut, float64 [NUM_ROWS, width], and whether it left any, a bool."""

    accumulation_step: int
    microbatch: int
    rows: Tensor
    there: Tensor


class Cuts:
    """What passes left at cuts since the last one that handed something on. No cut is held, not weakly
    either, but while a pass is under way: who swaps tensors (Module.to) could not do it."""

    def __init__(self) -> None:
        self.made = False  # a tensor was cut off since then
        self.met: list[Tensor] = []  # in the pass that is under way
        self.seen: dict[tuple[int, int], Tensor] = {}  # by (id, address): which rows have a gradient already
        self.arrived: list[Arrived] = []
        self.lost: Tensor | None = None  # on an accelerator: whether some that was kept is, and was not handed on
        self.step = 0

    def of_step(self, step: int) -> None:
        """What an earlier step left (an adversary's input) is handed on by nobody."""
        if self.step != step:
            self.step, self.seen, self.arrived, self.lost = step, {}, [], None

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
    watched = recorder.samples_upcoming and not recorder.suspended
    if watched and tensor.requires_grad and tensor.is_leaf and tensor.dim() > 1:
        cuts.made = True


@guarded("handed_on")
def ends(recorder: Recorder, cuts: Cuts, current: BackwardPass) -> None:
    """A pass is over: keep some rows of what it left at cuts, if a loss was seen in it."""
    met, cuts.met = cuts.met, []
    if not (met and recorder.sampling and current.arrived):
        return
    for tensor in met:
        grad = _local(tensor.grad).detach() if tensor.grad is not None else None
        if grad is None or grad.dim() < 2 or not grad.numel() or _too_large(grad) or not is_plain(grad):
            continue
        rows = grad.reshape(-1, grad.shape[-1])
        has_one, place = _has_one(rows), (id(tensor), _local(tensor).data_ptr())
        before = cuts.seen.get(place)
        known = before is not None and before.shape == has_one.shape
        new = has_one & ~before if known and before is not None else has_one
        cuts.seen[place] = has_one
        some, there = _evenly(new)
        if not is_host(grad) or there:
            cuts.arrived.append(Arrived(recorder.accumulation_step, current.microbatch, rows[some].double(), there))


def _too_large(grad: Tensor) -> bool:
    return grad.numel() > (MAX_ELEMENTS if is_host(grad) else MAX_ELSEWHERE)


def _has_one(rows: Tensor) -> Tensor:
    """Which rows have a gradient."""
    return torch.linalg.vector_norm(rows, torch.inf, dim=1) != 0


def _evenly(mask: Tensor) -> tuple[Tensor, Tensor]:
    """NUM_ROWS places where a mask holds, evenly spread, the first and the last among them; whether there is one.
    Some come more than once where it holds at fewer; nothing is waited for."""
    counts = mask.cumsum(0)
    most = counts[-1]
    numbers = torch.arange(NUM_ROWS, device=mask.device) * (most - 1) // (NUM_ROWS - 1) + 1
    return torch.searchsorted(counts, numbers).clamp(max=len(mask) - 1), most > 0


def _cut_off(recorder: Recorder, root: Root) -> list[Tensor]:
    """Leaves behind a root that are no parameters."""
    return [
        leaf
        for leaf in leaves_in_front(root, through_functions=True)
        if not isinstance(leaf, Parameter) and recorder.registry.find(leaf) is None
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
    if local.dim() < 2 or not is_plain(local) or not local.is_floating_point():
        return
    multiple = multiple_of(cuts.arrived, local)
    if multiple is None:
        return
    here = is_host(local)
    if here and multiple.isnan():
        return
    if not here:
        lost = multiple.isnan() & torch.stack([one.there for one in cuts.arrived]).any()
        if cuts.lost is not None:
            before = cuts.lost.to(multiple.device, non_blocking=True)
            multiple, lost = torch.where(before, torch.nan, multiple), before | lost
        cuts.lost = lost
    recorder.emit(
        _told,
        site=current.site,
        accumulation_step=recorder.accumulation_step,
        microbatch=current.microbatch,
        multiple=multiple,
        passes=tuple(dict.fromkeys((one.accumulation_step, one.microbatch) for one in cuts.arrived)),
    )
    cuts.clear()
    cuts.made = not here  # elsewhere what was cut off before may get its gradient yet


def _told(*, multiple: float, passes: tuple[tuple[int, int], ...], **fields: Any) -> HandedOn:
    """The event; without passes where it turns out that nothing is handed on."""
    known = not math.isnan(multiple)
    return HandedOn(multiple=multiple if known else 0.0, passes=passes if known else (), **fields)


def _local(tensor: Tensor) -> Tensor:
    """What of a distributed tensor lies on this rank."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def multiple_of(arrived: Sequence[Arrived], gradient: Tensor) -> Tensor | None:
    """The number that rows which arrived are multiplied by in a gradient, float64; NaN where one of them is not in it,
    or they are multiplied by different ones. None where they cannot be compared."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    wanted = [one.rows for one in arrived]
    if not rows.numel() or _too_large(rows) or any(one.shape[1] != rows.shape[1] for one in wanted):
        return None
    if any(one.device != rows.device for one in wanted):
        return None
    fits, sought = FITS.get(gradient.dtype, ROUNDED), torch.cat(wanted)
    there = torch.stack([one.there for one in arrived])[:, None].expand(-1, NUM_ROWS).reshape(-1)
    found = rows[_nearest(sought, rows)].double()
    norms = found.square().sum(1).sqrt()
    multiples = (found * sought).sum(1) / sought.square().sum(1)
    apart = (found - multiples[:, None] * sought).square().sum(1).sqrt()
    one = multiples[there.to(torch.int8).argmax()]
    fit = (apart <= fits * norms) & (norms > 0) & ((multiples - one).abs() <= fits * one.abs())
    median = torch.where(there, multiples, one).median()
    return torch.where((fit | ~there).all() & there.any(), median, torch.nan)


def _nearest(sought: Tensor, rows: Tensor) -> Tensor:
    """For each row that is sought the number of the one that points most nearly its way, or the other."""
    best = torch.full((len(sought),), -1.0, dtype=torch.float64, device=rows.device)
    place = torch.zeros(len(sought), dtype=torch.int64, device=rows.device)
    for begin in range(0, len(rows), step := max(1, BLOCK // rows.shape[1])):
        part = rows[begin : begin + step].double()
        norms = part.square().sum(1).sqrt()
        most, at = torch.where(norms > 0, (sought @ part.T).abs() / norms, -1.0).max(1)
        place, best = torch.where(most > best, at + begin, place), torch.maximum(best, most)
    return place
