"""The cheapest explanation: what came out right speaks for its causes, and equal sizes are told to be ambiguous."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.causes.account import Account, Step
from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.diagnosis.causes.explanations import Search
from gradcheck_dist.diagnosis.causes.hands import few_rows
from gradcheck_dist.diagnosis.causes.vocabulary import GAP, Row, is_one_count, is_scale
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Event, Reduce, ScaleGrads, Site

QUANTITIES = {"dp_shard": 4.0, "accumulation_steps": 3.0, "microbatches": 2.0}
DDP = {"dp_replicate": 2.0, "accumulation_steps": 2.0, "num_tokens": 54.0}
AVERAGING = Trainer(root=global_mean(2), op="avg", accumulation=3, data_ranks=2)
PIPELINE = Trainer(root=global_mean(2), impl="fsdp", op="avg", data_ranks=2, stages=2, microbatches=2, accumulation=3,
                   sync="every", scale_grads=True)  # fmt: skip


def average(size: int, line: int = 1, divide: float | None = None) -> Reduce:
    return Reduce(seq=1, t_ns=0, step=0, impl="fsdp", op="avg" if divide is None else "sum", group=tuple(range(size)),
                  params=0, post_divide=divide, site=Site("train.py", line, "main"))  # fmt: skip


def schedule(divisor: float) -> ScaleGrads:
    return ScaleGrads(seq=1, t_ns=0, step=0, divisor=divisor, params=0, site=Site("train.py", 9, "main"))


def row(root: float, *events: tuple[Event, float]) -> Row:
    account = Account(root, [Step(event, 0, factor) for event, factor in events])
    return Row(account, account.documented, 1e-3, 1e-6)


def judged(trainer: Trainer, seed: int = 5) -> Report:
    return diagnose(World(trainer, seed).run())


def test_a_loss_of_which_another_parameter_came_out_right_is_not_to_blame() -> None:
    dense, expert = row(4.0, (average(4), 0.25)), row(4.0, (average(2), 0.5))
    best = Search([expert], [dense], QUANTITIES).best()[0]
    assert (best.loss, best.edits) == (None, ())
    assert [(hand[2], factor) for hand, factor in best.others] == [(2, pytest.approx(2.0))]


def test_a_schedule_that_stages_step_on_lines_of_their_own_is_one_cause() -> None:
    def culprit(line: int, divisor: float) -> Culprit:
        site = Site("train.py", line, "main")
        return Culprit("scale_grads", 0, ScaleGrads(seq=1, t_ns=0, step=0, divisor=divisor, params=0, site=site))

    assert culprit(9, 2.0).identity == culprit(11, 2.0).identity
    assert culprit(9, 2.0).identity != culprit(11, 4.0).identity


def test_without_anything_right_the_same_weight_is_the_losses_doing() -> None:
    best = Search([row(4.0, (average(2), 0.5))], [], QUANTITIES).best()[0]
    assert best.loss == pytest.approx(2.0)


def test_a_division_at_the_loss_and_an_average_are_two_causes_and_no_product() -> None:
    best = Search([row(1 / 3, (average(4), 0.25))], [], QUANTITIES).best()[0]
    assert best.loss == pytest.approx(1 / 3)
    assert [edit.mode for edit in best.edits] == ["never"]


def test_a_sum_that_nothing_divides_is_one_cause_and_the_average_behind_it_none() -> None:
    counted = QUANTITIES | {"num_tokens": 60.0, "data_ranks": 4.0}
    best = Search([row(60.0, (average(4), 0.25))], [], counted).best()[0]
    assert (best.edits, best.loss) == ((), pytest.approx(15.0))
    best = Search([row(60.0, (schedule(2.0), 1 / 2))], [], counted).best()[0]  # what microbatches divide is no mean
    assert best.loss == pytest.approx(60.0) and [edit.mode for edit in best.edits] == ["never"]


def test_a_constant_without_a_name_is_one_cause() -> None:
    best = Search([row(0.7 * 4, (average(4), 0.25))], [], QUANTITIES).best()[0]
    assert (best.edits, best.loss) == ((), pytest.approx(0.7))


def test_no_weight_that_tells_needs_no_explanation() -> None:
    """Each rank's clip by a norm of its own leaves none that all ranks share."""
    assert not any(one.edits or one.others for one in Search([], [], QUANTITIES).best())


