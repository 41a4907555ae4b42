"""A run in a store of fsspec gives the report that it gives in a local folder, and what cannot be read is told."""

from __future__ import annotations

import pickle
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from column_runs import one_wrong
from fsspec.asyn import AsyncFileSystem
from small_runs import write_run

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.stream import cursor
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import create_run_dir, read_run
from gradcheck_dist.trace.store import LocalFile, RemoteFile, RemotePath, is_url, open_file, place_of


class Faraway(AsyncFileSystem):
    """An object store, as s3fs or gcsfs are: every piece of a file is a request of its own."""

    protocol = "faraway"
    cachable = False
    root = Path()
    requests: list[tuple[str, int | None, int | None]] = []
    threads: set[str] = set()

    def _at(self, path: str) -> Path:
        return self.root / self._strip_protocol(path)

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        if "forbidden" in path:
            raise RuntimeError("NoCredentials: unable to locate credentials")
        status = self._at(path).stat()
        kind = "directory" if self._at(path).is_dir() else "file"
        return {"name": self._strip_protocol(path), "size": status.st_size, "type": kind}

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        return [await self._info(f"{path}/{entry.name}") for entry in self._at(path).iterdir()]

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.requests.append((path, start, end))
        data = self._at(path).read_bytes()
        assert start is None or end is None or start < end <= len(data), "a store refuses what lies behind the end"
        return data[start:end]


@pytest.fixture
def faraway(tmp_path: Path) -> str:
    fsspec.register_implementation("faraway", Faraway, clobber=True)
    Faraway.root, Faraway.requests = tmp_path, []
    return "faraway://run"


@pytest.fixture
def memory() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    fs.makedirs("/bucket/runs/one")
    yield "memory://bucket/runs/one"
    fs.rm("/bucket", recursive=True)


def put(run: Path, url: str) -> str:
    fs, path = fsspec.url_to_fs(url)
    fs.makedirs(path, exist_ok=True)
    for file in run.iterdir():
        fs.pipe_file(f"{path}/{file.name}", file.read_bytes())
    return url


def as_json(place: Path | str, **options: Any) -> bytes:
    return msgspec.json.encode(diagnose_run(place, **options))


@pytest.mark.parametrize("columns", [False, True])
def test_a_run_in_a_store_is_judged_as_in_a_folder(columns: bool, tmp_path: Path, memory: str) -> None:
    run = one_wrong(tmp_path / "run", samples_of=2) if columns else write_run(tmp_path / "run", flush_steps=True)
    (run / "manifest.json").write_text('{"schema_version": 1, "id": "same"}')
    put(run, memory)
    assert as_json(memory) == as_json(run)
    assert as_json(memory, first=True) == as_json(run, first=True)
    assert len(read_run(memory).ranks) == 2


def test_damage_and_missing_ranks_are_told_as_in_a_folder(tmp_path: Path, memory: str) -> None:
    run = write_run(tmp_path / "one", ranks=3, steps=3, flush_steps=True)
    (run / "rank-00001.trace").unlink()
    last = run / "rank-00002.trace"
    last.write_bytes(last.read_bytes()[:-300])
    (run / "unrecorded-00000-17.json").write_text("{}")
    put(run, memory)
    report = diagnose_run(memory)
    assert msgspec.json.encode(report) == as_json(run)
    assert len(report.coverage.problems) >= 3


@pytest.mark.parametrize("inside", ["", "runs/mine"])
def test_a_run_in_an_archive(inside: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=4, flush_steps=True)
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in run.iterdir():
            archive.write(file, f"{inside}/{file.name}".lstrip("/"))
    assert as_json(f"zip://{inside}::{tmp_path}/all.zip") == as_json(run)


