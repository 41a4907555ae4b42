"""Passes whose gradients are emptied before the optimizer comes, of losses whose labels tell nothing, or none."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from probe_workers import Net, batch, token_sum
from torch import Tensor

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.label_hashes import HASH_FACTOR, HASH_OFFSET, tell_no_batch
from gradcheck_dist.trace.run import read_run

NUM_PASSES = 3


def trained(run_dir: Path, *, emptied: bool) -> Report:
    """Means of absolute errors that the data weighs. `emptied`: zero_grad in the last pass, before its backward, as
    accelerate's optimizer does it where the loop calls it first."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)
    with attach(run_dir):
        for _ in range(2):
            for index in range(NUM_PASSES):
                if emptied and index == NUM_PASSES - 1:
                    optimizer.zero_grad()
                inputs, targets, weights = (torch.rand(5, size, generator=data) for size in (4, 3, 1))
                # What a module is given by name nobody looks at: it would tell that this is no batch evaluated again.
                error = F.smooth_l1_loss(model(input=inputs), targets, reduction="none")
                ((error * weights).sum() / weights.sum() / NUM_PASSES).backward()
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("emptied", [True, False])
def test_passes_that_were_emptied_before_the_others_are_told(tmp_path: Path, emptied: bool) -> None:
    report = trained(tmp_path, emptied=emptied)
    assert (report.verdict, report.findings) == ("undetermined", [])
    told = [reason for reason in report.reasons if "emptied before the optimizer came (test_emptied.py:" in reason]
    assert [reason.split()[0] for reason in told] == (["2"] if emptied else [])
    if emptied:  # it comes before what the losses count, which mark_loss would tell
        assert report.reasons[0] == told[0]
        assert "zero_grad() once a step" in report.next_step


@pytest.mark.parametrize("named", [True, False])
def test_targets_alone_tell_no_batch_that_was_evaluated_again(tmp_path: Path, named: bool) -> None:
    """Means that are not divided, each of which empties what came before: the last one weighs as if it were alone.
    `named`: the model is given its inputs by name, which nobody looks at."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)
    with attach(tmp_path / "run"):
        for _ in range(2):
            for _ in range(NUM_PASSES):
                optimizer.zero_grad()
                inputs, targets = (torch.rand(5, size, generator=data) for size in (4, 3))
                F.mse_loss(model(input=inputs) if named else model(inputs), targets).backward()
            optimizer.step()
    report = diagnose(read_run(tmp_path / "run"))
    if not named:
        assert [finding.code for finding in report.findings] == ["GS401"]
        return
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("2 passes were emptied" in reason and "that nobody saw" in reason for reason in report.reasons)
    assert "zero_grad() once a step" in report.next_step


def likelihood(output: Tensor, target: Tensor) -> Tensor:
    mean, width = output[:, :1], output[:, 1:2].exp()
    return (width.log() + (mean - target[:, :1]) ** 2 / width).mean()


def angle(output: Tensor, target: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(output, target)).mean()


def alignment(output: Tensor, target: Tensor) -> Tensor:
    labels = (target.reshape(1, -1)[:, :3] > 0.5).long() + 1
    return F.ctc_loss(output.log_softmax(-1)[:, None], labels, torch.tensor([5]), torch.tensor([3]))


@pytest.mark.parametrize("same_batch", [True, False])
@pytest.mark.parametrize("loss_of", [likelihood, angle, alignment])
def test_what_functions_of_data_compare_with_tells_the_batch(
    tmp_path: Path, loss_of: Callable[[Tensor, Tensor], Tensor], same_batch: bool
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)
    with attach(tmp_path / "run"):
        for _ in range(2):
            kept = tuple(torch.rand(5, size, generator=data) for size in (4, 3))
            for _ in range(NUM_PASSES):
                optimizer.zero_grad()
                other = tuple(torch.rand(5, size, generator=data) for size in (4, 3))
                inputs, targets = (kept[0] + 0.1 * other[0], kept[1]) if same_batch else other
                (loss_of(model(inputs), targets) / NUM_PASSES).backward()
            optimizer.step()
    assert [finding.code for finding in diagnose(read_run(tmp_path / "run")).findings] == ["GS401"] * (not same_batch)


@pytest.mark.parametrize("divided", [True, False])
def test_labels_that_are_the_same_in_every_batch_tell_no_batch_that_was_evaluated_again(
    tmp_path: Path, divided: bool
) -> None:
    """Contrastive losses, whose labels are 0 to n-1 in every pass, with a zero_grad that the first passes are lost by.
    Where they are not divided by the passes, the last one alone weighs what it would in sharpness-aware training."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(0)
    with attach(tmp_path / "run"):
        for _ in range(2):
            for _ in range(NUM_PASSES):
                optimizer.zero_grad()
                one = torch.rand(6, 4, generator=data)
                scores = model(one) @ model(one + 0.1 * torch.rand(6, 4, generator=data)).T
                (F.cross_entropy(scores, torch.arange(6)) / (NUM_PASSES if divided else 1)).backward()
            optimizer.step()
    report = diagnose(read_run(tmp_path / "run"))
    if divided:
        assert [finding.code for finding in report.findings] == ["GS401"]
    else:
        assert (report.verdict, report.findings) == ("undetermined", [])
        assert any("2 passes were emptied" in reason and "in every batch" in reason for reason in report.reasons)


@pytest.mark.parametrize(
    "labels", [torch.zeros(7, dtype=torch.long), torch.arange(7), torch.arange(7) + 21, 3 * torch.arange(7)]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_checksums_of_labels_that_tell_nothing_are_known(labels: torch.Tensor, device: str) -> None:
    found = zlib.crc32(labels.numpy().data)
    if device != "cpu":  # as a device computes it
        found = int(((labels + 1) * (torch.arange(7) * HASH_FACTOR + HASH_OFFSET)).sum())
    assert tell_no_batch(7, found)
    assert not tell_no_batch(7, found + 1) and not tell_no_batch(8, found)


def test_what_follows_from_lost_passes_is_no_finding_of_its_own(tmp_path: Path) -> None:
    """An optimizer that steps in every third iteration, though each divides by its own tokens and empties gradients."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for k in range(6):
            part = batch(0, k % 3)
            optimizer.zero_grad()
            (token_sum(model, part) / (part[1] >= 0).sum()).backward()  # type: ignore[no-untyped-call]
            if k % 3 == 2:
                optimizer.step()
    assert [finding.code for finding in diagnose(read_run(tmp_path)).findings] == ["GS401"]


def test_tokens_of_losses_that_never_went_backward_are_told(tmp_path: Path) -> None:
    """A backward() behind the loop over microbatches takes the last one alone."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for step in range(2):
            window = [batch(0, step + k) for k in range(3)]
            total = sum(int((labels >= 0).sum()) for _, labels in window)
            for part in window:
                loss = token_sum(model, part) / total
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "num_tokens/evaluated_tokens")
    assert "inside of the loop" in finding.fix
