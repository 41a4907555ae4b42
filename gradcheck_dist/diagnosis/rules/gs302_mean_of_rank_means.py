"""Each rank divides by its own tokens and the reduction averages: token imbalance between ranks becomes weight.

## What it does
Finds a loss whose weight per token follows 1/N_r, N_r being the tokens of that rank in the step, averaged over ranks
afterwards. Tokens on ranks with few tokens weigh more, by N / (R N_r).

## Why it matters
Padding, packing and variable-length data give ranks different numbers of tokens in every step. The average of the
ranks' means is not the mean over tokens; how far it is off changes with every batch, so no constant repairs it.

## Example
    num_tokens = count(labels)                             # of this rank only
    loss = F.cross_entropy(logits, labels, reduction="sum") / num_tokens
    loss.backward()                                        # DDP averages over ranks

## Fix
Divide by the average number of tokens a rank, N/R, the same number on every rank (c = R/N):

    num_tokens = all_reduce(count(labels))                 # N, over all ranks
    loss = F.cross_entropy(logits, labels, reduction="sum") * world_size / num_tokens

Behind a reduction that sums, divide by N itself (c = 1/N).

## References
- pytorch/torchtitan, loss balancing for vision-language models; verl#3994.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.rules.gs301_mean_of_means import follows, severity, spread
from gradcheck_dist.diagnosis.weights.context import StepContext

CODE = "GS302"
NAME = "mean-of-rank-means"
OBJECTIVE = "rank-token-mean"


def triggered(context: StepContext) -> bool:
    return context.contributions.num_coordinates > 1 and not context.relative


def judge(case: Case) -> Answer | None:
    pattern = case.pattern
    if case.culprit.kind != "loss" or case.culprit.unrecorded or pattern.kind != "objective":
        return None
    if pattern.objective != OBJECTIVE:
        return None
    return Answer(
        severity=severity(case),
        explanation=f"{follows(case, 'the mean of per-rank means')} The loss divides by the tokens of its own rank. "
        f"{spread(case)}",
        fix="Divide the token-sum loss by the tokens of all ranks, counted with dist.all_reduce (times the number of "
        "ranks where the reduction averages), or declare --objective rank-token-mean if this is meant.",
    )
