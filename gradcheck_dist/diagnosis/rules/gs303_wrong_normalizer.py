"""The loss is normalised by the wrong constant, and nothing later makes up for it.

## What it does
Finds losses whose weight per token is off by the same factor for every contribution from the very start: a division
missing (x N, x K), done twice (x 1/K), or by the wrong degree (x tp * cp). Also losses that are divided by the number
of labels L_c of each microbatch, padding included, as `(loss_of_tokens * mask).mean()` does, or each row by its padded
length T_c, and losses that are means over their own n_c tokens before something that divides by all tokens, as behind
sums, and means that are weighed by counts of more tokens than enter them (labels that were counted before their shift).

One fixed length for each sequence, which is no row's, leaves the verdict open where several steps show it and nobody
declared an objective: it may be meant (Dr. GRPO).

## Why it matters
A constant factor is what Adam and clipping hide best. It moves the clip threshold, weight decay's and epsilon's share,
and it changes whenever the number it is made of changes.

## Example
    loss = trainer.compute_loss(batch) / accumulation_steps    # compute_loss has divided by all tokens already

## Fix
Keep the whole normalisation on one line, next to the loss, and take out the other division; the factor's name says
which number was used once too often or not at all.

## References
- huggingface/transformers#35808, #39648; huggingface/accelerate#3533; pytorch/torchtitan#2972; deepspeed#7839.
"""

from __future__ import annotations

from math import log2

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.causes.case import Case, ambiguous
from gradcheck_dist.diagnosis.causes.experiments import between_names
from gradcheck_dist.diagnosis.causes.mending import taken_out
from gradcheck_dist.diagnosis.causes.vocabulary import RANKS, SCHEDULE, TOKENS, is_scale
from gradcheck_dist.diagnosis.rules.gs104_wrong_divisor import summed_means, undivided_means
from gradcheck_dist.diagnosis.rules.gs301_mean_of_means import IS_SUM, SUM_MEANT, is_sum
from gradcheck_dist.diagnosis.weights.context import EVALUATED, LOSS_SCALE, StepContext
from gradcheck_dist.diagnosis.weights.extra_counts import extra_counts
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Reduce
from gradcheck_dist.ledger.expected import TOTALS
from gradcheck_dist.ledger.reductions import nominal_factor
from gradcheck_dist.wording import plural

CODE = "GS303"
NAME = "wrong-normalizer"
EXACT = 1e-4
VAGUE = 0.02
"""Tokens: with less certainty, any number is near to a whole one."""
FEW = 8
"""Counts that are larger by more than this are no counts of the same tokens."""
MANY = 2
"""Tokens to each that was counted: what counts as one is no longer a token, but a sequence or a row."""
GLOBAL = "global-token-mean"
NAMED = (
    "Correct the normalisation where the loss is computed: the factor's name says which number is used once too often "
    "or is missing."
)
UNDIVIDED = "Divide the sum by the tokens of the whole step, of all ranks and accumulation steps{times}{instead}."
TWICE = (
    "Divide by the accumulation steps once: on the loss's own line, or in the backward of a framework that divides by "
    "itself (accelerate, Lightning, DeepSpeed), not in both."
)
NEVER = (
    "Divide the loss by the accumulation steps: neither the lines that compute it nor the framework's backward does, "
    "or something multiplies by them again."
)
SCALED = (
    "Step with scaler.step(optimizer), for every optimizer, or call scaler.unscale_(optimizer) before what reads its "
    "gradients and steps: a GradScaler's scale stays in them until then."
)
A_SCALE = (
    "{number} is 2^{exponent}, as loss scales are: divide gradients by it before a clip and the optimizer read them, "
    "or do not multiply the loss by it."
)
EVERY = (
    "Let every loss that is counted go backward (is backward() inside of the loop over microbatches?), or count the "
    "tokens of those alone that do."
)
SHARED = (
    " Or count each token once: {number} ranks that share sequences (context, sequence or tensor parallel) count the "
    "same ones."
)
UNNAMED = "Correct the normalisation where the loss is computed: no degree or count of the step makes this factor."
DIVIDED = (
    "{unnamed} Where {number} is the number of accumulation steps, the optimizer is to step after the last of them: "
    "this step holds {passes}."
)
COUNTED = (
    "Divide by the tokens that enter the loss, and look what was counted as {counted}: padding, labels before a shift, "
    "first and last tokens that one of the two leaves out, or a batch that was skipped. One fixed length for each "
    "sequence, where that is meant, is told by gradcheck_dist.mark_loss(loss_sum / length, num_sequences)."
)
FEWER = (
    "Divide by the tokens that enter the loss, and look what was counted as {counted}: sequences, rows, or a part of "
    "the tokens. A mean over sequences of the sums over their tokens, where that is meant, is told by "
    "gradcheck_dist.mark_loss(loss_sum, num_sequences)."
)


