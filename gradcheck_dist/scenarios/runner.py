"""Running a scenario: every variant on real ranks, judged from its trace alone, then compared with the file."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradcheck_dist.diagnosis.finding import Report, ScenarioReport, Tool, VariantReport
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.scenarios.expect import contributions_without_tokens, mismatch, published
from gradcheck_dist.scenarios.jobs import Overrides, check
from gradcheck_dist.scenarios.schema import Scenario, Variant
from gradcheck_dist.trace.run import Run, create_run_dir, read_run
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.launch import launch
from gradcheck_dist.trainer.result import TrainResult
from gradcheck_dist.wording import plural

WORKER = "gradcheck_dist.scenarios.worker:run_rank"
TIMEOUT_S = 300.0
MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """What a variant took: seconds to train and to judge, and the sum over ranks of the most that each held, in bytes.

    Pages that ranks share count once a rank, so the memory is an upper bound; None where no rank told.
    """

    seconds: float
    peak_memory_bytes: int | None = None


@dataclass(frozen=True)
class Result:
    """What became of a scenario. `error` is set when a variant could not run; the report then ends with that variant.

    `run_dir` is the folder with one run folder a variant, None when it was temporary and is gone. `costs` has an entry
    for each variant of the report.
    """

    report: ScenarioReport
    error: GradcheckError | None
    run_dir: Path | None
    costs: tuple[Cost, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 exactly as the file says, 1 not, 2 could not run."""
        return self.error.exit_code if self.error else int(not self.report.as_expected)


def run_scenario(
    scenario: Scenario,
    overrides: Overrides | None = None,
    *,
    keep: Path | None = None,
    command: tuple[str, ...] = (),
    on_progress: Callable[[str], None] = lambda text: None,
) -> Result:
    """Run all variants one after the other.

    Args:
        keep: folder that gets one run folder a variant; None uses a temporary one, left only when something failed.
        command: what the user typed, for the manifest.
        on_progress: told what is being done.

    Raises:
        GradcheckError: before any process starts: what `jobs.check` finds.
    """
    configs = check(scenario, overrides or Overrides(), keep)
    folder = keep or Path(tempfile.mkdtemp(prefix="gradcheck-"))
    variants: list[VariantReport] = []
    costs: list[Cost] = []
    error: GradcheckError | None = None
    failed = False
    try:
        for variant in scenario.variants:
            run_dir = folder / variant.name
            config = configs[variant.name]
            label = f"{scenario.name} {variant.name} ({len(variants) + 1} of {len(scenario.variants)})"
            on_progress(f"{label}: training on {plural(config.axes.world_size, 'rank')}")
            started_s = time.perf_counter()
            try:
                results = _record(scenario, variant, config, run_dir, command)
            except GradcheckError as problem:
                error = _aborted(variant, run_dir, problem)
                variants.append(_unjudged(variant, run_dir, problem))
                costs.append(Cost(time.perf_counter() - started_s))
                break
            on_progress(f"{label}: judging")
            variants.append(_judge(scenario, variant, config, run_dir))
            costs.append(Cost(time.perf_counter() - started_s, peak_memory_bytes(results)))
        failed = error is not None or not all(variant.as_expected for variant in variants)
    finally:
        if keep is None and not failed:
            shutil.rmtree(folder, ignore_errors=True)
    kept = folder if failed or keep else None
    if kept is None:
        for judged in variants:
            judged.run_dir = None
    return Result(_report(scenario, variants, failed), error, kept, tuple(costs))


def peak_memory_bytes(results: Sequence[TrainResult | None]) -> int | None:
    """The sum over ranks of the most that each has held; None where not every rank told."""
    peaks = [result.steps[-1].peak_memory_bytes for result in results if result is not None and result.steps]
    return sum(peaks) if peaks and len(peaks) == len(results) else None


def _record(
    scenario: Scenario, variant: Variant, config: TrainConfig, run_dir: Path, command: tuple[str, ...]
) -> list[TrainResult | None]:
    world_size = config.axes.world_size
    manifest = {
        "scenario": scenario.name,
        "variant": variant.name,
        "command": list(command),
        "world_size": world_size,
        "axes": config.axes.as_dict(),
        "objective": scenario.objective,
        "config": config.to_dict(),
    }
    create_run_dir(run_dir, manifest)
    arguments = (str(run_dir), config, scenario.objective, scenario.verify)
    return launch(WORKER, arguments, world_size, timeout_s=TIMEOUT_S, log_dir=run_dir / "logs")


def _judge(scenario: Scenario, variant: Variant, config: TrainConfig, run_dir: Path) -> VariantReport:
    run = read_run(run_dir)
    report = judge(run)
    without_tokens = contributions_without_tokens(run, config)
    difference = mismatch(variant.expect, report, config, without_tokens)
    version = report.run.torch_version.partition("+")[0]
    # A bug of torch's own may be mended elsewhere; then this variant must be as clean as its twin.
    elsewhere = (
        bool(variant.expect) and not scenario.seen_on(version) and not mismatch((), report, config, without_tokens)
    )
    if elsewhere:
        difference = f"not reproduced here: torch {version}, seen on {', '.join(scenario.torch)}"
    return VariantReport(
        variant=variant.name,
        expected_finding=published(variant.expect),
        report=report,
        as_expected=elsewhere or not difference,
        mismatch=difference,
        run_dir=str(run_dir),
    )


def judge(run: Run) -> Report:
    """The engine's judgement of a run."""
    from gradcheck_dist.diagnosis.engine import diagnose

    return diagnose(run)


def _unjudged(variant: Variant, run_dir: Path, problem: GradcheckError) -> VariantReport:
    return VariantReport(
        variant=variant.name,
        expected_finding=published(variant.expect),
        report=None,
        as_expected=False,
        mismatch=str(problem),
        run_dir=str(run_dir),
    )


def _aborted(variant: Variant, run_dir: Path, problem: GradcheckError) -> GradcheckError:
    """The problem, and what is left of the run."""
    try:
        run = read_run(run_dir)
        lengths = ", ".join(f"rank {rank}: {len(trace.events)} events" for rank, trace in run.ranks.items())
        left = f"The trace up to there is kept in {run_dir} ({lengths}): gradcheck diagnose {run_dir}"
    except GradcheckError:
        logs = run_dir / "logs"
        left = f"Nothing had been recorded yet{f'; the logs are kept in {logs}' if logs.is_dir() else ''}."
    return GradcheckError(f"variant {variant.name} stopped: {problem}\n{left}", code=problem.code, exit_code=2)


def _report(scenario: Scenario, variants: list[VariantReport], failed: bool) -> ScenarioReport:
    from gradcheck_dist import __version__

    return ScenarioReport(
        tool=Tool(version=__version__),
        scenario=scenario.name,
        title=scenario.title,
        as_expected=not failed,
        variants=variants,
    )
