"""Contributions: which loss evaluations a step is made of, on how many tokens, with which weight at the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gradcheck_dist.events import DATA_PARALLEL, FUNCTION, Backward, Event, Loss, LossGradient, PipelineStep, Reduce
from gradcheck_dist.ledger.combined_losses import collectives_on_numbers, with_collectives
from gradcheck_dist.wording import numbered

ContributionKey = tuple[int, int, int]
"""(data coordinate, accumulation step, microbatch)"""

UNKNOWN = "unknown"
"""Reduction of a loss of which no probe knows what it counts."""

SAME_DATA_SETTING = "--same-data of `gradcheck run` sets it"


@dataclass(frozen=True)
class Samples:
    """The samples (sequences) that a contribution's tokens seem to belong to: `num` of them, whose weights come to
    `total` and are alike up to `spread`, relative. `shortest` and `longest` are the numbers of tokens of one. `parts`:
    what seems to be samples are several losses of one head, of several rows each, or of pieces of rows. `labels`: all
    of theirs, also ignored ones; 0 where that is not known."""

    num: int
    total: float
    spread: float
    shortest: int
    longest: int
    parts: bool = False
    labels: int = 0

    @property
    def differ(self) -> bool:
        return 0 < self.shortest < self.longest


@dataclass
class Contribution:
    """One loss evaluation on one set of tokens.

    `weight` is the weight of one token's loss in the backward root; None when no loss was seen. `spread` is the
    relative spread of that weight over the tokens or loss calls of this contribution (0 when it is the same for all);
    `num_losses` are these calls, `lines` where they were made, `samples` what weighs alike in them, as far as it is
    known. `given` is a checksum of what its first module was given.
    """

    key: ContributionKey
    ranks: tuple[int, ...]
    num_tokens: int | None
    weight: float | None
    spread: float = 0.0
    label_hash: int | None = None
    loss: Loss | None = None
    gradient: LossGradient | None = None
    loss_rank: int | None = None
    value: float | None = None
    num_losses: int = 1
    lines: frozenset[str] = frozenset()
    samples: Samples | None = None
    given: int | None = None

    @property
    def weighs_nothing(self) -> bool:
        """Whether no gradient arrives at any of its tokens. Weights of several signs may come to zero and weigh."""
        return self.weight == 0 and not self.spread


@dataclass
class Contributions:
    """All contributions of a step, and how ranks map to data coordinates. `coordinate_from` is "declared" or says what
    they were inferred from. `groups`: the data coordinates of each group of some ranks that reduced something. `lost`:
    passes that left nothing and are taken for no part of the step, though a program may have counted them. `one_batch`:
    all passes evaluate one batch, as other steps tell."""

    by_key: dict[ContributionKey, Contribution] = field(default_factory=dict)
    coordinate: dict[int, int] = field(default_factory=dict)
    coordinate_from: str = "declared"
    problems: list[str] = field(default_factory=list)
    groups: tuple[tuple[int, ...], ...] = ()
    lost: frozenset[ContributionKey] = frozenset()
    one_batch: bool = False

    @property
    def num_tokens(self) -> int | None:
        """N, the valid tokens of the step; None when some contribution's count is unknown."""
        counts = [contribution.num_tokens for contribution in self.by_key.values()]
        return None if any(count is None for count in counts) else sum(count or 0 for count in counts)

    @property
    def num_coordinates(self) -> int:
        return len(set(self.coordinate.values()))

    @property
    def losses_per_pass(self) -> float:
        """How many losses a pass adds up, on average."""
        return sum(one.num_losses for one in self.by_key.values()) / max(len(self.by_key), 1)

    def ranks_of_coordinates(self) -> list[list[int]]:
        """The ranks of each data coordinate, in order."""
        return [
            sorted(rank for rank, own in self.coordinate.items() if own == one)
            for one in sorted(set(self.coordinate.values()))
        ]


Signature = tuple[tuple[tuple[int, int], tuple[int | None, ...]], ...]
"""The label hashes of a rank's losses, by (accumulation step, microbatch)."""

LossesOfRank = dict[tuple[int, int], list[tuple[LossGradient, Loss | None]]]


