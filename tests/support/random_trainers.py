"""Random trainers by family: each with the truth about it, and the comparison of a report with that truth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from simulator import Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.ledger.solve import EPSILON

Random = np.random.Generator


@dataclass(frozen=True)
class Culprit:
    """Kind of the culprit event; for what was not recorded, the events (kinds) that enclose it."""

    kind: str
    unrecorded: bool = False
    before: str | None = None


@dataclass(frozen=True)
class Fault:
    """What must be found: the codes that name it rightly, its culprits that are right, its factor and that one's name
    (None: whatever equals the value)."""

    codes: frozenset[str]
    culprits: frozenset[Culprit]
    factor: float | None = None
    name: str | None = None


@dataclass
class Case:
    """A trainer and what is wrong with it. `unknowable`: its gradients are no combination of contributions, and
    "undetermined" without an accusation is right."""

    family: str
    trainer: Trainer
    faults: list[Fault] = field(default_factory=list)
    seed: int = 0
    unknowable: bool = False


def one(code: str | set[str], culprit: Culprit | set[Culprit], factor: float | None = None,
        name: str | None = None) -> Fault:  # fmt: skip
    codes = frozenset({code} if isinstance(code, str) else code)
    return Fault(codes, frozenset({culprit} if isinstance(culprit, Culprit) else culprit), factor, name)


# ---- roots: weight per token at the loss


def global_mean(factor: float = 1.0) -> Callable[[Key, dict[Key, int]], float]:
    return lambda key, tokens: factor / sum(tokens.values())


def microbatch_mean(factor: float = 1.0) -> Callable[[Key, dict[Key, int]], float]:
    return lambda key, tokens: factor / (len(tokens) * tokens[key])


def rank_mean(factor: float = 1.0) -> Callable[[Key, dict[Key, int]], float]:
    def root(key: Key, tokens: dict[Key, int]) -> float:
        ranks = len({d for d, _, _ in tokens})
        return factor / (ranks * sum(count for other, count in tokens.items() if other[0] == key[0]))

    return root


def group_mean(
    size: int, factor: float = 1.0, *, strided: bool = False, only: frozenset[int] | None = None
) -> Callable[[Key, dict[Key, int]], float]:
    """Divided by the tokens of groups of data ranks, neighbours or every so manieth, on the ranks `only` (None: all);
    the others divide by all tokens."""

    def root(key: Key, tokens: dict[Key, int]) -> float:
        if only is not None and key[0] not in only:
            return factor / sum(tokens.values())
        num_groups = len({d for d, _, _ in tokens}) // size
        group = {d for d, _, _ in tokens if (d % num_groups == key[0] % num_groups if strided
                                            else d // size == key[0] // size)}  # fmt: skip
        return factor / sum(count for (d, _, _), count in tokens.items() if d in group)

    return root


# ---- trainers that are right


def healthy(random: Random, *, impl: str | None = None, stages: int | None = None, sync: str | None = None) -> Trainer:
    """A correct trainer: its root undoes what its reductions and its schedule divide by."""
    impl = impl or str(random.choice(["none", "ddp", "ddp", "fsdp", "hsdp"]))
    size = {"none": 1, "hsdp": 4}.get(impl) or int(random.choice([2, 3, 4]))
    stages = int(random.choice([1, 1, 2])) if stages is None else stages
    accumulation = int(random.choice([1, 2, 3, 4, 5]))
    microbatches = int(random.choice([2, 3, 4])) if stages > 1 else 1
    op = str(random.choice(["avg", "sum"]))
    divide = None
    if impl in ("fsdp", "hsdp") and op == "sum" and random.random() < 0.3:
        divide = float(random.choice([1.0, size, 8.0]))
    if sync is None:
        sync = "last"
        if stages == 1 and (impl in ("fsdp", "hsdp") or op == "avg") and random.random() < 0.3:
            sync = "every"
    if stages > 1:
        sync = "every"  # a schedule reduces in its last backward
    if stages > 1 and accumulation > 1 and impl == "ddp":
        op = "avg"  # a sum would be repeated at every schedule.step
    scale = stages > 1 and accumulation == 1 and bool(random.random() < 0.4)
    dtype = str(random.choice(["float32", "bfloat16"]))
    sizes = [96, 128] if dtype == "float32" else [128, 512]
    trainer = Trainer(
        root=global_mean(),
        data_ranks=size,
        impl=impl,
        op=op,
        divide=divide,
        replicas=2 if impl == "hsdp" else 1,
        sync=sync,
        accumulation=accumulation,
        microbatches=microbatches,
        stages=stages,
        scale_grads=scale,
        clip=float(random.choice([0.01, 1.0, 100.0])) if random.random() < 0.5 else None,
        loss_scale=float(random.choice([1024.0, 65536.0])) if random.random() < 0.15 else 1.0,
        reduction=str(random.choice(["sum", "mean"])),
        dtype=dtype,
        loss_dtype="float32" if dtype == "float32" else str(random.choice(["float32", "bfloat16"])),
        params=(*((f"layers.{i}.weight", int(random.choice(sizes))) for i in range(3)), ("norm.weight", 64)),
        key_bias=bool(random.random() < 0.3),
        sum_first=bool(random.random() < 0.5),
    )
    return replace(trainer, root=global_mean(1 / downstream(trainer)))


def downstream(trainer: Trainer) -> float:
    """By what the recorded operations multiply every contribution of this (healthy) trainer after its loss."""
    factor = 1.0
    if trainer.impl != "none":
        if trainer.divide is not None:
            factor /= trainer.divide
        elif trainer.op == "avg":
            factor /= trainer.data_ranks
    if trainer.scale_grads:
        factor /= trainer.microbatches
    return factor


def degree(trainer: Trainer) -> str:
    return {"ddp": "dp_replicate", "fsdp": "dp_shard", "hsdp": "(dp_replicate * dp_shard)"}[trainer.impl]


# ---- the judgement of a judgement


@dataclass
class Outcome:
    case: Case
    report: Report
    accused: bool = False
    missed: bool = False
    undetermined: bool = False
    culprit_right: bool = True
    name_right: bool = True

    @property
    def right(self) -> bool:
        return not (self.accused or self.missed) and self.culprit_right and self.name_right


MEANS = {"GS301", "GS302"}
PARTIAL = "GS305"


def _spread(world: World) -> float:
    """How far apart the losses' weights are, in spacings of their dtype. Up to 2 no mean of means can be told; up to 4
    they fit one constant, so that only the levels show and not what they are made of."""
    trainer = world.trainer
    weights = [trainer.root(key, world.num_tokens) for key in trainer.keys]
    return (max(weights) / min(weights) - 1) / EPSILON[trainer.loss_dtype]


def judge(case: Case) -> Outcome:
    """Simulate, diagnose, compare with the truth."""
    world = World(case.trainer, case.seed)
    run = world.run()
    if world.is_right():
        case.faults = []  # by chance: equal token counts, a factor of one
    spread = _spread(world) if any(fault.codes & {*MEANS, PARTIAL} for fault in case.faults) else 0.0
    case.faults = [fault for fault in case.faults if not fault.codes & MEANS or spread > 2]
    if spread <= 4:
        case.faults = [
            replace(fault, codes=fault.codes | {"GS000", "GS303"}) if PARTIAL in fault.codes else fault
            for fault in case.faults
        ]
    known = case.unknowable or case.family == "clip-by-hand"
    assert world.is_right() or case.faults or known or _spread(world) <= 2
    report = diagnose(run)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    outcome = Outcome(case, report, undetermined=report.verdict == "undetermined")
    if case.unknowable:
        outcome.accused, outcome.missed = bool(errors), report.verdict == "clean"
        return outcome
    if not case.faults:
        outcome.accused = bool(errors)
        return outcome
    outcome.missed = not report.findings
    if outcome.missed:
        return outcome
    outcome.accused = len(report.findings) > len(case.faults)
    for fault in case.faults:
        at = [finding for finding in report.findings if culprit_of(finding) in fault.culprits]
        outcome.culprit_right &= bool(at)
        outcome.name_right &= any(named(fault, finding) for finding in at)
    return outcome


def culprit_of(finding: Finding) -> Culprit:
    event = finding.first_event
    if event is None:
        return Culprit("none")
    before = event.before["kind"] if event.before else None
    return Culprit(event.kind, event.unrecorded, before)


def named(fault: Fault, finding: Finding) -> bool:
    """The right rule and, where the truth has one, the right number under the right name (or one equal to it)."""
    if finding.code not in fault.codes:
        return False
    factor = finding.factor
    if fault.factor is None:
        return True
    if factor.observed is None or not math.isclose(factor.observed, fault.factor, rel_tol=0.02, abs_tol=1e-3):
        return False
    if fault.name is None:
        return True
    names = {factor.expression, *(candidate.expression for candidate in factor.candidates)}
    return fault.name == factor.expression or (fault.name in names and len(names) > 1)
