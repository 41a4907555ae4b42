"""What is judged right on this machine: every variant of every scenario, and every correct configuration.

    python benchmarks/bench_library.py [--quick] [--only scenarios|matrix]

Runs `gradcheck scenario --all` and `gradcheck matrix`, which train on real processes, and keeps their tables. A matrix
that was cut short goes on where it stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import RESULTS, arguments, keep, measured_commit

KEPT = {
    "scenarios": ("scenario", "variant", "found", "factor", "culprit", "seconds", "as_expected", "note"),
    "matrix": ("name", "verdict", "grad_norm", "control_norm", "seconds", "note"),
}


def table(*command: str) -> list[dict[str, Any]]:
    """The rows that a command of gradcheck writes as JSON. Exit code 1 says that not all are right."""
    done = subprocess.run(
        [sys.executable, "-m", "gradcheck_dist", *command, "--format", "json"], stdout=subprocess.PIPE
    )
    if not done.stdout:
        raise RuntimeError(f"gradcheck {' '.join(command)} ended with {done.returncode} and without a table")
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def main() -> None:
    """Run both, print what is not right, keep the tables."""
    options = arguments(__doc__ or "")
    if options.only in "scenarios":
        with tempfile.TemporaryDirectory() as folder:
            if options.quick:  # a library of one
                library = Path(__file__).parents[1] / "gradcheck_dist" / "scenarios" / "library"
                (Path(folder) / "ddp-accum.yaml").write_bytes((library / "ddp-accum.yaml").read_bytes())
            rows = table("scenario", "--all", *(["--library", folder] if options.quick else []))
        wrong = [row for row in rows if not row["as_expected"]]
        finish(
            "scenarios", rows, [f"{row['scenario']} {row['variant']}: {row['note']}" for row in wrong], options.quick
        )
    if options.only in "matrix":
        if options.quick:
            rows = table("matrix", "--only", "one process")
        else:
            RESULTS.mkdir(exist_ok=True)
            partial = RESULTS / f".matrix-{measured_commit()}.partial"
            rows = table("matrix", "--resume", str(partial))
            partial.unlink()
        wrong = [row for row in rows if row["note"]]
        finish("matrix", rows, [f"{row['name']}: {row['note']}" for row in wrong], options.quick)


def finish(name: str, rows: list[dict[str, Any]], wrong: list[str], quick: bool) -> None:
    print(f"{name}: {len(rows) - len(wrong)} of {len(rows)} right")
    print("".join(f"  {line}\n" for line in wrong), end="")
    keep(name, {"rows": [{key: row.get(key) for key in KEPT[name]} for row in rows]}, quick=quick)


if __name__ == "__main__":
    main()
