"""torch's functional collectives on activations, of which forward and backward are known by their documentation.

Since torch 2.13 all of them have a gradient, the transpose of forward for ranks that go on with the result differently:
`all_reduce` sums in backward too, and `all_gather_single` reduce-scatters. Where all ranks compute one loss, that is a
sum too many. What they give is still on its way when they return, so nothing of it is read: some elements of what went
in and of the gradient that arrived tell what has to be known. (torch/distributed/_functional_collectives.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradcheck_dist.probes.activations.exchange_layout import WHOLE, Box, equal_parts, take
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.reductions.copies import ranks_of

if TYPE_CHECKING:
    from gradcheck_dist.probes.activations.exchanges import Exchanges

_GENERATED = "GeneratedBackwardFor__c10d_functional_"
_OPERATIONS = {
    "all_reduce_default": "sum",
    "all_gather_into_tensor_default": "gather",
    "reduce_scatter_tensor_default": "reduce-scatter",
}


def operation_of(cls: type) -> str | None:
    """Which documented operation a function is; None for any other function."""
    name = cls.__name__
    if not name.startswith(_GENERATED):
        return None
    return _OPERATIONS.get(name.removeprefix(_GENERATED).removeprefix("autograd_"))


def parts_of(operation: str, given: Tensor, size: int) -> tuple[list[Box], list[Box]] | None:
    """The parts of the input and of the output, in a group of `size` ranks; they lie along dimension 0."""
    if operation == "sum":
        return [WHOLE], [WHOLE]
    if not given.dim() or not given.numel():
        return None
    length = given.shape[0]
    if operation == "gather":
        return [WHOLE], equal_parts(0, length * size, size)
    return (equal_parts(0, length, size), [WHOLE]) if length % size == 0 else None


def group_of(args: Sequence[Any]) -> tuple[int, ...]:
    """The ranks of the group that is named last among the arguments."""
    name: Any = [arg for arg in args if isinstance(arg, str)][-1]
    return tuple(ranks_of(torch._C._distributed_c10d._resolve_process_group(name)))


def watched(exchanges: Exchanges, cls: type, operation: str, args: Sequence[Any], result: Any) -> Any:
    """(ranks, number, elements of the input, how many of each part, the output's parts, name) of an application that is
    to be recorded, else None."""
    given = args[0]
    if not isinstance(given, Tensor) or not given.requires_grad or given.is_leaf or not is_plain(given):
        return None
    if not isinstance(result, Tensor) or result.grad_fn is None or not given.is_floating_point():
        return None
    ranks = group_of(args)
    parts = parts_of(operation, given, len(ranks))
    if parts is None or len(ranks) < 2:
        return None
    index = exchanges.number(ranks, cls)
    if index is None:
        return None
    before, counts = take([given], parts[0])
    name = cls.__name__.removeprefix(_GENERATED).removeprefix("autograd_").removesuffix("_default")
    return ranks, index, before, counts, parts[1], name
