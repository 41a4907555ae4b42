"""Let the rules look at a step for what leaves no pattern in the weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gradcheck_dist.diagnosis.audits.facts import Remark, StepFacts
from gradcheck_dist.diagnosis.finding import Finding, FirstEvent
from gradcheck_dist.diagnosis.norms.effect import Effect
from gradcheck_dist.diagnosis.rules import all_rules
from gradcheck_dist.events import OWN_OPTIMIZER, Event
from gradcheck_dist.ledger.tracks import ParamKey


@dataclass(frozen=True)
class Audited:
    """A finding of a rule that looks at a step and not at weights, and what it does to the gradient."""

    finding: Finding
    effect: Effect | None
    params: frozenset[ParamKey]
    remark: Remark

    def explains(self, finding: Finding) -> bool:
        """Whether a finding is a consequence of this one."""
        scaled = finding.code in self.remark.rescales and set(finding.units) <= set(self.finding.units)
        return scaled or self.remark.explains(finding)


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
                first_event=first_event_at(remark.event, remark.rank) if remark.event is not None else None,
                explanation=remark.answer.explanation,
                fix=remark.answer.fix,
                suggested_experiment=remark.answer.suggested_experiment,
                steps=[facts.context.step],
            )
            found.append(Audited(finding, remark.effect, remark.params, remark))
    return found


def audited(facts: StepFacts) -> set[str]:
    """Codes of the rules that could judge this step by what they look at."""
    return {rule.CODE for rule in all_rules() if hasattr(rule, "could_audit") and rule.could_audit(facts)}


def first_event_at(event: Event, rank: int) -> FirstEvent:
    """An event of a rank as the place of a finding."""
    site = event.site
    return FirstEvent(
        rank=rank,
        seq=event.seq,
        kind=str(event.__struct_config__.tag),
        op=OWN_OPTIMIZER if getattr(event, "optimizer", None) == OWN_OPTIMIZER else None,
        file=site.file if site else None,
        line=site.line if site else None,
        function=site.function if site else None,
        called_from=site.called_from if site else None,
        accumulation_step=getattr(event, "accumulation_step", None),
        microbatch=getattr(event, "microbatch", None),
        stage=getattr(event, "stage", None),
    )
