"""One optimizer step of a simulated trainer, operation by operation, in the order in which torch does them."""

from __future__ import annotations

import numpy as np
from simulator import (
    AFTER,
    BEFORE,
    LEAF,
    AmpUnscale,
    Backward,
    Buffer,
    Clip,
    Hand,
    Loss,
    LossGradient,
    OptimizerStep,
    PipelineStep,
    Process,
    Reduce,
    ScaleGrads,
    StepEnd,
    Trainer,
    World,
    ZeroGrad,
    param_table,
    rounded,
)

from gradcheck_dist.events import DATA_PARALLEL


def train(world: World) -> None:
    """Zero, accumulate, reduce, unscale, clip, step."""
    trainer = world.trainer
    for rank in world.ranks:
        rank.emit(ZeroGrad, params=rank.everything)
    for k in range(trainer.accumulation):
        if k and trainer.zero_between:
            for rank in world.ranks:
                rank.emit(ZeroGrad, params=rank.everything)
                rank.grad.clear()
        for m in range(trainer.microbatches):
            _backward(world, k, m)
        if trainer.stages > 1:
            _schedule_ends(world, k)
        _hands(world, "after_backward", k)
    last = trainer.accumulation - 1
    _hands(world, "before_step", last)
    if trainer.loss_scale != 1 and trainer.unscale:
        for rank in world.ranks:
            _scale(world, rank, 1 / trainer.loss_scale, list(rank.ids))
            rank.emit(AmpUnscale, scale=trainer.loss_scale, params=rank.everything)
    _hands(world, "before_clip", last)
    if trainer.clip is not None:
        _clip(world, trainer.clip)
    _hands(world, "before_optimizer", last)
    for rank in world.ranks:
        seq = rank.next_seq()
        rank.sample_grads(seq, BEFORE, list(rank.ids))
        rank.emit(OptimizerStep, seq=seq, optimizer="AdamW", params=rank.everything)
        rank.final = {name: buffer.weights for name, buffer in rank.grad.items()}
        rank.emit(StepEnd, duration_s=1.0, probe_s=0.01)


def _synchronises(world: World, k: int) -> bool:
    last = world.trainer.accumulation - 1
    return {"last": k == last, "every": True, "never": False, "inverted": k != last}[world.trainer.sync]


def _backward(world: World, k: int, m: int) -> None:
    trainer = world.trainer
    reduces = _synchronises(world, k) and m == trainer.microbatches - 1 and trainer.impl != "none"
    units = _units(trainer) if reduces else []
    opened: dict[int, tuple[int, list[int]]] = {}
    for rank in world.ranks:
        key = (rank.data_rank, k, m)
        root = _root(world, key)
        if rank.stage == trainer.stages - 1:
            _loss(world, rank, key, root)
        seq = rank.next_seq()
        opened[rank.rank] = (seq, [rank.next_seq() for _ in units])
        for name in rank.ids:
            _accumulate(world, rank, name, key, root, seq)
        for (names, _), reduce_seq in zip(units, opened[rank.rank][1], strict=True):
            if trainer.impl == "ddp":
                rank.sample_grads(reduce_seq, BEFORE, names)
    for index, (names, divide) in enumerate(units):
        _reduce(world, k, m, {rank: seqs[index] for rank, (_, seqs) in opened.items()}, names, divide)
    for rank in world.ranks:
        seq = opened[rank.rank][0]
        stage = rank.stage if trainer.stages > 1 else None
        rank.emit(Backward, seq=seq, accumulation_step=k, microbatch=m, stage=stage,
                  sync=reduces if trainer.impl in DATA_PARALLEL else None, params=rank.everything)  # fmt: skip
        if trainer.stages == 1 and trainer.impl not in ("fsdp", "hsdp"):
            done = set(_reduced(world, rank)) if reduces else set()
            rank.sample_grads(seq, AFTER, [name for name in rank.ids if name not in done])


def _root(world: World, key: tuple[int, int, int]) -> float:
    """The weight per token as the loss's upstream gradient carries it."""
    trainer = world.trainer
    count = world.num_tokens[key]
    weight = trainer.root(key, world.num_tokens) * trainer.loss_scale
    upstream = weight * count if trainer.reduction == "mean" else weight
    upstream = float(rounded(np.array([upstream]), trainer.loss_dtype)[0])
    return upstream / count if trainer.reduction == "mean" else upstream


