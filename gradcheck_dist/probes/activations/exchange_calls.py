"""What a function calls while it is applied: collectives, and what sends to single ranks."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from gradcheck_dist.probes.activations.exchange_layout import WHOLE, take
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.reductions.collectives import op_name
from gradcheck_dist.probes.reductions.copies import ranks_of
from gradcheck_dist.probes.reductions.gathered import Reduction

COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_to_all", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "reduce", "broadcast"),
)
REDUCING = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
DIRECT = ("all_reduce", "all_gather")
"""Watched where they are called on a tensor of the graph, too."""
BY_RANK = ("send", "recv", "recv_anysource")
"""Methods of ProcessGroup that send to single ranks. isend and irecv stay as they are: P2POp asks for torch's own."""


class Call(NamedTuple):
    """A collective. `splits`: of an all-to-all, the lengths of the output's and of the input's parts. `tensor`: what an
    all-reduce or an all-gather was given, `parts` the list that this fills. `given`: where what it was given lies,
    and of how many elements it is."""

    name: str
    ranks: tuple[int, ...]
    splits: tuple[list[int], list[int]] | None
    tensor: Tensor | None = None
    parts: list[Any] | None = None
    reduction: Reduction | None = None
    given: tuple[int, int] | None = None


class Calls(list[Call]):
    """The collectives of one application of a function; `sent` are the groups in which it sent to single ranks.
    `reduced`: some elements of what it all-reduced as they were before, by address and number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: set[tuple[int, ...]] = set()
        self.reduced: dict[tuple[int, int], Tensor] = {}

    def add(self, call: Call) -> None:
        """A collective is about to be called. An all-reduce changes what it is given, which may be the function's
        input."""
        self.append(call._replace(tensor=None, parts=None, reduction=None))
        tensor = call.tensor
        if call.name == "all_reduce" and tensor is not None and tensor.is_floating_point() and is_plain(tensor):
            self.reduced.setdefault(_place(tensor), take([tensor], [WHOLE])[0])

    def join(self, others: Calls) -> None:
        """What a function inside of this one did."""
        self.extend(others)
        self.sent |= others.sent
        self.reduced = others.reduced | self.reduced

    def as_given(self, tensor: Tensor, values: Tensor) -> Tensor:
        """Elements of an input as they were before it was changed in place; `values` where it was not."""
        return self.reduced.get(_place(tensor), values)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def call_of(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    given = signature.bind(*args, **kwargs).arguments
    splits = None
    if name.startswith("all_to_all"):
        splits = (list(given.get("output_split_sizes") or ()), list(given.get("input_split_sizes") or ()))
    tensor, parts = (given.get(key) if name in DIRECT else None for key in ("tensor", "tensor_list"))
    ranks = tuple(ranks_of(given.get("group")))
    made = given.get("output", given.get("tensor")) if name in REDUCING else None
    op = op_name(given.get("op", dist.ReduceOp.SUM))
    reduction = Reduction(op, ranks, made) if isinstance(made, Tensor) else None
    names = ("tensor", "input_tensor", "input", "self")
    lies = next((one for key in names if isinstance(one := given.get(key), Tensor)), None)
    place = _place(lies) if lies is not None and is_plain(lies) else None
    return Call(name, ranks, splits, tensor, parts, reduction, place)


def may_move_leaves(calls: Sequence[Call], args: Sequence[Any]) -> bool:
    """Whether a function may have sent a parameter to other ranks: a collective was given one, or a copy of its size
    that is none of the function's other inputs, as the activations are that a linear layer gathers."""
    plain = [arg for arg in args if isinstance(arg, Tensor) and is_plain(arg)]
    leaves = {_place(arg) for arg in plain if arg.is_leaf and arg.requires_grad}
    sizes = {size for _, size in leaves} - {arg.numel() for arg in plain if not (arg.is_leaf and arg.requires_grad)}
    return any(call.given in leaves or call.given[1] in sizes for call in calls if call.given is not None)
