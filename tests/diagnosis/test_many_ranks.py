"""Worlds of more ranks than a parameter has samples, and of more weights than are looked at one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from random_trainers import global_mean
from simulator import AFTER, Hand, Process, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.diagnosis.weights import alike

RANK = 3
TWICE_ON_ONE_RANK = {
    place: Hand(place, 2.0, data_ranks=frozenset({RANK})) for place in ("leaf", "before_optimizer")
}  # fmt: skip


def trainer(impl: str, ranks: int, accumulation: int = 1, factor: float | None = None, num_params: int = 1) -> Trainer:
    """Losses over all tokens, times the ranks that a reduction averages over, unless `factor` stands there."""
    return Trainer(
        global_mean(ranks if factor is None else factor),
        data_ranks=ranks,
        impl=impl,
        replicas=ranks // 4 if impl == "hsdp" else 1,
        accumulation=accumulation,
        params=tuple((f"layers.{index}.weight", 96) for index in range(num_params)),
    )


def judged(what: Trainer) -> Report:
    return diagnose(World(what, seed=2).run())


def told(finding: Finding) -> tuple[object, ...]:
    event = finding.first_event
    assert event is not None
    return finding.code, finding.factor.expression, event.kind, event.line, finding.num_parameters, len(finding.ranks)


@pytest.mark.parametrize(
    ("impl", "ranks", "accumulation"),
    [("fsdp", 16, 8), ("hsdp", 32, 4), ("fsdp", 100, 1), ("ddp", 100, 1)],
)
def test_more_contributions_than_samples_are_observed(impl: str, ranks: int, accumulation: int) -> None:
    report = judged(trainer(impl, ranks, accumulation))

    assert report.verdict == "clean", report.reasons
    assert report.coverage.parameters_observed == report.coverage.parameters_total


@pytest.mark.parametrize(("impl", "degree"), [("fsdp", "1/dp_shard"), ("hsdp", "1/(dp_replicate * dp_shard)")])
def test_an_average_of_a_hundred_ranks_is_named(impl: str, degree: str) -> None:
    (finding,) = judged(trainer(impl, 100, factor=1.0)).findings

    assert (finding.code, finding.factor.expression) == ("GS101", degree)
    assert finding.factor.observed == pytest.approx(0.01)


def test_one_of_a_hundred_ranks_that_doubles_its_gradient_is_found_there() -> None:
    (finding,) = judged(replace(trainer("ddp", 100), hands=(TWICE_ON_ONE_RANK["leaf"],))).findings

    assert finding.first_event is not None
    assert (finding.first_event.kind, finding.first_event.rank) == ("backward", RANK)
    assert finding.factor.observed == pytest.approx(2.0)


def test_what_a_reduction_did_not_document_is_not_confirmed() -> None:
    """The records do not explain the sum, and of fewer elements than ranks nothing else can be told."""
    squares = Hand("before_optimizer", strange=lambda of: {name: values**2 for name, values in of.items()})

    report = judged(replace(trainer("ddp", 100), hands=(squares,)))

    assert report.verdict == "undetermined" and not report.findings


def test_shards_of_one_element_that_do_not_agree_ask_for_a_larger_sample() -> None:
    report = judged(replace(trainer("fsdp", 100), hands=(TWICE_ON_ONE_RANK["before_optimizer"],)))

    assert report.verdict == "undetermined" and not report.findings
    assert "--sample-size" in report.next_step


@pytest.mark.parametrize(
    ("fault", "stand_in"),
    [
        (trainer("fsdp", 8, 2, factor=1.0, num_params=2), True),
        (replace(trainer("ddp", 8, 2, num_params=2), hands=(TWICE_ON_ONE_RANK["leaf"],)), True),
        (replace(trainer("ddp", 8, 2, num_params=2), hands=(TWICE_ON_ONE_RANK["before_optimizer"],)), True),
        (replace(trainer("fsdp", 8, 2, num_params=2), sync="never"), False),
        (replace(trainer("ddp", 8, 2, num_params=2), not_reduced=frozenset({"layers.0.weight"})), True),
        (replace(trainer("hsdp", 8, 2, num_params=2), join_replicas=False), True),
    ],
    ids=["average", "leaf", "own-hand", "never-reduced", "ignored", "replicas-apart"],
)
def test_ranks_that_stand_for_others_change_no_finding(
    fault: Trainer, stand_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = judged(fault)
    monkeypatch.setattr(alike, "MOST_WEIGHTS", 16)

    thinned = judged(fault)

    assert any(weight.alike_ranks for weight in thinned.weights) is stand_in
    assert [told(finding) for finding in thinned.findings] == [told(finding) for finding in whole.findings]
    assert [finding.ranks for finding in thinned.findings] == [finding.ranks for finding in whole.findings]
    ranks = {(weight.unit, rank) for weight in thinned.weights for rank in weight.ranks}
    assert ranks == {(weight.unit, weight.holder_rank) for weight in whole.weights}


def test_what_a_shard_does_not_show_of_a_fault_is_no_part_that_came_out_right() -> None:
    """Rows of an embedding: of some contributions a shard has none. All weights are off by one number, so the gradient
    keeps its direction; what was not seen counted as right, and turned it."""
    world = World(trainer("fsdp", 4, factor=1.0), seed=2)
    for gradients in world.token_gradients.values():
        gradients[1, :48] = 0.0

    (finding,) = diagnose(world.run()).findings

    assert finding.consequence is not None and "norm x 0.25 of the right one's, direction right" in finding.consequence


def test_a_rank_that_others_stand_for_is_seen_in_the_parameter_where_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one parameter a shard has nothing of one contribution (rows of an embedding); in the other one it does."""
    monkeypatch.setattr(alike, "MOST_WEIGHTS", 16)
    world = World(trainer("fsdp", 8, num_params=2), seed=2)
    world.token_gradients[0, "layers.0.weight"][1, 60:72] = 0.0

    report = diagnose(world.run())

    assert report.verdict == "clean", report.reasons


@pytest.mark.parametrize("impl", ["ddp", "hsdp"])
def test_copies_are_not_told_by_one_of_another_value(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample behind the reduction is the one that the optimizer reads."""
    sample = Process.sample

    def before_only(self: Process, seq: int, role: int, *args: Any, **kwargs: Any) -> None:
        if role != AFTER:
            sample(self, seq, role, *args, **kwargs)

    monkeypatch.setattr(Process, "sample", before_only)

    report = judged(replace(trainer(impl, 100), hands=(TWICE_ON_ONE_RANK["before_optimizer"],)))

    assert report.verdict != "clean"
    assert all(finding.ranks == [RANK] for finding in report.findings)
