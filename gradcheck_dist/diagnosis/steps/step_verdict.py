"""What one step showed, and the findings of many steps as one list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from gradcheck_dist.diagnosis.causes.vocabulary import PASSES
from gradcheck_dist.diagnosis.finding import Finding, FirstEvent, Unverified, Weight
from gradcheck_dist.diagnosis.losses.loud_ranks import LoudRanks
from gradcheck_dist.diagnosis.losses.terms_apart import TermWeights
from gradcheck_dist.diagnosis.norms.assumed import Assumed, Place
from gradcheck_dist.diagnosis.norms.consequence import consequence
from gradcheck_dist.diagnosis.norms.effect import Effect
from gradcheck_dist.diagnosis.steps.other_steps import Conduct
from gradcheck_dist.diagnosis.steps.own_divisors import OwnDivisors
from gradcheck_dist.diagnosis.steps.reads import Read
from gradcheck_dist.diagnosis.steps.turns import Turn
from gradcheck_dist.diagnosis.steps.waiting import Copy, Unread
from gradcheck_dist.diagnosis.weights.cells import Held
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.factors import Powers
from gradcheck_dist.diagnosis.weights.patterns import Pattern
from gradcheck_dist.diagnosis.words import BY_HAND
from gradcheck_dist.events import OWN_OPTIMIZER
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.param_updates import Update
from gradcheck_dist.ledger.several_terms import Terms
from gradcheck_dist.ledger.tracks import ParamKey, Slot, StepData
from gradcheck_dist.wording import numbered, plural

Cause = tuple[object, ...]
UNIFORM = "every contribution"
SAME = 1e-3
"""Relative; factors that differ by more are told by step."""
MOST_TOLD = 4
OF_STEP = "The factor is that of step"
HIDDEN = "where a clip by hand hides no division"
"""Evidence of a candidate that only steps with a clip leave open."""


def cause(finding: Finding) -> Cause:
    """Equal for what repeats step after step: same rule and same culprit line. Verification is done once, and may find
    several functions wrong that are applied on one line, and a line may reduce over groups of several sizes. A clip by
    hand is told at what came last before it, which is another event where another gradient is measured best; the step
    of an own optimizer at which it was noticed."""
    event = finding.first_event
    if event is not None and event.op == OWN_OPTIMIZER:
        return (finding.code, OWN_OPTIMIZER)
    if finding.pattern.startswith(BY_HAND):
        return (finding.code, BY_HAND)
    verified = finding.pattern if event is not None and event.kind == "gradient_check" else ""
    size = len(event.group) if event is not None and event.kind == "reduce" else 0
    return (finding.code, event and (event.kind, event.op, event.place, event.unrecorded), verified, size)


@dataclass(frozen=True)
class Scaling:
    """All gradients of a step were multiplied by `factor` by nothing recorded, which left them with `norm`; `tolerance`
    is relative. `lines` are those that wrote to them there, where it is laid to none. `before`: what these must divide
    by besides if that is a clip, as weights were too large in front of it."""

    factor: float
    norm: float
    tolerance: float
    lines: tuple[str, ...] = ()
    before: Assumed | None = None


@dataclass(frozen=True)
class KeptApart:
    """A step all of whose passes were kept apart. `right`: its weights are those of passes that have an objective each;
    `unlike`: its losses are means over their own tokens, and its weights are not one number times such."""

    num_passes: int
    right: bool
    unlike: bool


class Thrown(NamedTuple):
    """Where passes are thrown away, in words, and what this may be."""

    where: str
    meant: str


Key = tuple[ParamKey, int, ContributionKey]
"""(parameter, rank that holds it, contribution)"""


@dataclass
class Change:
    """What lines of the user's did to gradients in one step: diagnosis/steps/handmade.py.

    `place` is equal for the same lines in other steps; `factors` are (factor, relative tolerance) of some of the
    weights, `name` is what the factor is made of. `firm`: this step alone shows that it is a constant, and `finding`
    stands among the findings. `parted`: copies of one gradient were changed apart on different ranks. `makes_up`: the
    weights were off before it. `uniform`: all weights of the step were changed alike. `factor`: by what the
    lines multiply. `written`: their number was read from the call, is none that is computed from gradients, and had
    something to put right. `or_loss`: the loss may have the wrong number in their place. `stands`: this step
    alone shows numbers that somebody wrote. `spared`: others were multiplied there, and come out right.
    `counted` is what the factor could be made of, though in one step by chance. `recorded`: what all weights are off by
    from the loss up to these lines, which multiply them by numbers of their own. `rates`: up to there all is right, and
    the numbers may be rates of layers.
    """

    place: tuple[object, ...]
    words: str
    finding: Finding
    effect: Effect | None
    factors: dict[Key, tuple[float, float]]
    num_parameters: int
    name: str | None
    firm: bool
    parted: bool
    makes_up: bool = False
    uniform: bool = False
    factor: float | None = None
    written: bool = False
    or_loss: bool = False
    stands: bool = False
    spared: bool = False
    counted: str | None = None
    recorded: float = 1.0
    rates: bool = False


@dataclass
class StepVerdict:
    """What one step showed. `lost`: what is missing in which rank's trace, in words; then nothing was judged.
    `spreads`: how far apart, relative, each place of a loss put the weights of one contribution's tokens.
    `without_lost`: the step without passes that it throws away; `thrown`: what may be meant by these, if all is right
    without them. `one_batch`: the step whose passes evaluate one batch, if they have the same.
    `beside_weights`: findings that rest on no weight.
    `assumed`: what a clip's lines must divide by, `divided`: what unrecorded lines divide by where nothing is wrong.
    `unmade`: parameters of which an optimizer read a gradient that no recorded pass made. `own_terms`: losses of a
    pass that were taken for terms with coefficients. `kept_apart`: what is known of passes that are. `apart`:
    parameters whose copies got unequal gradients on different ranks; `updates`: what optimizers made of parameters that
    nobody reduced. `begun_alike`: ranks held the same parameters when the step
    began; None where that was not seen. `own_parts`: what all findings' weights are where ranks hand on, behind the
    step, what they stepped by their own parts of a reduction, in words. `shares_updates`: ranks step another part of
    parameters each.
    `unread`: what waits for an optimizer that steps later, `reads`: what optimizers read of some parameters.
    `summed`: ranks of one batch were taken to train on the sum of their losses, though few copies say so.
    `writes` are the trainer's own lines that multiply gradients, by file, line and factor.
    `shapes` are those of the weights that findings concern, `made_of` what the names of their factors are made of.
    `looks`: by rank, passes that were only looked at, and beside which no other has tokens; `counted`: those that have
    tokens, where others that have none train beside them. `times`: what means over elements that count no tokens weigh,
    in words, and `unlike`: whether by unlike numbers; `loud`: ranks on which alone these weigh wrong. `untold`:
    of passes whose gradients were emptied it is not known whether they are lost. `uncounted`: where those beside are,
    what they show, and whether that leaves the step open.
    `grad_norm` is that of the whole model before any clip, where it is known exactly. `references` are parameters of
    copies of the model that it was only compared with."""

    context: StepContext
    data: StepData
    contributions: Contributions
    held: list[Held] = field(default_factory=list)
    units: dict[ParamKey, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    beside_weights: list[Finding] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    verified: str = ""
    unverified: list[Unverified] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    audited: set[str] = field(default_factory=set)
    lost: dict[int, str] = field(default_factory=dict)
    spreads: dict[tuple[str, int, int], float] = field(default_factory=dict)
    without_lost: StepVerdict | None = None
    thrown: Thrown | None = None
    alone: StepVerdict | None = None
    one_batch: StepVerdict | None = None
    scaling: Scaling | None = None
    assumed: Assumed | None = None
    divided: dict[Place, frozenset[str]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    unmade: list[str] = field(default_factory=list)
    conduct: Conduct | None = None
    turn: Turn | None = None
    writes: Mapping[tuple[str, int, float], FirstEvent] = field(default_factory=dict)
    own_divisors: OwnDivisors | None = None
    term_weights: list[TermWeights] = field(default_factory=list)
    effects: dict[Cause, Effect] = field(default_factory=dict)
    own_terms: Terms | None = None
    kept_apart: KeptApart | None = None
    apart: frozenset[ParamKey] = frozenset()
    updates: dict[ParamKey, dict[int, Update]] = field(default_factory=dict)
    begun_alike: bool | None = None
    own_parts: str = ""
    shares_updates: bool = False
    summed: bool = False
    unread: Unread = field(default_factory=Unread)
    reads: dict[Copy, Read] = field(default_factory=dict)
    shapes: dict[Cause, Pattern] = field(default_factory=dict)
    made_of: dict[Cause, Powers] = field(default_factory=dict)
    looks: frozenset[tuple[int, Slot]] = frozenset()
    counted: frozenset[tuple[int, Slot]] = frozenset()
    times: str = ""
    unlike: bool = False
    loud: LoudRanks | None = None
    untold: bool = False
    uncounted: tuple[str, str, bool] | None = None
    grad_norm: float | None = None
    references: frozenset[ParamKey] = frozenset()

    def shape_of(self, finding: Finding) -> Pattern | None:
        """The shape of the weights that a finding concerns; None where it rests on none."""
        return self.shapes.get(cause(finding))

    @property
    def errors(self) -> list[Finding]:
        """The findings that accuse."""
        return [finding for finding in self.findings if finding.severity != "info"]

    @property
    def rests_on_others(self) -> bool:
        """Whether other steps bear out what this one is accused of, or take it back."""
        return self.loud is not None or self.one_batch is not None

    @property
    def all_right(self) -> bool:
        """Whether every weight that could be told is what the objective asks for."""
        return not self.context.relative and all(cell.right for held in self.held for cell in held.cells)

    @property
    def comes_out_right(self) -> bool:
        """Whether weights could be told and none of them is a finding."""
        beside = {id(finding) for finding in self.beside_weights}
        return any(held.cells for held in self.held) and all(id(one) in beside for one in self.findings)

    @property
    def num_accused(self) -> int:
        """How many parameters findings concern, each of them counted."""
        return sum(finding.num_parameters for finding in self.findings)

    def copy(self) -> StepVerdict:
        """The same, of which reasons, remarks and findings can be taken away or added to."""
        return replace(
            self,
            findings=[*self.findings],
            beside_weights=[*self.beside_weights],
            reasons=[*self.reasons],
            remarks=[*self.remarks],
            changes=[*self.changes],
            effects={**self.effects},
        )

    def found(self, finding: Finding, effect: Effect | None) -> None:
        """Keep a finding, with what it does to this step's gradient where that is known."""
        self.findings.append(finding)
        if effect is not None:
            self.effects.setdefault(cause(finding), effect)
            finding.consequence = consequence([effect])

    def take_away(self, finding: Finding) -> None:
        """Forget a finding, and what it does to this step's gradient."""
        self.findings = [one for one in self.findings if one is not finding]
        self.effects.pop(cause(finding), None)