def test_a_divisor_without_a_name_is_blamed_and_not_the_loss_that_was_made_for_the_average() -> None:
    best = Search([row(4.0, (average(4, divide=7.0), 1 / 7))], [], QUANTITIES).best()[0]
    assert best.loss is None
    assert [factor for _, factor in best.others] == [pytest.approx(4 / 7)]


def test_a_hand_that_others_went_through_is_missing() -> None:
    first, last = row(2.0, (schedule(2.0), 0.5)), row(2.0)
    best = Search([last], [first], QUANTITIES).best()[0]
    assert [(edit.hand[0], edit.mode) for edit in best.edits] == [("ScaleGrads", "missing")]


def behind(root: float, factor: float) -> Row:
    """A weight after a change just before the optimizer that nobody recorded."""
    account = Account(root)
    return Row(
        account, root * factor, 1e-3, 1e-6, (((GAP, "backward", 0, ("backward", "OptimizerStep"), None), factor),)
    )


def test_what_is_gone_in_an_unrecorded_change_is_its_doing() -> None:
    best = Search([behind(1.0, 0.0)], [], QUANTITIES).best()[0]
    assert (best.loss, [edit.mode for edit in best.edits]) == (None, ["never"])


def test_a_sum_loss_and_a_division_by_a_wrong_number_are_one_cause() -> None:
    quantities = {**QUANTITIES, "num_tokens": 48.0}
    best = Search([behind(48.0, 1 / 37)], [], quantities).best()[0]
    assert (best.loss, len(best.causes)) == (None, 1)


def noisy(root: float, *factors: float, noise: float, allowed: float) -> Row:
    """A weight after changes that nobody recorded, of which the first was measured with noise."""
    gaps = tuple(
        ((GAP, kind, 0, kind, None), factor) for kind, factor in zip(("backward", "reduce"), factors, strict=False)
    )
    (hand, factor), *others = gaps
    return Row(
        Account(root), root * prod(factors) * (1 + noise), allowed, 1e-7, ((hand, factor * (1 + noise)), *others)
    )


def test_each_rank_s_own_divisor_is_one_cause_in_bfloat16_as_well() -> None:
    """No constant between both, though each may be off by a part of what they differ by."""
    rows = [noisy(91.0, 1 / 49, noise=1e-4, allowed=0.036), noisy(91.0, 1 / 42, noise=2e-3, allowed=0.058)]
    best = Search(rows, [], {"data_ranks": 2.0, "accumulation_steps": 3.0, "num_tokens": 91.0}).best()[0]
    assert (best.loss, best.others) == (None, ())
    assert [(edit.mode, edit.reference) for edit in best.edits] == [("elsewhere", pytest.approx(1 / 91))]


def test_what_was_measured_beside_a_divisor_is_no_digit_of_it() -> None:
    """A half before a sum over two ranks, and each rank's half a count behind it."""
    rows = [noisy(91.0, 0.5, 2 / count, noise=6e-6, allowed=0.006) for count in (49, 42)]
    best = Search(rows, [], {"data_ranks": 2.0, "accumulation_steps": 3.0, "num_tokens": 91.0}).best()[0]
    assert [(edit.hand[1], edit.mode, edit.reference) for edit in best.edits] == [
        ("reduce", "elsewhere", pytest.approx(2 / 91, rel=1e-4))
    ]
    assert (best.loss, best.others) == (None, ())


@pytest.mark.parametrize(("scale", "divisor"), [(128.0, 64.0), (256.0, 128.0), (100.0, 50.0)])
@pytest.mark.parametrize("exact", [1.0, 1 - 3e-8])
def test_a_loss_scale_that_is_divided_out_by_another_number_is_one_cause(
    scale: float, divisor: float, exact: float
) -> None:
    """And no average too many beside it, whose factor would make a loss scale of what is left."""
    of_pass = behind(2 * scale, exact / divisor)
    account = Account(of_pass.account.root, [Step(average(2), 0, 0.5)])
    best = Search([replace(of_pass, account=account, documented=of_pass.documented / 2)], [], DDP).best()[0]
    assert (best.edits, best.loss, len(best.causes)) == ((), None, 1)
    assert [hand[0] for hand, _ in best.others] == [GAP]


