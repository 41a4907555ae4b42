"""The documentation site: it builds without a warning, and what is generated is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradcheck_dist.cli.explain import pages
from gradcheck_dist.cli.main import COMMANDS
from gradcheck_dist.scenarios.schema import library

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _page(site: Path, name: str) -> str:
    return (site / name / "index.html").read_text()


def test_every_rule_scenario_and_command_has_its_part(site: Path) -> None:
    rules, scenarios, commands = (_page(site, name) for name in ("rules", "scenarios", "commands"))
    assert [page.code for page in pages() if f'id="{page.code.lower()}-{page.name}"' not in rules] == []
    assert [name for name in library() if f'id="{name}"' not in scenarios] == []
    assert [name for name in COMMANDS if f'id="gradcheck-{name}"' not in commands] == []


def test_links_into_the_rules_lead_somewhere(site: Path) -> None:
    rules = _page(site, "rules")
    anchors = {part.partition('"')[0] for part in _page(site, "scenarios").split("../rules/#")[1:]}
    assert anchors
    assert [anchor for anchor in anchors if f'id="{anchor}"' not in rules] == []


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for file in site.rglob("*.html"):
        for tag in file.read_text().replace("<link", "<script").split("<script")[1:]:
            head = tag.partition(">")[0]
            assert "canonical" in head or ("http://" not in head and "https://" not in head), (file.name, head)
