"""The healthy matrix: correct configurations without a finding, each beside one process on the same sequences."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gradcheck_dist.axes import Axes
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.unexplained import unexplained
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports.markdown import text as escaped
from gradcheck_dist.reports.text import number, printable
from gradcheck_dist.scenarios.expect import contributions_without_tokens, mismatch
from gradcheck_dist.scenarios.runner import MIB, WORKER, judge, peak_memory_bytes
from gradcheck_dist.scenarios.table import said
from gradcheck_dist.trace.run import create_run_dir, read_run
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.launch import launch
from gradcheck_dist.trainer.result import TrainResult
from gradcheck_dist.wording import plural

OBJECTIVE = "global-token-mean"
TIMEOUT_S = 300.0
PLAIN = (
    *("microbatches", "schedule", "stages_per_rank", "scale_grads", "gradient_reduction", "replication"),
    *("reshard_after_forward", "sequence_parallel", "loss_parallel", "activation_checkpointing"),
    *("preserve_rng_state", "checkpoint_determinism", "checkpoint_debug", "mixed_precision", "dtype", "compile"),
    *("float8", "deterministic", "sharding"),
)
"""What the control on one process has as everybody has it."""
_TOLERANCES = {"float32": 1e-5, "float16": 2e-2, "bfloat16": 5e-2, "float8": 0.1}


@dataclass(frozen=True)
class Case:
    """A configuration of the matrix. `is_quick` marks the ones that stand for all."""

    name: str
    config: TrainConfig
    is_quick: bool


@dataclass(frozen=True)
class Row:
    """What became of a configuration.

    Attributes:
        config: as TrainConfig.to_dict gives it, for resuming.
        verdict: of the engine; empty where nothing could be judged.
        grad_norm: of the first step, before clipping.
        control_norm: the same on one process; None where the two need not agree (dropout).
        note: what is wrong; empty where nothing is.
    """

    name: str
    config: dict[str, Any]
    verdict: str
    grad_norm: float | None
    control_norm: float | None
    seconds: float
    peak_memory_bytes: int | None
    note: str

    @property
    def is_right(self) -> bool:
        return not self.note


def cases() -> list[Case]:
    """All configurations, in the order of the table."""
    from gradcheck_dist.yaml_text import load

    text = (resources.files(__package__) / "matrix.yaml").read_text(encoding="utf-8")
    table = load(text, "matrix.yaml")
    quick = set(table["quick"])
    return [
        Case(name, TrainConfig.from_dict(values), name in quick) for name, values in table["configurations"].items()
    ]


def tolerance(config: TrainConfig) -> float:
    """How far, relatively, the gradient norm may be from the one-process control's."""
    if config.float8:
        return _TOLERANCES["float8"]
    return _TOLERANCES[config.dtype if config.mixed_precision == "none" else config.mixed_precision]


def control_of(config: TrainConfig) -> TrainConfig | None:
    """The same sequences on one process, one microbatch a step, in float32; None where dropout draws other masks, or a
    loss compares the sequences of one microbatch."""
    if config.dropout or config.contrastive_loss_weight:
        return None
    plain = TrainConfig()
    without = {name: getattr(plain, name) for name in PLAIN}
    accum = config.sequences_per_step // config.batch_size
    return dataclasses.replace(config, axes=Axes(), accum=accum, steps=1, max_norm=None, lr=plain.lr, **without)


