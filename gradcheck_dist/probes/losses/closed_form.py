"""Cross-entropies in closed form, of what a function of somebody's own is given: logits and labels, or hidden states,
the output layer's weight and labels.

What goes in and what comes out tells whether a function computes them: logsumexp(z) - z[label] for each label, or their
sum over a number (none, the labels that count, a number that the function is given). The logits of a few labels are
read before the function is applied, for some functions write their gradient over them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcheck_dist.probes.parameters.stand_ins import is_plain

NUM_ROWS = 8
"""Labels of one application that are looked at."""
MAX_PRODUCTS = 1 << 27, 1 << 33
"""Products that logits of these rows take: on the CPU, and on an accelerator."""
MIN_ROWS, MAX_LOGITS = 2, 1 << 18
"""Of a large vocabulary fewer labels are looked at: what is kept of them stays until their backward pass."""
MAX_TOTAL = 1 << 31, 1 << 38
"""Products, or logits, of all labels."""
CHUNK = 1 << 20, 1 << 24
"""Logits that are computed at a time, and elements of a weight that are converted at a time: 64 MiB on an accelerator,
where each call takes longer to start."""
FITS = {torch.float32: 2e-5, torch.float64: 2e-5}
"""Relative difference within which a sum of losses is what was computed here; of other types ROUNDED."""
ROUNDED = 4e-3
DIFFER = 0.01
"""Relative difference of some losses, without which a number before all of them does not show."""
NEAR, FAR = 3.0, 4.0
"""Up to which factor losses with a term of their own (smoothed labels) differ from cross-entropies, each from the
others' middle, and all of them."""


