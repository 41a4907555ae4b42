"""Statistics of gradients on a CPU: the numpy way beside eager torch and the definition.

    python benchmarks/bench_kernels.py [--quick]

The Triton kernel is timed by bench_gpu.py, where there is a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from measure import alternate, arguments, cpu_s, keep, paired_ratio
from torch import Tensor

from gradcheck_dist.stats import cpu, reference


def foreach(tensors: list[Tensor]) -> list[Any]:
    """l2, largest magnitude, non-finite and zero counts by torch._foreach and, where there is none, a loop."""
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    largest = torch._foreach_max(torch._foreach_abs(tensors))
    finite = [tensor.numel() - tensor.isfinite().sum() for tensor in tensors]
    return [norms, largest, finite, [tensor.numel() - torch.count_nonzero(tensor) for tensor in tensors]]


def on_cpu(quick: bool) -> dict[str, Any]:
    """One thread, tensors of a small model: ms of CPU and how many times as long eager torch takes."""
    torch.set_num_threads(1)
    shapes = (
        [(2000, 256)] * 2 + [(256, 256)] * 8 + [(128, 256)] * 8 + [(688, 256)] * 8 + [(256, 688)] * 4 + [(256,)] * 9
    )
    generator = torch.Generator().manual_seed(0)
    floats = [torch.randn(shape, generator=generator) for shape in shapes]
    narrow = [tensor.bfloat16() for tensor in floats]
    small = [torch.randn(64, generator=generator) for _ in range(300)]
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
    """Print and keep."""
    options = arguments(__doc__ or "")
    found = on_cpu(options.quick)
    print("CPU, 39 tensors of 3.9 M float32 elements, one thread")
    for name, of in found.items():
        print(f"  {name:<28} {of['ms']:8.3f} ms  {of['times_numpy']!s}")
    keep("statistics_cpu", found, quick=options.quick)


if __name__ == "__main__":
    main()
