"""Runs of neighbouring tokens as checksums, so that labels are found again among the tokens that a model read.

Labels of a language model are its inputs, one place further on. The smallest checksums of two sets tell how much of one
is in the other, whatever else that holds: what is smaller than the largest that was kept of it would have been kept.
"""

from __future__ import annotations

import numpy as np

NUM_TOKENS = 4
"""Neighbours that make a run."""
NUM_KEPT = 128
NUM_LOOKED_AT = 4 * NUM_KEPT  # so many of the smallest hold as many different ones, but where tokens repeat much
FACTOR = 6364136223846793005  # Knuth's MMIX multiplier
NONE = np.iinfo(np.int64).max
"""In the place of a run that holds a label without a loss."""
_POWERS = np.cumprod(np.array([1, *[FACTOR] * (NUM_TOKENS - 1)], np.int64))[::-1]  # modulo 2**64
_ALL_POWERS = _POWERS.sum()
_ONES = np.ones(NUM_TOKENS, np.int8)


def runs(tokens: np.ndarray) -> np.ndarray:
    """The smallest checksums of runs, ascending, shape (up to NUM_KEPT,), of tokens of any shape; negative ones are
    labels without a loss."""
    flat = np.ascontiguousarray(tokens.reshape(-1), np.int64)
    if len(flat) < NUM_TOKENS:
        return np.empty(0, np.int64)
    found = np.correlate(flat, _POWERS) + _ALL_POWERS  # the sum: a token counts one more than its number
    if flat.min() < 0:
        found = found[np.correlate((flat < 0).astype(np.int8), _ONES) == 0]
    if len(found) > NUM_LOOKED_AT:
        smallest = _different(np.partition(found, NUM_LOOKED_AT)[:NUM_LOOKED_AT])
        if len(smallest) >= NUM_KEPT:
            return smallest[:NUM_KEPT]
    return _different(found)[:NUM_KEPT]


def _different(found: np.ndarray) -> np.ndarray:
    """What np.unique gives, which fills a hash table first (64 tokens: 11 us in all, and 7 so). Sorts its argument."""
    found.sort()
    return np.concatenate((found[:1], found[1:][found[1:] != found[:-1]]))


def found_in(mine: np.ndarray, others: np.ndarray) -> tuple[int, int]:
    """How many of one set's runs are in another set, and of how many that can be told."""
    mine, others = mine[mine != NONE], others[others != NONE]
    if not len(others):
        return 0, 0
    compared = mine[mine <= others[-1]] if len(others) >= NUM_KEPT else mine
    return int(np.isin(compared, others).sum()), len(compared)
