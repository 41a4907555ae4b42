"""A distributed trainer in numpy: what the probes would have recorded of it, and the truth that they cannot record.

Every gradient buffer is kept twice: as sampled values, rounded to the trainer's dtype at each operation as torch would,
and as exact coefficients over contributions. The values go into the trace, the coefficients are the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gradcheck_dist.events import (
    AFTER,
    BEFORE,
    LEAF,
    SCHEMA_VERSION,
    AmpUnscale,
    Backward,
    Clip,
    Event,
    Header,
    Loss,
    LossGradient,
    OptimizerStep,
    Param,
    ParamSet,
    PipelineStep,
    Plan,
    Reduce,
    Samples,
    ScaleGrads,
    Site,
    StepEnd,
    ZeroGrad,
)
from gradcheck_dist.trace.reader import RankTrace
from gradcheck_dist.trace.run import Run

Key = tuple[int, int, int]
SCRIPT = "train.py"
LINES = {
    "zero_grad": 10,
    "loss": 12,
    "backward": 14,
    "pipeline_step": 15,
    "amp_unscale": 20,
    "clip": 22,
    "optimizer_step": 24,
}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to nearest, as float64."""
    single = values.astype(np.float32)
    if dtype == "bfloat16":
        bits = single.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        single = bits.astype(np.uint32).view(np.float32)
    return single.astype(np.float64)


@dataclass(frozen=True)
class Hand:
    """Something done to gradients that no probe records. `place`: "leaf" (between the leaf and its accumulation),
    "after_backward", "before_step" (behind the last backward), "before_clip", "before_optimizer", "in_reduce".

    It acts at the accumulation steps, microbatches, data ranks, stages and parameters named; None means all.
    `all_reduce`: sum over the data ranks before multiplying. `of_key` is a factor besides, of each contribution (leaf
    only). `strange` makes of all gradients of a rank, by name, what is no combination of contributions.
    """

    place: str
    factor: float = 1.0
    steps: frozenset[int] | None = None
    microbatches: frozenset[int] | None = None
    data_ranks: frozenset[int] | None = None
    params: frozenset[str] | None = None
    all_reduce: bool = False
    stages: frozenset[int] | None = None
    of_key: Callable[[Key, dict[Key, int]], float] | None = None
    strange: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] | None = None

    def acts(
        self, place: str, data_rank: int, step: int, microbatch: int | None = None, stage: int | None = None
    ) -> bool:
        return (
            place == self.place
            and (self.steps is None or step in self.steps)
            and (self.data_ranks is None or data_rank in self.data_ranks)
            and (self.stages is None or stage is None or stage in self.stages)
            and (self.microbatches is None or microbatch is None or microbatch in self.microbatches)
        )

    def touches(self, name: str) -> bool:
        return self.params is None or name in self.params


@dataclass(frozen=True)
class Trainer:
    """A trainer. `root(key, tokens)` is the weight per token at the loss; `sync` one of last, every, never, inverted.

    World rank = data rank * stages + stage. `divide` is FSDP's gradient divide factor (None: the default average).
    Without `join_replicas` nothing reduces over HSDP's replicate axis, with `replicas_last` the last accumulation step
    does for all (set_requires_all_reduce), with `replicas_kept` besides none does. `own_divide` names parameters that
    are reduced apart from the others, with a divide factor of their own. `reduce_dtype` is that of sums over ranks,
    None: `dtype`.
    """

    root: Callable[[Key, dict[Key, int]], float]
    data_ranks: int = 2
    impl: str = "ddp"
    op: str = "avg"
    divide: float | None = None
    replicas: int = 1
    sync: str = "last"
    accumulation: int = 1
    microbatches: int = 1
    stages: int = 1
    scale_grads: bool = False
    zero_between: bool = False
    clip: float | None = None
    loss_scale: float = 1.0
    unscale: bool = True
    reduction: str = "sum"
    dtype: str = "float32"
    loss_dtype: str = "float32"
    hands: tuple[Hand, ...] = ()
    not_reduced: frozenset[str] = frozenset()
    params: tuple[tuple[str, int], ...] = (("embed.weight", 96), ("layers.0.weight", 96), ("norm.weight", 48))
    key_bias: bool = False
    tokens: tuple[int, int] = (3, 40)
    sum_first: bool = False
    auxiliary: Callable[[Key, dict[Key, int]], float] | None = None
    coefficient: float | None = 0.01
    reduce_dtype: str | None = None
    own_divide: tuple[tuple[str, float], ...] = ()
    join_replicas: bool = True
    replicas_last: bool = False
    replicas_kept: bool = False

    @property
    def keys(self) -> list[Key]:
        return [
            (d, k, m)
            for d in range(self.data_ranks)
            for k in range(self.accumulation)
            for m in range(self.microbatches)
        ]


@dataclass
class Buffer:
    values: np.ndarray
    weights: np.ndarray  # exact, over Trainer.keys


