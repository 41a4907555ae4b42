"""Reports: how large they are and what writing them costs, for a small run and a long one.

python benchmarks/bench_reports.py [--quick]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import arguments, cpu_s, keep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from small_runs import write_run

from gradcheck_dist.cli.output import FileFormat, render
from gradcheck_dist.stream.diagnose import diagnose_run

SHAPES = {"small": (2, 3, 2), "long": (8, 8, 40)}
"""Ranks, accumulation steps, steps."""


def main() -> None:
    """Print and keep."""
    options = arguments(__doc__ or "")
    results: dict[str, Any] = {}
    for name, (ranks, accumulation, steps) in SHAPES.items():
        if options.quick and name != "small":
            continue
        with tempfile.TemporaryDirectory() as folder:
            run = write_run(Path(folder) / "run", ranks=ranks, accumulation=accumulation, steps=steps, flush_steps=True)
            report = diagnose_run(run)
        results[name] = {}
        print(f"{name}: {len(report.weights):,} weights")
        for form in FileFormat:
            text = render(report, form)
            seconds = statistics.median(cpu_s(lambda report=report, form=form: render(report, form)) for _ in range(3))
            found = {
                "weights": len(report.weights),
                "kb": round(len(text.encode()) / 1e3, 1),
                "ms": round(1e3 * seconds, 1),
            }
            results[name][form.value] = found
            print(f"  {form.value:<8} {found['kb']:10,.1f} kB  {found['ms']:8.1f} ms of CPU")
    keep("reports", results, quick=options.quick)


if __name__ == "__main__":
    main()