def _hidden(finding: Finding) -> bool:
    return any(candidate.evidence == HIDDEN for candidate in finding.factor.candidates)


def merged(verdicts: Sequence[StepVerdict]) -> list[Finding]:
    """One finding for what repeats step after step. The first step's stays, or the first that leaves no candidate open
    because of a clip, or whose factor has a name that other steps do not contradict; its consequence is that of all
    steps, and it concerns as many parameters as in any: behind layers that begin at zero, the first step's gradients
    are zero."""
    result: dict[Cause, Finding] = {}
    effects: dict[Cause, list[Effect]] = defaultdict(list)
    factors: dict[Cause, dict[int, float]] = defaultdict(dict)
    for verdict in verdicts:
        for key, finding in _apart(verdict.findings):
            known = result.setdefault(key, finding)
            known.num_parameters = finding.num_parameters = max(known.num_parameters, finding.num_parameters)
            if known is not finding and _hidden(known) and not _hidden(finding):
                result[key], finding.step, finding.steps = finding, known.step, sorted({*known.steps, *finding.steps})
            elif known is not finding:
                known.steps = sorted({*known.steps, *finding.steps})
            if key in verdict.effects:
                effects[key].append(verdict.effects[key])
            first_of_line = key == cause(finding)
            if first_of_line and finding.pattern.startswith(UNIFORM) and finding.factor.observed is not None:
                factors[key][verdict.context.step] = finding.factor.observed
    for key, by_step in factors.items():
        if (better := _named_better(result[key], verdicts, by_step)) is not None:
            better.steps, better.num_parameters, result[key] = result[key].steps, result[key].num_parameters, better
    for key, of_steps in effects.items():
        result[key].consequence = consequence(of_steps)
    for key, by_step in factors.items():
        result[key].explanation += _other_factors(result[key], by_step)
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(result.values(), key=lambda finding: (order[finding.severity], finding.code == "GS000", finding.step))


