"""GS801 on hand-made checks: one fault is one finding, and what may be meant is no error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gradcheck_dist.diagnosis.audits.facts import Remark
from gradcheck_dist.diagnosis.audits.verified import not_verified, nothing_verified
from gradcheck_dist.diagnosis.rules import gs801_wrong_backward as rule
from gradcheck_dist.events import GradientCheck, Site
from gradcheck_dist.ledger.transit import Transits

SITE = Site("model.py", 7, "Layer.forward")


def check(**changes: Any) -> GradientCheck:
    values: dict[str, Any] = {
        "seq": 1,
        "t_ns": 0,
        "step": 0,
        "site": SITE,
        "module": "layers.0",
        "module_type": "Layer",
        "target": "parameters",
        "name": "up",
        "outcome": "wrong",
        "shape": "scaled",
        "observed": 1.0,
        "numerical": 2.0,
        "error": 1e-9,
        "factor": 0.5,
        "precision": "float64",
    }
    return GradientCheck(**(values | changes))


def remarks(*checks: GradientCheck, weights_right: bool = True) -> list[Remark]:
    tracks = {(-1, "layers.0.up.weight"): {}, (-1, "layers.1.up.weight"): {}, (-1, "head.weight"): {}}
    data = SimpleNamespace(events={0: list(checks), 1: list(checks)}, tracks=tracks)
    facts = SimpleNamespace(data=data, held=[], on_the_way=Transits(), weights_right=weights_right)
    return list(rule.audit(facts))  # type: ignore[arg-type]


def test_one_forward_that_is_wrong_is_one_finding() -> None:
    (one,) = remarks(
        check(module="layers.1", target="input", shape="other", factor=None), check(), check(module="layers.1")
    )
    assert one.ranks == (0, 1)
    assert {name for _, name in one.params} == {"layers.0.up.weight", "layers.1.up.weight"}
    assert one.pattern == "layers.0, layers.1: the parameters of up gets x 0.5"
    assert one.answer.severity == "error"


@pytest.mark.parametrize(
    ("changes", "severity"),
    [
        ({"shape": "flat", "factor": None}, "info"),  # a straight-through estimator
        ({"shape": "cut", "factor": 0.0}, "warning"),
        ({"factor": -1.0}, "warning"),
        ({"factor": -0.5}, "error"),
        ({"shape": "constant", "factor": None}, "error"),
        ({"shape": "partial", "factor": None, "group": (0, 1)}, "error"),
    ],
)
def test_what_may_be_meant_is_no_error(changes: dict[str, Any], severity: str) -> None:
    (one,) = remarks(check(**changes))
    assert one.answer.severity == severity
    assert ("nothing is wrong" in one.answer.fix) == (severity != "error")


def test_a_sum_that_is_summed_again_is_right_where_the_loss_was_divided_for_it() -> None:
    doubled = check(factor=2.0, group=(0, 1))
    assert len(remarks(doubled)) == 1
    assert remarks(doubled, weights_right=False) == []


def test_what_was_not_decided_is_told_with_its_reason() -> None:
    checks = [check(outcome="undetermined", module=f"layers.{n}", reason="too coarse", name="") for n in range(5)]
    assert not_verified({0: checks}) == ["verify: undetermined for layers.0, layers.1, layers.2 and 2 more: too coarse"]
    assert nothing_verified({0: checks}) == ["verify: no module's backward could be checked"]
    assert nothing_verified({0: [*checks, check(outcome="right")]}) == nothing_verified({0: []}) == []
