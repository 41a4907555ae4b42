"""Sums of cross-entropies that are known by the gradient that their function gives.

Of a function that gives one number for all labels, over a part of the vocabulary, the value tells nothing to one rank
alone. Its gradient does: a label's row is weight * softmax(z), less the weight at the label's own logit, and softmax(z)
is a multiple of exp(z). So the one entry that is no such multiple is the label's, what it is off by is the weight, and
where the label lies in each row tells which part of the vocabulary this is. A part in which no label lies has that
multiple alone, which is one number on all ranks of the loss (ledger/known_elsewhere.py).

A function that is given hidden states and the output layer's weight (a fused linear cross-entropy) gives the hidden
states weight * (softmax(z) - onehot(label)), times that matrix. Of a few labels this is computed, however large the
vocabulary is and whatever the function divides by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.hooks import unserializable_hook

from gradcheck_dist.events import FUNCTION, Site
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.losses import log_probs
from gradcheck_dist.probes.losses.closed_form import Given, Looked, coarsest, divisors, evenly, nearest, row, valid_in
from gradcheck_dist.probes.losses.loss import tell_loss, tell_whole
from gradcheck_dist.probes.losses.loss_graph import name_of, operands_of
from gradcheck_dist.probes.parameters.stand_ins import is_host, is_plain
from gradcheck_dist.probes.recording.recorder import Recorder, guarded, kept_away
from gradcheck_dist.probes.recording.sites import caller_site

NUM_ROWS = 64
"""Labels that are looked at: of those that lie in this rank's part of the vocabulary, MIN_HELD are needed."""
MIN_HELD, MIN_CLASSES = 2, 4
FITS = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Share of a row's gradient that is not explained; in other types ROUNDED."""
ROUNDED = 2e-2
NEAR, NEAR_ROUNDED = 1e-5, 4e-3
"""Relative difference within which a function is taken to divide by a number that it was given."""
MAX_LOGITS, MAX_KEPT = 1 << 24, 1 << 20
MAX_HOPS = 16
SUMMED = "gradcheck_sum"
"""In the metadata of a function's node: its State."""
_LINEAR = (*log_probs.PASS_THROUGH, "Sum", "Mean", "Neg", "Mul", "Div")


@dataclass
class State:
    """Whether the pass that comes to a function begins at its result, times constants."""

    alone: bool = False


def begins_at(root: Root) -> None:
    """A backward pass begins: note it where nothing but constants lies between its root and a function."""
    node: Any = root.grad_fn
    for _ in range(MAX_HOPS):
        if node is None:
            return
        if SUMMED in node.metadata:
            node.metadata[SUMMED].alone = True
            return
        operands = operands_of(node)
        if len(operands) != 1 or not name_of(node).startswith(_LINEAR):
            return
        node = operands[0]


class Part(NamedTuple):
    """What a part of the classes tells of a loss: each label's weight, None where too few labels lie in the part, and
    what exp(z) is multiplied by in the gradient, as the mean of its logarithm."""

    weight: float | None
    scale: float


