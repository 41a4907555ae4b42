"""The backward of a collective is not the transpose of its forward.

## What it does
Compares what a function that combines the ranks' activations (an all-reduce, an all-gather, a reduce-scatter, an
all-to-all in tensor, sequence, context or expert parallelism, a ring of neighbours) did in forward with what its
backward did to the gradients. Both are measured on a few elements of all ranks. A sum that every rank goes on with
alike hands the gradient on; where ranks go on differently with it, their gradients are summands and have to be added
up; what was gathered is reduce-scattered, what was exchanged is exchanged back. Data ranks that each compute one whole
loss on what they gathered have shares of its gradient, of which an average over them is not the sum.

## Why it matters
All layers in front of that function learn from another gradient than the loss's: a part of it where a sum is missing,
a multiple where a sum is taken twice, once more for each layer, another token's where nothing is sent back. What
arrives at each parameter is reduced and scaled as it should be, so nothing else shows it.

## Example
    class Gather(torch.autograd.Function):         # keys and values of all context-parallel ranks
        @staticmethod
        def forward(ctx, x):
            return all_gather(x)
        @staticmethod
        def backward(ctx, grad):
            return grad.chunk(world_size, 1)[rank]  # what the other ranks' queries want of x is lost

## Fix
    all-reduce       <->  nothing, where all ranks go on alike; else all-reduce
    nothing          <->  all-reduce, where ranks go on with shards (Megatron-LM's f)
    all-gather       <->  slice, where all ranks go on alike; else reduce-scatter
    reduce-scatter   <->  all-gather
    all-to-all       <->  all-to-all, sizes of both sides swapped
    send to the next <->  send to the one before (a ring)
A DTensor that lies in copies and goes on as a plain tensor hands on what arrives, unless it is told to sum it
(`to_local(grad_placements=[Partial()])`).
torch.distributed.nn.functional.all_reduce sums in backward too, and so do torch's functional collectives since 2.13:
right for losses that the ranks add up, and once too much for one loss that all of them compute. Where ranks should go
on alike and do not, look behind the function: a column-parallel layer without its all-reduce in backward, dropout from
unlike seeds.

## References
- Megatron-LM, arXiv 1909.08053, section 3 (f and g), and arXiv 2205.05198 (sequence parallelism).
- pytorch/pytorch#58005 (gradients of torch.distributed.nn.functional.all_reduce); mlfoundations/open_clip#616.
- torch/distributed/tensor/_api.py, _ToTorchTensor (what `to_local` takes a gradient for).
- torch/distributed/nn/functional.py, _AllGather.backward: on gloo it receives into `empty_like` of gradients, whose
  memory need not be in order (torch 2.13; seen with keys that attention transposes).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.exchange_consequences import consequences, unsummed
from gradcheck_dist.diagnosis.audits.exchanges import Faulty, could_judge, faults, of_whole
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Factor, Finding
from gradcheck_dist.events import HANDED_ON, HANDED_ON_SUMMED, OF_SHARDS, OF_SUMMANDS, SAID_ALIKE
from gradcheck_dist.ledger.exchanges import COPY, GATHER, MASK, MOVE, OWN, OWN_PART, SCATTER, SLICE, SUM, SWAP
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.wording import numbered, plural

CODE = "GS802"
NAME = "unpaired-collective"
UNSUMMED = "GS703"
_DOES = {
    SUM: "sums the ranks' inputs",
    COPY: "hands its input on",
    GATHER: "gathers the ranks' inputs",
    SCATTER: "sums the ranks' inputs and leaves each rank a part",
    SLICE: "leaves each rank a part",
    SWAP: "exchanges parts between all ranks",
    MASK: "leaves each rank some elements of what all of them hold, and zeros in place of the others",
    MOVE: "sends each rank's tensors to another rank",
    OWN: "hands its input on, which is another one on each rank",
    OWN_PART: "leaves each rank a part of its input, which is another one on each rank, and sums nothing",
}
_OWES = {
    SUM: "hand on what arrives, or sum it over the ranks where they go on with the result differently",
    COPY: "sum what arrives over the ranks where they go on differently, else hand it on",
    GATHER: "reduce-scatter what arrives, or take the own part of it where all ranks go on alike",
    SCATTER: "all-gather what arrives",
    SLICE: "all-gather what arrives",
    SWAP: "exchange what arrives back, with the sizes of both sides swapped",
    MASK: "take out what arrives at the zeros, and sum what is left over the ranks",
    MOVE: "send what arrives back to the rank that the tensor came from",
    OWN: "hand on what arrives, or sum it over the ranks alone that hold the same input (another process group)",
    OWN_PART: "give zeros to the other parts. If the inputs are summands, it is forward that is wrong: sum them over "
    "the ranks before each takes its part (reduce-scatter)",
}


def could_audit(facts: StepFacts) -> bool:
    return could_judge(facts.data)


def audit(facts: StepFacts) -> Iterator[Remark]:
    alike: dict[tuple[object, ...], list[Faulty]] = defaultdict(list)
    for fault in faults(facts.data, facts.contributions, facts.wholly_right).found:
        alike[fault.place].append(fault)
    following = consequences(facts.data, alike)
    for place, found in alike.items():
        if any(place in later for later in following.values()):
            continue
        first, event = found[0], found[0].passed.first
        ranks = tuple(sorted({rank for one in found for rank in one.passed.ranks}))
        parts = first.passed.outcome in ("own", "unlike") and first.shared and UNSUMMED in facts.found
        yield Remark(
            answer=Answer(
                explanation=f"{first.name} {_DOES[first.passed.forward]} ({first.where}; "
                f"{numbered('rank', ranks)}). {_what(first)} Measured in "
                f"{plural(len(found), 'application')} of this step."
                + _followed_by([alike[later][0] for later in following.get(place, ())]),
                fix=(
                    _whole(first)
                    if first.share is not None
                    else _KEPT
                    if first.passed.outcome == "kept"
                    else _DECLARE[first.passed.first.operation]
                    if first.passed.first.operation in _DECLARE
                    else _SUM_BEHIND
                    if parts
                    else (_UNLIKE_LOSSES if first.passed.outcome == "own" and first.unlike_losses else "")
                    + (
                        f"{suspect} Else let the backward of {first.name} {_OWES[first.passed.forward]}"
                        f"{_written(first)}, or look behind it for dropout from unlike seeds."
                        if (suspect := _suspect(facts.data, first))
                        else f"Let the backward of {first.name} {_OWES[first.passed.forward]}{_written(first)}."
                        + (_BEHIND if first.passed.outcome == "own" and first.shared else "")
                    )
                    + (_FUNCTIONAL if first.passed.first.operation else "")
                )
                + (_TORCH if _is_torchs(first) and first.passed.outcome == "other" else "")
                + " `gradcheck run --verify` shows which module's gradient is off, and holds the repaired one.",
                severity="warning"
                if (first.passed.outcome in ("own", "kept") and not first.shared) or (first.share or 1) < 1
                else "error",
            ),
            pattern=_pattern(first),
            params=frozenset(),
            ranks=ranks,
            rank=ranks[0],
            event=event,
            factor=Factor(observed=_factor(first)),
            explains=functools.partial(_holds_parts, facts.norms.together(ranks[0]).union(ranks))
            if parts
            else lambda finding: False,
        )


def _followed_by(later: Sequence[Faulty]) -> str:
    if not later:
        return ""
    where = ", ".join(dict.fromkeys(fault.where for fault in later))
    return f" What differs between ranks here differs at {where}, too, which is right where gradients arrive alike."


def _suspect(data: StepData, fault: Faulty) -> str:
    """A function behind it that does nothing, and is where a sum would have to be."""
    idle = unsummed(data, fault.passed.ranks) if fault.passed.outcome == "own" and fault.shared else None
    if idle is None or idle.defined_at is None:
        return ""
    return (
        f"{idle.function} hands on its input, and gives back on each rank what arrives there alone: in front of a "
        f"column-parallel layer its backward has to sum it over these ranks ({idle.defined_at.short})."
    )


def _factor(fault: Faulty) -> float | None:
    return fault.share or (fault.passed.factor if fault.passed.outcome == "scaled" else None)


def _holds_parts(ranks: frozenset[int], finding: Finding) -> bool:
    """Whether a finding is that copies between two such functions got the summands that arrive there. `ranks` train one
    model, of which other stages may lack the same sum."""
    at_a_pass = finding.first_event is not None and finding.first_event.kind == "backward"
    return finding.code == UNSUMMED and at_a_pass and ranks.issuperset(finding.ranks)


_SUM_BEHIND = (
    "Let every layer that goes on with shards (column-parallel; look behind it) sum its input's gradient over these "
    "ranks in backward, as f of Megatron-LM does: parameters in between (norms) hold summands too. Dropout from "
    "unlike seeds looks the same."
)
_BEHIND = (
    " Or, if all ranks should go on alike, look behind it: a column-parallel layer whose backward does not sum its "
    "input's gradient, or dropout from unlike seeds."
)


_UNLIKE_LOSSES = (
    "If these ranks compute one loss, let them go on alike: seed what is drawn behind this line (dropout, noise of a "
    "router) alike on all of them, or sum there what each has a part of. If each has a loss of its own: "
)


_SUMMANDS = (
    "Declare what arrives: to_local(grad_placements=[Partial()]) for the mesh dimension of these ranks, or go on with "
    "the DTensor (use_local_output=False in torch's parallel styles). "
)
_OF_PARTS = _SUMMANDS + (
    "full_tensor takes grad_placements, too. Or, if all ranks should go on alike, look behind it: dropout from unlike "
    "seeds. (Where what others send is a constant on purpose, detach it.)"
)
_DECLARE = {
    HANDED_ON: _SUMMANDS + "Or, if all ranks should go on alike, look behind it: dropout from unlike seeds, labels of "
    "their own.",
    OF_SHARDS: _OF_PARTS,
    OF_SUMMANDS: _OF_PARTS,
    HANDED_ON_SUMMED: "What arrives is whole on each rank, and Partial() has it summed: leave grad_placements out "
    "there, or declare Replicate() for the mesh dimension of these ranks.",
    SAID_ALIKE: "If these are summands, as a row-parallel layer gives them, declare Partial() for the mesh dimension "
    "of these ranks in place of Replicate(), so that they are summed. Else look in front of it for what makes them "
    "differ: dropout from unlike seeds, inputs of their own.",
}


_KEPT = (
    "Gather with a gradient: a torch.autograd.Function whose backward reduce-scatters. (Where every rank computes the "
    "whole loss, putting the own part back is enough; where what others send is a constant on purpose, this is meant.)"
)


def _whole(fault: Faulty) -> str:
    if fault.passed.forward == SLICE:
        return (
            f"Divide what the backward of {fault.name}{_written(fault)} gathers by what the parts have been multiplied "
            "by behind it: by the number of ranks, where the gather sums what each rank's whole loss gives."
        )
    if (fault.share or 0.0) > 1:
        return f"Sum once in the backward of {fault.name}{_written(fault)}, or divide by the number of ranks there."
    return (
        "Gather with a gradient that is summed over ranks (torch.distributed.nn.functional.all_gather does), add "
        "gradients up in place of averaging them, or, where no parameter stands behind the gather, multiply the loss "
        "by the number of ranks."
    )


_TORCH = (
    " It is torch's own, which on gloo exchanges gradients that are not contiguous (of a transposed or sliced tensor) "
    "as if they were: use a function of your own that calls .contiguous() in backward."
)


_FUNCTIONAL = (
    " It is torch's own functional collective, which has had a gradient since torch 2.13, one for ranks that go on "
    "differently: call it in a torch.autograd.Function whose backward does what is owed."
)


def _is_torchs(fault: Faulty) -> bool:
    at = fault.passed.first.defined_at
    return at is not None and at.file.endswith("torch/distributed/nn/functional.py")


def _written(fault: Faulty) -> str:
    at = fault.passed.first.defined_at
    return f" ({at.short})" if at is not None else ""


def _pattern(fault: Faulty) -> str:
    passed = fault.passed
    if fault.share is not None:
        return (
            f"what comes back through {fault.name} is x {fault.share:.6g} of the loss's gradient, when ranks have been "
            "averaged"
        )
    if passed.outcome == "scaled":
        return f"the gradients that come back through {fault.name} are x {passed.factor:.6g}"
    if passed.outcome in ("own", "kept"):
        return f"{fault.name} hands each rank what its own output asks for; the others' share is lost"
    if passed.outcome == "unlike":
        return f"what {fault.name} declares to be copies differs between the ranks"
    return f"what comes back through {fault.name} is another gradient than that of its forward"


def _what(fault: Faulty) -> str:
    passed = fault.passed
    if fault.share is not None:
        if passed.forward == SLICE:
            return f"Here {of_whole(fault)}. What stands behind it has the gradient of its own part."
        return (
            f"Here {of_whole(fault)}. What stands behind it (a temperature, a classifier) has its whole gradient on "
            "each rank, and keeps it."
        )
    if passed.outcome == "kept":
        return (
            "It has no gradient. Each rank put its own part back and goes on to a loss of its own, so its input learns "
            "from that loss alone: what the others' losses want of it is lost."
        )
    if passed.outcome == "own":
        whose = "of one loss" if fault.shared else "of each rank's own loss"
        return (
            f"All ranks hold the result alike, and the gradients {whose} that arrive there differ: they are summands. "
            "Backward gives each rank its own summand, so what the others want of its input is lost to all layers in "
            "front."
            + " The losses are unlike though the labels are the same ones on these ranks."
            * fault.unlike_losses
        )
    if passed.outcome == "scaled":
        size = len(passed.ranks)
        twice = " The gradient is whole on every rank before it is summed again." if passed.whole else ""
        sums = passed.forward in (SUM, COPY, GATHER) and abs(passed.factor / size - 1) < 1e-3
        named = f", the number of ranks: a sum too many.{twice}" if sums else "."
        return f"Backward gives x {passed.factor:.6g} of what its forward's transpose does{named} All in front gets it."
    if passed.outcome == "unlike":
        return (
            "It declares them to be copies (Replicate), and nothing sums them: all behind goes on as if they were, "
            "each rank with what it has or with its part of that."
        )
    if passed.outcome == "mixed" and passed.forward == OWN_PART:
        return (
            "Backward gathers what arrives on all ranks: gradients of other ranks' parts for activations that went "
            "nowhere, as for summands that forward adds up. Inputs that are alike, of which this would be right, "
            "are none here."
        )
    if passed.outcome == "mixed":
        return (
            "Backward adds up over these ranks what belongs to inputs that differ: layers in front get gradients of "
            "other ranks' data for activations of their own."
        )
    if passed.handed_on:
        return "Backward hands on what arrives, though it belongs to other ranks' inputs."
    return "Backward gives something that is no multiple of what its forward's transpose does."
