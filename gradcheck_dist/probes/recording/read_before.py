"""What optimizers read in the step before a recorded one, of which nothing else is kept.

Gradients that nobody empties are a part of the recorded step's. That they are those of the step before, and nothing
that a line has put there since (a penalty's gradient in closed form), is told by a few elements that are the same.
They are compared where they lie: nobody waits for an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from gradcheck_dist.probes.parameters.registry import ParamInfo

NUM_ELEMENTS = 64
"""Of each gradient, compared with what is there when the recorded step begins."""


class ReadBefore:
    """A few elements of each gradient that the optimizers of one step read, by the parameter's `id`; None for one that
    had none. No reference to a parameter is kept, not even a weak one: torch.utils.swap_tensors refuses those."""

    def __init__(self) -> None:
        self._step = -1
        self._kept: dict[int, Tensor | None] = {}

    def keep(self, step: int, params: Iterable[Tensor]) -> None:
        """An optimizer reads the gradients of these parameters in `step`, which is not recorded."""
        if self._step != step:
            self._step, self._kept = step, {}
        self._kept |= {id(param): _elements(param.grad) for param in params}

    def take(self, step: int, of_id: Callable[[int], ParamInfo | None]) -> list[tuple[ParamInfo, Tensor | None]]:
        """The parameters read in `step`, each with whether its gradient is still what was read, a 0-d boolean where it
        lies; None for one that has no gradient. To be asked once, when the next step begins."""
        kept, self._kept = self._kept if self._step == step else {}, {}
        found = [(info, elements) for key, elements in kept.items() if (info := of_id(key)) is not None]
        return [(info, _is_still(info.param, elements)) for info, elements in found]


def _is_still(param: Tensor, elements: Tensor | None) -> Tensor | None:
    now = None if elements is None else _elements(param.grad)
    if elements is None or now is None or (now.dtype, now.device) != (elements.dtype, elements.device):
        return None
    return (now == elements).all()


def _elements(grad: Tensor | None) -> Tensor | None:
    """Elements of this rank's part, at places that hang on its size alone."""
    local = getattr(grad, "_local_tensor", grad)
    if local is None or local.layout is not torch.strided or not local.numel():
        return None
    num = min(NUM_ELEMENTS, local.numel())
    return local.detach().take(torch.arange(num, device=local.device) * local.numel() // num)
