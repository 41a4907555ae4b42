"""What tests/stats/test_kernels.py runs in a process of its own: triton reads its environment when it is imported.

python kernel_worker.py interpret | compile
"""

from __future__ import annotations

import sys

import gradient_cases as cases
import numpy as np
import torch
from stats_agreement import assert_agrees

from gradcheck_dist.stats import kernels
from gradcheck_dist.stats.device import DeviceStats

SIGNATURE = {
    "table": "*i64",
    "addresses": "*i64",
    "partials": "*fp64",
    "samples": "*fp32",
    "num_chunks": "i32",
    "num_tensors": "i32",
}


def interpret() -> None:
    """The kernel in triton's interpreter agrees with the definition."""
    compute = DeviceStats()
    for dtype in cases.DTYPES:
        for make in (cases.odd_lengths, cases.planted, cases.laid_out):
            tensors = make(dtype)
            references, positions = cases.references_of(tensors), cases.positions_of(tensors)
            assert_agrees(compute, tensors, references=references, positions=positions, dot_error=1e-12)
            assert_agrees(compute, tensors, positions=positions)
    extreme = cases.extreme()
    assert_agrees(compute, extreme, references=[torch.ones_like(tensor) for tensor in extreme], dot_error=1e-12)
    mixed = [cases.odd_lengths(dtype)[-1] for dtype in cases.DTYPES]
    assert_agrees(compute, mixed, references=cases.references_of(mixed), dot_error=1e-12)
    several_chunks = [torch.randn(3 * kernels.CHUNK + 17, generator=torch.Generator().manual_seed(9))]
    assert_agrees(compute, several_chunks)
    assert len(compute([])) == 0
    first, second = (compute(mixed) for _ in range(2))
    np.testing.assert_array_equal(first.l2, second.l2)
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    try:
        compute([freed])
    except ValueError as error:
        assert "tensor 0 has 8 elements and no memory" in str(error)
    else:
        raise AssertionError("freed memory was handed to the kernel")


def compile_ahead() -> None:
    """The kernel becomes machine code for each architecture; prints one line each."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    targets = (
        GPUTarget("cuda", 80, 32),
        GPUTarget("cuda", 90, 32),
        GPUTarget("cuda", 100, 32),
        GPUTarget("hip", "gfx942", 64),
    )
    for target in targets:
        variants = [(kernels.MIXED, True, False), (kernels.MIXED, True, True), (kernels.MIXED, False, False)]
        variants += [(kind, True, False) for kind in (kernels.FLOAT32, kernels.BFLOAT16, kernels.FLOAT16)]
        for kind, aligned, with_dot in variants:
            constants = {
                "kind": kind,
                "aligned": aligned,
                "with_dot": with_dot,
                "block_size": kernels.BLOCK,
                "gather_size": kernels.GATHER,
            }
            signature = {**SIGNATURE, **dict.fromkeys(constants, "constexpr")}
            source = ASTSource(fn=kernels.stats_kernel, signature=signature, constexprs=constants)
            compiled = triton.compile(
                source, target=target, options={"num_warps": kernels.NUM_THREADS // target.warp_size}
            )
            words = 4 if kind in (kernels.FLOAT32, kernels.MIXED) else 2
            text, wide = (
                (compiled.asm["ptx"], f"ld.global.v{words}.b32")
                if target.backend == "cuda"
                else (compiled.asm["amdgcn"], f"global_load_dwordx{words}")
            )
            assert compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
            assert not aligned or wide in text, f"{target}: no loads of {4 * words} bytes"
            assert "atom." not in text and "global_atomic" not in text
        print(f"compiled for {target.arch}")


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_ahead}[sys.argv[1]]()