def triggered(context: StepContext) -> bool:
    return bool(context.contributions.by_key) and not context.relative


def judge(case: Case) -> Answer | None:
    if case.terms or case.culprit.kind != "loss" or case.culprit.unrecorded:
        return None
    if case.pattern.count == "L_c^-1":
        return Answer(
            explanation="Each microbatch is divided by all of its labels, those that are ignored or masked too: "
            "padding takes weight from the tokens beside it.",
            fix="Divide by the tokens that count, of the whole step and of all ranks: (labels != ignore_index).sum().",
        )
    if case.pattern.count == "T_c^-1":
        return Answer(
            explanation="The tokens of each row are divided by the row's length, padding included: what a token weighs "
            "hangs on the longest sequence of its microbatch.",
            fix="Divide by the tokens of each sequence that count, mask.sum(-1), or by one number in all microbatches.",
        )
    if case.pattern.kind == "power" and case.pattern.count == "n_c^-1" and abs(case.pattern.factor - 1) <= EXACT:
        return Answer(
            explanation="Each microbatch is divided by its own tokens where its loss is computed, and what follows "
            "divides by the tokens of the whole step as well, as is right for sums.",
            fix="Let the loss be the sum over its tokens: what follows divides by all of them. Or divide nowhere else.",
        )
    if case.pattern.kind == "other" and (more := _counted_too(case)) is not None:
        return more
    if case.pattern.kind != "uniform":
        return None
    factor = case.pattern.factor
    name = f" = {case.names[0].expression}" if case.names else ""
    equal = [*case.names[:1], *ambiguous(case.names, near=False)]
    if case.context.of_means:
        in_pipeline = case.context.axes.get("pp", 1) > 1
        passes = "microbatches, and of accumulation steps," if in_pipeline else "accumulation steps,"
        return Answer(
            explanation="The losses are means that count nothing: together they weigh "
            f"x {factor:.6g}{name} of what one mean of them would. Passes of one loop, one after the other, are added "
            "up, and the program multiplies them by no further number that could be a coefficient: a division is "
            f"{'missing' if factor > 1 else 'one too many'}.",
            fix=f"Divide each loss by the number of {passes} and let the reduction average over the data ranks, each "
            "once. Where a sum of means is intended, gradcheck_dist.mark_loss(loss_sum, num_samples) tells what they "
            "count.",
            suggested_experiment=between_names(case.context, equal),
        )
    if means := summed_means(case):
        return Answer(
            explanation=f"{means} These losses count their tokens, and not those of the other ranks: every token "
            f"enters backward with x {factor:.6g}{name} of the weight that {case.context.objective} asks for.",
            fix="Divide by the tokens of all ranks (all-reduce their count), or let the reduction average.",
            suggested_experiment=between_names(case.context, equal),
        )
    undivided, divide = undivided_means(case)
    if undivided:
        return Answer(
            explanation=f"{undivided} Every token enters backward with x {factor:.6g}{name} of the weight that "
            f"{case.context.objective} asks for.",
            fix=divide,
            suggested_experiment=between_names(case.context, equal),
        )
    if adds_up := _adds_up(case):
        text, averages = adds_up
        return Answer(
            explanation=f"Every token enters backward with x {factor:.6g} of the weight that "
            f"{case.context.objective} asks for. {text}",
            fix=f"Divide the loss by the tokens of all ranks and multiply it by nothing, or {averages}."
            if case.context.objective == GLOBAL
            else f"{averages[0].upper()}{averages[1:]}, or divide each loss by {factor:.6g} as well.",
            suggested_experiment=between_names(case.context, equal),
        )
    counted = None if case.names else _counted(case)
    if case.names:
        told = None if len(equal) > 1 else _told(dict(case.names[0].powers))
        fix = told or taken_out(equal, "each loss", "the losses") or NAMED
        fix += _counted_by_several(case) if told in (None, TWICE) else ""
    else:
        fix = _without_name(case) if counted is None else _count(case, counted)
    summed = is_sum(case)
    as_if = "" if counted is None else f": as if the step had {counted} tokens, where {_tokens(case):g} enter the loss"
    if case.names and dict(case.names[0].powers).get(EVALUATED) == -1:
        evaluated = case.context.quantities[EVALUATED]
        as_if = f": {evaluated:g} tokens have a loss in this step, and those of {_tokens(case):g} go backward"
    if counted is not None and (of_loss := _at_loss(case, counted)) is not None:
        behind = counted // of_loss
        if _far(counted, case) > _far(of_loss, case) ** 2:  # one wrong number is likelier than two, if both are near
            as_if += f". The loss divides by {of_loss} of them, and what follows by {behind}, which nothing undoes"
            fix = f"Multiply the loss by {behind}. " + (COUNTED if of_loss > _tokens(case) else FEWER).format(
                counted=of_loss
            )
        else:
            as_if += f", or {of_loss}, if nothing is meant to undo the division by {behind} that follows"
    return Answer(
        explanation=f"Every token enters backward with x {factor:.6g}{name} of the weight that "
        f"{case.context.objective} asks for, and no later event makes up for it{as_if}.{IS_SUM if summed else ''}",
        fix=f"{fix}{SUM_MEANT if summed else ''}",
        suggested_experiment=between_names(case.context, equal),
    )


