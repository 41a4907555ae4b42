"""What a notebook runs: the cell magic, scenarios, predictions."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradcheck_dist
from gradcheck_dist.errors import GradcheckError

ipython = pytest.importorskip("IPython.core.interactiveshell")

LOOP = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for k in range(3):
    tokens = torch.randint(0, 50, (2, 4 + 3 * k))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / 3
    loss.backward()
optimizer.step()
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ipython.InteractiveShell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shell = ipython.InteractiveShell()
    shell.run_line_magic("load_ext", "gradcheck_dist")
    return shell


def test_the_magic_judges_what_the_cell_trained_and_shows_the_cell_s_own_line(
    shell: ipython.InteractiveShell,
) -> None:
    run = shell.run_cell_magic("gradcheck", "--steps 0:1 --name judged", LOOP)

    assert shell.user_ns["judged"] is run
    assert run.findings["code"].to_list() == ["GS301"]
    assert "F.cross_entropy" in run._repr_html_()
    # The probes are gone with the cell.
    assert shell.run_cell_magic("gradcheck", "--out again", LOOP).run.path.name == "again"


def test_an_error_in_the_cell_is_shown_and_the_probes_go(
    shell: ipython.InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shell.run_cell_magic("gradcheck", "", "1 / 0").verdict == "undetermined"
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert shell.run_cell_magic("gradcheck", "--out again", LOOP) is not None


@pytest.mark.parametrize(("line", "words"), [("--stepz 1", "E907"), ("--steps 3:1", "E712"), ("--out", "E907")])
def test_wrong_options_are_named(
    shell: ipython.InteractiveShell, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    assert shell.run_cell_magic("gradcheck", line, LOOP) is None
    assert words in capsys.readouterr().out


def test_a_scenario_gives_the_judged_run_of_every_variant() -> None:
    result = gradcheck_dist.scenario("ddp-accum", seed=3)

    assert result["averaging"].findings["code"].to_list() == ["GS101"]
    assert result["fixed"].verdict == "clean"
    assert len(result["fixed"].weights()) > 0
    assert "GS102" in result._repr_html_() and "as the file says" in result._repr_html_()


def test_a_scenario_takes_the_command_s_options_and_no_others() -> None:
    with pytest.raises(GradcheckError, match="nproc"):
        gradcheck_dist.scenario("ddp-accum", nprocs=4)


def test_a_prediction_reads_like_the_command() -> None:
    page = gradcheck_dist.prediction("loss_scale=R", ddp=4)

    assert "1/R" in repr(page) and "RIGHT" in repr(page)
    assert page._repr_markdown_().startswith("```text")
    with pytest.raises(GradcheckError, match="accum"):
        gradcheck_dist.prediction(acum=3)
