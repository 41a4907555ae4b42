"""Several brackets around one cause."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gradcheck_dist.diagnosis.causes.brackets import merge
from gradcheck_dist.diagnosis.causes.culprit import Culprit
from gradcheck_dist.events import OptimizerStep, Reduce, Site


def at(line: int, seq: int) -> dict[str, Any]:
    return {"seq": seq, "t_ns": 0, "step": 0, "site": Site(file="train.py", line=line, function="main")}


def test_a_bracket_that_has_a_factor_of_its_own_on_each_rank_is_one() -> None:
    """A line divides all gradients by each rank's own count; one of them is reduced once more behind it (tied)."""
    first, tied = (Reduce(impl="all_reduce", op="sum", group=(0, 1), params=0, **at(61, 10 + n)) for n in range(2))
    again = Reduce(impl="all_reduce", op="sum", group=(0, 2), params=0, **at(63, 15))
    end = OptimizerStep(optimizer="AdamW", params=0, **at(64, 18))
    wrong: list[Any] = []
    for rank, factor in enumerate((1.92, 2.087)):
        for event, before in ((first, end), (tied, again)):
            culprit = Culprit("reduce", rank, event, nominal=1.0, factor=factor, unrecorded=True, before=before)
            wrong.append(
                SimpleNamespace(
                    shares=[(culprit, factor)], tolerance=1e-4, gone=False, cell=SimpleNamespace(right=False)
                )
            )
    merge(wrong)
    assert len({one.shares[0][0].identity for one in wrong}) == 1
    assert [one.shares[0][1] for one in wrong] == [1.92, 1.92, 2.087, 2.087]
