"""Steps of which nothing was recorded but how many backward passes began in them.

Where judged steps have fewer or more passes than the others, theirs is no usual window (the end of an epoch), and a
loss that divides by the usual number is off by the ratio of both. Where the others differ, they were not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import msgspec

from gradcheck_dist.diagnosis.finding import Candidate, Finding, FirstEvent
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict, cause
from gradcheck_dist.diagnosis.steps.windows import all_off_by, why_and_fix
from gradcheck_dist.events import StepEnd, Unrecorded
from gradcheck_dist.trace.run import Run
from gradcheck_dist.wording import plural

LOSS_RULE = "GS303"
MOST_TOLD = 3


@dataclass(frozen=True)
class Passes:
    """Backward passes that began in each step, on the first rank that has counted any: `judged` by step; `first` and
    `num_steps` of those that were not recorded by their number of passes."""

    judged: Mapping[int, int] = field(default_factory=dict)
    first: Mapping[int, int] = field(default_factory=dict)
    num_steps: Mapping[int, int] = field(default_factory=dict)

    @property
    def unlike(self) -> list[int]:
        """Numbers of passes that no judged step has, the most frequent first."""
        known = set(self.judged.values())
        return sorted((one for one in self.first if one not in known), key=lambda one: -self.num_steps[one])

    @property
    def usual(self) -> int | None:
        """The number of passes that most steps have which were not recorded."""
        most = max(self.num_steps, key=lambda one: self.num_steps[one], default=None)
        return most if most is not None and 2 * self.num_steps[most] > sum(self.num_steps.values()) else None


def passes_of(run: Run, verdicts: Sequence[StepVerdict]) -> Passes:
    judged = {verdict.context.step for verdict in verdicts}
    for _, trace in sorted(run.ranks.items()):
        ends = {
            event.step: event.num_passes
            for event in trace.events
            if isinstance(event, StepEnd) and event.num_passes is not None and event.step in judged
        }
        told = [event for event in trace.events if isinstance(event, Unrecorded)]
        if ends and told:
            first: dict[int, int] = {}
            counts: Counter[int] = Counter()
            for event in told:
                first[event.num_passes] = min(event.first_step, first.get(event.num_passes, event.first_step))
                counts[event.num_passes] += event.num_steps
            return Passes(ends, first, counts)
    return Passes()


def tell_unlike(passes: Passes) -> list[str]:
    """In words: steps with numbers of passes that no judged one has, and how to record one; nothing where numbers
    differ from step to step anyway."""
    unlike, known = passes.unlike, sorted(set(passes.judged.values()))
    if not unlike or len(unlike) > MOST_TOLD or len(known) > MOST_TOLD:
        return []
    have = " or ".join(map(str, known))
    return [
        f"{_steps(passes.num_steps[one])} not recorded {_has(passes.num_steps[one])} {plural(one, 'backward pass')}, "
        f"those judged {have}: --steps {passes.first[one]}:{passes.first[one] + 1} records the first of them"
        for one in unlike
    ]


def tell_unusual(verdicts: Sequence[StepVerdict], passes: Passes) -> None:
    """Lay a step's only finding, on all of its weights, to a loss that divides by the usual number of passes, where no
    judged step has that and the factor is exactly that of both numbers. What was found stays as another candidate.
    Lines that scale gradients by hand keep what was laid to them. No epoch ends in two steps, one behind the other:
    other passes are of another phase then, or of another model."""
    usual = passes.usual
    if usual is None or usual in passes.judged.values() or any(one + 1 in passes.judged for one in passes.judged):
        return
    for verdict in verdicts:
        begun = passes.judged.get(verdict.context.step, usual)
        ratio = Fraction(begun, usual)
        errors = verdict.errors
        loss = verdict.conduct.loss if verdict.conduct is not None else None
        if ratio == 1 or len(errors) != 1 or loss is None:
            continue
        event = errors[0].first_event
        documented = event is not None and event.kind in ("loss", "reduce") and not event.unrecorded
        if documented and all_off_by(verdict, float(ratio)):
            found = _unusual(errors[0], verdict, loss, ratio, passes)
            verdict.findings[verdict.findings.index(errors[0])] = found
            if (effect := verdict.effects.pop(cause(errors[0]), None)) is not None:
                verdict.effects[cause(found)] = effect


def _unusual(found: Finding, verdict: StepVerdict, loss: FirstEvent, ratio: Fraction, passes: Passes) -> Finding:
    factor, accumulated = float(ratio), verdict.context.num_accumulation
    begun, counted = passes.judged[verdict.context.step], passes.usual
    assert counted is not None
    in_each = begun // accumulated if accumulated and begun % accumulated == 0 else 1  # a pipeline's microbatches
    begun, usual = begun // in_each, Fraction(counted, in_each)
    words = f"{plural(begun, 'backward pass')} of {usual}"
    others = [one for one in found.factor.candidates if one.expression != words]
    window, fix = why_and_fix(verdict.context.step, short=ratio < 1)
    first = passes.first[counted]
    also = f" By this step alone it may as well be {others[0].expression} ({found.name})." if others else ""
    return msgspec.structs.replace(
        found,
        code=LOSS_RULE,
        name="wrong-normalizer",
        factor=msgspec.structs.replace(
            found.factor,
            exact=str(ratio),
            expression=words,
            candidates=[Candidate(expression=words, value=factor, exact=str(ratio)), *others],
        ),
        first_event=msgspec.structs.replace(loss, observed_factor=factor),
        explanation=f"{plural(begun, 'backward pass')} {'adds' if begun == 1 else 'add'} up in this step, and {usual} "
        f"in {_steps(passes.num_steps[counted])} not recorded. The loss divides as if there were {usual}: {window}."
        f"{also}",
        fix=fix,
        suggested_experiment=f"record a step of {usual} passes as well, gradcheck run --steps "
        f"{first}:{first + 1}: where that one is right, it is the window",
    )


def _steps(number: int) -> str:
    return f"{plural(number, 'step')} that {'was' if number == 1 else 'were'}"


def _has(number: int) -> str:
    return "has" if number == 1 else "have"
