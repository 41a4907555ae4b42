"""A matrix that is embedding and output head at once, where a pipeline keeps it on its first and on its last stage."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_tied_gradients(parts: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Give both copies the sum of their gradients, after the last backward. Collective over the first and last rank.

    Source: Megatron-LM, arXiv 1909.08053, embedding all-reduce between the first and the last stage.
    """
    copies = tied_copies(parts)
    for name, parameter in copies.items():
        # The norm of the model counts the matrix once.
        parameter.counted_elsewhere = name == "head.weight"  # type: ignore[attr-defined]
    grads = [_local_grad(parameter) for parameter in copies.values()]
    if len(grads) == 2:
        total = grads[0] + grads[1]
        for grad in grads:
            grad.copy_(total)
    elif grads:
        peer = dist.get_global_rank(group, group.size() - 1 - group.rank())
        other = torch.empty_like(grads[0])
        exchange = [dist.P2POp(dist.isend, grads[0], peer, group), dist.P2POp(dist.irecv, other, peer, group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        grads[0].add_(other)


def tied_copies(parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The copies that this rank holds: "embedding.weight" on the first stage, "head.weight" on the last."""
    return {
        name.removeprefix("module."): parameter
        for part in parts
        for name, parameter in part.named_parameters()
        if name.removeprefix("module.") in ("embedding.weight", "head.weight")
    }


def _local_grad(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    return getattr(grad, "_local_tensor", grad)
