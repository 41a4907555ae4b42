"""What is written where the program multiplies a loss by a number: a count of ranks or passes, or something else.

`loss / world_size` and `0.5 * loss` are one graph to autograd on two ranks. Who calls a number the world's size divides
by ranks and means no coefficient. Names alone accuse nobody: a number has to be such a count by its value, too. And
the name has to be of one sense: `num_steps` may be those of a model that is unrolled, `num_nodes` those of a graph.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import reduce
from math import prod
from operator import and_

from gradcheck_dist.events import LossNumber
from gradcheck_dist.ledger.contributions import Contribution, Contributions

SAME = 1e-6
TIMES = "* "
_OF = r"(?:count|counts|degree|num|number|size|total|world_size)?"
_RANKS = re.compile(
    r"world_?size|n_?procs?(?![a-z])|(?:num|n)_?(?:processes|replicas|gpus?|devices?|ranks)"
    rf"|(?<![a-z])(?:d?dp|fsdp|dp_replicate|dp_shard|data_parallel)(?:_|\.)?{_OF}(?![a-z])|(?<![a-z])(?:world|ranks)(?![a-z_])"
)
_PASSES = re.compile(
    r"accum|(?<![a-z])(?:grad_?)?acc(?:_?steps?)?(?![a-z])|(?<![a-z])gas(?![a-z])"
    r"|micro_?(?:batches|steps)|(?:num|n)_?micro"
)
_COEFFICIENT = re.compile(r"coef|weight|scale|lambda|lmbda|alpha|beta|gamma|factor|ratio|temp")


def names_a_count(number: LossNumber) -> bool:
    """Whether what is written there, or what the file assigns to it, calls it a number of ranks or passes."""
    return names_ranks(number) or names_passes(number)


def may_be_a_coefficient(number: LossNumber) -> bool:
    """Whether it multiplies, and is not called a count. What divides is a normaliser."""
    return number.written.startswith(TIMES) and not names_a_count(number)


def names_ranks(number: LossNumber) -> bool:
    return _is_called(number, _RANKS)


def names_passes(number: LossNumber) -> bool:
    return _is_called(number, _PASSES)


def _is_called(number: LossNumber, names: re.Pattern[str]) -> bool:
    told = f"{number.written} {number.assigned}".lower()
    return bool(names.search(told)) and not _COEFFICIENT.search(number.written.lower())


def counts_before(contributions: Contributions) -> list[float]:
    """The numbers that multiply every pass's loss on the same lines, and that are called, and are, products of ranks
    and passes, or one over these."""
    ranks = len({key[0] for key in contributions.by_key})
    of_passes = [len(set(parts)) for parts in zip(*contributions.by_key, strict=True)][1:]
    passes = {1, *of_passes, prod(of_passes)}
    sizes = {one * other for one in (1, ranks) for other in passes} - {1}
    numbers = common_numbers(contributions)
    return [number.factor for number in numbers if names_a_count(number) and _is_one(number.factor, sizes)]


def ranks_before(contributions: Contributions) -> list[float]:
    """The same of those that are called numbers of ranks."""
    return [number.factor for number in common_numbers(contributions) if names_ranks(number)]


def common_numbers(contributions: Contributions) -> list[LossNumber]:
    """The numbers by which every pass's loss is multiplied on the same lines."""
    of_pass = [Counter(numbers_of(one)) for one in contributions.by_key.values()]
    return list(reduce(and_, of_pass).elements()) if of_pass else []


def numbers_of(contribution: Contribution) -> list[LossNumber]:
    return (contribution.gradient.numbers if contribution.gradient is not None else None) or []


def _is_one(factor: float, sizes: set[int]) -> bool:
    return any(abs(one - size) <= SAME * size for size in sizes for one in (factor, 1 / factor))
