"""Machines that keep the program in folders of other names: one cause stays one finding, at one line."""

from __future__ import annotations

import msgspec
import pytest
from known_families import FAMILIES, make_case
from simulator import World

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.events import Loss, Site
from gradcheck_dist.ledger.same_files import name_alike
from gradcheck_dist.trace.run import Run


def elsewhere(run: Run) -> Run:
    """The same run, each rank's program in a folder of its own."""
    for rank, trace in run.ranks.items():
        for index, event in enumerate(trace.events):
            if event.site is not None:
                site = msgspec.structs.replace(event.site, file=f"/jobs/{rank}/src/{event.site.file.lstrip('/')}")
                trace.events[index] = msgspec.structs.replace(event, site=site)
    return run


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_found_does_not_depend_on_the_folder_of_each_machine(family: str) -> None:
    case = make_case(family, 11)
    here, there = (diagnose(run) for run in (World(case.trainer).run(), elsewhere(World(case.trainer).run())))
    assert there.verdict == here.verdict
    assert [(f.code, f.pattern, f.factor.exact) for f in there.findings] == [
        (f.code, f.pattern, f.factor.exact) for f in here.findings
    ]


def loss(file: str, line: int = 3, called_from: str | None = None) -> Loss:
    site = Site(file, line, "main", called_from)
    return Loss(seq=line, t_ns=0, step=0, site=site, loss_id=line, num_tokens=1, op="cross_entropy", reduction="mean")


def files(*ranks: list[Loss]) -> list[list[str]]:
    events = {rank: list(of_rank) for rank, of_rank in enumerate(ranks)}
    name_alike(events)  # type: ignore[arg-type]
    return [[event.site.file for event in of_rank if event.site] for of_rank in events.values()]


def test_the_file_with_the_longest_common_end_is_the_same() -> None:
    known = [loss("/a/losses/base.py"), loss("/a/models/base.py")]
    assert files(known, [loss("/b/models/base.py")]) == [
        ["/a/losses/base.py", "/a/models/base.py"],
        ["/a/models/base.py"],
    ]


def test_files_stay_what_they_are_where_it_cannot_be_told() -> None:
    one, other = loss("/a/train.py"), loss("/b/train.py")
    assert files([one, other], [one]) == [["/a/train.py", "/b/train.py"], ["/a/train.py"]]  # one rank runs both
    assert files([one], [one, other]) == [["/a/train.py"], ["/a/train.py", "/b/train.py"]]
    assert files([one], [loss("/b/train.py", line=9)]) == [["/a/train.py"], ["/b/train.py"]]  # no line in common
    assert files([one], [loss("/b/other.py")]) == [["/a/train.py"], ["/b/other.py"]]
    two = [loss("/a/x/train.py"), loss("/a/y/train.py")]
    assert files(two, [loss("/b/z/train.py")])[1] == ["/b/z/train.py"]


def test_the_line_that_called_a_library_is_found_too() -> None:
    events = {
        0: [loss("/lib/trainer.py", called_from="/a/train.py:7")],
        1: [loss("/lib/trainer.py", called_from="/b/train.py:7")],
    }
    name_alike(events)  # type: ignore[arg-type]
    (event,) = events[1]
    assert event.site is not None
    assert event.site.called_from == "/a/train.py:7"
