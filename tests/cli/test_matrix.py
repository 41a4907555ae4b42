"""gradcheck matrix: options, resuming, files. Nothing is trained here; tests/scenarios/test_matrix.py does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from command_line_doubles import Gradcheck

from gradcheck_dist.scenarios import matrix
from gradcheck_dist.scenarios.matrix import Case, Row
from gradcheck_dist.trainer import launch


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the configurations that were run; the one called "CP" goes wrong."""
    names: list[str] = []

    def run(self: matrix.Matrix, case: Case) -> Row:
        names.append(case.name)
        right = Row(case.name, case.config.to_dict(), "clean", 2.0, 2.0, 1.0, 1 << 20, "")
        return dataclasses.replace(right, verdict="findings", note="found GS101") if case.name == "CP" else right

    monkeypatch.setattr(matrix.Matrix, "run", run)
    monkeypatch.setattr(launch, "warm_up", lambda: None)
    return names


def test_quick_runs_a_dozen_and_a_finding_is_exit_code_1(gradcheck: Gradcheck, ran: list[str]) -> None:
    outcome = gradcheck("matrix", "--quick")
    assert outcome.code == 1
    assert 12 <= len(ran) <= 15
    assert "NOT    1.0 s  CP (cp=2): findings, norm off by 0e+00\n               found GS101" in outcome.out
    assert outcome.out.splitlines()[-1].startswith(f"{len(ran) - 1} of {len(ran)} correct configurations")
    ran.clear()
    assert gradcheck("matrix", "--only", "zbv").code == 0
    assert ran == [name for name in gradcheck("matrix", "--list").out.splitlines() if "ZBV" in name]
    assert json.loads(gradcheck("matrix", "--list", "--only", "ZBV", "--format", "json").out) == ran
    assert gradcheck("matrix", "--list", "--only", "ZBV", "--format", "md").out.splitlines() == [
        f"- `{one}`" for one in ran
    ]


def test_it_resumes_where_it_stopped_and_runs_what_was_wrong_again(
    gradcheck: Gradcheck, ran: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    gradcheck("matrix", "--only", "CP", "--resume", file)
    first = len(ran)
    assert first > 3
    ran.clear()
    outcome = gradcheck("matrix", "--only", "CP", "--resume", file, "--report", tmp_path / "r.md")
    assert ran == ["CP"]
    assert len(outcome.out.splitlines()) > first
    assert "| CP | findings |" in (tmp_path / "r.md").read_text()
    gradcheck("matrix", "--only", "TP", "--resume", file)
    assert len(matrix.read_rows(file)) > first
    document = json.loads(gradcheck("matrix", "--only", "CP", "--resume", file, "--format", "json").out)
    assert len(document["rows"]) == first


@pytest.mark.parametrize("option", ["--report", "--resume"])
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    gradcheck: Gradcheck, ran: list[str], option: str
) -> None:
    outcome = gradcheck("matrix", option, "/nowhere/r.json")
    assert (outcome.code, ran) == (2, [])
    assert "cannot write /nowhere/r.json" in outcome.err


def test_a_name_that_no_configuration_has_is_refused(gradcheck: Gradcheck, ran: list[str]) -> None:
    outcome = gradcheck("matrix", "--only", "nosuch")
    assert (outcome.code, ran) == (2, [])
    assert "E601: --only is 'nosuch'" in outcome.err and "--list" in outcome.err
