"""The Triton kernel without a GPU: interpreted against the definition, and compiled ahead for four architectures."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradcheck_dist

SUPPORT = Path(__file__).parents[1] / "support"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed: make test-kernels"
)


def work(what: str, **environment: str) -> str:
    path = os.pathsep.join([str(SUPPORT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "kernel_worker.py"), what],
        env={**os.environ, "PYTHONPATH": path, "TRITON_DEFAULT_FP_FUSION": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@needs_triton
@pytest.mark.slow
def test_interpreted_it_agrees_with_the_definition() -> None:
    work("interpret", TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.slow
def test_it_compiles_for_every_architecture(tmp_path: Path) -> None:
    printed = work("compile", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    assert [line.rsplit(" ", 1)[1] for line in printed.splitlines()] == ["80", "90", "100", "gfx942"]


def test_only_one_file_imports_triton() -> None:
    package = Path(gradcheck_dist.__file__).parent
    found = []
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "triton" for name in names):
                found.append(path.relative_to(package).as_posix())
    assert set(found) == {"stats/kernels.py"}
