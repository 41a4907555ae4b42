"""Parameters that began alike on tensor-parallel ranks, and have the size of a part: shards of one seed, or copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Exchange, Param
from gradcheck_dist.ledger.combined_copies import fed_alike
from gradcheck_dist.ledger.exchanges import SCATTER, SUM
from gradcheck_dist.ledger.like_copies import got_alike
from gradcheck_dist.ledger.names import plain_name
from gradcheck_dist.ledger.parted import MANY, in_shards, module_of, sizes_of
from gradcheck_dist.ledger.summed_losses import summed_losses
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track, param_key


def leave_shards_open(cases: Iterable[Case], data: StepData) -> tuple[list[Case], list[str]]:
    """The cases without the parameters that may be shards, and why these are left open.

    Where ranks part matrices, which began with other values on each, a parameter that began alike may be a shard, too,
    if it has the size of a part, or is a vector of another size than the model's width, such as the number of heads
    that a rank holds, and stands in a module beside others (a norm has a module of its own). So it may be if ranks
    combined what they had computed alike with it; and any matrix may be where ranks add up activations though nothing
    that they hold began with other values. Shards lack no sum; copies do where each rank's gradient is a summand.
    """
    left: list[Case] = []
    open_names: set[str] = set()
    shards = _Shards(data)
    for case in cases:
        summand = _is_a_summand(case, data)
        may_be = {held.param for held in case.held if summand and shards.may_hold(held.param)}
        may_be = {key for key in may_be if not _whole_on_stages(key, case, data)}
        open_names |= {name for _, name in may_be}
        if (rest := case.without(may_be)) is not None:
            left.append(rest)
    if not open_names:
        return left, []
    return left, [
        f"the gradients of {in_short(sorted(open_names))} differ between ranks that share their tokens, and nobody "
        "adds them up: shards that began alike (as one number, or drawn from one seed) need no sum, and these have the "
        "size of one, or of a rank's heads, or ranks combine what they compute with them as they do with shards'; "
        "copies, such as a norm that heads share, do need it. Set `param.tensor_model_parallel = True` on each "
        "parameter that is a shard (False on copies), behind fully_shard where it is used, and this is told"
    ]


def _whole_on_stages(key: ParamKey, case: Case, data: StepData) -> bool:
    """Whether a parameter is a matrix that lies on several pipeline stages, and whose ranks on one stage have one
    gradient of each batch: what it lacks is the other stages'."""
    place, of_rank = case.context.contributions.coordinate, data.tracks.get(key, {})
    holders: dict[tuple[int, ParamKey], list[int]] = defaultdict(list)
    for rank, track in of_rank.items():
        holders[place.get(rank, rank), param_key(track.param)].append(rank)
    return key in data.tied and all(got_alike(of_rank, tuple(ranks)) for ranks in holders.values())


def _is_a_summand(case: Case, data: StepData) -> bool:
    """Whether each rank's gradient lacks what others have of it, of the tokens that they share: all that is missing is
    of the rank's own tokens, or of tokens of which another summand came."""
    if not case.culprit.absent:
        return False
    place, summed = case.context.contributions.coordinate, summed_losses(data, perhaps=True)
    shared = {place.get(rank, rank): {place.get(other, other) for other in ranks} for rank, ranks in summed.items()}
    for held in case.held:
        came = {cell.key for cell in held.cells if cell.right}
        for key in {cell.key for one, cell in case.cells if one is held and not cell.right}:
            coordinate, *slot = key
            mine = place.get(held.rank) == coordinate or key in came
            beside = {(other, *slot) for other in shared.get(coordinate, ())} - {key}
            if not (mine and held.replay.basis.summands.get(key, 1) > 1) and not beside & came:
                return False
    return True


