"""A case: all wrong cells that share one culprit, with their shape and their names. What a rule judges."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from statistics import median
from typing import TYPE_CHECKING

from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.causes.places import kind_of
from gradcheck_dist.diagnosis.causes.vocabulary import CLIP_COEFFICIENT, is_one_count, is_scale
from gradcheck_dist.diagnosis.finding import Candidate, Factor, FirstEvent
from gradcheck_dist.diagnosis.weights.cells import Cell, Held
from gradcheck_dist.diagnosis.weights.context import RANKS_PER_BATCH, StepContext
from gradcheck_dist.diagnosis.weights.factors import Name, exact_fraction, name_number
from gradcheck_dist.diagnosis.weights.patterns import Pattern
from gradcheck_dist.diagnosis.weights.written import is_exactly_written
from gradcheck_dist.events import AmpUnscale, Clip, Event, GradWrite, Loss, OptimizerStep, Reduce, ScaleGrads, Site
from gradcheck_dist.ledger.tracks import ParamKey

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.norms.step_norms import StepNorms

SAME_FACTOR = 1e-4
"""Two cases whose factors are nearer to one another than this, relative, may be one."""

POWER = 1e-3
"""How near to a whole number the logarithm of a power of two is."""


@dataclass
class Case:
    """Everything known about one suspected fault. `everywhere`: it concerns all that was judged. `names` are names of
    the pattern's factor, `base_names` of the base of a geometric pattern, simplest first. `terms` are the auxiliary
    loss terms that it concerns, evaluated on `term_ranks`, and it holds no weights then; none where it concerns the
    main loss. `norms` are those of the step. `summing` is the reduction that adds up what are whole means of each
    rank's losses. `skipped`: what lines that reduce others multiply these by besides, which is lacking, too; None where
    it is not one number. `whole` are the cells with all of that. `idle`: whether a wrapper around all of these reduced
    nothing in the step."""

    context: StepContext
    culprit: Culprit
    held: list[Held]
    cells: list[tuple[Held, Cell]]
    patterns: list[Pattern]
    configured_at: str | None = None
    everywhere: bool = False
    names: list[Name] = field(default_factory=list)
    base_names: list[Name] = field(default_factory=list)
    terms: tuple[str, ...] = ()
    term_ranks: tuple[int, ...] = ()
    norms: StepNorms | None = None
    summing: Culprit | None = None
    skipped: float | None = None
    whole: list[tuple[Held, Cell]] = field(default_factory=list)
    idle: bool = False

    @property
    def pattern(self) -> Pattern:
        return self.patterns[0]

    @property
    def ranks(self) -> list[int]:
        """The ranks that are concerned."""
        return sorted({rank for held in self.held for rank in held.ranks} | set(self.term_ranks))

    @property
    def stands_alone(self) -> bool:
        """Whether nothing else is wrong with these weights."""
        whole = {(id(held), cell.key): cell for held in self.held for cell in held.cells}
        found = ((cell, whole.get((id(held), cell.key))) for held, cell in self.cells)
        return all(one is None or abs(one.ratio - cell.ratio) <= one.margin + cell.margin for cell, one in found)

    def without(self, params: Container[ParamKey]) -> Case | None:
        """The same of what other parameters hold; None where that is nothing."""
        held = [one for one in self.held if one.param not in params]
        if len(held) == len(self.held):
            return self
        cells = [(one, cell) for one, cell in self.cells if one.param not in params]
        return replace(self, held=held, cells=cells) if held else None

    def concerns_all(self, judged: Sequence[Held]) -> bool:
        """Whether everything has the pattern's factor, but for what came out right only within its noise, and that of
        which nothing is left."""
        mine, pattern = {id(held) for held in self.held}, self.pattern
        cells = (cell for held in judged if id(held) not in mine and not held.is_gone for cell in held.cells)
        return all(pattern.kind == "uniform" and abs(cell.ratio - pattern.factor) <= cell.margin for cell in cells)

    @property
    def event(self) -> Event | None:
        return self.culprit.event

    @property
    def recorded(self) -> bool:
        """Whether a recorded event is to blame, and did no more and no less than it is documented to do."""
        culprit = self.culprit
        return not culprit.absent and not culprit.unrecorded and culprit.documented(self.pattern.tolerance)

    @property
    def scaled_alike(self) -> bool:
        """Whether one factor is on everything, by nothing recorded, just before the clip or the optimizer."""
        culprit, pattern = self.culprit, self.pattern
        if culprit.write is not None and is_exactly_written(culprit.write.factor):
            return False
        ends = isinstance(culprit.before, OptimizerStep | Clip)
        return culprit.unrecorded and ends and pattern.kind == "uniform" and pattern.factor > 0 and self.everywhere

    @property
    def combined_unseen(self) -> bool:
        """Whether contributions of other ranks came to a gradient in the bracket, by what nobody recorded."""
        place = self.context.contributions.coordinate
        return self.culprit.kind == "backward" and any(place.get(held.rank) != cell.key[0] for held, cell in self.cells)

    @property
    def could_be_clip(self) -> bool:
        """Whether everything was made smaller alike, by nothing recorded, just before the clip or the optimizer, and is
        not freed of a clip yet."""
        freed = any(held.clip_by_hand != 1 for held in self.held)
        return self.scaled_alike and self.pattern.factor < 1 and not freed

    @property
    def rescaled(self) -> bool:
        """Whether the losses of a step that a GradScaler unscales differ by powers of two from one accumulation step to
        another, as they do where its scale changes in between."""
        unscaled = any(isinstance(e.event, AmpUnscale) for held in self.held for e in held.replay.history(held.rank))
        if self.culprit.kind != "loss" or self.culprit.unrecorded or not unscaled:
            return False
        largest = max((cell.root_ratio for _, cell in self.cells), default=0.0)
        roots: dict[int, set[int]] = {}
        for _, cell in self.cells:
            power = log2(cell.root_ratio / largest) if cell.root_ratio > 0 else 0.5
            if abs(power - round(power)) > POWER:
                return False
            roots.setdefault(cell.key[1], set()).add(round(power))
        return all(len(found) == 1 for found in roots.values()) and len(set().union(*roots.values())) > 1

    @property
    def reduce(self) -> Reduce | None:
        return self.event if isinstance(self.event, Reduce) else None


def name_case(case: Case) -> None:
    """Find names for the pattern's numbers; those of the culprit's own numbers are preferred."""
    quantities, near = dict(case.context.quantities), set[str]()
    event = case.event
    if case.culprit.absent:
        # What did not come is other ranks'; the number of passes only coincides with theirs.
        ranks = ("dp_replicate", "dp_shard", "data_ranks", "world_size")
        near |= {name for name in ranks if quantities.get(name, 1) > 1}
    if case.summing is not None:
        size = case.context.contributions.num_coordinates
        quantities.setdefault(case.context.group_name(size), float(size))
        near.add(case.context.group_name(size))
    if case.culprit.wrong_constant:
        # Not the event's own numbers, but one that it left out or counts twice: of ranks, for it knows no passes.
        large = {axis for axis, size in case.context.axes.items() if size > 1}
        near |= large & {"ep", "tp", "cp"} or large & {"dp_replicate", "dp_shard"}
    elif isinstance(event, Reduce):
        size = event.num_ranks
        copies = case.context.ranks_per_batch(event.group)
        shared = next(
            (axis for axis in ("tp", "cp", "ep", "pp") if case.context.axes.get(axis) == copies), RANKS_PER_BATCH
        )
        group = event.group if len(event.group) == size else ()
        name = shared if copies == size > 1 else case.context.group_name(size, group)
        quantities.setdefault(name, float(size))
        near.add(name)
        along = copies == size or tuple(sorted(group)) in case.context.mesh.lies_along
        if not along or case.culprit.unrecorded:  # else it knows no other ranks
            near |= {axis for axis in ("dp_replicate", "dp_shard") if case.context.axes.get(axis, 1) > 1}
        if copies > 1 and event.op == "sum" and not case.culprit.unrecorded:  # an average of copies is one of them
            quantities.setdefault(shared, float(copies))
            near.add(shared)
    elif isinstance(event, ScaleGrads):
        name = "microbatches" if event.divisor == case.context.num_microbatches else "divisor"
        quantities[name] = event.divisor
        near.add(name)
    elif isinstance(event, Clip):
        quantities[CLIP_COEFFICIENT] = event.coefficient
    if case.pattern.kind == "partial":
        quantities["groups"] = float(case.pattern.num_parts)
        near.add("groups")
    if case.culprit.in_flight:
        quantities.pop("num_tokens", None)  # stages know of degrees and microbatches; tokens are counted at the loss
    pattern = case.pattern
    tolerance = max(2 * pattern.tolerance, 1e-6)
    case.names = name_number(abs(pattern.factor), quantities, tolerance, near=frozenset(near))
    if is_scale(pattern.factor, log2(1 + tolerance)):
        case.names = [name for name in case.names if is_one_count(dict(name.powers))]
    if pattern.factor < 0:
        case.names = [
            replace(name, expression=f"-{name.expression}", value=-name.value) for name in case.names if name.powers
        ]
    if pattern.base is not None and not case.rescaled:
        case.base_names = name_number(pattern.base, quantities, tolerance, near=frozenset(near))
    # A name made of the culprit's own numbers comes first: others only coincide in value.
    counted = case.pattern.kind == "partial"
    guessed = counted or case.culprit.unrecorded  # the event is only the last before it happened
    own = [name for name in case.names if near and not guessed and all(part in near for part, _ in name.powers)]
    case.names = own + [name for name in case.names if name not in own]


def is_common_factor(case: Case) -> bool:
    """Whether what is wrong is one doing of all losses, beside what they do unlike: whatever shape noise gives it."""
    at_loss = case.culprit.kind == "loss" and not case.culprit.unrecorded
    return at_loss and common_factor(case) > 0


def common_factor(case: Case) -> float:
    """The factor that stands for all weights of a case."""
    uniform = case.pattern.kind == "uniform"
    return case.pattern.factor if uniform else float(median(cell.ratio for _, cell in case.cells))


def ambiguous(names: list[Name], near: bool) -> list[Name]:
    """Names that fit as simply as the best and that nothing in the events separates from it."""
    if near or len(names) < 2:
        return []
    return [name for name in names[1:] if name.cost <= names[0].cost + 0.05]


def _to_the(name: Name, power: str) -> str:
    """A name to a power in parentheses: "dp_replicate^(K-1-k)", "microbatches^-(K-1-k)"."""
    if len(name.powers) == 1 and name.powers[0][1] == -1:
        return f"{name.powers[0][0]}^-{power}"
    text = name.expression
    return f"({text})^{power}" if set(text) & set("/*^") else f"{text}^{power}"


def factor_of(case: Case, quantities: Mapping[str, float] | None = None) -> Factor:
    """The factor as the report shows it."""
    pattern = case.pattern
    tolerance = pattern.tolerance
    if pattern.kind in ("geometric", "repeated") and pattern.base is not None:
        power = "(K-1-k)" if pattern.kind == "geometric" else "(repetitions)"
        lead = "" if abs(pattern.factor - 1) <= 2 * tolerance else f"{factor_in_words(case)} * "
        named = [_to_the(name, power) for name in case.base_names] or [f"{pattern.base:.6g}^{power}"]
        candidates = [
            Candidate(expression=text, value=name.value, exact=exact_fraction(name.value, 1e-9))
            for name, text in zip(case.base_names, named, strict=False)
        ]
        return Factor(
            observed=pattern.base,
            exact=exact_fraction(pattern.base, 2 * tolerance),
            expression=f"{lead}{named[0]}",
            tolerance=tolerance,
            candidates=candidates,
        )
    if pattern.kind == "objective":
        formula = {"microbatch-mean": "num_tokens/(contributions * n_c)", "rank-token-mean": "num_tokens/(R * N_r)"}
        expression = formula.get(pattern.objective or "", pattern.objective or "")
        if abs(pattern.factor - 1) > 2 * tolerance:
            expression = f"{factor_in_words(case)} * {expression}"
        ratios = sorted(cell.ratio for _, cell in case.cells)
        return Factor(observed=ratios[len(ratios) // 2], expression=expression, tolerance=tolerance)
    if pattern.kind in ("power", "partial"):
        ratios = sorted(cell.ratio for _, cell in case.cells if pattern.kind == "power" or not cell.right)
        lead = "" if abs(pattern.factor - 1) <= 2 * tolerance else f"{factor_in_words(case)} * "
        count = (pattern.count or "").replace("N / ", "num_tokens/") or None
        return Factor(observed=ratios[len(ratios) // 2], expression=f"{lead}{count}", tolerance=tolerance)
    wrong = sorted(cell.ratio for _, cell in case.cells if not cell.right)
    if wrong and abs(pattern.factor - 1) <= 2 * tolerance:  # most are right; what is told is the factor of the rest
        middle = wrong[len(wrong) // 2]
        return Factor(observed=0.0 if abs(middle) <= tolerance else middle, tolerance=tolerance)  # and no -2e-34
    if pattern.kind == "other":
        return Factor(observed=pattern.factor, tolerance=tolerance)  # a median, which degrees make by chance
    return Factor(
        observed=pattern.factor,
        exact=exact_fraction(pattern.factor, 2 * tolerance),
        expression=case.names[0].expression if case.names else None,
        tolerance=tolerance,
        candidates=[
            Candidate(expression=name.expression, value=name.value, exact=exact_fraction(name.value, 1e-9))
            for name in case.names
        ],
    )


def factor_in_words(case: Case) -> str:
    """The name of the pattern's factor, else its number."""
    return case.names[0].expression if case.names else f"{case.pattern.factor:.6g}"


