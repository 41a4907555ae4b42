"""The Triton kernel: all statistics of all gradients in one launch. The only file that imports triton.

One program reads one chunk of one tensor and writes its five partial results into a row of its own: no atomics, the
same bits in every run. Each lane keeps its own sums until the chunk ends, so that a block costs no exchange between
threads. Squares and inner products are float64, where no float32 over- or underflows. That not all elements are finite
shows in these sums, and only then the chunk is read a second time, to leave those out. Behind the chunks, programs
gather the sampled positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 512
"""Elements that one program holds at a time."""
CHUNK = 128 * BLOCK
"""Elements of one program."""
NUM_THREADS = 128
"""Of one program: each holds four elements of a block, which it loads at once (16 bytes of float32)."""
NUM_PARTIALS = 5
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
MIXED = -1
"""The type of a launch whose tensors are of several: each program reads its own from the table. One that all have is a
constant: on an H200 bfloat16 is read with 0.98 of a copy's bandwidth then, instead of 0.67."""
TABLE_FIELDS = 5
"""Columns of the table, one row a program: the tensor, where in it to begin (bytes), number of elements, type, 0. Of a
gathering: the tensor, where in its positions to begin (bytes), number of positions, type, where to write."""
GATHER = 128
"""Positions of one gathering program."""


@triton.jit
def _load_as(
    address: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    kind: tl.constexpr,
    full: tl.constexpr,
    aligned: tl.constexpr,
) -> tl.tensor:
    """Elements as float32, a lane's four at a time where the address allows, which only a constant can say."""
    if kind == 0:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif kind == 1:
        pointer = address.to(tl.pointer_type(tl.bfloat16))
    else:
        pointer = address.to(tl.pointer_type(tl.float16))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    values = tl.load(pointer + offsets) if full else tl.load(pointer + offsets, mask=mask, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _load(
    address: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    dtype: tl.tensor,
    kind: tl.constexpr,
    full: tl.constexpr,
    aligned: tl.constexpr,
) -> tl.tensor:
    """Elements as float32, of the launch's one type, or of this tensor's."""
    if kind >= 0:
        values = _load_as(address, offsets, mask, kind, full, aligned)
    else:
        if dtype == 0:
            values = _load_as(address, offsets, mask, 0, full, aligned)
        elif dtype == 1:
            values = _load_as(address, offsets, mask, 1, full, aligned)
        else:
            values = _load_as(address, offsets, mask, 2, full, aligned)
    return values


@triton.jit
def _block(
    address: tl.tensor,
    other_address: tl.tensor,
    offsets: tl.tensor,
    mask: tl.tensor,
    dtype: tl.tensor,
    squares: tl.tensor,
    largest: tl.tensor,
    nonfinite: tl.tensor,
    zeros: tl.tensor,
    dot: tl.tensor,
    kind: tl.constexpr,
    full: tl.constexpr,
    careful: tl.constexpr,
    aligned: tl.constexpr,
    with_dot: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """What each lane has so far, with one more block in it. `careful`: without what is not finite."""
    values = _load(address, offsets, mask, dtype, kind, full, aligned)
    is_zero = values == 0.0
    if not full:
        is_zero = is_zero & mask
    zeros += is_zero.to(tl.int32)
    if careful:
        finite = tl.abs(values) < float("inf")
        nonfinite += (~finite).to(tl.int32)
        values = tl.where(finite, values, 0.0)
    wide = values.to(tl.float64)
    squares += wide * wide
    largest = tl.maximum(largest, tl.abs(values))
    if with_dot:
        other = _load(other_address, offsets, mask, dtype, kind, full, aligned)
        if careful:
            other = tl.where(tl.abs(other) < float("inf"), other, 0.0)
        dot += wide * other.to(tl.float64)
    return squares, largest, nonfinite, zeros, dot


@triton.jit
def _chunk(
    address: tl.tensor,
    other_address: tl.tensor,
    count: tl.tensor,
    dtype: tl.tensor,
    kind: tl.constexpr,
    careful: tl.constexpr,
    aligned: tl.constexpr,
    with_dot: tl.constexpr,
    block_size: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """Sum of squares, largest magnitude, number of those not finite, of zeros, inner product."""
    offsets = tl.arange(0, block_size)
    squares = tl.zeros((block_size,), tl.float64)
    largest = tl.zeros((block_size,), tl.float32)
    nonfinite = tl.zeros((block_size if careful else 1,), tl.int32)
    zeros = tl.zeros((block_size,), tl.int32)
    dot = tl.zeros((block_size if with_dot else 1,), tl.float64)
    whole = count // block_size
    for block in range(whole):
        squares, largest, nonfinite, zeros, dot = _block(
            address, other_address, block * block_size + offsets, None, dtype,
            squares, largest, nonfinite, zeros, dot, kind, True, careful, aligned, with_dot,
        )  # fmt: skip
    if whole * block_size < count:
        tail = whole * block_size + offsets
        squares, largest, nonfinite, zeros, dot = _block(
            address, other_address, tail, tail < count, dtype,
            squares, largest, nonfinite, zeros, dot, kind, False, careful, aligned, with_dot,
        )  # fmt: skip
    return tl.sum(squares), tl.max(largest), tl.sum(nonfinite), tl.sum(zeros), tl.sum(dot)


@triton.jit
def stats_kernel(
    table: tl.tensor,  # int64 [programs, TABLE_FIELDS]
    addresses: tl.tensor,  # int64 [3, tensors]: of the tensors, of their references, of their positions
    partials: tl.tensor,  # float64 [chunks, NUM_PARTIALS]
    samples: tl.tensor,  # float32, all gathered elements
    num_chunks: tl.tensor,
    num_tensors: tl.tensor,
    kind: tl.constexpr,  # the type of all tensors, or MIXED
    aligned: tl.constexpr,
    with_dot: tl.constexpr,
    block_size: tl.constexpr,
    gather_size: tl.constexpr,
) -> None:
    """One chunk, or one gathering of up to `gather_size` positions."""
    program = tl.program_id(0)
    row = table + program * 5
    of_tensor = addresses + tl.load(row)
    address = tl.load(of_tensor)
    begin = tl.load(row + 1)
    count = tl.load(row + 2).to(tl.int32)
    dtype = tl.load(row + 3).to(tl.int32)
    if program < num_chunks:
        address += begin
        other_address = tl.load(of_tensor + num_tensors) + begin
        squares, largest, nonfinite, zeros, dot = _chunk(
            address, other_address, count, dtype, kind, False, aligned, with_dot, block_size
        )
        if not (squares + tl.abs(dot) < float("inf")):
            squares, largest, nonfinite, zeros, dot = _chunk(
                address, other_address, count, dtype, kind, True, aligned, with_dot, block_size
            )
        out = partials + program * 5
        tl.store(out, squares)
        tl.store(out + 1, largest.to(tl.float64))
        tl.store(out + 2, nonfinite.to(tl.float64))
        tl.store(out + 3, zeros.to(tl.float64))
        tl.store(out + 4, dot)
    else:
        lanes = tl.arange(0, gather_size)
        inside = lanes < count
        positions = tl.load(of_tensor + 2 * num_tensors) + begin
        where = tl.load(positions.to(tl.pointer_type(tl.int64)) + lanes, mask=inside, other=0)
        values = _load(address, where, inside, dtype, kind, False, False)
        tl.store(samples + tl.load(row + 4) + lanes, values, mask=inside)
