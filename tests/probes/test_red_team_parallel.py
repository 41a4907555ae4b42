"""Hybrid-parallel trainers as people write them: judged as an expert would, and left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

EXPECTED = {
    ("tensor", "ddp", 4): ("clean", []),
    ("tensor", "fsdp, averaged twice", 4): ("findings", ["GS101"]),
    ("vocab", "by hand", 4): ("clean", []),
    ("experts", "right", 4): ("clean", []),
    ("experts", "never reduced", 4): ("findings", ["GS103"]),
    ("experts", "reduced over the world", 4): ("findings", ["GS105"]),
    ("experts", "fsdp, divided by all", 4): ("clean", []),
    ("experts", "fsdp, divided by its own ranks", 4): ("findings", ["GS104"]),
    ("shared experts", "ddp", 4): ("clean", []),
    ("shared experts", "ddp, averaged over its own ranks", 4): ("findings", ["GS000"]),
    ("shared experts", "by hand", 4): ("clean", []),
    ("shared experts", "by hand, copies apart", 4): ("findings", ["GS103"]),
    ("shared experts", "by hand, one seed", 4): ("undetermined", []),
    ("shared experts", "one loss, one seed", 4): ("undetermined", []),
    ("pipeline", "right", 2): ("clean", []),
    ("pipeline", "clipped by the norm of both", 2): ("clean", []),
    ("pipeline", "clipped, each stage alone", 2): ("findings", ["GS601"]),
    ("pipeline", "loss times pp", 2): ("findings", ["GS303"]),
}


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


@pytest.mark.parametrize(("kind", "variant", "world_size"), EXPECTED)
def test_a_hybrid_trainer_is_judged_as_an_expert_would(
    kind: str, variant: str, world_size: int, tmp_path: Path
) -> None:
    recorded = launch("parallel_workers:train", (kind, variant, str(tmp_path / "run")), world_size, timeout_s=60)
    if variant == "right":
        assert recorded == launch("parallel_workers:train", (kind, variant, None), world_size, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    codes = [finding.code for finding in report.findings]
    assert (report.verdict, codes) == EXPECTED[kind, variant, world_size]
    assert report.coverage.unidentifiable == []


def test_groups_of_a_mesh_are_recorded_by_name(tmp_path: Path) -> None:
    launch("parallel_workers:train", ("tensor", "fsdp", str(tmp_path / "run")), 4, timeout_s=60)
    run = read_run(tmp_path / "run")
    assert [set(trace.named_groups) for trace in run.ranks.values()] == [
        {("mesh_dp", dp), ("mesh_tp", tp)} for tp in ((0, 1), (2, 3)) for dp in ((0, 2), (1, 3))
    ]
    axes = diagnose(run).run.axes
    assert (axes["dp_shard"], axes["tp"]) == (2, 2)
