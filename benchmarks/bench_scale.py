"""Diagnosis of long runs: steps in columns with known faults, beside the bare read and pandas, Polars and DuckDB.

    python benchmarks/bench_scale.py [--quick] [--only 1e6]

Every engine does the same: tokens of a step over all ranks, every contribution's weight against what it should be, the
first one that is off. gradcheck reads its trace, checksums included; the others read the five columns that they need
from a Parquet file. Each runs in a process of its own, alternating; CPU seconds of the work without interpreter start
and imports, the processes that it starts included. Goals: 10 times the bare read, 500 MiB.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import scale_trace
from measure import arguments, keep, paired_ratio

SIZES = {"1e6": (64, 244, 64, 5), "1e7": (256, 610, 64, 3), "65.5e6": (1024, 1000, 64, 1)}
"""Ranks, steps, microbatches, rounds."""
TOLERANCE = 1e-5
PANDAS_LIMIT = 20_000_000
GOAL_TIMES_READ, GOAL_MIB = 10.0, 500.0
if TYPE_CHECKING:
    from gradcheck_dist.stream.workers import Workers

Divergence = tuple[int, int, int]
"""(step, rank, microbatch)"""


def read_only(run: Path, _table: Path, _ranks: int) -> Divergence | None:
    buffer = bytearray(2 << 20)
    for path in sorted(run.glob("*.trace")):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return None


def gradcheck(run: Path, jobs: int = 1, *, first: bool = False, workers: Workers | None = None) -> Divergence:
    from gradcheck_dist.stream.diagnose import diagnose_run

    finding = diagnose_run(run, jobs=jobs, first=first, workers=workers).findings[0]
    event = finding.first_event
    assert event is not None and event.accumulation_step is not None
    return finding.step, finding.ranks[0], event.accumulation_step


def on_dask(run: Path) -> Divergence:
    """On a cluster of two worker processes, its start included."""
    from gradcheck_dist.stream.on_dask import on_dask

    with on_dask("local", 2) as workers:
        return gradcheck(run, workers=workers)


def pandas(_run: Path, table: Path, ranks: int) -> Divergence:
    import pandas as pd

    frame = pd.read_parquet(table)
    expected = ranks / frame.groupby("step")["num_tokens"].transform("sum")
    off = frame[(frame["weight"] / expected - 1).abs() > TOLERANCE]
    first = off.sort_values(["step", "rank", "microbatch"]).iloc[0]
    return int(first["step"]), int(first["rank"]), int(first["microbatch"])


def polars(_run: Path, table: Path, ranks: int) -> Divergence:
    import polars as pl

    frame = pl.scan_parquet(table)
    totals = frame.group_by("step").agg(pl.col("num_tokens").sum().alias("total"))
    ratio = pl.col("weight") * pl.col("total") / ranks
    off = frame.join(totals, on="step").filter((ratio - 1).abs() > TOLERANCE)
    order = ["step", "rank", "microbatch"]
    row = off.select(order).sort(order).head(1).collect(engine="streaming").row(0)
    return int(row[0]), int(row[1]), int(row[2])


def duckdb(_run: Path, table: Path, ranks: int) -> Divergence:
    import duckdb as db

    query = f"""
        with totals as (select step, sum(num_tokens) as total from '{table}' group by step)
        select step, rank, microbatch from '{table}' join totals using (step)
        where abs(weight * total / {ranks} - 1) > {TOLERANCE} order by step, rank, microbatch limit 1"""
    row = db.execute(query).fetchone()
    assert row is not None
    return int(row[0]), int(row[1]), int(row[2])


ENGINES: dict[str, Callable[[Path, Path, int], Divergence | None]] = {
    "read only": read_only,
    "gradcheck": lambda run, table, ranks: gradcheck(run),
    "gradcheck, 2 processes": lambda run, table, ranks: gradcheck(run, 2),
    "gradcheck, 2 Dask workers": lambda run, table, ranks: on_dask(run),
    "gradcheck --first": lambda run, table, ranks: gradcheck(run, first=True),
    "pandas": pandas,
    "polars": polars,
    "duckdb": duckdb,
}
NEEDS = {
    "gradcheck, 2 Dask workers": ("distributed",),
    "pandas": ("pandas", "pyarrow"),
    "polars": ("polars", "pyarrow"),
    "duckdb": ("duckdb", "pyarrow"),
}


def installed(engine: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in NEEDS.get(engine, ()))


def write_table(path: Path, ranks: int, steps: int, microbatches: int, truth: scale_trace.Truth) -> None:
    """The same contributions as a table, a row group for every 16 ranks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    total = sum(scale_trace.tokens_of(rank, steps, microbatches).sum(axis=0) for rank in range(ranks))
    kinds = {"step": "int32", "rank": "int32", "microbatch": "int32", "num_tokens": "int32", "weight": "float64"}
    schema = pa.schema([(name, getattr(pa, kind)()) for name, kind in kinds.items()])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for first in range(0, ranks, 16):
            parts = [part(rank, total, ranks, truth, microbatches) for rank in range(first, min(first + 16, ranks))]
            columns = {name: np.concatenate([of[name] for of in parts]).astype(kind) for name, kind in kinds.items()}
            writer.write_table(pa.table(columns, schema=schema))