def _loss(world: World, rank: Process, key: tuple[int, int, int], root: float) -> None:
    trainer, (_, k, m) = world.trainer, key
    count = world.num_tokens[key]
    loss_id = rank.next_seq()
    label_hash = hash(key) & 0xFFFFFFFF
    rank.emit(Loss, seq=loss_id, loss_id=loss_id, reduction=trainer.reduction, num_tokens=count,
              label_hash=label_hash, dtype=trainer.loss_dtype)  # fmt: skip
    line = 15 if trainer.stages > 1 else 14
    stage = rank.stage if trainer.stages > 1 else None
    rank.emit(LossGradient, line=line, loss_id=loss_id, accumulation_step=k, microbatch=m, weight=root,
              num_tokens=count, stage=stage)  # fmt: skip
    if trainer.auxiliary is not None:
        loss_id = rank.next_seq()
        rank.emit(Loss, seq=loss_id, loss_id=loss_id, term="balance", reduction="sum", num_tokens=count,
                  coefficient=trainer.coefficient, dtype=trainer.loss_dtype)  # fmt: skip
        rank.emit(LossGradient, line=line, loss_id=loss_id, accumulation_step=k, microbatch=m,
                  weight=trainer.auxiliary(key, world.num_tokens), num_tokens=count, stage=stage)  # fmt: skip


def _accumulate(world: World, rank: Process, name: str, key: tuple[int, int, int], root: float, seq: int) -> None:
    trainer = world.trainer
    index = trainer.keys.index(key)
    leaf = rounded(world.token_gradients[rank.stage, name][index] * root, trainer.dtype)
    rank.sample(seq, LEAF, name, leaf, shard=False)
    weights = np.zeros(len(trainer.keys))
    weights[index] = root
    factor = 1.0
    for hand in trainer.hands:
        if hand.acts("leaf", rank.data_rank, key[1], key[2], rank.stage) and hand.touches(name):
            factor *= hand.factor * (hand.of_key(key, world.num_tokens) if hand.of_key is not None else 1.0)
    if factor != 1:
        leaf = rounded(leaf * factor, trainer.dtype)
    buffers = rank.unsharded if trainer.impl in ("fsdp", "hsdp") else rank.grad
    _add(world, buffers, name, Buffer(leaf, weights * factor))


def _add(world: World, buffers: dict[str, Buffer], name: str, other: Buffer) -> None:
    held = buffers.get(name)
    if held is None:
        buffers[name] = Buffer(other.values, other.weights)
    else:
        values = rounded(held.values + other.values, world.trainer.dtype)
        buffers[name] = Buffer(values, held.weights + other.weights)


def _reduced(world: World, rank: Process) -> list[str]:
    return [name for name in rank.ids if name not in world.trainer.not_reduced]


def _units(trainer: Trainer) -> list[tuple[list[str], float | None]]:
    """What is reduced together, and by which factor it is divided (None: as the operation does)."""
    own = dict(trainer.own_divide)
    names = [name for name, _ in param_table(trainer) if name not in trainer.not_reduced]
    units: list[tuple[list[str], float | None]] = [([name for name in names if name not in own], trainer.divide)]
    return units + [([name], own[name]) for name in names if name in own]


