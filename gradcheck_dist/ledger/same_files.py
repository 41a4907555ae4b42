"""One name for one source file: machines may keep the same program in folders of other names.

What the engine lays to a line it compares across ranks by file and line. A file that one rank has never heard of is
taken to be another rank's where the name without its folders is the same, and most of its recorded places are.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import PurePath

import msgspec

from gradcheck_dist.events import Event, Site

Places = set[tuple[int, str]]


def name_alike(events: dict[int, list[Event]]) -> None:
    """Let the events of all ranks say where they were by the names of the lowest rank that was there."""
    if not _have_namesakes(events):
        return
    known: dict[str, Places] = defaultdict(set)
    for rank in sorted(events):
        mine = _places(events[rank])
        renamed: dict[str, str] = {}
        for file, places in mine.items():
            twin = _twin(file, places, {other: known[other] for other in known if other not in mine})
            if file not in known and twin is not None:
                renamed[file] = twin
            known[renamed.get(file, file)] |= places
        if renamed:
            events[rank] = [_moved(event, renamed) for event in events[rank]]


def _have_namesakes(events: dict[int, list[Event]]) -> bool:
    files = {event.site.file for of_rank in events.values() for event in of_rank if event.site is not None}
    lines = {event.site.called_from for of_rank in events.values() for event in of_rank if event.site is not None}
    files |= {line.rpartition(":")[0] for line in lines if line is not None}
    return len({PurePath(file).name for file in files}) < len(files)


def _places(events: list[Event]) -> dict[str, Places]:
    """By file: the lines and functions in which this rank's events were."""
    found: dict[str, Places] = defaultdict(set)
    for site in {event.site for event in events if event.site is not None}:
        found[site.file].add((site.line, site.function))
        if site.called_from is not None:
            file, _, line = site.called_from.rpartition(":")
            found[file].add((int(line) if line.isdecimal() else 0, ""))
    return found


def _twin(file: str, places: Places, others: dict[str, Places]) -> str | None:
    """The file of other ranks that this one is; None where there is none, or more than one."""
    alike = [
        (_common_tail(file, other), other)
        for other, theirs in others.items()
        if _common_tail(file, other) and 2 * len(places & theirs) >= len(places)
    ]
    longest = max((length for length, _ in alike), default=0)
    best = [other for length, other in alike if length == longest]
    return best[0] if len(best) == 1 else None


def _common_tail(one: str, other: str) -> int:
    """How many of the last components of two paths are the same."""
    length = 0
    for mine, theirs in zip(reversed(PurePath(one).parts), reversed(PurePath(other).parts), strict=False):
        if mine != theirs:
            break
        length += 1
    return length


def _moved(event: Event, renamed: dict[str, str]) -> Event:
    site = event.site
    if site is None:
        return event
    called_from = site.called_from
    if called_from is not None:
        file, _, line = called_from.rpartition(":")
        called_from = f"{renamed.get(file, file)}:{line}"
    moved = Site(renamed.get(site.file, site.file), site.line, site.function, called_from)
    return msgspec.structs.replace(event, site=moved) if moved != site else event
