"""Parameters that a rank may have for itself, though they began as copies do: experts that were drawn from one seed."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from gradcheck_dist.diagnosis.causes.case import Case
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Exchange
from gradcheck_dist.ledger.names import plain_name
from gradcheck_dist.ledger.summed_losses import summed_losses
from gradcheck_dist.ledger.tracks import ParamKey, StepData, Track

ONE_SEED = "experts that were drawn from one seed"
NO_SEED = "what experts or heads begin with alike (a norm, a gain)"
OFF = "each rank's own, weigh"
UNSEEN = "functions whose backward was not followed"
NONE: tuple[int, tuple[int, ...]] = (0, ())
EXACT = 1e-5
"""Relative: how near a ratio of token counts must be."""


def experts(case: Case, data: StepData) -> str | None:
    """Why parameters whose gradients were not reduced accuse nobody: they may be each rank's own experts."""
    shown = in_short(sorted({held.param[1] for held in case.held}))
    if case.culprit.absent and _are_experts(case, data):
        return (
            f"the gradients of {shown} are not reduced and began alike on all ranks, and their modules say that they "
            f"are experts (allreduce = False): {ONE_SEED} need no reduction, copies of one expert do. Draw experts "
            "from a seed of their own on each rank, which they need to become different, and this is told"
        )
    alike = sorted({held.param[1] for held in case.held if not _is_told_apart(held.param)})
    if not alike:
        return _behind_unseen(case, data, shown)  # values told that they are no copies
    among_experts = _may_be_experts(case, data)
    if not among_experts and not (case.culprit.absent and not case.everywhere and _exchange_nothing(data)):
        return None
    shown = in_short(alike)
    if _stand_beside_own(case, data):
        return (
            f"the gradients of {shown} are not reduced and began alike on all ranks, beside parameters "
            f"of which each rank has its own: {NO_SEED} needs no reduction, copies do. Begun "
            f"unlike for once, they are judged{_beside(case) if among_experts else ''}"
        )
    if not among_experts:
        return None
    return (
        f"the gradients of {shown} are not reduced and began alike on all ranks, and ranks exchange activations before "
        f"and after their modules are called: {ONE_SEED} need no reduction, copies do. Draw "
        "experts from a seed of their own on each rank, which they need to become different, and this is told"
    )


def _beside(case: Case) -> str:
    """What the parameters of the case weigh of which each rank has its own, where that is wrong."""
    own = [(held, cell) for held, cell in case.cells if _is_told_apart(held.param) and not cell.right]
    names = in_short(sorted({plain_name(held.param[1]) for held, _ in own}))
    low, high = min((cell.ratio for _, cell in own), default=1), max((cell.ratio for _, cell in own), default=1)
    if not own or high - low > 2 * case.pattern.tolerance * high:
        return ""
    return f". {names}, {OFF} x {high:.4g} of their part of the mean over all ranks"


def _behind_unseen(case: Case, data: StepData, shown: str) -> str | None:
    """Why each rank's own parameters accuse nobody: activations are exchanged behind their modules, and nobody saw what
    comes back (a collective that one function begins and another one waits for). It may be divided on its way."""
    if not case.culprit.absent or case.everywhere:
        return None
    for held in case.held:
        for rank, track in data.tracks.get(held.param, {}).items():
            last = max((of_rank[rank].exchanges or NONE)[0] for of_rank in data.tracks.values() if rank in of_rank)
            seen = any(isinstance(event, Exchange) for event in data.events[rank])
            if seen or last <= (track.exchanges or NONE)[0]:
                return None
    return (
        f"{shown} are of some ranks alone, and what their gradients are made of is {_times(case)} of its part of the "
        f"mean over all ranks, by which the other parameters go; but ranks exchange activations behind their modules "
        f"by {UNSEEN}, which may divide it"
    )


def _are_experts(case: Case, data: StepData) -> bool:
    """Whether these are experts by what their modules say, which began alike wherever no tensor parallelism parts them:
    where values tell some from others, those that are alike are copies."""
    for held in case.held:
        apart = plain_name(held.param[1]) != held.param[1]
        told = [track.param for track in data.tracks.get(held.param, {}).values()]
        if not told or not all(param.expert and (param.partitioned or not apart) for param in told):
            return False
    return True


def _may_be_experts(case: Case, data: StepData) -> bool:
    """Whether gradients that were not reduced are those of parameters that are called between exchanges of activations
    (all-to-all), where nothing is called whose gradients are reduced: each rank's own parameters may be. Such a
    parameter gets all ranks' tokens without any reduction; the norms of a sequence-parallel model stand beside what is
    reduced."""
    if not case.culprit.absent or case.everywhere:
        return False
    own = {held.param for held in case.held}
    mine: set[int] = set()
    others: set[int] = set()
    for key, of_rank in data.tracks.items():
        if key not in own and _is_told_apart(key):
            continue
        for track in of_rank.values():
            count, ranks = track.exchanges or NONE
            (mine if key in own else others).add(count)
            if key in own and (not count or not of_rank.keys() <= set(ranks)):
                return False
    return bool(mine) and mine.isdisjoint(others)


