"""A run folder: one trace a rank and a manifest. Reading, writing, naming what is missing."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from gradcheck_dist.axes import AXIS_NAMES, Axes
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import SCHEMA_VERSION
from gradcheck_dist.trace.frames import MAGIC, iter_frames
from gradcheck_dist.trace.reader import RankTrace, rank_and_restart, read_header, read_trace
from gradcheck_dist.trace.store import Place, Where, forbidden, place_of, refuse_url
from gradcheck_dist.wording import numbered, plural

SomePlace = TypeVar("SomePlace", bound=Place)

MANIFEST = "manifest.json"
HEADER_BYTES = 1 << 16
MAX_RANKS = 1 << 20
_UNRECORDED_NAME = re.compile(r"unrecorded-(\d{5,})-\d+\.json")
_RESTART_NAME = re.compile(r"restart-(\d{1,9})\.json")


_MANIFEST = {"world_size": int, "command": list, "id": str, "scenario": str, "variant": str}
"""Types of what a manifest may say about a run."""


@dataclass
class Run:
    """All that is left of a run. `problems` names in words what is missing or damaged."""

    path: Place
    manifest: dict[str, Any]
    ranks: dict[int, RankTrace] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        sizes = [trace.header.world_size for trace in self.ranks.values()]
        return max([*sizes, min(self.manifest.get("world_size", 0), MAX_RANKS)], default=0)

    @property
    def axes(self) -> Axes | None:
        """The degrees that the user declared, where they are those of a mesh of as many ranks as there are."""
        return self._declared_axes()[0]

    def _declared_axes(self) -> tuple[Axes | None, str | None]:
        """And what is wrong with them."""
        degrees = next((trace.header.axes for trace in self.ranks.values() if trace.header.axes), None)
        if degrees is None:
            return None, None
        try:
            axes = Axes(**{name: degrees.get(name, 1) for name in AXIS_NAMES})
            axes.check_world_size(self.world_size)
        except GradcheckError as error:
            return None, f"the declared axes are left out, and inferred in their place: {error}"
        return axes, None

    @property
    def same_data(self) -> tuple[tuple[int, ...], ...] | None:
        """Sets of ranks that evaluate the same tokens, where the user declared them."""
        found = (trace.header.same_data for trace in self.ranks.values())
        return next((groups for groups in found if groups is not None), None)

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank not in self.ranks)


def create_run_dir(path: str | os.PathLike[str], manifest: dict[str, Any]) -> Path:
    """Make a private run folder (0700) with its manifest.

    Raises:
        GradcheckError: E511 the folder holds a run already, E512 it cannot be made or written.
    """
    refuse_url(path, "recording")
    run_dir = Path(path)
    if trace_files(run_dir):
        raise GradcheckError(
            f"{run_dir} already holds a run, and nothing recorded is ever overwritten. "
            "Name another folder, or remove this one first.",
            code="E511",
        )
    if run_dir.is_dir():
        (run_dir / MANIFEST).unlink(missing_ok=True)
    return join_run_dir(run_dir, manifest)


def join_run_dir(path: str | os.PathLike[str], manifest: dict[str, Any]) -> Path:
    """Like create_run_dir for a rank that may find the folder made by another: the first one's manifest stays.

    Raises:
        GradcheckError: E512 the folder cannot be made or written.
    """
    refuse_url(path, "recording")
    run_dir = Path(path)
    try:
        if not run_dir.is_dir():
            run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            run_dir.chmod(0o700)
        content = {"schema_version": SCHEMA_VERSION, **manifest}
        with open(run_dir / MANIFEST, "x", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=1) + "\n")
    except FileExistsError as error:
        if not run_dir.is_dir():
            raise GradcheckError(f"{run_dir} is a file. Name a folder for the run.", code="E512") from error
    except OSError as error:
        raise GradcheckError(
            f"cannot write the run folder {run_dir}: {error.strerror or error}. Name a folder that you may write to "
            "and that has space left.",
            code="E512",
        ) from error
    return run_dir


def trace_files(run_dir: SomePlace) -> dict[int, SomePlace]:
    """The trace file of each rank; of several restarts the last. Ranks that an elastic restart went on without are left
    out: what they recorded belongs to no step of the others."""
    found: dict[int, tuple[int, SomePlace]] = {}
    for entry in run_dir.iterdir() if run_dir.is_dir() else ():
        named = rank_and_restart(entry.name)
        if named and entry.is_file():  # a device or a pipe of that name could be read for ever
            rank, restart = named
            if rank not in found or restart > found[rank][0]:
                found[rank] = (restart, cast(SomePlace, entry))
    size = _restarted_world_size(run_dir) if any(restart for restart, _ in found.values()) else None
    return {rank: path for rank, (_, path) in sorted(found.items()) if size is None or rank < size}


def next_restart(run_dir: Path, rank: int, agent_pid: int | None) -> int | None:
    """The number of a restart that torchrun did not count (a change of members): the agent that started the rank's last
    trace starts it again. None where that was somebody else."""
    last = trace_files(run_dir).get(rank)
    if last is None or agent_pid is None:
        return None
    try:
        with open(last, "rb") as file:
            piece = next(iter(iter_frames(file.read(HEADER_BYTES), len(MAGIC))), None)
        header = read_header(last, piece[0]) if piece is not None and isinstance(piece[0], memoryview) else None
    except (OSError, GradcheckError):
        return None
    if header is None or header.agent_pid != agent_pid:
        return None
    named = rank_and_restart(last.name)
    return named[1] + 1 if named else None


def note_restart(run_dir: Path, restart: int, world_size: int) -> None:
    """Write down that the run began anew with this many ranks; the first rank that comes does."""
    with contextlib.suppress(OSError), open(run_dir / f"restart-{restart}.json", "x", encoding="utf-8") as file:
        file.write(json.dumps({"world_size": world_size}) + "\n")


def note_unrecorded(run_dir: Path, rank: int) -> None:
    """Write down that a process trained as this rank and was not recorded, since the rank had been recorded before."""
    content = {"rank": rank, "pid": os.getpid()}
    with (
        contextlib.suppress(OSError),
        open(run_dir / f"unrecorded-{rank:05d}-{os.getpid()}.json", "x", encoding="utf-8") as file,
    ):
        file.write(json.dumps(content) + "\n")


def unrecorded(run_dir: Place) -> list[str]:
    """What was trained under the same command and not recorded, in words."""
    found: dict[int, int] = {}
    for entry in run_dir.iterdir() if run_dir.is_dir() else ():
        match = _UNRECORDED_NAME.fullmatch(entry.name)
        if match:
            found[int(match[1])] = found.get(int(match[1]), 0) + 1
    return [
        f"rank {rank} did not record {plural(count, 'further training')} under the same command: each needs a run "
        "folder of its own"
        for rank, count in sorted(found.items())
    ]


def before_restart(run_dir: Place) -> list[str]:
    """What was recorded before the run began anew and is not read with it, in words."""
    last = {file.name for file in trace_files(run_dir).values()}
    earlier = sorted(entry.name for entry in run_dir.iterdir() if rank_and_restart(entry.name)) if last else []
    earlier = [name for name in earlier if name not in last]
    if not earlier:
        return []
    more = f" and {len(earlier) - 2} more" if len(earlier) > 2 else ""
    return [
        f"the run was started anew by its launcher, and what came last is judged: what was recorded before "
        f"({', '.join(earlier[:2])}{more}) stays in the run folder, and is judged when copied into one of its own"
    ]


def _restarted_world_size(run_dir: Place) -> int | None:
    """How many ranks the run has had since it last began anew; None when nobody wrote it down."""
    notes = {int(match[1]): entry for entry in run_dir.iterdir() if (match := _RESTART_NAME.fullmatch(entry.name))}
    if not notes:
        return None
    try:
        return int(json.loads(notes[max(notes)].read_text(encoding="utf-8"))["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_manifest(run_dir: Place) -> dict[str, Any]:
    """The manifest, {} when there is none.

    Raises:
        GradcheckError: E502 another schema version.
    """
    try:
        manifest = json.loads((run_dir / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        manifest = None
    if not isinstance(manifest, dict):
        manifest = {}
    # Whatever else stands there was not written by gradcheck.
    manifest = {name: value for name, value in manifest.items() if isinstance(value, _MANIFEST.get(name, object))}
    size = _restarted_world_size(run_dir) if run_dir.is_dir() else None
    if size is not None:
        manifest["world_size"] = size
    version = manifest.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise GradcheckError(
            f"{run_dir / MANIFEST} has schema version {version!r}; this gradcheck reads version {SCHEMA_VERSION}. "
            "Judge it with the gradcheck that recorded it, or record the run again.",
            code="E502",
        )
    return manifest


def require_folder(path: Where) -> Place:
    """The run folder itself; a URL is opened.

    Raises:
        GradcheckError: E504 no such folder, E507 it may not be read, E513 a store that cannot be read.
    """
    run_dir = place_of(path)
    try:
        found = run_dir.is_dir()
    except PermissionError as error:
        raise forbidden(error.filename or run_dir) from error
    if found and isinstance(run_dir, Path) and not os.access(run_dir, os.R_OK | os.X_OK):
        raise forbidden(run_dir)
    if not found:
        if isinstance(run_dir, Path) and run_dir.is_file():
            raise _no_folder(run_dir)
        raise GradcheckError(
            f"there is no run folder {run_dir}. Name a folder written by `gradcheck run --out` or "
            "`gradcheck scenario --keep`.",
            code="E504",
        )
    return run_dir


def _no_folder(file: Path) -> GradcheckError:
    """E504 for a file in the place of a run folder."""
    hint = "Name a folder written by `gradcheck run --out` or `gradcheck scenario --keep`."
    if file.suffix == ".trace":
        hint = f"It belongs to the run folder {file.parent}: name that."
    elif file.suffix == ".json":
        hint = f"{hint} `gradcheck report {file}` reads a JSON report."
    return GradcheckError(f"{file} is a file and no run folder. {hint}", code="E504")


def read_run(path: Where, *, ranks: Collection[int] | None = None, samples: bool = True) -> Run:
    """Read a run folder as far as it goes: a missing or damaged rank is named in `problems`, the rest is read.

    Args:
        path: the run folder, or its URL in a store that fsspec opens.
        ranks: those that are read; None takes all.
        samples: False leaves out samples and norms, nearly all of a run: for what shows events.

    Raises:
        GradcheckError: E504 no such folder, E505 a folder without any trace, E502 another schema version.
    """
    run_dir = require_folder(path)
    run = Run(run_dir, read_manifest(run_dir))
    unreadable: dict[int, str] = {}
    for rank, file in trace_files(run_dir).items():
        if ranks is not None and rank not in ranks:
            continue
        try:
            run.ranks[rank] = read_trace(file, samples=samples)
        except GradcheckError as error:
            if error.code == "E502":
                raise
            unreadable[rank] = str(error)
    note_problems(run, unreadable)
    return run


def note_problems(run: Run, unreadable: Mapping[int, str]) -> None:
    """Say in `run.problems` what is missing or damaged. `unreadable`: by rank, why its file gave nothing.

    Raises:
        GradcheckError: E505 no rank gave anything.
    """
    problems = dict(unreadable)
    run.problems = []
    for rank in sorted({*run.ranks, *problems}):
        if rank in problems:
            run.problems.append(problems[rank])
        else:
            trace = run.ranks[rank]
            run.problems += [f"{trace.path.name}: {damage}" for damage in trace.damage]
    if not run.ranks:
        variants = sorted(entry.name for entry in run.path.iterdir() if entry.is_dir() and trace_files(entry))
        hint = "Name a folder written by `gradcheck run --out` or `gradcheck scenario --keep`."
        if variants:
            hint = f"It holds the runs {', '.join(variants)}: name one of them."
        elif run.problems:
            hint = ""  # each says what to do
        found = " ".join(run.problems) or "No rank-*.trace file lies there."
        raise GradcheckError(f"{run.path} holds no readable trace. {found} {hint}".strip(), code="E505")
    for rank in run.missing_ranks:
        if not any(f"rank-{rank:05d}" in problem for problem in run.problems):
            run.problems.append(f"rank {rank}: its trace file is missing")
    _, wrong_axes = run._declared_axes()
    if wrong_axes:
        run.problems.append(wrong_axes)
    if strange := sorted(rank for ranks in run.same_data or () for rank in ranks if rank >= run.world_size):
        there = numbered("rank", range(run.world_size))
        run.problems.append(f"--same-data names {numbered('rank', strange)}, and the run has {there} only")
