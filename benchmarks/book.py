"""The benchmark book: every benchmark one after the other, each in a process of its own, then the page.

    python benchmarks/book.py [--only PART ...] [--again] [--list]

A part whose kept figures are of the code as it stands is left out, so that a run that was cut short goes on where it
stopped; --again measures it anew. Run it on a quiet machine: it says so where the load is high.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from measure import RESULTS, measured_commit

HERE = Path(__file__).parent
LIMIT_S = 900


@dataclass(frozen=True)
class Part:
    """A benchmark's command line, and the files that it keeps."""

    name: str
    script: str
    options: tuple[str, ...]
    results: tuple[str, ...]


PARTS = (
    Part("overhead-tiny", "overhead", ("--only", "tiny"), ("overhead_tiny",)),
    Part("overhead-4-layers", "overhead", ("--only", "4 layers"), ("overhead_4",)),
    Part("overhead-fsdp2", "overhead", ("--only", "FSDP2"), ("overhead_FSDP2",)),
    Part("overhead-pipeline", "overhead", ("--only", "pipeline"), ("overhead_pipeline",)),
    Part("trace", "trace", (), ("trace",)),
    Part("kernels", "kernels", (), ("statistics_cpu",)),
    Part("start", "start", (), ("start",)),
    Part("scenario", "scenario", (), ("scenario",)),
    Part("tui", "tui", (), ("tui",)),
    Part("reports", "reports", (), ("reports",)),
    Part("ranks", "ranks", (), ("ranks",)),
    Part("detection", "detection", (), ("detection",)),
    Part("scenarios", "library", ("--only", "scenarios"), ("scenarios",)),
    Part("matrix", "library", ("--only", "matrix"), ("matrix",)),
    Part("scale", "scale", (), ("scale_1e6", "scale_1e7", "scale_65.5e6")),
)


def is_kept(part: Part, commit: str | None) -> bool:
    """Whether all figures of a part are of this code."""
    for name in part.results:
        path = RESULTS / f"{name}.json"
        if not path.exists() or json.loads(path.read_text(encoding="utf-8")).get("commit") != commit:
            return False
    return commit is not None


def run(part: Part) -> int:
    command = [sys.executable, str(HERE / f"bench_{part.script}.py"), *part.options]
    try:
        return subprocess.run(command, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"{part.name}: not done after {LIMIT_S} s", file=sys.stderr)
        return 1


def main() -> int:
    """Measure what is missing, then write the page; 1 when a part failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="also what is kept already")
    parser.add_argument("--list", action="store_true", help="say which parts are kept, and stop")
    options = parser.parse_args()
    commit = measured_commit()
    load = os.getloadavg()[0]
    if load > 1 and not options.list:
        print(f"load average {load:.1f}: ratios will be wide. Better wait until nothing else runs.", file=sys.stderr)
    failed = []
    for part in PARTS:
        kept = is_kept(part, commit)
        if options.list:
            print(f"{part.name:<18} {'kept' if kept else 'missing or of other code'}")
        elif part.name in options.only and (options.again or not kept):
            print(f"== {part.name}", flush=True)
            started = time.perf_counter()
            if run(part):
                failed.append(part.name)
            print(f"== {part.name}: {time.perf_counter() - started:.0f} s", flush=True)
    if not options.list:
        subprocess.run([sys.executable, str(HERE / "page.py")], check=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