def _apart(findings: Sequence[Finding]) -> Iterator[tuple[Cause, Finding]]:
    """The findings of one step by what they have in common with those of others. One line of a helper that is called
    from two places multiplies twice, by a number each."""
    seen: dict[Cause, list[Finding]] = defaultdict(list)
    for finding in findings:
        key = cause(finding)
        calls = sum(_is_another_call(one, finding) for one in seen[key])
        seen[key].append(finding)
        yield (*key, calls) if calls else key, finding


def _is_another_call(one: Finding, other: Finding) -> bool:
    events = one.first_event, other.first_event
    return (
        one.units == other.units
        and all(event is not None and event.kind == "grad_write" for event in events)
        and all(finding.pattern.startswith(UNIFORM) for finding in (one, other))
    )


def _named_better(known: Finding, verdicts: Sequence[StepVerdict], by_step: Mapping[int, float]) -> Finding | None:
    """The same cause as another step tells of it, where degrees and counts of other steps contradict the name that the
    factor has in this one, or it has none in a short window: a name that holds in all, else no name. None where nothing
    is better."""
    key = cause(known)
    of_steps = [
        (verdict, next(one for one in verdict.findings if cause(one) == key))
        for verdict in verdicts
        if verdict.context.step in by_step
    ]
    told: dict[Powers, Finding] = {}
    for verdict, finding in of_steps:
        told.setdefault(verdict.made_of.get(key, ()), finding)
    named = next((powers for powers, finding in told.items() if finding is known), ())
    whole = max((verdict.context.num_accumulation for verdict, _ in of_steps), default=0)
    short = any(finding is known and verdict.context.num_accumulation < whole for verdict, finding in of_steps)
    if len(told) < 2 or (_holds(named, of_steps) if named else not short):
        return None
    return next((finding for powers, finding in told.items() if powers and _holds(powers, of_steps)), told.get(()))


