"""An optimizer has parameters that the model had once, and steps nothing.

## What it does
Notes parameters that are trained (backward gives them gradients), that no optimizer has, and that have not moved since
they were first seen, in the place of others that an optimizer was given and that have neither a gradient nor a state
there. What replaces parameters behind an optimizer's back: `fully_shard`, `parallelize_module`,
`load_state_dict(assign=True)`, `to_empty`, a layer or a weight that a line sets; FSDP2 itself, where an optimizer is
made between a forward and a backward pass, of what the root has gathered. An optimizer that is handed gradients
at its own copies is not meant, and neither is who updates parameters by hand.

## Why it matters
These parameters keep their initial values, whatever the loss asks for, and `optimizer.zero_grad()` empties the
gradients of the old ones: the new ones' grow from step to step. Where it is all of them, the loss stays where it is;
where it is the head alone, the rest learns around it.

## Example
    optimizer = torch.optim.AdamW(model.parameters())
    fully_shard(model)                              # its parameters are DTensors from here on

## Fix
Make the optimizer behind everything that replaces parameters:

    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

## References
- torch/distributed/fsdp/_fully_shard/_fsdp_param.py, measured with torch 2.13; pytorch/tutorials#2522 (assign=True).
- pytorch/pytorch#149205 (an optimizer made behind a forward pass of FSDP2 has what that gathered);
  intelligent-machine-learning/dlrover#584; huggingface/accelerate#3209.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradcheck_dist.diagnosis.answer import Answer
from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import ReplacedParameters
from gradcheck_dist.ledger.tracks import ParamKey
from gradcheck_dist.wording import plural

CODE = "GS707"
NAME = "replaced-parameters"
STALE = "GS402"
UNEXPLAINED = "GS000"


def could_audit(facts: StepFacts) -> bool:
    return any(True for _ in facts.events_of(ReplacedParameters))


def audit(facts: StepFacts) -> Iterator[Remark]:
    trained = facts.trained_on(facts.data.events.keys())
    params: set[ParamKey] = set()
    found: list[tuple[int, ReplacedParameters]] = []
    for rank, event in facts.events_of(ReplacedParameters):
        if on_rank := facts.params_in(rank, event.params) & trained:
            params |= on_rank
            found.append((rank, event))
    if not found:
        return
    rank, first = found[0]
    shown = in_short(sorted(name for _, name in params))

    def follows(finding: Finding) -> bool:
        """Whether a finding is that gradients which nobody reads stay there, or come to nothing."""
        nothing = finding.code == UNEXPLAINED and finding.factor.observed == 0
        return (nothing or finding.code == STALE) and finding.num_parameters <= len(params)

    is_one = len(params) == 1
    yield Remark(
        answer=Answer(
            explanation=f"{shown} {'is' if is_one else 'are'} trained, and no optimizer has "
            f"{'it' if is_one else 'them'}: the optimizer was made with what the model held before, which gets no "
            "gradient any more. "
            f"{'It keeps its initial value' if is_one else 'They keep their initial values'}, and the optimizer's "
            "zero_grad() does not empty what backward adds up there.",
            fix="Make the optimizer behind everything that replaces parameters (fully_shard, parallelize_module, "
            "load_state_dict(assign=True), to_empty, layers that are exchanged) and, with FSDP2, in front of the first "
            "forward pass; or give it the new ones.",
        ),
        pattern=f"{plural(len(params), 'parameter')} in the place of what the optimizer has",
        params=frozenset(params),
        ranks=tuple(sorted({rank for rank, _ in found})),
        rank=rank,
        event=first,
        explains=follows,
    )
