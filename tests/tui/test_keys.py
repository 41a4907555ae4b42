"""Keys that do the same on every screen, and what the Overview leads to: every one does what the help says."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from driven_screens import drive, settled
from still_source import StillSource, first_snapshot, screen_text
from textual.pilot import Pilot
from textual.widgets import Input
from tiny_runs import SOURCE_LINE, SOURCE_TEXT, write_run

from gradcheck_dist.events import Clip, Exchange
from gradcheck_dist.tui.app import SCREENS, WatchApp
from gradcheck_dist.tui.screens.help import HelpScreen
from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.tui.widgets.stops_list import StopsList


def test_from_opening_a_faulty_run_to_the_culprits_source_line_is_one_key(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await pilot.pause()
        text = screen_text(app)
        assert "FIRST DIVERGENCE" in text
        assert f"gradcheck_dist/errors.py:{SOURCE_LINE}" in text
        assert f"▶ {SOURCE_LINE:>4} │ {SOURCE_TEXT}" in text

    drive(snapshot, steps)


@pytest.mark.parametrize("mode", SCREENS)
def test_help_and_quit_are_in_sight_on_80_columns_of_a_live_run_with_output(snapshot: Snapshot, mode: str) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        footer = screen_text(app).splitlines()[-1]
        assert "? Help" in footer
        assert "q Quit" in footer

    drive(replace(snapshot, live=True, has_output=True), steps, mode=mode)


def test_the_charts_show_their_values_whole_on_80_columns(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "─ loss 0.12346 ─" in text
        assert "─ norm 0.20461 ─" in text

    points = replace(snapshot.series, loss=((0, 0.123456), (1, 0.5)), grad_norm=((0, 0.20461), (1, 0.5)), clipped=None)
    drive(replace(snapshot, series=points), steps)


@pytest.mark.parametrize("live", [True, False])
def test_ctrl_c_says_how_to_close_and_of_a_training_only_where_one_may_run(snapshot: Snapshot, live: bool) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+c")
        await pilot.pause()
        (told,) = (one.message for one in app._notifications)
        assert told == f"Ctrl-C does nothing here: q closes the screens{', and the training goes on' * live}."

    drive(replace(snapshot, live=live), steps)


@pytest.mark.parametrize("shown", [True, False])
def test_a_finding_that_no_weight_shows_has_its_line_and_a_place_on_the_timeline(tmp_path: Path, shown: bool) -> None:
    """`shown`: the step has the event that the finding stands on; one that is judged again after it was verified may
    lack it."""

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await pilot.pause()
        text = screen_text(app)
        assert "FIRST DIVERGENCE: seen here, and in no weight" in text
        assert f"▶ {SOURCE_LINE:>4} │ {SOURCE_TEXT}" in text
        assert "Reversed sums the ranks' inputs" in text
        assert not app.screen.query_one(StopsList).display, "an empty path beside it"
        await pilot.press("j")
        assert "lies on no path" in [one.message for one in app._notifications][-1]
        await pilot.press("3", "o")
        await pilot.pause()
        assert ({"!", "W"} if shown else {"W"}) <= set(screen_text(app).split("rank 0", 1)[1].splitlines()[0])

    snapshot = first_snapshot(write_run(tmp_path / "run", fault=None, exchanged=True))
    assert snapshot.step is not None
    for events in snapshot.step.verdict.data.events.values() if not shown else ():
        events[:] = [event for event in events if not isinstance(event, Exchange)]
    drive(snapshot, steps, size=(120, 40))


def test_an_accused_event_on_the_path_of_a_right_weight_does_not_call_it_wrong(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        assert app.shown.step is not None
        stops = app.screen.query_one(StopsList)
        await pilot.press("d", "k", "k", "j")
        await pilot.pause()
        assert app.selection.key == (0, 2, 0)
        assert stops.stops[stops.cursor].seq == clip.seq
        assert "FIRST DIVERGENCE: seen here; the weight of this contribution is right" in screen_text(app)

    assert snapshot.step is not None
    verdict = snapshot.step.verdict
    (finding,) = verdict.findings
    clip = next(event for event in verdict.data.events[0] if isinstance(event, Clip))
    assert finding.first_event is not None
    first = msgspec.structs.replace(finding.first_event, rank=0, seq=clip.seq)
    mine = replace(verdict, findings=[msgspec.structs.replace(finding, first_event=first)])
    drive(replace(snapshot, step=replace(snapshot.step, verdict=mine)), steps, mode="event", size=(120, 40))


def test_what_a_finding_means_for_this_run_stands_on_the_event_and_explain_screens(snapshot: Snapshot) -> None:
    assert snapshot.report is not None
    consequence = snapshot.report.findings[0].consequence
    assert consequence

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        for key in ("d", "7"):
            await pilot.press(key)
            await pilot.pause()
            text = screen_text(app)
            assert "what it means for this run" in text
            assert text.count(consequence.split(":")[0] + ":") == 1

    drive(snapshot, steps, size=(160, 60))


def test_the_key_pressed_while_still_reading_is_remembered(snapshot: Snapshot) -> None:
    async def run() -> None:
        app = WatchApp(StillSource(), "run")
        async with app.run_test(size=(80, 24), notifications=True) as pilot:
            await pilot.press("d")
            await pilot.pause(0.1)
            assert "Still reading" in screen_text(app)
            app.snapshot = snapshot
            await pilot.pause()
            await pilot.pause()
            assert "FIRST DIVERGENCE" in screen_text(app)

    asyncio.run(run())


def test_enter_on_a_finding_leads_to_the_same_place(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("enter")
        await pilot.pause()
        assert "FIRST DIVERGENCE" in screen_text(app)

    drive(snapshot, steps)


def test_number_keys_open_the_seven_screens(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        for index, mode in enumerate(SCREENS, 1):
            await pilot.press(str(index))
            await pilot.pause()
            assert app.current_mode == mode
            assert screen_text(app).strip()

    drive(snapshot, steps)


def test_a_click_on_a_tab_opens_its_screen(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.click("TopBar", offset=(screen_text(app).splitlines()[0].index("Timeline"), 0))
        await pilot.pause()
        assert app.current_mode == "timeline"

    drive(snapshot, steps)


def test_help_opens_and_closes_and_names_every_key_of_every_screen(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("question_mark")
        assert isinstance(app.screen, HelpScreen)
        text = screen_text(app)
        for key in ("ctrl+p", "space", "[ ]", "open the first divergence"):
            assert key in text
        await pilot.press("escape")
        assert not isinstance(app.screen, HelpScreen)

    drive(snapshot, steps, size=(120, 70))


def test_themes_go_round_and_the_map_stays_readable(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        seen = [app.theme]
        for _ in range(3):
            await pilot.press("t")
            seen.append(app.theme)
            assert "4" in screen_text(app)
        assert seen[0] == seen[-1]
        assert len(set(seen)) == 3

    drive(snapshot, steps, mode="weights")


def test_the_command_palette_offers_the_screens(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        titles = {command.title for command in app.get_system_commands(app.screen)}
        assert {"Weights", "Explain", "First divergence", "Screenshot", "Theme"} <= titles
        await pilot.press("ctrl+p")
        await pilot.pause()
        await pilot.press(*"timel", "enter")
        await pilot.pause(0.3)
        assert app.current_mode == "timeline"

    drive(snapshot, steps)


def test_brackets_ask_for_the_neighbouring_step(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("left_square_bracket", "right_square_bracket")
        assert app.source.asked_step == [1]  # type: ignore[attr-defined]

    drive(snapshot, steps)


def test_no_screen_holds_a_search_line_before_it_is_asked_for(snapshot: Snapshot) -> None:
    """An Input asks the app for its screen, which from Python 3.12 on does not have it yet while a screen is made."""

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        for key, mode in enumerate(SCREENS, 1):
            await pilot.press(str(key))
            await settled(app, pilot)
            assert app.current_mode == mode
            assert not app.screen.query(Input)

    drive(snapshot, steps)


def test_what_does_not_fit_the_verdict_s_box_is_told_to_be_cut(snapshot: Snapshot) -> None:
    assert snapshot.document is not None
    long = replace(snapshot, document=replace(snapshot.document, why="A reason of many words. " * 60))

    async def cut(app: WatchApp, _pilot: Pilot[None]) -> None:
        assert "cut here: 7 shows all" in screen_text(app)

    async def whole(app: WatchApp, _pilot: Pilot[None]) -> None:
        assert "cut here" not in screen_text(app)

    drive(long, cut)
    drive(snapshot, whole)


def test_where_nothing_was_found_the_key_to_it_says_which_of_three_that_is(snapshot: Snapshot, tmp_path: Path) -> None:
    assert snapshot.report is not None
    clean = msgspec.structs.replace(snapshot.report, verdict="clean", findings=[])
    unclear = msgspec.structs.replace(clean, verdict="undetermined", reasons=["no loss was seen"])
    for shown, words, axis in (
        (replace(snapshot, report=clean, live=False), "Nothing was found: the run is clean.", "────=──── 1"),
        (replace(snapshot, report=unclear, live=False), "could not be judged", "dp_replicate        2 ?"),
        (Snapshot(path=str(tmp_path), phase="waiting"), "There is no verdict yet", ""),
    ):

        async def steps(app: WatchApp, pilot: Pilot[None], words: str = words, axis: str = axis) -> None:
            assert axis in screen_text(app)
            assert ("────=────" in screen_text(app)) is ("=" in axis)
            await pilot.press("d")
            await pilot.pause()
            assert words in next(note.message for note in app._notifications)

        drive(shown, steps)


def test_on_sixty_columns_nothing_is_cut_that_tells_where_one_is_or_what_is_wrong(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        texts = {}
        for key in "127":
            await pilot.press(key)
            await pilot.pause()
            texts[key] = screen_text(app)
        assert texts["7"].splitlines()[0].split() == ["1", "2", "3", "4", "5", "6", "7", "Explain"]
        lines = [line for line in texts["1"].splitlines() if "dp_replicate  " in line or "accumulation_steps" in line]
        assert [line.split("│")[1].split()[:2] for line in lines] == [
            ["dp_replicate", "2"],
            ["accumulation_steps", "3"],
        ]
        assert "▲ more" in texts["2"]
        await pilot.click("TopBar", offset=(texts["7"].splitlines()[0].index("3"), 0))
        await pilot.pause()
        assert app.current_mode == "timeline"

    drive(snapshot, steps, size=(60, 20))


def test_on_a_small_terminal_the_findings_and_their_lines_are_seen_and_the_source_is_not_broken(
    snapshot: Snapshot,
) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        overview = screen_text(app).splitlines()
        assert any(line.startswith("GS102 repeated-reduction") and ".py:9" in line for line in overview)
        await pilot.press("d")
        await pilot.pause()
        lines = screen_text(app).splitlines()
        assert any(line.startswith("▶r0 reduce k=1") for line in lines)
        assert any(line.strip().startswith("FIRST DIVERGENCE: after this the weight could not") for line in lines)

    drive(snapshot, steps, size=(60, 18))


def test_a_path_is_spelled_out_where_there_is_room(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await pilot.pause()
        title = "path of d0 k0 m0 (data rank 0, accumulation step 0, microbatch 0) into embedding.weight on rank 0"
        assert title in screen_text(app)
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert "path of d0 k0 m0 into embedding.weight on rank 0" in screen_text(app)

    drive(snapshot, steps, size=(120, 40))


def test_q_leaves(snapshot: Snapshot) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running or app._exit

    drive(snapshot, steps)


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (160, 50), (300, 100)], ids=str)
def test_every_screen_stands_at_every_size(snapshot: Snapshot, size: tuple[int, int]) -> None:
    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        for index in range(1, 8):
            await pilot.press(str(index))
            await pilot.pause()
            lines = screen_text(app).splitlines()
            assert len(lines) <= size[1]

    drive(snapshot, steps, size=size)
