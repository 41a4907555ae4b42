"""What the ratio of two jobs' curves says: the same, a factor with a name, or a drift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

import numpy as np

from gradcheck_dist.compare.sources import Source
from gradcheck_dist.compare.statistics import Aligned, Ratio, align, align_by_tokens, ratio, seen_tokens
from gradcheck_dist.diagnosis.weights.factors import Name, name_number
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports.text import number, printable
from gradcheck_dist.wording import plural

SAME = 0.01
"""Closer to 1 than this nobody needs to look, whatever the band says."""
MIN_TOLERANCE = 0.002
MAX_TOLERANCE = 0.12
CHANCE_WINDOW = 4.0
MAX_CHANCE = 0.2
WORDS = {"loss": "loss", "grad_norm": "gradient norm", "tokens": "tokens a step"}

State = Literal["same", "factor", "drift", "clipped", "too few"]
By = Literal["step", "tokens"]


@dataclass(frozen=True)
class Metric:
    """One quantity of one test against the control. `names` explain a standing ratio, best first."""

    role: str
    state: State
    ratio: Ratio | None
    names: tuple[Name, ...]
    text: str
    aligned: Aligned


@dataclass(frozen=True)
class Test:
    """One job against the control."""

    name: str
    metrics: tuple[Metric, ...]
    notes: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """ "findings" when something is off, "undetermined" when nothing could be compared, else "clean"."""
        states = {metric.state for metric in self.metrics if metric.role != "tokens"}
        if states & {"factor", "drift"}:
            return "findings"
        return "clean" if "same" in states else "undetermined"


@dataclass(frozen=True)
class Comparison:
    control: str
    by: By
    axes: Mapping[str, float]
    tests: tuple[Test, ...]
    sources: tuple[Source, ...] = field(default=())

    @property
    def exit_code(self) -> int:
        """0 all coincide, 1 some test is off, 2 something could not be compared."""
        states = {test.state for test in self.tests}
        return 1 if "findings" in states else 2 if "undetermined" in states else 0


def parse_axes(text: str | None) -> dict[str, float]:
    """ "dp=4,pp=2,accum=10" as numbers by name.

    Raises:
        GradcheckError: E913 it reads differently.
    """
    axes: dict[str, float] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, _, value = part.partition("=")
        try:
            degree = float(value)
        except ValueError:
            degree = math.nan
        if not name.strip().isidentifier() or not 0 < degree < 1e12:
            raise GradcheckError(
                f"--axes is {text!r}, where {part!r} is no degree; write names and positive numbers: "
                "--axes dp=4,pp=2,accum=10.",
                code="E913",
            )
        axes[name.strip()] = degree
    return axes


def compare(control: Source, tests: Sequence[Source], axes: Mapping[str, float], by: By = "step") -> Comparison:
    """Compare jobs with a control. Degrees that run folders know are added to those given.

    Raises:
        GradcheckError: E914 tokens are asked for, and a job did not log them.
    """
    if by == "tokens":
        for source in (control, *tests):
            if "tokens" not in source.curves:
                raise GradcheckError(
                    f"{source.name} has no curve of tokens to align by. Name it with --tokens NAME, or use --by step.",
                    code="E914",
                )
    known: dict[str, float] = {}
    for source in (control, *tests):
        known |= source.axes
    results = tuple(_test(control, source, axes or {**control.axes, **source.axes}, by) for source in tests)
    return Comparison(control.name, by, axes or known, results, (control, *tests))


def _test(control: Source, test: Source, axes: Mapping[str, float], by: By) -> Test:
    metrics = []
    for role in ("grad_norm", "loss", "tokens"):
        if role in control.curves and role in test.curves and not (role == "tokens" and by == "tokens"):
            metrics.append(_metric(role, _aligned(control, test, role, by), axes))
    return Test(test.name, tuple(metrics), tuple(_notes(control, test, {one.role: one for one in metrics})))


def _aligned(control: Source, test: Source, role: str, by: By) -> Aligned:
    left, right = control.curves[role], test.curves[role]
    if by == "step":
        return align(left, right)
    return align_by_tokens(left, seen_tokens(control.curves["tokens"]), right, seen_tokens(test.curves["tokens"]))


def _metric(role: str, aligned: Aligned, axes: Mapping[str, float]) -> Metric:
    found = ratio(aligned) if len(aligned.at) else None
    if found is None:
        text = f"{plural(len(aligned.at), 'common point')}; a ratio needs 2 or more: record or log more steps"
        return Metric(role, "too few", None, (), text, aligned)
    if role == "grad_norm" and _is_clipped(aligned):
        text = "most values are the same number: this norm was logged after clipping, and tells nothing of the scale"
        return Metric(role, "clipped", found, (), text, aligned)
    if found.is_drifting:
        change = f"{found.drift:+.1%}"
        text = f"drift: the ratio changes by {change} over the run, so no constant factor explains all of it"
        is_off = abs(math.log(found.start)) > max(SAME, found.start_half)
        names = explanations(found.start, found.start_half, axes) if is_off else []
        if names:
            text = f"begins at {number(found.start, 4)}{_named(names)}, then drifts by {change} as the jobs part"
            text += experiment(names, axes)
        elif is_off:
            text += f"; it begins at {number(found.start, 4)}"
        return Metric(role, "drift", found, tuple(names), text, aligned)
    if abs(math.log(found.value)) <= max(SAME, math.log1p(found.half)):
        return Metric(role, "same", found, (), "the same", aligned)
    names = explanations(found.value, found.half, axes)
    return Metric(role, "factor", found, tuple(names), _factor_text(found, names, axes), aligned)


def explanations(value: float, half: float, axes: Mapping[str, float]) -> list[Name]:
    """Products of the degrees that equal a ratio within its band, then their square roots; [] when it is too wide."""
    tolerance = max(half, MIN_TOLERANCE)
    if tolerance > MAX_TOLERANCE or not axes:
        return []
    names = [one for one in name_number(value, axes, tolerance) if not is_chance(one, axes, tolerance)]
    if names:
        return names
    squares = name_number(value**2, axes, 2 * tolerance, max_factors=1)
    squares = [one for one in squares if not is_chance(one, axes, 2 * tolerance)]
    return [Name(f"sqrt({one.expression})", math.sqrt(one.value), one.powers, one.cost + 1) for one in squares]


def is_chance(name: Name, axes: Mapping[str, float], tolerance: float) -> bool:
    """Whether some product as complicated as this one would fit almost any number within the tolerance.

    Counted are the different values that such products have near this one; what they cover of that stretch with their
    tolerances is how often a number that means nothing would get a name.
    """
    complexity = sum(abs(exponent) for _, exponent in name.powers)
    values = {0.0}
    usable = sorted(value for value in set(axes.values()) if value != 1)
    for exponents in product(range(-2, 3), repeat=min(len(usable), 6)):
        if 0 < sum(map(abs, exponents)) <= complexity:
            logs = (exponent * math.log(value) for exponent, value in zip(exponents, usable, strict=False))
            values.add(round(sum(logs), 6))
    near = sum(abs(value - math.log(name.value)) <= math.log(CHANCE_WINDOW) for value in values)
    return near * math.log1p(tolerance) / math.log(CHANCE_WINDOW) > MAX_CHANCE


def _factor_text(found: Ratio, names: list[Name], axes: Mapping[str, float]) -> str:
    if not axes:
        return "a constant factor; name the degrees of the mesh to have it explained: --axes dp=4,pp=2,accum=10"
    if max(found.half, MIN_TOLERANCE) > MAX_TOLERANCE:
        return "off, but its band is too wide to name a factor: compare more steps"
    if not names:
        given = ", ".join(f"{name}={number(value)}" for name, value in axes.items())
        return (
            f"a constant factor that no simple product of {given} explains; weights that differ between microbatches "
            "make such a one: record a step with `gradcheck run` and see them"
        )
    text = _named(names).removeprefix(" = ")
    if names[0].expression.startswith("sqrt("):
        text += "; a root points to a norm over one shard only, or to gradients that were never averaged"
    return text + experiment(names, axes)


def _named(names: Sequence[Name]) -> str:
    alike = [one.expression for one in names if one.cost <= names[0].cost + 0.75][:4] if names else []
    return f" = {' or '.join(alike)}" if alike else ""


def experiment(names: Sequence[Name], axes: Mapping[str, float]) -> str:
    """The smallest change that would tell the two best explanations apart, "" when one stands alone."""
    rivals = [one for one in names if one.cost <= names[0].cost + 0.75]
    if len(rivals) < 2:
        return ""
    first, second = ({name for name, _ in one.powers} for one in rivals[:2])
    differing = sorted(first ^ second, key=lambda name: (not _is_cheap(name), name))
    for name in differing:
        taken = {round(value) for value in axes.values()}
        other = next(value for value in (3, 5, 7, 6, 2, 9, 11) if value not in taken)
        return f"; run with {name}={other} to tell"
    return ""


def _is_cheap(name: str) -> bool:
    """Accumulation and microbatches change with a flag; other degrees take other machines."""
    return "accum" in name or "micro" in name


def _is_clipped(aligned: Aligned) -> bool:
    for values in (aligned.control, aligned.test):
        _, counts = np.unique(np.round(values, 5), return_counts=True)
        if len(values) >= 8 and counts.max() > 0.8 * len(values):
            return True
    return False


def _notes(control: Source, test: Source, metrics: Mapping[str, Metric]) -> list[str]:
    notes = [f"judged by its own weights: {test.verdict}"] if test.verdict else []
    norm, loss, tokens = metrics.get("grad_norm"), metrics.get("loss"), metrics.get("tokens")
    if norm is not None and loss is not None and norm.state in ("factor", "drift") and loss.state == "same":
        notes.append(WHY_THE_LOSS_LOOKS_FINE)
    if loss is not None and loss.state == "factor":
        notes.append(
            "the loss itself is off by a constant: it is logged or normalised differently, which need not touch the "
            "gradients; look at the norm"
        )
    if tokens is not None and tokens.state in ("factor", "drift"):
        notes.append("the jobs do not see the same number of tokens a step: compare with --by tokens")
    for role in ("grad_norm", "loss"):
        if role not in metrics:
            who = [source.name for source in (control, test) if role not in source.curves]
            flag = "--" + role.replace("_", "-")
            notes.append(f"{WORDS[role]}: not found in {', '.join(map(printable, who))}; name it with {flag} NAME")
    return notes


WHY_THE_LOSS_LOOKS_FINE = (
    "the norm is off and the loss is not: Adam divides every gradient by its own running magnitude, and clipping "
    "rescales to max_norm, so a constant factor hardly moves the updates. It still matters: the clip threshold, "
    "epsilon and weight decay act at another strength, SGD takes other steps, and another mesh trains differently"
)
