"""A pipeline stage that leaves the data-parallel reduction to the last accumulation step."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage


class AccumulatingStage(PipelineStage):
    """As torch's stage, but below DDP's `no_sync` its last microbatch reduces as little as all others do.

    torch 2.13 arms DDP's reducer in the last microbatch of every schedule.step, whatever `no_sync` says. Over several
    accumulation steps an average then only costs time; a sum counts again what was summed before.
    """

    def backward_one_chunk(  # type: ignore[override]
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        synced = getattr(self.submod, "require_backward_grad_sync", True)
        return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward and synced)
