"""Scalars by step and the report as a run of Weights & Biases; offline unless WANDB_MODE says otherwise."""

from __future__ import annotations

import os
from pathlib import Path

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports import markdown
from gradcheck_dist.reports.exports.scalars import by_step, facts
from gradcheck_dist.reports.text import printable
from gradcheck_dist.trace.run import Run


def write(report: Report, run: Run | None, output: Path) -> list[Path]:
    """Add a run to the folder `output`; the run's own folder.

    Raises:
        GradcheckError: E706 wandb is not installed.
    """
    try:
        import wandb
    except ImportError as error:
        raise GradcheckError(
            "Weights & Biases' package is not installed: `pip install wandb`, or use --format tensorboard.", code="E706"
        ) from error
    output.mkdir(parents=True, exist_ok=True)
    logged = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "gradcheck"),
        name=printable(report.run.id, 80),
        dir=str(output),
        mode=os.environ.get("WANDB_MODE", "offline"),
        config=facts(report),
        settings=wandb.Settings(console="off", silent=True),
    )
    for step, values in by_step(report, run).items():
        logged.log(values, step=step)
    logged.summary["gradcheck/findings"] = markdown.render(report)
    folder = Path(logged.dir).parent
    logged.finish()
    return [folder]
