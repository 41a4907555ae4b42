"""How well the diagnosis judges random trainers of which the truth is known: a table by family.

    python benchmarks/bench_detection.py [--quick] [--only family] [--count trainers] [--first seed] [--jobs processes]
                                         [--minutes most, 0 for as long as it takes]

Trainers are spread evenly over the families, one of each in turn. `accused`: a finding where nothing is wrong, or one
finding too many; `missed`: no finding where something is; `undet.`: no verdict; `culprit` and `name`: of the faulty
ones, those with the right event, and the right rule, number and name as well. Where gradients are no combination of
contributions at all, "undetermined" is the right verdict.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: each process is one thread

from measure import arguments, keep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from random_trainers import judge
from trainer_families import FAMILIES, make_case

HANDED_OUT = 200
"""Trainers that are handed out together."""
SHOWN = 20
"""Trainers judged wrongly whose family and seed are kept."""


@dataclass(frozen=True)
class Result:
    """A judged trainer without its report."""

    family: str
    seed: int
    faulty: bool
    accused: bool
    missed: bool
    undetermined: bool
    culprit: bool
    name: bool
    cpu_s: float

    @property
    def right(self) -> bool:
        return not (self.accused or self.missed) and self.culprit and self.name


def judged(job: tuple[str, int]) -> Result:
    """Simulate and judge one trainer. What it raises ends the benchmark: no trainer may."""
    started = time.process_time()
    outcome = judge(make_case(*job))
    return Result(
        *job,
        faulty=bool(outcome.case.faults),
        accused=outcome.accused,
        missed=outcome.missed,
        undetermined=outcome.undetermined,
        culprit=outcome.culprit_right and not outcome.missed,
        name=outcome.culprit_right and outcome.name_right and not outcome.missed,
        cpu_s=time.process_time() - started,
    )


def numbers(results: list[Result]) -> dict[str, Any]:
    """A row of the table, to be kept; shares are None where nothing was faulty."""
    faulty = [one for one in results if one.faulty]
    return {
        "runs": len(results),
        "accused": sum(one.accused for one in results),
        "missed": sum(one.missed for one in results),
        "undetermined": sum(one.undetermined for one in results),
        "culprit": sum(one.culprit for one in faulty) / len(faulty) if faulty else None,
        "name": sum(one.name for one in faulty) / len(faulty) if faulty else None,
    }


def row(name: str, kept: dict[str, Any]) -> str:
    shares = [f"{'':>8}" if kept[key] is None else f"{100 * kept[key]:7.2f}%" for key in ("culprit", "name")]
    counts = f"{kept['runs']:>6} {kept['accused']:>8} {kept['missed']:>7} {kept['undetermined']:>7}"
    return f"{name:<32} {counts} {' '.join(shares)}"


def all_results(jobs: list[tuple[str, int]], processes: int, until: float) -> Iterator[Result]:
    """Results in the order of jobs, as far as they begin before `until` (time.perf_counter())."""
    with ProcessPoolExecutor(processes) as pool:
        for start in range(0, len(jobs), HANDED_OUT):
            if time.perf_counter() > until:
                return
            yield from pool.map(judged, jobs[start : start + HANDED_OUT], chunksize=4)


def main() -> None:
    """Judge some trainers of each family, print the table and keep it."""
    options = arguments(__doc__ or "", count=800, first=0, jobs=min(2, os.cpu_count() or 1), minutes=0)
    names = [name for name in FAMILIES if options.only in name]
    each = 2 if options.quick else -(-options.count // max(len(names), 1))
    jobs = [(name, seed) for seed in range(options.first, options.first + each) for name in names]
    started = time.perf_counter()
    results = list(all_results(jobs, options.jobs, started + 60 * options.minutes if options.minutes else float("inf")))
    print(f"{'family':<32} {'runs':>6} {'accused':>8} {'missed':>7} {'undet.':>7} {'culprit':>8} {'name':>8}")
    families: dict[str, Any] = {}
    for name in names:
        families[name] = numbers([one for one in results if one.family == name])
        print(row(name, families[name]))
    families["all"] = numbers(results)
    print(row("all", families["all"]))
    wrong = [f"{one.family} {one.seed}" for one in results if not one.right]
    cpu_s = sum(one.cpu_s for one in results)
    print(f"{len(results)} trainers, {len(wrong)} judged wrongly: {', '.join(wrong[:SHOWN])}")
    print(f"{cpu_s:.0f} s of CPU, {1e3 * cpu_s / max(len(results), 1):.0f} ms each; "
          f"{time.perf_counter() - started:.0f} s by the clock")  # fmt: skip
    kept = {"families": families, "first_seed": options.first, "wrong": wrong[:SHOWN], "cpu_s": round(cpu_s, 1)}
    keep("detection", kept, quick=options.quick or bool(options.only))


if __name__ == "__main__":
    main()
