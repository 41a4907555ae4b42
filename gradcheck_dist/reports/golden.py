"""The scale of a trainer, frozen in a file: a later change of weights, factors or norms is told by name.

Held are the ratios observed / expected for each step, unit, data rank, accumulation step and microbatch (median over
the holders), the names of the findings, and loss, norm and tokens by step. Units are what had the same weights in that
run, so those that differ are compared by their parameters.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator

import msgspec

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports.text import number, printable
from gradcheck_dist.wording import plural

GOLDEN_SCHEMA_VERSION = 1
MAX_TOLD = 20
METRIC_TOLERANCE = 0.01
"""Relative. Weights are exact up to rounding; losses and norms drift between machines and torch versions."""

Cell = tuple[int, str, int, int, int]


class GoldenWeight(msgspec.Struct, kw_only=True):
    step: int
    unit: str
    data_rank: int
    accumulation_step: int
    microbatch: int
    num_tokens: int | None
    ratio: float | None
    observed: float | None

    @property
    def cell(self) -> Cell:
        return self.step, self.unit, self.data_rank, self.accumulation_step, self.microbatch


class GoldenFinding(msgspec.Struct, kw_only=True, frozen=True):
    code: str
    name: str
    expression: str | None


class Golden(msgspec.Struct, kw_only=True):
    """What is frozen. The tolerances are relative and may be edited."""

    golden_schema_version: int = GOLDEN_SCHEMA_VERSION
    verdict: str
    axes: dict[str, int]
    objective: str
    dtype: str
    weight_tolerance: float
    metric_tolerance: float = METRIC_TOLERANCE
    findings: list[GoldenFinding]
    metrics: dict[str, list[float | None]]
    weights: list[GoldenWeight]
    units: dict[str, list[str]] = {}
    """The parameters of each unit; a file without them is compared by the names of units."""

    def beside(self, other: Golden) -> dict[Cell, GoldenWeight]:
        """The weights by cell; a unit that is not the same in `other` stands there parameter by parameter."""
        known = bool(self.units and other.units)
        apart = {unit: names for unit, names in self.units.items() if known and other.units.get(unit) != names}
        return {
            (weight.step, name, *weight.cell[2:]): weight
            for weight in self.weights
            for name in apart.get(weight.unit, (weight.unit,))
        }


def freeze(report: Report) -> Golden:
    """The scale of a judged run.

    Raises:
        GradcheckError: E705 the run could not be judged.
    """
    if report.verdict == "undetermined":
        raise GradcheckError(
            "a run that could not be judged freezes nothing: "
            f"{printable(' '.join(report.reasons)) or 'see its coverage'}. Record a run that can be judged.",
            code="E705",
        )
    return _freeze(report)


def _freeze(report: Report) -> Golden:
    cells: dict[Cell, list[tuple[float | None, float | None, int | None]]] = defaultdict(list)
    for weight in report.weights:
        key = weight.contribution
        cell = (weight.step, weight.unit, key.data_rank, key.accumulation_step, key.microbatch)
        cells[cell].append((weight.ratio, weight.observed, weight.num_tokens))
    return Golden(
        verdict=report.verdict,
        axes={axis: degree for axis, degree in report.run.axes.items() if degree > 1},
        objective=report.run.objective,
        dtype=report.run.dtype,
        weight_tolerance=max(10 * (report.tolerance or 0.0), 1e-4),
        findings=sorted(
            (GoldenFinding(code=one.code, name=one.name, expression=one.factor.expression) for one in report.findings),
            key=str,
        ),
        metrics={
            name: list(report.metrics[name]) for name in ("loss", "grad_norm", "num_tokens") if name in report.metrics
        },
        weights=[
            GoldenWeight(
                step=cell[0],
                unit=cell[1],
                data_rank=cell[2],
                accumulation_step=cell[3],
                microbatch=cell[4],
                num_tokens=held[0][2],
                ratio=_median(ratio for ratio, _, _ in held),
                observed=_median(observed for _, observed, _ in held),
            )
            for cell, held in sorted(cells.items())
        ],
        units={unit.unit: unit.parameters for unit in report.units},
    )


def encode(golden: Golden) -> str:
    """The file's text."""
    return msgspec.json.format(msgspec.json.encode(golden), indent=1).decode() + "\n"