def _count(case: Case, counted: int) -> str:
    """What mends a division by another number than what enters the losses."""
    if case.context.of_samples:
        return f"Divide by the sequences of the whole step, on all ranks, and look what was counted as {counted}."
    return (COUNTED if case.pattern.factor < MANY else FEWER).format(counted=counted)


def _adds_up(case: Case) -> tuple[str, str] | None:
    """What is said of a sum over as many ranks as the losses are multiplied by, and what makes an average of it; None
    where there is none, and where a documented division, or one of the program's lines, makes an average of it."""
    sums = [
        event
        for held in case.held
        for entry in held.replay.history(held.rank)
        if isinstance(event := entry.event, Reduce) and not event.replicate_group and len(event.group) > 1
        if (event.op == "sum" and nominal_factor(event) == 1) or (event.op == "unknown" and event.hook is not None)
    ]
    sizes = {len(event.group) for event in sums}
    tolerance = max(EXACT, 2 * case.pattern.tolerance)
    if len(sizes) != 1 or abs(case.pattern.factor / max(sizes) - 1) > tolerance:
        return None
    if any(abs(cell.ratio * max(sizes) / (cell.root_ratio or 1) - 1) <= tolerance for _, cell in case.cells):
        return None
    event, size = min(sums, key=lambda event: event.seq), max(sizes)
    place = f" at {event.site.short}" if event.site is not None else ""
    what = f"The communication hook {event.hook}" if event.hook is not None else f"The reduction{place}"
    return (
        f"{what} adds up the gradients of {size} ranks: losses that are multiplied by this number ask for an average.",
        f"let the hook divide by {size}" if event.hook is not None else "let the reduction average",
    )


def _at_loss(case: Case, counted: int) -> int | None:
    """What the losses themselves divide by, where that is a whole part of what the weights are divided by in all."""
    weights = {one.weight for one in case.context.contributions.by_key.values()}
    divisors = {
        round(1 / weight) for weight in weights if weight and abs(1 / weight - round(1 / weight)) < EXACT / weight
    }
    if len(divisors) != 1 or None in weights:
        return None
    (divisor,) = divisors
    whole = 0 < divisor < counted and counted % divisor == 0 and divisor != _tokens(case)
    return divisor if whole and counted // divisor in case.context.quantities.values() else None


def _far(counted: int, case: Case) -> float:
    """How many times as many as enter the loss were counted, or how many times fewer."""
    return max(counted / _tokens(case), _tokens(case) / counted)


