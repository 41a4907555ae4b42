"""Tokens and batches with weights of their own, by source or task: nobody is accused where some weigh alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import events_of, judged
from probe_workers import Net, batch
from torch import Tensor

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Loss, LossGradient
from gradcheck_dist.probes import attach, mark_loss

Sources = Sequence[Sequence[float]]
"""One sequence a microbatch: the weights of its two documents."""


def weighted(logits: Tensor, labels: Tensor, weights: Sequence[float]) -> Tensor:
    """The sum of the tokens' losses, each times the weight of its document."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses * torch.tensor(weights)[:, None]).sum()


def train(folder: Path, steps: Sequence[Sources], *, lost: bool = False, divided_by: str = "weights") -> Report:
    """Each step divides by its tokens' "weights", its "tokens" or these times "passes"; each pass by its "own" weights.
    `lost`: what the first microbatch gave is thrown away."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder):
        for sources in steps:
            data = [batch(0, k) for k in range(len(sources))]
            sums = [
                float(((labels >= 0) * torch.tensor(weights)[:, None]).sum())
                for (_, labels), weights in zip(data, sources, strict=True)
            ]
            total = sum(sums) if divided_by == "weights" else float(sum(int((labels >= 0).sum()) for _, labels in data))
            total = {"passes": total * len(data), "own": float(len(data))}.get(divided_by, total)
            for k, ((tokens, labels), weights) in enumerate(zip(data, sources, strict=True)):
                own = [weight / sums[k] for weight in weights] if divided_by == "own" else weights
                (weighted(model(tokens), labels, own) / total).backward()
                if lost and k == 0:
                    optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder)


MIXED, ALIKE = ((1.0, 0.5), (0.5, 2.0)), ((1.0, 1.0), (0.5, 2.0))


@pytest.mark.parametrize("divided_by", ["weights", "tokens"])
@pytest.mark.parametrize("steps", [[MIXED, ALIKE], [ALIKE, ALIKE]])
def test_what_multiplies_all_tokens_beside_their_own_weights_is_judged(
    tmp_path: Path, steps: Sequence[Sources], divided_by: str
) -> None:
    report = train(tmp_path / "run", steps, divided_by=divided_by)
    assert (report.verdict, report.findings, report.reasons) == ("clean", [], [])


@pytest.mark.parametrize("second", [(2.0, 2.0), (1.0, 2.0)])
def test_documents_that_happen_to_weigh_alike_are_not_accused(tmp_path: Path, second: Sequence[float]) -> None:
    steps = [MIXED, tuple((weight, weight) for weight in second)]
    report = train(tmp_path / "run", steps, divided_by="tokens")
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("different weights" in reason for reason in report.reasons)


def test_what_weighted_tokens_are_off_by_is_told(tmp_path: Path) -> None:
    report = train(tmp_path / "run", [MIXED, ALIKE], divided_by="passes")
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("elements weigh x 0.5 of what they would in one mean" in reason for reason in report.reasons)


def test_weights_that_each_pass_divides_by_their_sum_are_no_count(tmp_path: Path) -> None:
    report = train(tmp_path / "run", [MIXED, ALIKE], divided_by="own")
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_what_is_wrong_behind_weighted_tokens_is_found(tmp_path: Path) -> None:
    report = train(tmp_path / "run", [ALIKE, ALIKE], lost=True)
    assert [finding.code for finding in report.findings] == ["GS401"]


def by_batch(folder: Path, steps: Sequence[Sequence[float]]) -> Report:
    """Each microbatch is of one source, whose weight multiplies its mean."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder):
        for weights in steps:
            for k, weight in enumerate(weights):
                tokens, labels = batch(0, k)
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten().clamp_min(0))
                (loss * weight / len(weights)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder)


def test_batches_with_coefficients_of_their_own_are_not_accused(tmp_path: Path) -> None:
    report = by_batch(tmp_path / "run", [(1.0, 0.5, 1.0), (0.5, 0.5, 1.0), (1.0, 1.0, 1.0)])
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("weigh 1, 2 to one another" in reason for reason in report.reasons)


@pytest.mark.parametrize("steps", [[(0.5, 1.0, 1.0)] * 3, [(0.5, 1.0, 0.5)] * 3, [(1.0, 1.0, 1.0), (0.5, 0.5, 1.0)]])
def test_what_follows_the_accumulation_steps_is_found(tmp_path: Path, steps: Sequence[Sequence[float]]) -> None:
    """The same in each step, or first one number and then the other: no batch's own."""
    report = by_batch(tmp_path / "run", steps)
    assert report.verdict == "findings"
    assert {finding.first_event.kind for finding in report.findings if finding.first_event} == {"loss"}