class Matrix:
    """Runs configurations one at a time; controls that several share run once."""

    def __init__(self) -> None:
        self._controls: dict[TrainConfig, float] = {}

    def run(self, case: Case) -> Row:
        """Train, judge, ask whether the records explain every weight, and compare the gradient norm with the control's.
        What cannot run is a row with a note."""
        started_s = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix="gradcheck-matrix-"))
        verdict, norm, control, peak = "", None, None, None
        try:
            results = _record(case, folder / "run")
            peak = peak_memory_bytes(results)
            norm = results[0].steps[0].grad_norm
            control = self._control_norm(case.config)
            run = read_run(folder / "run")
            report = judge(run)
            verdict = report.verdict
            without_tokens = contributions_without_tokens(run, case.config)
            notes = [
                mismatch((), report, case.config, without_tokens),
                _wrong_norm(norm, control, tolerance(case.config)),
            ]
            notes += unexplained(judge_step(run, 0, OBJECTIVE, "declared"))
            note = "; ".join(part for part in notes if part)
        except Exception as error:  # one configuration must not cost the table of all others
            note = said(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        seconds = round(time.perf_counter() - started_s, 2)
        return Row(case.name, case.config.to_dict(), verdict, norm, control, seconds, peak, note)

    def _control_norm(self, config: TrainConfig) -> float | None:
        control = control_of(config)
        if control is None:
            return None
        if control not in self._controls:
            (result,) = launch("gradcheck_dist.trainer.loop:train", (control,), 1, timeout_s=TIMEOUT_S)
            self._controls[control] = result.steps[0].grad_norm
        return self._controls[control]


def _record(case: Case, run_dir: Path) -> list[TrainResult]:
    config = case.config
    manifest = {
        "scenario": "matrix",
        "variant": case.name,
        "world_size": config.axes.world_size,
        "axes": config.axes.as_dict(),
        "objective": OBJECTIVE,
        "config": config.to_dict(),
    }
    create_run_dir(run_dir, manifest)
    arguments = (str(run_dir), config, OBJECTIVE)
    return launch(WORKER, arguments, config.axes.world_size, timeout_s=TIMEOUT_S, log_dir=run_dir / "logs")


def _wrong_norm(norm: float, control: float | None, limit: float) -> str:
    if control is None or math.isclose(norm, control, rel_tol=limit):
        return ""
    return f"the gradient norm is {number(norm, 7)}, on one process {number(control, 7)} (limit {limit:g})"


def read_rows(file: Path) -> list[Row]:
    """The rows that an earlier run wrote; a line that was cut short is left out.

    Raises:
        GradcheckError: E608 the file cannot be read, or holds something else.
    """
    if not file.exists():
        return []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise GradcheckError(f"cannot read {file}: {error}. Name another file.", code="E608") from error
    rows = []
    for index, line in enumerate(lines):
        try:
            rows.append(Row(**json.loads(line)))
        except (ValueError, TypeError) as error:
            cut = isinstance(error, ValueError) and line.startswith('{"name": ')
            if cut and index == len(lines) - 1:
                break
            raise GradcheckError(
                f"{file} is no result of `gradcheck matrix`: line {index + 1} is {line[:80]!r}. Name another file, or "
                "remove this one.",
                code="E608",
            ) from error
    return rows


def done(row_of: Mapping[str, Row], case: Case) -> Row | None:
    """The earlier right result of this very configuration; None when it has to run."""
    row = row_of.get(case.name)
    return row if row is not None and row.is_right and row.config == case.config.to_dict() else None


def write_rows(file: Path, rows: Sequence[Row]) -> None:
    """Write results, one JSON object a line, whole or not at all."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    partial.replace(file)


def line(row: Row) -> str:
    """A row as one line, and a second one where something is wrong."""
    axes = " ".join(f"{axis}={degree}" for axis, degree in row.config["axes"].items() if degree > 1) or "1 process"
    off = ""
    if row.grad_norm is not None and row.control_norm:
        off = f", norm off by {abs(row.grad_norm / row.control_norm - 1):.0e}"
    head = (
        f"{'ok ' if row.is_right else 'NOT'} {row.seconds:6.1f} s  {row.name} ({axes}): {row.verdict or 'no verdict'}"
    )
    return head + off + (f"\n               {printable(row.note, 2000)}" if row.note else "")


def summary(rows: Sequence[Row]) -> str:
    """One sentence over all."""
    right = sum(row.is_right for row in rows)
    peak = max((row.peak_memory_bytes or 0 for row in rows), default=0)
    seconds = sum(row.seconds for row in rows)
    memory = f", at most {peak / MIB:.0f} MiB at once" if peak else ""
    return f"{right} of {plural(len(rows), 'correct configuration')} without a finding, in {seconds:.0f} s{memory}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as a Markdown table."""
    yield f"{summary(rows)}."
    yield ""
    yield "| configuration | verdict | norm / one process - 1 | seconds | |"
    yield "|---|---|---|---|---|"
    for row in rows:
        off = f"{row.grad_norm / row.control_norm - 1:.1e}" if row.grad_norm and row.control_norm else ""
        note = escaped(printable(row.note, 500))
        yield f"| {row.name} | {row.verdict} | {off} | {row.seconds:.1f} | {note} |"
