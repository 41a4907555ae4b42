"""Events some of whose numbers lie on an accelerator: they are written when the numbers have come to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcheck_dist.events import Event
from gradcheck_dist.probes.parameters.stand_ins import is_host, is_plain

Deferred = list[tuple[Callable[..., Event], dict[str, Tensor]]]
"""What makes each event out of its missing numbers, and these, 0-d tensors."""


def number(value: Tensor) -> float | Tensor:
    """A tensor of one element as float64: a float where it can be read at once, else on its device."""
    return float(value.item()) if type(value) is Tensor and is_host(value) else value.detach().double()


class Later(NamedTuple):
    """A field of an event that is made of several numbers, once they have come to the host."""

    numbers: list[Tensor]
    make: Callable[[list[float]], Any]


def made_of(values: Sequence[float | Tensor | None], make: Callable[[list[float | None]], Any]) -> Any:
    """What `make` makes of numbers, or a Later where some lie on an accelerator."""
    tensors = [value for value in values if isinstance(value, Tensor)]

    def of_host(numbers: list[float]) -> Any:
        come = iter(numbers)
        return make([next(come) if isinstance(value, Tensor) else value for value in values])

    return Later(tensors, of_host) if tensors else of_host([])


def with_later(kind: Callable[..., Event], fields: dict[str, Any]) -> Callable[..., Event]:
    """`kind`, that takes the numbers of fields that are made later; these are put among the fields in their place."""
    later = {name: value for name, value in fields.items() if isinstance(value, Later)}
    if not later:
        return kind
    for name, value in later.items():
        del fields[name]
        fields |= {f"{name} {place}": number for place, number in enumerate(value.numbers)}

    def make(**come: Any) -> Event:
        for name, value in later.items():
            come[name] = value.make([come.pop(f"{name} {place}") for place in range(len(value.numbers))])
        return kind(**come)

    return make


def stacked(values: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape that may lie on several devices, on one of them, an accelerator's if there is any. Nobody
    waits."""
    devices = {value.device for value in values}
    if len(devices) > 1:
        device = next((value.device for value in values if not is_host(value)), values[0].device)
        values = [value.to(device, non_blocking=True) for value in values]
    return torch.stack(tuple(values))


def own_number(value: Tensor) -> Tensor:
    """A tensor of one element that can be copied to the host later; of a DTensor, this rank's, as `.item()` gives it.

    Raises:
        TypeError: it has no value of its own: a tracer's.
    """
    local: Tensor = getattr(value, "_local_tensor", value)
    if not is_plain(local):
        raise TypeError(f"a {type(value).__name__} on an accelerator has no number that could be read later")
    return local.detach()


def missing(deferred: Deferred) -> list[Tensor]:
    """All missing numbers, in order."""
    return [value for _, tensors in deferred for value in tensors.values()]


def numbers_of(deferred: Deferred) -> list[Tensor]:
    """All missing numbers as 64 bits, in order, to be brought to the host together."""
    return [_as_int64(value) for value in missing(deferred)]


def read(deferred: Deferred, host: Tensor) -> Iterator[Event]:
    """Events whose numbers have come to the host."""
    numbers = iter(host)
    for make, tensors in deferred:
        yield make(**{name: _from_int64(next(numbers), tensor.dtype) for name, tensor in tensors.items()})


def _as_int64(value: Tensor) -> Tensor:
    """A number as 64 bits, so that numbers of all types travel in one copy."""
    value = value.reshape(())
    return value.double().view(torch.int64) if value.is_floating_point() else value.to(torch.int64)


def _from_int64(bits: Tensor, dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return bits.view(torch.float64).item()
    return bool(bits) if dtype is torch.bool else int(bits)
