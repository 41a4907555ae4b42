"""Losses that no wrapper sees are found in the autograd graph, with their tokens and the weight of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.events import Event, Loss, LossGradient
from gradcheck_dist.trace.run import read_run

early_cross_entropy = F.cross_entropy  # taken before any probe comes
MASK = torch.tensor([True, True, True, True, False, False])
TOKENS, DIVISOR = 4, 8


def recorded(folder: Path, loss_of: Callable[[Tensor, Tensor], Tensor]) -> tuple[list[Loss], list[LossGradient]]:
    """What one backward pass over logits of 6 tokens left, of which MASK masks two away."""
    model = nn.Linear(4, 5)
    with gradcheck_dist.attach(folder / "run"):
        loss_of(model(torch.randn(6, 4)), torch.randint(5, (6,))).backward()
    events: list[Event] = read_run(folder / "run").ranks[0].events
    return [e for e in events if isinstance(e, Loss)], [e for e in events if isinstance(e, LossGradient)]


def ignored(labels: Tensor) -> Tensor:
    return torch.where(MASK, labels, -100)


def picked_logits(logits: Tensor, labels: Tensor) -> Tensor:
    picked = logits.gather(1, labels[:, None]).squeeze(1)
    return ((logits.logsumexp(-1) - picked) * MASK).sum() / DIVISOR


def row_by_row(logits: Tensor, labels: Tensor) -> Tensor:
    """As TRL and verl save memory, over more rows than nodes are looked at."""
    many, mask = torch.cat([logits] * 40), torch.cat([MASK, torch.zeros(6 * 39, dtype=torch.bool)])
    picked = many.gather(1, torch.cat([labels] * 40)[:, None]).squeeze(1)
    return ((torch.stack([row.logsumexp(-1) for row in many]) - picked) * mask).sum() / DIVISOR


def with_a_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return picked_logits(logits, labels) + 1e-3 * logits.logsumexp(-1).pow(2).mean()


def candidates_from_two_places(logits: Tensor, labels: Tensor) -> Tensor:
    """In-batch negatives: logits of several kinds side by side below one softmax, the positive of the first kind."""
    scores = 2 * logits
    together = torch.cat([scores, logits.flip(1)], dim=1)
    return ((together.logsumexp(1) - scores[torch.arange(6), labels]) * MASK).sum() / DIVISOR


def gathered(logits: Tensor, labels: Tensor) -> Tensor:
    return -(logits.log_softmax(-1).gather(1, labels[:, None])[:, 0] * MASK).sum() / DIVISOR


def indexed(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return -(log_probs[torch.arange(6), labels] * MASK).sum() / DIVISOR


def one_hot(logits: Tensor, labels: Tensor) -> Tensor:
    return -(F.one_hot(labels, 5) * logits.log_softmax(-1))[MASK].sum() / DIVISOR


def smoothed_and_filled(logits: Tensor, labels: Tensor) -> Tensor:
    """As in fairseq: the labels get what the other classes leave."""
    log_probs, padded = logits.log_softmax(-1), ~MASK[:, None]
    nll = -log_probs.gather(-1, labels[:, None]).masked_fill(padded, 0.0)
    smooth = -log_probs.sum(-1, keepdim=True).masked_fill(padded, 0.0)
    return ((1 - 0.1 - 0.1 / 4) * nll.sum() + 0.1 / 4 * smooth.sum()) / DIVISOR


def smoothed_from_minus_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """As in transformers' LabelSmoother."""
    costs = -logits.log_softmax(-1)
    nll, smooth = costs.gather(-1, labels[:, None]), costs.sum(-1, keepdim=True, dtype=torch.float32)
    nll.masked_fill_(~MASK[:, None], 0.0)
    smooth.masked_fill_(~MASK[:, None], 0.0)
    return (0.9 * nll.sum() / TOKENS + 0.1 * smooth.sum() / (TOKENS * 5)) * TOKENS / DIVISOR


