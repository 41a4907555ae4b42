"""What loads when: judging and help without torch, names of the package on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gradcheck_dist
from gradcheck_dist.scenarios.selftest import TRIED

ROOT = Path(__file__).parents[2]
PACKAGE = Path(gradcheck_dist.__file__).parent
HEAVY = {"torch", "pandas", "plotly", "textual", "rich", "tensorboard"}


def modules_after(code: str, *arguments: str) -> set[str]:
    """Top-level modules that are loaded when `code` has run in a fresh process."""
    probe = f"import sys\ntry:\n    {code}\nexcept SystemExit: pass\nprint('\\n' + ' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", probe, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_importing_the_package_loads_next_to_nothing() -> None:
    loaded = modules_after("import gradcheck_dist")
    assert not loaded & (HEAVY | {"numpy", "msgspec", "typer"})


COMMAND = "from gradcheck_dist.cli.main import run; run(sys.argv[1:])"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["scenario", "--help"],
        ["scenario", "--list"],
        ["diagnose", "--help"],
        ["explain", "--help"],
    ],
    ids=" ".join,
)
def test_help_and_lists_load_nothing_heavy(arguments: list[str]) -> None:
    assert not modules_after(COMMAND, *arguments) & HEAVY


@pytest.mark.parametrize("command", ["scenario", "diagnose", "run", "matrix", "bench"])
def test_help_of_a_command_pays_neither_for_typer_s_validation_nor_for_what_the_command_does(command: str) -> None:
    loaded = modules_after(COMMAND, command, "--help")
    assert not loaded & {"pydantic", "concurrent", "json", "statistics", "yaml"}


def test_public_names_are_there_on_first_use() -> None:
    assert set(gradcheck_dist.__all__) <= set(dir(gradcheck_dist))
    assert gradcheck_dist.read_run.__module__ == "gradcheck_dist.trace.run"
    with pytest.raises(AttributeError, match=r"atach.*it has .*attach"):
        gradcheck_dist.atach  # noqa: B018


def test_every_public_name_has_a_home() -> None:
    for name in gradcheck_dist.__all__:
        assert getattr(gradcheck_dist, name) is not None


def test_the_version_is_told_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert gradcheck_dist.__version__ == project["version"]


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_nothing_imports_through_the_links_at_the_root(file: Path) -> None:
    links = {"cli", "tui", "probes", "scenarios"}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert not links & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert (node.module or "").partition(".")[0] not in links


def test_the_torch_that_is_allowed_is_the_one_that_was_tried() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    allowed = next(Requirement(one) for one in requirements if one.startswith("torch>")).specifier
    first, last = (int(version.removeprefix("2.")) for version in (TRIED[0], TRIED[-1]))
    assert tuple(f"2.{minor}" for minor in range(first, last + 1)) == TRIED
    assert [minor for minor in range(40) if f"2.{minor}.1" in allowed] == list(range(first, last + 1))
