"""What attach() is asked for, checked before anything is put in place: a wrong name is not to cost a whole run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gradcheck_dist.axes import AXIS_NAMES, Axes
from gradcheck_dist.errors import GradcheckError, unknown_value


def mesh_degrees(axes: Axes | Mapping[str, int] | None) -> dict[str, int] | None:
    """Degrees by axis; an axis that is not named has degree 1.

    Raises:
        GradcheckError: E302 no mapping, or an unknown axis; E101 and E102 as for Axes.
    """
    if axes is None or isinstance(axes, Axes):
        return axes.as_dict() if axes is not None else None
    if not isinstance(axes, Mapping):
        raise _illegal("axes", axes, "Axes, or a mapping of axes to degrees", 'axes={"dp_replicate": 2}')
    for name in axes:
        if name not in AXIS_NAMES:
            raise unknown_value("axis", name, AXIS_NAMES, code="E302", hint="Name those whose degree is above 1.")
    return Axes(**axes).as_dict()


def rank_sets(same_data: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    """Sets of ranks that evaluate the same tokens.

    Raises:
        GradcheckError: E302 these are no sets of ranks, or a rank is in two of them.
    """
    if same_data is None:
        return None
    sets = [_several(ranks) for ranks in _several(same_data)]
    named = [rank for ranks in sets for rank in ranks]
    if not sets or not all(sets) or not all(_is_count(rank) for rank in named) or len(set(named)) < len(named):
        raise _illegal("same_data", same_data, "sets of ranks, each rank in one", "same_data=[[0, 1], [2, 3]]")
    return tuple(tuple(sorted(ranks)) for ranks in sets)


def check_names(option: str, given: Sequence[str], legal: Collection[str] | None = None) -> tuple[str, ...]:
    """The names of a list.

    Args:
        legal: what may stand there; None takes any name.

    Raises:
        GradcheckError: E302 no list of names, or one that is not legal.
    """
    names = _several(given)
    if not all(isinstance(name, str) for name in names) or (given and not names):
        raise _illegal(option, given, "a list of names", f'{option}=["..."]')
    for name in names:
        if legal is not None and name not in legal:
            raise unknown_value(option, name, legal, code="E302")
    return tuple(names)


def check_count(option: str, given: int, *, least: int) -> int:
    """The number.

    Raises:
        GradcheckError: E302 no integer, or less than `least`.
    """
    if not _is_count(given) or given < least:
        raise _illegal(option, given, f"integers from {least} up", f"{option}={least}")
    return given


def _several(given: object) -> Collection[Any]:
    return given if isinstance(given, Collection) and not isinstance(given, str | bytes) else ()


def _is_count(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= 0


def _illegal(option: str, given: object, legal: str, example: str) -> GradcheckError:
    return GradcheckError(f"{option} is {given!r}; legal values are {legal}. Try {example}.", code="E302")