def smoothed_beside_nll_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As in fastai."""
    log_probs = logits.log_softmax(-1)
    nll = F.nll_loss(log_probs, ignored(labels), reduction="sum")
    return (0.9 * nll - 0.1 / 5 * log_probs[MASK].sum(-1).sum()) / DIVISOR


def smoothed_without_padding(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)[MASK]
    return -(0.9 * log_probs.gather(-1, labels[MASK][:, None]).sum() + 0.1 * log_probs.mean(-1).sum()) / DIVISOR


def picked_from_minus_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return (-logits.log_softmax(-1)).gather(-1, labels[:, None])[MASK].sum() / DIVISOR


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "label smoothing, filled": smoothed_and_filled,
    "label smoothing, minus log-probabilities": smoothed_from_minus_log_probs,
    "label smoothing, nll_loss": smoothed_beside_nll_loss,
    "label smoothing, rows picked": smoothed_without_padding,
    "minus log-probabilities": picked_from_minus_log_probs,
    "logsumexp minus picked logit": picked_logits,
    "the same beside a z-loss": with_a_z_loss,
    "the same, row by row": row_by_row,
    "logsumexp over candidates from two places": candidates_from_two_places,
    "log-probabilities by index": indexed,
    "one-hot targets": one_hot,
    "cross_entropy, mean": lambda logits, labels: early_cross_entropy(logits, ignored(labels)) * TOKENS / DIVISOR,
    "cross_entropy, sum": lambda logits, labels: early_cross_entropy(logits, ignored(labels), reduction="sum") / 8,
    "cross_entropy, none": lambda logits, labels: (
        early_cross_entropy(logits, ignored(labels), reduction="none").sum() / DIVISOR
    ),
    "cross_entropy, none, masked": lambda logits, labels: (
        (F.cross_entropy(logits, labels, reduction="none") * MASK).sum() / DIVISOR
    ),
    "cross_entropy, none, mean over ignored labels too": lambda logits, labels: (
        F.cross_entropy(logits, ignored(labels), reduction="none").mean() * 6 / DIVISOR
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_tokens_and_their_weight_are_seen(tmp_path: Path, name: str) -> None:
    _, (found,) = recorded(tmp_path, LOSSES[name])
    assert (found.num_tokens, found.weight) == (TOKENS, pytest.approx(1 / DIVISOR))
    assert found.weight_min in (None, pytest.approx(1 / DIVISOR))
    assert found.weight_max in (None, pytest.approx(1 / DIVISOR))


def test_how_much_of_a_smoothed_loss_falls_on_the_labels_is_told(tmp_path: Path) -> None:
    shares = {}
    for loss in (smoothed_without_padding, smoothed_with_padding, picked_from_minus_log_probs, indexed):
        _, (found,) = recorded(tmp_path / loss.__name__, loss)
        shares[loss.__name__] = found.label_share
        assert found.weight_min in (None, pytest.approx(found.weight))
    assert list(shares.values()) == [0.9, 1.0, 1.0, None]


def test_labels_tell_ranks_apart(tmp_path: Path) -> None:
    (loss,), _ = recorded(tmp_path, indexed)
    assert loss.label_hash is not None


@pytest.mark.parametrize("name", ["mse_loss", "binary_cross_entropy_with_logits"])
def test_a_loss_without_tokens_is_named_and_not_counted(tmp_path: Path, name: str) -> None:
    (loss,), (found,) = recorded(tmp_path, lambda logits, labels: getattr(F, name)(logits, torch.rand(6, 5)))
    assert (loss.op, loss.num_tokens, found.num_tokens) == (name, None, None)


def test_a_loss_beside_the_main_one_is_counted(tmp_path: Path) -> None:
    def distillation(logits: Tensor, labels: Tensor) -> Tensor:
        soft = F.kl_div(logits.log_softmax(-1), torch.rand(6, 5), reduction="batchmean")
        return 0.5 * F.cross_entropy(logits, labels) + 0.5 * soft

    _, (found,) = recorded(tmp_path, distillation)
    assert (found.num_tokens, found.other_losses) == (6, 1)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return 0.9 * -log_probs.gather(-1, labels[:, None]).mean() - 0.1 * log_probs.mean()


def smoothed_with_padding(logits: Tensor, labels: Tensor) -> Tensor:
    """Ignored labels are smoothed all the same: what each token weighs is told by the labels' part."""
    log_probs = logits.log_softmax(-1)
    return 0.9 * F.nll_loss(log_probs, ignored(labels)) - 0.1 * log_probs.mean()


def with_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return (0.01 * log_probs * log_probs.exp()).sum() - log_probs.gather(-1, labels[:, None]).mean()


