"""Pressing keys on the screens over one snapshot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from still_source import StillSource
from textual.pilot import Pilot

from gradcheck_dist.tui.app import WatchApp
from gradcheck_dist.tui.snapshot import Snapshot

Steps = Callable[[WatchApp, Pilot[None]], Awaitable[None]]


def drive(snapshot: Snapshot, steps: Steps, *, size: tuple[int, int] = (80, 24), mode: str = "overview") -> None:
    """Run the app over one snapshot and let `steps` press keys."""

    async def run() -> None:
        if (eager := getattr(asyncio, "eager_task_factory", None)) is not None:  # Python 3.12: as App.run does
            asyncio.get_running_loop().set_task_factory(eager)
        app = WatchApp(StillSource(snapshot), "run", mode=mode)
        async with app.run_test(size=size) as pilot:
            await settled(app, pilot)
            await steps(app, pilot)

    asyncio.run(run())


async def settled(app: WatchApp, pilot: Pilot[None]) -> None:
    async with asyncio.timeout(20):
        while app.shown.phase == "reading":
            await pilot.pause(0.01)
    await pilot.pause()
