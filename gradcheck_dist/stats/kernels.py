"""The Triton kernel: all statistics of all gradients in one launch. The only file that imports triton.

One program reads one chunk of one tensor, found in a table of chunks and a table of addresses, and writes its five
partial results into a row of its own: no atomics, the same bits in every run. Squares are summed in float32 within a
block of 4096 elements, scaled by the power of two of the block's largest magnitude, so that none over- or underflows,
and in float64 over blocks and within the last, incomplete one. Inner products are float64. Behind the chunks, programs
gather the sampled positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 4096
"""Elements that one program holds at a time."""
CHUNK = 16 * BLOCK
"""Elements of one program."""
NUM_WARPS = 8
NUM_PARTIALS = 5
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
TABLE_FIELDS = 5
"""Columns of the table, one row a program. A chunk has: address, address of its reference, number of elements, type, 0.
A gathering has: address of the tensor, address of its positions, number of positions, type, where to write."""
GATHER = 128
"""Positions of one gathering program."""


@triton.jit
def _load(
    address: tl.tensor, offsets: tl.tensor, mask: tl.tensor, dtype: tl.tensor, full: tl.constexpr, aligned: tl.constexpr
) -> tl.tensor:
    """Elements as float32. 16 bytes at a time where the address allows, which only a constant can say."""
    if dtype == 0:
        single = address.to(tl.pointer_type(tl.float32))
        if aligned:
            single = tl.multiple_of(single, 16)
        values = tl.load(single + offsets) if full else tl.load(single + offsets, mask=mask, other=0.0)
    elif dtype == 1:
        brain = address.to(tl.pointer_type(tl.bfloat16))
        if aligned:
            brain = tl.multiple_of(brain, 16)
        values = (tl.load(brain + offsets) if full else tl.load(brain + offsets, mask=mask, other=0.0)).to(tl.float32)
    else:
        half = address.to(tl.pointer_type(tl.float16))
        if aligned:
            half = tl.multiple_of(half, 16)
        values = (tl.load(half + offsets) if full else tl.load(half + offsets, mask=mask, other=0.0)).to(tl.float32)
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
    full: tl.constexpr,
    aligned: tl.constexpr,
    with_dot: tl.constexpr,
) -> tuple[tl.tensor, ...]:
    """The five partial results with one more block in them."""
    values = _load(address, offsets, mask, dtype, full, aligned)
    magnitude_bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = magnitude_bits < 0x7F800000
    is_zero = magnitude_bits == 0
    if not full:
        is_zero = is_zero & mask
    used = tl.where(finite, values, 0.0)
    # Non-negative floats are ordered as their bits are.
    top_bits = tl.max(tl.where(finite, magnitude_bits, 0), axis=0)
    if full:
        exponent = tl.maximum(top_bits >> 23, 1)
        down = tl.maximum(254 - exponent, 1)  # the biased exponent of 2 ** -(exponent - 127)
        scaled = used * (down << 23).to(tl.float32, bitcast=True)
        up = ((1150 - down).to(tl.int64) << 52).to(tl.float64, bitcast=True)  # 2 ** (127 - down)
        squares += tl.sum(scaled * scaled, axis=0).to(tl.float64) * up * up
    else:
        wide = used.to(tl.float64)
        squares += tl.sum(wide * wide, axis=0)
    largest = tl.maximum(largest, top_bits)
    nonfinite += tl.sum((~finite).to(tl.int32), axis=0)
    zeros += tl.sum(is_zero.to(tl.int32), axis=0)
    if with_dot:
        other = _load(other_address, offsets, mask, dtype, full, aligned)
        other_bits = other.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        other = tl.where(other_bits < 0x7F800000, other, 0.0)
        dot += tl.sum(used.to(tl.float64) * other.to(tl.float64), axis=0)
    return squares, largest, nonfinite, zeros, dot


@triton.jit
def stats_kernel(
    table: tl.tensor,  # int64 [programs, TABLE_FIELDS]
    partials: tl.tensor,  # float64 [chunks, NUM_PARTIALS]
    samples: tl.tensor,  # float32, all gathered elements
    num_chunks: tl.tensor,
    aligned: tl.constexpr,
    with_dot: tl.constexpr,
    block_size: tl.constexpr,
    gather_size: tl.constexpr,
) -> None:
    """One chunk, or one gathering of up to `gather_size` positions."""
    program = tl.program_id(0)
    row = table + program * 5
    address = tl.load(row)
    other_address = tl.load(row + 1)
    count = tl.load(row + 2).to(tl.int32)
    dtype = tl.load(row + 3).to(tl.int32)
    if program < num_chunks:
        offsets = tl.arange(0, block_size)
        squares = tl.full((), 0.0, tl.float64)
        largest = tl.full((), 0, tl.int32)
        nonfinite = tl.full((), 0, tl.int32)
        zeros = tl.full((), 0, tl.int32)
        dot = tl.full((), 0.0, tl.float64)
        whole = count // block_size
        for block in range(whole):
            squares, largest, nonfinite, zeros, dot = _block(
                address, other_address, block * block_size + offsets, None, dtype,
                squares, largest, nonfinite, zeros, dot, True, aligned, with_dot,
            )  # fmt: skip
        if whole * block_size < count:
            tail = whole * block_size + offsets
            squares, largest, nonfinite, zeros, dot = _block(
                address, other_address, tail, tail < count, dtype,
                squares, largest, nonfinite, zeros, dot, False, aligned, with_dot,
            )  # fmt: skip
        out = partials + program * 5
        tl.store(out, squares)
        tl.store(out + 1, largest.to(tl.float32, bitcast=True).to(tl.float64))
        tl.store(out + 2, nonfinite.to(tl.float64))
        tl.store(out + 3, zeros.to(tl.float64))
        tl.store(out + 4, dot)
    else:
        lanes = tl.arange(0, gather_size)
        inside = lanes < count
        where = tl.load(other_address.to(tl.pointer_type(tl.int64)) + lanes, mask=inside, other=0)
        values = _load(address, where, inside, dtype, False, False)
        tl.store(samples + tl.load(row + 4) + lanes, values, mask=inside)
