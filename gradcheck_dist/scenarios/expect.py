"""Whether a judgement is exactly what the scenario's file says: looked at afterwards, never shown to the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gradcheck_dist.diagnosis.finding import ExpectedFinding, Finding, Report, Weight
from gradcheck_dist.reports.source import line_text, short_path
from gradcheck_dist.reports.text import number, printable
from gradcheck_dist.scenarios.formula import Formula
from gradcheck_dist.scenarios.schema import Expectation, ExpectedCulprit
from gradcheck_dist.trainer.config import TrainConfig

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Relative, of every observed ratio against the formula. bfloat16 sums round at 2^-8."""


def published(expect: Expectation | None) -> ExpectedFinding | None:
    """The expectation as it stands in a scenario's report."""
    if expect is None:
        return None
    culprit = f"{expect.culprit.kind} {expect.culprit.file}: {expect.culprit.line}"
    return ExpectedFinding(code=expect.code, name=expect.name, factor=expect.ratio.text, culprit=culprit)


def mismatch(expect: Expectation | None, report: Report, config: TrainConfig) -> str:
    """How the report differs from what must be found, in one sentence; empty when it does not."""
    return "; ".join(_differences(expect, report, config))


def _differences(expect: Expectation | None, report: Report, config: TrainConfig) -> Iterator[str]:
    wanted = {(expect.code, expect.name)} if expect else set()
    found = {(finding.code, finding.name) for finding in report.findings}
    verdict = "findings" if expect else "clean"
    if report.verdict != verdict:
        yield f"the verdict is {report.verdict}, not {verdict}"
    if found != wanted:
        yield f"found {_names(found)}, not {_names(wanted)}"
    yield from _wrong_steps(expect, report, config)
    if expect:
        for finding in report.findings:
            if finding.code == expect.code:
                yield from _wrong_culprit(expect.culprit, finding)
    yield from _wrong_weights(expect.ratio if expect else Formula("1"), report, config)


def _names(findings: set[tuple[str, str]]) -> str:
    return ", ".join(f"{code} {printable(name)}" for code, name in sorted(findings)) or "nothing"


def _wrong_steps(expect: Expectation | None, report: Report, config: TrainConfig) -> Iterator[str]:
    judged = {weight.step for weight in report.weights}
    if len(judged) != config.steps:
        yield f"{len(judged)} of {config.steps} steps have weights"
    if expect and report.findings:
        told = {step for finding in report.findings for step in (finding.steps or [finding.step])}
        if told != judged:
            yield f"the finding names the steps {sorted(told)}, not {sorted(judged)}"


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


def _wrong_weights(ratio: Formula, report: Report, config: TrainConfig) -> Iterator[str]:
    steps: dict[int, list[Weight]] = defaultdict(list)
    for weight in report.weights:
        steps[weight.step].append(weight)
    for step, weights in sorted(steps.items()):
        tokens = {_key(weight): weight.num_tokens for weight in weights if weight.num_tokens is not None}
        seen = {_key(weight) for weight in weights if weight.ratio is not None}
        wanted = config.axes.data_parallel_degree * config.contributions
        if len(seen) != wanted:
            yield f"step {step} has observed weights of {len(seen)} contributions, not of {wanted}"
        off = [difference for weight in weights if (difference := _difference(ratio, weight, tokens, config))]
        if off:
            yield f"{len(off)} of {len(weights)} weights of step {step} are off: {off[0]}"


def _key(weight: Weight) -> tuple[int, int, int]:
    key = weight.contribution
    return key.data_rank, key.accumulation_step, key.microbatch


def _difference(
    ratio: Formula, weight: Weight, tokens: dict[tuple[int, int, int], int], config: TrainConfig
) -> str | None:
    if weight.ratio is None:
        return None
    rank, accumulation_step, microbatch = _key(weight)
    values = {
        "R": config.axes.data_parallel_degree,
        "K": config.accum,
        "M": config.microbatches,
        "N": sum(tokens.values()),
        "N_r": sum(count for key, count in tokens.items() if key[0] == rank),
        "n_c": tokens.get((rank, accumulation_step, microbatch), 0),
        "k": accumulation_step,
        "m": microbatch,
        "r": rank,
    }
    wanted = float(ratio.evaluate(values))
    if abs(weight.ratio - wanted) <= TOLERANCE[config.dtype] * abs(wanted):
        return None
    place = (
        f"data rank {rank}, k={accumulation_step}, microbatch {microbatch}, "
        f"{printable(weight.unit)} on rank {weight.holder_rank}"
    )
    return f"ratio {number(weight.ratio, 7)} where {ratio.text} = {number(wanted, 7)} ({place})"