def losses_of_rank(events: list[Event]) -> LossesOfRank:
    """The main losses whose gradient arrived, by (accumulation step, microbatch).

    Evaluations without backward drop out, and so do auxiliary terms: an early pipeline stage may have its own, and it
    still gets its tokens from the last one.
    """
    losses = {event.loss_id: event for event in events if isinstance(event, Loss)}
    found: LossesOfRank = defaultdict(list)
    combining = collectives_on_numbers(events)
    for event in events:
        loss = losses.get(event.loss_id) if isinstance(event, LossGradient) else None
        if isinstance(event, LossGradient) and (loss is None or loss.term == "main"):
            slot = event.accumulation_step, event.microbatch
            found[slot].append((with_collectives(event, loss, combining.get(slot, ())), loss))
    # A pass of its own for a regulariser is no contribution where others have a loss that counts tokens; a pass of the
    # same function, of which it is not known what it counted there, is.
    known = {loss.op for pairs in found.values() for _, loss in pairs if loss and loss.reduction != UNKNOWN}
    counted = {
        slot: pairs
        for slot, pairs in found.items()
        if any(loss and (loss.reduction != UNKNOWN or loss.op.removeprefix(FUNCTION) in known) for _, loss in pairs)
    }
    return counted or dict(found)


def collect(
    events: dict[int, list[Event]],
    same_data: Sequence[Sequence[int]] | None = None,
    strangers: Mapping[int, frozenset[int]] | None = None,
    summed: Mapping[int, frozenset[int]] | None = None,
    picked: Iterable[tuple[int, ...]] = (),
) -> Contributions:
    """Contributions of one step from the events of all ranks.

    Args:
        same_data: sets of ranks that evaluate the same tokens; None infers them.
        strangers: for each rank those whose gradients tell that they have batches of their own, as ledger.strangers
            finds them.
        summed: for each rank those with which it trains on the sum of their losses, as ledger.summed_losses finds them.
        picked: sets of ranks that evaluate one loss, each of them some of its tokens, as ledger.picked_losses finds
            them.

    A rank's data coordinate is that of the rank that owns its loss: itself, or, on a pipeline's earlier stages, the
    last stage of the same pipeline. Ranks that evaluate the same labels are one coordinate, unless they are peers of
    one data-parallel reduction: then they were fed the same batch, which is a fault.
    """
    strangers, summed = strangers or {}, summed or {}
    losses = {rank: losses_of_rank(of_rank) for rank, of_rank in events.items()}
    by_hand = _stages_by_hand(events, losses)
    owner = _loss_owners(events, losses) | by_hand
    result = Contributions()
    if by_hand:
        result.problems.append(
            f"what other ranks sent is differentiated on {numbered('rank', by_hand)}, without a loss: taken for "
            f"earlier stages of pipelines by hand that end on {numbered('rank', by_hand.values())}"
        )
    signatures: dict[int, Signature] = {
        rank: tuple(
            (slot, tuple(loss.label_hash if loss else None for _, loss in pairs))
            for slot, pairs in sorted(of_rank.items())
        )
        for rank, of_rank in losses.items()
    }
    parts = {rank: ranks for ranks in picked for rank in ranks}
    signatures |= {rank: signatures.get(min(ranks), ()) for rank, ranks in parts.items()}
    if same_data is None:
        peers = data_parallel_peers(events)
        kept_apart = {
            rank: frozenset().union(*(of.get(rank, ()) for of in (peers, strangers, summed))) for rank in events
        }
        shares = _sharing({owner.get(rank, rank) for rank in events}, signatures, kept_apart)
    else:
        shares = {owner.get(rank, rank): owner.get(group[0], group[0]) for group in same_data for rank in group}
    representative = {rank: shares.get(owner.get(rank, rank), owner.get(rank, rank)) for rank in sorted(events)}
    if same_data is None:
        result.coordinate_from = _inferred(representative, owner, signatures, strangers, summed)
    data_rank_of = {rank: index for index, rank in enumerate(sorted(set(representative.values())))}
    result.coordinate = {rank: data_rank_of[of] for rank, of in representative.items()}
    seen = {event.group for of_rank in events.values() for event in of_rank if isinstance(event, Reduce)}
    groups = {tuple(sorted({result.coordinate.get(rank, 0) for rank in group})) for group in seen}
    result.groups = tuple(sorted(group for group in groups if 1 < len(group) < len(data_rank_of)))
    for own, data_rank in data_rank_of.items():
        ranks = tuple(rank for rank, of in representative.items() if of == own)
        given = _given(events.get(own, []))
        for slot, pairs in losses.get(own, {}).items():
            key = (data_rank, *slot)
            others = [rank for rank in parts.get(own, ()) if rank != own and rank in ranks]
            whole = [*pairs, *(pair for rank in others for pair in losses.get(rank, {}).get(slot, ()))]
            result.by_key[key] = replace(_contribution(key, ranks, own, whole), given=given.get(slot))
    return result