def test_losses_that_are_multiplied_by_their_own_tokens_have_no_coefficients(tmp_path: Path) -> None:
    """Few numbers of tokens make few numbers, now these and now those."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for counts in ((2, 4, 6), (4, 2, 6), (6, 6, 2)):
            for k, count in enumerate(counts):
                tokens, labels = batch(0, k)
                labels = torch.where(torch.arange(labels.numel()).view_as(labels) < count, labels.clamp_min(0), -100)
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
                (loss * count / sum(counts)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path / "run")
    assert {(one.code, one.factor.expression) for one in report.findings} == {("GS000", "n_c^1")}


def test_sums_over_few_sizes_of_batches_have_no_coefficients(tmp_path: Path) -> None:
    """Each pass is the sum over its tokens; what divides them behind the passes divides by these once more."""
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run"):
        for sizes in ((8, 12, 16, 8), (12, 8, 16, 16), (16, 12, 8, 12)):
            for size in sizes:
                tokens, labels = torch.randint(20, (2, size))
                F.cross_entropy(model(tokens), labels, reduction="sum").backward()
            for param in model.parameters():
                param.grad = param.grad / (len(sizes) * sum(sizes))
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = judged(tmp_path / "run").findings
    assert finding.factor.expression == "1/accumulation_steps"


def declared(folder: Path, *, divisor: float = 1.0, aside: bool = False) -> Report:
    """Tokens that weigh 0.5 or 2, and their declared sum. `aside`: another sum goes back."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder):
        for _ in range(2):
            data = [batch(0, k) for k in range(2)]
            total = sum(int((labels >= 0).sum()) for _, labels in data)
            for tokens, labels in data:
                sums = [weighted(model(tokens), labels, (0.5, 2.0)) for _ in range(2)]
                mark_loss(sums[0], int((labels >= 0).sum()))
                (sums[aside] / total / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder)


def test_a_declared_sum_of_weighted_tokens_is_judged_by_what_is_declared(tmp_path: Path) -> None:
    assert declared(tmp_path / "right").verdict == "clean"
    (finding,) = declared(tmp_path / "wrong", divisor=2.0).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "1/accumulation_steps")
    losses = [event for event in events_of(tmp_path / "right", Loss) if event.op == "mark_loss"]
    assert all(loss.label_hash is not None for loss in losses)  # those of the losses that it is the sum of


def test_weighted_tokens_are_seen_where_another_sum_was_declared(tmp_path: Path) -> None:
    report = declared(tmp_path / "run", aside=True)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("different weights" in reason for reason in report.reasons)


