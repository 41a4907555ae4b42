"""Where one rank's losses count no tokens, what the others' should weigh is not known, and only what weights differ by
from one parameter to another accuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from reduced_steps import all_reduce, begun, ended
from simulator import Buffer, Hand, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Loss, LossGradient

NAME = "embed.weight"
RANKS = 4


def judged(**more: Any) -> Report:
    """Means of each rank's batch that an average follows; rank 1 has another kind of loss."""
    given: dict[str, Any] = {"root": lambda key, tokens: 1 / tokens[key], "op": "avg", **more}
    run = World(Trainer(data_ranks=2, **given)).run()
    trace = run.ranks[1]
    trace.events = [
        msgspec.structs.replace(event, num_tokens=None) if isinstance(event, Loss | LossGradient) else event
        for event in trace.events
    ]
    return diagnose(run)


def test_an_average_over_ranks_with_losses_of_another_kind_accuses_nobody() -> None:
    report = judged()
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "the number of tokens of some contributions is unknown" in report.reasons[0]


@pytest.mark.parametrize(
    "hand",
    [
        Hand("before_optimizer", 0.5, params=frozenset({NAME})),
        Hand("leaf", 0.5, params=frozenset({NAME}), data_ranks=frozenset({0})),
    ],
)
def test_what_befell_one_parameter_is_found(hand: Hand) -> None:
    (finding,) = judged(hands=(hand,)).findings
    assert (finding.code, finding.num_parameters) == ("GS000", 1)
    assert finding.factor.observed == pytest.approx(0.5)


@pytest.mark.parametrize(
    "parted", [{"impl": "fsdp2", "own_divide": ((NAME, 1.0),)}, {"not_reduced": frozenset({NAME})}]
)
def test_a_divisor_is_no_fault_beside_a_parameter_that_is_reduced_otherwise(parted: dict[str, Any]) -> None:
    report = judged(root=lambda key, tokens: 2 / sum(tokens.values()), **parted)
    assert [one.code for one in report.findings] == (["GS103"] if "not_reduced" in parted else [])
    assert "the number of tokens of some contributions is unknown" in report.reasons[0]


def of_data(*, again: bool, factor: float = 1.0) -> Report:
    """Means over elements by weights that are functions of the data (policy ratios), of ranks whose gradients are
    averaged by hand, and perhaps summed again."""
    world = begun(RANKS, factor=factor * RANKS)
    everyone = (tuple(range(RANKS)),)
    for rank in world.ranks:
        rank.trace.events[:] = [_by_elements(event) for event in rank.trace.events]
    all_reduce(world, everyone, 40)
    for rank in world.ranks:
        rank.grad = {name: Buffer(one.values / RANKS, one.weights / RANKS) for name, one in rank.grad.items()}
    if again:
        all_reduce(world, everyone, 50)
    return ended(world)


def _by_elements(event: Any) -> Any:
    if isinstance(event, Loss):
        return msgspec.structs.replace(event, num_tokens=None)
    if not isinstance(event, LossGradient):
        return event
    one = msgspec.structs.replace(event, num_tokens=None, computed=True, reduced_by="sum")
    return msgspec.structs.replace(
        one, num_reduced=event.num_tokens, num_rows_used=event.num_tokens, reduced_weight=event.weight
    )


def test_a_sum_of_what_ranks_hold_alike_is_told_whatever_the_losses_are() -> None:
    assert of_data(again=False).verdict == "clean"
    (finding,) = of_data(again=True).findings
    assert (finding.code, finding.factor.observed) == ("GS102", pytest.approx(RANKS))
    assert finding.first_event is not None and finding.first_event.line == 50


@pytest.mark.parametrize("factor", [RANKS, 2.0])
def test_a_factor_of_such_losses_is_left_open(factor: float) -> None:
    assert of_data(again=False, factor=factor).verdict == "undetermined"


def test_a_second_sum_of_losses_that_are_divided_for_it_is_right() -> None:
    assert of_data(again=True, factor=1 / RANKS).verdict == "clean"
