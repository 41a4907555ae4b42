"""A loss that is wrong by a line that multiplies it diverges there, and not where it was evaluated."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from driven_screens import drive
from still_source import first_snapshot, screen_text
from textual.pilot import Pilot
from torch import Tensor, nn

from gradcheck_dist.probes import attach
from gradcheck_dist.tui.app import WatchApp

ACCUM_STEPS = 2


def divided_again(loss: Tensor) -> Tensor:
    return loss / ACCUM_STEPS


def test_the_card_of_the_culprit_shows_the_line_that_multiplies(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run"):
        for _ in range(ACCUM_STEPS):
            loss = F.cross_entropy(model(torch.randn(5, 6)), torch.randint(4, (5,)))
            divided_again(loss / ACCUM_STEPS).backward()
        optimizer.step()
    line = divided_again.__code__.co_firstlineno + 1

    async def steps(app: WatchApp, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await pilot.pause()
        text = screen_text(app)
        assert "FIRST DIVERGENCE" in text
        assert f"{Path(__file__).name}:{line}  loss / ACCUM_STEPS" in text
        assert f"▶ {line:>4} │     return loss / ACCUM_STEPS" in text
        await pilot.press("right")
        await pilot.pause()
        assert f"multiplied by 0.5 at {Path(__file__).name}:{line}: / ACCUM_STEPS" in screen_text(app)

    drive(first_snapshot(tmp_path / "run"), steps, size=(160, 60))
