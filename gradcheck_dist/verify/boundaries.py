"""Between outermost modules of different ranks: what leaves one stage's input must arrive at the other's output.

Which output became which input is told by their values. Only a multiple is judged: where an output has other uses too,
its gradient is a sum.
"""

from __future__ import annotations

from collections.abc import Callable

from gradcheck_dist.verify.capture import Output, RootCall
from gradcheck_dist.verify.difference import ACCUSE
from gradcheck_dist.verify.exchange import Exchange
from gradcheck_dist.verify.pieces import SAME, fingerprint, same
from gradcheck_dist.verify.result import Result
from gradcheck_dist.verify.targets import Target

Prints = tuple[list[float], list[float]]


def compare_boundaries(calls: list[RootCall], world: Exchange, emit: Callable[[RootCall, Result], None]) -> None:
    """Compare the gradients at both ends of every tensor that went from one rank's module to another's."""
    sent = {f"{place} {output.name}".strip(): prints for place, output, prints in _ends(calls, "outputs")}
    received = {f"{place} {given.name}".strip(): prints for place, given, prints in _ends(calls, "inputs")}
    told = world.gather("boundaries", list(received.values()))
    for key, (values, arrived) in sent.items():
        call = calls[int(key.split(" ")[0])]
        factors = [
            (rank, factor)
            for rank, inputs in zip(world.ranks, told, strict=True)
            for other, left in inputs
            if rank != world.rank and same(values, other) and (factor := multiple(arrived, left)) is not None
        ]
        if not factors:
            continue
        rank, factor = min(factors, key=lambda one: abs(one[1] - 1))
        wrong = abs(factor - 1) > ACCUSE
        emit(
            call,
            Result(
                "",
                Target("boundary", f"rank {rank}", ()),
                "wrong" if wrong else "right",
                observed=arrived[1],
                numerical=arrived[1] / factor,
                error=SAME * arrived[1],
                factor=factor if wrong else None,
                shape="scaled" if wrong else "",
                ranks=tuple(sorted((world.rank, rank))),
            ),
        )


def _ends(calls: list[RootCall], which: str) -> list[tuple[int, Output, Prints]]:
    return [
        (index, end, (fingerprint(end.values), fingerprint(end.gradient)))
        for index, call in enumerate(calls)
        for end in getattr(call, which)
        if end.gradient is not None
    ]


def multiple(arrived: list[float], left: list[float]) -> float | None:
    """The factor by which one gradient is the other, from their fingerprints; None where it is no multiple."""
    if arrived[0] != left[0] or not left[1]:
        return None
    factor = arrived[1] / left[1]
    for sign in (1, -1):
        if abs(arrived[2] - sign * factor * left[2]) <= 10 * SAME * arrived[1]:
            return sign * factor
    return None
