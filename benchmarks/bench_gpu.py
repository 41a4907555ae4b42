"""All that needs a GPU, in one command: is it right there, does nobody wait, and what does it cost.

    python benchmarks/bench_gpu.py [--quick] [--rehearse]

Checks first, and stops at the first that fails: every statistic against its definition; parameters bit for bit with and
without recording; no synchronisation in a recorded step (torch.cuda.set_sync_debug_mode); the verdict of a right and of
a wrong trainer. Then times, by events of the device, alternating: the Triton kernel on 1e9 elements in 300 tensors
beside a copy, torch._foreach and torch.compile, kernel and copy once more behind other work of the device, and a
recorded step beside a plain one. Kept with the card's name. Goals: 85 % of the copy bandwidth that the same card shows
in the same run, 5x torch._foreach, 3x torch.compile.

--rehearse goes through all of it on the CPU, with small tensors and without torch.compile; its times mean nothing.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic matrix products ask for

import torch
from bench_kernels import foreach
from bench_overhead import TRAINERS, nothing, recorded
from measure import alternate, keep, paired_ratio
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import gradient_cases as cases
from stats_agreement import assert_agrees

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.stats import gradients
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.model import build_model

NUM_TENSORS = 300
NUM_ELEMENTS = 1_000_000_000
GOALS = {"copy_bandwidth": 0.85, "foreach": 5.0, "compile": 3.0}
NUM_STEPS = 4


def sizes(total: int, count: int) -> list[int]:
    """Like a model's: a third of the tensors are norms, the others matrices of two sizes; odd lengths among them."""
    small, weights = 4099, [0.0, 1.0, 2.7]
    share = (total - small * count / 3) / (count / 3 * sum(weights))
    return [small if weight == 0 else int(weight * share) for weight in weights for _ in range(count // 3)]


def check_statistics(device: str) -> None:
    """The statistics of this device against the definition, and twice the same."""

    def compute(tensors: Any, **given: Any) -> Any:
        return gradients.start(tensors, **given).result()

    def there(tensors: list[Any]) -> list[Any]:
        return [None if tensor is None else tensor.to(device) for tensor in tensors]

    for dtype in cases.DTYPES:
        for make in (cases.odd_lengths, cases.planted, cases.laid_out):
            tensors = make(dtype)
            references, positions = there(cases.references_of(tensors)), there(cases.positions_of(tensors))
            assert_agrees(compute, there(tensors), references=references, positions=positions)
    assert_agrees(compute, there(cases.extreme()))
    large = [torch.randn(3_000_001, generator=torch.Generator().manual_seed(7))]
    assert_agrees(compute, there(large))
    first, second = (compute(there(large)) for _ in range(2))
    assert (first.l2 == second.l2).all(), "the same tensors have two norms"


def trainer(device: str, *, divided: bool = True) -> tuple[nn.Module, Callable[[], None]]:
    """Two microbatches a step, and what one step does."""
    config = TRAINERS["tiny d=64"][0]
    torch.manual_seed(0)
    model = build_model(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens, labels = torch.randint(0, 256, (2, 2, config.batch_size, config.seq_len)).to(device)

    def step() -> None:
        for k in range(2):
            loss = nn.functional.cross_entropy(model(tokens[k]).flatten(0, 1), labels[k].flatten())
            (loss / 2 if divided else loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def check_recording(device: str) -> None:
    """Recording changes no bit, makes nobody wait, and the engine judges what it left."""

    def trained(folder: Path | None, divided: bool) -> list[Tensor]:
        model, step = trainer(device, divided=divided)
        with recorded_into(folder):
            for index in range(NUM_STEPS):
                # The first step meets the parameters, and reads a few values of each once.
                strict = device == "cuda" and index > 0
                if strict:
                    torch.cuda.set_sync_debug_mode("error")
                try:
                    step()
                finally:
                    if strict:
                        torch.cuda.set_sync_debug_mode("default")
        return [param.detach().cpu() for param in model.parameters()]

    torch.use_deterministic_algorithms(True)
    try:
        with tempfile.TemporaryDirectory() as parent:
            for divided, verdict in ((True, "clean"), (False, "findings")):
                folder = Path(parent) / verdict
                plain, with_probes = trained(None, divided), trained(folder, divided)
                assert all(map(torch.equal, plain, with_probes)), "recording changed the parameters"
                report = diagnose(read_run(folder))
                assert report.verdict == verdict, f"{report.verdict}, not {verdict}: {report.reasons}"
                assert not report.coverage.problems, report.coverage.problems
    finally:
        torch.use_deterministic_algorithms(False)


def recorded_into(folder: Path | None) -> Any:
    return gradcheck_dist.attach(folder) if folder is not None else tempfile.TemporaryDirectory()


AHEAD_CYCLES = 20_000_000
"""For so many cycles, some 10 ms, the device is kept busy where the host is to be ahead of it."""


def device_ms(function: Callable[[], object], device: str, *, ahead: bool = False) -> float:
    """Milliseconds on the device of one call. `ahead`: without what the host takes before the launch, as behind a
    backward pass, whose kernels still run when the host has gone on."""
    if device == "cpu":
        started = time.perf_counter()
        function()
        return (time.perf_counter() - started) * 1e3
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if ahead:
        torch.cuda._sleep(AHEAD_CYCLES)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _four(tensor: Tensor) -> tuple[Tensor, ...]:
    values = tensor.float()
    finite = values.isfinite()
    used = torch.where(finite, values, 0.0)
    return used.square().sum(), used.abs().amax(), (~finite).sum(), (values == 0).sum()


def time_kernel(device: str, dtype: torch.dtype, total: int, rounds: int) -> dict[str, Any]:
    """Milliseconds and ratios of one pass over all tensors."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = [torch.randn(size, device=device, dtype=dtype, generator=generator) for size in sizes(total, NUM_TENSORS)]
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),  # reads half of the bytes and writes as many
        "kernel": lambda: gradients.start(tensors),
        "foreach": lambda: foreach(tensors),
    }
    if device != "cpu":
        compiled = torch.compile(_four, dynamic=True)
        work["compile"] = lambda: [compiled(tensor) for tensor in tensors]
    for function in work.values():
        function()
        function()
    turns = {name: lambda f=f: device_ms(f, device) for name, f in work.items()}
    behind = {f"{name}, ahead": lambda f=work[name]: device_ms(f, device, ahead=True) for name in ("copy", "kernel")}
    times = alternate(turns | behind, rounds)
    found: dict[str, Any] = {name: {"ms": round(statistics.median(values), 4)} for name, values in times.items()}
    found["kernel"]["share_of_copy_bandwidth"] = paired_ratio(times["copy"], times["kernel"])
    found["kernel, ahead"]["share_of_copy_bandwidth"] = paired_ratio(times["copy, ahead"], times["kernel, ahead"])
    for name in work.keys() - {"copy", "kernel"}:
        found[name]["times_the_kernel"] = paired_ratio(times[name], times["kernel"])
    found["gigabytes"] = round(num_bytes / 1e9, 3)
    return found


def time_recording(device: str, rounds: int) -> dict[str, Any]:
    """A recorded step beside a plain one, as the device sees them."""
    model, step = trainer(device)

    def turn(tool: Any) -> float:
        with tool(model):
            step()
            step()
            return device_ms(lambda: [step() for _ in range(8)], device) / 8

    times = alternate({"plain": lambda: turn(nothing), "recorded": lambda: turn(recorded())}, rounds)
    plain_ms = round(statistics.median(times["plain"]), 4)
    return {"plain_ms": plain_ms, "recorded": paired_ratio(times["recorded"], times["plain"])}


def main() -> int:
    """0 when all checks hold, 2 where there is no GPU."""
    quick, rehearse = "--quick" in sys.argv, "--rehearse" in sys.argv
    if not rehearse and not torch.cuda.is_available():
        print(
            "no CUDA device is visible to torch: nothing is measured. --rehearse tries it on the CPU.", file=sys.stderr
        )
        return 2
    if not rehearse and importlib.util.find_spec("triton") is None:
        print("triton is not installed: pip install 'gradcheck-dist[triton]'", file=sys.stderr)
        return 2
    device = "cpu" if rehearse else "cuda"
    name = "a CPU, rehearsing" if rehearse else torch.cuda.get_device_name()
    print(f"{name}: statistics by {gradients.implementation(device)}", flush=True)
    for check in (check_statistics, check_recording):
        check(device)
        print(f"  {check.__name__}: holds", flush=True)
    results: dict[str, Any] = {"name": name, "goals": GOALS, "checks": ["statistics", "recording"]}
    total = 2_000_000 if rehearse else NUM_ELEMENTS // (100 if quick else 1)
    rounds = 2 if rehearse else 3 if quick else 15
    for dtype in (torch.float32, torch.bfloat16):
        found = results[str(dtype).removeprefix("torch.")] = time_kernel(device, dtype, total, rounds)
        print(f"  {dtype}: {found}", flush=True)
    results["recording"] = time_recording(device, rounds)
    print(f"  {results['recording']}")
    keep("kernels_gpu", results, quick=quick or rehearse)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
