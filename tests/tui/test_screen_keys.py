"""The keys of each screen: every one does what the help says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from driven_screens import drive
from still_source import first_snapshot, screen_text
from textual.pilot import Pilot
from tiny_runs import write_run, write_unsummed

from gradcheck_dist.events import Reduce
from gradcheck_dist.tui.app import WatchApp
from gradcheck_dist.tui.lanes import LETTERS, OTHER
from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.tui.widgets.heatmap import Heatmap
from gradcheck_dist.tui.widgets.param_rows import ParamRows
from gradcheck_dist.tui.widgets.stops_list import StopsList
from gradcheck_dist.tui.widgets.timeline_chart import COLOURS, TimelineChart


def test_weights_move_slice_search_and_open(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        heatmap = app.screen.query_one(Heatmap)
        assert "▲ 4     ▲ 2     = 1" in screen_text(app).replace("[", " ").replace("]", " ")
        await pilot.press("right", "down")
        assert (heatmap.cursor, heatmap.column) == (1, 1)
        assert "ratio  2  WRONG" in screen_text(app)
        await pilot.press("n")
        assert not heatmap.numbers
        assert "▲ 4" not in screen_text(app).splitlines()[4]
        await pilot.press("n", "c")
        await pilot.pause()
        assert heatmap.part is not None
        assert heatmap.part.column_labels == ("k0", "k1", "k2")
        labels = []
        for _ in range(5):
            await pilot.press("r")
            await pilot.pause()
            labels.append(heatmap.part.row_labels[0])
            assert "accumulation steps →" in screen_text(app)
        assert labels == [
            "all parameters",
            "rank 0",
            "embedding.weight",
            "embedding.weight  rank 0",
            "all parameters  rank 0",
        ]
        await pilot.press("slash", *"rank 1", "enter")
        await pilot.pause()
        assert heatmap.part.row_labels == ("all parameters  rank 1",)
        await pilot.press("slash", "escape")
        await pilot.pause()
        assert len(heatmap.part.row_labels) == 2
        await pilot.press("enter")
        await pilot.pause()
        assert app.current_mode == "event"
        await pilot.press("d", "escape")
        await pilot.pause()
        assert app.current_mode == "weights"

    drive(snapshot, steps, mode="weights")


@pytest.mark.parametrize("width", [80, 60])
def test_the_map_begins_at_its_left_where_the_worst_cell_is_in_sight(tmp_path: Path, width: int) -> None:
    """It was drawn from the cursor's column on, as before it had a size."""
    late = first_snapshot(write_run(tmp_path / "late", fault="unreduced"))

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        heatmap, lines = app.screen.query_one(Heatmap), screen_text(app).splitlines()
        assert heatmap.column == 3
        assert lines[2].startswith("contributions →") and lines[2].count("d0") == 1
        if width == 80:
            assert lines[3].split("↓")[1].split() == ["k0", "k1", "k2"] * 2
        else:
            assert lines[2].endswith("2 more »") and lines[3].split("↓")[1].split() == ["k0", "k1", "k2", "k0"]
            return
        # What is said of a merged cell fits, and the scale below it stays.
        await pilot.press("r", "c")
        await pilot.pause()
        assert "worst of 4" in screen_text(app) and " 1/8 " in screen_text(app)

    drive(late, steps, mode="weights", size=(width, 24))


def test_a_weight_that_differs_is_called_wrong_only_where_the_run_has_a_finding(snapshot: Snapshot) -> None:
    assert snapshot.report is not None
    unclear = msgspec.structs.replace(snapshot.report, verdict="undetermined", findings=[], reasons=["a clip by hand"])
    for shown, words, others in (
        (snapshot, " WRONG", " differs"),
        (replace(snapshot, report=unclear), " differs", " WRONG"),
    ):

        async def steps(app: WatchApp, _pilot: Pilot[None], words: str = words, others: str = others) -> None:
            text = screen_text(app)
            assert words in text
            assert others not in text

        drive(shown, steps, mode="weights")