def _pass_of(case: Case, step: int | None) -> int | None:
    """An event behind the last pass counts as the next one, which there is not: it belongs to the whole step."""
    return step if step is None or step < case.context.num_accumulation else None


def first_event(case: Case, lines: Sequence[tuple[Site, str]] = ()) -> FirstEvent | None:
    """The culprit as the report shows it. `lines`: where losses are multiplied by the factor, and how that is written:
    a loss that is wrong is so there, and not where it was evaluated."""
    culprit, event = case.culprit, case.culprit.event
    if event is None:
        return None
    before = culprit.before
    if culprit.write is not None:
        event, before = culprit.write, None
    site, written, evaluated_at = event.site, None, None
    if lines and culprit.kind == "loss" and not culprit.unrecorded:
        evaluated_at = f"{site.file}:{site.line}" if site is not None else None
        site, written = lines[0]
    return FirstEvent(
        rank=culprit.rank,
        seq=event.seq,
        kind=culprit.kind if culprit.write is None else kind_of(event),
        op=_operation(event),
        group=list(getattr(event, "group", ()) or ()),
        file=site.file if site else None,
        line=site.line if site else None,
        function=site.function if site else None,
        accumulation_step=_pass_of(case, getattr(culprit.gradient or event, "accumulation_step", None)),
        microbatch=getattr(culprit.gradient or event, "microbatch", None),
        stage=getattr(culprit.gradient or event, "stage", None),
        nominal_factor=_documented(culprit),
        observed_factor=None if culprit.absent else culprit.factor,  # of what did not happen there is none
        configured_at=case.configured_at,
        called_from=site.called_from if site else None,
        unrecorded=culprit.unrecorded and culprit.write is None,
        before=None
        if before is None
        else {
            "kind": str(before.__struct_config__.tag),
            "seq": before.seq,
            "file": before.site.file if before.site else None,
            "line": before.site.line if before.site else None,
        },
        written=written,
        evaluated_at=evaluated_at,
    )


