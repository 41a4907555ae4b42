"""Which samples (sequences) a loss's tokens belong to, as far as their weights tell.

A loss that is a mean over each sequence's tokens, and then over sequences, weighs the tokens of one sequence alike and
those of a longer one less. Rows of an unreduced loss, or, where sequences are packed, runs of tokens of one weight, are
its samples where all of them weigh the same in sum. Nothing is read here: on an accelerator all numbers stay there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.probes.recording.recorder import Recorder, guarded

SAME = 1e-6
"""Weights of neighbouring tokens nearer than this, relative, are those of one sequence."""


@guarded("sequences")
def sequences(recorder: Recorder, weights: Tensor) -> dict[str, Any]:
    """Fields of a LossGradient, as 0-d tensors; none in steps without samples.

    Args:
        weights: of each token, float64, of the unreduced loss's shape; zero is no token.
    """
    weights = weights.squeeze()
    flat = weights.reshape(-1)
    if not recorder.sampling or not flat.numel():
        return {}
    by_runs = _told(flat, _runs(flat))
    if weights.dim() < 2 or weights.shape[0] < 2:
        return by_runs
    rows = weights.flatten(1)
    used = rows != 0
    high, low = _extremes(rows, used)
    one_weight = (high - low <= SAME * high.abs()).all()
    row_of = torch.arange(len(rows), device=flat.device).repeat_interleave(rows.shape[1], output_size=flat.numel())
    by_rows = _told(flat, row_of, exact=True)
    return {name: torch.where(one_weight, by_rows[name], by_runs[name]) for name in by_runs}


def _extremes(rows: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the smallest weight of each row's tokens; zeros for a row without any."""
    empty = ~used.any(1)
    high = torch.where(used, rows, -torch.inf).amax(1)
    low = torch.where(used, rows, torch.inf).amin(1)
    return torch.where(empty, 0, high), torch.where(empty, 0, low)


def _runs(flat: Tensor) -> Tensor:
    """For each token the number of its run: neighbours of one weight, whatever masked tokens lie between them."""
    used = flat != 0
    place = torch.arange(flat.numel(), device=flat.device)
    last = torch.where(used, place, -1).cummax(0).values
    before = torch.cat([last.new_full((1,), -1), last[:-1]])
    previous = flat[before.clamp_min(0)]
    begins = used & ((before < 0) | ((flat - previous).abs() > SAME * flat.abs()))
    return (begins.cumsum(0) - 1).clamp_min(0)


def _told(flat: Tensor, group_of: Tensor, *, exact: bool = False) -> dict[str, Any]:
    """What groups of tokens tell if they are samples. `exact`: each group is one sample; else one may be several
    neighbours of one length."""
    zeros = torch.zeros_like(flat)
    sums = zeros.scatter_add(0, group_of, flat)
    counts = zeros.scatter_add(0, group_of, (flat != 0).to(flat.dtype))
    there = counts > 0
    base = torch.where(there, sums.abs(), torch.inf).amin()
    samples = torch.ones_like(sums) if exact else (sums.abs() / base).round().clamp_min(1)
    signed = sums * sums.sum().sign()  # some that make a loss larger, and some smaller, do not weigh alike
    apart = (signed / (base * samples) - 1).abs()
    apart = torch.where(counts % samples == 0, apart, torch.inf)
    alone = there & (samples == 1)
    num = torch.where(there, samples, 0).sum().nan_to_num(0, 0, 0)
    return {
        "num_samples": num.to(torch.int64),
        "sample_weight": flat.sum() / num.clamp_min(1),
        "sample_spread": torch.where(there, apart, 0).amax(),
        "shortest_sample": torch.where(alone, counts, torch.inf).amin().nan_to_num(posinf=0).to(torch.int64),
        "longest_sample": torch.where(alone, counts, 0).amax().to(torch.int64),
    }
