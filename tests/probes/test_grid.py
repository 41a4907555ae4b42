"""Functions that communicate over several groups of ranks are not followed, and nothing is laid to anybody for that."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.events import EXCHANGES_PROBE, GATHERED, ProbeStatus
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up


@pytest.mark.parametrize("computed", [False, True])
def test_rows_of_a_grid_that_combine_tiles_are_no_models_of_their_own(computed: bool, tmp_path: Path) -> None:
    """Tiles are unlike on all ranks and no reduction is recorded: each row was judged on its own tokens (GS000)."""
    warm_up()
    launch("grid_workers:train", (computed, str(tmp_path / "run")), 4, timeout_s=100)
    run = read_run(tmp_path / "run")
    report = diagnose(run)
    assert report.findings == []
    statuses = [event for event in run.ranks[0].events if isinstance(event, ProbeStatus) and not event.active]
    told = {GATHERED, EXCHANGES_PROBE} - ({GATHERED} if computed else set())
    for step in range(2):
        assert {event.probe for event in statuses if event.step == step} >= told
