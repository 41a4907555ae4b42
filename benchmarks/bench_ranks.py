"""Judging one sampled step by the number of ranks: FSDP, accumulation, a right loss and one that an average spoils.

    python benchmarks/bench_ranks.py [--quick] [--only 64]

The trainers are simulated, as the probes would have recorded them: 96 samples of each parameter, spread over all ranks'
shards. A world has ranks * accumulation steps contributions, and each rank a weight of every one in each parameter.
Each step is judged in a process of its own: CPU seconds of the judgement alone, and the process's largest memory.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: each process is one thread

from measure import arguments, keep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose

NUM_PARAMS = 16
ACCUMULATION = 4
WORLDS = (8, 32, 64, 128)
LOSSES = {"right": None, "averaged twice": 1.0}
"""By what it is called: what the loss over all tokens is multiplied by, None for the ranks that FSDP averages over."""


def judged(ranks: int, factor: float | None) -> dict[str, Any]:
    """One trainer, and what judging it took."""
    params = tuple((f"layers.{index}.weight", 96) for index in range(NUM_PARAMS))
    root = global_mean(ranks if factor is None else factor)
    run = World(Trainer(root, data_ranks=ranks, impl="fsdp", accumulation=ACCUMULATION, params=params), seed=1).run()
    started = time.process_time()
    report = diagnose(run)
    cpu_s = time.process_time() - started
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "ranks": ranks,
        "weights": ranks * ranks * ACCUMULATION * NUM_PARAMS,
        "cpu_s": round(cpu_s, 2),
        "peak_mib": round(peak_mib),
        "verdict": report.verdict,
        "codes": [finding.code for finding in report.findings],
        "observed": report.coverage.parameters_observed,
    }


def main() -> None:
    """A row for each world and loss."""
    options = arguments(__doc__ or "")
    rows = []
    for ranks in WORLDS[:1] if options.quick else WORLDS:
        if options.only not in str(ranks):
            continue
        for name, factor in LOSSES.items():
            with ProcessPoolExecutor(max_workers=1) as alone:
                row = alone.submit(judged, ranks, factor).result(timeout=600) | {"loss": name}
            rows.append(row)
            what = f"{row['verdict']} {' '.join(row['codes'])}".strip()
            print(f"{ranks:>5} ranks, {name:<15} {row['cpu_s']:>8.2f} s {row['peak_mib']:>6} MiB  {what}", flush=True)
    part = options.quick or bool(options.only)
    keep("ranks", {"num_params": NUM_PARAMS, "accumulation": ACCUMULATION, "rows": rows}, quick=part)


if __name__ == "__main__":
    main()
