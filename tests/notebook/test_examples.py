"""The example notebooks: they run, and what stands in them is what they print today."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

FOLDER = Path(__file__).resolve().parents[2] / "examples/notebooks"
# What differs from run to run: names after the time, costs, seconds, addresses, versions, tiny differences of rounding.
_PASSING = [
    (re.compile(r"\d{8}-\d{6}-\d+"), "RUN"),
    (re.compile(r"\ncoverage\n.*", re.S), ""),
    (re.compile(r"probes took [^\n]*"), "COST"),
    (re.compile(r"- (?:rules|probes): [^\n]*"), "COVERAGE"),  # a new rule or probe is named there
    (re.compile(r"<summary>How it was looked at.*", re.S), ""),
    (re.compile(r"[^\s<>\"']*(?:ipykernel|cell\.py|gradcheck-|site-packages|gradcheck_dist)[^\s<>\"':]*"), "PATH"),
    (re.compile(r"0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"\b\d(?:\.\d+)?e-\d+\b"), "TINY"),
    (re.compile(r"(\d\.\d{4})\d+"), r"\1"),
]


def _texts(notebook: Any) -> list[list[str]]:
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            texts = [output.get("data", {}).get("text/plain", output.get("text", "")) for output in cell.outputs]
            for pattern, instead in _PASSING:
                texts = [pattern.sub(instead, text) for text in texts]
            found.append([text for text in texts if text])
    return found


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_prints_what_stands_in_it(path: Path, tmp_path: Path) -> None:
    kept = nbformat.read(path, as_version=4)
    assert all(cell.execution_count for cell in kept.cells if cell.cell_type == "code"), "run `make notebooks`"
    fresh = nbformat.read(path, as_version=4)

    nbclient.NotebookClient(fresh, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()

    if kept.metadata.language_info.version == platform.python_version():  # each brings another text to train on
        assert _texts(fresh) == _texts(kept), "the notebook is stale: run `make notebooks`"
