"""A loss function's own backward does not give the derivative of the loss that it computes.

## What it does
Watches functions of somebody's own (torch.autograd.Function) that are given labels and give a cross-entropy for each,
or on CPU one sum of them: over shards of the vocabulary (one for each), fused with the output layer, in chunks. On
some labels the loss is compared with logsumexp(z) - z[label], and what backward gives with softmax(z) - onehot(label)
times the gradient that arrived. Where the loss fits and backward gives a multiple, or has the same weight whatever
arrives, all tokens of that loss weigh something else than the loss says. A backward that gives all labels of a call one
weight, whatever arrives for each, is found too; a gradient that is no multiple at all is a warning.

Where such a function is given the output layer's weight, the gradient of that is looked at, too: of logits x W^T,
<dx, x> equals <dW, W>, whatever is computed from them. A weight whose gradient has another size is found.

A multiple is found only where it makes weights wrong. A backward that divides by the number of tokens under a loss that
is summed makes them right, and is told as a remark. A loss that is no plain cross-entropy (smoothed labels, a z-loss, a
focal factor) is not judged.

## Why it matters
A kernel that computes its gradients in forward may forget the gradient that arrives: right while it is 1, and wrong as
soon as the loss is divided by accumulation steps or tokens, or multiplied by a loss scale. The loss curve does not
show it.

## Example
    class FusedCrossEntropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, labels):
            ctx.save_for_backward(logits.softmax(-1) - one_hot(labels))
            return logits.logsumexp(-1) - picked(logits, labels)
        @staticmethod
        def backward(ctx, grad_output):
            return ctx.saved_tensors[0], None              # grad_output is lost

## Fix
Multiply by the gradient that arrives, once, and hold the function with `torch.autograd.gradcheck` in a unit test.
Where ranks hold shards of the vocabulary, each returns the part of its own: a sum over ranks in backward is too many.

## References
- linkedin/Liger-Kernel#968, #1298, NVIDIA-NeMo/Automodel#3853: all labels are multiplied by the first one's gradient.
- unslothai/unsloth-zoo#434: gradients computed in forward, under a loss that DDP scales.
- modelscope/ms-swift#9947: shards of the vocabulary that do not hold the label get a wrong gradient.
- Megatron-LM, arXiv 1909.08053, section 3 (cross-entropy over shards of the vocabulary).
- Liger Kernel, arXiv 2410.10989 (fused linear cross-entropy, whose gradients are computed in forward).
- torch.autograd.gradcheck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import msgspec

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Factor
from gradcheck_dist.diagnosis.weights.factors import exact_fraction, name_number
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import GradientCheck
from gradcheck_dist.ledger.loss_backwards import FLAT, OTHER, SCALED, UNIFORM, OwnBackward, could_judge
from gradcheck_dist.ledger.own_heads import OwnHead, own_heads

CODE = "GS803"
NAME = "wrong-loss-backward"


def could_audit(facts: StepFacts) -> bool:
    return could_judge(facts.data.events)


def audit(facts: StepFacts) -> Iterator[Remark]:
    verified = {
        event.function
        for events in facts.data.events.values()
        for event in events
        if isinstance(event, GradientCheck) and event.outcome == "wrong"
    }  # told by GS801, along a whole direction
    yield from _of_losses(facts, verified)
    yield from _of_weights(facts, verified | {one.first.function for one in facts.own_backwards})


def _of_losses(facts: StepFacts, told: set[str]) -> Iterator[Remark]:
    alike: dict[tuple[object, ...], list[OwnBackward]] = defaultdict(list)
    for one in facts.own_backwards:
        if one.first.function not in told:
            alike[one.first.function, str(one.first.defined_at), one.kind].append(one)
    for found in alike.values():
        first = found[0]
        event = first.first
        name = _name(first, facts)
        factor = Factor(observed=None)
        if first.factor is not None:
            exact = exact_fraction(first.factor, 2 * first.tolerance)
            factor = Factor(observed=first.factor, exact=exact, expression=name or None, tolerance=first.tolerance)
        yield Remark(
            answer=Answer(
                explanation=_explain(found, _BESIDE if facts.found else ""),
                fix=_fix(first, name),
                severity="warning" if first.kind == OTHER else "error",
            ),
            pattern=_pattern(first),
            params=frozenset(held.param for held in facts.held),
            ranks=tuple(sorted({one.rank for one in found})),
            rank=first.rank,
            event=msgspec.structs.replace(event, site=event.defined_at or event.site),
            factor=factor,
            effect=facts.effect_of_backwards if first.is_multiple else None,
        )


def _of_weights(facts: StepFacts, told: set[str]) -> Iterator[Remark]:
    """Of functions whose hidden states get what they are owed, and whose weight does not."""
    alike: dict[tuple[str, str], list[OwnHead]] = defaultdict(list)
    for one in own_heads(facts.data.events):
        if one.first.function not in told:
            alike[one.first.function, str(one.first.defined_at)].append(one)
    keys = {(rank, track.param.id): key for key, of_key in facts.data.tracks.items() for rank, track in of_key.items()}
    for found in alike.values():
        first, event = found[0], found[0].first
        params = {
            keys[one.rank, param]
            for one in found
            for param in facts.data.params_of(one.rank, one.first.params)
            if (one.rank, param) in keys
        }
        low, high = min(one.factors[0] for one in found), max(one.factors[1] for one in found)
        alone = first.factor is not None and all(one.factor is not None for one in found)
        number = first.factor if alone and high - low <= first.tolerance * max(abs(low), abs(high)) else None
        off = f"x {number:.6g}" if number is not None else f"x {low:.6g} to {high:.6g}"
        names = in_short(sorted({key[1] for key in params})) or "the weight"
        yield Remark(
            answer=Answer(
                explanation=f"{event.function} computes its losses from hidden states x and the weight W ({names}) "
                "by x W^T alone, so that the sums of dx * x and of dW * W are equal. What its backward gives for the "
                f"weight is {off} of what it gives for the hidden states"
                + (": for the weight it passes by the gradient that arrives." if first.passed_by else "."),
                fix=f"Multiply what the backward of {event.function} returns for the weight by the gradient that "
                "arrives, each label's row by its own before rows are summed, as for the hidden states. "
                "`torch.autograd.gradcheck`, with a loss that is divided by some number, holds it.",
                severity="error",
            ),
            pattern=f"the gradient that {event.function} gives {names} is {off} of the hidden states'",
            params=frozenset(params) or frozenset(held.param for held in facts.held),
            ranks=tuple(sorted({one.rank for one in found})),
            rank=first.rank,
            event=msgspec.structs.replace(event, site=event.defined_at or event.site),
            factor=Factor(observed=number, tolerance=first.tolerance if number is not None else None),
        )


def _pattern(first: OwnBackward) -> str:
    function = first.first.function
    if first.kind == OTHER:
        return f"the gradients of {function} are another than its loss's"
    if first.kind == UNIFORM:
        return f"the gradients of {function} weigh all labels of a call alike, whatever arrives for each"
    if _is_passed_by(first):
        return f"the gradients of {function} weigh {first.given:.6g}, whatever arrives"
    return f"the gradients of {function} are x {first.factor:.6g} of its loss's"


def _is_passed_by(first: OwnBackward) -> bool:
    """Whether the gradient that arrives has no say. Where it is one number everywhere, a weight of 1 tells."""
    return first.kind == FLAT or (first.kind == SCALED and abs(first.given - 1) <= first.tolerance)


def _name(first: OwnBackward, facts: StepFacts) -> str:
    """The degree or count that the factor is."""
    if first.factor is None or first.factor <= 0:
        return ""
    names = name_number(first.factor, facts.context.quantities, first.tolerance, max_factors=1)
    return names[0].expression if len(names) == 1 else ""


_BESIDE = " The table's weights are those that arrive at the loss."


def _explain(found: list[OwnBackward], table: str) -> str:
    first = found[0]
    event = first.first
    called = f" (called at {event.site.short})" if event.site else ""
    owed = (
        f"Each loss of {event.function}{called} is a cross-entropy, so its logits are owed softmax minus onehot, times "
        "what arrives. "
    )
    if first.kind == OTHER:
        return owed + f"Of what its backward gives {first.rest:.0%} is no multiple of that."
    if first.kind == UNIFORM:
        return owed + (
            "Different weights arrive for the labels of one call, and its backward gives all of them one: weights and "
            "masks that the loop puts on single labels are lost."
        )
    low, high = min(one.arrived[0] for one in found), max(one.arrived[1] for one in found)
    varies = high - low > first.tolerance * abs(high)
    arrived = f"{low:.6g} to {high:.6g}" if varies else f"{low:.6g}"
    given = f"{first.given:.6g}" if first.factor is None or not varies else f"x {first.factor:.6g} of that"
    by = ": backward passes it by" if _is_passed_by(first) else ""
    return owed + f"Arrived is {arrived}, given is {given}{by}.{table}"


def _fix(first: OwnBackward, name: str) -> str:
    function = first.first.function
    hold = "`torch.autograd.gradcheck`, with a loss that is divided by some number, holds it."
    if first.kind == OTHER:
        return (
            f"Look at what the backward of {function} returns for its first differentiable input: labels of other "
            "ranks' shards and ignored ones, the sign, the label's own entry. `gradcheck run --verify` and "
            "`torch.autograd.gradcheck` hold it."
        )
    if first.kind == UNIFORM:
        return (
            f"Multiply each label's row of what the backward of {function} returns by that label's own gradient, not "
            f"by one of them, and before rows are summed for a weight. {hold}"
        )
    if _is_passed_by(first):
        return f"Multiply what the backward of {function} returns by the gradient that arrives, for every input. {hold}"
    known = f" ({name})" if name else ""
    factor = f"{first.factor:.6g}{known}"
    return f"Take the factor {factor} out of the backward of {function}, or bring in its inverse. {hold}"