def _sharing(
    owners: set[int], signatures: Mapping[int, Signature], peers: Mapping[int, frozenset[int]]
) -> dict[int, int]:
    """For each rank that owns a loss the lowest one with which it shares its tokens: same labels, and no member of one
    set is a data-parallel peer of another."""
    shares: dict[int, int] = {}
    sets: dict[Signature, list[list[int]]] = defaultdict(list)
    for own in sorted(owners):
        shares[own] = own
        signature = signatures.get(own, ())
        hashes = [value for _, values in signature for value in values]
        if not hashes or None in hashes:
            continue
        joined = next((ranks for ranks in sets[signature] if may_share(peers, [own], ranks)), None)
        if joined is None:
            sets[signature].append([own])
        else:
            joined.append(own)
            shares[own] = joined[0]
    return shares


def _inferred(
    representative: dict[int, int],
    owner: dict[int, int],
    signatures: Mapping[int, Signature],
    strangers: Mapping[int, frozenset[int]],
    summed: Mapping[int, frozenset[int]],
) -> str:
    """What the data coordinates rest on, in words."""
    rests = []
    if any(owner.get(rank, rank) != rank for rank in representative):
        rests.append("ranks of one pipeline share the tokens of its last stage")
    if any(of != owner.get(rank, rank) for rank, of in representative.items()):
        rests.append("ranks with the same labels share their tokens")
    hashes = [value for signature in signatures.values() for _, values in signature for value in values]
    if None in hashes or not hashes:
        rests.append("where no labels were seen, every rank is taken to have its own")
    elif not rests and len(set(signatures.values())) == len(signatures):
        rests.append("no two ranks have the same labels")
    if summed:
        rests.append(
            "ranks with the same labels train on the sum of their losses, so each stands for a batch of its own"
        )
    elif not rests and strangers:
        rests.append("ranks with the same labels compute different gradients with copies of one model")
    elif not rests:
        rests.append("ranks with the same labels reduce gradients together, so each stands for a batch of its own")
    return f"inferred: {', '.join(rests)}; {SAME_DATA_SETTING}"


def _given(events: Iterable[Event]) -> dict[tuple[int, int], int | None]:
    """What each pass's first module was given, as far as somebody looked."""
    return {(e.accumulation_step, e.microbatch): e.inputs_hash for e in events if isinstance(e, Backward)}


def _contribution(
    key: ContributionKey, ranks: tuple[int, ...], owner: int, pairs: list[tuple[LossGradient, Loss | None]]
) -> Contribution:
    # A term that is switched off by a coefficient of 0 stands for no token of the objective.
    pairs = [pair for pair in pairs if _weighs(pair[0])] or pairs
    gradient, loss = max(pairs, key=lambda pair: pair[0].num_tokens or 0)
    counts = [entry.num_tokens for entry, _ in pairs]
    num_tokens = None if None in counts else sum(count or 0 for count in counts)
    weights = [value for entry, _ in pairs for value in (entry.weight, entry.weight_min, entry.weight_max) if value]
    low, high = (min(weights), max(weights)) if weights else (0.0, 0.0)
    values = [pair_loss.value for _, pair_loss in pairs if pair_loss is not None and pair_loss.value is not None]
    return Contribution(
        key=key,
        ranks=ranks,
        num_tokens=num_tokens,
        weight=gradient.weight,
        spread=(high - low) / abs(high) if high else 0.0,
        label_hash=loss.label_hash if loss else None,
        loss=loss,
        gradient=gradient,
        loss_rank=owner,
        value=sum(values) if values else None,
        num_losses=len({entry.loss_id for entry, _ in pairs}),
        lines=frozenset(pair_loss.site.short for _, pair_loss in pairs if pair_loss and pair_loss.site),
        samples=_samples(pairs),
    )


def _weighs(gradient: LossGradient) -> bool:
    return any((gradient.weight, gradient.weight_min, gradient.weight_max))


