"""Going from step to step while others are still judged."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from driven_screens import drive
from still_source import screen_text
from textual.pilot import Pilot
from tiny_runs import write_run

from gradcheck_dist.diagnosis.steps.step_verdict import StepVerdict
from gradcheck_dist.tui import judge
from gradcheck_dist.tui.app import WatchApp
from gradcheck_dist.tui.judge import Judge
from gradcheck_dist.tui.live_run import LiveRun
from gradcheck_dist.tui.snapshot import Snapshot


def test_every_key_counts_from_the_step_that_the_last_one_asked_for(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("right_square_bracket", "right_square_bracket")
        await pilot.pause()
        assert app.source.asked_step == [1, 2]  # type: ignore[attr-defined]
        assert "step 0 → 2 (last: 2)" in screen_text(app)
        await pilot.press("right_square_bracket", "left_square_bracket")
        assert app.source.asked_step == [1, 2, 1]  # type: ignore[attr-defined]
        app.snapshot = replace(snapshot, step=replace(snapshot.step, verdict=_moved(snapshot, 1)))  # type: ignore[type-var]
        await pilot.pause()
        assert app.asked_step is None and "→" not in screen_text(app).splitlines()[1]

    drive(snapshot, steps)


def _moved(snapshot: Snapshot, step: int) -> StepVerdict:
    assert snapshot.step is not None
    verdict = snapshot.step.verdict
    return replace(verdict, context=replace(verdict.context, step=step))


def test_a_step_that_is_asked_for_is_shown_before_all_others_are_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LiveRun(write_run(tmp_path / "run", steps=9))
    while run.poll():
        pass
    judging = Judge(run, lambda: None)

    def until_idle(wanted: int | None) -> None:
        judging.look(wanted)
        while judging._doing is not None:
            time.sleep(0.001)

    until_idle(None)
    assert judging.now.step is not None and judging.now.step.step == 0
    seen: list[tuple[int, int]] = []
    original = judge.judge_step

    def watched(run: Any, step: int, *rest: Any) -> StepVerdict:
        assert judging.now.step is not None
        seen.append((step, judging.now.step.step))
        if step == 3:
            judging.look(5)
        return original(run, step, *rest)

    monkeypatch.setattr(judge, "judge_step", watched)
    until_idle(None)
    assert (8, 5) in seen, "the last step is judged when the one that was asked for is on the screen"
    assert judging.now.step.step == 5


def test_of_many_ranks_one_step_stands_first() -> None:
    few, many = (Judge(SimpleNamespace(num_files=ranks), lambda: None) for ranks in (2, 64))  # type: ignore[arg-type]
    assert (few._limit(False, True), many._limit(False, True)) == (4, 1)
