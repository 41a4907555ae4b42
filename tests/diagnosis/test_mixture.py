"""Accumulation steps with a coefficient each are a mixture that may be meant; a factor behind them is found all the
same, and so is a mean of means."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulator import Hand, Key, Trainer, World

from gradcheck_dist.diagnosis.engine import diagnose


def of_step(coefficients: tuple[float, ...]) -> Trainer:
    """Each step's loss is its coefficient times the mean over the step's tokens on all ranks."""

    def root(key: Key, tokens: dict[Key, int]) -> float:
        return coefficients[key[1]] / sum(count for (_, k, _), count in tokens.items() if k == key[1])

    return Trainer(root=root, op="sum", accumulation=len(coefficients))


@pytest.mark.parametrize("coefficients", [(0.7, 0.3), (0.5, 0.3, 0.2)])
def test_a_mixture_is_left_open_and_what_follows_it_is_judged(coefficients: tuple[float, ...]) -> None:
    mixed = of_step(coefficients)
    report = diagnose(World(mixed).run())
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert ", ".join(f"{number:g}" for number in coefficients) in report.reasons[0]
    hand = Hand("before_optimizer", 0.5, params=frozenset({"embed.weight"}))
    (finding,) = diagnose(World(replace(mixed, hands=(hand,))).run()).findings
    assert finding.factor.observed == pytest.approx(0.5) and finding.num_parameters == 1


def test_equal_shares_of_steps_are_a_mean_of_means() -> None:
    (finding,) = diagnose(World(of_step((0.5, 0.5))).run()).findings
    assert (finding.code, finding.factor.expression) == ("GS305", "1/groups * num_tokens/N_g")


def test_what_scales_the_first_steps_behind_the_losses_is_no_mixture() -> None:
    hand = Hand("leaf", 0.5, steps=frozenset({0}))
    equal = replace(of_step((0.5, 0.5)), tokens=(12, 12), hands=(hand,))
    assert [finding.code for finding in diagnose(World(equal).run()).findings] == ["GS000"]
