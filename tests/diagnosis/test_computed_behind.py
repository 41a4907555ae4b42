"""Losses that do the same in every step are not accused of a number that lines behind them compute in each."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.engine import conclude
from gradcheck_dist.diagnosis.finding import Factor
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.other_steps import Conduct
from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict

NUM_TOKENS = 65


def judged(step: int, ratio: float, losses: float) -> StepVerdict:
    """The verdict on a step of sums whose weights are laid to the loss, though lines behind it made them what they are:
    they are divided there, some by a clip as well."""
    trainer = Trainer(root=lambda key, tokens: 1.0, op="sum")
    world = World(trainer, seed=step)
    world.num_tokens = dict(zip(trainer.keys, (30, NUM_TOKENS - 30), strict=True))
    verdict = judge_step(world.run(), 0, "global-token-mean", "given")
    verdict.context = replace(verdict.context, step=step)
    (finding,) = verdict.findings
    finding.step, finding.steps = step, [step]
    finding.factor = Factor(observed=ratio, exact=None, expression=None, candidates=[])
    verdict.conduct = Conduct(losses, losses / NUM_TOKENS, ratio / losses, finding.first_event, {})
    return verdict


@pytest.mark.parametrize(
    ("ratios", "losses", "verdict"),
    [
        ((0.0934, 0.0978, 0.1099), (65.0, 65.0, 65.0), "undetermined"),
        ((0.0934, 0.0978, 0.1099), (65.0, 61.0, 71.0), "findings"),  # the losses are others in each step
        ((0.0934, 0.0934, 0.0934), (65.0, 65.0, 65.0), "findings"),  # a constant
        ((65 / 691, 65 / 667, 65 / 593), (65.0, 65.0, 65.0), "findings"),  # a count of other tokens
        ((1.934, 1.978, 1.099), (65.0, 65.0, 65.0), "findings"),  # no clip makes gradients longer
        ((0.0934, 0.0978), (65.0, 65.0), "findings"),  # two steps may differ by chance
    ],
)
def test_what_is_too_small_by_another_number_in_each_step_is_no_fault_of_losses_that_are_the_same(
    ratios: tuple[float, ...], losses: tuple[float, ...], verdict: str
) -> None:
    verdicts = [judged(step, *numbers) for step, numbers in enumerate(zip(ratios, losses, strict=True))]
    run = World(Trainer(root=global_mean(), op="sum"), seed=0).run()
    report = conclude(run, verdicts, [], "global-token-mean", "given")
    assert report.verdict == verdict
    assert any("a clip by a norm that is not theirs" in one for one in report.reasons) is (verdict == "undetermined")
