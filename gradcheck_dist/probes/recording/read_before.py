"""What optimizers read in the step before a recorded one, of which nothing else is kept.

Gradients that nobody empties are a part of the recorded step's. That they are those of the step before, and nothing
that a line has put there since (a penalty's gradient in closed form), is told by a few elements that are still the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

NUM_ELEMENTS = 64
"""Of each gradient, compared with what is there when the recorded step begins."""


class ReadBefore:
    """A few elements of each gradient that the optimizers of one step read; None for one that they are not taken of."""

    def __init__(self) -> None:
        self._step = -1
        self._kept: list[tuple[weakref.ref[Tensor], Tensor | None]] = []

    def keep(self, step: int, params: Iterable[Tensor]) -> None:
        """An optimizer reads the gradients of these parameters in `step`, which is not recorded."""
        if self._step != step:
            self._step, self._kept = step, []
        self._kept += [(weakref.ref(param), _elements(param.grad)) for param in params]

    def take(self, step: int) -> list[tuple[Tensor, bool]]:
        """The parameters read in `step`, each with whether its gradient is still what was read. To be asked once, when
        the next step begins."""
        kept, self._kept = self._kept if self._step == step else [], []
        params = [(param, elements) for ref, elements in kept if (param := ref()) is not None]
        return [(param, _is_still(elements, param.grad)) for param, elements in params]


def _elements(grad: Tensor | None) -> Tensor | None:
    """Elements of this rank's part, at places that hang on its size alone. None on an accelerator, which nobody waits
    for, and where all are zero."""
    local = getattr(grad, "_local_tensor", grad)
    if local is None or not local.is_cpu or local.layout is not torch.strided or not local.numel():
        return None
    flat = local.detach().reshape(-1)
    found = flat[:: -(-flat.numel() // NUM_ELEMENTS)].clone()
    return found if found.any() else None


def _is_still(elements: Tensor | None, grad: Tensor | None) -> bool:
    now = None if elements is None else _elements(grad)
    return elements is not None and now is not None and now.dtype == elements.dtype and torch.equal(now, elements)
