"""What is built: each module once, with its data, from a checkout with or without links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKS = ("cli", "tui", "probes", "scenarios")
BUILD = "import sys, uv_build; uv_build.build_{kind}(sys.argv[1])"


def sources() -> set[str]:
    files = (
        path for path in (ROOT / "gradcheck_dist").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(ROOT).as_posix() for path in files}


def built(kind: str, checkout: Path, target: Path) -> list[str]:
    """Names in the built archive, without its first folder where it is a source archive."""
    command = [sys.executable, "-c", BUILD.format(kind=kind), str(target)]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, timeout=60)
    archive = next(target.iterdir())
    if kind == "wheel":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as tar:
        return [member.name.partition("/")[2] for member in tar.getmembers() if member.isfile()]


@pytest.fixture(params=["with links", "without links"])
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "gradcheck_dist", folder / "gradcheck_dist", ignore=shutil.ignore_patterns("__pycache__"))
    if request.param == "with links":
        for name in LINKS:
            (folder / name).symlink_to(f"gradcheck_dist/{name}")
    return folder


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_archive_holds_each_file_of_the_package_exactly_once(kind: str, checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    names = built(kind, checkout, tmp_path / "out")
    inside = [name for name in names if name.startswith("gradcheck_dist/") and not name.endswith("/")]
    assert sorted(inside) == sorted(sources())
    modules = [Path(name).parts[0] for name in names if name.endswith(".py")]
    assert set(modules) == {"gradcheck_dist"}


@pytest.mark.parametrize("name", LINKS)
def test_a_room_is_linked_at_the_root_by_a_relative_path(name: str) -> None:
    link = ROOT / name
    if not link.is_symlink():
        pytest.skip("this checkout has no links")
    assert link.readlink().as_posix() == f"gradcheck_dist/{name}"
    assert link.is_dir()


def test_package_data_is_found_where_it_is_read() -> None:
    shipped = sources()
    assert "gradcheck_dist/py.typed" in shipped
    assert "gradcheck_dist/reports/report.schema.json" in shipped
    assert "gradcheck_dist/scenarios/library/ddp-accum.yaml" in shipped


def test_no_registry_address_is_written_down() -> None:
    for name in ("pyproject.toml", "Makefile", "constraints.txt", ".ci/run"):
        text = (ROOT / name).read_text()
        assert "http" not in text
        assert "index-url" not in text


def test_every_pip_call_keeps_to_the_constraints_or_names_its_torch() -> None:
    calls = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-m pip" in line]
    assert calls
    assert all("--constraint constraints.txt" in call or '"torch==$(TORCH)"' in call for call in calls)