def _holds(powers: Powers, of_steps: Sequence[tuple[StepVerdict, Finding]]) -> bool:
    """Whether a name comes to the factor of each step with its degrees and counts, or is made of others than these. A
    program may divide short windows by the passes of a whole one, too."""
    whole = max(verdict.context.num_accumulation for verdict, _ in of_steps)
    for verdict, finding in of_steps:
        quantities, factor = verdict.context.quantities, finding.factor
        if any(name not in quantities for name, _ in powers) or factor.observed is None:
            continue
        off = max(SAME, 2 * (factor.tolerance or 0.0)) * abs(factor.observed)
        known = [quantities, {**quantities, PASSES: whole}] if PASSES in quantities else [quantities]
        made = [prod(numbers[name] ** power for name, power in powers) for numbers in known]
        if all(abs(one - abs(factor.observed)) > off for one in made):
            return False
    return True


def _other_factors(finding: Finding, by_step: Mapping[int, float]) -> str:
    """By which other numbers weights are off in other steps than the one that a finding tells of, in words."""
    own, tolerance = finding.factor.observed, max(finding.factor.tolerance or 0.0, SAME)
    others: dict[str, list[int]] = defaultdict(list)
    for step, factor in by_step.items():
        if own is not None and abs(factor - own) > tolerance * abs(own):
            others[f"{factor:.6g}"].append(step)
    if not others or OF_STEP in finding.explanation:
        return ""
    told = [f"x {factor} in {numbered('step', steps)}" for factor, steps in list(others.items())[:MOST_TOLD]]
    more = f" and others in {plural(len(others) - MOST_TOLD, 'more step')}" if len(others) > MOST_TOLD else ""
    return f" {OF_STEP} {finding.step}: it is {', '.join(told)}{more}."


def recorded_norms(verdicts: Iterable[StepVerdict]) -> dict[int, float]:
    """By step the norm of its gradients; steps in which it is not known exactly are left out."""
    return {one.context.step: one.grad_norm for one in verdicts if one.grad_norm is not None}
