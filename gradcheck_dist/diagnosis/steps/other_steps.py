"""What the steps that came out right say of one that did not: whether its losses or what follows them are others.

In one step, a loss of half the weight before an average over two ranks, and an average that should not have come, are
the same numbers. Where other steps are right with the same average behind losses of another weight, the losses of this
one are wrong; where the losses are those of the right steps, what follows them is: the line that writes another number
there than in the right steps, where one does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

import msgspec

from gradcheck_dist.diagnosis.causes.case import loss_operation
from gradcheck_dist.diagnosis.finding import Candidate, Finding, FirstEvent
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.named_counts import common_numbers, may_be_a_coefficient
from gradcheck_dist.events import GradWrite, Site
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.wording import plural

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

LOSS_RULE = "GS303"
TOKENS_OF_OTHERS = "num_tokens/num_tokens of step"
"""How the name begins of what divides by the tokens of other steps."""
ALIKE = 1e-3
"""Relative; factors that somebody wrote lie further apart."""
LEAST_STEPS = 3
EXACT, MOST_VAGUE = 1e-5, 1e-3
"""Relative: how near a ratio of token counts must be, and from where on chance would hit one."""


@dataclass(frozen=True)
class Conduct:
    """What all losses of a step weigh, over what they should (`losses`), and by what all that follows them multiplies
    (`rest`): one number each. `token` is what losses give one token. `loss` is one of them, `writes` are those of the
    trainer's own lines that multiply gradients, by file, line and factor, `numbers` those that multiply every pass's
    loss and may be coefficients, by what is written and where."""

    losses: float
    token: float
    rest: float
    loss: FirstEvent | None
    writes: Mapping[tuple[str, int, float], FirstEvent]
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def scales_at(self) -> set[tuple[str, int]]:
        """The lines whose number is not 1."""
        return {(file, line) for file, line, factor in self.writes if factor != 1}


def conduct_of(data: StepData, held: Sequence[Held], contributions: Contributions) -> Conduct | None:
    """What a judged step's losses did, and what follows them; None where that is not the same for all weights."""
    pairs = [(cell.root_ratio, cell.ratio) for one in held for cell in one.cells if cell.expected]
    roots = {root for root, _ in pairs}
    if not pairs or min(roots) <= 0 or max(roots) > min(roots) * (1 + ALIKE):
        return None
    rest = [ratio / root for root, ratio in pairs]
    if min(rest) <= 0 or max(rest) > min(rest) * (1 + ALIKE):
        return None
    expected = next(cell.expected for one in held for cell in one.cells if cell.expected)
    loss, writes, numbers = _loss(contributions), writes_of(data), _numbers(contributions)
    return Conduct(pairs[0][0], pairs[0][0] * float(expected), rest[0], loss, writes, numbers)


def writes_of(data: StepData) -> dict[tuple[str, int, float], FirstEvent]:
    """The trainer's own lines that multiply gradients in a step, by file, line and factor."""
    writes: dict[tuple[str, int, float], FirstEvent] = {}
    for rank, of_rank in data.events.items():
        for event in of_rank:
            if isinstance(event, GradWrite) and (site := event.site) is not None and event.factor is not None:
                writes.setdefault((site.file, site.line, event.factor), _write(rank, event, site))
    return writes


def _numbers(contributions: Contributions) -> dict[str, float]:
    found: dict[str, float] = {}
    for number in common_numbers(contributions):
        if may_be_a_coefficient(number):
            place = f"{number.site.short} ({number.written})"
            found[place] = found.get(place, 1.0) * number.factor
    return found


def _write(rank: int, event: GradWrite, site: Site) -> FirstEvent:
    return FirstEvent(
        rank=rank,
        seq=event.seq,
        kind="grad_write",
        op="to .grad",
        file=site.file,
        line=site.line,
        function=site.function,
        nominal_factor=event.factor,
        observed_factor=event.factor,
        called_from=site.called_from,
    )


def _loss(contributions: Contributions) -> FirstEvent | None:
    for one in contributions.by_key.values():
        event, gradient = one.loss, one.gradient
        if event is not None and gradient is not None and event.site is not None and one.loss_rank is not None:
            return FirstEvent(
                rank=one.loss_rank,
                seq=event.seq,
                kind="loss",
                op=loss_operation(event),
                file=event.site.file,
                line=event.site.line,
                function=event.site.function,
                accumulation_step=gradient.accumulation_step,
                microbatch=gradient.microbatch,
                stage=gradient.stage,
                called_from=event.site.called_from,
            )
    return None


