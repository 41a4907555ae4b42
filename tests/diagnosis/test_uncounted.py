"""Where one rank's losses count no tokens, what the others' should weigh is not known, and only what weights differ by
from one parameter to another accuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from simulator import Hand, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Loss, LossGradient

NAME = "embed.weight"


def judged(**more: Any) -> Report:
    """Means of each rank's batch that an average follows; rank 1 has another kind of loss."""
    run = World(Trainer(root=lambda key, tokens: 1 / tokens[key], op="avg", data_ranks=2, **more)).run()
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
