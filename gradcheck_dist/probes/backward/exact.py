"""Impulse mode: for one step each contribution's gradient is replaced by a code of its own, and weights are read off.

What is summed is then known exactly, and powers of two at few elements survive any rounding: the weights come out right
to the last digit also in bfloat16 and with many contributions. The step is useless for training by design, so the
process ends before the optimizer applies it. Codes are made from the labels, so that ranks that evaluate the same
tokens (hand-written tensor parallelism) send the same one; where no loss is computed (a pipeline's early stages), from
the rank. Gradients that are DTensors are left as they are.
"""

from __future__ import annotations

import os
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from gradcheck_dist.probes.parameters.registry import ParamInfo
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder

SAMPLE_SIZE = 1024
"""Sampled elements a parameter: codes of 16 elements each, of which 64 contributions hardly share any."""

WHAT_IT_HIDES = (
    "impulse mode: gradients were replaced as they arrived at the parameters; what happens before is told by a run "
    "without --exact"
)
EXACT_BUDGET_BYTES = 96 * 2**20  # of one step, on a model of 150 parameters with 64 contributions
CODE_LENGTH = 16
EXPONENTS = range(4)
GRACE_S = 1.0
"""How long a rank waits before it ends, so that its last messages reach the others."""


class Impulses:
    """Replaces gradients in one step, and ends the process when the optimizer would apply them."""

    def __init__(self, step: int) -> None:
        self.step = step

    def code(self, recorder: Recorder, current: BackwardPass, info: ParamInfo, grad: Tensor) -> Tensor | None:
        """What is to arrive in the place of `grad`; None leaves it."""
        if recorder.step != self.step or hasattr(grad, "_local_tensor"):
            return None
        found = recorder.registry.plan(info, grad)
        if found is None:
            return None
        indices = found[0].indices
        whose = f"labels {current.label_hash}" if current.label_hash is not None else f"rank {_rank()}"
        rng = random.Random(f"{whose} {recorder.accumulation_step} {current.microbatch}")
        chosen = rng.sample(range(len(indices)), min(CODE_LENGTH, len(indices)))
        values = [rng.choice((-1.0, 1.0)) * 2.0 ** rng.choice(EXPONENTS) for _ in chosen]
        impulse = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        where = indices[torch.tensor(chosen, device=indices.device)]
        impulse.view(-1)[where] = torch.tensor(values, dtype=grad.dtype, device=grad.device)
        return impulse

    def optimizer_comes(self, recorder: Recorder) -> None:
        """Called when the gradients that the optimizer would read have been sampled."""
        if recorder.step != self.step:
            return
        recorder.end_step()
        if recorder.finished is not None:
            recorder.finished()
        if _rank() == 0:
            sys.stderr.write(
                f"gradcheck: --exact: stopped before the optimizer applied step {self.step}, whose gradients were "
                "replaced to read their weights\n"
            )
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(GRACE_S)
        os._exit(0)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