def test_an_object_store_is_asked_for_pieces_ahead_of_time(
    tmp_path: Path, faraway: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", steps=30, flush_steps=True)
    monkeypatch.setattr(cursor, "HEADER_BYTES", 1000)
    monkeypatch.setattr(cursor, "MAX_READ_BYTES", 3000)
    monkeypatch.setattr(cursor, "MIN_READ_BYTES", 1)
    assert as_json(faraway) == as_json(run)
    asked = [(path, start, end) for path, start, end in Faraway.requests if path.endswith(".trace")]
    assert len(asked) == len(set(asked)) > 20
    for path in {path for path, _, _ in asked}:
        pieces = sorted((start or 0, end or 0) for of, start, end in asked if of == path)
        assert [start for start, _ in pieces[1:]] == [end for _, end in pieces[:-1]], "each byte is asked for once"


def test_a_piece_of_an_object_is_read_wherever_it_lies(tmp_path: Path, faraway: str) -> None:
    (tmp_path / "run").mkdir()
    data = bytes(range(256)) * 40
    (tmp_path / "run" / "a").write_bytes(data)
    place = place_of(f"{faraway}/a")
    assert isinstance(place, RemotePath)
    for file in (RemoteFile(place), LocalFile(tmp_path / "run" / "a")):
        for offset, count in ((0, 100), (90, 1000), (1090, 50), (20, 7), (10_000, 9000), (len(data), 10), (500, None)):
            assert file.read(offset, count) == data[offset:][:count]


def test_a_local_url_is_a_path_like_others(tmp_path: Path) -> None:
    assert place_of(f"file://{tmp_path}") == tmp_path
    assert isinstance(open_file(place_of(f"file://{tmp_path}/x")), LocalFile)
    assert not is_url("runs/mine") and not is_url("C:\\runs") and is_url("simplecache::s3://bucket/run")


def test_a_place_travels_and_keeps_its_name(memory: str) -> None:
    place = place_of(memory)
    assert isinstance(place, RemotePath)
    child = place / "rank-00000.trace"
    assert (place.name, child.name, str(child)) == ("one", "rank-00000.trace", f"{memory}/rank-00000.trace")
    assert pickle.loads(pickle.dumps(child)) == child
    chained = RemotePath(None, "", "zip://::s3://bucket/run.zip") / "a"
    assert str(chained) == "zip://a::s3://bucket/run.zip"


def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(GradcheckError, match="pip install 'gradcheck-dist\\[remote\\]'") as error:
        place_of("ftp://me:hunter2@somewhere/run")
    assert error.value.code == "E513"
    assert "hunter2" not in str(error.value) and "ftp://me:***@somewhere/run" in str(error.value)
    assert "hunter2" not in str(RemotePath(None, "run", "ftp://me:hunter2@somewhere/run") / "a")


def test_what_a_store_says_is_told(faraway: str) -> None:
    with pytest.raises(GradcheckError, match="unable to locate credentials") as error:
        diagnose_run("faraway://forbidden")
    assert error.value.code == "E513"
    with pytest.raises(GradcheckError, match="there is no run folder faraway://nothing") as missing:
        diagnose_run("faraway://nothing")
    assert missing.value.code == "E504"


def test_unknown_protocols_name_the_known_ones() -> None:
    with pytest.raises(GradcheckError, match=r"Protocol not known: s4.*\bs3\b") as error:
        place_of("s4://bucket/run")
    assert error.value.code == "E513"


def test_nothing_is_recorded_into_a_store() -> None:
    with pytest.raises(GradcheckError, match="recording needs a local folder") as error:
        create_run_dir("s3://bucket/run", {})
    assert error.value.code == "E512"


def test_a_file_in_the_place_of_a_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(GradcheckError, match=r"run is a file\. Name a folder") as error:
        create_run_dir(tmp_path / "run", {})
    assert error.value.code == "E512"
    assert (tmp_path / "run").read_text() == "mine"


def test_local_runs_never_load_fsspec(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    loaded: list[bool] = []

    def judge() -> None:
        known = sys.modules.pop("fsspec", None)
        try:
            diagnose_run(run)
            loaded.append("fsspec" in sys.modules)
        finally:
            if known is not None:
                sys.modules["fsspec"] = known

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join()
    assert loaded == [False]
