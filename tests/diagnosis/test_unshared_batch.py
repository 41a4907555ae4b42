"""Tensor-parallel ranks that are fed a batch each: one finding that says so, and not its consequences."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from simulator import Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.rules.gs705_unshared_batch import _read_one_batch
from gradcheck_dist.events import Event, Loss, LossGradient, Reduce, Samples
from gradcheck_dist.ledger.contributions import Contribution, Contributions

SHARDS = "layers.0.weight"


def of_its_group(key: Key, tokens: dict[Key, int]) -> float:
    """1 / N_g: tokens are counted over data ranks 0, 1 and 2, 3, each a data-parallel group of two."""
    return 1 / sum(count for other, count in tokens.items() if other[0] // 2 == key[0] // 2)


def of_the_world(key: Key, tokens: dict[Key, int]) -> float:
    return 1 / sum(tokens.values())


APART = Trainer(root=of_its_group, impl="hsdp", op="sum", data_ranks=4, replicas=2, join_replicas=False, accumulation=2)


def judged(trainer: Trainer, *, shards: bool = True, labels: bool = True, empty: tuple[int, ...] = ()) -> Report:
    """`shards`: groups 0, 1 and 2, 3 began with values of their own under one name; `labels`: labels were seen;
    `empty`: all labels of these ranks are ignored."""
    run, apart = World(trainer).run(), not trainer.join_replicas
    for rank, trace in run.ranks.items():
        for id, param in trace.params.items():
            print_of = rank // 2 if shards and param.name == SHARDS else 0
            trace.params[id] = msgspec.structs.replace(param, fingerprint=10 * id + print_of)
        trace.events = [
            msgspec.structs.replace(event, replicate_group=() if apart else event.replicate_group)
            if isinstance(event, Reduce)
            else msgspec.structs.replace(event, label_hash=event.label_hash if labels else None)
            if isinstance(event, Loss)
            else event
            for event in trace.events
        ]
        if rank in empty:
            trace.events = [without_labels(event) for event in trace.events]
    return diagnose(run)


def without_labels(event: Event) -> Event:
    if isinstance(event, Loss | LossGradient):
        return msgspec.structs.replace(event, num_tokens=0)
    if isinstance(event, Samples):
        return msgspec.structs.replace(event, values=bytes(len(event.values)))
    return event


def codes(report: Report) -> list[str]:
    return sorted(finding.code for finding in report.findings)


def test_shards_that_work_on_a_batch_each_are_one_finding() -> None:
    (finding,) = judged(APART).findings
    assert (finding.code, finding.name, finding.ranks) == ("GS705", "unshared-batch", [0, 1, 2, 3])
    assert finding.first_event is not None and finding.first_event.kind == "loss"
    assert "Ranks 0,1 | 2,3" in finding.explanation and SHARDS in finding.explanation


def test_so_they_are_where_all_labels_of_one_batch_are_ignored() -> None:
    assert codes(judged(APART, empty=(2, 3))) == ["GS705"]


@pytest.mark.parametrize(("labels", "swapped"), [((5, 5, 6, 6), True), ((5, 6, 5, 6), False), ((5, 6, 7, 8), False)])
def test_ranks_with_the_same_shards_that_read_one_batch_have_no_second_fault(
    labels: tuple[int, ...], swapped: bool
) -> None:
    """Data that follows the rank among the shards: that ranks of one group repeat a batch (GS701) is the same fault."""
    by_key = {(rank, k, 0): Contribution((rank, k, 0), (rank,), 6, 1.0, label_hash=10 * label + k)
              for rank, label in enumerate(labels) for k in range(2)}  # fmt: skip
    contributions = Contributions(by_key, {rank: rank for rank in range(4)})
    facts = SimpleNamespace(contributions=contributions)
    assert _read_one_batch(facts, [frozenset({0, 1}), frozenset({2, 3})]) is swapped  # type: ignore[arg-type]


def test_replicas_whose_reduction_was_forgotten_hold_no_shards() -> None:
    """Two findings, each in its own measure: the group is too small where tokens are counted and where they reduce."""
    report = judged(APART, shards=False)
    found = {finding.code: finding.factor for finding in report.findings}
    assert set(found) == {"GS103", "GS305"}
    assert found["GS305"].expression == "num_tokens/N_g"
    assert report.findings[1].pattern.endswith("x 0, the rest x 1")
    assert "reduced over ranks 0,1 | 2,3 only" in report.findings[1].explanation
    assert "lacks an axis" in report.findings[1].fix


def test_where_no_labels_were_seen_ranks_may_well_share_a_batch() -> None:
    assert "GS705" not in codes(judged(APART, labels=False))


def test_groups_that_count_all_tokens_are_meant_to_be_reduced_together() -> None:
    found = codes(judged(replace(APART, root=of_the_world)))
    assert "GS103" in found and "GS705" not in found


def test_shards_whose_copies_are_reduced_over_all_ranks_are_experts() -> None:
    assert "GS705" not in codes(judged(replace(APART, root=of_the_world, join_replicas=True)))
