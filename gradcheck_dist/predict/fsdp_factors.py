"""FSDP2's divide factors, as torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py computes them.

A mirror of `_get_gradient_divide_factors` (torch 2.13) without torch; tests/predict holds the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Factors:
    """out = reduce(in / pre) / post, where `shard_op` and `replicate_op` are "sum", "avg" or "premul_sum" (times
    `premul`)."""

    pre: float | None
    post: float | None
    shard_op: str
    replicate_op: str
    premul: float | None = None

    def total(self, shard: int, replicate: int) -> float:
        """What one rank's contribution is multiplied by in all."""
        result = (self.premul or 1.0) / ((self.pre or 1.0) * (self.post or 1.0))
        if self.shard_op == "avg":
            result /= shard
        if self.replicate_op == "avg":
            result /= replicate
        return result


def gradient_divide_factors(
    shard: int, replicate: int, reduce_dtype: str = "float32", factor: float | None = None, force_sum: bool = False
) -> Factors:
    """The factors of a reduction over `shard` ranks and, under HSDP, `replicate` replicas (1: none).

    Args:
        reduce_dtype: "float32", "bfloat16" or "float16"; only the last is split, to keep within its range.
        factor: what set_gradient_divide_factor was given.
        force_sum: set_force_sum_reduction_for_comms.
    """
    data_parallel = shard * replicate
    overflow_risk = reduce_dtype not in ("float32", "bfloat16")
    if not overflow_risk and not force_sum:
        if factor is None:
            op = "sum" if data_parallel == 1 else "avg"
            return Factors(None, None, op, op)
        if factor == shard:
            return Factors(None, None, "avg", "sum")
        return Factors(None, None, "premul_sum", "sum", premul=1.0 / factor)
    factor = float(data_parallel) if factor is None else factor
    if not overflow_risk:
        return Factors(None, factor, "sum", "sum")
    pre = 1
    while factor % pre == 0 and factor / pre > pre:
        pre *= 2
    return Factors(float(pre), factor / pre, "sum", "sum")