def tell_by_other_steps(verdicts: Sequence[StepVerdict]) -> None:
    """Lay a step's only finding, on all of its weights, to what this step does otherwise than those that are right."""
    right = [(one, one.conduct) for one in verdicts if not one.findings and not one.reasons and one.conduct is not None]
    for verdict in verdicts:
        errors = verdict.errors
        mine = verdict.conduct
        if not right or mine is None or mine.loss is None or len(errors) != 1 or len(verdict.findings) != 1:
            continue
        found = errors[0]
        if found.first_event is None or found.factor.observed is None:
            continue
        if any(found is one for one in verdict.beside_weights):
            continue  # a backward that is no derivative, which shows in no step whose logits are all alike
        bracket = found.first_event.before is not None
        at_loss = found.first_event.kind == "loss" and not bracket
        factor = mine.losses * mine.rest
        if not alike(found.factor.observed, factor) or not all(alike(one.losses * one.rest, 1.0) for _, one in right):
            continue
        # Losses that give each token what they give it in steps with other tokens leave it to a line to count these.
        counts = found.first_event.kind == "grad_write" and all(alike(one.token, mine.token) for _, one in right)
        if not at_loss and not counts and all(alike(one.rest, mine.rest) for _, one in right):
            verdict.findings = [_of_losses(found, mine.loss, factor, right[0][0].context.step)]
        elif all(alike(one.losses, mine.losses) for _, one in right):
            written = _other_number(right[0][1], mine)
            blamed = found.first_event.file, found.first_event.line
            if written is not None and (written[1].file, written[1].line) != blamed:
                verdict.findings = [_of_a_line(found, right[0][0].context.step, *written)]
            elif at_loss and not all(alike(one.rest, mine.rest) for _, one in right):
                verdict.findings = [_of_the_rest(found, right[0][0].context.step, right[0][1], mine)]


def leave_empty_open(verdicts: Sequence[StepVerdict]) -> None:
    """Accuse no losses that are all multiplied by zero in a step, where those of others are not: a guard does that to a
    batch that it does not want."""
    empty = [all(one.weighs_nothing for one in verdict.contributions.by_key.values()) for verdict in verdicts]
    if all(empty):
        return
    for verdict, nothing in zip(verdicts, empty, strict=True):
        at_loss = [one for one in verdict.findings if one.first_event is not None and one.first_event.kind == "loss"]
        if nothing and at_loss and verdict.contributions.by_key:
            verdict.findings = [one for one in verdict.findings if one not in at_loss]
            verdict.effects.clear()
            verdict.reasons.append(
                f"every loss of step {verdict.context.step} is multiplied by zero, and those of other steps are not: "
                "whether a batch was to be left out is not known"
            )


def tell_other_counts(verdicts: Sequence[StepVerdict]) -> None:
    """Name the losses' factor, or that of a line behind them, where it is this step's tokens over those of another, a
    count of another window, or over those of several steps together, of a window in the midst of which the optimizer
    steps."""
    counts = {verdict.context.step: verdict.contributions.num_tokens for verdict in verdicts}
    off = {
        verdict.context.step: [one.factor for one in verdict.findings if _may_count(one) and one.factor.observed]
        for verdict in verdicts
    }

    def divides(step: int, count: int | None) -> bool:
        """Whether losses of a step are off by its tokens over others. In every step: small numbers coincide in one."""
        tokens, factors = counts[step] or 0, off[step]
        return bool(count) and any(
            one.observed and abs(one.observed * (count or 0) / max(tokens, 1) - 1) <= max(one.tolerance or 0.0, EXACT)
            for one in factors
        )

    def of_other(step: int, other: int) -> bool:
        wrong = [one for one, factors in off.items() if factors]
        behind = [(one, one + other - step) for one in wrong if one + other - step in counts]
        late = all(divides(one, counts[two]) for one, two in behind)
        return late or (other not in wrong and all(divides(one, counts[other]) for one in wrong))

    def is_late(step: int, other: int) -> bool:
        """Whether the count comes from so many steps before in several steps: a number of a line has many causes."""
        behind = [one for one, factors in off.items() if factors and one + other - step in counts]
        return other < step and len(behind) > 1

    for verdict in verdicts:
        tokens, step = verdict.contributions.num_tokens, verdict.context.step
        for finding in verdict.findings:
            observed, tolerance = finding.factor.observed, max(finding.factor.tolerance or 0.0, EXACT)
            if not _may_count(finding) or not tokens or not observed or finding.factor.expression is not None:
                continue
            near = [
                (other, count)
                for other, count in counts.items()
                if count and other != step and abs(observed * count / tokens - 1) <= tolerance and of_other(step, other)
                if finding.code == LOSS_RULE or is_late(step, other)
            ]
            if len({count for _, count in near}) == 1 and tolerance <= MOST_VAGUE:
                _name_count(finding, tokens, *min(near, key=lambda one: (one[0] > step, abs(one[0] - step))))
            elif not near and tolerance <= MOST_VAGUE and finding.code == LOSS_RULE:
                for first, last, count in _windows(counts, step):
                    if all(divides(one, count) for one in counts if first <= one <= last):
                        _name_window(finding, verdict, first, last, count)
                        break


def _may_count(finding: Finding) -> bool:
    """Whether what is wrong may be a count of tokens: at the losses, or on a line of the trainer's behind them."""
    event = finding.first_event
    by_hand = event is not None and (event.kind == "grad_write" or event.unrecorded)
    return finding.code == LOSS_RULE or (
        finding.code == "GS000" and by_hand and finding.pattern.startswith("every contribution")
    )