def test_one_unit_with_a_divisor_of_its_own_is_found_and_named() -> None:
    finding = judged(replace(AVERAGING, own_divide=(("norm.weight", 6.0),))).findings[0]
    assert (finding.code, finding.units) == ("GS104", ["norm.weight"])
    assert finding.factor.observed == pytest.approx(1 / 3, rel=1e-5)
    assert finding.first_event is not None and finding.first_event.kind == "reduce"


def test_as_many_ranks_as_microbatches_leave_two_explanations_and_the_run_that_tells_them_apart() -> None:
    report = judged(PIPELINE)
    assert [finding.code for finding in report.findings] == ["GS201"]
    experiment = report.findings[0].suggested_experiment or ""
    assert "should not act" in experiment and "3 pipeline microbatches" in experiment
    told = judged(replace(PIPELINE, microbatches=3, root=global_mean(3)))
    assert {finding.code for finding in told.findings} == {"GS101", "GS201"}


@pytest.mark.parametrize("accumulation", [2, 3])
def test_what_asks_for_the_same_change_is_no_second_explanation(accumulation: int) -> None:
    """An average that should not act, and one that should multiply by 1, where 1/2 has two names."""
    trainer = Trainer(root=global_mean(), op="avg", accumulation=accumulation, data_ranks=2)
    finding = diagnose(World(trainer, 5).run()).findings[0]
    assert (finding.code, finding.suggested_experiment) == ("GS101", None)


def test_the_experiment_is_the_users_own_command_with_one_size_changed() -> None:
    run = World(replace(AVERAGING, accumulation=2, op="sum", root=global_mean(2)), 5).run()
    for command, wanted in {
        ("torchrun", "train.py", "--accum", "2"): "gradcheck run -- torchrun train.py --accum 3",
        ("train.py", "--gradient_accumulation_steps=2"): "gradcheck run -- train.py --gradient_accumulation_steps=3",
        ("python", "train.py"): "gradcheck run -- python train.py   # with 3 accumulation steps",
    }.items():
        run.manifest["command"] = list(command)
        assert wanted in (diagnose(run).findings[0].suggested_experiment or "")


def test_a_sum_over_tokens_that_is_divided_by_passes_below_an_average_is_one_cause() -> None:
    """It should be divided by N/R, which is one number."""
    quantities = {"dp_replicate": 2.0, "accumulation_steps": 3.0, "num_tokens": 81.0}
    best = Search([row(27.0, (average(2), 0.5))], [], quantities).best()[0]
    assert (best.loss, best.edits, best.others) == (pytest.approx(13.5), (), ())


def test_a_power_of_two_is_no_larger_loss_scale_that_is_averaged() -> None:
    best = Search([row(256.0, (average(2), 0.5))], [], {"dp_replicate": 2.0, "num_tokens": 54.0}).best()[0]
    assert (best.loss, best.edits) == (pytest.approx(128.0), ())


@pytest.mark.parametrize(
    ("powers", "said"),
    [
        ({"num_tokens": 1}, True),
        ({"num_tokens": 1, "dp_replicate": -1}, True),
        ({"dp_replicate": 1, "tp": 1}, True),
        ({"num_tokens": 1, "dp_replicate": 1}, False),
        ({"num_tokens": 2}, False),
    ],
)
def test_a_loss_scale_is_simpler_than_counts_that_are_multiplied(powers: dict[str, int], said: bool) -> None:
    assert is_scale(1024.0, 1e-6) and not is_scale(128.0, 1e-6) and not is_scale(1000.0, 1e-6)
    assert is_one_count(powers) is said


def test_a_reduction_is_not_meant_to_average_over_more_ranks_than_there_are() -> None:
    """Two replicas of a pipeline over four ranks: 2 * 4 counts the replicas twice."""
    quantities = {"dp_replicate": 2.0, "world_size": 4.0, "microbatches": 4.0}
    best = Search([row(8.0, (average(2, divide=1.0), 1.0))], [], quantities).best()[0]
    assert (best.loss, best.others) == (pytest.approx(8.0), ())


def test_a_noisy_row_that_is_farthest_hides_none_that_are_apart() -> None:
    """1 / 52 and 1 / 48 of sums over ranks' own tokens, in bfloat16: 1.92 and 2.08 of what they should weigh."""
    documented_and_allowed = ((1.924, 0.027), (2.083, 0.028), (2.097, 0.087))
    best, apart, farthest = (Row(Account(100.0), value, allowed, 0.0) for value, allowed in documented_and_allowed)
    assert few_rows([best, apart, farthest]) == [best, apart]
