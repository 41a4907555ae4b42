"""torch's functional collectives on activations, of which forward and backward are known by their documentation.

Since torch 2.13 all of them have a gradient, the transpose of forward for ranks that go on with the result differently:
`all_reduce` sums in backward too, and `all_gather_single` reduce-scatters. Where all ranks compute one loss, that is a
sum too many; `all_to_all_single` exchanges back, and what counts is whether ranks sent the same. What they give is
still on its way when they return, so nothing of it is read: some elements of what went in and of the gradient that
arrived tell what has to be known. (torch/distributed/_functional_collectives.py)

Inside of a torch.autograd.Function they are collectives like any others, and that function's backward is its author's.
Where such a function gives what is still on its way, its forward is what the documentation says.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives

from gradcheck_dist.probes.activations.exchange_calls import Call, call_of
from gradcheck_dist.probes.activations.exchange_events import Arriving, Watched, coarsest
from gradcheck_dist.probes.activations.exchange_layout import WHOLE, Box, equal_parts, rows, take
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.sites import caller_site
from gradcheck_dist.probes.reductions.collectives import op_name
from gradcheck_dist.probes.reductions.copies import ranks_of
from gradcheck_dist.probes.reductions.gathered import Reduction

if TYPE_CHECKING:
    from gradcheck_dist.probes.activations.exchanges import Exchanges

_GENERATED = "GeneratedBackwardFor__c10d_functional_"
_OPERATIONS = {
    "all_reduce_default": "sum",
    "all_gather_into_tensor_default": "gather",
    "reduce_scatter_tensor_default": "reduce-scatter",
    "all_to_all_single_default": "all-to-all",
}
"""By how torch calls the function."""
_Waiting = getattr(_functional_collectives, "AsyncCollectiveTensor", ())
_COLLECTIVES = ("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast")
"""What all others of torch's functional collectives call."""


def install(patches: Patches, notes: Callable[[], bool], note: Callable[[Callable[[], Call]], None]) -> None:
    """Have functional collectives noted. `notes`: whether that is wanted now; `note` is given what makes the call."""

    def watched(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(original)

            @functools.wraps(original)
            def collective(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                if not torch.compiler.is_compiling() and notes():
                    note(functools.partial(_call_of, name, signature, args, kwargs, result))
                return result

            return collective

        return make

    for name in _COLLECTIVES:
        if hasattr(_functional_collectives, name):
            patches.replace(_functional_collectives, name, watched(name))


def on_its_way(tensor: Tensor) -> bool:
    """Whether a tensor is what a functional collective gives, which nobody has waited for."""
    return isinstance(tensor, _Waiting)


def _call_of(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Call:
    call = call_of(name, signature, args, kwargs)
    op = signature.bind(*args, **kwargs).arguments.get("reduceOp")
    if op is None or not isinstance(result, Tensor) or not is_plain(result):
        return call  # it combines nothing, or is still on its way
    return call._replace(reduction=Reduction(op_name(getattr(dist.ReduceOp, op.upper())), call.ranks, result))


def known(cls: type) -> tuple[str, str] | None:
    """Which documented operation a function is, and torch's name of it; None for any other function."""
    if not cls.__name__.startswith(_GENERATED):
        return None
    name = cls.__name__.removeprefix(_GENERATED).removeprefix("autograd_")
    operation = _OPERATIONS.get(name)
    return None if operation is None else (operation, name.removesuffix("_default"))


def parts_of(operation: str, given: Tensor, size: int, args: Sequence[Any]) -> tuple[list[Box], list[Box]] | None:
    """The parts of the input and of the output, in a group of `size` ranks; they lie along dimension 0. `args` are
    those of the function."""
    if operation == "sum":
        return [WHOLE], [WHOLE]
    if operation == "all-to-all":
        received, sent = ([int(length) for length in lengths or ()] for lengths in args[1:3])
        mine = rows(sent, given.shape[0], size)
        theirs = rows(received, sum(received) if received else given.shape[0], size)  # a rank may get no row
        return None if mine is None or theirs is None else (mine, theirs)
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


def watched(operation: str, name: str, exchanges: Exchanges, args: Sequence[Any], result: Any) -> list[Arriving]:
    """What is told of an application, when its gradient has arrived; nothing of one that is not to be recorded."""
    given = args[0]
    if not isinstance(given, Tensor) or not given.requires_grad or given.is_leaf or not is_plain(given):
        return []
    if not isinstance(result, Tensor) or result.grad_fn is None or not given.is_floating_point():
        return []
    ranks = group_of(args)
    parts = parts_of(operation, given, len(ranks), args)
    index = exchanges.number(ranks, name) if parts is not None and len(ranks) > 1 else None
    if parts is None or index is None:
        return []
    before, counts = take([given], parts[0])
    dtype = coarsest([given])
    told = Watched(name, ranks, index, counts, (), (name,), None, caller_site(), dtype, operation=operation)
    return [(told, before, parts[1])]
