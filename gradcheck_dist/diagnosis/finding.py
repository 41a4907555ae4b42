"""The document that a diagnosis is: one model, from which every report, screen and table is made.

Field names are a published contract (the JSON report that is attached to pull requests). They are frozen by
tests/reports/test_schema.py; more may be added, none renamed. Numbers are null where unknown; an exact fraction
stands beside its number as a string. Indices are 0-based, ranks are global.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

REPORT_SCHEMA_VERSION = 1

Verdict = Literal["clean", "findings", "undetermined"]
Severity = Literal["error", "warning", "info"]


class Candidate(msgspec.Struct, kw_only=True):
    """One way to express an observed factor, simplest first in a list. `evidence` says what speaks for it."""

    expression: str
    value: float
    exact: str | None = None
    evidence: str = ""


class Factor(msgspec.Struct, kw_only=True):
    """The factor by which weights are off. `observed` is the representative (median) observed / expected ratio.

    `expression` is the best name ("1/dp_replicate", "microbatches^-(K-1-k)"), null when no name fits; `tolerance` is
    relative and comes from dtype, number of summands and conditioning.
    """

    observed: float | None
    exact: str | None = None
    expression: str | None = None
    tolerance: float | None = None
    candidates: list[Candidate] = []


class FirstEvent(msgspec.Struct, kw_only=True):
    """The culprit: the first event after which the weights could no longer come right.

    A loss that a line of the program multiplies by the number that is wrong is named by that line: `written` is what
    stands there ("/ world_size"), and `evaluated_at` ("file:line") where the loss was computed.

    When something that was not recorded did it, `unrecorded` is true, the event named here is the last good one and
    `before` the one that already found the change.
    """

    rank: int
    seq: int
    kind: str
    op: str | None = None
    group: list[int] = []
    file: str | None = None
    line: int | None = None
    function: str | None = None
    accumulation_step: int | None = None
    microbatch: int | None = None
    stage: int | None = None
    nominal_factor: float | None = None
    observed_factor: float | None = None
    configured_at: str | None = None
    called_from: str | None = None
    unrecorded: bool = False
    before: dict[str, Any] | None = None
    written: str | None = None
    evaluated_at: str | None = None

    @property
    def place(self) -> str:
        """ "file:line" of the event itself: a loss may be multiplied by several numbers, each on a line of its own."""
        return self.evaluated_at or f"{self.file}:{self.line}"


class Finding(msgspec.Struct, kw_only=True):
    """One thing that is wrong, with the evidence for it."""

    code: str
    name: str
    severity: Severity
    step: int
    factor: Factor
    pattern: str
    units: list[str]
    num_parameters: int
    ranks: list[int]
    first_event: FirstEvent | None
    explanation: str
    fix: str
    suggested_experiment: str | None = None
    consequence: str = ""
    steps: list[int] = []


class RuleOutcomes(msgspec.Struct, kw_only=True):
    """Codes of rules: `failed` have a finding, `passed` could judge and found nothing, the rest was not triggered."""

    passed: list[str] = []
    failed: list[str] = []
    not_triggered: list[str] = []


class Unidentifiable(msgspec.Struct, kw_only=True):
    parameter: str
    reason: str


class MissingProbe(msgspec.Struct, kw_only=True):
    probe: str
    reason: str


class Unverified(msgspec.Struct, kw_only=True):
    """What `--verify` left out: a "module", "calls" of one, a "parameter", or "forward" passes of an outermost one."""

    module: str
    what: str
    name: str = ""
    reason: str


class Coverage(msgspec.Struct, kw_only=True):
    """What the verdict rests on and what it could not see. `problems` are missing ranks, damaged files and steps that
    were left out, in words, `notes` what was inferred, or not judged, and `unverified` all that `--verify` did not
    check."""

    parameters_total: int = 0
    parameters_observed: int = 0
    unidentifiable: list[Unidentifiable] = []
    probes_active: list[str] = []
    probes_missing: list[MissingProbe] = []
    problems: list[str] = []
    notes: list[str] = []
    unverified: list[Unverified] = []


class RunInfo(msgspec.Struct, kw_only=True):
    """Which run this is. `data_ranks` are the ranks of each data coordinate: those that evaluate the same tokens.
    `axes_from`, `data_ranks_from` and `objective_from` are "declared" or say what they were inferred from;
    `axes_in_order` is false where ranks do not lie as pp, dp_replicate, dp_shard, cp, tp, outermost first. In
    `skipped_steps` a GradScaler found an overflow and no rank called the optimizer."""

    id: str
    command: list[str] = []
    world_size: int
    torch_version: str = ""
    device_type: str = ""
    axes: dict[str, int]
    axes_from: str = "declared"
    axes_in_order: bool = True
    data_ranks: list[list[int]] = []
    data_ranks_from: str = "declared"
    objective: str
    objective_from: str = "declared"
    steps: list[int] = []
    skipped_steps: list[int] = []
    dtype: str = ""
    scenario: str | None = None
    variant: str | None = None


class UnitInfo(msgspec.Struct, kw_only=True):
    """Parameters that share one gradient path and the same weights."""

    unit: str
    parameters: list[str]


class ContributionKey(msgspec.Struct, kw_only=True):
    data_rank: int
    accumulation_step: int
    microbatch: int


class Weight(msgspec.Struct, kw_only=True):
    """One cell of the ledgers: the weight per token that a contribution got in a unit's gradient on a rank.

    Expected, nominal and observed have the unit 1/tokens. `observed` is freed of clipping (which scales all alike
    and is judged apart). `stderr` is the standard error of `observed`. `alike_ranks`: others that hold it, came out
    like this one, and have no rows of their own (large worlds).
    """

    step: int
    unit: str
    holder_rank: int
    contribution: ContributionKey
    num_tokens: int | None
    expected: float | None
    expected_exact: str | None = None
    nominal: float | None = None
    observed: float | None = None
    ratio: float | None = None
    stderr: float | None = None
    alike_ranks: list[int] = []

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of which this tells."""
        return (self.holder_rank, *self.alike_ranks)


