"""Findings out of deviations of documented weights: like ones together, with the contributions that are off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradcheck_dist.axes import AXIS_NAMES
from gradcheck_dist.diagnosis.finding import Candidate, Factor, Finding, FirstEvent
from gradcheck_dist.diagnosis.rules import gs000_unexplained_scale as unexplained
from gradcheck_dist.diagnosis.weights.factors import exact_fraction, name_number
from gradcheck_dist.events import AnyEvent, Reduce, ScaleGrads, Site
from gradcheck_dist.stream.plain import PlainReader
from gradcheck_dist.stream.summaries import Block, BlockReader, detail
from gradcheck_dist.stream.watch import Deviation
from gradcheck_dist.trace.run import Run
from gradcheck_dist.trace.store import Place
from gradcheck_dist.wording import numbered

MAX_GROUPS = 200
MAX_RANKS = 4
"""Ranks of a deviation that are looked at contribution by contribution."""
ALIKE = 1e-4


@dataclass
class Group:
    """Steps with one and the same deviation: same ranks, same ratio where it is one."""

    first: Deviation
    steps: list[int]


class Groups:
    """Deviations, like ones together; bounded, whatever comes. `plain`: of steps that were recorded event by event."""

    def __init__(self, plain: bool = False) -> None:
        self.plain = plain
        self.groups: dict[tuple[object, ...], Group] = {}
        self.num_left_out = 0
        self.num_steps = 0

    def add(self, deviation: Deviation) -> None:
        self.num_steps += 1
        uniform = abs(deviation.high - deviation.low) <= ALIKE * abs(deviation.high)
        ratio = float(f"{deviation.high:.4g}") if uniform else "varies"
        key = (deviation.ranks, ratio)
        if key in self.groups:
            self.groups[key].steps.append(deviation.step)
        elif len(self.groups) < MAX_GROUPS:
            self.groups[key] = Group(deviation, [deviation.step])
        else:
            self.num_left_out += 1


@dataclass
class DocumentedCell:
    """One contribution as it is documented: `weight` of a token at its loss, `factor` on its way, `ratio` documented /
    expected."""

    rank: int
    slot: tuple[int, int]
    ratio: float
    weight: float
    factor: float
    num_tokens: int
    site: Site | None


def finding_of(
    group: Group,
    run: Run,
    files: dict[int, Place],
    tolerance: float,
    objective: str,
    plain: bool = False,
) -> Finding:
    """What is wrong with the documented weights of these steps, in the words of a report."""
    deviation = group.first
    blocks: dict[int, Block] = {}
    cells: list[DocumentedCell] = []
    for rank in deviation.ranks[:MAX_RANKS]:
        found = detail(files[rank], deviation.step, PlainReader if plain else BlockReader)
        if found is not None and found[0].shape.weight_rows:
            blocks[rank] = found[0]
            cells += cells_of(rank, *found, objective, deviation.expected)
    wrong = [cell for cell in cells if not abs(cell.ratio - 1) <= tolerance]
    ratios = [cell.ratio for cell in wrong] or [deviation.low, deviation.high]
    ratio = float(np.median(ratios))
    uniform = max(ratios) - min(ratios) <= ALIKE * abs(ratio)
    factor = _factor(ratio, uniform, wrong, cells, run, blocks, tolerance)
    event = _culprit(wrong, cells, blocks, uniform)
    where = _where(deviation, wrong, cells)
    pattern = f"{where}, {_size(ratios, uniform)}"
    return Finding(
        code=unexplained.CODE,
        name=unexplained.NAME,
        severity="error",
        step=deviation.step,
        factor=factor,
        pattern=pattern,
        units=["all parameters"],
        num_parameters=0,
        ranks=list(deviation.ranks),
        first_event=event,
        explanation=f"By what was recorded the weights are off: {pattern}. {_account(wrong)} These steps were "
        f"{'not measured' if plain else 'recorded without samples'}: recorded operations are taken to have done what "
        "they are documented to do.",
        fix="Look at how the loss of these contributions is divided, and at the recorded factor that follows it.",
        suggested_experiment=_experiment(deviation.step, plain),
        steps=group.steps,
    )


def _experiment(step: int, plain: bool) -> str:
    steps = f"--steps {step}:{step + 1}"
    if plain:
        return f"Measure step {step} (gradcheck diagnose RUN {steps}): it shows what really arrived in each parameter."
    return (
        f"Record step {step} with samples (gradcheck run {steps} -- ...): it shows what really arrived in each "
        "parameter."
    )


def cells_of(rank: int, block: Block, column: int, objective: str, expected: float) -> list[DocumentedCell]:
    """The contributions of a rank in one step, each by the way that is farthest off; `expected` as in a Deviation."""
    q = block.normalised(objective)[:, column] / expected
    weights, tokens = block.weights()[:, column], block.tokens()[:, column]
    shape = block.shape
    factors = np.array([way.factors for way in shape.ways])[:, shape.slot_of]
    ratios = q * factors
    worst = np.nanargmax(np.abs(np.nan_to_num(ratios, nan=1.0) - 1), axis=0)
    return [
        DocumentedCell(
            rank=rank,
            slot=shape.slots[shape.slot_of[index]],
            ratio=float(ratios[worst[index], index]),
            weight=float(weights[index]),
            factor=float(factors[worst[index], index]),
            num_tokens=int(tokens[index]),
            site=shape.sites[index],
        )
        for index in range(len(q))
        if tokens[index] > 0 and not np.isnan(ratios[worst[index], index])
    ]


def _size(ratios: list[float], uniform: bool) -> str:
    if uniform:
        return f"documented / expected = {float(np.median(ratios)):.6g}"
    return f"documented / expected between {min(ratios):.6g} and {max(ratios):.6g}"


def _where(deviation: Deviation, wrong: list[DocumentedCell], cells: list[DocumentedCell]) -> str:
    who = numbered("rank", deviation.ranks)
    slots = sorted({cell.slot for cell in wrong})
    if not slots or len(wrong) == len(cells):
        return f"all contributions of {who}"
    shown = ", ".join(f"(accumulation step {k}, microbatch {m})" for k, m in slots[:3])
    more = f" and {len(slots) - 3} more" if len(slots) > 3 else ""
    return f"{shown}{more} of {who}"


def _account(wrong: list[DocumentedCell]) -> str:
    if not wrong:
        return ""
    first = wrong[0]
    return (
        f"On rank {first.rank} accumulation step {first.slot[0]}, microbatch {first.slot[1]}, of {first.num_tokens} "
        f"tokens, enters the loss with {first.weight:.6g} a token and is multiplied by {first.factor:.6g} on its way."
    )


def _factor(
    ratio: float, uniform: bool, wrong: list[DocumentedCell], cells: list[DocumentedCell], run: Run,
    blocks: dict[int, Block], tolerance: float,
) -> Factor:  # fmt: skip
    if not uniform:
        products = [cell.ratio * cell.num_tokens for cell in wrong]
        alike = max(products) - min(products) <= ALIKE * abs(products[0]) if products else False
        expression = "num_tokens/(contributions * n_c)" if alike and len(wrong) == len(cells) else None
        return Factor(observed=ratio, expression=expression, tolerance=tolerance)
    quantities: dict[str, float] = {"world_size": float(run.world_size)}
    if run.axes is not None:
        quantities |= {name: float(degree) for name, degree in run.axes.as_dict().items()}
    for block in blocks.values():
        quantities["accumulation_steps"] = float(1 + max(slot[0] for slot in block.shape.slots))
        quantities["microbatches"] = float(1 + max(slot[1] for slot in block.shape.slots))
        quantities["divisor"] = next((e.divisor for e in block.shape.scaling if isinstance(e, ScaleGrads)), 1.0)
        break
    near = frozenset(AXIS_NAMES) if any(abs(cell.factor - 1) > ALIKE for cell in wrong) else frozenset[str]()
    names = name_number(abs(ratio), quantities, max(2 * tolerance, 1e-6), near=near)
    return Factor(
        observed=ratio,
        exact=exact_fraction(ratio, 2 * tolerance),
        expression=names[0].expression if names else None,
        tolerance=tolerance,
        candidates=[
            Candidate(expression=name.expression, value=name.value, exact=exact_fraction(name.value, 1e-9))
            for name in names
        ],
    )


def _culprit(
    wrong: list[DocumentedCell], cells: list[DocumentedCell], blocks: dict[int, Block], uniform: bool
) -> FirstEvent | None:
    """The loss, where it alone tells wrong contributions from right ones or nothing else scales; the one recorded
    factor, where the loss was right without it. None where both could be meant."""
    if not wrong:
        return None
    first = wrong[0]
    shape = blocks[first.rank].shape
    differs = [cell for cell in cells if cell not in wrong and cell.factor == first.factor]
    at_loss = first.ratio / first.factor if first.factor else 0.0
    if differs or abs(first.factor - 1) <= ALIKE:
        return _event("loss", first, first.site, None)
    scaling = [event for event in shape.scaling if _scales(event)]
    if uniform and abs(at_loss - 1) <= ALIKE and len({_line(event) for event in scaling}) == 1:
        event = scaling[0]
        op = event.op if isinstance(event, Reduce) else None
        return _event(str(event.__struct_config__.tag), first, event.site, op, factor=first.factor)
    return None


def _scales(event: AnyEvent) -> bool:
    return isinstance(event, ScaleGrads) or (isinstance(event, Reduce) and event.op != "sum")


def _line(event: AnyEvent) -> tuple[object, ...]:
    return (type(event), event.site and (event.site.file, event.site.line))


def _event(
    kind: str, cell: DocumentedCell, site: Site | None, op: str | None, factor: float | None = None
) -> FirstEvent:
    return FirstEvent(
        rank=cell.rank,
        seq=0,
        kind=kind,
        op=op,
        file=site.file if site else None,
        line=site.line if site else None,
        function=site.function if site else None,
        called_from=site.called_from if site else None,
        accumulation_step=cell.slot[0],
        microbatch=cell.slot[1],
        nominal_factor=factor,
    )


def same_ends(ends: tuple[float, float], ratios: list[float]) -> bool:
    """Whether some ratios lie between just these."""
    if not ratios:
        return False
    pairs = zip(ends, (min(ratios), max(ratios)), strict=True)
    return all(abs(one - other) <= ALIKE * max(abs(one), abs(other)) for one, other in pairs)
