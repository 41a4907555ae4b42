"""What the screens look like, held as text: `UPDATE_PICTURES=1 pytest tests/tui/test_pictures.py` writes them anew.

Text and not SVG: pytest-textual-snapshot 1.1 holds pytest below 9, and a difference in text can be read in a review.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from still_source import StillSource, first_snapshot, screen_text

from gradcheck_dist.reports import source
from gradcheck_dist.tui.app import SCREENS, WatchApp
from gradcheck_dist.tui.scale import brief, legend, short, sign, style
from gradcheck_dist.tui.screenshot import render
from gradcheck_dist.tui.snapshot import Snapshot
from gradcheck_dist.tui.widgets.heatmap import NUMBER_WIDTH, _cell, _chosen

PICTURES = Path(__file__).parent / "pictures"


@pytest.fixture(scope="module")
def snapshot(faulty_run: Path) -> Snapshot:
    """With words of its own: what rules say is under test elsewhere."""
    found = first_snapshot(faulty_run, compare=faulty_run.parent / "fixed")
    assert found.document is not None
    first = replace(
        found.document.findings[0],
        factor="observed / expected = 2 = dp_replicate^(K-1-k)",
        explanation="The reduction sums what an earlier one has already summed.",
        fix="Reduce only at the last accumulation step.",
        facts=(),
    )
    document = replace(
        found.document,
        headline=f"FOUND {first.title}: {first.factor}",
        why=first.explanation,
        next=first.fix,
        findings=(first,),
    )
    assert found.other is not None
    assert found.other.document is not None
    other = replace(found.other, document=replace(found.other.document, why="All weights agree."))
    return replace(found, path="runs/faulty", num_bytes=10_000, document=document, other=other)


async def picture(snapshot: Snapshot, mode: str, size: tuple[int, int]) -> str:
    app = WatchApp(StillSource(snapshot), "run", mode=mode)
    async with app.run_test(size=size) as pilot:
        async with asyncio.timeout(20):
            while app.shown.phase == "reading":
                await pilot.pause(0.01)
            # The keys in the last line are drawn when all else stands.
            shown, before = "", "-"
            while shown != before or shown.endswith("\n"):
                await pilot.pause(0.1)
                shown, before = screen_text(app), shown
        return shown


@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["80x24", "160x50"])
@pytest.mark.parametrize("mode", SCREENS)
def test_a_screen_looks_as_it_did(
    snapshot: Snapshot, mode: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The file's own date, and the lines around the marked one, are not what this test is about.
    monkeypatch.setattr("gradcheck_dist.tui.widgets.event_card.modified_s", lambda file: None)
    monkeypatch.setattr(
        "gradcheck_dist.tui.widgets.event_card.excerpt",
        lambda file, line, until: source.Excerpt(line - 1, ("for batch in batches:", "    loss.backward()"), (line,)),
    )
    monkeypatch.setattr("gradcheck_dist.tui.widgets.mark_box.line_text", lambda file, line: "loss.backward()")
    if mode == "explain":
        monkeypatch.setattr("inspect.cleandoc", lambda text: "## What it does\nThis and that.\n\n    loss.backward()")
    shown = asyncio.run(picture(snapshot, mode, size))
    file = PICTURES / f"{mode}-{size[0]}x{size[1]}.txt"
    if os.environ.get("UPDATE_PICTURES"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(shown + "\n")
    assert shown + "\n" == file.read_text()


def test_the_scale_tells_too_small_right_and_too_large_apart_by_colour_and_by_sign() -> None:
    ratios = [0.125, 0.25, 0.5, 0.99, 1.0, 1.01, 2.0, 4.0, 8.0, 0.0, float("nan")]
    colours = [style(ratio, ratio == 1.0).bgcolor for ratio in ratios]
    assert len(set(colours)) == len(ratios)
    for ratio, colour in zip(ratios, colours, strict=True):
        assert colour is not None
        red, _, blue = colour.get_truecolor()
        if 0 < ratio < 1:
            assert blue > red
        elif ratio > 1:
            assert red > blue
    assert "".join(sign(ratio, ratio == 1.0) for ratio in ratios) == "▼▼▼▼=▲▲▲▲0?"
    assert [text.strip() for text, _ in legend()] == ["1/8", "1/4", "1/2", "1", "2", "4", "8", "0", "?"]


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (4.0, "4"),
        (0.25, "1/4"),
        (1 / 3, "1/3"),
        (1.0, "1"),
        (0.853, "0.853"),
        (0.0, "0"),
        (1e-9, "1e-09"),
        (-2.0, "-2"),
        (float("inf"), "inf"),
    ],
)
def test_a_ratio_is_short(ratio: float, text: str) -> None:
    assert short(ratio) == text
    assert len(short(ratio)) <= 7


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.0143, ".014"),
        (1 / 128, ".008"),  # the first four characters of 1/128 are another number
        (1 / 16, "1/16"),
        (0.853, "0.85"),
        (-0.0123, "-.01"),
        (1234.0, "1e3"),
        (1.2e-4, "1e-4"),
        (-1e-9, "≈0"),
        (-1e12, "huge"),
    ],
)
def test_a_ratio_in_a_cell_is_rounded_and_never_cut(ratio: float, text: str) -> None:
    assert brief(ratio, 4) == text
    body, _ = _cell(ratio, False, NUMBER_WIDTH, True)
    assert len(body) == NUMBER_WIDTH - 1
    assert len(_chosen(body)) == NUMBER_WIDTH - 1
    assert text in _chosen(body)


def test_the_readme_s_picture_is_the_weights_screen(faulty_run: Path) -> None:
    svg = render(faulty_run, "weights", (100, 30))
    assert svg.startswith("<svg")
    assert "▲&#160;4" in svg
    assert "http://" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert "@font-face" not in svg
