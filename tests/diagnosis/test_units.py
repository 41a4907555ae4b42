"""A unit holds parameters that came out alike, and a fault concerns all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from gradcheck_dist.diagnosis.steps.units import parted, unit_list
from gradcheck_dist.ledger.tracks import ParamKey

NORM, BIAS, HEAD = (-1, "norm.weight"), (-1, "norm.bias"), (-1, "head.weight")
ALIKE: dict[ParamKey, str] = dict.fromkeys((NORM, BIAS, HEAD), "all parameters")


def measured(params: Iterable[ParamKey]) -> Any:
    """As much of a Held as is asked for."""
    return [SimpleNamespace(param=param, cells=[object()]) for param in params]


def test_a_unit_of_which_a_fault_concerns_a_part_is_cut() -> None:
    assert parted(ALIKE, [[NORM, BIAS, HEAD]], measured(ALIKE)) == ALIKE
    assert parted(ALIKE, [[NORM, BIAS]], measured(ALIKE)) == {NORM: "norm.*", BIAS: "norm.*", HEAD: "head.weight"}
    cut = parted(ALIKE, [[NORM, BIAS], [NORM]], measured(ALIKE))
    assert cut == {NORM: "norm.weight", BIAS: "norm.bias", HEAD: "head.weight"}


def test_parameters_of_which_nothing_was_measured_cut_no_unit() -> None:
    assert parted(ALIKE, [[NORM, BIAS]], measured([NORM, BIAS])) == ALIKE


def test_all_parameters_are_not_called_so_where_a_fault_concerns_others_besides() -> None:
    other = (-1, "tail.bias")
    named = parted(ALIKE, [[NORM, BIAS, HEAD, other]], measured(ALIKE))
    assert len(set(named.values())) == 1 and "all parameters" not in named.values()
    assert parted({HEAD: "all parameters"}, [[HEAD, other]], measured([HEAD])) == {HEAD: "head.weight"}


def test_pieces_keep_the_stage_and_have_names_of_their_own() -> None:
    units: dict[ParamKey, str] = {
        (0, "a.x"): "stage 0",
        (0, "a.y"): "stage 0",
        (0, "a.z"): "stage 0",
        (1, "b"): "stage 1",
    }
    cut = parted(units, [[(0, "a.x")]], measured(units))
    assert cut == {
        (0, "a.x"): "stage 0: a.x",
        (0, "a.y"): "stage 0: a.*",
        (0, "a.z"): "stage 0: a.*",
        (1, "b"): "stage 1",
    }


def test_units_of_later_steps_stand_beside_those_of_the_first() -> None:
    listed = unit_list([ALIKE, parted(ALIKE, [[HEAD]], measured(ALIKE))])
    members = {one.unit: one.parameters for one in listed}
    assert members == {
        "all parameters": ["head.weight", "norm.bias", "norm.weight"],
        "norm.*": ["norm.bias", "norm.weight"],
        "head.weight": ["head.weight"],
    }
