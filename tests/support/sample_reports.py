"""Hand-made reports."""

from __future__ import annotations

from gradcheck_dist.diagnosis.finding import (
    ContributionKey,
    Coverage,
    Factor,
    Finding,
    FirstEvent,
    Overhead,
    Report,
    RuleOutcomes,
    RunInfo,
    Tool,
    UnitInfo,
    Weight,
)

NUM_TOKENS = 296


def weight(
    rank: int, step: int, ratio: float | None, *, microbatch: int = 0, unit: str = "all", holder: int = 0
) -> Weight:
    expected = 1 / NUM_TOKENS
    return Weight(
        step=0,
        unit=unit,
        holder_rank=holder,
        contribution=ContributionKey(data_rank=rank, accumulation_step=step, microbatch=microbatch),
        num_tokens=50,
        expected=expected,
        expected_exact=f"1/{NUM_TOKENS}",
        nominal=None if ratio is None else expected * ratio,
        observed=None if ratio is None else expected * ratio,
        ratio=ratio,
    )


def first_event(**changes: object) -> FirstEvent:
    values: dict[str, object] = {
        "rank": 0,
        "seq": 12,
        "kind": "reduce",
        "op": "avg",
        "group": [0, 1],
        "file": "gradcheck_dist/errors.py",
        "line": 9,
        "accumulation_step": 2,
        "nominal_factor": 0.5,
        "observed_factor": 0.5,
    }
    return FirstEvent(**(values | changes))  # type: ignore[arg-type]


def finding(**changes: object) -> Finding:
    values: dict[str, object] = {
        "code": "GS101",
        "name": "double-averaging",
        "severity": "error",
        "step": 0,
        "factor": Factor(observed=0.5, exact="1/2", expression="1/dp_replicate", tolerance=1e-6),
        "pattern": "uniform",
        "units": ["all"],
        "num_parameters": 2,
        "ranks": [0, 1],
        "first_event": first_event(),
        "explanation": "The loss is divided by all tokens, and DDP averages over ranks once more.",
        "fix": "Let DDP sum: register a `sum` hook, or multiply the loss by the number of ranks.",
    }
    return Finding(**(values | changes))  # type: ignore[arg-type]


def report(findings: list[Finding] | None = None, weights: list[Weight] | None = None, **changes: object) -> Report:
    found = [finding()] if findings is None else findings
    if weights is None:
        weights = [
            weight(rank, step, 0.5 if found else 1.0, holder=h) for h in (0, 1) for rank in (0, 1) for step in range(3)
        ]
    values: dict[str, object] = {
        "tool": Tool(version="0.1.0"),
        "run": RunInfo(
            id="run-1",
            world_size=2,
            axes={"dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1},
            objective="global-token-mean",
            steps=[0],
            dtype="float32",
        ),
        "verdict": "findings" if found else "clean",
        "findings": found,
        "rules": RuleOutcomes(failed=["GS101"] if found else [], passed=["GS102"]),
        "coverage": Coverage(parameters_total=2, parameters_observed=2, probes_active=["loss", "ddp"]),
        "units": [UnitInfo(unit="all", parameters=["a.weight", "b.weight"])],
        "weights": weights,
        "overhead": Overhead(share_of_step=0.004, trace_bytes_per_step=12_000),
        "tolerance": 1e-6,
    }
    return Report(**(values | changes))  # type: ignore[arg-type]
