"""What the backward of a function with labels gives, beside the derivative of the cross-entropy that it computed.

A kernel of somebody's own that computes a cross-entropy (over shards of the vocabulary, from hidden states and the
output layer's weight at once, in chunks) brings a backward of its own, which nobody compares with its forward. Where
its losses are those in closed form, its derivative is softmax(z) - onehot(label). Where the vocabulary lies in shards,
the loss itself tells the logsumexp over all of them to the rank that holds the label.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.utils.hooks import unserializable_hook

from gradcheck_dist.events import LossBackward
from gradcheck_dist.probes.losses import head_backward
from gradcheck_dist.probes.losses.closed_form import Looked, coarsest, row
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.recorder import Recorder, guarded, kept_away
from gradcheck_dist.probes.recording.sites import caller_site, defined_at

MAX_ALIKE = 64
"""Applications of one function that are looked at in a step."""
MAX_HEADS = 8
"""Of these, how many are asked what they give for a weight: all elements of it."""
OTHERWISE = 0.2
"""Share of what hidden states get that is no multiple of what a rank's own shard gives them, from which it may be the
sum over all shards."""


class Functions:
    """Functions that were applied: how often in a step, and what the one result of each is the sum of, over what: a
    number of closed_form.CASES, -1 for no such sum. `scaled`: of which a number stood before each label's loss."""

    def __init__(self, recorder: Recorder) -> None:
        self.sums: dict[type, int] = {}
        self.scaled: set[type] = set()
        self._recorder = recorder
        self._step = -1
        self._seen: Counter[type] = Counter()

    def admit(self, cls: type) -> bool:
        """Whether this application's backward is looked at."""
        if self._step != self._recorder.upcoming_step:
            self._step = self._recorder.upcoming_step
            self._seen.clear()
        self._seen[cls] += 1
        return self._recorder.sampling and self._recorder.impulses is None and self._seen[cls] <= MAX_ALIKE

    def found(self, cls: type, case: Tensor) -> None:
        """Remember what one result was. An accelerator's answer comes later, perhaps after the step."""
        self._recorder.copies.bring(case, lambda host: self.sums.__setitem__(cls, int(host)))

    def multiplies(self, cls: type, number: Tensor) -> None:
        """Remember of which functions losses are multiplied; of an accelerator, when it has told."""
        self._recorder.copies.bring(number, lambda host: None if float(host) == 1 else self.scaled.add(cls))

    def asks_for_weight(self, cls: type) -> bool:
        """Whether this application, which was admitted, is asked for its weight's gradient, too."""
        return self._seen[cls] <= MAX_HEADS


