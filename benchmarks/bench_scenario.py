"""Wall time of a scenario and of help, as multiples of what nobody can save: importing torch, starting Python.

    python benchmarks/bench_scenario.py [rounds]

The goals are 4x `python -c "import torch.distributed"` for all variants of ddp-accum, and 7x `python -c pass` for help.
Rounds alternate between the commands, so that a busy machine weighs on all of them alike; medians are compared.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

MODULE = ["-m", "gradcheck_dist"]
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "gradcheck --help": [*MODULE, "--help"],
    "gradcheck scenario --help": [*MODULE, "scenario", "--help"],
    "import torch.distributed": ["-c", "import torch.distributed"],
    "gradcheck scenario ddp-accum": [*MODULE, "scenario", "ddp-accum"],
    "gradcheck scenario pp-accum": [*MODULE, "scenario", "pp-accum"],
}
GOALS = {
    "gradcheck --help": ("python -c pass", 7.0),
    "gradcheck scenario --help": ("python -c pass", 7.0),
    "gradcheck scenario ddp-accum": ("import torch.distributed", 4.0),
    "gradcheck scenario pp-accum": ("import torch.distributed", 4.0),
}


def wall_s(arguments: list[str]) -> float:
    """Seconds from start to exit of one Python process."""
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main(rounds: int) -> None:
    """Print medians and ratios."""
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, arguments in COMMANDS.items():
            times[name].append(wall_s(arguments))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, seconds in medians.items():
        base, goal = GOALS.get(name, (None, None))
        ratio = f"  {seconds / medians[base]:5.2f}x {base} (goal {goal:g}x)" if base else ""
        print(f"{name:<30} {seconds:7.3f} s{ratio}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
