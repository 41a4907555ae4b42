"""What the backward of a function that is fused with the output layer gives for that layer's weight.

A loss of logits x W^T depends on hidden states and weight through their product alone, so that <dx, x> = <dW, W> =
<dlogits, x W^T>, whatever the loss is (Euler's theorem: the product is of degree one in both). The hidden states'
gradient is held against the derivative elsewhere; the weight's has to be of the same size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from gradcheck_dist.events import HeadBackward
from gradcheck_dist.probes.activations.activation_hooks import communicates
from gradcheck_dist.probes.backward.graph_leaves import LEAF_NODE
from gradcheck_dist.probes.losses.closed_form import Looked, coarsest, row
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site, defined_at

MAX_BYTES = 1 << 26
"""Of hidden states, which stay alive until the backward pass."""
PART = 1 << 20
"""Elements that are multiplied at a time."""


def held(
    recorder: Recorder, cls: type[Function], looked: Looked
) -> Callable[[Sequence[Tensor | None], Tensor], None] | None:
    """What is to be called with the gradients that a function gave, and with what arrived at its result; None where it
    is not looked at. Holds the hidden states until then; what was written over in between is left out."""
    given = looked.given
    rows, weight = given.rows.detach(), given.weight
    if weight is None or not weight.requires_grad or rows.numel() * rows.element_size() > MAX_BYTES:
        return None
    param = _parameter(weight)
    if getattr(param if param is not None else weight, "main_grad", None) is not None:
        return None  # the function may add to that buffer by itself
    before = row(rows, looked.index)
    number = (rows._version, weight._version)
    info = recorder.registry.find(param) if param is not None else None
    event = functools.partial(
        HeadBackward,
        function=cls.__name__,
        defined_at=defined_at(getattr(cls, "backward", None)),
        site=caller_site(),
        params=recorder.registry.param_set([info]) if info is not None else None,
    )

    @guarded("loss_backward")
    def came(recorder: Recorder, grads: Sequence[Tensor | None], arrived: Tensor) -> None:
        current = recorder.current
        of_rows, of_weight = grads[given.place], grads[given.weight_place]
        if current is None or of_rows is None or of_weight is None or not is_plain(of_weight):
            return
        if communicates(recorder, cls):
            return  # the weight's gradient may be of all ranks by then
        if (rows._version, weight._version) != number or not weight.untyped_storage().size():
            return
        same = (row(rows, looked.index) == before).all()
        sums = [*_product(of_rows, rows), *_product(of_weight, weight.detach())]
        values = torch.stack([arrived.double(), *(torch.where(same, one, torch.nan) for one in sums)]).float()
        rounded = coarsest(of_rows.dtype, of_weight.dtype, looked.dtype)
        recorder.emit_values(event, values, current.microbatch, dtype=str(rounded).removeprefix("torch."))

    return functools.partial(came, recorder)


def _product(grad: Tensor, of: Tensor) -> tuple[Tensor, Tensor]:
    """The inner product of a gradient with its tensor, and the norm of the elements' products, of which rounding
    changes each by itself."""
    total = squares = torch.zeros((), dtype=torch.float64, device=grad.device)
    for mine, theirs in zip(grad.reshape(-1).split(PART), of.reshape(-1).split(PART), strict=True):
        products = mine.double() * theirs.double()
        total, squares = total + products.sum(), squares + products.square().sum()
    return total, squares.sqrt()


def _parameter(weight: Tensor) -> Parameter | None:
    """The one parameter that a weight was made of."""
    node: Any = weight.grad_fn
    while node is not None and node.name() != LEAF_NODE:
        behind = [one for one, _ in node.next_functions if one is not None]
        node = behind[0] if len(behind) == 1 else None
    found = weight if node is None else node.variable
    return found if isinstance(found, Parameter) else None
