"""What is told of an exchange of activations once its gradient has come back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from gradcheck_dist.events import Exchange, Site
from gradcheck_dist.probes.activations.exchange_layout import WHOLE, Box, num_of_each, take
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.recorder import Recorder, guarded, kept_away


class Watched(NamedTuple):
    """An exchange that was seen in forward: the fields of its Exchange, `number` being the index."""

    function: str
    group: tuple[int, ...]
    number: int
    input_counts: tuple[int, ...]
    output_counts: tuple[int, ...]
    collectives: tuple[str, ...]
    defined_at: Site | None
    site: Site | None
    dtype: str
    params: int | None = None
    put_back: bool = False
    stopped: bool = False
    operation: str = ""


Arriving = tuple[Watched, Tensor, Sequence[Box]]
"""What is told, elements of the input, and the parts of the result of whose gradient elements are wanted, if any."""


def watch_tensor(recorder: Recorder, tensor: Tensor, told: Watched, before: Tensor, after: Tensor) -> None:
    """Tell what arrives at a tensor that a collective changed in place, and that goes on as it is."""

    def arrived(grad: Tensor | None) -> None:
        handle.remove()
        if grad is not None and is_plain(grad):
            values = take([grad], [WHOLE])[0]
            tell(recorder, told, before, after, values[: len(after)], values, lost=False)

    handle = tensor.register_hook(unserializable_hook(kept_away(recorder, "exchanges", arrived)))


def watch_arriving(recorder: Recorder, result: Tensor, told: Watched, before: Tensor, parts: Sequence[Box]) -> None:
    """Tell what arrives at a function's result, of whose output and of what backward gives nothing is read."""

    def passed(_: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
        handle.remove()
        grad, none = grad_outputs[0], before[:0]
        if grad is not None and (is_plain(grad) or not parts):
            arrived, counts = take([grad], parts) if parts else (none, ())
            tell(recorder, told._replace(output_counts=counts), before, none, arrived, none, lost=False)

    node: Any = result.grad_fn
    handle = node.register_hook(kept_away(recorder, "exchanges", passed))


@guarded("exchanges")
def came(
    recorder: Recorder,
    told: Watched,
    before: Tensor,
    after: Tensor,
    parts: tuple[list[Box], list[Box]],
    like: tuple[list[tuple[int, ...]], list[tuple[int, ...]]],
    grad_inputs: Sequence[Tensor | None],
    grad_outputs: Sequence[Tensor | None],
) -> None:
    """Backward ran through a function."""
    one = next((grad for grad in grad_outputs if grad is not None), None)
    if one is None or not all(grad is None or is_plain(grad) for grad in [*grad_inputs, *grad_outputs]):
        return
    given, arrived = (
        [one.new_zeros(()).expand(shape) if grad is None else grad for grad, shape in zip(grads, shapes, strict=True)]
        for grads, shapes in ((grad_inputs, like[0]), (grad_outputs, like[1]))
    )
    lost = all(grad is None for grad in grad_inputs)
    num = num_of_each(parts)
    values = [take(grads, boxes_of, num)[0] for grads, boxes_of in ((arrived, parts[1]), (given, parts[0]))]
    tell(recorder, told, before, after, values[0], values[1], lost=lost)


def tell(
    recorder: Recorder,
    told: Watched,
    before: Tensor,
    after: Tensor,
    arrived: Tensor,
    given: Tensor,
    *,
    lost: bool,
) -> None:
    """Emit the event. Elements are float32, of shape (sum of counts,), on the device where they lie; `lost`: nothing
    came back."""
    current = recorder.current
    if current is None or not recorder.sampling:
        return
    event: Callable[..., Exchange] = functools.partial(
        Exchange,
        seq=recorder.next_seq(),
        step=recorder.step,
        accumulation_step=recorder.accumulation_step,
        microbatch=current.microbatch,
        lost=lost,
        index=told.number,
        **{name: value for name, value in told._asdict().items() if name != "number"},
    )
    recorder.emit_values(event, torch.cat([before, after, arrived, given]))


def coarsest(tensors: Sequence[Tensor]) -> str:
    """The type that rounds most, which gradients are of, too."""
    return str(max((one.dtype for one in tensors), key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.")
