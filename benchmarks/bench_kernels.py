"""Statistics of gradients: the Triton kernel on a GPU beside torch's own ways, the numpy way on a CPU.

    python benchmarks/bench_kernels.py [--quick]

On a GPU: 1e9 elements in 300 tensors (bfloat16 and float32 as far as memory goes), CUDA events, alternating, medians.
Goals: 85 % of the copy bandwidth that the same card shows in the same run, 5x torch._foreach, 3x torch.compile.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measure import alternate, arguments, cpu_s, keep, paired_ratio
from torch import Tensor

from gradcheck_dist.stats import cpu, gradients, reference

NUM_TENSORS = 300
NUM_ELEMENTS = 1_000_000_000
GOALS = {"copy_bandwidth": 0.85, "foreach": 5.0, "compile": 3.0}


def sizes(total: int, count: int) -> list[int]:
    """Like a model's: a third of the tensors are norms, the others matrices of two sizes; odd lengths among them."""
    small, weights = 4099, [0.0, 1.0, 2.7]
    share = (total - small * count / 3) / (count / 3 * sum(weights))
    return [small if weight == 0 else int(weight * share) for weight in weights for _ in range(count // 3)]


def foreach(tensors: list[Tensor]) -> list[Any]:
    """l2, largest magnitude, non-finite and zero counts by torch._foreach and, where there is none, a loop."""
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    largest = torch._foreach_max(torch._foreach_abs(tensors))
    finite = [tensor.numel() - tensor.isfinite().sum() for tensor in tensors]
    return [norms, largest, finite, [tensor.numel() - torch.count_nonzero(tensor) for tensor in tensors]]


def _four(tensor: Tensor) -> tuple[Tensor, ...]:
    values = tensor.float()
    finite = values.isfinite()
    used = torch.where(finite, values, 0.0)
    return used.square().sum(), used.abs().amax(), (~finite).sum(), (values == 0).sum()


def gpu_ms(function: Callable[[], object]) -> float:
    """Milliseconds on the device of one call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def on_gpu(dtype: torch.dtype, quick: bool) -> dict[str, Any]:
    """Milliseconds and ratios on the GPU at hand."""
    total = NUM_ELEMENTS // (100 if quick else 1)
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(size, device="cuda", dtype=dtype, generator=generator) for size in sizes(total, NUM_TENSORS)]
    check_on_gpu(tensors[:: NUM_TENSORS // 10])
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    compiled = torch.compile(_four, dynamic=True)
    work: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),  # reads half of the bytes and writes as many
        "kernel": lambda: gradients.start(tensors),
        "foreach": lambda: foreach(tensors),
        "compile": lambda: [compiled(tensor) for tensor in tensors],
    }
    for function in work.values():
        function()
        function()
    times = alternate({name: lambda f=f: gpu_ms(f) for name, f in work.items()}, 3 if quick else 15)
    found: dict[str, Any] = {name: {"ms": round(statistics.median(values), 4)} for name, values in times.items()}
    found["kernel"]["share_of_copy_bandwidth"] = paired_ratio(times["copy"], times["kernel"])
    for name in ("foreach", "compile"):
        found[name]["times_the_kernel"] = paired_ratio(times[name], times["kernel"])
    found["gigabytes"] = round(num_bytes / 1e9, 3)
    return found


def check_on_gpu(tensors: list[Tensor]) -> None:
    """The kernel's answers on this card against the definition, NaN and infinity planted, before it is timed."""
    given = [tensor.clone() for tensor in tensors]
    for tensor in given:
        tensor[1], tensor[-1] = float("nan"), float("inf")
    found, expected = gradients.start(given).result(), reference.gradient_stats(given)
    again = gradients.start(given).result()
    assert (found.num_nonfinite == expected.num_nonfinite).all() and (found.num_zero == expected.num_zero).all()
    assert (found.abs_max == expected.abs_max).all() and (found.l2 == again.l2).all()
    worst = float(abs(found.l2 / expected.l2 - 1).max())
    assert worst <= 1e-7, f"l2 is off by {worst}"
    print(f"  agrees with the definition: l2 within {worst:.1e}")


def on_cpu(quick: bool) -> dict[str, Any]:
    """One thread, tensors of a small model: ms of CPU and how many times as long eager torch takes."""
    torch.set_num_threads(1)
    shapes = (
        [(2000, 256)] * 2 + [(256, 256)] * 8 + [(128, 256)] * 8 + [(688, 256)] * 8 + [(256, 688)] * 4 + [(256,)] * 9
    )
    generator = torch.Generator().manual_seed(0)
    floats = [torch.randn(shape, generator=generator) for shape in shapes]
    narrow = [tensor.bfloat16() for tensor in floats]
    small = [torch.randn(64, generator=generator) for _ in range(NUM_TENSORS)]
    work: dict[str, Callable[[], object]] = {
        "numpy": lambda: cpu.gradient_stats(floats),
        "numpy with reference": lambda: cpu.gradient_stats(floats, references=floats),
        "numpy bfloat16": lambda: cpu.gradient_stats(narrow),
        "numpy 300 small": lambda: cpu.gradient_stats(small),
        "eager, norms wrong at size": lambda: foreach(floats),
        "definition": lambda: reference.gradient_stats(floats),
    }
    times = alternate({name: lambda f=f: cpu_s(f) * 1e3 for name, f in work.items()}, 3 if quick else 21)
    return {
        name: {"ms": round(statistics.median(values), 4), "times_numpy": paired_ratio(values, times["numpy"])}
        for name, values in times.items()
    }


def main() -> None:
    """CPU always, GPU when there is one."""
    options = arguments(__doc__ or "")
    on_this_cpu = on_cpu(options.quick)
    print("CPU, 39 tensors of 3.9 M float32 elements, one thread")
    for name, found in on_this_cpu.items():
        print(f"  {name:<28} {found['ms']:8.3f} ms  {found['times_numpy']!s}")
    keep("statistics_cpu", on_this_cpu, quick=options.quick)
    if not torch.cuda.is_available():
        print("no GPU here: the kernel is not timed. tests/stats/test_kernels.py runs it interpreted and compiles it.")
    elif importlib.util.find_spec("triton") is None:
        print("triton is not installed: pip install 'gradcheck-dist[triton]'")
    else:
        results: dict[str, Any] = {"name": torch.cuda.get_device_name(), "goals": GOALS}
        print(f"{torch.cuda.get_device_name()}, {NUM_TENSORS} tensors")
        for dtype in (torch.float32, torch.bfloat16):
            found = on_gpu(dtype, options.quick)
            print(f"  {dtype}: {found}")
            results[str(dtype).removeprefix("torch.")] = found
        keep("kernels_gpu", results, quick=options.quick)


if __name__ == "__main__":
    main()
