"""Whether a judgement is exactly what the scenario's file says: looked at afterwards, never shown to the engine."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from gradcheck_dist.diagnosis.finding import ExpectedFinding, Finding, Report, Weight
from gradcheck_dist.events import LossGradient
from gradcheck_dist.reports.source import line_text, short_path
from gradcheck_dist.reports.text import number, printable
from gradcheck_dist.scenarios.formula import Formula
from gradcheck_dist.scenarios.jobs import sizes_of
from gradcheck_dist.scenarios.schema import Expectation, ExpectedCulprit
from gradcheck_dist.trace.run import Run
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.wording import plural

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative, of every observed ratio against the formula. bfloat16 sums round at 2^-8."""


def published(expect: Sequence[Expectation]) -> ExpectedFinding | None:
    """The expectation as it stands in a scenario's report; several findings share its texts, one after the other."""
    if not expect:
        return None
    culprits = [f"{one.culprit.kind} {one.culprit.file}: {one.culprit.line}" for one in expect]
    return ExpectedFinding(
        code=", ".join(one.code for one in expect),
        name=", ".join(one.name for one in expect),
        factor=", ".join(one.ratio.text for one in expect),
        culprit=", ".join(dict.fromkeys(culprits)),
    )


def mismatch(
    expect: Sequence[Expectation], report: Report, config: TrainConfig, without_tokens: Mapping[int, int] | None = None
) -> str:
    """How the report differs from what must be found, in one sentence; empty when it does not.

    `without_tokens`: of each step, how many contributions have no token that a weight could be told of.
    """
    return "; ".join(_differences(expect, report, config, without_tokens or {}))


def contributions_without_tokens(run: Run, config: TrainConfig) -> dict[int, int]:
    """How many contributions of each step count no token: all labels of their parts of the documents are masked."""
    tokens: Counter[tuple[int, int, int, int]] = Counter()
    for rank, trace in run.ranks.items():
        for event in trace.events:
            if isinstance(event, LossGradient) and event.num_tokens is not None:
                key = event.step, _data_rank(rank, config), event.accumulation_step, event.microbatch
                tokens[key] += event.num_tokens
    return Counter(step for (step, *_), count in tokens.items() if not count)


def _differences(
    expect: Sequence[Expectation], report: Report, config: TrainConfig, without_tokens: Mapping[int, int]
) -> Iterator[str]:
    wanted = sorted((one.code, one.name) for one in expect)
    found = sorted((finding.code, finding.name) for finding in report.findings)
    verdict = "findings" if expect else "clean"
    if report.verdict != verdict:
        yield f"the verdict is {report.verdict}, not {verdict}"
    if found != wanted:
        yield f"found {_names(found)}, not {_names(wanted)}"
    yield from _wrong_steps(expect, report, config)
    for one in expect:
        candidates = [finding for finding in report.findings if (finding.code, finding.name) == (one.code, one.name)]
        # Of several findings with one code any may be the one that is meant.
        differences = [list(_wrong_finding(one, finding, report, config)) for finding in candidates]
        yield from min(differences, key=len, default=[])
    yield from _wrong_weights(expect, report, config, without_tokens)


def _names(findings: list[tuple[str, str]]) -> str:
    return ", ".join(f"{code} {printable(name)}" for code, name in findings) or "nothing"


def _wrong_steps(expect: Sequence[Expectation], report: Report, config: TrainConfig) -> Iterator[str]:
    judged = {weight.step for weight in report.weights}
    wanted = config.steps - len(report.run.skipped_steps)
    if len(judged) != wanted or not wanted:
        yield f"{len(judged)} of {wanted} steps have weights"
    if expect and report.findings:
        told = {step for finding in report.findings for step in (finding.steps or [finding.step])}
        meant = {step for step in judged if any(step >= one.from_step for one in expect)}
        if told != meant:
            yield f"the finding names the steps {sorted(told)}, not {sorted(meant)}"


def _wrong_finding(expected: Expectation, finding: Finding, report: Report, config: TrainConfig) -> Iterator[str]:
    yield from _wrong_culprit(expected.culprit, finding)
    named, wanted = finding.factor.expression, _factor_name(expected.factor, config)
    equal = {one.expression for one in finding.factor.candidates}  # sizes that are the same number in this run
    if wanted is not None and wanted not in {named, *equal}:
        yield f"the factor is called {printable(named or 'nothing')}, not {wanted}"
    if expected.terms:
        yield from _wrong_terms(expected, finding, report, config)
    if expected.parameters:
        concerned = {name for unit in report.units for name in unit.parameters if expected.concerns(name)}
        if finding.num_parameters != len(concerned):
            yield (
                f"the finding concerns {plural(finding.num_parameters, 'parameter')}, not the {len(concerned)} of "
                f"{', '.join(expected.parameters)}"
            )


