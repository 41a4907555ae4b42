"""A closure that is evaluated several times a step and never empties gradients: one finding, and not a wrong loss."""

from __future__ import annotations

import msgspec
import pytest
from simulator import Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Loss, OptimizerStep

ONE_BATCH = 7


def judged(optimizer: str, *, one_batch: bool = True) -> Report:
    """Three passes with a mean over its own tokens each."""
    trainer = Trainer(
        root=lambda key, tokens: 1 / tokens[key], data_ranks=1, impl="none", accumulation=3, tokens=(9, 9)
    )
    run = World(trainer).run()
    for trace in run.ranks.values():
        trace.events = [
            msgspec.structs.replace(event, optimizer=optimizer)
            if isinstance(event, OptimizerStep)
            else msgspec.structs.replace(event, label_hash=ONE_BATCH)
            if isinstance(event, Loss) and one_batch
            else event
            for event in trace.events
        ]
    return diagnose(run)


def test_evaluations_that_are_added_up_are_stale_gradients() -> None:
    (finding,) = judged("LBFGS").findings
    assert (finding.code, finding.factor.observed) == ("GS402", 3.0)
    assert finding.first_event is not None and finding.first_event.kind == "optimizer_step"
    assert "evaluated its closure 3 times" in finding.explanation


@pytest.mark.parametrize(("optimizer", "one_batch"), [("AdamW", True), ("LBFGS", False)])
def test_other_passes_are_an_accumulation_whose_loss_is_not_divided(optimizer: str, one_batch: bool) -> None:
    (finding,) = judged(optimizer, one_batch=one_batch).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")