@dataclass(frozen=True)
class Given:
    """What a function computes losses from: `rows` (..., features) at `place` among its tensors, as autograd numbers
    them, one row a label; `weight` (classes, features), at `weight_place`, and `bias` (classes,) where it computes the
    logits itself."""

    place: int
    rows: Tensor
    labels: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    weight_place: int = -1

    @property
    def num_classes(self) -> int:
        return int(self.rows.shape[-1] if self.weight is None else self.weight.shape[0])

    def logits(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """The logits of some labels, (labels, classes)."""
        logits = row(self.rows, index).to(dtype)
        if self.weight is not None:
            logits = torch.cat([logits @ part.to(dtype).T for part in self.parts()], 1)
        return logits if self.bias is None else logits + self.bias.detach()

    def gradient(self, of_logits: Tensor) -> Tensor:
        """The gradient of rows that have such a gradient of their logits."""
        if self.weight is None:
            return of_logits
        parts = self.parts()
        split = of_logits.split(len(parts[0]), 1)
        products = [mine @ part.to(mine.dtype) for mine, part in zip(split, parts, strict=True)]
        return torch.stack(products).sum(0)

    def parts(self) -> Sequence[Tensor]:
        assert self.weight is not None
        return self.weight.detach().split(max(1, _limit(CHUNK, self.weight) // self.weight.shape[1]))


@dataclass(frozen=True)
class Looked:
    """Some labels of an application: `index` into all of them, flattened, `labels` (n,) and `logits` (n, classes).
    `dtype`: the coarsest type that the function computes in, as far as it is known."""

    given: Given
    index: Tensor
    labels: Tensor
    logits: Tensor
    dtype: torch.dtype


def row(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor (..., features), which need not lie side by side in memory."""
    places: list[Tensor] = []
    for size in reversed(tensor.shape[:-1]):
        places.insert(0, index % size)
        index = index // size
    return tensor.detach()[tuple(places)]


def given_to(args: Sequence[Any], whole: Sequence[Tensor]) -> Given | None:
    """What a function is given, if one of its tensors of whole numbers may hold the labels."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    for labels in whole:
        for place, rows in enumerate(tensors):
            if not _have_rows(rows, labels):
                continue
            others = [one for one in tensors if one is not rows and is_plain(one) and one.is_floating_point()]
            weight = next((one for one in others if one.dim() == 2 and one.shape[1] == rows.shape[-1]), None)
            if weight is None:
                return Given(place, rows, labels)
            bias = next((one for one in others if one.dim() == 1 and len(one) == len(weight)), None)
            weight_place = next(at for at, one in enumerate(tensors) if one is weight)
            return Given(place, rows, labels, weight, bias, weight_place)
    return None


def look(given: Given) -> Looked | None:
    """Some labels and their logits; those that are left out (below zero) come last. Nothing is read back from an
    accelerator."""
    size = given.weight.numel() * NUM_ROWS if given.weight is not None else 0
    if size > _limit(MAX_PRODUCTS, given.rows):
        return None
    flat = given.labels.detach().reshape(-1)
    order = torch.argsort((flat < 0).to(torch.int8), stable=True)
    count = min(NUM_ROWS, max(MIN_ROWS, MAX_LOGITS // given.num_classes), flat.numel())
    spread = torch.arange(count, device=flat.device) * (flat >= 0).sum().clamp_min(count) // count
    index = order[spread]
    return Looked(given, index, flat[index], given.logits(index, torch.float64), _computes_in(given))


def _computes_in(given: Given) -> torch.dtype:
    """The type of what a function is given; below autocast a product with a weight is of autocast's, whatever the type
    of both (hidden states of float32 behind a sum of residuals)."""
    device = given.rows.device.type
    if given.weight is None or not torch.is_autocast_enabled(device):
        return given.rows.dtype
    return coarsest(given.rows.dtype, torch.get_autocast_dtype(device))


def coarsest(*dtypes: torch.dtype) -> torch.dtype:
    """The type that rounds most."""
    return max(dtypes, key=lambda one: torch.finfo(one).eps)


def number_before(looked: Looked, output: Tensor, *, whole: bool) -> Tensor:
    """What multiplies all cross-entropies in a result of one number for each label, 0-d: 1 where these are no
    multiples of cross-entropies, not a number where a coarse type does not tell which, or where they are near to
    multiples by a number far from 1 (smoothed labels, over a count), or a mask leaves too few of those that were looked
    at. `whole`: all classes are surely here; over shards of them losses are near to nothing. Waits for no
    accelerator."""
    classes = looked.given.num_classes
    label = looked.labels.clamp(0, classes - 1)[:, None]
    losses = looked.logits.logsumexp(1) - looked.logits.gather(1, label).squeeze(1)
    found = output.detach().reshape(-1)[looked.index].double().abs()
    classed = (looked.labels >= 0) & (looked.labels < classes)
    valid = classed & (found != 0)
    hidden = (valid.sum() < MIN_ROWS) & (valid != classed).any()
    losses, found = torch.where(valid, losses, 0.0), torch.where(valid, found, 0.0)
    number = (found * losses).sum() / losses.square().sum()
    fits = FITS.get(coarsest(looked.dtype, output.dtype), ROUNDED)
    alike = ((found - number * losses).abs() <= fits * number * losses).all()
    differ = losses.amax() - torch.where(valid, losses, torch.inf).amin() > DIFFER * losses.amax()
    several = (valid.sum() >= MIN_ROWS) & differ
    multiple = several & alike & ((number - 1).abs() > fits)
    near = ((found >= number * losses / NEAR) & (found <= number * losses * NEAR)).all()
    far = several & near & ((number < 1 / FAR) | (number > FAR))
    return torch.where(
        multiple, number if fits < ROUNDED else torch.nan, torch.where((far | hidden) & whole, torch.nan, 1.0)
    )


class Sum(NamedTuple):
    """One result for all labels: the sum of their cross-entropies times `share`, where `valid` (n,) is true. `case`
    numbers in CASES what it is divided by, and whether labels that equal an argument are valid; where the result is no
    such sum it is -1, and `share` not a number. 0-d tensors, on the result's device."""

    share: Tensor
    valid: Tensor
    case: Tensor


OVER = ("nothing", "labels", "all", "number")
"""What a sum is divided by: nothing, labels that are valid, all labels, a number among the arguments."""
CASES = [(ignores, over) for ignores in (True, False) for over in OVER]


def sum_of(looked: Looked, output: Tensor, args: Sequence[Any]) -> Sum | None:
    """What a function's one result is; None where there are too many labels to tell. Waits for no accelerator."""
    given, flat = looked.given, looked.given.labels.detach().reshape(-1)
    size = flat.numel() * given.num_classes * (given.rows.shape[-1] if given.weight is not None else 1)
    if output.device != flat.device or size > _limit(MAX_TOTAL, flat):
        return None
    with torch.autocast(flat.device.type, enabled=False):
        losses = torch.cat(list(_losses(given, flat.clamp(0, given.num_classes - 1))))
    fits = FITS.get(looked.dtype, ROUNDED)
    label = looked.labels.clamp(0, given.num_classes - 1)[:, None]
    before = looked.logits.logsumexp(1) - looked.logits.gather(1, label).squeeze(1)
    as_before = torch.isclose(losses[looked.index], before, rtol=fits, atol=fits).all()  # else they were written over
    result = output.reshape(()).double().abs()
    found = Sum(result.new_full((), torch.nan), flat >= 0, torch.full_like(flat[:1], -1).reshape(()))
    for ignores in (True, False):
        valid = valid_in(given, args, ignores=ignores)
        total = torch.where(valid, losses, 0.0).sum()
        names, numbers = zip(*divisors(args, valid), strict=True)
        tried = torch.stack([total.new_full((), one) if isinstance(one, float) else one.double() for one in numbers])
        one, first = nearest(tried, result / total, fits)
        first, empty = torch.where(one, first, 0), ~valid.any()  # over nothing, which is 1, where no label is valid
        case = found.case
        for place, name in enumerate(names):
            case = torch.where(first == place, CASES.index((ignores, name)), case)
        takes = as_before & (one | empty) & (found.case < 0)
        mine = Sum(1 / tried.take(first), valid, case)
        found = Sum(*(torch.where(takes, new, old) for new, old in zip(mine, found, strict=True)))
    return found


def nearest(numbers: Tensor, share: Tensor, fits: float) -> tuple[Tensor, Tensor]:
    """Whether a share is one over one of some numbers, and where that stands among them."""
    fitting = ((share * numbers - 1).abs() <= fits) & (numbers > 0)
    first = fitting.to(torch.int8).argmax()
    return fitting.any() & ~(fitting & (numbers != numbers.take(first))).any(), first


def valid_in(given: Given, args: Sequence[Any], *, ignores: bool) -> Tensor:
    """Which labels have a class, and (`ignores`) are none of the whole numbers that the function is given."""
    flat = given.labels.detach().reshape(-1)
    valid = (flat >= 0) & (flat < given.num_classes)
    return valid & ~is_one_of(flat, args) if ignores else valid


def is_one_of(labels: Tensor, args: Sequence[Any]) -> Tensor:
    """Which labels equal a whole number among a function's arguments. A list of these is not sent to an accelerator:
    that would wait for it."""
    found = torch.zeros_like(labels, dtype=torch.bool)
    for arg in {arg for arg in args if type(arg) is int}:
        found |= labels == arg
    return found


def divisors(args: Sequence[Any], valid: Tensor) -> Iterator[tuple[str, float | Tensor]]:
    """What a sum of losses may be divided by, each under its name of OVER."""
    yield "nothing", 1.0
    yield "labels", valid.sum()
    yield "all", float(valid.numel())
    for arg in args:
        if isinstance(arg, Tensor) and arg.numel() == 1 and not arg.requires_grad and is_plain(arg):
            if arg.is_cpu:
                yield "number", float(arg)
            elif arg.device == valid.device:
                yield "number", arg.detach().reshape(())
        elif type(arg) in (int, float):
            yield "number", float(arg)


def _losses(given: Given, labels: Tensor) -> Iterator[Tensor]:
    """The cross-entropy of every label, in pieces, as float64."""
    dtype = torch.float64 if given.rows.dtype == torch.float64 else torch.float32
    index = torch.arange(labels.numel(), device=labels.device)
    for part in index.split(max(1, _limit(CHUNK, labels) // given.num_classes)):
        logits = given.logits(part, dtype)
        yield (logits.logsumexp(1) - logits.gather(1, labels[part, None]).squeeze(1)).double()


def _limit(limits: tuple[int, int], tensor: Tensor) -> int:
    """The limit where a tensor lies."""
    return limits[0] if tensor.is_cpu else limits[1]


def evenly(found: Tensor, most: int) -> Tensor:
    """At most so many (2 or more) elements of a row of numbers, evenly spread, the first and the last among them."""
    if len(found) <= most:
        return found
    return found[torch.arange(most, device=found.device) * (len(found) - 1) // (most - 1)]


def _have_rows(rows: Tensor, labels: Tensor) -> bool:
    """Whether a tensor with a gradient has a row, of logits or features, for each label."""
    has_gradient = rows.requires_grad and rows.is_floating_point() and rows.dim() > 1 and rows.numel() > 0
    return has_gradient and rows.numel() == labels.numel() * rows.shape[-1] and is_plain(rows) and is_plain(labels)
