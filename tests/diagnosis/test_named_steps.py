"""A reason or remark that holds in some of the judged steps says in which."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.steps.named_steps import name_steps, words_of_steps

RUN = World(Trainer(root=global_mean(), op="sum")).run()


@pytest.mark.parametrize(
    ("where", "reason", "told"),
    [
        ((1, 3), "weights are not known", "steps 1 and 3: weights are not known"),
        ((2,), "x 3 in accumulation step 1", "step 2: x 3 in accumulation step 1"),
        ((0, 1, 2, 3), "weights are not known", "weights are not known"),
        ((1,), "gradients are x 2 in step 1", "gradients are x 2 in step 1"),
    ],
)
def test_it_says_which_unless_it_holds_in_all_or_says_so_itself(where: tuple[int, ...], reason: str, told: str) -> None:
    verdict = judge_step(RUN, 0, "global-token-mean", "given")
    verdicts = [
        replace(verdict, context=replace(verdict.context, step=step), reasons=list(said), remarks=list(said))
        for step in range(4)
        for said in [[reason] if step in where else []]
    ]
    name_steps(verdicts, words_of_steps(verdicts))
    for verdict in verdicts:
        assert verdict.reasons == verdict.remarks == ([told] if verdict.context.step in where else [])


def test_what_was_said_of_all_steps_together_is_left_as_it_is() -> None:
    verdict = judge_step(RUN, 0, "global-token-mean", "given")
    verdicts = [replace(verdict, reasons=["of the whole run"]), replace(verdict, reasons=[])]
    name_steps(verdicts, set())
    assert verdicts[0].reasons == ["of the whole run"]