def _reduce(world: World, k: int, m: int, seqs: dict[int, int], names: list[str], divide: float | None) -> None:
    """All data ranks of each stage: DDP replaces .grad, FSDP adds the reduced unsharded gradient to the sharded one."""
    trainer = world.trainer
    sharded = trainer.impl in ("fsdp", "hsdp")
    size = trainer.data_ranks
    shards = size // trainer.replicas
    premul = 1.0 / divide if divide is not None else None
    op = "premul_sum" if premul is not None else trainer.op
    factor = premul if premul is not None else 1.0 / size if op == "avg" else 1.0
    hand = 1.0
    for one in trainer.hands:
        if one.acts("in_reduce", 0, k):
            hand *= one.factor
    for stage in range(trainer.stages):
        members = [rank for rank in world.ranks if rank.stage == stage]
        for name in names:
            if sharded:
                for rank in members:
                    rank.sample(seqs[rank.rank], BEFORE, name, rank.unsharded[name].values, shard=False)
            if trainer.replicas_last:
                _leave_replicas(world, members, name, hand, last=_comes_to_replicas(trainer, k))
                continue
            apart = trainer.replicas if not trainer.join_replicas else 1
            for replica in range(apart):
                together = members[replica * len(members) // apart : (replica + 1) * len(members) // apart]
                inputs = [(rank.unsharded if sharded else rank.grad)[name] for rank in together]
                total = _sum(world, inputs, factor * hand)
                for rank in together:
                    if sharded:
                        del rank.unsharded[name]
                        _add(world, rank.grad, name, total)
                    else:
                        rank.grad[name] = total
        for rank in members:
            position = members.index(rank)
            group = tuple(other.rank for other in members)
            replicas: tuple[int, ...] = ()
            if trainer.impl == "hsdp":
                start = position - position % shards
                replicas = group[position % shards :: shards] if trainer.join_replicas else ()
                group = group[start : start + shards]
            whole = not trainer.replicas_last or _comes_to_replicas(trainer, k)
            if whole:
                rank.sample_grads(seqs[rank.rank], AFTER, names)
            line = 15 if trainer.stages > 1 else 14
            replicate_op = ("sum" if premul else op) if replicas else None
            rank.emit(Reduce, seq=seqs[rank.rank], line=line, impl=trainer.impl, op=op, group=group,
                      params=rank.param_set(names), accumulation_step=k, microbatch=m, premul=premul,
                      replicate_group=replicas, replicate_op=replicate_op, all_reduced=whole,
                      dtype=trainer.reduce_dtype)  # fmt: skip


def _comes_to_replicas(trainer: Trainer, k: int) -> bool:
    return k == trainer.accumulation - 1 and not trainer.replicas_kept


def _leave_replicas(world: World, members: list[Process], name: str, hand: float, *, last: bool) -> None:
    """Add up over the shards of each replica, and in the last accumulation step what came of that over the replicas."""
    trainer = world.trainer
    shards = len(members) // trainer.replicas
    average = trainer.op == "avg"
    for start in range(0, len(members), shards):
        together = members[start : start + shards]
        total = _sum(world, [rank.unsharded.pop(name) for rank in together], hand / shards if average else hand)
        for rank in together:
            _add(world, rank.partial, name, total)
    if last:
        for position in range(shards):
            total = _sum(world, [rank.partial[name] for rank in members[position::shards]],
                         1 / trainer.replicas if average else 1.0)  # fmt: skip
            for rank in members[position::shards]:
                _add(world, rank.grad, name, total)


def _sum(world: World, inputs: list[Buffer], factor: float) -> Buffer:
    dtype, first = world.trainer.reduce_dtype or world.trainer.dtype, not world.trainer.sum_first
    values = np.zeros_like(inputs[0].values)
    for one in inputs:
        term = rounded(one.values * factor, dtype) if first else one.values
        values = rounded(values + term, dtype)
    if not first:
        values = rounded(values * factor, dtype)
    return Buffer(values, factor * np.sum([one.weights for one in inputs], axis=0))


def _scale(world: World, rank: Process, factor: float, names: list[str]) -> None:
    for name in names:
        if name in rank.grad:
            held = rank.grad[name]
            rank.grad[name] = Buffer(rounded(held.values * factor, world.trainer.dtype), held.weights * factor)


def _schedule_ends(world: World, k: int) -> None:
    trainer = world.trainer
    for rank in world.ranks:
        if trainer.scale_grads:
            seq = rank.next_seq()
            rank.sample_grads(seq, BEFORE, list(rank.ids))
            _scale(world, rank, 1 / trainer.microbatches, list(rank.ids))
            rank.sample_grads(seq, AFTER, list(rank.ids))
            rank.emit(ScaleGrads, seq=seq, line=15, divisor=float(trainer.microbatches), params=rank.everything,
                      stage=rank.stage, accumulation_step=k)  # fmt: skip
        seq = rank.next_seq()
        group = tuple(other.rank for other in world.ranks if other.data_rank == rank.data_rank)
        rank.emit(PipelineStep, seq=seq, schedule="Schedule1F1B", num_microbatches=trainer.microbatches,
                  scale_grads=trainer.scale_grads, group=group, stages=(rank.stage,), num_stages=trainer.stages,
                  accumulation_step=k)  # fmt: skip
        rank.sample_grads(seq, AFTER, list(rank.ids))


def _hands(world: World, place: str, k: int) -> None:
    for hand in world.trainer.hands:
        if hand.all_reduce and hand.acts(place, 0, k):
            _reduce_by_hand(world, hand)
        elif not hand.all_reduce:
            for rank in world.ranks:
                if hand.acts(place, rank.data_rank, k, stage=rank.stage):
                    _make_strange(world, rank, hand)
                    _scale(world, rank, hand.factor, [name for name in rank.ids if hand.touches(name)])


def _make_strange(world: World, rank: Process, hand: Hand) -> None:
    if hand.strange is None:
        return
    made = hand.strange({name: held.values for name, held in rank.grad.items()})
    for name, held in rank.grad.items():
        values = rounded(made[name], world.trainer.dtype)
        rank.grad[name] = Buffer(values, np.full_like(held.weights, np.nan))


def _reduce_by_hand(world: World, hand: Hand) -> None:
    for stage in range(world.trainer.stages):
        members = [rank for rank in world.ranks if rank.stage == stage]
        for name in filter(hand.touches, members[0].ids):
            total = _sum(world, [rank.grad[name] for rank in members], hand.factor)
            for rank in members:
                rank.grad[name] = total


def _clip(world: World, max_norm: float) -> None:
    for data_rank in range(world.trainer.data_ranks):
        ranks = [rank for rank in world.ranks if rank.data_rank == data_rank]
        squares = [float((b.values**2).sum()) for rank in ranks for b in rank.grad.values()]
        norm = float(np.sqrt(sum(squares)))
        coefficient = min(1.0, max_norm / (norm + 1e-6))
        for rank in ranks:
            seq = rank.next_seq()
            rank.sample_grads(seq, BEFORE, list(rank.ids))
            if coefficient < 1:
                for name, held in rank.grad.items():  # clipping is freed from the weights, as in the ledgers
                    rank.grad[name] = Buffer(rounded(held.values * coefficient, world.trainer.dtype), held.weights)
            rank.emit(Clip, seq=seq, params=rank.everything, max_norm=max_norm, norm_type=2.0, total_norm=norm,
                      coefficient=coefficient)  # fmt: skip