def test_a_declared_term_leaves_the_main_loss_that_it_is_computed_from(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for _ in range(2):
            tokens, labels = batch(0, 0)
            main = F.cross_entropy(model(tokens).transpose(1, 2), labels)
            term = mark_loss(main.square(), 1, term="penalty", coefficient=0.1)
            (main + 0.1 * term).backward()
            optimizer.step()
            optimizer.zero_grad()
    ids = {loss.loss_id for loss in events_of(tmp_path / "run", Loss) if loss.term == "main"}
    assert ids == {event.loss_id for event in events_of(tmp_path / "run", LossGradient)} & ids
    assert len(ids) == 2


@pytest.mark.parametrize(("times", "verdict"), [(1.0, "clean"), (0.5, "undetermined")])
def test_tokens_of_no_weight_are_counted_where_a_mask_keeps_them(tmp_path: Path, times: float, verdict: str) -> None:
    """A policy gradient: sequences without an advantage have tokens all the same."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        data = [batch(0, k) for k in range(2)]
        num_tokens = sum(int((labels >= 0).sum()) for _, labels in data)
        for (tokens, labels), advantages in zip(data, [(0.0, 1.5), (-0.7, 0.4)], strict=True):
            log_probs = model(tokens).log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
            loss = -log_probs * torch.tensor(advantages)[:, None]
            ((loss * (labels >= 0)).sum() / num_tokens * times).backward()
        optimizer.step()
    report = judged(tmp_path / "run")
    assert (report.verdict, report.findings) == (verdict, [])
    assert verdict == "clean" or any("weigh x 0.5 of what they would" in reason for reason in report.reasons)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("times", [1.0, 0.5])
def test_a_teacher_s_likeliest_classes_are_one_token_together(tmp_path: Path, times: float, whole: bool) -> None:
    """`whole`: their probabilities are made to sum to one."""
    model, teacher = Net(), Net().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        data = [batch(0, k) for k in range(2)]
        num_tokens = sum(int((labels >= 0).sum()) for _, labels in data)
        for tokens, labels in data:
            likely, classes = (3 * teacher(tokens)).softmax(-1).topk(3, -1)
            likely = likely / likely.sum(-1, keepdim=True) if whole else likely
            apart = likely.log() - model(tokens).log_softmax(-1).gather(-1, classes)
            divergence = (likely * apart).sum(-1)
            ((divergence * (labels >= 0)).sum() / num_tokens * times).backward()
        optimizer.step()
    report = judged(tmp_path / "run")
    found = [(finding.code, finding.factor.exact) for finding in report.findings]
    assert found == ([("GS303", "1/2")] if whole and times != 1 else [])
    assert report.verdict == ("findings" if found else "clean" if times == 1 else "undetermined")


@pytest.mark.parametrize("times", [1.0, 0.5])
def test_labels_that_share_one_distribution_are_a_token_each(tmp_path: Path, times: float) -> None:
    """Words around another one: several labels are picked from one row, which weigh alike."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        data = [batch(0, k) for k in range(2)]
        num_labels = sum(int((labels >= 0).sum()) for _, labels in data)
        for tokens, labels in data:
            log_probs = model(tokens)[:, 0].log_softmax(-1).gather(1, labels.clamp_min(0))
            (-(log_probs * (labels >= 0)).sum() / num_labels * times).backward()
        optimizer.step()
    report = judged(tmp_path / "run")
    assert [finding.code for finding in report.findings] == ([] if times == 1 else ["GS303"])
    assert all(finding.factor.exact == "1/2" for finding in report.findings)


def policy_gradient(
    folder: Path, advantages: Sequence[Sequence[float]], *, divided_by: float, line: float = 1.0
) -> Report:
    """The mean over sequences, each a mean over its tokens times its advantage: a pass for each of `advantages`. `line`
    is what a line behind them divides gradients by."""
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder):
        for k, of_sequences in enumerate(advantages):
            tokens = torch.randint(20, (len(of_sequences), 6), generator=torch.Generator().manual_seed(k))
            log_probs = model(tokens).log_softmax(-1).gather(-1, tokens.roll(1, 1)[..., None])[..., 0]
            mask = torch.arange(6) < torch.tensor([4, 6] * (len(of_sequences) // 2))[:, None]
            each = -(log_probs * torch.tensor(of_sequences)[:, None] * mask).sum(-1) / mask.sum(-1)
            (each.mean() / divided_by).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            if line != 1:
                parameter.grad /= line
        optimizer.step()
    return judged(folder)


@pytest.mark.parametrize("advantages", [(0.7, -0.7), (0.7, -0.7, 0.3, -0.3)])
def test_advantages_that_come_to_zero_weigh_all_the_same(tmp_path: Path, advantages: Sequence[float]) -> None:
    """As those of a group do, less their mean."""
    right = policy_gradient(tmp_path / "right", [advantages] * 2, divided_by=2)
    assert (right.verdict, right.findings, right.reasons) == ("clean", [], [])
    halved = policy_gradient(tmp_path / "halved", [advantages] * 2, divided_by=4)
    assert (halved.verdict, halved.findings) == ("undetermined", [])
    assert any("weighs x 0.5 of what it would" in reason for reason in halved.reasons)


@pytest.mark.parametrize("divided_by", [1, 2])
def test_sequences_of_a_pass_without_any_advantage_are_not_taken_for_none(tmp_path: Path, divided_by: float) -> None:
    report = policy_gradient(tmp_path / "run", [(0.0, 0.0), (0.7, 0.4)], divided_by=divided_by)
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_the_line_that_makes_weights_too_small_is_told(tmp_path: Path) -> None:
    report = policy_gradient(tmp_path / "run", [(0.7, 0.4)] * 2, divided_by=2, line=2.0)
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = [one for one in report.reasons if "weighs x 0.5 of what it would" in one]
    assert "what test_weighted_tokens.py:" in reason
    halved = policy_gradient(tmp_path / "halved", [(0.7, 0.4)] * 2, divided_by=4)
    assert not any("multiplies gradients by" in one for one in halved.reasons)
