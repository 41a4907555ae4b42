"""What the benchmarks share: alternating rounds, ratios with their spread, the machine in words, results as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Ratio:
    """How many times as long as the base, from pairs that ran in the same round: median and quartiles."""

    median: float
    low: float
    high: float
    num_rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(values: Sequence[float], base: Sequence[float]) -> Ratio:
    """Round by round, so that what slows the machine down for a while weighs on both sides."""
    ratios = sorted(value / other for value, other in zip(values, base, strict=True))
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [ratios[0]] * 3
    return Ratio(statistics.median(ratios), quartiles[0], quartiles[2], len(ratios))


def alternate(work: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Every entry once a round, forwards and backwards in turn; what each call returns is kept."""
    kept: dict[str, list[float]] = {name: [] for name in work}
    for index in range(rounds):
        for name in list(work)[:: 1 if index % 2 == 0 else -1]:
            kept[name].append(work[name]())
    return kept


def cpu_s(function: Callable[[], object], repeat: int = 1) -> float:
    """Process CPU seconds of one call, all threads; the mean of `repeat` calls."""
    start = time.process_time()
    for _ in range(repeat):
        function()
    return (time.process_time() - start) / repeat


def machine() -> dict[str, Any]:
    """The machine without its name."""
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else ""
    versions: dict[str, str | None] = {}
    for name in ("numpy", "torch", "triton"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "cpu": model or platform.processor() or platform.machine(),
        "num_cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_average_1_min": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        **versions,
    }


def measured_commit() -> str | None:
    """The last commit that changed what is measured, None outside of a checkout. "+" behind it: there are changes that
    are not committed."""
    measured = ["gradcheck_dist", "benchmarks/*.py"]
    last = _git("log", "-1", "--format=%h", "--", *measured)
    return f"{last}+" if last and _git("status", "--porcelain", "--", *measured) else last


def _git(*command: str) -> str | None:
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(["git", *command], capture_output=True, text=True, cwd=root)
    except OSError:
        return None
    return done.stdout.strip() or None


def keep(name: str, results: Any, *, quick: bool, folder: Path = RESULTS) -> Path | None:
    """Write benchmarks/results/NAME.json; the short form keeps nothing."""
    if quick:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {"benchmark": name, "commit": measured_commit(), "machine": machine(), "results": results}
    path.write_text(json.dumps(document, indent=1, default=_plain) + "\n", encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, Ratio):
        return {key: round(number, 5) for key, number in asdict(value).items()}
    raise TypeError(f"{type(value).__name__} is no JSON")


def arguments(description: str, **counts: int) -> argparse.Namespace:
    """The command line that every benchmark has; `counts` are further options with their default."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a short form that only shows that it runs; keeps nothing")
    parser.add_argument("--only", default="", help="run only what has this in its name")
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()
