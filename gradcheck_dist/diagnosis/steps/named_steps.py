"""In which steps a reason or a remark holds, where others are without it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.wording import numbered

NAMED = re.compile(r"(?<!accumulation )\bsteps? \d")


def words_of_steps(verdicts: Sequence[StepVerdict]) -> frozenset[str]:
    """What is said of single steps, as long as nothing was said of several together."""
    return frozenset(words for verdict in verdicts for words in (*verdict.reasons, *verdict.remarks))


def name_steps(verdicts: Sequence[StepVerdict], of_steps: Collection[str]) -> None:
    """Say which steps the words of single steps (`of_steps`) are about, unless these are all, or the words say so."""
    holds: dict[str, list[int]] = defaultdict(list)
    for verdict in verdicts:
        for words in dict.fromkeys((*verdict.reasons, *verdict.remarks)):
            holds[words].append(verdict.context.step)
    named = {
        words: f"{numbered('step', steps)}: {words}"
        for words, steps in holds.items()
        if words in of_steps and len(steps) < len(verdicts) and not NAMED.search(words)
    }
    for verdict in verdicts:
        verdict.reasons = [named.get(words, words) for words in verdict.reasons]
        verdict.remarks = [named.get(words, words) for words in verdict.remarks]
