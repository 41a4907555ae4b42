"""What is told of an exchange of activations once its gradient has come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from gradcheck_dist.events import Exchange, Site
from gradcheck_dist.probes.activations.exchange_layout import WHOLE, Box, num_of_each, take
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.recorder import Recorder, kept_away


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
    of_leaf: bool = False
    shifted: int | None = None


Arriving = tuple[Watched, Tensor, Sequence[Box]]
"""What is told, elements of the input, and the parts of the result of whose gradient elements are wanted, if any."""


def param_set(recorder: Recorder, leaves: Sequence[Tensor]) -> int | None:
    """Those of the leaves that are parameters, as events name a set of them; None for none."""
    infos = [info for info in map(recorder.registry.find, leaves) if info is not None]
    return recorder.registry.param_set(infos) if infos else None


def watch_tensor(recorder: Recorder, tensor: Tensor, told: Watched, before: Tensor, after: Tensor) -> None:
    """Tell what arrives at a tensor that a collective changed in place, and that goes on as it is."""

    def arrived(grad: Tensor | None) -> None:
        handle.remove()
        if grad is not None and is_plain(grad):
            values = take([grad], [WHOLE])[0]
            tell(recorder, told, before, after, values[: len(after)], values, lost=False)

    handle = tensor.register_hook(unserializable_hook(kept_away(recorder, "exchanges", arrived)))


def watch_own_part(recorder: Recorder, node: Any, output: int, told: Watched, before: Tensor) -> None:
    """The same of a tensor that is known by the node that made it, and that nothing changed."""

    def arrives(grads: Sequence[Tensor | None]) -> None:
        handle.remove()
        grad = grads[output] if output < len(grads) else None
        if grad is not None and is_plain(grad):
            tell(recorder, told, before, before[:0], before[:0], take([grad], [WHOLE])[0], lost=False)

    handle = node.register_prehook(unserializable_hook(kept_away(recorder, "exchanges", arrives)))


def watch_arriving(recorder: Recorder, result: Tensor, told: Watched, before: Tensor, parts: Sequence[Box]) -> None:
    """Tell what arrives at a function's result, of whose output and of what backward gives nothing is read."""

    def arrives(grads: Sequence[Tensor | None]) -> None:
        handle.remove()
        grad, none = grads[0], before[:0]
        if grad is not None and (is_plain(grad) or not parts):
            arrived, counts = take([grad], parts) if parts else (none, ())
            tell(recorder, told._replace(output_counts=counts), before, none, arrived, none, lost=False)

    node: Any = result.grad_fn
    handle = node.register_prehook(kept_away(recorder, "exchanges", arrives))


class End(NamedTuple):
    """The tensors that are read at one end of a function: their places among its node's inputs or outputs, shapes, and
    the parts that are read."""

    places: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    parts: list[Box]

    def read(self, grads: Sequence[Tensor | None], num: int | None) -> Tensor | None:
        """Elements of the gradients, zeros for missing ones; None where none is there or they cannot be read."""
        found = [grads[place] if place < len(grads) else None for place in self.places]
        one = next((grad for grad in found if grad is not None), None)
        if one is None or not all(grad is None or is_plain(grad) for grad in found):
            return None
        zero = one.new_zeros(())
        whole = [zero.expand(shape) if grad is None else grad for grad, shape in zip(found, self.shapes, strict=True)]
        return take(whole, self.parts, num)[0]


def watch_node(
    recorder: Recorder,
    node: Any,
    told_of: Callable[[], Watched],
    before: Tensor,
    after: Tensor,
    ends: tuple[End, End],
) -> None:
    """Tell what arrives at a function's outputs and what its backward gives for its inputs (`ends`: inputs, outputs).

    What arrives is read before backward runs: it may sum that over the ranks in place. `told_of` is asked behind it,
    when it has shown with whom it communicates.
    """
    inputs, outputs = ends
    num = num_of_each((inputs.parts, outputs.parts))
    found: list[Tensor] = []

    def arrives(grads: Sequence[Tensor | None]) -> None:
        arriving.remove()
        if (arrived := outputs.read(grads, num)) is not None:
            found.append(arrived)

    def passed(grads: Sequence[Tensor | None], _: Sequence[Tensor | None]) -> None:
        leaving.remove()
        told = told_of()
        lost = all(grads[place] is None for place in inputs.places if place < len(grads))
        given = found[0].new_zeros(sum(told.input_counts)) if found and lost else inputs.read(grads, num)
        if found and given is not None:
            tell(recorder, told, before, after, found[0], given, lost=lost)

    arriving = node.register_prehook(kept_away(recorder, "exchanges", arrives))
    leaving = node.register_hook(kept_away(recorder, "exchanges", passed))


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
    recorder.emit_values(
        Exchange,
        torch.cat([before, after, arrived, given]),
        current.microbatch,
        lost=lost,
        index=told.number,
        **{name: value for name, value in told._asdict().items() if name != "number"},
    )


def coarsest(tensors: Sequence[Tensor]) -> str:
    """The type that rounds most, which gradients are of, too."""
    return str(max((one.dtype for one in tensors), key=lambda dtype: torch.finfo(dtype).eps)).removeprefix("torch.")
