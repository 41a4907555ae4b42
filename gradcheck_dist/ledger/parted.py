"""Which sizes of tensors are those of parts, and which of whole layers: shapes tell shards where values do not.

A matrix that tensor-parallel ranks part is parted along one dimension: its other one has the size that embeddings and
copies of other matrices have. What else has the size of the parted one (an adapter's second factor, a scale of each
feature) may be a part as well, though it began as one number, or was drawn from one seed, on all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from gradcheck_dist.events import Param
from gradcheck_dist.ledger.moved import ParamKey

MANY = 3
"""Shapes of parted matrices, from which on the one size that all of them have is taken for the model's width."""

OfRank = Mapping[int, Param]
"""One name's parameters by rank."""


@dataclass(frozen=True)
class Sizes:
    """Of the layers of a run: of the `parts` that ranks hold of some, as values tell, and those that whole ones and
    parted ones have in common (`shared`)."""

    parts: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()


def module_of(name: str) -> str:
    """The name of the module that holds a parameter, with the dot behind it; "" for the model itself."""
    return name[: name.rfind(".") + 1]


def sizes_of(param: Param) -> set[int]:
    return {size for size in param.shape if size > 1}


def _is_matrix(param: Param) -> bool:
    """Whether a tensor has two dimensions or more, which may be of one size."""
    return sum(size > 1 for size in param.shape) > 1


class Parted:
    """What is known of tensors that began alike from those that ranks hold parts of: `parts` are sets of ranks that
    hold one tensor each."""

    def __init__(self, params: Mapping[ParamKey, OfRank], parts: Mapping[ParamKey, list[set[int]]]) -> None:
        self._params = params
        apart = {key: sets for key, sets in parts.items() if len(sets) > 1}
        self._parts = {key: sets for key, sets in apart.items() if _is_plain(params[key]) or _in_shards(params[key])}
        self._modules = {(stage, module_of(name)): (stage, name) for stage, name in self._parts}
        matrices = Counter((stage, module_of(name)) for (stage, name), of_rank in params.items()
                           if (stage, name) in self._parts and _is_matrix(_first(of_rank)))  # fmt: skip
        self._of_several = {module for module, number in matrices.items() if number > 1}
        copies = [_first(of_rank) for key, of_rank in params.items() if self._are_copies(key)]
        parted = [_first(params[key]) for key in self._parts]
        self._rows = self._rows_of_modules(set[int]().union(*map(sizes_of, copies)))
        self._whole = _whole_sizes(parted, copies)
        shared = self._whole & set[int]().union(*map(sizes_of, parted))
        self.sizes = Sizes(frozenset(_part_sizes(parted, self._whole)), frozenset(shared))

    def parts_of(self, key: ParamKey) -> list[set[int]]:
        """Sets of ranks that hold one part each: as a parted weight in whose module it lies has them, or, of what says
        that it is partitioned, as all parted ones have them. [] where nothing tells that it is parted."""
        of_rank = self._params[key]
        said = {param.partitioned for param in of_rank.values()}
        weight = self._weight_around(key)
        if weight is not None and said != {True} and self._is_another_layer(key, weight):
            return []
        if not self._parts or False in said or not (_is_plain(of_rank) or (said == {True} and _in_shards(of_rank))):
            return []
        if said == {True}:
            ways = {tuple(sorted(tuple(sorted(part)) for part in sets)) for sets in self._parts.values()}
            return self._parts[weight] if weight else [set(part) for part in ways.pop()] if len(ways) == 1 else []
        rows, holders = self._rows.get((key[0], module_of(key[1])), (0, []))
        if _first(of_rank).start is None and _first(of_rank).shape[:1] == (rows,):
            return [set(part) for part in holders]
        own = sizes_of(_first(self._params[weight])) - self._whole if weight else set()
        return self._parts[weight] if weight and len(own) == 1 and own & sizes_of(_first(of_rank)) else []

    def _rows_of_modules(self, whole: Collection[int]) -> dict[ParamKey, tuple[int, list[set[int]]]]:
        """Of modules whose parted tensors have several shapes, and in common their number of rows alone, which no copy
        (`whole` sizes, or beside them) has: that number, and who holds which. Each rank has things of its own there
        (points, objects), a row of each tensor a thing; ways to part matrices leave no such number, for they part rows
        of some and columns of others."""
        of_module: dict[ParamKey, list[ParamKey]] = {}
        beside: dict[ParamKey, set[int]] = {}
        for stage, name in self._params:
            of_rank = self._params[stage, name]
            if (stage, name) in self._parts:
                of_module.setdefault((stage, module_of(name)), []).append((stage, name))
            elif len(of_rank) > 1 and _first(of_rank).start is not None:
                beside.setdefault((stage, module_of(name)), set()).update(_first(of_rank).shape[:1])
        found = {}
        for module, keys in of_module.items():
            shapes = {tuple(_first(self._params[key]).shape) for key in keys}
            rows = {shape[:1] for shape in shapes}
            common = set.intersection(*(set(shape) - {1} for shape in shapes))
            told = common.isdisjoint(whole) and common.isdisjoint(beside.get(module, ()))
            if len(shapes) > 1 and len(common) == 1 and rows == {tuple(common)} and told:
                sets = self._parts[keys[0]]
                if all(self._parts[key] == sets for key in keys):
                    found[module] = (common.pop(), sets)
        return found

    def _is_another_layer(self, key: ParamKey, weight: ParamKey) -> bool:
        """Whether a parameter belongs to none of the parted matrices that one module holds by itself, as attention may
        hold its four: what was drawn alike beside those that were not, or stands in a module of its own below them. A
        bias, of one number, may be any one's."""
        module = module_of(weight[1])
        of_several = (weight[0], module) in self._of_several
        return of_several and (module_of(key[1]) != module or _first(self._params[key]).start is not None)

    def _are_copies(self, key: ParamKey) -> bool:
        """Whether it is a matrix that began as the same numbers on all ranks, outside of the modules of parted ones."""
        of_rank = self._params[key]
        alike = len(of_rank) > 1 and _is_plain(of_rank) and len({param.fingerprint for param in of_rank.values()}) == 1
        matrix = alike and len(sizes_of(_first(of_rank))) > 1 and _first(of_rank).start is not None
        return matrix and self._weight_around(key) is None

    def _weight_around(self, key: ParamKey) -> ParamKey | None:
        """The parted parameter in whose module, or below it, another one lies."""
        module = module_of(key[1])
        while module:
            if (weight := self._modules.get((key[0], module))) is not None:
                return weight
            module = module_of(module[:-1])
        return None


