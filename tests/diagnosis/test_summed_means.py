"""Losses that are means of each rank's own tokens, and a reduction that adds them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from random_trainers import global_mean, microbatch_mean, rank_mean
from simulator import Hand, Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Reduce

RANKS = 3
SUM = Trainer(root=rank_mean(RANKS), data_ranks=RANKS, op="sum", accumulation=2, reduction="mean", tokens=(8, 8))


def judged(trainer: Trainer) -> Report:
    return diagnose(World(trainer, 1).run())


def test_a_sum_of_means_is_a_missing_average_at_the_reduction() -> None:
    (finding,) = judged(SUM).findings
    assert (finding.code, finding.factor.observed) == ("GS104", pytest.approx(RANKS))
    assert finding.first_event is not None
    assert (finding.first_event.kind, finding.first_event.op) == ("reduce", "sum")
    assert "at train.py:12 are a whole mean" in finding.explanation
    assert finding.suggested_experiment is None


def test_as_many_passes_as_ranks_may_be_what_the_loss_divides_by() -> None:
    (finding,) = judged(replace(SUM, accumulation=RANKS)).findings
    assert finding.code == "GS104"
    assert finding.suggested_experiment is not None
    assert "accumulation_steps are equal in this run" in finding.suggested_experiment


def test_who_counts_tokens_and_not_those_of_other_ranks_went_wrong_at_the_loss() -> None:
    (finding,) = judged(replace(SUM, reduction="sum")).findings
    assert (finding.code, finding.first_event and finding.first_event.kind) == ("GS303", "loss")
    assert "all-reduce their count" in finding.fix


@pytest.mark.parametrize(("root", "code"), [(rank_mean, "GS302"), (microbatch_mean, "GS301")])
def test_means_over_unequal_counts_say_which_sum_nothing_divides(
    root: Callable[[float], Callable[[Key, dict[Key, int]], float]], code: str
) -> None:
    (finding,) = judged(replace(SUM, root=root(RANKS), tokens=(3, 40))).findings
    assert finding.code == code
    assert f"adds up those of {RANKS} ranks: nothing divides by {RANKS}" in finding.explanation


def test_lines_that_divide_by_the_ranks_and_once_more_are_no_missing_division() -> None:
    hand = Hand("before_step", RANKS**-2.0)
    report = judged(replace(SUM, root=microbatch_mean(RANKS), tokens=(3, 40), hands=(hand,)))
    assert report.findings
    assert not any("nothing divides" in finding.explanation for finding in report.findings)


@pytest.mark.parametrize(
    "trainer",
    [
        replace(SUM, op="avg"),
        replace(SUM, root=global_mean()),
        replace(SUM, op="avg", reduction="sum", root=global_mean(RANKS), tokens=(3, 40)),
    ],
)
def test_averages_of_means_and_sums_of_shares_are_right(trainer: Trainer) -> None:
    assert judged(trainer).verdict == "clean"


def test_a_missing_division_by_the_passes_stays_the_losses_own() -> None:
    (finding,) = judged(replace(SUM, root=rank_mean(2.0 * RANKS), accumulation=2)).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps * dp_replicate")


@pytest.mark.parametrize(("tokens", "code"), [((8, 8), "GS303"), ((3, 40), "GS301")])
def test_means_that_neither_passes_nor_ranks_divide_lack_both(tokens: tuple[int, int], code: str) -> None:
    """`F.cross_entropy(...).backward()` in a loop, and a sum over ranks behind it."""
    bare = replace(SUM, root=lambda key, counts: 1 / counts[key], tokens=tokens)
    (finding,) = judged(bare).findings
    assert (finding.code, finding.severity) == (code, "error")
    assert "nothing divides by the 2 passes of a rank, and nothing by the 3 ranks" in finding.explanation
    assert "wo divisions are missing: divide each loss by 2, and let the reduction average over 3" in finding.fix


@pytest.mark.parametrize(("factor", "told"), [(2.0, True), (1.0, False), (3.0, False)])
def test_means_of_means_that_lack_the_passes_say_so_for_who_means_them(factor: float, told: bool) -> None:
    trainer = replace(SUM, op="avg", root=microbatch_mean(factor * RANKS), tokens=(3, 40), accumulation=2)
    (finding,) = judged(trainer).findings
    assert finding.code == "GS301"
    assert finding.fix.endswith("For that mean, divide each loss by the 2 accumulation steps.") is told


@pytest.mark.parametrize("change", [{"op": "avg"}, {"accumulation": 1}, {"reduction": "sum"}])
def test_where_one_division_is_missing_or_the_losses_count_one_is_told(change: dict[str, object]) -> None:
    bare = replace(SUM, root=lambda key, counts: 1 / counts[key], **change)  # type: ignore[arg-type]
    (finding,) = judged(bare).findings
    assert "wo divisions" not in finding.fix


def test_a_reduction_after_the_last_pass_is_at_no_accumulation_step() -> None:
    """One by hand counts as the next pass, which there is not."""
    run = World(SUM, 1).run()
    for trace in run.ranks.values():
        trace.events = [
            msgspec.structs.replace(event, accumulation_step=2) if isinstance(event, Reduce) else event
            for event in trace.events
        ]
    (finding,) = diagnose(run).findings
    assert finding.first_event is not None
    assert (finding.first_event.kind, finding.first_event.accumulation_step) == ("reduce", None)
    (one,) = judged(replace(SUM, root=rank_mean(2.0 * RANKS))).findings
    assert one.first_event is not None and one.first_event.accumulation_step == 0


@pytest.mark.parametrize(
    ("reduction", "told"), [("mean", "cross_entropy, reduction=mean"), ("unknown", "cross_entropy")]
)
def test_a_reduction_that_nobody_knows_is_not_told(reduction: str, told: str) -> None:
    (finding,) = judged(replace(SUM, root=rank_mean(2.0 * RANKS), accumulation=2, reduction=reduction)).findings
    assert finding.first_event is not None and finding.first_event.op == told
