"""Copies of a DTensor that go on as plain tensors, or come from them, and what is declared of them.

`to_local` cannot know what ranks do with a DTensor that all of them hold: it takes what arrives for the whole gradient,
alike on all ranks, unless `grad_placements` declares summands. A few elements of what arrives on each rank tell whether
that is so. `from_local` believes that what ranks call copies are some. Semantics: torch/distributed/tensor/_api.py,
_ToTorchTensor and _FromTorchTensor, also behind `full_tensor` and the local outputs of parallel styles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from gradcheck_dist.events import HANDED_ON, HANDED_ON_SUMMED, OF_SHARDS, OF_SUMMANDS, SAID_ALIKE, SAID_SUMMANDS
from gradcheck_dist.probes.activations.exchange_events import Arriving, Watched, coarsest
from gradcheck_dist.probes.activations.exchange_layout import WHOLE, take
from gradcheck_dist.probes.backward.graph_leaves import LEAF_NODE
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.sites import caller_site

if TYPE_CHECKING:
    from gradcheck_dist.probes.activations.exchanges import Exchanges

TO_LOCAL, FROM_LOCAL = "DTensor.to_local", "DTensor.from_local"
_MODULE = "torch.distributed.tensor._api"
_FUNCTIONS = {"_ToTorchTensor": TO_LOCAL, "_FromTorchTensor": FROM_LOCAL}
_DECLARED = {
    TO_LOCAL: {"copy": HANDED_ON, "sum": HANDED_ON_SUMMED},
    FROM_LOCAL: {"copy": SAID_ALIKE, "sum": SAID_SUMMANDS},
}
_REDISTRIBUTED = "RedistributeBackward"


def known(cls: type) -> str | None:
    """Which of a DTensor's methods a function stands behind; None for any other function."""
    return _FUNCTIONS.get(cls.__name__) if cls.__module__ == _MODULE else None


def watched(name: str, exchanges: Exchanges, args: Sequence[Any], result: Any) -> list[Arriving]:
    """What is told, when the gradient has arrived, for each mesh dimension over which a DTensor lies in copies, or
    comes from summands. A parameter's own gradients are judged where they arrive."""
    given = args[0]
    local, whole = (result, given) if name == TO_LOCAL else (given, result)
    if result.grad_fn is None or _is_parameter(given) or not is_plain(local) or not local.is_floating_point():
        return []
    declared = (args[1] or whole.placements) if name == TO_LOCAL else whole.placements
    found: list[Arriving] = []
    for dim, (held, one) in enumerate(zip(whole.placements, declared, strict=True)):
        kind = "copy" if one.is_replicate() else "sum" if _is_sum(one) else None
        if kind is None or (name == TO_LOCAL and not held.is_replicate()):
            continue
        ranks = tuple(dist.get_process_group_ranks(whole.device_mesh.get_group(dim)))
        index = exchanges.number(ranks, name) if len(ranks) > 1 else None
        if index is not None:
            before, counts = take([local], [WHOLE])
            dtype, site, operation = coarsest([local]), caller_site(), _DECLARED[name][kind]
            if operation == HANDED_ON:
                operation = _made_of(given, dim)
            told = Watched(name, ranks, index, counts, (), (), None, site, dtype, operation=operation)
            found.append((told, before, [WHOLE] if name == TO_LOCAL else []))
    return found


def _is_sum(placement: Any) -> bool:
    return placement.is_partial() and getattr(placement, "reduce_op", "sum") == "sum"


def _made_of(tensor: Any, dim: int) -> str:
    """What a redistribution just made a DTensor's copies of, over one mesh dimension."""
    before = getattr(tensor.grad_fn, "current_spec", None)
    if tensor.grad_fn.name() != _REDISTRIBUTED or before is None:
        return HANDED_ON
    held = before.placements[dim]
    return OF_SHARDS if held.is_shard() else OF_SUMMANDS if _is_sum(held) else HANDED_ON


def _is_parameter(tensor: Tensor) -> bool:
    """Whether a DTensor is a parameter, maybe one that was redistributed."""
    node: Any = tensor.grad_fn
    while node is not None and node.name() == _REDISTRIBUTED:
        node = node.next_functions[0][0]
    return node is None or node.name() == LEAF_NODE
