"""Checksums of labels, as they stand in a trace, and those of labels that are the same numbers in every batch."""

from __future__ import annotations

import functools
import zlib

import numpy as np

HASH_FACTOR, HASH_OFFSET = 6364136223846793005, 1442695040888963407  # Knuth's MMIX multiplier and increment
MAX_LABELS = 1 << 16
MAX_RANKS = 64
MAX_CLASSES = 16
"""And fewer: classes that all labels of a batch may be of, as those of a discriminator are."""
MAX_ROWS = 1 << 12
"""Batches of more labels are of sequences or images: they are not looked at for one class."""
MAX_PASSAGES = 33
"""And fewer are looked for: numbers that a query's own passage may lie apart from the next one's."""


def one_class(num_labels: int | None, label_hash: int | None) -> int | None:
    """The class that all labels of this checksum are of, two at least; None where they are not, or it is none of the
    first ones, or they are many."""
    if label_hash is None or not num_labels or not 2 <= num_labels <= MAX_ROWS:
        return None
    return _of_one_class(num_labels).get(label_hash)


@functools.cache
def _of_one_class(num: int) -> dict[int, int]:
    classes = ((index, np.full(num, index)) for index in range(MAX_CLASSES))
    return {found: index for index, labels in classes for found in _checksums(labels)}


def tell_no_batch(num_labels: int | None, label_hash: int | None) -> bool:
    """Whether labels of this checksum are all of one class, or 0 to n-1 (from the n-th number of a rank on, where ranks
    gather what they compare; every k-th number, where a query has k passages), as those of contrastive losses are:
    equal ones need not be of one batch."""
    return bool(num_labels) and label_hash is not None and label_hash in _plain(min(num_labels or 0, MAX_LABELS))


@functools.cache
def _plain(num: int) -> frozenset[int]:
    counted = np.arange(num)
    return frozenset(
        found
        for labels in (
            *(counted * passages for passages in range(MAX_PASSAGES)),
            *(counted + rank * num for rank in range(MAX_RANKS)),
        )
        for found in _checksums(labels)
    ) | frozenset(_of_one_class(num) if num <= MAX_ROWS else ())


def _checksums(labels: np.ndarray) -> tuple[int, int]:
    return zlib.crc32(labels.tobytes()), _on_accelerator(labels)


def _on_accelerator(labels: np.ndarray) -> int:
    """The sum that a device computes, which wraps at 64 bits."""
    with np.errstate(over="ignore"):
        position = np.arange(len(labels)) * np.int64(HASH_FACTOR) + np.int64(HASH_OFFSET)
        return int(((labels + 1) * position).sum())
