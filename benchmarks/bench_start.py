"""What starting costs: commands and the package beside a bare Python, and the .pth file in every Python.

    python benchmarks/bench_start.py [--quick]

CPU seconds of whole processes, alternating, as multiples of `python -c pass`. Goals: 7 times for help; less than 1 ms
for the .pth file where no variable is set.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import alternate, arguments, keep, paired_ratio

MODULE = ["-m", "gradcheck_dist"]
PLAIN = "python -c pass"
COMMANDS = {
    PLAIN: ["-c", "pass"],
    "import gradcheck_dist": ["-c", "import gradcheck_dist"],
    "gradcheck --help": [*MODULE, "--help"],
    "gradcheck diagnose --help": [*MODULE, "diagnose", "--help"],
    "gradcheck run --help": [*MODULE, "run", "--help"],
    "import torch": ["-c", "import torch"],
}
GOALS = {"gradcheck --help": 7.0, "gradcheck diagnose --help": 7.0, "gradcheck run --help": 7.0}
_PTH = """
import sys, time
line, count = open(sys.argv[1]).read(), 20000
start = time.process_time()
for _ in range(count):
    exec(line)
print((time.process_time() - start) / count)
"""


def process_s(arguments: list[str]) -> float:
    """CPU seconds of one Python process, its children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {name: value for name, value in os.environ.items() if name != "GRADCHECK_BOOT"}
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=env)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def pth_us() -> float:
    """Microseconds that the line of the .pth file takes in a process without the variable."""
    import gradcheck_dist.boot

    [file] = (Path(gradcheck_dist.boot.__file__).parent / "purelib").glob("*.pth")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(_PTH)
        script.flush()
        env = {name: value for name, value in os.environ.items() if name != "GRADCHECK_BOOT"}
        done = subprocess.run(
            [sys.executable, script.name, str(file)], check=True, capture_output=True, text=True, env=env
        )
    return float(done.stdout) * 1e6


def main() -> None:
    """Print and keep."""
    options = arguments(__doc__ or "")
    times = alternate({name: lambda a=a: process_s(a) for name, a in COMMANDS.items()}, 2 if options.quick else 15)
    results: dict[str, Any] = {"commands": {}, "pth_us": round(pth_us(), 2), "pth_goal_us": 1000}
    for name, seconds in times.items():
        ratio, goal = paired_ratio(seconds, times[PLAIN]), GOALS.get(name)
        ms = statistics.median(seconds) * 1e3
        print(f"{name:<28} {ms:8.1f} ms  {ratio!s} times a bare Python{f'  (goal {goal:g})' if goal else ''}")
        results["commands"][name] = {"ms": round(ms, 2), "ratio": ratio, "goal": goal}
    print(f"the .pth file, no variable set: {results['pth_us']} us a process (goal: below 1000)")
    keep("start", results, quick=options.quick)


if __name__ == "__main__":
    main()