@guarded("by_gradient")
def watch(recorder: Recorder, cls: type[Function], given: Given, output: Tensor) -> None:
    """A function gave one number, which is no sum of losses that are known: see whether its gradient is one's."""
    num_logits = given.labels.numel() * given.rows.shape[-1]
    if given.weight is not None or not output.is_cpu or given.num_classes < MIN_CLASSES or num_logits > MAX_LOGITS:
        return
    num_rows = min(NUM_ROWS, max(MIN_HELD, MAX_KEPT // given.num_classes))
    flat = given.labels.detach().reshape(-1)
    valid = (flat >= 0).nonzero().squeeze(1)
    index = evenly(valid, num_rows)
    logits, labels, site = row(given.rows, index).double(), given.labels, caller_site()
    _when_passed(
        recorder,
        given,
        output,
        lambda found: came(recorder, cls.__name__, found.detach(), logits, index, labels, site),
    )


def _when_passed(recorder: Recorder, given: Given, output: Tensor, came: Callable[[Tensor], None]) -> None:
    """Call came(what a function gave for its rows) when a pass that begins at its result, times constants, has come
    through it."""
    node: Any = output.grad_fn
    state = node.metadata[SUMMED] = State()
    place, shape = given.place, given.rows.shape

    def passed(grad_inputs: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> None:
        handle.remove()
        found = grad_inputs[place] if place < len(grad_inputs) else None
        if state.alone and found is not None and found.shape == shape and is_plain(found):
            came(found)

    handle = node.register_hook(unserializable_hook(kept_away(recorder, "by_gradient", passed)))


@guarded("by_gradient")
def watch_fused(recorder: Recorder, cls: type[Function], looked: Looked, output: Tensor, args: Sequence[Any]) -> None:
    """The same of a function that computes logits itself."""
    given, site, number = looked.given, caller_site(), output.output_nr
    label = looked.labels.clamp(0, given.num_classes - 1)[:, None]
    valid = (looked.labels >= 0) & (looked.labels < given.num_classes)
    with torch.no_grad():
        of_logits = looked.logits.softmax(1)
        of_logits.scatter_add_(1, label, torch.full_like(of_logits[:, :1], -1.0))
        derivative = given.gradient(of_logits)
        of_all = [*divisors(args, valid_in(given, args, ignores=True))]
        numbers = torch.stack([derivative.new_full((), one) if isinstance(one, float) else one for _, one in of_all])
    arrived: list[Tensor] = []

    def arrives(grads: Sequence[Tensor | None]) -> None:
        arriving.remove()
        if (grad := grads[number]) is not None:
            arrived.append(grad.detach().reshape(()).double())

    def passed(found: Tensor) -> None:
        current = recorder.current
        if current is None or not recorder.sampling or recorder.loss_seen_in == current.seq:
            return
        rounded = coarsest(found.dtype, looked.dtype)
        weight = _weight_of(row(found, looked.index).double(), derivative, valid, FITS.get(rounded, ROUNDED))
        weight = _exact(weight, arrived[0] if arrived else weight * torch.nan, numbers, rounded in FITS)
        known = weight.isfinite()
        if is_host(known) and not known:
            return
        labels = given.labels
        loss_id = tell_loss(recorder, cls.__name__, "none", labels, None, site, known, dtype=rounded)
        learns = (found.detach() != 0).reshape(labels.numel(), -1).any(1) & (labels.detach().reshape(-1) >= 0)
        log_probs.gradient_arrived(recorder, torch.where(learns, -weight, 0.0), loss_id, known=known)

    node: Any = output.grad_fn
    arriving = node.register_prehook(unserializable_hook(kept_away(recorder, "by_gradient", arrives)))
    _when_passed(recorder, given, output, passed)


def _weight_of(got: Tensor, derivative: Tensor, valid: Tensor, fits: float) -> Tensor:
    """The one number that labels' derivatives, (labels, features) of float64, are multiplied by in what a function
    gave; not a number where there is none, or too few labels have a gradient."""
    learns = (got != 0).any(1) & valid
    got, derivative = got * learns[:, None], derivative * learns[:, None]
    weight = (got * derivative).sum() / (derivative * derivative).sum()
    off = (got - weight * derivative).square().sum(1) > fits * fits * got.square().sum(1)
    return torch.where((learns.sum() >= MIN_HELD) & ~off.any() & (weight != 0), weight, torch.nan)


def _exact(weight: Tensor, arrived: Tensor, numbers: Tensor, fine: bool) -> Tensor:
    """What arrived over the number that the function divides by, as far as the measured weight tells which: a gradient
    of a coarse type tells it in no other way."""
    one, first = nearest(numbers.double(), weight / arrived, NEAR if fine else NEAR_ROUNDED)
    return torch.where(one, arrived / numbers.take(first), weight if fine else torch.nan)


@guarded("by_gradient")
def came(
    recorder: Recorder,
    name: str,
    gradient: Tensor,
    logits: Tensor,
    index: Tensor,
    labels: Tensor,
    site: Site | None,
) -> None:
    """Backward ran through the function: record its losses, if they are cross-entropies."""
    current = recorder.current
    if current is None or not recorder.sampling or recorder.loss_seen_in == current.seq:
        return
    flat = labels.detach().reshape(-1)
    part = part_in(row(gradient, index).double(), logits, flat[index], FITS.get(gradient.dtype, ROUNDED))
    if part is None:
        return
    if part.weight is not None:
        loss_id = tell_loss(recorder, name, "none", labels, None, site, dtype=gradient.dtype)
        learns = (gradient != 0).reshape(len(flat), -1).any(1) & (flat >= 0)
        log_probs.gradient_arrived(recorder, torch.where(learns, -part.weight, 0.0), loss_id, class_scale=part.scale)
        return
    loss_id = tell_loss(recorder, f"{FUNCTION}{name}", "unknown", labels, None, site)
    current.root_loss = None
    recorder.loss_arrived(current, loss_id)
    tell_whole(recorder, current, loss_id, class_scale=part.scale)


def part_in(gradient: Tensor, logits: Tensor, labels: Tensor, fits: float) -> Part | None:
    """What a gradient of logits, both (labels, classes) of float64, tells of the labels' cross-entropies.

    The classes may be a part of all, one behind the other, to which some of the labels belong. None where the gradient
    is another function's, or labels have weights of their own.
    """
    learns = (gradient != 0).any(1)
    gradient, logits, labels = gradient[learns], logits[learns], labels[learns]
    if len(labels) < MIN_HELD:
        return None
    highest = logits.amax(1, keepdim=True)
    scores = (logits - highest).exp()
    base = (gradient / scores).median(1, keepdim=True).values
    rest = gradient - base * scores
    at = rest.abs().argmax(1, keepdim=True)
    off = rest.gather(1, at).squeeze(1)
    size = gradient.square().sum(1).sqrt()
    others = rest.scatter(1, at, 0.0).square().sum(1).sqrt()
    held = off.abs() > fits * size
    if (others > fits * size).any() or (base.sign() != base[0].sign()).any() or not base[0].any():
        return None
    scale = float((base.abs().log() - highest).mean())
    if int(held.sum()) < MIN_HELD or (labels[held] == labels[held][0]).all():
        return Part(None, scale)
    starts = (labels - at.squeeze(1))[held]
    weights = -off[held]
    weight = float(weights.median())
    inside = (labels >= starts[0]) & (labels < starts[0] + logits.shape[1])
    if (starts != starts[0]).any() or not torch.equal(inside, held):
        return None
    # What is left of softmax(z) here, which is at most all of it.
    total = (base.squeeze(1) / weight) * scores.sum(1)
    alike = bool(((weights - weight).abs() <= fits * abs(weight)).all())
    return Part(weight, scale) if alike and bool(((total > 0) & (total <= 1 + fits)).all()) else None
