"""Clips of gradients that carry a loss scale, a GradScaler's or one by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from clip_loops import NUM_STEPS, Finish, accumulate, by_hand, clip, codes, utils
from probe_workers import Net

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run


@pytest.mark.parametrize("hand", [False, True])
@pytest.mark.parametrize("order", ["unscaled", "scaled", "threshold scaled"])
def test_a_clip_of_scaled_gradients_is_found_unless_its_threshold_is_scaled(
    order: str, hand: bool, tmp_path: Path
) -> None:
    model, scaler = Net(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.zeros(()))
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(NUM_STEPS):
            accumulate(model, scale=scaler.get_scale())
            if order == "unscaled":
                scaler.unscale_(optimizer)
            max_norm = 0.1 * (scaler.get_scale() if "threshold" in order else 1.0)
            (by_hand(max_norm) if hand else clip(max_norm))(model)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert codes(report) == (["GS604"] if order == "scaled" else [])
    if order == "scaled":
        assert report.findings[0].factor.observed == pytest.approx(1 / 65536)
        assert report.findings[0].factor.expression == "1/loss_scale"
        assert report.findings[0].steps == list(range(NUM_STEPS))
        assert {round(weight.ratio or 0, 4) for weight in report.weights if hand} <= {1.0}


@pytest.mark.parametrize("unscaled", [2, 1, 0])
def test_a_clip_of_two_optimizers_gradients_waits_until_both_are_unscaled(unscaled: int, tmp_path: Path) -> None:
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    parts = [[*model.embedding.parameters(), *model.inner.parameters()], [*model.head.parameters()]]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    scaler.scale(torch.zeros(()))
    norms: list[torch.Tensor] = []
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(NUM_STEPS):
            accumulate(model, scale=scaler.get_scale())
            for optimizer in optimizers[:unscaled]:
                scaler.unscale_(optimizer)
            scales = [1.0 if index < unscaled else 1024.0 for index in range(2)]
            grads = [param.grad / scale for part, scale in zip(parts, scales, strict=True) for param in part]
            norms.append(utils.get_total_norm(grads))
            utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
    report = diagnose(read_run(tmp_path))
    assert codes(report) == (["GS604"] if unscaled < 2 else [])
    if unscaled == 1:
        told = re.search(r"Unscaled their norm is ([\d.e-]+),", report.findings[0].explanation)
        assert told is not None and float(told[1]) == pytest.approx(float(norms[0]), rel=1e-4)
        assert "some of them carried loss scale 1024" in report.findings[0].explanation


@pytest.mark.parametrize(
    ("scale", "max_norm", "first", "found", "clips"),
    [
        (1024.0, 0.1, "clip", ["GS604"], clip),
        (1024.0, 0.1, "clip", ["GS604"], by_hand),
        (1024.0, 0.1, "division", [], clip),
        (1024.0, 0.1, "division", [], by_hand),
        (1024.0, 0.1 * 1024, "clip", [], clip),
        (1024.0, 0.1 * 1024, "clip", [], by_hand),
        (4.0, 0.1, "clip", ["GS605"], clip),
    ],
)
def test_a_loss_scale_by_hand_is_taken_out_before_the_clip(
    scale: float, max_norm: float, first: str, found: list[str], clips: Callable[[float], Finish], tmp_path: Path
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(NUM_STEPS):
            accumulate(model, scale=scale)
            if first == "clip":
                clips(max_norm)(model)
            torch._foreach_div_([param.grad for param in model.parameters()], scale)
            if first == "division":
                clips(max_norm)(model)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert codes(report) == found
    if found:
        assert report.findings[0].factor.observed == pytest.approx(1 / scale, rel=1e-5)
        assert ("by the loss scale before clipping" in report.findings[0].fix) == (found == ["GS604"])


@pytest.mark.parametrize("hand", [False, True])
@pytest.mark.parametrize("order", ["unscaled", "scaled", "threshold scaled", "rests"])
def test_a_clip_by_value_of_scaled_gradients_is_found_and_hides_nothing(order: str, hand: bool, tmp_path: Path) -> None:
    """Each element is clamped for its scale, and what was there before the clip stands for what is read, times what the
    scale's removal makes of it: weights are judged, and a missing division is found beside it."""
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.zeros(()))
    most = {"threshold scaled": 1e-3 * 256.0, "rests": 1e6}.get(order, 1e-3)

    def unscale() -> None:
        if hand:
            torch._foreach_div_([param.grad for param in model.parameters()], 256.0)

    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(NUM_STEPS):
            accumulate(model, scale=256.0)
            if order == "unscaled":
                unscale() if hand else scaler.unscale_(optimizer)
            utils.clip_grad_value_(model.parameters(), most)
            if order != "unscaled":
                unscale()
            if hand:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update(256.0)
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert codes(report) == (["GS604"] if order == "scaled" else [])
    assert report.verdict == ("findings" if order == "scaled" else "clean")
    assert {round(weight.ratio or 0, 4) for weight in report.weights} == {1.0}
    if order == "scaled":
        assert "+-0.001 while gradients carried loss scale 256" in report.findings[0].explanation
        assert ("by the loss scale before clipping" in report.findings[0].fix) == hand


@pytest.mark.parametrize("scaled", [False, True])
def test_a_number_in_front_of_a_clip_by_value_that_is_unscaled_behind_it_is_found(scaled: bool, tmp_path: Path) -> None:
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(torch.zeros(()))
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(NUM_STEPS):
            accumulate(model, scale=512.0)
            utils.clip_grad_value_(model.parameters(), 1e-3 if scaled else 1e6)
            scaler.step(optimizer)
            scaler.update(256.0)
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert codes(report) == (["GS303", "GS604"] if scaled else ["GS303"])
    assert report.findings[0].factor.observed == pytest.approx(2)
