"""Gradients that are reduced in every pass and kept elsewhere until the optimizer: emptied, and nothing was lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from beside import judged_beside
from probe_workers import Net, batch, token_sum

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

EXPECTED = {
    "right": ("clean", []),
    "clipped": ("clean", []),
    "clipped each": ("undetermined", []),
    "halved": ("findings", [("GS000", 0.5)]),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    return judged_beside(tmp_path_factory, "kept_workers:run", EXPECTED)


@pytest.mark.parametrize("variant", EXPECTED)
def test_what_rounding_leaves_in_an_emptied_buffer_is_no_weight(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    found = [(finding.code, round(finding.factor.observed or 0, 4)) for finding in report.findings]
    assert (report.verdict, found) == EXPECTED[variant]


def test_what_a_wrapper_reduced_may_be_kept_aside_and_come_back(tmp_path: Path) -> None:
    checksums = launch("kept_workers:run_wrapped", (str(tmp_path),), 2, timeout_s=90)
    assert all(plain == recorded for of_rank in checksums for plain, recorded in of_rank)
    for variant in ("ddp", "sharded"):
        report = diagnose(read_run(tmp_path / variant))
        assert (report.verdict, report.findings) == ("clean", []), (variant, report.reasons)
    (finding,) = diagnose(read_run(tmp_path / "unwrapped")).findings
    assert finding.code == "GS103"
    assert finding.factor.observed == pytest.approx(2.0)


def test_a_loss_that_goes_backward_twice_is_found_where_gradients_are_kept_aside(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for step in range(2):
            data = [batch(0, 3 * step + k) for k in range(3)]
            count = sum((labels >= 0).sum() for _, labels in data)
            kept: dict[torch.nn.Parameter, torch.Tensor] = {}
            for k, part in enumerate(data):
                loss = token_sum(model, part) / count
                for again in (True, False)[k > 0 :]:
                    loss.backward(retain_graph=again)  # type: ignore[no-untyped-call]
                for param in model.parameters():
                    assert param.grad is not None
                    kept[param] = kept[param] + param.grad if param in kept else param.grad.clone()
                optimizer.zero_grad()
            for param, own in kept.items():
                param.grad = own
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.code, finding.pattern.partition(",")[0]) == ("GS403", "tokens weigh x 2 1 1 by accumulation step")


def add_to_buffer(param: torch.Tensor) -> None:
    param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
    param.grad = None


def with_buffers() -> tuple[Net, torch.optim.Optimizer, list[Any]]:
    """A model whose parameters have a `main_grad`, and its optimizer."""
    torch.manual_seed(0)
    model = Net()
    params: list[Any] = list(model.parameters())
    for param in params:
        param.main_grad = torch.zeros_like(param)
    return model, torch.optim.SGD(params, lr=0.1), params


@pytest.mark.parametrize(("emptied", "found"), [(True, []), (False, ["GS402"])])
def test_a_buffer_beside_the_gradient_that_nobody_empties_is_stale(
    tmp_path: Path, emptied: bool, found: list[str]
) -> None:
    """Megatron's main_grad: the optimizer reads it as .grad, which zero_grad() takes away, and it is still there."""
    model, optimizer, params = with_buffers()
    for param in params:
        param.register_post_accumulate_grad_hook(add_to_buffer)
    with attach(tmp_path):
        for step in range(3):
            data = [batch(0, 3 * step + k) for k in range(2)]
            count = sum((labels >= 0).sum() for _, labels in data)
            for param in params if emptied else ():
                param.main_grad.zero_()
            for part in data:
                (token_sum(model, part) / count).backward()  # type: ignore[no-untyped-call]
            for param in params:
                param.grad = param.main_grad
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert [finding.code for finding in report.findings] == found, report.reasons
    assert not report.coverage.problems + report.coverage.notes


@pytest.mark.parametrize("num_emptied", [1, 0])
def test_a_buffer_that_grows_beside_the_gradient_is_stale_where_it_is_reduced(tmp_path: Path, num_emptied: int) -> None:
    """As Megatron's finalize does it: the trainer adds `.grad`, which holds one pass alone, to the buffer."""
    model, optimizer, params = with_buffers()
    with attach(tmp_path):
        for step in range(3):
            data = [batch(0, 3 * step + k) for k in range(2)]
            count = sum((labels >= 0).sum() for _, labels in data)
            for part in data:
                (token_sum(model, part) / count).backward()  # type: ignore[no-untyped-call]
                for param in params:
                    param.main_grad.add_(param.grad)
                    param.grad = None
            for param in params:
                param.grad = param.main_grad
            optimizer.step()
            optimizer.zero_grad()
            for param in params * num_emptied:
                param.main_grad.zero_()
    report = diagnose(read_run(tmp_path))
    assert [finding.code for finding in report.findings] == ([] if num_emptied else ["GS402"]), report.reasons


def test_a_buffer_that_never_becomes_the_gradient_is_told(tmp_path: Path) -> None:
    """torch's optimizers read `.grad` alone: a parameter that a loop leaves out stays as it is."""
    model, optimizer, params = with_buffers()
    for param in params:
        param.register_post_accumulate_grad_hook(add_to_buffer)
    with attach(tmp_path):
        for step in range(2):
            part = batch(0, step)
            (token_sum(model, part) / (part[1] >= 0).sum()).backward()  # type: ignore[no-untyped-call]
            for param in params[1:]:
                param.grad = param.main_grad
            optimizer.step()
            for param in params:
                param.grad = None
                param.main_grad.zero_()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("`.grad` is empty" in reason for reason in report.reasons)


def test_gradients_that_come_back_out_of_a_buffer_are_unscaled_like_the_others(tmp_path: Path) -> None:
    """Of all passes but the last, the emptied `.grad` is full again only where the optimizer reads it."""
    model, optimizer, params = with_buffers()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with attach(tmp_path):
        data = [batch(0, k) for k in range(2)]
        count = sum((labels >= 0).sum() for _, labels in data)
        for part in data:
            scaler.scale(token_sum(model, part)).backward()  # type: ignore[no-untyped-call]
            for param in params:
                add_to_buffer(param)
        for param in params:
            param.grad = param.main_grad
            param.grad.div_(count)
        params[0].grad.mul_(3.0)
        scaler.step(optimizer)
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.code, round(finding.factor.observed or 0, 4), finding.num_parameters) == ("GS000", 3.0, 1)