def _whole_sizes(parted: Iterable[Param], copies: Iterable[Param]) -> set[int]:
    """Sizes of layers that nobody parts: those of copies, and the one that all parted matrices have. That is the part's
    where a matrix has no other size than it and those of copies, as beside adapters of layers that are parted alike."""
    matrices = {tuple(param.shape) for param in parted if len(sizes_of(param)) > 1}
    told = set[int]().union(*map(sizes_of, copies))
    shared = set[int].intersection(*map(set, matrices)) if len(matrices) >= MANY else set()
    of_parts = any(set(shape) - told == shared for shape in matrices)
    return told | (shared if len(shared) == 1 and not of_parts else set())


def _part_sizes(parted: Iterable[Param], whole: Collection[int]) -> set[int]:
    """What may be the size of a part: of each tensor the one size that is no whole one. Where several are left, one
    that another tensor tells is taken, else all; and all of a matrix where none is left. A vector as long as a whole
    layer tells nothing beside others: an expert's bias has that size."""
    own = [(param, sizes_of(param).difference(whole)) for param in parted]
    telling = [(param, left) for param, left in own if left or len(param.shape) > 1] or own
    found = [left or sizes_of(param) for param, left in telling]
    told = set[int]().union(*(sizes for sizes in found if len(sizes) == 1))
    return set[int]().union(*(sizes & told or sizes for sizes in found))


def _first(of_rank: OfRank) -> Param:
    return next(iter(of_rank.values()))


def in_shards(param: Param) -> bool:
    """Whether ranks shard it and do nothing else with it: of ranks that shard another tensor, or the same one, it tells
    nothing, as tensor-parallel ranks' parts below FSDP."""
    return param.placements.startswith("(Shard(") and param.placements.endswith("),)")


def _in_shards(of_rank: OfRank) -> bool:
    return all(map(in_shards, of_rank.values()))


def _is_plain(of_rank: OfRank) -> bool:
    return all(param.fingerprint is not None for param in of_rank.values())
