"""Each microbatch is divided by its own tokens: a mean of means instead of a mean over tokens.

## What it does
Finds a loss whose weight per token follows 1/n_c, n_c being the tokens of that microbatch, where the objective is the
mean over all tokens of the step. Tokens of short microbatches weigh more than tokens of long ones, by
N / (C n_c) with N tokens in C microbatches.

## Why it matters
The gradient now depends on how samples happened to be packed, on the number of ranks and on the number of accumulation
steps; a run with the same tokens in another layout is another optimisation problem. The logged loss is often the right
mean, so the curves agree while the training does not.

## Example
    for microbatch in microbatches:
        loss = F.cross_entropy(logits, labels)            # mean over this microbatch's tokens
        (loss / len(microbatches)).backward()

## Fix
Count the tokens of the whole step first, over all ranks, and divide the sum by them:

    num_tokens = all_reduce(sum(count(labels) for labels in microbatches))
    for microbatch in microbatches:
        loss = F.cross_entropy(logits, labels, reduction="sum") / num_tokens    # times R where DDP/FSDP averages
        loss.backward()

If a mean over microbatches is what you want, declare it: `--objective microbatch-mean`.

## References
- huggingface/transformers up to 4.45.2 (measured); verl-project/verl#5625; pytorch/torchtitan#2206.
- pytorch/torchtune#1875; pytorch/torchtitan#1842. Unverified: OpenRLHF/OpenRLHF#1249.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from statistics import median

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case, factor_in_words
from gradcheck_dist.diagnosis.finding import Severity
from gradcheck_dist.diagnosis.rules.gs104_wrong_divisor import summed_means, undivided_means
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.ledger.expected import TOTALS
from gradcheck_dist.objectives import DEFAULT_OBJECTIVE

CODE = "GS301"
NAME = "mean-of-means"
OBJECTIVE = "microbatch-mean"
IS_SUM = " Each token weighs exactly 1: the gradient is the sum over tokens. Nobody declared whether that is intended."
SUM_MEANT = " If the sum is meant, declare --objective sum."


def triggered(context: StepContext) -> bool:
    return len(context.contributions.by_key) > 1 and not context.relative


def judge(case: Case) -> Answer | None:
    pattern = case.pattern
    if case.culprit.kind != "loss" or case.culprit.unrecorded:
        return None
    if pattern.kind == "other" and (ranks := _means_of_ranks(case)):
        return Answer(
            explanation=f"The weights are those of a mean of per-microbatch means on each rank, and {ranks}. The loss "
            f"divides each microbatch by its own tokens. {spread(case)}",
            fix="Divide the token-sum loss by the tokens of all microbatches of the step.",
        )
    if pattern.kind != "objective":
        return None
    if pattern.objective != OBJECTIVE:
        return None
    undivided, divide = undivided_means(case)
    summed = f"{undivided} " if undivided else ""
    return Answer(
        severity=severity(case),
        explanation=f"{follows(case, 'the mean of per-microbatch means')} {summed}The loss divides "
        f"each microbatch by its own tokens. {spread(case)}",
        fix="Divide the token-sum loss by the tokens of the whole step over all ranks (times the number of ranks where "
        "the reduction averages), or declare --objective microbatch-mean if this is meant."
        + (f" For that mean: {divide[0].lower()}{divide[1:]}" if divide else _divided(case)),
    )


def _divided(case: Case) -> str:
    """What a mean over microbatches lacks, where it is the division by accumulation steps or ranks."""
    if summed_means(case):
        return " For that mean, let the reduction average (op=ReduceOp.AVG, or a division after it)."
    steps, factor = case.context.num_accumulation, case.pattern.factor
    lacks = steps > 1 and abs(factor / steps - 1) <= max(2 * case.pattern.tolerance, 1e-6)
    return f" For that mean, divide each loss by the {steps} accumulation steps." if lacks else ""


def _means_of_ranks(case: Case) -> str:
    """How ranks weigh whose gradients are means of their microbatches' means; "" where they are not."""
    by_key = case.context.contributions.by_key
    tokens, passes = defaultdict[int, int](int), Counter(key[0] for key in by_key)
    for key, one in by_key.items():
        tokens[key[0]] += one.num_tokens or 0
    if case.context.objective != DEFAULT_OBJECTIVE or not all(one.num_tokens for one in by_key.values()):
        return ""
    alike = sum(tokens.values()) / len(passes)

    def holds(of_rank: Mapping[int, float]) -> bool:
        return all(
            abs(cell.ratio * passes[cell.key[0]] * (by_key[cell.key].num_tokens or 0) / of_rank[cell.key[0]] - 1)
            <= 2 * cell.margin / max(abs(cell.ratio), 1e-12)
            for _, cell in case.cells
        )

    if holds(tokens):
        return "what follows the losses weighs ranks by their tokens"
    if len(set(passes.values())) > 1 and holds(dict.fromkeys(passes, alike)):
        return "all ranks weigh as much, whatever tokens and however many microbatches they have"
    return ""


def is_another_objective(case: Case) -> bool:
    """Whether the weights are those of another objective to the last digit, and nobody said which one is meant."""
    exactly = abs(case.pattern.factor - 1) <= max(2 * case.pattern.tolerance, 1e-6)
    return exactly and case.context.objective_from.startswith(("assumed", "inferred"))


def is_sum(case: Case) -> bool:
    """Whether every token weighs 1 where the mean over all is asked for, and nobody said which one is meant."""
    context = case.context
    if case.pattern.kind != "uniform" or not context.objective_from.startswith(("assumed", "inferred")):
        return False
    tokens = context.quantities.get("num_tokens", 0.0) if context.objective in TOTALS else 0.0
    return tokens > 0 and abs(case.pattern.factor / tokens - 1) <= max(2 * case.pattern.tolerance, 1e-6)


def severity(case: Case) -> Severity:
    return "warning" if is_another_objective(case) else "error"


def follows(case: Case, objective: str) -> str:
    if not is_another_objective(case):
        times = factor_in_words(case) if abs(case.pattern.factor - 1) > max(2 * case.pattern.tolerance, 1e-6) else ""
        summed = f" {words}" if (words := summed_means(case)) else ""
        more = f" times {times}, and no later event makes up for that factor" if times and not summed else ""
        more = f" times {times}" if times and summed else more
        return f"The weights are those of {objective}{more}.{summed}"
    return f"The gradient follows {objective} exactly. Nobody declared whether that is intended."


def spread(case: Case) -> str:
    """How far tokens are over- and under-weighted in this run, against the mean over all tokens."""
    ratios = {cell.key: cell.ratio for _, cell in case.cells}
    counts = sorted({c.num_tokens or 0 for c in case.context.contributions.by_key.values()})
    over = sorted(ratio for ratio in ratios.values() if ratio > 1)
    under = sorted((ratio for ratio in ratios.values() if ratio < 1), reverse=True)
    parts = [
        f"{name} by x {side[-1]:.4g} at most (median {median(side):.4g})"
        for name, side in (("over-weighted", over), ("under-weighted", under))
        if side
    ]
    return (
        f"Against {case.context.objective}, this run's tokens are {' and '.join(parts)}; microbatches hold "
        f"{float(counts[0]):.6g} to {float(counts[-1]):.6g} tokens."
    )
