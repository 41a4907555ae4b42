"""Fault and fix side by side: the evidence that a pull request which mends a scale needs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.reports.document import Document, build
from gradcheck_dist.reports.text import number, printable
from gradcheck_dist.reports.weights import shown_step, tolerance
from gradcheck_dist.wording import plural

MAX_STEPS = 10
WEIGHTS, NORM = "weights, observed / expected", "gradient norm"
_METRICS = {"grad_norm": NORM, "loss": "loss", "num_tokens": "tokens"}


@dataclass(frozen=True)
class Row:
    """One compared quantity."""

    what: str
    before: str
    after: str
    relation: str


_NOTHING = Row("", "-", "-", "")


@dataclass(frozen=True)
class Pair:
    """Two judged runs that should differ by a fix only. `state` is "clean" when the fix holds."""

    title: str
    state: str
    headline: str
    facts: tuple[str, ...]
    rows: tuple[Row, ...]
    before: Document
    after: Document


def side_by_side(pairs: Sequence[Pair]) -> tuple[tuple[str, ...], ...]:
    """Several pairs in one table, a row each (one model under DDP, FSDP, HSDP): mesh, weights and first norm, each
    before and after. The head comes first; () for less than two pairs."""
    if len(pairs) < 2:
        return ()
    rows = [("run", "result", "weights before", "weights after", "norm before", "norm after", "norm x")]
    for pair in pairs:
        found = {row.what: row for row in pair.rows}
        weights = found.get(WEIGHTS, _NOTHING)
        norm = next((row for row in pair.rows if row.what.startswith(NORM)), _NOTHING)
        rows.append(
            (pair.title, pair.headline.partition(":")[0], weights.before, weights.after,
             norm.before, norm.after, norm.relation.removeprefix("x ") or "-")
        )  # fmt: skip
    return tuple(rows)


def compare(before: Report, after: Report) -> Pair:
    """What the fix changed, and whether it mended what was found."""
    gone, left, new = _changes(before.findings, after.findings)
    facts = [*_list("fixed", gone), *_list("still there", left), *_list("new", new), *_differences(before, after)]
    state, headline = _verdict(before, after, gone, left, new)
    axes = " ".join(f"{printable(axis)}={degree}" for axis, degree in after.run.axes.items() if degree > 1)
    return Pair(
        title=axes or plural(after.run.world_size, "rank"),
        state=state,
        headline=headline,
        facts=(*facts, *_norm_fact(before, after)),
        rows=tuple(_rows(before, after)),
        before=build(before),
        after=build(after),
    )


def _verdict(
    before: Report, after: Report, gone: list[Finding], left: list[Finding], new: list[Finding]
) -> tuple[str, str]:
    if after.verdict == "undetermined":
        return "undetermined", "COULD NOT JUDGE the run after the fix"
    if left or new:
        what = [f"{plural(len(left), 'finding')} left"] if left else []
        what += [f"{plural(len(new), 'new finding')}"] if new else []
        return "findings", f"NOT FIXED: {' and '.join(what)}"
    if gone:
        names = ", ".join(dict.fromkeys(f"{printable(one.code)} {printable(one.name)}" for one in gone))
        return "clean", f"FIXED: {names}; every token now weighs what the objective says"
    if before.verdict == "undetermined":
        return "undetermined", "COULD NOT JUDGE the run before the fix, so nothing shows what was fixed"
    return "undetermined", "NOTHING TO FIX: the run before the fix is clean too"


def _changes(before: Iterable[Finding], after: Iterable[Finding]) -> tuple[list[Finding], list[Finding], list[Finding]]:
    """Findings that went, stayed and came: the same rule, factor and kind of culprit is the same finding."""
    old, now = {_key(one): one for one in before}, {_key(one): one for one in after}
    gone = [one for key, one in old.items() if key not in now]
    left = [one for key, one in now.items() if key in old]
    return gone, left, [one for key, one in now.items() if key not in old]


def _key(finding: Finding) -> tuple[str, str | None, str | None]:
    kind = finding.first_event.kind if finding.first_event else None
    return finding.code, finding.factor.expression, kind


def _list(word: str, findings: list[Finding]) -> list[str]:
    return [
        f"{word}: {printable(one.code)} {printable(one.name)}, factor "
        f"{printable(one.factor.expression or number(one.factor.observed))}"
        for one in findings[:5]
    ]


def _differences(before: Report, after: Report) -> list[str]:
    """What else differs between the two runs: evidence is weaker where more than the fix changed."""
    facts = []
    for what, old, now in (
        ("world size", str(before.run.world_size), str(after.run.world_size)),
        ("axes", str(before.run.axes), str(after.run.axes)),
        ("objective", before.run.objective, after.run.objective),
        ("dtype", before.run.dtype, after.run.dtype),
        ("torch", before.run.torch_version, after.run.torch_version),
        ("tokens", str(before.metrics.get("num_tokens")), str(after.metrics.get("num_tokens"))),
    ):
        if old != now:
            facts.append(f"more than the fix differs: {what} {printable(old, 80)} before, {printable(now, 80)} after")
    return facts


def _norm_fact(before: Report, after: Report) -> list[str]:
    """Whether the norm of the first step, where both runs have the same parameters, moved as the factor says."""
    old, now = before.metrics.get("grad_norm"), after.metrics.get("grad_norm")
    if not before.findings or before.findings[0].num_parameters < before.coverage.parameters_total:
        return []  # the rest of the norm stayed as it was
    uniform = before.findings[0].pattern.startswith("every contribution")
    factor = before.findings[0].factor.observed
    if not old or not now or not old[0] or not now[0] or not factor or not uniform or len(before.findings) > 1:
        return []
    measured, promised = now[0] / old[0], 1 / factor
    agree = abs(measured / promised - 1) < 0.02
    word = "as" if agree else "NOT as"
    return [
        f"the first step's norm changed by x {number(measured)}, {word} the factor {number(factor)} says (x "
        f"{number(promised)})"
    ]


def _rows(before: Report, after: Report) -> Iterable[Row]:
    yield Row("verdict", before.verdict, after.verdict, "")
    old, now = _ratios(before), _ratios(after)
    yield Row(WEIGHTS, _span(old), _span(now), _relation(_middle(old), _middle(now)))
    yield Row("weights off", _off(before, old), _off(after, now), "")
    for name, words in _METRICS.items():
        old_of = dict(before.series(name))
        pairs = [(step, old_of[step], value) for step, value in after.series(name) if step in old_of]
        for step, one, other in pairs[:MAX_STEPS]:
            yield Row(f"{words}, step {step}", number(one), number(other), _relation(one, other))


def _ratios(report: Report) -> list[float]:
    step = shown_step(report)
    return [weight.ratio for weight in report.weights if weight.step == step and weight.ratio is not None]


def _middle(ratios: list[float]) -> float | None:
    return statistics.median(ratios) if ratios else None


def _span(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    low, high = number(min(ratios)), number(max(ratios))
    return low if low == high else f"{low} to {high}"


def _off(report: Report, ratios: list[float]) -> str:
    return f"{sum(abs(ratio - 1) > tolerance(report) for ratio in ratios)} of {len(ratios)}"


def _relation(before: float | None, after: float | None) -> str:
    return f"x {number(after / before, 4)}" if before and after else ""
