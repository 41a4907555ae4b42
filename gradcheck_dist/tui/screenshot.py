"""A picture of a screen: `python -m gradcheck_dist.tui.screenshot RUN weights 100x30 [KEY ...] > FILE.svg`."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from gradcheck_dist.tui.app import WatchApp
from gradcheck_dist.tui.source import FolderSource

TIMEOUT_S = 60.0


def render(
    run_dir: Path | str, screen: str = "weights", size: tuple[int, int] = (100, 30), keys: Sequence[str] = ()
) -> str:
    """The SVG text of one screen over a run folder, after these keys were pressed.

    Raises:
        TimeoutError: the run could not be judged in TIMEOUT_S.
    """
    return asyncio.run(_render(Path(run_dir), screen, size, keys))


async def _render(run_dir: Path, screen: str, size: tuple[int, int], keys: Sequence[str]) -> str:
    app = WatchApp(FolderSource(run_dir), str(run_dir), mode=screen)
    async with app.run_test(size=size) as pilot:
        async with asyncio.timeout(TIMEOUT_S):
            while app.shown.phase not in ("ready", "error") or app.shown.loading:
                await pilot.pause(0.05)
        await pilot.press(*keys)
        await pilot.pause(0.2)
        svg = app.export_screenshot(title=f"gradcheck watch {run_dir.name}")
    return stable(svg)


def stable(svg: str) -> str:
    """Without the random id and the fonts' address: the same screen gives the same file, and it loads nothing."""
    svg = re.sub(r"\bterminal-\d+-", "terminal-", svg)
    return re.sub(r"@font-face\s*\{.*?\}\s*", "", svg, flags=re.S)


if __name__ == "__main__":
    width, _, height = sys.argv[3].partition("x") if len(sys.argv) > 3 else ("100", "x", "30")
    print(render(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "weights", (int(width), int(height)), sys.argv[4:]))