class _Shards:
    """Which of a step's parameters may be shards though they began alike."""

    def __init__(self, data: StepData) -> None:
        self._data = data

    def may_hold(self, key: ParamKey) -> bool:
        data, of_rank = self._data, self._data.tracks.get(key, {})
        if plain_name(key[1]) != key[1] or len(of_rank) < 2:
            return False
        param = next(iter(of_rank.values())).param
        if param.partitioned is False or (param.placements and not in_shards(param)):
            return False
        if self._of_a_part(key, param):
            return True
        if key in self._combined or (not data.sizes.parts and self._adds_up):
            return len(sizes_of(param)) > 1 or not sizes_of(param) <= self._widths or not self._stands_alone(key)
        of_unknown_size = len(sizes_of(param)) == 1 and not sizes_of(param) <= data.sizes.shared
        return bool(data.sizes.parts) and of_unknown_size and not self._stands_alone(key)

    def _of_a_part(self, key: ParamKey, param: Param) -> bool:
        """Whether a parameter has the size of a part. That may be the model's width, too, as where the inner layer is
        as many times wider as there are ranks: a vector of that size is no part where it stands in a module of its own,
        with no parted layer beside it."""
        sizes = sizes_of(param)
        of_width = len(param.shape) == 1 and sizes <= self._data.sizes.shared
        if of_width and self._stands_alone(key) and not self._has_parted_beside(key):
            return False
        return bool(sizes & self._data.sizes.parts)

    def _has_parted_beside(self, key: ParamKey) -> bool:
        """Whether a parted layer stands beside a parameter's module: a matrix in a module of its own, or none."""
        stage, around = key[0], module_of(module_of(key[1])[:-1])
        names = {plain_name(name) for (at, name), of_rank in self._data.tracks.items()
                 if at == stage and plain_name(name) != name and len(_shape(of_rank)) > 1}  # fmt: skip
        modules = [module_of(name) for name in names]
        return any(one == around or (module_of(one[:-1]) == around and modules.count(one) == 1) for one in modules)

    def _stands_alone(self, key: ParamKey) -> bool:
        return _has_own_module(key, self._data.tracks)

    @cached_property
    def _combined(self) -> set[ParamKey]:
        """Parameters with which ranks computed alike what they then combined."""
        data = self._data
        found = {(rank, id) for rank, params in fed_alike(data.events) for id in data.params_of(rank, params)}
        return {
            key
            for key, of_rank in data.tracks.items()
            if of_rank and all((rank, track.param.id) in found for rank, track in of_rank.items())
        }

    @cached_property
    def _adds_up(self) -> bool:
        """Whether ranks add up activations, as they do behind layers that they part."""
        return any(
            isinstance(event, Exchange)
            and (event.operation in (SUM, SCATTER) or any("reduce" in name for name in event.collectives))
            for of_rank in self._data.events.values()
            for event in of_rank
        )

    @cached_property
    def _widths(self) -> set[int]:
        """Sizes of layers that nobody parts; where nothing tells, the one that all matrices have."""
        firsts = (next(iter(of_rank.values())).param for of_rank in self._data.tracks.values() if of_rank)
        matrices = {tuple(param.shape) for param in firsts if len(sizes_of(param)) > 1}
        common = set.intersection(*map(set, matrices)) if len(matrices) >= MANY else set()
        return set(self._data.sizes.shared) or (common if len(common) == 1 else set())


def _shape(of_rank: Mapping[int, Track]) -> tuple[int, ...]:
    return next((tuple(track.param.shape) for track in of_rank.values()), ())


def _has_own_module(key: ParamKey, tracks: Mapping[ParamKey, Mapping[int, Track]]) -> bool:
    """Whether a parameter's module holds nothing but vectors of its size, as a norm does."""
    stage, module = key[0], module_of(key[1])
    size = sizes_of(next(iter(tracks[key].values())).param)
    inside: Sequence[Track] = [
        next(iter(of_rank.values())) for (at, name), of_rank in tracks.items()
        if of_rank and at == stage and name.startswith(module)
    ]  # fmt: skip
    return bool(module) and all(len(one.param.shape) == 1 and sizes_of(one.param) == size for one in inside)