def test_why_a_run_could_not_be_judged_is_told_whole_on_explain(snapshot: Snapshot) -> None:
    assert snapshot.report is not None and snapshot.document is not None
    unclear = msgspec.structs.replace(snapshot.report, verdict="undetermined", findings=[])
    why = "A reason of many words. " * 60 + "Its end."
    words = replace(snapshot.document, verdict="undetermined", why=why, where="", next="Record again.")
    open_ = replace(snapshot, report=unclear, document=words)

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "cut here: 7 shows all" in screen_text(app)
        await pilot.press("7")
        await pilot.pause()
        text = screen_text(app)
        assert "Record again." in text and "coverage" in text
        await pilot.press("tab", "end")
        await pilot.pause(0.5)
        assert "Its end." in screen_text(app)

    drive(open_, steps, size=(100, 30))


def test_a_click_on_a_cell_selects_it(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        heatmap = app.screen.query_one(Heatmap)
        await pilot.click(Heatmap, offset=(heatmap.label_width + 2 * heatmap.cell_width + 1, 3))
        assert (heatmap.cursor, heatmap.column) == (1, 2)

    drive(snapshot, steps, mode="weights")


def test_every_event_on_the_timeline_has_a_colour() -> None:
    assert set(COLOURS) == {*LETTERS.values(), OTHER}


def test_the_timeline_moves_zooms_pans_and_jumps(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        chart = app.screen.query_one(TimelineChart)
        assert chart.mark is not None
        await pilot.press("home", "left", "left", "left", "left", "left", "left", "left")
        first = chart.mark
        await pilot.press("right")
        assert chart.mark is not first
        await pilot.press("down")
        assert chart.mark.rank == 1
        width = chart._per_cell
        await pilot.press("plus")
        assert chart._per_cell < width
        await pilot.press("minus")
        assert chart._per_cell == pytest.approx(width)
        await pilot.press("plus", "plus", "l")
        assert chart._offset > 0
        await pilot.press("h", "0")
        assert chart._offset == 0
        await pilot.press("o")
        assert "event number" in screen_text(app)
        await pilot.press("j")
        await pilot.pause()
        assert "FIRST DIVERGENCE" in screen_text(app)
        await pilot.press("enter")
        await pilot.pause()
        assert app.current_mode == "event"

    drive(snapshot, steps, mode="timeline")


def test_stepping_through_events_replays_the_ledger(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        stops = app.screen.query_one(StopsList)
        await pilot.press("home")
        await pilot.pause()
        assert "d0 k1 m0  not yet" in screen_text(app)
        ratios = [stops.stops[stops.cursor].after]
        for _ in range(stops.count - 1):
            await pilot.press("right")
            await pilot.pause()
            ratios.append(stops.stops[stops.cursor].after)
        assert [round(ratio) for ratio in ratios] == sorted(round(ratio) for ratio in ratios)
        assert (round(ratios[0]), round(ratios[-1])) == (1, 4)
        assert "not yet" not in screen_text(app)
        await pilot.press("left")
        await pilot.pause()
        assert stops.cursor == stops.count - 2
        await pilot.press("j")
        await pilot.pause()
        assert "FIRST DIVERGENCE" in screen_text(app)

    drive(snapshot, steps, mode="event", size=(120, 40))


def test_the_event_screen_walks_over_contributions_parameters_and_holders(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        before = app.selection
        await pilot.press("k")
        assert app.selection.key != before.key
        await pilot.press("u")
        assert app.selection.param != before.param
        await pilot.press("h")
        assert app.selection.holder != before.holder

    drive(snapshot, steps, mode="event")


def test_the_jump_of_a_path_without_an_accused_event_says_what_it_finds_there(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        stops = app.screen.query_one(StopsList)
        told = {}
        for _ in range(3):
            await pilot.press("home", "j")
            await pilot.pause()
            assert app.selection.key is not None
            of_it = [one.message for one in app._notifications]
            told[app.selection.key[1]] = (of_it[-1:], stops.stops[stops.cursor].event)
            app.clear_notifications()
            await pilot.press("k")
        for k in (0, 1):
            words, event = told[k]
            assert words == ["No event on this path is accused. Here its ratio changes for the last time."]
            assert isinstance(event, Reduce)
            assert event.accumulation_step == 2
        assert told[2][0] == ["This contribution arrives right: there is no divergence on its path."]

    assert snapshot.step is not None
    verdict = replace(snapshot.step.verdict, findings=[])
    drive(replace(snapshot, step=replace(snapshot.step, verdict=verdict)), steps, mode="event")


def test_a_key_that_changes_nothing_says_why(tmp_path: Path) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        for key, words in (
            ("k", "No other contribution reaches this parameter here."),
            ("u", "Of no other parameter on rank 0 a weight is known."),
            ("h", "No other rank than 0 holds this parameter."),
        ):
            await pilot.press(key)
            assert [one.message for one in app._notifications][-1] == words
        await pilot.press("7", "n")
        assert [one.message for one in app._notifications][-1] == "There is no other finding."

    run = write_run(tmp_path / "run", world=1, accumulation=1, names=("head.weight",), fault=None)
    drive(first_snapshot(run), steps, mode="event")


def test_summands_are_one_weight_of_their_parameter_and_stand_apart_on_its_way(tmp_path: Path) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "d0 k0 m0  summand 1 of 2" in screen_text(app)
        await pilot.press("5")
        await pilot.pause()
        assert f"▼  {ratio:.3g}" in screen_text(app)

    summands = first_snapshot(write_unsummed(tmp_path / "run"))
    assert summands.report is not None
    (ratio,) = {round(weight.ratio or 0, 6) for weight in summands.report.weights}
    drive(summands, steps, mode="event", size=(120, 40))


def test_the_next_contribution_of_a_gradient_with_a_summand_on_each_rank_is_another(tmp_path: Path) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        seen = set()
        for _ in range(3):
            seen.add(app.selection.key)
            await pilot.press("k")
        assert seen == {(0, 0, 0), (0, 1, 0), (0, 2, 0)}

    drive(first_snapshot(write_unsummed(tmp_path / "run")), steps, mode="event")


def test_parameters_fold_search_and_open(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        rows = app.screen.query_one(ParamRows)
        whole = rows.count
        await pilot.press("enter")
        assert rows.count == whole - 1
        await pilot.press("right")
        assert rows.count == whole
        await pilot.press("slash", *"ffn", "enter")
        await pilot.pause()
        assert "attention" not in screen_text(app)
        await pilot.press("end", "enter")
        await pilot.pause()
        assert app.current_mode == "event"
        assert app.selection.param == (-1, "layers.0.ffn.weight")

    drive(snapshot, steps, mode="parameters")


def test_compare_shows_the_twin_marks_differences_and_takes_the_next_run(faulty_run: Path) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "FOUND GS102" in text
        assert "CLEAN" in text
        assert "≠ verdict" in text
        assert "world size" in text
        await pilot.press("x")
        await pilot.pause()
        assert "world size" not in screen_text(app)
        await pilot.press("o")
        assert app.source.asked_other == [str(faulty_run.parent / "fixed")]  # type: ignore[attr-defined]

    drive(first_snapshot(faulty_run, compare=faulty_run.parent / "fixed"), steps, mode="compare", size=(120, 45))


def test_compare_without_another_run_says_what_to_do(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        assert "Press o to take one" in screen_text(app)

    drive(snapshot, steps, mode="compare")


def test_explain_shows_the_page_copies_the_fix_and_writes_the_report(
    snapshot: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gradcheck-report.md").write_text("mine")

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "What it does" in text
        assert "no_sync" in text
        await pilot.press("c")
        assert "no_sync" in app.clipboard
        assert [one.message for one in app._notifications] == [
            "The fix was sent to the terminal's clipboard. If it is not there, e writes it down."
        ]
        await pilot.press("n", "e")
        await pilot.pause()

    drive(snapshot, steps, mode="explain", size=(110, 40))
    assert (tmp_path / "gradcheck-report.md").read_text() == "mine"
    assert "GS102 repeated-reduction" in (tmp_path / "gradcheck-report-2.md").read_text()
