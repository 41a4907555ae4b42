"""Attention to a sequence that ranks hold in parts, as one torch.autograd.Function (ring attention, arXiv 2310.01889).

It is no linear map, so its backward cannot be held against a transpose; but it is linear in the values, and its scores
are products of queries and keys. By Euler's theorem on homogeneous functions the gradients G of a loss then satisfy

    sum over ranks of <G_output, output> = the same of <G_values, values>
    sum over ranks of <G_queries, queries> = the same of <G_keys, keys>

whatever masks, biases, dropout or positions it has, and for one sequence of the batch, or one head, alone. Here each
rank records its own products; the sums are made when a run is judged (`ledger/attention.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcheck_dist.events import AttentionBackward, Site
from gradcheck_dist.probes.recording.recorder import Recorder, guarded, kept_away
from gradcheck_dist.probes.recording.sites import caller_site, defined_at

MAX_ALIKE = 4
"""Applications of one function that are recorded in a step."""
MAX_HELD_BYTES = 64 << 20
"""Of inputs and outputs that are kept until backward comes."""
MUCH_LONGER = 4
"""From so many times the heads on, the longer of two dimensions is the sequence."""

Part = Callable[[Tensor], Tensor]


class Told(NamedTuple):
    function: str
    group: tuple[int, ...]
    number: int
    defined_at: Site | None
    site: Site | None
    dtype: str


class Held(NamedTuple):
    """Output, values, queries and keys, or a part of each, as they were behind forward, and the versions they had."""

    tensors: tuple[Tensor, ...]
    part: Part
    versions: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self.tensors)

    @property
    def unchanged(self) -> bool:
        return self.versions == tuple(one._version for one in self.tensors)

    def along(self, index: int, gradient: Tensor | None) -> tuple[Tensor, Tensor]:
        """The product of one of the tensors with its gradient, and that of their norms; float32, no dimension."""
        mine = self.tensors[index].float().flatten()
        theirs = torch.zeros_like(mine) if gradient is None else self.part(gradient.detach()).float().flatten()
        return mine.dot(theirs), mine.norm() * theirs.norm()


class Attentions:
    """How many were recorded of a step, and what waits for its backward."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._step = -1
        self._num: Counter[tuple[tuple[int, ...], str]] = Counter()
        self.held_bytes = 0

    def number(self, group: tuple[int, ...], function: str) -> int | None:
        """The next number of a function in a group; None where as many were recorded as shall be."""
        step = self._recorder.upcoming_step
        if step != self._step:
            self._step = step
            self._num.clear()
            self.held_bytes = 0  # what no backward came for is gone
        self._num[group, function] += 1
        return self._num[group, function] - 1 if self._num[group, function] <= MAX_ALIKE else None


def is_attention(given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether shapes are those of queries, keys and values, and of what attention makes of them."""
    if len(given) != 3 or not made:
        return False
    queries, keys, values = (tuple(one.shape) for one in given)
    same = len(queries) == len(keys) == len(values) >= 3 and keys[:-1] == values[:-1] and queries[-1] == keys[-1]
    return same and tuple(made[0].shape) == (*queries[:-1], values[-1]) and all(map(torch.is_floating_point, given))


def hold(attentions: Attentions, given: Sequence[Tensor], output: Tensor) -> Held | None:
    """What is kept for backward: all, the first sequence or the first head; None where these are too large."""
    queries, keys, values = given
    tensors = (output, values, queries, keys)
    for part in _parts(queries, keys):
        num_bytes = sum(one.numel() * one.element_size() for one in map(part, tensors))
        if attentions.held_bytes + num_bytes > MAX_HELD_BYTES:
            continue
        kept = tuple(part(one.detach()) for one in tensors)
        kept = tuple(one if one.numel() == of.numel() else one.clone() for one, of in zip(kept, tensors, strict=True))
        attentions.held_bytes += num_bytes
        return Held(kept, part, tuple(one._version for one in kept))
    return None


def _parts(queries: Tensor, keys: Tensor) -> list[Part]:
    """Parts of (batch, ..., width) tensors that attend to nothing else, largest first."""
    found: list[Part] = [lambda one: one]
    if queries.dim() == 4:
        found.append(lambda one: one[:1])
        heads, length = sorted((1, 2), key=lambda dim: queries.shape[dim])
        if queries.shape[heads] == keys.shape[heads] and queries.shape[length] >= MUCH_LONGER * queries.shape[heads]:
            found.append(lambda one: one[:1].narrow(heads, 0, 1))
    return found


def watch(
    recorder: Recorder,
    attentions: Attentions,
    cls: type,
    group: tuple[int, ...],
    given: Sequence[tuple[int, Tensor]],
    output: Tensor,
    dtype: str,
) -> None:
    """A function was applied on all ranks of a group: `given` are queries, keys and values, each with its place among
    the inputs of the function's node."""
    number = attentions.number(group, cls.__name__)
    held = hold(attentions, [one for _, one in given], output) if number is not None else None
    if number is None or held is None:
        return
    told = Told(cls.__name__, group, number, defined_at(getattr(cls, "backward", None)), caller_site(), dtype)
    places = [place for place, _ in given]
    node: Any = output.grad_fn
    of_output = output.output_nr

    found: list[tuple[Tensor, Tensor]] = []

    def arrives(grads: Sequence[Tensor | None]) -> None:  # before backward, which may write into it
        arriving.remove()
        found.append(held.along(0, grads[of_output]))

    def passed(grads: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> None:
        leaving.remove()
        queries, keys, values = (grads[place] if place < len(grads) else None for place in places)
        came(recorder, attentions, told, held, found, [values, queries, keys])

    arriving = node.register_prehook(kept_away(recorder, "exchanges", arrives))
    leaving = node.register_hook(kept_away(recorder, "exchanges", passed))


@guarded("exchanges")
def came(
    recorder: Recorder,
    attentions: Attentions,
    told: Told,
    held: Held,
    found: Sequence[tuple[Tensor, Tensor]],
    gradients: Sequence[Tensor | None],
) -> None:
    """Backward ran through a function, at whose output there was `found`."""
    attentions.held_bytes -= held.num_bytes
    current = recorder.current
    if current is None or not recorder.sampling or not found or not held.unchanged:
        return
    pairs = [*found, *(held.along(index, gradient) for index, gradient in enumerate(gradients, 1))]
    products, sizes = [product for product, _ in pairs], [size for _, size in pairs]
    recorder.emit_values(
        AttentionBackward,
        torch.stack([*products, *sizes]),
        current.microbatch,
        counts=tuple(tensor.numel() for tensor in held.tensors),
        function=told.function,
        group=told.group,
        index=told.number,
        defined_at=told.defined_at,
        site=told.site,
        dtype=told.dtype,
    )