class Process:
    """One rank: its trace and its gradient buffers."""

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self.trainer, self.rank = trainer, rank
        self.data_rank, self.stage = divmod(rank, trainer.stages)
        self.seq = 0
        self.rows: list[tuple[int, int, int, int]] = []
        self.values: list[np.ndarray] = []
        world = trainer.data_ranks * trainer.stages
        header = Header(schema_version=SCHEMA_VERSION, tool_version="simulator", rank=rank, world_size=world, pid=0,
                        started_unix_s=0.0, objective="global-token-mean")  # fmt: skip
        self.trace = RankTrace(Path(f"rank-{rank:05d}.trace"), header)
        self.grad: dict[str, Buffer] = {}
        self.unsharded: dict[str, Buffer] = {}
        self.partial: dict[str, Buffer] = {}
        self.final: dict[str, np.ndarray] = {}
        self.ids: dict[str, int] = {}
        self.held: dict[str, np.ndarray] = {}
        stage = self.stage if trainer.stages > 1 else None
        for index, (name, size) in enumerate(param_table(trainer)):
            self.ids[name] = index
            held = np.arange(size)
            if trainer.impl in ("fsdp", "hsdp"):
                shards = trainer.data_ranks // trainer.replicas
                held = np.array_split(held, shards)[self.data_rank % shards]
            self.held[name] = held
            full = Plan(id=2 * index, param=index, num_values=size)
            part = Plan(id=2 * index + 1, param=index, num_values=len(held), positions=held.astype("<i4").tobytes())
            param = Param(id=index, name=name, shape=(size,), dtype=trainer.dtype, num_positions=size, stage=stage)
            self.trace.add([param, full, part])
        self.everything = self.param_set(list(self.ids))

    def param_set(self, names: list[str]) -> int:
        ids = tuple(self.ids[name] for name in names)
        for known, members in self.trace.param_sets.items():
            if members == ids:
                return known
        self.trace.add([ParamSet(id=len(self.trace.param_sets), params=ids)])
        return len(self.trace.param_sets) - 1

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    def emit(self, kind: Callable[..., Event], seq: int | None = None, line: int = 0, **fields: Any) -> None:
        tag = str(kind.__struct_config__.tag)  # type: ignore[attr-defined]
        site = Site(SCRIPT, line or LINES.get(tag, 1), "main")
        seq = self.next_seq() if seq is None else seq
        self.trace.events.append(kind(seq=seq, t_ns=seq, step=0, site=site, **fields))

    def sample(self, seq: int, role: int, name: str, values: np.ndarray, *, shard: bool) -> None:
        self.rows.append((seq, role, self.ids[name], 2 * self.ids[name] + int(shard)))
        self.values.append(values)

    def sample_grads(self, seq: int, role: int, names: list[str]) -> None:
        for name in names:
            if name in self.grad:
                self.sample(seq, role, name, self.grad[name].values[self.held[name]], shard=True)

    def flush(self) -> None:
        flat = np.concatenate(self.values) if self.values else np.empty(0)
        if self.trainer.dtype == "bfloat16":
            data = (flat.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            data = flat.astype("<f4").tobytes()
        rows = np.array(self.rows, dtype="<i4").reshape(-1, 4).tobytes()
        self.trace.samples.append(Samples(step=0, rows=rows, dtype=self.trainer.dtype, values=data))


def param_table(trainer: Trainer) -> tuple[tuple[str, int], ...]:
    return (*trainer.params, ("k.bias", 32)) if trainer.key_bias else trainer.params


@dataclass
class World:
    """All ranks of a trainer during one optimizer step."""

    trainer: Trainer
    seed: int = 0
    ranks: list[Process] = field(default_factory=list)
    num_tokens: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        trainer, self.random = self.trainer, np.random.default_rng(self.seed)
        self.ranks = [Process(trainer, rank) for rank in range(trainer.data_ranks * trainer.stages)]
        low, high = trainer.tokens
        self.num_tokens = {key: int(self.random.integers(low, high + 1)) for key in trainer.keys}
        self.token_gradients = {
            (stage, name): self._gradients(name, size)
            for stage in range(trainer.stages)
            for name, size in param_table(trainer)
        }

    def _gradients(self, name: str, size: int) -> np.ndarray:
        """Token-sum gradients, one row a contribution: a common direction and noise."""
        counts = np.array([self.num_tokens[key] for key in self.trainer.keys])[:, None]
        common = self.random.normal(size=size)
        noise = self.random.normal(size=(len(counts), size))
        return counts * 0.5 * common + np.sqrt(counts) * noise

    def is_right(self) -> bool:
        """Whether every contribution weighs 1/N in every gradient that an optimizer read."""
        expected = 1 / sum(self.num_tokens.values())
        tolerance = 0.01 if self.trainer.loss_dtype == "bfloat16" else 1e-5
        return all(
            name in rank.final and bool(np.allclose(rank.final[name], expected, rtol=tolerance, atol=0))
            for rank in self.ranks
            for name, _ in param_table(self.trainer)
        )

    def run(self, path: Path | None = None) -> Run:
        """Train one step; the run as a reader would give it."""
        from simulated_step import train

        train(self)
        for process in self.ranks:
            process.flush()
        run = Run(path or Path("simulated"), {"world_size": len(self.ranks)})
        run.ranks = {process.rank: process.trace for process in self.ranks}
        return run


__all__ = [
    "AFTER", "BEFORE", "LEAF", "AmpUnscale", "Backward", "Buffer", "Clip", "Hand", "Loss", "LossGradient",
    "OptimizerStep", "PipelineStep", "Process", "Reduce", "ScaleGrads", "StepEnd", "Trainer", "World", "ZeroGrad",
    "rounded",
]  # fmt: skip
