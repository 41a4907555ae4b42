"""Faults that leave no pattern in the weights: what a rule can look at, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gradcheck_dist.diagnosis.cells import Held
from gradcheck_dist.diagnosis.context import StepContext
from gradcheck_dist.diagnosis.effect import Effect
from gradcheck_dist.diagnosis.finding import Factor, Finding, FirstEvent
from gradcheck_dist.diagnosis.norms import StepNorms
from gradcheck_dist.diagnosis.rules import all_rules
from gradcheck_dist.diagnosis.rules.verdict import Answer
from gradcheck_dist.events import Event
from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.ledger.transit import Transits


@dataclass(frozen=True)
class StepFacts:
    """One step, as far as it was recorded. `found` are the codes of what the weights show, `on_the_way` is what
    happened to gradients between pipeline stages."""

    context: StepContext
    data: StepData
    contributions: Contributions
    norms: StepNorms
    held: list[Held]
    found: frozenset[str]
    on_the_way: Transits
    made_up: bool = False
    """Whether weights were off at the loss that an exchange of activations may make up for."""

    @property
    def weights_right(self) -> bool:
        """Whether every weight that could be told is as it should be."""
        return not self.found and not self.made_up and any(held.cells for held in self.held)


@dataclass(frozen=True)
class Remark:
    """What a rule found in a step: its words, a factor where there is one, whom it concerns, and the culprit event.
    `explains` tells which findings of the weights are consequences of it, and no causes of their own."""

    answer: Answer
    pattern: str
    params: frozenset[ParamKey]
    ranks: tuple[int, ...]
    rank: int
    event: Event | None
    factor: Factor = field(default_factory=lambda: Factor(observed=None))
    effect: Effect | None = None
    explains: Callable[[Finding], bool] = lambda finding: False


@dataclass(frozen=True)
class Audited:
    """A finding of a rule that looks at a step and not at weights, and what it does to the gradient."""

    finding: Finding
    effect: Effect | None
    explains: Callable[[Finding], bool]


def audit(facts: StepFacts, units: dict[ParamKey, str]) -> list[Audited]:
    """The findings of all rules that look at a step and not at weights."""
    found = []
    for rule in all_rules():
        remarks: Iterable[Remark] = rule.audit(facts) if hasattr(rule, "audit") else ()
        for remark in remarks:
            finding = Finding(
                code=rule.CODE,
                name=rule.NAME,
                severity=remark.answer.severity,
                step=facts.context.step,
                factor=remark.factor,
                pattern=remark.pattern,
                units=sorted({units.get(param, param[1]) for param in remark.params}),
                num_parameters=len(remark.params),
                ranks=sorted(remark.ranks),
                first_event=_first_event(remark),
                explanation=remark.answer.explanation,
                fix=remark.answer.fix,
                suggested_experiment=remark.answer.suggested_experiment,
                steps=[facts.context.step],
            )
            found.append(Audited(finding, remark.effect, remark.explains))
    return found


def audited(facts: StepFacts) -> set[str]:
    """Codes of the rules that could judge this step by what they look at."""
    return {rule.CODE for rule in all_rules() if hasattr(rule, "could_audit") and rule.could_audit(facts)}


def _first_event(remark: Remark) -> FirstEvent | None:
    event = remark.event
    if event is None:
        return None
    site = event.site
    return FirstEvent(
        rank=remark.rank,
        seq=event.seq,
        kind=str(event.__struct_config__.tag),
        file=site.file if site else None,
        line=site.line if site else None,
        function=site.function if site else None,
        called_from=site.called_from if site else None,
        accumulation_step=getattr(event, "accumulation_step", None),
        microbatch=getattr(event, "microbatch", None),
        stage=getattr(event, "stage", None),
    )