def _windows(counts: Mapping[int, int | None], step: int) -> list[tuple[int, int, int]]:
    """(first step, last step, tokens) of the runs of several steps of which `step` is one, the earliest first."""
    steps = sorted(counts)
    found = []
    for first in range(steps.index(step) + 1):
        for last in range(max(first + 1, steps.index(step)), len(steps)):
            run = steps[first : last + 1]
            numbers = [counts[one] for one in run]
            if run[-1] - run[0] == last - first and all(numbers):
                found.append((run[0], run[-1], sum(number or 0 for number in numbers)))
    return found


def _name_window(finding: Finding, verdict: StepVerdict, first: int, last: int, count: int) -> None:
    tokens, passes = verdict.contributions.num_tokens or 0, verdict.context.num_accumulation
    words = f"{TOKENS_OF_OTHERS}s {first} to {last}"
    finding.factor = msgspec.structs.replace(
        finding.factor, expression=words, candidates=[Candidate(expression=words, value=tokens / count)]
    )
    finding.explanation += f" {count} tokens are those of steps {first} to {last} together; this step has {tokens}."
    finding.fix = (
        f"Let the optimizer step once in a window that the loss is divided by: it steps after "
        f"{plural(passes, 'backward pass')} here. Or divide by the tokens of these alone."
    )


def _name_count(finding: Finding, tokens: int, other: int, count: int) -> None:
    words = f"{TOKENS_OF_OTHERS} {other}"
    finding.factor = msgspec.structs.replace(
        finding.factor, expression=words, candidates=[Candidate(expression=words, value=tokens / count)]
    )
    finding.explanation += f" {count} tokens are those of step {other}; this step has {tokens}."
    finding.fix = "Divide by the tokens of the window whose gradients the optimizer is going to read."


def alike(one: float, other: float) -> bool:
    """Whether two factors are one."""
    return abs(one / other - 1) <= ALIKE


def _other_number(right: Conduct, mine: Conduct) -> tuple[float, FirstEvent] | None:
    """The number that a line writes in a right step, and the line, where it alone writes another one here, by which all
    that follows the losses is off."""
    before, now = ({one[:2]: one[2] for one in conduct.writes} for conduct in (right, mine))
    lines = [line for line in now if line in before and not alike(now[line], before[line])]
    known = [len({one[:2] for one in conduct.writes}) == len(conduct.writes) for conduct in (right, mine)]
    if len(lines) != 1 or not all(known) or before.keys() != now.keys():
        return None
    (line,) = lines
    if not before[line] or not alike(now[line] / before[line], mine.rest / right.rest):
        return None
    return before[line], mine.writes[(*line, now[line])]


def _of_a_line(found: Finding, step: int, right: float, line: FirstEvent) -> Finding:
    """What was laid to a hand that does the same in steps that are right, where a line does not."""
    return msgspec.structs.replace(
        found,
        code="GS000",
        name="unexplained-scale",
        first_event=line,
        explanation=f"This line multiplies gradients by {line.nominal_factor:.6g}, and in step {step}, whose weights "
        f"are right, by {right:.6g}; losses and all else that follows them are the same in both.",
        fix="Look for what the number of this line is made of: a count that is not reset, or of another window.",
        suggested_experiment=None,
    )


def _of_losses(found: Finding, loss: FirstEvent, factor: float, step: int) -> Finding:
    """What was laid to a hand that does the same in steps that are right."""
    return msgspec.structs.replace(
        found,
        code=LOSS_RULE,
        name="wrong-normalizer",
        first_event=msgspec.structs.replace(loss, observed_factor=factor),
        explanation=f"Every token enters backward with x {factor:.6g} of its weight in step {step}, whose weights are "
        "right, and all that follows the loss multiplies by the same number in both.",
        fix="Correct the normalisation where the loss is computed: look for what is another number in this step, such "
        "as the passes or tokens that it divides by.",
        suggested_experiment=None,
    )


def _of_the_rest(found: Finding, step: int, right: Conduct, mine: Conduct) -> Finding:
    """What was laid to losses that are those of steps that are right."""
    assert found.first_event is not None
    lines = sorted({(file, line) for file, line, _ in right.writes.keys() - mine.writes.keys()})
    factor = mine.rest / right.rest
    there = ""
    if lines:
        file, line = lines[0]
        there = f" There {PurePath(file).name}:{line} multiplies gradients; here it does not, or by another number."
    return msgspec.structs.replace(
        found,
        code="GS000",
        name="unexplained-scale",
        first_event=msgspec.structs.replace(found.first_event, unrecorded=True),
        explanation=f"The losses enter backward as in step {step}, whose weights are right; what follows them "
        f"multiplies by x {factor:.6g} of what it does there.{there}",
        fix="Look for what your code does to gradients after the loss in one of these steps and not in the other.",
        suggested_experiment=None,
    )