def _exchange_nothing(data: StepData) -> bool:
    """Whether no activations go from rank to rank: what each rank has for itself is no part of a layer."""
    return not any(isinstance(event, Exchange) for events in data.events.values() for event in events)


def _stand_beside_own(case: Case, data: StepData) -> bool:
    """Whether each lies in a module, or in one of its modules, of which others are each rank's own; or is one number (a
    task's weight), which begins alike whoever's it is, beside these."""
    around = {".".join(plain_name(key[1]).split(".")[:-1]) for key in data.tracks if _is_told_apart(key)}
    modules = {module for one in around for module in (one, one.rpartition(".")[0]) if module}
    return bool(around) and all(
        _is_one_number(held.param, data) or any(held.param[1].startswith(f"{module}.") for module in modules)
        for held in case.held
    )


def _is_one_number(key: ParamKey, data: StepData) -> bool:
    return all(prod(track.param.shape) == 1 for track in data.tracks[key].values())


def _is_told_apart(key: ParamKey) -> bool:
    """Whether values told that ranks hold parameters of their own under this name."""
    return plain_name(key[1]) != key[1]


def own_mean(case: Case, data: StepData) -> str | None:
    """Why a mean over some ranks' own tokens accuses nobody: their heads or adapters may be meant so."""
    if not _may_be_own_mean(case, data):
        return None
    names = sorted({plain_name(held.param[1]) for held in case.held})
    shown = in_short(names)
    shared = summed_losses(data, perhaps=True)
    if all(rank in shared for held in case.held for rank in held.ranks):
        return (
            f"{shown} are of some ranks alone, which share their tokens with others and have the loss for themselves: "
            "their gradients are means over the ranks that hold them, as FSDP2 divides by itself, and "
            f"{_times(case)} of their part of the mean over all ranks, by which the other parameters go. Experts need "
            f"a division by all {case.context.world_size} ranks (set_gradient_divide_factor), if they are to follow it"
        )
    return (
        f"{shown} are of some ranks alone, and so is what reaches them: their gradients are means over these ranks' "
        f"own tokens, and {_times(case)} of their part of the mean over all tokens, by which the other "
        "parameters go. Heads and adapters by task or language may be meant so; experts, shares of one loss, or what "
        "was added behind the wrapper, may not"
    )


def _times(case: Case) -> str:
    low, high = min(cell.ratio for _, cell in case.cells), max(cell.ratio for _, cell in case.cells)
    same = high - low <= 2 * case.pattern.tolerance * high
    return f"x {case.pattern.factor:.4g}" if same else f"x {low:.4g} to x {high:.4g}"


def _may_be_own_mean(case: Case, data: StepData) -> bool:
    """Whether parameters of some ranks alone, which no activations of others reach and whose own reach no others, are
    averaged over the tokens of these ranks: heads and adapters by language or task may be meant so. Experts get others'
    tokens by exchanges, or what they make is summed with that of others; and where nothing was reduced, copies may have
    been forgotten, unless values told them apart and ranks exchange nothing. Where ranks are judged apart, that mean is
    what is expected."""
    contributions = case.context.contributions
    total = contributions.num_tokens
    told_apart = all(_is_told_apart(held.param) for held in case.held) and _exchange_nothing(data)
    if (case.culprit.absent and not told_apart) or case.context.apart or not total:
        return False
    for held in case.held:
        of_rank = data.tracks.get(held.param, {})
        reached = {
            (contributions.coordinate.get(rank, rank), *slot)
            for rank, track in of_rank.items()
            for slot in track.leaves
        }
        if len(of_rank) == len(data.events) or any(not _of_own(data, track, of_rank) for track in of_rank.values()):
            return False
        counts = [contributions.by_key[key].num_tokens for key in reached if key in contributions.by_key]
        own = sum(count or 0 for count in counts)
        ratios = [cell.ratio for one, cell in case.cells if one is held]
        allowed = max(case.pattern.tolerance, EXACT)
        if not 0 < own < total or any(abs(ratio * own / total - 1) > allowed for ratio in ratios):
            return False
    return True


def _of_own(data: StepData, track: Track, holders: Collection[int]) -> bool:
    """Whether no activations come from ranks that do not hold a parameter, or go to them."""
    count, ranks = track.exchanges or NONE
    if count and not set(ranks) <= set(holders):
        return False
    return not any(
        isinstance(event, Exchange)
        and not set(event.group) <= set(holders)
        and event.params is not None
        and track.param.id in data.params_of(track.rank, event.params)
        for event in data.events[track.rank]
    )
