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
MAX_PRODUCTS = {"cpu": 1 << 27}
"""Products that logits of these rows take, by the kind of device."""
ELSEWHERE = 1 << 33
MIN_ROWS, MAX_LOGITS = 2, 1 << 18
"""Of a large vocabulary fewer labels are looked at: what is kept of them stays until their backward pass."""
MAX_TOTAL = 1 << 31
"""Products, or logits, of all labels."""
CHUNK = 1 << 20
"""Logits that are computed at a time, and elements of a weight that are converted at a time."""
FITS = {torch.float32: 2e-5, torch.float64: 2e-5}
"""Relative difference within which a sum of losses is what was computed here; of other types ROUNDED."""
ROUNDED = 4e-3


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
        return self.weight.detach().split(max(1, CHUNK // self.weight.shape[1]))


@dataclass(frozen=True)
class Looked:
    """Some labels of an application: `index` into all of them, flattened, `labels` (n,) and `logits` (n, classes)."""

    given: Given
    index: Tensor
    labels: Tensor
    logits: Tensor


def row(tensor: Tensor, index: Tensor) -> Tensor:
    """Rows of a tensor (..., features), which need not lie side by side in memory."""
    return tensor.detach()[torch.unravel_index(index, tensor.shape[:-1])]


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
    if size > MAX_PRODUCTS.get(given.rows.device.type, ELSEWHERE):
        return None
    flat = given.labels.detach().reshape(-1)
    order = torch.argsort((flat < 0).to(torch.int8), stable=True)
    count = min(NUM_ROWS, max(MIN_ROWS, MAX_LOGITS // given.num_classes), flat.numel())
    spread = torch.arange(count, device=flat.device) * (flat >= 0).sum().clamp_min(count) // count
    index = order[spread]
    return Looked(given, index, flat[index], given.logits(index, torch.float64))


class Sum(NamedTuple):
    """One result for all labels: the sum of their cross-entropies times `share`, where `valid` (n,) is true. `over`
    tells what the sum is divided by: "nothing", "labels" (that are valid), "all" (labels), "number" (an argument);
    `ignores`: labels that equal an argument are not valid."""

    share: float
    valid: Tensor
    over: str
    ignores: bool


def sum_of(looked: Looked, output: Tensor, args: Sequence[Any]) -> Sum | None:
    """What a function's one result is; None where it is no sum of cross-entropies over a number that is known, where
    there are too many labels to tell, or where the logits were written over. Result and labels lie on the CPU."""
    given, flat = looked.given, looked.given.labels.detach().reshape(-1)
    size = flat.numel() * given.num_classes * (given.rows.shape[-1] if given.weight is not None else 1)
    if not (output.is_cpu and flat.is_cpu) or size > MAX_TOTAL:
        return None
    losses = torch.cat(list(_losses(given, flat.clamp(0, given.num_classes - 1))))
    fits = FITS.get(given.rows.dtype, ROUNDED)
    label = looked.labels.clamp(0, given.num_classes - 1)[:, None]
    before = looked.logits.logsumexp(1) - looked.logits.gather(1, label).squeeze(1)
    if not torch.allclose(losses[looked.index], before, rtol=fits, atol=fits):
        return None
    for ignores in (True, False):
        valid = valid_in(given, args, ignores=ignores)
        total, found = float(losses[valid].sum()), dict[float, str]()
        for over, number in divisors(args, valid):
            if total and number and abs(abs(output.item()) * number / total - 1) <= fits:
                found.setdefault(number, over)
        if len(found) == 1:
            ((number, over),) = found.items()
            return Sum(1 / number, valid, over, ignores)
        if not valid.any():
            return Sum(1.0, valid, "nothing", ignores)
    return None


def valid_in(given: Given, args: Sequence[Any], *, ignores: bool) -> Tensor:
    """Which labels have a class, and (`ignores`) are none of the whole numbers that the function is given."""
    flat = given.labels.detach().reshape(-1)
    valid = (flat >= 0) & (flat < given.num_classes)
    whole = [arg for arg in args if type(arg) is int] if ignores else []
    return valid & ~torch.isin(flat, torch.tensor(whole, dtype=flat.dtype, device=flat.device)) if whole else valid


def divisors(args: Sequence[Any], valid: Tensor) -> Iterator[tuple[str, float]]:
    """What a sum of losses may be divided by, with its name."""
    yield "nothing", 1.0
    yield "labels", float(valid.sum())
    yield "all", float(valid.numel())
    for arg in args:
        is_number = isinstance(arg, Tensor) and arg.numel() == 1 and arg.is_cpu and not arg.requires_grad
        if (is_number or type(arg) in (int, float)) and float(arg) > 0:
            yield "number", float(arg)


def _losses(given: Given, labels: Tensor) -> Iterator[Tensor]:
    """The cross-entropy of every label, in pieces, as float64."""
    dtype = torch.float64 if given.rows.dtype == torch.float64 else torch.float32
    index = torch.arange(labels.numel(), device=labels.device)
    for part in index.split(max(1, CHUNK // given.num_classes)):
        logits = given.logits(part, dtype)
        yield (logits.logsumexp(1) - logits.gather(1, labels[part, None]).squeeze(1)).double()


def evenly(found: Tensor, most: int) -> Tensor:
    """At most so many (2 or more) elements of a row of numbers, evenly spread, the first and the last among them."""
    if len(found) <= most:
        return found
    return found[torch.arange(most, device=found.device) * (len(found) - 1) // (most - 1)]


def _have_rows(rows: Tensor, labels: Tensor) -> bool:
    """Whether a tensor with a gradient has a row, of logits or features, for each label."""
    has_gradient = rows.requires_grad and rows.is_floating_point() and rows.dim() > 1 and rows.numel() > 0
    return has_gradient and rows.numel() == labels.numel() * rows.shape[-1] and is_plain(rows) and is_plain(labels)