@guarded("loss_backward")
def watch(
    recorder: Recorder,
    cls: type[Function],
    looked: Looked,
    output: Tensor,
    *,
    share: float | Tensor | None = None,
    number: float | Tensor = 1.0,
    group: Sequence[int] = (),
    head: bool = True,
) -> None:
    """A function gave `output`, `number` times the loss of each label, or their sum times `share`: hold its backward
    against the derivative when it comes. `group`: the ranks that hold the vocabulary in shards, in their order, none
    where this rank has all of it. `head`: and what it gives for the output layer's weight, if it is given that."""
    classes = looked.logits.shape[1]
    shard = group.index(dist.get_rank()) if group else None
    with torch.no_grad():
        labels = looked.labels - (shard or 0) * classes
        label = labels.clamp(0, classes - 1)[:, None]
        wanted, own = looked.logits.gather(1, label).squeeze(1), looked.logits.logsumexp(1)
        found = output.detach().reshape(-1).double() / number
        sign = torch.where((found > 0).any(), 1.0, -1.0)
        loss = sign * found[looked.index] if share is None else own - wanted
        held = (labels >= 0) & (labels < classes) & (loss != 0)
        normaliser = own if shard is None else loss + wanted
        gap = (normaliser - wanted - loss).abs() if shard is None else (own - normaliser).clamp_min(0)
        # Of a label in another shard the derivative is known but for its size.
        elsewhere = (looked.labels >= 0) & (loss != 0) & (shard is not None)
        derivative = (looked.logits - torch.where(held, normaliser, own)[:, None]).exp()
        derivative.scatter_add_(1, label, -held.to(derivative.dtype)[:, None])
        derivative = looked.given.gradient(derivative) * (number if share is None else share)
        gap = torch.where(held, gap / (1 + loss.abs()), torch.where(elsewhere, -1.0, torch.nan))
        told_later = number if share is None else share
        no_sum = told_later.isnan() if isinstance(told_later, Tensor) else torch.zeros_like(held).any()
        gap = torch.where(no_sum, torch.nan, gap)
        power = (wanted - looked.logits.mean(1)).abs() / (1 + loss.abs())
        told = [gap, power]
        if group:
            told += [own, torch.where(held, normaliser, torch.nan), looked.labels]
    event = functools.partial(
        LossBackward,
        function=cls.__name__,
        defined_at=defined_at(getattr(cls, "backward", None)),
        site=caller_site(),
        group=tuple(group),
    )
    node: Any = output.grad_fn
    dtype = coarsest(output.dtype, looked.dtype)
    at_output, place, shape, index = output.output_nr, looked.given.place, looked.given.rows.shape, looked.index
    of_head = head_backward.held(recorder, cls, looked) if head and not group else None
    of_hidden = bool(group) and looked.given.weight is not None

    reached: list[tuple[Tensor, Tensor]] = []

    def arrives(grads: Sequence[Tensor | None]) -> None:  # before backward, which may write into it
        arriving.remove()
        others = [grad.detach().any() for at, grad in enumerate(grads) if at != at_output and grad is not None]
        if (arrived := grads[at_output]) is not None:
            weights = sign * arrived.detach().reshape(-1).double()
            weights = weights[index] if share is None else weights.expand(len(index))
            # What the function gave beside the losses has a part in the gradient then.
            reached.append((weights, torch.where(torch.stack(others).any(), torch.inf, gap) if others else gap))

    def passed(grads: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> None:
        leaving.remove()
        given = grads[place] if place < len(grads) else None
        if given is not None and reached and given.shape == shape and is_plain(given):
            weights, alone = reached[0]
            may_sum = of_hidden and recorder.exchanges is not None and recorder.exchanges.communicates(cls)
            came(recorder, event, dtype, weights, row(given, index), derivative, [alone, *told[1:]], may_sum)
            if of_head is not None:
                nothing = alone.isinf().any() | no_sum
                of_head(grads, torch.where(nothing, torch.nan, weights.sum() / weights.count_nonzero()))

    arriving = node.register_prehook(unserializable_hook(kept_away(recorder, "loss_backward", arrives)))
    leaving = node.register_hook(unserializable_hook(kept_away(recorder, "loss_backward", passed)))


@guarded("loss_backward")
def came(
    recorder: Recorder,
    event: Any,
    dtype: torch.dtype,
    arrived: Tensor,
    got: Tensor,
    derivative: Tensor,
    told: Sequence[Tensor],
    may_sum: bool = False,
) -> None:
    """Backward ran through the function; `told` is what forward showed of each label. `may_sum`: it communicated,
    and may have summed what the ranks' shards of the output layer give its hidden states: no rank knows that alone."""
    current = recorder.current
    if current is None or not recorder.sampling:
        return
    rounded = coarsest(dtype, got.dtype)
    got = got.double()
    weight = (got * derivative).sum(1) / (derivative * derivative).sum(1)
    size = got.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    rest = ((got - weight[:, None] * derivative).square().sum(1) / size).sqrt()
    gap = torch.where(rest > OTHERWISE, torch.nan, told[0]) if may_sum else told[0]
    values = torch.stack([arrived, weight, rest, gap, *told[1:]], 1).float()
    recorder.emit_values(event, values, current.microbatch, dtype=str(rounded).removeprefix("torch."))
