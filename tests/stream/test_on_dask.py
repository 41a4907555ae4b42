"""A Dask cluster gives the report of this process, byte for byte: `make test-dask`, since processes take time."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import msgspec
import pytest
from column_runs import one_wrong
from recorded_runs import RUNS
from small_runs import write_run

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.stream import on_dask as module
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.stream.on_dask import DaskWorkers, on_dask
from gradcheck_dist.stream.placed import PlacedStep

pytestmark = [pytest.mark.dask, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def workers() -> Iterator[DaskWorkers]:
    """Two worker processes of one thread."""
    pytest.importorskip("distributed")
    with on_dask("local", 2) as found:
        yield found


def as_json(run: Path | str, by: DaskWorkers | None = None, *, first: bool = False) -> bytes:
    return msgspec.json.encode(diagnose_run(run, workers=by, first=first))


@pytest.mark.parametrize("kind", RUNS)
def test_a_cluster_gives_the_same_report(kind: str, workers: DaskWorkers, tmp_path: Path) -> None:
    run = RUNS[kind](tmp_path / "run")
    for first in (False, True):
        assert as_json(run, workers, first=first) == as_json(run, first=first), first


def test_a_long_run_is_judged_in_many_pieces(
    workers: DaskWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", ranks=4, steps=60, flush_steps=True)
    sizes: list[int] = []
    submit = workers._client.submit

    def counted(function: object, *arguments: object, **options: object) -> object:
        sizes.extend(len(one) for one in arguments if isinstance(one, list) and isinstance(one[0], PlacedStep))
        return submit(function, *arguments, **options)

    monkeypatch.setattr(workers._client, "submit", counted)
    assert as_json(run, workers) == as_json(run)
    assert sizes[:5] == [1, 2, 4, 8, 16] and sum(sizes) == 60


@pytest.mark.parametrize("columns", [False, True])
def test_a_store_is_read_by_the_workers(columns: bool, workers: DaskWorkers, tmp_path: Path) -> None:
    run = one_wrong(tmp_path / "run") if columns else write_run(tmp_path / "run", steps=5, flush_steps=True)
    (run / "manifest.json").write_text('{"schema_version": 1, "id": "same"}')
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        for file in run.iterdir():
            archive.write(file, file.name)
    assert as_json(f"zip://::{tmp_path}/run.zip", workers) == as_json(run)


def num_streams() -> int:
    return len(sys.modules["gradcheck_dist.stream.on_dask"]._streams)


def test_nothing_is_left_on_the_workers(workers: DaskWorkers, tmp_path: Path) -> None:
    as_json(write_run(tmp_path / "run", steps=3), workers)
    as_json(one_wrong(tmp_path / "columns"), workers, first=True)
    deadline = time.monotonic() + 20
    while left := sum(workers._client.run(num_streams).values()):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)  # what was under way when the others were cancelled


def test_a_lost_reader_begins_again() -> None:
    made: list[int] = []

    def make() -> Iterator[int]:
        made.append(1)
        return iter(range(5))

    for token, asked in (("a", [0, 1, 2, 2, 1, 5]), ("b", [3])):
        assert [module._next(token, 0, number, make) for number in asked] == [n if n < 5 else None for n in asked]
        asyncio.run(module._forget(token))
        assert module._next(token, 0, 0, make) is None, "what comes after the end starts nothing"
    assert len(made) == 4
    assert not module._streams


def test_a_worker_that_dies_is_replaced(workers: DaskWorkers, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=4, steps=40, flush_steps=True)
    right = as_json(run)
    first = next(iter(workers._client.nthreads()))

    def kill() -> None:
        time.sleep(0.3)
        workers._client.run(os._exit, 1, workers=[first], on_error="ignore")

    killer = threading.Thread(target=kill)
    killer.start()
    assert as_json(run, workers) == right
    killer.join()
    workers._client.wait_for_workers(2, timeout=60)


def test_a_run_that_workers_cannot_see_is_told(workers: DaskWorkers, tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")  # each process has its own
    fs.pipe_file("/test-dask/manifest.json", b"{}")
    for file in write_run(tmp_path / "run").glob("*.trace"):
        fs.pipe_file(f"/test-dask/{file.name}", file.read_bytes())
    with pytest.raises(GradcheckError, match=r"Dask worker tcp://.* cannot judge memory://test-dask") as error:
        as_json("memory://test-dask", workers)
    assert error.value.code == "E415"
    fs.rm("/test-dask", recursive=True)


def test_what_a_worker_raises_arrives(workers: DaskWorkers, tmp_path: Path) -> None:
    with pytest.raises(GradcheckError, match="no run folder") as error:
        as_json(tmp_path / "none", workers)
    assert error.value.code == "E504"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nowhere", "no-such-file.json"])
def test_a_scheduler_that_does_not_answer_is_told(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr(module, "CONNECT_S", 1)
    with pytest.raises(GradcheckError, match=re.escape(f"answers at '{address}'")) as error, on_dask(address, 1):
        pass
    assert error.value.code == "E413"
