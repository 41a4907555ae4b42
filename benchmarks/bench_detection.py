"""How well the diagnosis judges random trainers of which the truth is known: a table by family.

    python benchmarks/bench_detection.py [trainers a family] [family ...]

`accused`: a finding where nothing is wrong, or one finding too many; `missed`: no finding where something is;
`undet.`: no verdict; `culprit` and `name`: of the faulty ones, those with the right event, and the right rule, number
and name as well.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from random_trainers import Outcome, judge
from trainer_families import FAMILIES, make_case


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:7.2f}%" if whole else f"{'':>8}"


def row(name: str, outcomes: list[Outcome]) -> str:
    faulty = [outcome for outcome in outcomes if outcome.case.faults]
    found = [outcome for outcome in faulty if not outcome.missed]
    return (
        f"{name:<32} {len(outcomes):>6} {sum(o.accused for o in outcomes):>8} {sum(o.missed for o in faulty):>7} "
        f"{sum(o.undetermined for o in outcomes):>7} {share(sum(o.culprit_right for o in found), len(faulty))} "
        f"{share(sum(o.culprit_right and o.name_right for o in found), len(faulty))}"
    )


def main(count: int, names: list[str]) -> None:
    """Judge `count` trainers of each family and print the table."""
    print(f"{'family':<32} {'runs':>6} {'accused':>8} {'missed':>7} {'undet.':>7} {'culprit':>8} {'name':>8}")
    everything: list[Outcome] = []
    started = time.perf_counter()
    for name in names or FAMILIES:
        outcomes = [judge(make_case(name, seed)) for seed in range(count)]
        everything += outcomes
        print(row(name, outcomes), flush=True)
    seconds = time.perf_counter() - started
    print(row("all", everything))
    print(f"{len(everything)} trainers in {seconds:.1f} s, {1e3 * seconds / max(len(everything), 1):.1f} ms each")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100, sys.argv[2:])
