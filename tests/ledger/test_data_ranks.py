"""Which ranks evaluate the same tokens: inferred with what it rests on, or declared."""

from __future__ import annotations

import msgspec
import pytest
from random_trainers import global_mean
from simulator import Trainer, World

from gradcheck_dist.axes import parse_same_data
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import Backward, Loss, Reduce, RootValue
from gradcheck_dist.reports import plain
from gradcheck_dist.reports.document import build
from gradcheck_dist.trace.run import Run

PLAIN = Trainer(root=global_mean(), op="sum", accumulation=2, data_ranks=2)


def declared(run: Run, text: str) -> Run:
    for trace in run.ranks.values():
        trace.header = msgspec.structs.replace(trace.header, same_data=parse_same_data(text))
    return run


def test_what_was_inferred_is_printed_with_what_it_rests_on() -> None:
    report = diagnose(World(PLAIN, 1).run())
    assert (report.run.data_ranks, report.verdict) == ([[0], [1]], "clean")
    assert "data ranks 0 | 1 (inferred: no two ranks have" in plain.render(build(report))


def test_without_labels_every_rank_has_its_own_and_that_is_said() -> None:
    run = World(PLAIN, 1).run()
    for trace in run.ranks.values():
        trace.events = [
            msgspec.structs.replace(event, label_hash=None) if isinstance(event, Loss) else event
            for event in trace.events
        ]
    report = diagnose(run)
    assert report.run.data_ranks == [[0], [1]]
    assert "no labels were seen" in report.run.data_ranks_from


@pytest.mark.parametrize(
    ("what", "data_ranks"),
    [("one loss", [[0, 1]]), ("losses", [[0], [1]]), ("copies", [[0], [1]]), ("one", [[0], [1]])],
)
def test_without_labels_ranks_of_one_model_share_tokens_if_they_have_one_loss(
    what: str, data_ranks: list[list[int]]
) -> None:
    """An autoencoder whose latents lie on two ranks was accused of a reduction that it does not need. Ranks that hold
    copies may have the same loss on all ranks' batches, and round numbers are nobody's."""
    world = World(PLAIN, 1)
    run = world.run()
    for rank, trace in run.ranks.items():
        events = [event for event in trace.events if not isinstance(event, Reduce)]
        trace.events = [
            msgspec.structs.replace(event, label_hash=None) if isinstance(event, Loss) else event for event in events
        ]
        value = 1.0 if what == "one" else 0.7 + rank * (what == "losses")
        trace.events += [
            RootValue(seq=event.seq, t_ns=event.t_ns, step=event.step, site=None, value=value,
                      accumulation_step=event.accumulation_step, microbatch=event.microbatch)
            for event in events if isinstance(event, Backward)
        ]  # fmt: skip
        begun = rank if what != "copies" else 0
        trace.params = {
            id: msgspec.structs.replace(param, fingerprint=begun, start=begun) for id, param in trace.params.items()
        }
    report = diagnose(run)
    assert report.run.data_ranks == data_ranks
    assert ("gradients or losses are the same" in report.run.data_ranks_from) == (what == "one loss")


def test_what_was_declared_is_taken() -> None:
    report = diagnose(declared(World(PLAIN, 1).run(), "0,1"))
    assert (report.run.data_ranks, report.run.data_ranks_from) == ([[0, 1]], "declared")
    assert "data ranks" not in plain.render(build(report))
    assert diagnose(declared(World(PLAIN, 1).run(), "0/1")).verdict == "clean"


@pytest.mark.parametrize("text", ["", "0,", "0;1", "0,1/1", "-1", "a"])
def test_what_names_no_ranks_is_an_error_that_says_what_does(text: str) -> None:
    with pytest.raises(GradcheckError) as caught:
        parse_same_data(text)
    assert caught.value.code == "E105"
    assert repr(text) in str(caught.value) and "0,1/2,3" in str(caught.value)