def _counted_too(case: Case) -> Answer | None:
    """Means that are weighed by counts of more tokens than enter them, which fit every weight."""
    contributions = case.context.contributions
    if case.context.objective != GLOBAL or (extra := extra_counts(contributions)) is None:
        return None
    tokens = {key: one.num_tokens or 0 for key, one in contributions.by_key.items()}
    total, counted = sum(tokens.values()), sum(tokens.values()) + sum(extra.values())
    cells = [cell for _, cell in case.cells]
    ratios = {key: (tokens[key] + more) / tokens[key] * total / counted for key, more in extra.items()}
    if {cell.key for cell in cells} != extra.keys():
        return None
    if any(abs(cell.ratio - ratios[cell.key]) > 2 * cell.margin for cell in cells):
        return None
    told = in_short([f"{tokens[key] + extra[key]} for {tokens[key]}" for key in sorted(tokens)])
    return Answer(
        explanation=f"The weights are those of means that are multiplied by counts of more tokens than enter them: "
        f"{told}, together {counted} for {total}. Passes with few tokens weigh more than their share.",
        fix="Count the tokens that enter the loss, of each pass and of all: after the shift of the labels, without "
        "the first label of each sequence, and without padding.",
    )


def _without_name(case: Case) -> str:
    if is_scale(case.pattern.factor, log2(1 + EXACT)):
        return A_SCALE.format(number=f"{case.pattern.factor:.0f}", exponent=round(log2(case.pattern.factor)))
    number = 1 / case.pattern.factor if case.pattern.factor > 0 else 0.0
    if number < 1.5 or abs(number - round(number)) > EXACT * number:
        return UNNAMED
    divided = DIVIDED.format(
        unnamed=UNNAMED, number=round(number), passes=plural(case.context.num_accumulation, "backward pass")
    )
    return divided + _counted_by_several(case)


def _counted_by_several(case: Case) -> str:
    """What is said where each token may have been counted by several ranks; "" where the run has not as many."""
    number = 1 / case.pattern.factor if case.pattern.factor > 0 else 0.0
    whole = round(number) > 1 and abs(number - round(number)) <= EXACT * number
    own_mean = getattr(case.event, "reduction", "mean") == "mean"  # no number that the program counted
    if own_mean or not whole or case.context.world_size % round(number) or not _tokens(case):
        return ""
    return SHARED.format(number=round(number))


def _told(powers: dict[str, int]) -> str | None:
    """What mends a factor of a name whose cause is known; None where it is not."""
    over = powers.keys() - {TOKENS}
    if powers.get(TOKENS) == 1 and over <= RANKS | SCHEDULE and all(powers[name] == -1 for name in over):
        ranks, passes = (" * ".join(sorted(over & of)) for of in (RANKS, SCHEDULE))
        times = f", times the {ranks} over which the reduction averages" if ranks else ""
        return UNDIVIDED.format(times=times, instead=f", in place of {passes}" if passes else "")
    if powers.get(LOSS_SCALE) == 1:
        return SCALED
    if powers.get(EVALUATED) == -1:
        return EVERY
    steps = powers.get("accumulation_steps") if len(powers) == 1 else None
    return {-1: TWICE, 1: NEVER}.get(steps or 0)


def _tokens(case: Case) -> float:
    """The tokens of the step that enter the loss, 0 where they are not known."""
    return case.context.quantities.get("num_tokens", 0.0)


def _counted(case: Case) -> int | None:
    """The number of tokens that would give this weight to each, where one near to those of the step does."""
    tokens, tolerance = _tokens(case), case.pattern.tolerance
    factor = case.pattern.factor
    if case.context.objective not in TOTALS or not tokens or not factor > 0:
        return None
    if any(abs(one - round(one)) <= max(EXACT, 2 * one * tolerance) for one in (factor, 1 / factor) if one >= 1):
        return None  # twice, or a third: a number that is used once too often, more likely than a count
    number = tokens / factor
    near = abs(number - round(number)) <= max(2 * number * tolerance, EXACT)
    sure = number * tolerance <= VAGUE and 2 <= round(number) <= tokens * FEW
    return round(number) if near and sure and round(number) != tokens else None
