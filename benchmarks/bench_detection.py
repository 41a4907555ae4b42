"""How well the diagnosis judges random trainers of which the truth is known: a table by family.

    python benchmarks/bench_detection.py [--quick] [--only family] [--count trainers a family]

`accused`: a finding where nothing is wrong, or one finding too many; `missed`: no finding where something is;
`undet.`: no verdict; `culprit` and `name`: of the faulty ones, those with the right event, and the right rule, number
and name as well.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from measure import arguments, keep

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


def numbers(outcomes: list[Outcome]) -> dict[str, Any]:
    """A row of the table, to be kept; shares are None where nothing was faulty."""
    faulty = [outcome for outcome in outcomes if outcome.case.faults]
    found = [outcome for outcome in faulty if not outcome.missed]
    named = sum(o.culprit_right and o.name_right for o in found)
    return {
        "runs": len(outcomes),
        "accused": sum(o.accused for o in outcomes),
        "missed": sum(o.missed for o in faulty),
        "undetermined": sum(o.undetermined for o in outcomes),
        "culprit": sum(o.culprit_right for o in found) / len(faulty) if faulty else None,
        "name": named / len(faulty) if faulty else None,
    }


def main() -> None:
    """Judge some trainers of each family, print the table and keep it."""
    options = arguments(__doc__ or "", count=20)
    count = 2 if options.quick else options.count
    print(f"{'family':<32} {'runs':>6} {'accused':>8} {'missed':>7} {'undet.':>7} {'culprit':>8} {'name':>8}")
    everything: list[Outcome] = []
    families: dict[str, Any] = {}
    started = time.perf_counter()
    for name in FAMILIES:
        if options.only in name:
            outcomes = [judge(make_case(name, seed)) for seed in range(count)]
            everything += outcomes
            families[name] = numbers(outcomes)
            print(row(name, outcomes), flush=True)
    seconds = time.perf_counter() - started
    families["all"] = numbers(everything)
    print(row("all", everything))
    print(f"{len(everything)} trainers in {seconds:.1f} s, {1e3 * seconds / max(len(everything), 1):.1f} ms each")
    keep("detection", {"families": families}, quick=options.quick or bool(options.only))


if __name__ == "__main__":
    main()
