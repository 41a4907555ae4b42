"""Collectives of activations as autograd functions, right ones and wrong ones, for exchange_workers.py."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.autograd import Function


def summed(x: Tensor) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x)
    return x


def summed_in_place(x: Tensor) -> Tensor:
    """As Megatron-LM does: the function's input is its output."""
    dist.all_reduce(x.contiguous())
    return x


def gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def stacked(x: Tensor) -> Tensor:
    """As Lightning's AllGatherGrad does: a dimension for the ranks."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts)


def own_part(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()


def exchanged(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x.contiguous())
    return result


def exchanged_by_gather(x: Tensor) -> Tensor:
    """The same, of what is gathered whole."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat([part.chunk(dist.get_world_size())[dist.get_rank()] for part in parts])


def passed_round(x: Tensor) -> Tensor:
    """The next rank's, as SigLIP's losses exchange embeddings."""
    rank, size = dist.get_rank(), dist.get_world_size()
    result = torch.empty_like(x)
    there = dist.P2POp(dist.isend, x.contiguous(), (rank - 1) % size)
    for one in dist.batch_isend_irecv([there, dist.P2POp(dist.irecv, result, (rank + 1) % size)]):
        one.wait()
    return result


def function(name: str, forward: Any, backward: Any) -> Any:
    """A torch.autograd.Function out of what it does in either direction."""
    return type(
        name,
        (Function,),
        {
            "forward": staticmethod(lambda ctx, x: forward(x)),
            "backward": staticmethod(lambda ctx, grad: backward(grad)),
        },
    )


Copy = function("Copy", lambda x: x.view_as(x), summed)
Sum = function("Sum", summed, lambda grad: grad)
SumTwice = function("SumTwice", summed, summed)
SumInPlace = function("SumInPlace", summed_in_place, lambda grad: grad)
SumInPlaceTwice = function("SumInPlaceTwice", summed_in_place, summed)
CopyInVain = function("CopyInVain", lambda x: x.view_as(x), lambda grad: (summed(grad), grad)[1])
CopyUnsummed = function("CopyUnsummed", lambda x: x.view_as(x), lambda grad: grad.view_as(grad))
CopyInPlace = function("CopyInPlace", lambda x: x.view_as(x), summed_in_place)
MeanInPlaceBack = function(
    "MeanInPlaceBack", lambda x: x.view_as(x), lambda grad: summed_in_place(grad).div_(dist.get_world_size())
)
MeanBack = function("MeanBack", lambda x: x.view_as(x), lambda grad: summed(grad) / dist.get_world_size())
Gather = function("Gather", gathered, lambda grad: own_part(summed(grad)))
GatherMean = function("GatherMean", gathered, lambda grad: own_part(summed(grad)) / dist.get_world_size())
GatherSliced = function("GatherSliced", gathered, own_part)
Stack = function("Stack", stacked, lambda grad: summed(grad)[dist.get_rank()])
StackSliced = function("StackSliced", stacked, lambda grad: grad[dist.get_rank()])
GatherSummedTwice = function("GatherSummedTwice", gathered, lambda grad: own_part(summed(summed(grad))))
Neighbour = function("Neighbour", passed_round, passed_round)  # of two ranks the next one is the one before
NeighbourHandedOn = function("NeighbourHandedOn", passed_round, lambda grad: grad)
NeighbourHalved = function("NeighbourHalved", passed_round, lambda grad: passed_round(grad) / 2)
Scatter = function("Scatter", own_part, gathered)
ScatterMean = function("ScatterMean", own_part, lambda grad: gathered(grad) / dist.get_world_size())
ReduceScatter = function("ReduceScatter", lambda x: own_part(summed(x)), gathered)
Repeated = function("Repeated", lambda x: own_part(summed(x)), lambda grad: torch.cat([grad] * 2, 1))
Swap = function("Swap", exchanged, exchanged)
SwapHandedOn = function("SwapHandedOn", exchanged, lambda grad: grad)
SwapDoubled = function("SwapDoubled", exchanged, lambda grad: 2 * exchanged(grad))
SwapByGather = function("SwapByGather", exchanged_by_gather, exchanged_by_gather)
SwapByGatherHandedOn = function("SwapByGatherHandedOn", exchanged_by_gather, lambda grad: grad)
SwapByGatherDoubled = function("SwapByGatherDoubled", exchanged_by_gather, lambda grad: 2 * exchanged_by_gather(grad))


class Joined(Function):
    """A summand and its share of a bias, as torchtitan's gpt-oss joins them; the bias gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias / dist.get_world_size()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.flatten(0, 1).sum(0)


class JoinedSummed(Joined):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad), grad.flatten(0, 1).sum(0)


class Masked(Function):
    """A rank's own slots, with zeros in place of the others; backward sums what arrives there, of all or of all own."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, own: Tensor, all_of_them: bool) -> Tensor:
        ctx.save_for_backward(own)
        ctx.all_of_them = all_of_them
        return scores * own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed(grad if ctx.all_of_them else grad * ctx.saved_tensors[0]), None, None


class Functional:
    """A functional collective, applied as a function is."""

    def __init__(self, call: Any) -> None:
        self.call = call

    def apply(self, x: Tensor) -> Tensor:
        result: Tensor = self.call(x, dist.group.WORLD)
        return result


def functionally(x: Tensor) -> Tensor:
    result: Tensor = functional.all_gather_single(x, 1, dist.group.WORLD)
    return result


def scattered(grad: Tensor) -> Tensor:
    result: Any = functional.reduce_scatter_single(grad, "sum", 1, dist.group.WORLD)
    waited: Tensor = result.wait()
    return waited


FunctionalGathered = function("FunctionalGathered", functionally, scattered)
FunctionalSliced = function("FunctionalSliced", functionally, own_part)
FunctionalSum = Functional(lambda x, group: functional.all_reduce(x, "sum", group))
FunctionalGather = Functional(lambda x, group: functional.all_gather_single_autograd(x, 1, group))
FunctionalScatter = Functional(lambda x, group: functional.reduce_scatter_single_autograd(x, "sum", 1, group))
