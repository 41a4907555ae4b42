"""What a line of the trainer's did to most parameters and not to some is that line's doing, and not the loss's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import global_mean
from simulator import Hand, Trainer, World

from gradcheck_dist.diagnosis.engine import conclude, diagnose
from gradcheck_dist.diagnosis.judging import judge_step

UNSCALED = frozenset({"embed.weight", "norm.weight"})
SCALED = Trainer(root=global_mean(1024.0), op="sum", hands=(Hand("before_optimizer", 1 / 1024),))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_parameter_that_was_not_unscaled_is_found_where_the_others_are(accumulation: int) -> None:
    trainer = replace(SCALED, accumulation=accumulation)
    assert diagnose(World(trainer).run()).findings == []
    hands = (Hand("before_optimizer", 1 / 1024, params=UNSCALED),)
    (finding,) = diagnose(World(replace(trainer, hands=hands)).run()).findings
    assert finding.code == "GS000" and finding.num_parameters == 1
    assert finding.factor.observed == pytest.approx(1024, rel=1e-4)
    assert finding.first_event is not None
    assert (finding.first_event.kind, finding.first_event.unrecorded) == ("reduce", True)
    assert "others" not in finding.pattern and "are left as they were" in finding.explanation


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_rank_that_leaves_out_what_the_others_do_is_found_where_they_do_it(accumulation: int) -> None:
    """Copies part there: no coefficient of the loss does that."""
    halved = Trainer(root=global_mean(2.0), op="sum", accumulation=accumulation, hands=(Hand("before_optimizer", 0.5),))
    assert diagnose(World(halved).run()).findings == []
    hands = (Hand("before_optimizer", 0.5, data_ranks=frozenset({0})),)
    (finding,) = diagnose(World(replace(halved, hands=hands)).run()).findings
    assert finding.code == "GS000" and 0 not in finding.ranks
    assert finding.factor.observed == pytest.approx(2, rel=1e-4)
    assert "what these ranks hold" in finding.fix


@pytest.mark.parametrize("accumulation", [1, 3])
def test_what_a_loop_that_reduces_and_divides_leaves_out_lacks_both_by_one_cause(accumulation: int) -> None:
    hands = (Hand("before_optimizer", 1 / 1024, params=frozenset({"embed.weight", "layers.0.weight"})),)
    skipping = replace(SCALED, accumulation=accumulation, hands=hands, not_reduced=frozenset({"norm.weight"}))
    (finding,) = diagnose(World(skipping).run()).findings
    assert (finding.code, finding.num_parameters, finding.factor.observed) == ("GS103", 1, 0.0)
    assert "multiplies them by 0.000976563; these are left as they were" in finding.explanation
    halved = replace(skipping, hands=(*hands, Hand("before_optimizer", 0.5, params=frozenset({"norm.weight"}))))
    codes = {finding.code for finding in diagnose(World(halved).run()).findings}
    assert "GS103" in codes and len(codes) == 2  # a line of their own is another cause


def test_a_scale_that_changes_from_step_to_step_is_found_where_one_parameter_keeps_it() -> None:
    verdicts = []
    for step, scale in enumerate((1024.0, 1024.0, 2048.0, 4096.0)):
        hands = (Hand("before_optimizer", 1 / scale, params=UNSCALED),)
        run = World(Trainer(root=global_mean(scale), op="sum", hands=hands), seed=step).run()
        verdict = judge_step(run, 0, "global-token-mean", "given")
        verdict.context = replace(verdict.context, step=step)
        for finding in (*verdict.findings, *(change.finding for change in verdict.changes)):
            finding.step, finding.steps = step, [step]
        verdicts.append(verdict)
    (finding,) = conclude(run, verdicts, [], "global-token-mean", "given").findings
    assert (finding.code, finding.num_parameters, finding.steps) == ("GS000", 1, [0, 1, 2, 3])
    assert "are left as they were" in finding.explanation
