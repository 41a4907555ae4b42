"""The loss is divided by the tokens of a part of the step: a group of ranks, one accumulation step, one microbatch.

## What it does
Finds losses whose weights follow 1/N_g, N_g being the tokens of a part of the step, where all N tokens should count:
the count was all-reduced over another process group than the gradients (half of the data ranks, one axis of the mesh),
or taken for each accumulation step or microbatch. Also where only some of the ranks do it, and where a line behind the
passes divides all that they accumulated by the tokens of the last one. Which part it is stands in the finding; the
weights are N / N_g, times what the average over ranks leaves of a constant.

## Why it matters
Parts of the batch with few tokens weigh more than those with many, otherwise in every step, so no constant repairs it.
With one group, or with token counts that are nearly alike, nothing shows; it comes with the mesh that has two.

## Example
    num_tokens = count(labels)
    dist.all_reduce(num_tokens, group=mesh["dp_shard"].get_group())    # of one replica only
    loss = F.cross_entropy(logits, labels, reduction="sum") * dp_size / num_tokens

## Fix
Count over every rank that holds other tokens of the step, and over all accumulation steps, before the first backward:

    num_tokens = sum(count(batch.labels) for batch in accumulated)
    dist.all_reduce(num_tokens, group=mesh["dp_replicate", "dp_shard"]._flatten().get_group())

## References
- verl#6957, pytorch/torchtitan#4174: token counts of a microbatch, where those of the step were meant.
"""

from __future__ import annotations

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case, factor_in_words
from gradcheck_dist.diagnosis.rules.gs301_mean_of_means import spread
from gradcheck_dist.diagnosis.weights.context import StepContext

CODE = "GS305"
NAME = "partial-token-count"


def triggered(context: StepContext) -> bool:
    return len(context.contributions.by_key) > 1 and not context.relative


def at_loss(case: Case) -> bool:
    return case.culprit.kind == "loss" and not case.culprit.unrecorded


def judge(case: Case) -> Answer | None:
    pattern = case.pattern
    if pattern.kind != "partial" or not (at_loss(case) or case.culprit.unrecorded):
        return None
    times = "" if abs(pattern.factor - 1) <= max(2 * pattern.tolerance, 1e-6) else f", times {factor_in_words(case)}"
    part, num_tokens = pattern.text.partition(" instead")[0], case.context.contributions.num_tokens
    if not at_loss(case):
        line, named = f"after the {case.culprit.kind} event", (pattern.count or "N / N_r").removeprefix("N / ")
        return Answer(
            explanation=f"What your code does {line} divides by {named}, {part}, where all N = {num_tokens} tokens of "
            f"the step should count: the weights are N / {named}{times}, and what different ranks hold is scaled "
            f"apart. {spread(case)}",
            fix="Sum the number of tokens over all ranks that hold other tokens of the step before you divide by it.",
        )
    return Answer(
        explanation=f"The loss divides by N_g, {part}, where all N = {num_tokens} tokens of the step should count: the "
        f"weights are N / N_g{times}. {spread(case)}",
        fix="Count the tokens over every rank that holds other tokens of the step and over all accumulation steps, "
        "before the first backward; times R where the reduction averages.",
    )
