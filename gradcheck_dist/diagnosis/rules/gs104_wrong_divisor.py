"""A reduction divides by another number than the loss was made for.

## What it does
Finds a data-parallel reduction that did what it documents, but whose divisor is not the one that the loss and the other
reductions of the run ask for: experts averaged over their own, smaller group, a divisor that counts an axis twice, one
FSDP unit whose divide factor differs. Other parameters came out right with the same losses, so the losses are right.

## Why it matters
Some parameters learn faster or slower than the rest, by a factor that depends on the mesh. Adam hides a constant factor
per parameter, the global gradient norm and the clip coefficient do not, and weight decay shifts for these parameters
alone. Loss curves stay close enough that such a fault was found only by comparing norms of single parameters.

## Example
    fully_shard(experts, mesh=mesh["edp"])          # averages over dp/ep ranks, but holds tokens of all dp ranks
    fully_shard(block, mesh=mesh["dp"])             # averages over dp ranks

## Fix
Give every reduction the same divisor, the number of ranks that hold other tokens (FSDP2; on gloo also force SUM):

    experts.set_gradient_divide_factor(dp_size)
    experts.set_force_sum_reduction_for_comms(True)

In Megatron-LM and DeepSpeed: average experts over the expert-data-parallel group and divide by ep, or sum and divide by
the data-parallel size.

## References
- pytorch#160285, #155903; torchtitan#1551; Megatron-LM#5956, #7165; DeepSpeed#6545, #4957.
  Unverified: Megatron-LM#3023.
- torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, _get_gradient_divide_factors.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.ledger.replay import nominal_factor

CODE = "GS104"
NAME = "wrong-divisor"


def triggered(context: StepContext) -> bool:
    return any(context.axes.get(axis, 1) > 1 for axis in ("dp_replicate", "dp_shard", "cp"))


def judge(case: Case) -> Answer | None:
    event = case.reduce
    if event is None or not case.recorded or not case.culprit.wrong_constant or case.pattern.kind != "uniform":
        return None
    factor = nominal_factor(event)
    if not factor > 0 or not case.pattern.factor > 0:
        return None
    size = len(event.group) * (len(event.replicate_group) or 1)
    wanted = case.pattern.factor / factor  # what it should divide by
    name = f" = {case.names[0].expression}" if case.names else ""
    return Answer(
        explanation=f"The {event.impl.upper()} reduction over {size} rank(s) multiplies by {factor:.6g}, where the "
        f"losses and the other reductions ask for 1/{wanted:.6g}: these weights are x {case.pattern.factor:.6g}{name}.",
        fix=f"Let this reduction divide by {wanted:.6g} in all: set_gradient_divide_factor({wanted:.6g}) on an FSDP "
        "module (on gloo with set_force_sum_reduction_for_comms(True)).",
    )
