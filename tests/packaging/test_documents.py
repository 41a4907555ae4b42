"""The documents at the root stay true: what they name exists, and the example does what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gradcheck_dist
from gradcheck_dist.cli.main import COMMANDS
from gradcheck_dist.trainer.launch import launch

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    text = (ROOT / name).read_text()
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(r"`((?:gradcheck_dist|tests|docs|examples)/[\w./-]+)`", text)
    missing = [path for path in linked + named if not (ROOT / path).exists()]
    assert missing == []


def test_the_readme_lists_every_command_and_no_other() -> None:
    named = set(re.findall(r"`gradcheck (\w+)", (ROOT / "README.md").read_text()))
    assert named == set(COMMANDS)


def test_the_readme_s_first_screen_holds_one_picture_and_the_two_commands() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:20])
    assert len(re.findall(r"^!\[", first_screen, re.M)) == 1
    assert re.findall(r"^make (\w+)", first_screen, re.M) == ["demo", "test"]


def test_the_picture_loads_nothing_and_shows_no_machine_s_paths() -> None:
    picture = (ROOT / "docs" / "ddp-accum.svg").read_text()
    assert "url(http" not in picture
    assert "GS101" in picture
    assert str(ROOT) not in picture
    screen = (ROOT / "docs" / "weights-ddp-accum.svg").read_text()
    assert "url(http" not in screen
    assert "sum-every-backward" in screen
    assert str(ROOT) not in screen


def test_names_of_the_package_in_the_readme_exist() -> None:
    for name in re.findall(r"gradcheck_dist\.(\w+)\(", (ROOT / "README.md").read_text()):
        assert name in gradcheck_dist.__all__


@pytest.mark.slow
def test_the_example_trainer_is_found_to_average_twice(tmp_path: Path) -> None:
    script = (str(ROOT / "examples" / "own_trainer.py"), (str(tmp_path / "run"),), None, False)
    launch("forked_script:run_script", script, 2, timeout_s=100)
    report = gradcheck_dist.diagnose(gradcheck_dist.read_run(tmp_path / "run"))
    assert [(finding.code, finding.name) for finding in report.findings] == [("GS101", "double-averaging")]
    assert report.findings[0].first_event
    assert "own_trainer.py" in str(report.findings[0].first_event.file)