def _samples(pairs: Sequence[tuple[LossGradient, Loss | None]]) -> Samples | None:
    """Of all losses of a contribution together: one that was reduced by the program's own call is a sample."""
    found = [one for entry, loss in pairs if entry.num_tokens != 0 for one in [_samples_of(entry, loss)]]
    known = [one for one in found if one is not None and one.num]
    if not known or len(known) < len(found):
        return None
    weights = [one.total / one.num for one in known]
    apart = max(abs(weight - weights[0]) for weight in weights) / (abs(weights[0]) or 1.0)
    labels = {entry.loss_id: loss.num_labels if loss else None for entry, loss in pairs if entry.num_tokens != 0}
    return Samples(
        num=sum(one.num for one in known),
        total=sum(one.total for one in known),
        spread=max(apart, *(one.spread for one in known)),
        shortest=min(one.shortest for one in known),
        longest=max(one.longest for one in known),
        parts=any(entry.part_of is not None for entry, _ in pairs),
        labels=0 if None in labels.values() else sum(one or 0 for one in labels.values()),
    )


def _samples_of(entry: LossGradient, loss: Loss | None) -> Samples | None:
    num, weight, count = entry.num_samples, entry.sample_weight, entry.num_tokens
    if num is not None and weight is not None and entry.sample_spread is not None:
        shortest, longest = entry.shortest_sample or 0, entry.longest_sample or 0
        return Samples(num, weight * num, entry.sample_spread, shortest, longest)
    if count and loss is not None and loss.reduction in ("mean", "sum"):
        return Samples(1, entry.weight * count, 0.0, count, count)
    return None


def _loss_owners(events: dict[int, list[Event]], losses: dict[int, LossesOfRank]) -> dict[int, int]:
    """For each rank of a pipeline the rank of the same pipeline that evaluates the loss."""
    owner: dict[int, int] = {}
    for rank, of_rank in events.items():
        if losses.get(rank):
            owner[rank] = rank
            continue
        for event in of_rank:
            if isinstance(event, PipelineStep):
                owners = [peer for peer in event.group if losses.get(peer)]
                if owners:
                    owner[rank] = owners[0]
                break
    return owner


def slots_of_rank(events: list[Event]) -> set[tuple[int, int]]:
    """(accumulation step, microbatch) of a rank's backward passes."""
    return {(event.accumulation_step, event.microbatch) for event in events if isinstance(event, Backward)}


def _stages_by_hand(events: dict[int, list[Event]], losses: dict[int, LossesOfRank]) -> dict[int, int]:
    """Whose loss the ranks differentiate that have none: earlier stages of a pipeline by hand run one backward pass
    for each of their last stage's. Meshes are laid out with the pipeline innermost or outermost; ranks that fit neither
    are given no loss."""
    if any(isinstance(event, PipelineStep) for of_rank in events.values() for event in of_rank):
        return {}
    last = sorted(rank for rank in events if losses.get(rank))
    alone = [rank for rank, of_rank in events.items() if rank not in last and slots_of_rank(of_rank)]
    if not alone or not last or len(alone) % len(last):
        return {}
    ranks = sorted([*alone, *last])
    num_stages = len(ranks) // len(last)
    inner = {rank: ranks[i - i % num_stages + num_stages - 1] for i, rank in enumerate(ranks)}
    outer = {rank: ranks[i % len(last) - len(last)] for i, rank in enumerate(ranks)}
    fitting = [
        layout
        for layout in (inner, outer)
        if sorted(set(layout.values())) == last
        and all(slots_of_rank(events[rank]) == set(losses[layout[rank]]) for rank in alone)
    ]
    return {rank: fitting[0][rank] for rank in alone} if fitting else {}


def data_parallel_peers(events: dict[int, list[Event]]) -> dict[int, frozenset[int]]:
    """With which ranks each rank adds up its gradients, itself included, over every axis: with those of a shard group
    and of a replica group, and with theirs. Peers are fed batches of their own."""
    groups = {
        frozenset(group)
        for of_rank in events.values()
        for event in of_rank
        if isinstance(event, Reduce) and event.impl in DATA_PARALLEL
        for group in (event.group, event.replicate_group)
        if group
    }
    peers: dict[int, frozenset[int]] = {}
    for group in groups:
        together = group.union(*(peers.get(rank, frozenset()) for rank in group))
        peers.update(dict.fromkeys(together, together))
    return peers


def may_share(peers: Mapping[int, frozenset[int]], some: Iterable[int], others: Iterable[int]) -> bool:
    """Whether two sets of ranks may evaluate the same tokens by design: none is a peer of one of the other set."""
    others = set(others)
    return not any(peers.get(rank, frozenset()) & others for rank in some)