def parted(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.logsumexp(-1).mean() - logits.gather(-1, labels[:, None]).mean()


@pytest.mark.parametrize(
    ("loss", "others"),
    [
        (lambda x, y: F.cross_entropy(x, y), 0),
        (lambda x, y: 2 * F.cross_entropy(x, y) / 3 + 1, 0),
        (lambda x, y: F.cross_entropy(x, y) + F.cross_entropy(x[:, 1:], y % 4), 0),
        (smoothed, 0),
        (smoothed_with_padding, 1),
        (with_entropy, 1),
        (parted, 0),
        (lambda x, y: F.cross_entropy(x, y) + 5 * x[torch.arange(3), y[:3]].abs().sum() / torch.tensor([3.0]), 1),
        (lambda x, y: F.cross_entropy(x, y) + 1e-3 * x.logsumexp(-1).square().mean(), 1),
        (lambda x, y: parted(x, y) + 1e-3 * (x.logsumexp(-1) * x.logsumexp(-1)).mean(), 1),
        (lambda x, y: (F.cross_entropy(x, y) - 0.1 * x.pow(2).mean()) * 2 + x.std(), 2),
    ],
)
def test_terms_that_count_nothing_are_counted(
    tmp_path: Path, loss: Callable[[Tensor, Tensor], Tensor], others: int
) -> None:
    _, found = recorded(tmp_path, loss)
    assert {one.other_losses for one in found} == {others}


def test_a_coefficient_beside_a_term_that_counts_nothing_is_no_normaliser(tmp_path: Path) -> None:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_dist.attach(tmp_path / "run"):
        for _ in range(2):
            logits = model(torch.randn(6, 4))
            (0.7 * F.cross_entropy(logits, torch.arange(6) % 5) + 0.3 * (logits - 1).abs().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("clean", [])
    assert any("a backward pass holds 1 other term beside" in note for note in report.coverage.notes)
    assert any("0.7 x stands before the loss" in note for note in report.coverage.notes)


def test_class_weights_are_summed(tmp_path: Path) -> None:
    weight = torch.rand(5)
    labels_seen = []

    def weighted(logits: Tensor, labels: Tensor) -> Tensor:
        labels_seen.append(ignored(labels))
        return F.cross_entropy(logits, ignored(labels), weight=weight)

    (loss,), _ = recorded(tmp_path, weighted)
    assert loss.num_weighted_tokens == pytest.approx(float(weight[labels_seen[0][MASK]].sum()))


def test_gradients_that_are_differentiated_again_are_no_contribution(tmp_path: Path) -> None:
    def penalty(logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
        return loss + gradient.pow(2).sum()

    _, (found,) = recorded(tmp_path, penalty)
    assert (found.accumulation_step, found.weight) == (0, pytest.approx(1 / 6))


def test_a_hook_of_the_user_runs_behind_ours(tmp_path: Path) -> None:
    model = nn.Linear(4, 5)
    model.weight.register_hook(lambda grad: grad * 2)
    optimizer = torch.optim.SGD(model.parameters())
    with gradcheck_dist.attach(tmp_path / "run"):
        F.cross_entropy(model(torch.randn(6, 4)), torch.randint(5, (6,))).backward()
        optimizer.step()
    (finding,) = gradcheck_dist.diagnose(read_run(tmp_path / "run")).findings
    assert (finding.code, finding.factor.observed, finding.num_parameters) == ("GS000", pytest.approx(2), 1)


@pytest.mark.parametrize(
    ("loss_of", "computed"),
    [
        (lambda loss, learned: loss / 3 + 1e-3 * learned.pow(2).sum(), False),
        (lambda loss, learned: torch.stack([loss, loss]).mean() * torch.tensor(0.3), False),
        (lambda loss, learned: loss * (-learned).exp(), True),
        (lambda loss, learned: loss / learned + learned.log(), True),
        (lambda loss, learned: (1 - (-loss).exp()) ** 2 * loss, True),
        (lambda loss, learned: -F.logsigmoid(0.1 * loss), True),
    ],
)
@pytest.mark.parametrize("cross_entropy", [lambda: F.cross_entropy, lambda: early_cross_entropy])
def test_a_weight_that_is_a_function_of_the_data_is_told(
    tmp_path: Path,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    computed: bool,
    cross_entropy: Callable[[], Callable[[Tensor, Tensor], Tensor]],
) -> None:
    learned = nn.Parameter(torch.tensor(0.7))
    _, (gradient,) = recorded(tmp_path, lambda logits, labels: loss_of(cross_entropy()(logits, labels), learned))
    assert gradient.computed is computed


def test_a_learned_weight_accuses_nobody(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, learned = nn.Linear(4, 5), nn.Parameter(torch.tensor(0.022))
    optimizer = torch.optim.SGD([*model.parameters(), learned], 0.1)
    with gradcheck_dist.attach(tmp_path / "run"):
        for _ in range(2):
            loss = F.cross_entropy(model(torch.randn(6, 4)), torch.randint(5, (6,)))
            ((-learned).exp() * loss + learned).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("function of the data" in reason for reason in report.reasons)


@pytest.mark.parametrize("by_hand", [picked_logits, indexed, gathered])
def test_a_loss_by_hand_beside_a_cross_entropy_counts_as_it_does_alone(
    tmp_path: Path, by_hand: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Another head's loss, whose gradient arrives first, stands above none of its tokens."""
    losses, gradients = recorded(
        tmp_path,
        lambda logits, labels: (
            by_hand(logits, labels)
            + 0.3 * F.cross_entropy(2 * logits[:, :4], ignored(labels.clamp_max(3)), reduction="sum") / DIVISOR
        ),
    )
    (other,) = (loss for loss in losses if loss.op == "cross_entropy")
    assert len(losses) == len(gradients) == 2
    found = {one.loss_id == other.loss_id: (one.num_tokens, one.weight) for one in gradients}
    assert found == {True: (TOKENS, pytest.approx(0.3 / DIVISOR)), False: (TOKENS, pytest.approx(1 / DIVISOR))}
