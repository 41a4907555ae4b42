"""Impulse mode: for one step each contribution's gradient is replaced by a code of its own, and weights are read off.

What is summed is then known exactly, and powers of two at few elements survive any rounding: the weights come out right
to the last digit also in bfloat16 and with many contributions. The step is useless for training by design, so the
process ends before the optimizer applies it. Codes are made from the labels, so that ranks that evaluate the same
tokens (hand-written tensor parallelism) send the same one for one gradient, and others for summands of one (sequence
parallel norms): what tells gradients apart is computed on their device, which nobody waits for. Gradients that are
DTensors are left as they are.
"""

from __future__ import annotations

import functools
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
FEW_BITS = 24
PRIME = 2654435761
STEPS = 8
"""How finely gradients are told apart: a direction's share, and an eighth of an octave of their norm. Copies differ by
rounding, summands by more."""
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
        rng = random.Random(f"labels {current.label_hash} {recorder.accumulation_step} {current.microbatch}")
        chosen = rng.sample(range(len(indices)), min(CODE_LENGTH, len(indices)))
        drawn = [rng.randrange(2 * len(EXPONENTS)) for _ in chosen]
        impulse = torch.zeros_like(grad, memory_format=torch.contiguous_format)
        told = told_by(grad.reshape(-1)[indices])
        mixed = (told * (2 * torch.arange(len(chosen), device=grad.device) + PRIME)) >> FEW_BITS
        mixed = (torch.tensor(drawn, device=grad.device) + mixed) % (2 * len(EXPONENTS))
        where = indices[(torch.tensor(chosen, device=indices.device) + told.to(indices.device)) % len(indices)]
        values = (1 - 2 * (mixed % 2)) * 2.0 ** (mixed // 2)
        if len(chosen) < CODE_LENGTH and torch.finfo(grad.dtype).bits > 16:  # too few to tell contributions apart alone
            values = values * (1 + (told % 2**12) / 2**12)
        impulse.view(-1)[where] = values.to(grad.dtype)
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


def told_by(values: Tensor) -> Tensor:
    """A whole number of 24 bits, on the device of `values` (shape (n,)): alike of copies, and most likely not of
    summands, whose norm or direction differ."""
    values = torch.nan_to_num(torch.view_as_real(values) if values.is_complex() else values).float().reshape(-1)
    norm = torch.linalg.vector_norm(values) + 1e-30
    shares = _directions(len(values)).to(values.device) @ (values / norm)
    told = torch.cat([shares, STEPS * torch.log2(norm).reshape(1)]).mul(STEPS).round().long()
    mixed = (told + 2**12) * (PRIME + 2 * torch.arange(len(told), device=told.device)) % 2**FEW_BITS
    for shift in (11, 5):
        mixed = (
            (mixed ^ (mixed >> shift)) * PRIME % 2**FEW_BITS * torch.arange(3, 2 * len(told) + 3, 2, device=told.device)
        )
    return mixed.sum() % 2**FEW_BITS


@functools.cache
def _directions(size: int) -> Tensor:
    """Shape (24, size)."""
    return torch.randn(FEW_BITS, size, generator=torch.Generator("cpu").manual_seed(size), device="cpu")


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
