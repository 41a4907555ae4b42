"""Wall time of a scenario, as a multiple of what nobody can save: importing torch.

    python benchmarks/bench_scenario.py [--quick]

Goal: 4 times `python -c "import torch.distributed"` for all variants of ddp-accum. Rounds alternate between the
commands, so that a busy machine weighs on all of them alike.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from measure import alternate, arguments, keep, paired_ratio

BASE = "import torch.distributed"
COMMANDS = {
    BASE: ["-c", "import torch.distributed"],
    "gradcheck scenario ddp-accum": ["-m", "gradcheck_dist", "scenario", "ddp-accum"],
    "gradcheck scenario pp-accum": ["-m", "gradcheck_dist", "scenario", "pp-accum"],
}
GOAL = 4.0


def wall_s(arguments: list[str]) -> float:
    """Seconds from start to exit of one Python process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Print and keep."""
    options = arguments(__doc__ or "")
    times = alternate({name: lambda a=a: wall_s(a) for name, a in COMMANDS.items()}, 1 if options.quick else 5)
    results: dict[str, Any] = {"goal": GOAL, "commands": {}}
    for name, seconds in times.items():
        ratio = paired_ratio(seconds, times[BASE])
        print(f"{name:<30} {statistics.median(seconds):7.3f} s  {ratio!s} times {BASE!r} (goal {GOAL:g})")
        results["commands"][name] = {"wall_s": round(statistics.median(seconds), 3), "ratio": ratio}
    keep("scenario", results, quick=options.quick)


if __name__ == "__main__":
    main()