def decode(data: bytes, name: str = "the golden file") -> Golden:
    """What a file holds.

    Raises:
        GradcheckError: E704 it is no golden file of this version.
    """
    try:
        golden = msgspec.json.decode(data, type=Golden)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _no_golden(name, str(error)) from error
    if golden.golden_schema_version != GOLDEN_SCHEMA_VERSION:
        raise _no_golden(name, f"its version is {golden.golden_schema_version}, not {GOLDEN_SCHEMA_VERSION}")
    return golden


def _no_golden(name: str, reason: str) -> GradcheckError:
    return GradcheckError(
        f"{name} is no golden file: {printable(reason)}. Write one with `gradcheck diagnose RUN --export-golden FILE`.",
        code="E704",
    )


def differences(golden: Golden, report: Report) -> list[str]:
    """What is no longer as it was frozen, in words, most important first; [] when all is."""
    now = _freeze(report)
    told = [*_findings(golden, now), *_facts(golden, now), *_weights(golden, now), *_metrics(golden, now)]
    if report.verdict == "undetermined":
        told.insert(0, f"could not be judged: {printable(' '.join(report.reasons))}")
    rest = len(told) - MAX_TOLD
    return told if rest <= 0 else [*told[:MAX_TOLD], f"and {plural(rest, 'more difference')}"]


def _findings(golden: Golden, now: Golden) -> Iterator[str]:
    for word, some, others in (("new", now, golden), ("gone", golden, now)):
        for one in some.findings:
            if one not in others.findings:
                expression = f", factor {printable(one.expression)}" if one.expression else ""
                yield f"{word} finding {printable(one.code)} {printable(one.name)}{expression}"


def _facts(golden: Golden, now: Golden) -> Iterator[str]:
    for what, old, new in (
        ("axes", str(golden.axes), str(now.axes)),
        ("objective", golden.objective, now.objective),
        ("dtype", golden.dtype, now.dtype),
    ):
        if old != new:
            yield f"{what}: {printable(new, 80)}, frozen {printable(old, 80)}"


def _weights(golden: Golden, now: Golden) -> Iterator[str]:
    """Cells that are off, gathered by the factor by which they moved: one line a factor."""
    old, new = golden.beside(now), now.beside(golden)
    tolerance = max(golden.weight_tolerance, now.weight_tolerance)
    moved: dict[str, list[Cell]] = defaultdict(list)
    for cell in old.keys() & new.keys():
        before, after = old[cell].ratio, new[cell].ratio
        if before is None or after is None:
            if before is not after:
                moved["could be identified only once"].append(cell)
        elif abs(after - before) > tolerance * max(abs(before), abs(after)):
            moved[f"x {number(after / before, 4)}" if before else f"{number(after)} instead of 0"].append(cell)
    for factor, some in sorted(moved.items(), key=lambda item: -len(item[1])):
        first = min(some)
        step, name, data_rank, accumulation_step, microbatch = first
        yield (
            f"weights {factor}: {len(some)} of {len(new)}, first step {step}, {printable(name, 80)}, data rank "
            f"{data_rank}, accumulation step {accumulation_step}, microbatch {microbatch}: "
            f"ratio {number(old[first].ratio)} frozen, {number(new[first].ratio)} now"
        )
    for word, count in (("fewer", len(old.keys() - new.keys())), ("more", len(new.keys() - old.keys()))):
        if count:
            yield f"{plural(count, 'weight')} {word} than frozen"


def _metrics(golden: Golden, now: Golden) -> Iterator[str]:
    for name, old in golden.metrics.items():
        new = now.metrics.get(name)
        if new is None:
            yield f"{printable(name)} is no longer recorded"
            continue
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            if before is None or after is None:
                if before is not after:
                    yield f"{printable(name)}, recorded step {index}: {number(after)}, frozen {number(before)}"
                    break
            elif abs(after - before) > golden.metric_tolerance * max(abs(before), abs(after)):
                times = f" (x {number(after / before, 4)})" if before else ""
                yield f"{printable(name)}, recorded step {index}: {number(after)}, frozen {number(before)}{times}"
                break


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
