"""Windows of fewer passes than the others: what their losses are divided by, beside what is wrong in all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from probe_workers import Net

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

Divisor = Callable[[int, int], float]
"""What the sum of a pass's losses is divided by, of the tokens of the pass and of its step."""
UNEQUAL = ((8, 10, 6), (5, 9, 12), (7,))
EQUAL = ((8, 8, 8), (8, 8, 8), (8,))


def trained(run_dir: Path, divisor: Divisor, windows: Sequence[Sequence[int]]) -> Report:
    """Steps whose passes hold so many tokens."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir):
        for window in windows:
            for count in window:
                tokens, labels = torch.randint(20, (2, count))
                loss = F.cross_entropy(model(tokens), labels, reduction="sum")
                (loss / divisor(count, sum(window))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


def test_a_short_window_is_told_beside_means_of_unequal_passes(tmp_path: Path) -> None:
    window, means = trained(tmp_path / "run", lambda own, _: 3 * own, UNEQUAL).findings
    assert (window.code, window.steps, window.factor.exact) == ("GS303", [2], "1/3")
    assert "as is right for the means of the steps with 3 passes: the window is a short one" in window.explanation
    assert (means.code, means.steps) == ("GS301", [0, 1])


def test_means_that_divide_by_the_passes_of_their_own_window_are_means_of_means_alone(tmp_path: Path) -> None:
    passes = iter([3, 3, 3, 3, 3, 3, 1])
    (means,) = trained(tmp_path / "run", lambda own, _: next(passes) * own, UNEQUAL).findings
    assert (means.code, means.steps) == ("GS301", [0, 1])


def test_losses_that_nobody_divides_lack_a_division_where_a_window_of_one_pass_is_right(tmp_path: Path) -> None:
    (found,) = trained(tmp_path / "run", lambda own, _: own, EQUAL).findings
    assert (found.code, found.factor.expression, found.steps) == ("GS303", "accumulation_steps", [0, 1])
    assert "Divide the loss by the accumulation steps" in found.fix


def test_gradients_that_were_left_in_a_step_of_usually_one_pass_are_told_as_these(tmp_path: Path) -> None:
    (found,) = trained(tmp_path / "run", lambda own, _: own, ((8,), (8, 8), (8,))).findings
    assert (found.code, found.steps) == ("GS303", [1])
    assert "gradients of a window that was not finished" in found.explanation


@pytest.mark.parametrize("windows", [UNEQUAL, UNEQUAL[::-1]])
def test_a_division_by_the_passes_of_a_whole_window_keeps_its_name_in_a_short_one(
    windows: Sequence[Sequence[int]], tmp_path: Path
) -> None:
    (found,) = trained(tmp_path / "run", lambda _, all_tokens: 3 * all_tokens, windows).findings
    assert (found.code, found.factor.expression, found.steps) == ("GS303", "1/accumulation_steps", [0, 1, 2])
    assert "Divide by the accumulation steps once" in found.fix


def test_tokens_of_another_step_are_not_named_where_that_step_counts_others_too(tmp_path: Path) -> None:
    """The first step counts as many as the second has, by chance: the second counts one more than it has, too."""
    counted = iter([11, 12, 9])
    (found,) = trained(tmp_path / "run", lambda *_: next(counted), ((10,), (11,), (9,))).findings
    assert (found.code, found.factor.expression, found.steps) == ("GS303", None, [0, 1])
    assert "as if the step had 11 tokens, where 10 enter the loss" in found.explanation
