"""Numbers in sentences, as people write them."""

from __future__ import annotations

from collections.abc import Iterable

MAX_RUNS = 8
"""Of numbers, that are told one by one."""
_HISSING = ("s", "x", "ch", "sh")


def plural(count: int, noun: str) -> str:
    """1 parameter, 2 parameters; 1 pass, 2 passes."""
    return f"{count} {noun if count == 1 else _several(noun)}"


def numbered(noun: str, numbers: Iterable[int]) -> str:
    """One or several by their numbers: "rank 2", "ranks 0 and 1", "steps 0 to 9, 12 and 14"; of many runs only where
    they are, and how many: "ranks 0 to 30 (16 of them)"; of none "no ranks"."""
    known = sorted(set(numbers))
    if not known:
        return f"no {_several(noun)}"
    runs = _runs(known)
    if len(runs) > MAX_RUNS:
        return f"{_several(noun)} {known[0]} to {known[-1]} ({len(known)} of them)"
    *others, last = [one for low, high in runs for one in _of_run(low, high)]
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{noun if len(known) == 1 else _several(noun)} {listed}"


def sentence(words: str) -> str:
    """With a capital, unless a name of the program's begins it: mark_loss, emb.weight."""
    first = words.partition(" ")[0].rstrip(",:;.")
    return words if any(not (sign.isalpha() or sign in "-'") for sign in first) else f"{words[:1].upper()}{words[1:]}"


def _several(noun: str) -> str:
    return f"{noun}es" if noun.endswith(_HISSING) else f"{noun}s"


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of ascending numbers that follow one another."""
    known = set(numbers)
    firsts = [one for one in numbers if one - 1 not in known]
    lasts = [one for one in numbers if one + 1 not in known]
    return list(zip(firsts, lasts, strict=True))


def _of_run(low: int, high: int) -> list[str]:
    return [f"{low} to {high}"] if high > low + 1 else [str(one) for one in range(low, high + 1)]