class Overhead(msgspec.Struct, kw_only=True):
    probe_s_per_step: float | None = None
    share_of_step: float | None = None
    trace_bytes_per_step: float | None = None


class Tool(msgspec.Struct, kw_only=True):
    name: str = "gradcheck"
    version: str


class Report(msgspec.Struct, kw_only=True):
    """A diagnosis, whole. `reasons` says why a verdict is undetermined and `next_step` what to do now."""

    schema_version: int = REPORT_SCHEMA_VERSION
    tool: Tool
    run: RunInfo
    verdict: Verdict
    reasons: list[str] = []
    next_step: str = ""
    findings: list[Finding] = []
    rules: RuleOutcomes
    coverage: Coverage
    units: list[UnitInfo] = []
    weights: list[Weight] = []
    overhead: Overhead
    metrics: Mapping[str, Sequence[float | None]] = {}
    """Series by step; null where a value was no finite number, as the loss of a run that diverged."""
    metric_steps: Mapping[str, Sequence[int]] = {}
    """The step of each value of `metrics`, by name."""
    tolerance: float | None = None
    """Relative tolerance of the weights' comparison, the largest that was used."""

    def series(self, name: str) -> list[tuple[int, float | None]]:
        """A metric as (step, value); [] when there is none of that name."""
        values = self.metrics.get(name, ())
        steps: Sequence[int] = self.metric_steps.get(name, ())
        if len(steps) != len(values):  # a report of before there were steps
            steps = self.run.steps if len(self.run.steps) == len(values) else range(len(values))
        return list(zip(steps, values, strict=True))

    @property
    def exit_code(self) -> int:
        """0 clean, 1 findings, 2 could not judge."""
        return {"clean": 0, "findings": 1, "undetermined": 2}[self.verdict]


class ExpectedFinding(msgspec.Struct, kw_only=True):
    """What a scenario's file says must be found. Compared with the result after the judgement, never fed to it."""

    code: str
    name: str
    factor: str | None = None
    culprit: str | None = None
    """Kind of the culprit event, and its source line: "reduce gradcheck_dist/trainer/loop.py: loss.backward()"."""


class VariantReport(msgspec.Struct, kw_only=True):
    variant: str
    expected_finding: ExpectedFinding | None
    report: Report | None
    as_expected: bool
    mismatch: str = ""
    run_dir: str | None = None


class ScenarioReport(msgspec.Struct, kw_only=True):
    """One scenario's result: `as_expected` when every variant was found to be exactly what its file says."""

    schema_version: int = REPORT_SCHEMA_VERSION
    tool: Tool
    scenario: str
    title: str = ""
    as_expected: bool
    variants: list[VariantReport]