def _factor_name(name: str | None, config: TrainConfig) -> str | None:
    """A product's name, or that of one over it, without what is 1 in this configuration."""
    if name is None:
        return None
    sizes = {**config.axes.as_dict(), "accumulation_steps": config.accum, "microbatches": config.microbatches}
    parts = name.removeprefix("1/").strip("()").split(" * ")
    parts = [part for part in parts if sizes.get(part) != 1] or parts
    product = " * ".join(parts)
    if not name.startswith("1/"):
        return product
    return f"1/({product})" if len(parts) > 1 else f"1/{product}"


def _wrong_terms(expected: Expectation, finding: Finding, report: Report, config: TrainConfig) -> Iterator[str]:
    for term in expected.terms:
        if term not in finding.pattern:
            yield f"the finding says {printable(finding.pattern)}, and nothing of the loss term {term}"
    counted = {_key(weight): weight.num_tokens or 0 for weight in report.weights if weight.step == finding.step}
    values = {**sizes_of(config), **dict.fromkeys(("N_r", "n_c", "k", "m", "r", "h"), 0), "N": sum(counted.values())}
    wanted, found = float(expected.ratio.evaluate(values)), finding.factor.observed
    if found is None or abs(found - wanted) > TOLERANCE[config.dtype] * abs(wanted):
        yield f"the term's factor is {found}, not {expected.ratio.text} = {number(wanted, 7)}"


def _wrong_culprit(expected: ExpectedCulprit, finding: Finding) -> Iterator[str]:
    event = finding.first_event
    if event is None:
        yield "no culprit is named"
        return
    if event.kind != expected.kind:
        yield f"the culprit is a {event.kind}, not a {expected.kind}"
    file = short_path(event.file) if event.file else ""
    if not file.endswith(expected.file):
        yield f"the culprit lies in {file or 'no file'}, not in {expected.file}"
    text = line_text(event.file, event.line)
    if text is None or expected.line not in text:
        yield f"the culprit's line {event.line} is {text!r}, which does not hold {expected.line!r}"


def _wrong_weights(
    expect: Sequence[Expectation], report: Report, config: TrainConfig, without_tokens: Mapping[int, int]
) -> Iterator[str]:
    members = {unit.unit: unit.parameters for unit in report.units}
    split = [
        f"{printable(unit)} holds parameters of {', '.join(one.parameters)} and others"
        for one in expect
        for unit, names in members.items()
        if len({one.concerns(name) for name in names}) > 1
    ]
    yield from split[:1]
    steps: dict[int, list[Weight]] = defaultdict(list)
    for weight in report.weights:
        steps[weight.step].append(weight)
    for step, weights in sorted(steps.items()):
        tokens = {_key(weight): weight.num_tokens for weight in weights if weight.num_tokens is not None}
        seen = {_key(weight) for weight in weights if weight.ratio is not None}
        wanted = config.gradient_ranks * config.contributions - without_tokens.get(step, 0)
        if len(seen) != wanted:
            yield f"step {step} has observed weights of {len(seen)} contributions, not of {wanted}"
        off = []
        for weight in weights:
            names = members.get(weight.unit, [])
            ratios = [
                one.ratio
                for one in expect
                if not one.terms and step >= one.from_step and (not one.parameters or any(map(one.concerns, names)))
            ]
            off.append(_difference(ratios, weight, tokens, config))
        wrong = [difference for difference in off if difference]
        if wrong:
            yield f"{len(wrong)} of {len(weights)} weights of step {step} are off: {wrong[0]}"


def _key(weight: Weight) -> tuple[int, int, int]:
    key = weight.contribution
    return key.data_rank, key.accumulation_step, key.microbatch


def _data_rank(rank: int, config: TrainConfig) -> int:
    """Which contributions a global rank makes: its place on dp_replicate * dp_shard * cp."""
    axes, position = config.axes, config.axes.coordinates(rank)
    return (position["dp_replicate"] * axes.dp_shard + position["dp_shard"]) * axes.cp + position["cp"]


def _difference(
    ratios: Sequence[Formula], weight: Weight, tokens: dict[tuple[int, int, int], int], config: TrainConfig
) -> str | None:
    if weight.ratio is None:
        return None
    rank, accumulation_step, microbatch = _key(weight)
    values = {
        **sizes_of(config),
        "N": sum(tokens.values()),
        "N_r": sum(count for key, count in tokens.items() if key[0] == rank),
        "n_c": tokens.get((rank, accumulation_step, microbatch), 0),
        "k": accumulation_step,
        "m": microbatch,
        "r": rank,
        "h": _data_rank(weight.holder_rank, config),
    }
    wanted = float(math.prod((ratio.evaluate(values) for ratio in ratios), start=Fraction(1)))
    if abs(weight.ratio - wanted) <= TOLERANCE[config.dtype] * (abs(wanted) or 1.0):
        return None
    place = (
        f"data rank {rank}, k={accumulation_step}, microbatch {microbatch}, "
        f"{printable(weight.unit)} on rank {weight.holder_rank}"
    )
    formula = " * ".join(ratio.text for ratio in ratios) or "1"
    return f"ratio {number(weight.ratio, 7)} where {formula} = {number(wanted, 7)} ({place})"
