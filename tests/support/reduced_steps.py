"""A step of a few ranks in memory whose gradients are reduced by hand, for tests that write their reductions down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from random_trainers import global_mean
from simulated_step import _backward, _sum
from simulator import AFTER, BEFORE, OptimizerStep, Process, Reduce, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Norms
from gradcheck_dist.trace.run import Run


def all_reduce(world: World, groups: tuple[tuple[int, ...], ...], line: int, *, read_early: bool = False,
               read_by_half: bool = False, names: list[str] | None = None) -> None:  # fmt: skip
    """A recorded all-reduce by hand of every gradient, or of those named. `read_early`: asynchronous, and nobody waits
    for it; `read_by_half`: of each parameter one of two ranks has the result, as behind a reduce-scatter of a copy."""
    for group in groups:
        members = [world.ranks[rank] for rank in group]
        chosen = names or list(members[0].ids)
        seqs = {rank.rank: rank.next_seq() for rank in members}
        for rank in members:
            rank.sample_grads(seqs[rank.rank], BEFORE, chosen)
        for name in chosen if not read_early else ():
            total = _sum(world, [rank.grad[name] for rank in members], 1.0)
            for rank in members:
                rank.grad[name] = total
        for rank in members:
            shown = [name for i, name in enumerate(chosen) if not read_by_half or i % 2 == group.index(rank.rank)]
            if not read_early:
                rank.sample_grads(seqs[rank.rank], AFTER, shown)
            rank.emit(Reduce, seq=seqs[rank.rank], line=line, impl="all_reduce", op="sum", group=group,
                      params=rank.param_set(chosen), accumulation_step=world.trainer.accumulation)  # fmt: skip


def unrecorded_sum(world: World, groups: tuple[tuple[int, ...], ...], factor: float = 1.0, but: str = "") -> None:
    """A sum over ranks made of messages that no probe sees, times a factor; not of the parameter named `but`."""
    for group in groups:
        members = [world.ranks[rank] for rank in group]
        for name in members[0].ids.keys() - {but}:
            total = _sum(world, [rank.grad[name] for rank in members], factor)
            for rank in members:
                rank.grad[name] = total


def begun(num_ranks: int = 4, factor: float = 1.0) -> World:
    """Ranks behind their backward passes, whose losses are multiplied by a factor."""
    world = World(Trainer(root=global_mean(factor), impl="none", data_ranks=num_ranks, accumulation=2), 3)
    for k in range(2):
        _backward(world, k, 0)
    return world


def norms_of(rank: Process, seq: int) -> Norms:
    """The norms that an optimizer's event at `seq` has with it."""
    rows = [(index, 2 * index + 1, 0) for name, index in rank.ids.items() if name in rank.grad]
    values = [float(np.linalg.norm(rank.grad[name].values)) for name in rank.ids if name in rank.grad]
    return Norms(step=0, seq=seq, rows=np.array(rows, dtype="<i4").tobytes(), values=np.array(values).tobytes())


def ended(world: World, *, with_norms: bool = False) -> Report:
    """What is found once the optimizer has stepped."""
    for rank in world.ranks:
        seq = rank.next_seq()
        rank.sample_grads(seq, BEFORE, list(rank.ids))
        if with_norms:
            rank.trace.add([norms_of(rank, seq)])
        rank.emit(OptimizerStep, seq=seq, optimizer="SGD", params=rank.everything)
        rank.flush()
    run = Run(Path("simulated"), {"world_size": len(world.ranks)})
    run.ranks = {rank.rank: rank.trace for rank in world.ranks}
    return diagnose(run)