def _documented(culprit: Culprit) -> float | None:
    """What the event multiplies by; None where nobody knows."""
    factor = culprit.nominal if culprit.write is None else culprit.write.factor
    return factor if factor == factor else None


def loss_operation(loss: Loss) -> str:
    """What computed it, and how it was reduced where that is known."""
    return loss.op if loss.reduction == "unknown" else f"{loss.op}, reduction={loss.reduction}"


def _operation(event: Event) -> str | None:
    if isinstance(event, Reduce):
        return event.op
    if isinstance(event, Loss):
        return loss_operation(event)
    if isinstance(event, ScaleGrads):
        return f"div {event.divisor:g}"
    if isinstance(event, GradWrite):
        return "to .grad"
    return None


def join_alike(cases: list[Case], num_held: int) -> None:
    """One thing done to all that was judged stands in several cases where stages of a pipeline run different lines."""
    alike = [case for case in cases if case.pattern.kind == cases[0].pattern.kind == "uniform"]
    alike = [
        case
        for case in alike
        if abs(case.pattern.factor - alike[0].pattern.factor) <= SAME_FACTOR * abs(alike[0].pattern.factor)
    ]
    held = {id(held) for case in alike for held in case.held}
    if len(held) == sum(len(case.held) for case in alike) == num_held:
        for case in alike:
            case.everywhere = True