def part(
    rank: int, total: np.ndarray, ranks: int, truth: scale_trace.Truth, microbatches: int
) -> dict[str, np.ndarray]:
    """One rank's contributions, step by step."""
    steps = len(total)
    tokens = scale_trace.tokens_of(rank, steps, microbatches)
    weight = scale_trace.weights_of(rank, total, ranks, microbatches, truth)
    return {
        "step": np.repeat(np.arange(steps), microbatches),
        "rank": np.full(tokens.size, rank),
        "microbatch": np.tile(np.arange(microbatches), steps),
        "num_tokens": tokens.T.ravel(),
        "weight": weight.T.ravel(),
    }


def run_engine(engine: str, run: Path, table: Path, ranks: int) -> dict[str, Any]:
    """One engine in a fresh process: CPU and wall seconds of the work, memory of the largest process, its answer."""
    command = [sys.executable, __file__, "--only", "-", "--engine", engine, str(run), str(table), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{engine} failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def child(engine: str, run: Path, table: Path, ranks: int) -> None:
    for name in NEEDS.get(engine, ()):
        importlib.import_module(name)
    if engine.startswith("gradcheck"):
        importlib.import_module("gradcheck_dist.stream.diagnose")
    cpu, wall = cpu_s(), time.perf_counter()
    answer = ENGINES[engine](run, table, ranks)
    wall = time.perf_counter() - wall
    print(json.dumps({"cpu_s": cpu_s() - cpu, "wall_s": wall, "peak_mib": peak_mib(), "first": answer}))


def peak_mib() -> float:
    """Of the largest process: this one, without its parent's as ru_maxrss counts, or one that it started."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own = int(status["VmHWM"].split()[0])
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1024


def cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(name: str, folder: Path, rounds: int) -> dict[str, Any]:
    """All engines that are installed on one size."""
    ranks, steps, microbatches, _ = SIZES[name]
    run, table = folder / "run", folder / "table.parquet"
    started = time.perf_counter()
    truth = scale_trace.write(run, ranks, steps, microbatches)
    written = time.perf_counter() - started
    num_bytes = sum(path.stat().st_size for path in run.glob("*.trace"))
    engines = [engine for engine in ENGINES if installed(engine)]
    if ranks * steps * microbatches > PANDAS_LIMIT:
        engines = [engine for engine in engines if engine != "pandas"]  # holds some 10 GB at a time
    if any("pyarrow" in NEEDS.get(engine, ()) for engine in engines):
        write_table(table, ranks, steps, microbatches, truth)
    times: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for round_ in range(rounds):
        for engine in engines if round_ % 2 == 0 else engines[::-1]:
            found = run_engine(engine, run, table, ranks)
            expected = [truth.first_step, truth.rank, truth.microbatch]
            if engine != "read only" and found["first"] != expected:
                raise RuntimeError(f"{engine} found {found['first']} first, {expected} was planted")
            times[engine].append(found)
    count = ranks * steps * microbatches
    results: dict[str, Any] = {"ranks": ranks, "steps": steps, "microbatches": microbatches, "contributions": count,
                               "trace_bytes": num_bytes, "write_s": round(written, 1), "engines": {}}  # fmt: skip
    print(
        f"\n{name}: {ranks} ranks x {steps} steps x {microbatches} = {count:,} contributions, {num_bytes / 1e9:.2f} GB"
    )
    base = [found["cpu_s"] for found in times["read only"]]
    for engine, of in times.items():
        seconds = [found["cpu_s"] for found in of]
        ratio = paired_ratio(seconds, base)
        entry = {
            "cpu_s": round(statistics.median(seconds), 3),
            "wall_s": round(statistics.median(found["wall_s"] for found in of), 3),
            "peak_mib": round(max(found["peak_mib"] for found in of)),
            "times_read": ratio,
            "ns_per_contribution": round(statistics.median(seconds) / count * 1e9, 1),
        }
        results["engines"][engine] = entry
        print(f"  {engine:<24} {entry['cpu_s']:8.3f} s CPU  {entry['wall_s']:7.3f} s wall  {entry['peak_mib']:6d} MiB  "
              f"{entry['ns_per_contribution']:6.1f} ns each  {ratio!s} times the read")  # fmt: skip
    return results


def main() -> None:
    """All sizes; the short form 16 ranks and 32 steps."""
    if "--engine" in sys.argv:
        engine, run, table, ranks = sys.argv[sys.argv.index("--engine") + 1 :]
        child(engine, Path(run), Path(table), int(ranks))
        return
    options = arguments(__doc__ or "")
    if options.quick:
        SIZES.clear()
        SIZES["quick"] = (16, 32, 8, 1)
    for name, (*_, rounds) in SIZES.items():
        if options.only in name:
            folder = Path(tempfile.mkdtemp(dir=os.environ.get("BENCH_TMP")))
            try:
                found = measure(name, folder, rounds)
            finally:
                shutil.rmtree(folder)
            goals = {"times_read": GOAL_TIMES_READ, "mib": GOAL_MIB}
            keep(f"scale_{name}", {"goals": goals, **found}, quick=options.quick)


if __name__ == "__main__":
    main()
