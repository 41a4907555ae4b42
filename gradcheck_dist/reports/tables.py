"""A judged run as plain tables, with the unit and meaning of every column: for pandas, CSV and Parquet alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Clip
from gradcheck_dist.reports.timeline import spans
from gradcheck_dist.trace.columns import clips
from gradcheck_dist.trace.run import Run

PER_TOKEN = "1/tokens"


@dataclass(frozen=True)
class Column:
    """`kind` is the type of its values: "int", "float", "str" or "bool"; any value may be missing."""

    name: str
    kind: str
    unit: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """Rows are tuples in the order of the columns, None where a value is missing."""

    name: str
    columns: tuple[Column, ...]
    rows: list[tuple[Any, ...]] = field(default_factory=list)


_STEP = Column("step", "int", "", "optimizer step")
_DATA_RANK = Column("data_rank", "int", "", "data coordinate of the contribution")
_ACCUMULATION = Column("accumulation_step", "int", "", "k of the contribution, from 0")
_MICROBATCH = Column("microbatch", "int", "", "pipeline microbatch of the contribution, from 0")
_TOKENS = Column("num_tokens", "int", "tokens", "valid tokens of the contribution")
_RANK = Column("rank", "int", "", "global rank")

FINDINGS = (
    _STEP,
    Column("code", "str", "", "code of the rule"),
    Column("name", "str", "", "name of the rule"),
    Column("severity", "str", "", "error, warning or info"),
    Column("factor", "float", "1", "observed / expected"),
    Column("exact", "str", "1", "the factor as a fraction"),
    Column("expression", "str", "", "the factor's name"),
    Column("pattern", "str", "", "where the factor lies in the matrix of weights"),
    Column("num_parameters", "int", "parameters", "parameters that are affected"),
    Column("ranks", "str", "", "holder ranks, separated by blanks"),
    Column("file", "str", "", "source file of the culprit"),
    Column("line", "int", "", "source line of the culprit, from 1"),
    Column("event", "str", "", "kind and operation of the culprit"),
    Column("explanation", "str", "", "why"),
    Column("fix", "str", "", "what to do"),
)
WEIGHTS = (
    _STEP,
    Column("unit", "str", "", "parameters that share one gradient path"),
    Column("holder_rank", "int", "", "rank that holds the gradient"),
    _DATA_RANK,
    _ACCUMULATION,
    _MICROBATCH,
    _TOKENS,
    Column("expected", "float", PER_TOKEN, "weight of one token's loss by the objective"),
    Column("expected_exact", "str", PER_TOKEN, "the same as a fraction"),
    Column("nominal", "float", PER_TOKEN, "weight by the documented meaning of the recorded operations"),
    Column("observed", "float", PER_TOKEN, "weight that was measured"),
    Column("ratio", "float", "1", "observed / expected"),
    Column("stderr", "float", PER_TOKEN, "standard error of observed"),
)
EVENTS = (
    _RANK,
    Column("seq", "int", "", "order on its rank"),
    _STEP,
    Column("kind", "str", "", "kind of the event"),
    Column("text", "str", "", "the event in words"),
    Column("start_ns", "int", "ns", "begin, since 1970 by the clock of the rank's machine"),
    Column("duration_ns", "int", "ns", "0 for an instant"),
    Column("site", "str", "", "source line, file:line"),
)
NORMS = (
    _STEP,
    _RANK,
    Column("norm_type", "float", "1", "p of the p-norm"),
    Column("norm_before_clip", "float", "1", "gradient norm as the trainer's clipping saw it"),
    Column("max_norm", "float", "1", "clipping threshold"),
    Column("coefficient", "float", "1", "factor of the clipping, at most 1"),
    Column("norm_after_clip", "float", "1", "norm times coefficient"),
    Column("is_partial", "bool", "", "the norm is one rank's share of a whole"),
)
TOKENS = (_STEP, _DATA_RANK, _ACCUMULATION, _MICROBATCH, _TOKENS)
METRICS = (
    _STEP,
    Column("name", "str", "", "loss (mean over tokens), grad_norm (before clipping), num_tokens, or a logged scalar"),
    Column("value", "float", "", "its value"),
)
COLUMNS = {
    "findings": FINDINGS,
    "weights": WEIGHTS,
    "events": EVENTS,
    "norms": NORMS,
    "tokens": TOKENS,
    "metrics": METRICS,
}
OF_RUN = ("events", "norms")
"""Tables that stand in no report. Steps in columns have norms, and no events: their times were not kept."""


def table(name: str, report: Report, run: Run | None) -> Table:
    """One table. Those of OF_RUN come from the run itself and are empty without it."""
    makers = {"findings": _findings, "weights": _weights, "tokens": _tokens, "metrics": _metrics}
    if name in makers:
        return Table(name, COLUMNS[name], list(makers[name](report)))
    recorded: Iterable[tuple[Any, ...]] = () if run is None else _events(run) if name == "events" else _norms(run)
    return Table(name, COLUMNS[name], list(recorded))


def _findings(report: Report) -> Iterator[tuple[Any, ...]]:
    for one in report.findings:
        event, factor = one.first_event, one.factor
        yield (
            *(one.step, one.code, one.name, one.severity),
            *(factor.observed, factor.exact, factor.expression, one.pattern),
            *(one.num_parameters, " ".join(map(str, one.ranks))),
            *((event.file, event.line, f"{event.kind} {event.op or ''}".strip()) if event else (None, None, None)),
            *(one.explanation, one.fix),
        )


def _weights(report: Report) -> Iterator[tuple[Any, ...]]:
    for weight in report.weights:
        key = weight.contribution
        yield (
            *(weight.step, weight.unit, weight.holder_rank, key.data_rank, key.accumulation_step, key.microbatch),
            *(weight.num_tokens, weight.expected, weight.expected_exact, weight.nominal, weight.observed),
            *(weight.ratio, weight.stderr),
        )


def _tokens(report: Report) -> Iterator[tuple[Any, ...]]:
    seen: dict[tuple[int, int, int, int], int | None] = {}
    for weight in report.weights:
        key = weight.contribution
        seen[weight.step, key.data_rank, key.accumulation_step, key.microbatch] = weight.num_tokens
    for place, num_tokens in sorted(seen.items()):
        yield (*place, num_tokens)


def _metrics(report: Report) -> Iterator[tuple[Any, ...]]:
    for name in report.metrics:
        for step, value in report.series(name):
            yield step, name, value


def _events(run: Run) -> Iterator[tuple[Any, ...]]:
    for span in spans(run):
        yield (
            *(span.rank, span.seq, span.step, span.kind, span.text),
            *(span.start_ns, span.duration_ns, span.site or None),
        )


def _norms(run: Run) -> Iterator[tuple[Any, ...]]:
    for rank, trace in sorted(run.ranks.items()):
        recorded = [(event.step, event) for event in trace.events if isinstance(event, Clip)]
        for step, event in sorted([*recorded, *clips(trace.shapes, trace.columns)], key=lambda pair: pair[0]):
            after = event.total_norm * event.coefficient
            yield (
                *(step, rank, event.norm_type, event.total_norm),
                *(event.max_norm, event.coefficient, after, event.partial),
            )
