"""Parameters that hold nothing, or a part, but while they are used (DeepSpeed's ZeRO 3, FSDP by hand): what they are is
known when their gradient arrives, where this rank's part lies when the optimizer reads, and their gradients in a buffer
in parts of all ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes.parameters import in_use
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

TWICE = ("findings", [("GS101", "1/world_size", [0, 1, 2])])
CLEAN: tuple[str, list[tuple[str, str, list[int]]]] = ("clean", [])
EXPECTED = {
    "right": CLEAN,
    "constants": CLEAN,
    "groups, constants": CLEAN,
    "buckets": CLEAN,
    "clipped": CLEAN,
    "clipped, few tokens": CLEAN,  # some passes have nothing in any row of the embedding that is sampled
    "parts kept": CLEAN,
    "parts kept, clipped": CLEAN,
    "averaged twice": TWICE,
    "parts kept, averaged twice": TWICE,
    "parts kept, clipped, averaged twice": TWICE,
    "groups, constants, averaged twice": TWICE,
    "buckets, averaged twice": TWICE,
    "clipped, averaged twice": TWICE,
    "clipped, few tokens, averaged twice": TWICE,
}
IN_BACKWARD = {"buckets, averaged twice"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("zero3")
    results = launch("zero3_workers:run", (list(EXPECTED), str(folder)), 3, timeout_s=90)
    for of_rank in results:
        assert all(bare == recorded for bare, recorded in of_rank)
    return {variant: diagnose(read_run(folder / variant)) for variant in EXPECTED}


@pytest.mark.parametrize("variant", EXPECTED)
def test_parameters_that_are_whole_only_while_they_are_used_are_judged(
    reports: dict[str, Report], variant: str
) -> None:
    report = reports[variant]
    found = [(finding.code, finding.factor.expression, finding.steps) for finding in report.findings]
    assert (report.verdict, found) == EXPECTED[variant], report.reasons
    assert report.coverage.parameters_total == 7  # no part counts as a parameter of its own
    assert report.coverage.parameters_observed >= 3  # biases and norms have too few elements


@pytest.mark.parametrize("variant", [name for name in EXPECTED if "twice" in name])
def test_a_division_in_front_of_the_sum_is_told_at_its_line(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert finding.first_event is not None and finding.first_event.file is not None
    if variant in IN_BACKWARD:  # nobody watches lines inside of a backward pass
        assert finding.first_event.kind == "backward" and "what is summed over 3 ranks" in finding.explanation
    else:
        assert finding.first_event.file.endswith("zero3_workers.py") and finding.first_event.kind == "grad_write"


def test_a_clip_that_acts_is_told_by_the_norm_that_it_leaves(reports: dict[str, Report]) -> None:
    for variant in (name for name in EXPECTED if "clipped" in name):
        assert "clipped by hand to norm 0.05" in " ".join(reports[variant].coverage.notes), variant


@pytest.mark.parametrize(("number", "size"), [(1, 2), (3, 4)])
def test_a_part_of_many_ranks_is_told_from_that_of_fewer_in_which_it_lies(
    monkeypatch: pytest.MonkeyPatch, number: int, size: int
) -> None:
    monkeypatch.setattr(in_use, "_shares", lambda: [(0, 1), (1, 2), (3, 4)])  # the world's, and a group's of two
    values = torch.arange(1.0, 65.0)
    ones = SimpleNamespace(id=1, param=torch.ones(8), numel=8)
    info = SimpleNamespace(id=0, param=values, numel=64)
    known = in_use.InUse()
    known.keep(info)  # type: ignore[arg-type]
    known.keep(ones)  # type: ignore[arg-type]
    length = 64 // size
    flat = torch.cat([values[number * length : (number + 1) * length], torch.ones(8 // size)])
    assert known.find(flat) == [(info, number * length, 0, length), (ones, number * 8 // size, length, 8 // size)]
    assert known.find(flat) == []  # each is known once
