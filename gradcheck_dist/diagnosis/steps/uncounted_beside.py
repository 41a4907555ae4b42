"""What is told of passes that count no tokens, where others of their step do: these alone are the step's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.wording import numbered

BESIDE = "beside others that do"
Told = tuple[str, str, bool]
"""Where such passes are, what they show, and whether that leaves their step open."""


def uncounted(beside: StepVerdict) -> Told:
    """What passes that count no tokens show, as they were judged apart. What is wrong among them, or unlike, leaves the
    step open: whether all ranks and passes were to have such a loss is not known."""
    sites = {
        one.gradient.site.short
        for one in beside.contributions.by_key.values()
        if one.gradient is not None and one.gradient.site is not None
    }
    where = f" at {in_short(sorted(sites))}" if sites else ""
    if beside.errors:
        wrong = beside.errors[0]
        factor = f", {wrong.factor.expression}" if wrong.factor.expression else ""
        return where, f"{wrong.code} ({wrong.pattern}{factor})", True
    if beside.comes_out_right and beside.all_right:
        return where, "right", False
    return where, f"each pass's {beside.times}" if beside.times else "not known", beside.unlike


def tell_uncounted(verdicts: Sequence[StepVerdict]) -> None:
    """Tell once what steps show alike."""
    told: dict[Told, list[StepVerdict]] = {}
    for verdict in verdicts:
        if verdict.uncounted is not None and not verdict.findings:
            told.setdefault(verdict.uncounted, []).append(verdict)
    for (where, shown, is_open), of_steps in told.items():
        words = (
            f"{numbered('step', [one.context.step for one in of_steps])}: passes{where} have losses that count no "
            f"tokens, {BESIDE}. What these weigh, judged apart: {shown}"
        )
        (of_steps[0].reasons if is_open else of_steps[0].remarks).append(words)
