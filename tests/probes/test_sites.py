"""Which line is named: the innermost that is neither torch nor a probe, and the user's own that led there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from gradcheck_dist.probes.recording import sites


def load(file: Path, code: str) -> ModuleType:
    module = ModuleType(file.stem)
    exec(compile(code, str(file), "exec"), module.__dict__)
    return module


def test_a_users_line_is_named_alone(tmp_path: Path) -> None:
    user = load(tmp_path / "train.py", "def step(site):\n    return site()\n")
    site = user.step(sites.caller_site)
    assert (site.file, site.line, site.function, site.called_from) == (str(tmp_path / "train.py"), 2, "step", None)


def test_a_librarys_line_is_named_with_the_users_line_that_led_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "site-packages"
    monkeypatch.setattr(sites, "_INSTALLED_DIRS", (f"{packages}/",))
    sites.is_installed.cache_clear()
    library = load(packages / "library.py", "def backward(site):\n    return site()\n")
    user = load(tmp_path / "train.py", "def step(backward, site):\n\n    return backward(site)\n")
    site = user.step(library.backward, sites.caller_site)
    sites.is_installed.cache_clear()
    assert (site.file, site.line) == (str(packages / "library.py"), 2)
    assert site.called_from == f"{tmp_path / 'train.py'}:3"


@pytest.mark.parametrize("folder", ["lib/python3.11/site-packages", "lib/python3/dist-packages"])
def test_a_library_is_one_in_whatever_folder_packages_are_installed(tmp_path: Path, folder: str) -> None:
    """A user's own packages (~/.local), Debian's, those of PYTHONPATH."""
    library = load(tmp_path / folder / "library.py", "def backward(site):\n    return site()\n")
    user = load(tmp_path / "train.py", "def step(backward, site):\n\n    return backward(site)\n")
    assert user.step(library.backward, sites.caller_site).called_from == f"{tmp_path / 'train.py'}:3"


def test_passes_of_one_loop_are_called_from_one_place_however_often() -> None:
    """Python moves its offset in a function's bytecode when it specialises a call, in the eighth run."""
    found: list[object] = []

    def called(take: Callable[[], object]) -> None:
        found.append(take())

    code = compile("called(sites.calls); other()", __file__, "exec")
    for _ in range(20):
        exec(code, {"called": called, "sites": sites, "other": lambda: called(sites.calls)})
    assert len(set(found)) == 2 and len(set(found[::2])) == 1


def test_two_calls_on_one_line_are_two_places() -> None:
    first, second = (sites.calls(), sites.calls())
    assert first != second
