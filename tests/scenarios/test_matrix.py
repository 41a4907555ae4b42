"""The healthy matrix: its table, resuming, and the dozen that stands for all on real ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from gradcheck_dist.axes import AXIS_NAMES
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.scenarios import matrix
from gradcheck_dist.scenarios.matrix import Case, Row
from gradcheck_dist.trainer.config import CHOICES, TrainConfig

CASES = matrix.cases()
FALSE_ALARMS: dict[str, str] = {}
"""Correct configurations that the engine does not find clean yet; a test that passes has to leave this list."""
ROW = Row("one process", TrainConfig().to_dict(), "clean", 2.0, 2.0, 1.0, 1 << 20, "")


def test_the_matrix_is_at_least_sixty_correct_configurations_of_every_axis_and_schedule() -> None:
    assert len(CASES) >= 60
    assert sum(case.is_quick for case in CASES) >= 12
    assert not any(case.config.faults for case in CASES)
    for axis in AXIS_NAMES:
        assert {getattr(case.config.axes, axis) for case in CASES} >= {1, 2}
    for key in ("schedule", "mixed_precision", "replication", "gradient_reduction", "activation_checkpointing"):
        assert {getattr(case.config, key) for case in CASES} == set(CHOICES[key])
    assert {case.config.accum for case in CASES} >= {1, 2, 3}
    assert max(case.config.axes.world_size for case in CASES) == 16


def test_the_control_has_the_same_sequences_on_one_process() -> None:
    for case in CASES:
        control = matrix.control_of(case.config)
        if control is None:
            assert case.config.dropout or case.config.contrastive_loss_weight
        else:
            assert control.axes.world_size == 1
            assert control.sequences_per_step == case.config.sequences_per_step
            assert (control.dtype, control.max_norm) == ("float32", None)


def test_what_was_right_is_not_run_again_unless_the_configuration_changed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    case = Case("one process", TrainConfig(), True)
    assert matrix.read_rows(file) == []
    matrix.write_rows(file, [ROW, dataclasses.replace(ROW, name="other", note="off")])
    rows = {row.name: row for row in matrix.read_rows(file)}
    assert matrix.done(rows, case) == ROW
    assert matrix.done(rows, dataclasses.replace(case, name="other")) is None
    assert matrix.done(rows, dataclasses.replace(case, config=TrainConfig(accum=2))) is None
    file.write_text(file.read_text()[:-20])
    assert [row.name for row in matrix.read_rows(file)] == ["one process"]
    # The file is written anew: whatever holds something else must not be taken for an empty one.
    for strange in ("hello\nworld\n", "one line of notes", '{"name": "a package", "version": 1}'):
        file.write_text(strange)
        with pytest.raises(GradcheckError, match="no result of `gradcheck matrix`") as caught:
            matrix.read_rows(file)
        assert caught.value.code == "E608"


def test_a_wrong_norm_and_a_configuration_that_cannot_run_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*arguments: object, **options: object) -> list[object]:
        raise GradcheckError("rank 1 of 2 died", code="E232")

    monkeypatch.setattr(matrix, "launch", launch)
    row = matrix.Matrix().run(Case("one process", TrainConfig(), True))
    assert (row.is_right, row.verdict, row.note) == (False, "", "E232: rank 1 of 2 died")
    assert "NOT" in matrix.line(row)
    assert matrix._wrong_norm(2.0, 1.0, 1e-5) == "the gradient norm is 2, on one process 1 (limit 1e-05)"
    assert matrix._wrong_norm(2.0, None, 1e-5) == matrix._wrong_norm(1.0, 1.0 + 1e-7, 1e-5) == ""
    assert matrix.summary([ROW, row]).startswith("1 of 2 correct configurations without a finding")
    assert "| one process | clean | 0.0e+00 | 1.0 |  |" in list(matrix.table([ROW]))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [case for case in CASES if case.is_quick], ids=lambda case: case.name)
def test_nothing_is_found_on_a_correct_configuration(case: Case) -> None:
    assert matrix.Matrix().run(case).note == ""


@pytest.mark.slow
@pytest.mark.library
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", [case for case in CASES if not case.is_quick], ids=lambda case: case.name)
def test_nothing_is_found_on_any_other_either(case: Case, request: pytest.FixtureRequest) -> None:
    if case.name in FALSE_ALARMS:
        request.applymarker(pytest.mark.xfail(reason=FALSE_ALARMS[case.name], strict=True))
    assert matrix.Matrix().run(case).note == ""
