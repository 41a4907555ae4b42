"""Losses that stand in a sum with others: what is written before them there is a coefficient, no wrong normaliser."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from elsewhere import pretend
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach, mark_loss
from gradcheck_dist.trace.run import read_run

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
STEPS = 4
EQUAL, UNEQUAL = (6, 6, 6, 6), (5, 6, 7, 8)


def trained(run_dir: Path, loss: Loss, sizes: tuple[int, ...] = EQUAL) -> Report:
    """One step of batches of these sizes; `loss` gets logits of two heads, and labels."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    with attach(run_dir):
        for size in sizes:
            one, other = body(torch.randn(size, 6)).chunk(2, dim=1)
            loss(one, other, torch.randint(5, (size,))).backward()
        optimizer.step()
    return diagnose(read_run(run_dir))


def squared(logits: Tensor) -> Tensor:
    return F.mse_loss(logits, torch.linspace(-1, 1, logits.numel()).view_as(logits))


def distilled(logits: Tensor) -> Tensor:
    warm = logits / 2
    return 4 * F.kl_div(warm.log_softmax(-1), warm.detach().roll(1, 1).softmax(-1), reduction="batchmean")


WRITTEN: dict[str, Loss] = {
    "two and a distance": lambda x, z, y: 2 * F.cross_entropy(x, y) + 5 * squared(z),
    "distillation": lambda x, z, y: 0.7 * F.cross_entropy(x, y) + 0.3 * distilled(x),
    "halves": lambda x, z, y: 0.5 * F.cross_entropy(x, y) + 0.5 * distilled(x),
    "a second head": lambda x, z, y: F.cross_entropy(x, y) + 0.3 * F.cross_entropy(z, y),
    "heads with coefficients": lambda x, z, y: 3 * F.cross_entropy(x, y) + 5 * F.cross_entropy(z, y),
    "log-probabilities": lambda x, z, y: (
        -1.7 * x.log_softmax(-1).gather(1, y[:, None]).mean() + 0.1 * squared(z) + 0.2 * F.cross_entropy(z, y)
    ),
}
IN_EQUAL = [name for name in WRITTEN if name != "log-probabilities"]


@pytest.mark.parametrize("name", IN_EQUAL)
def test_a_coefficient_is_no_normaliser(tmp_path: Path, name: str) -> None:
    report = trained(tmp_path, lambda x, z, y: WRITTEN[name](x, z, y) / STEPS)
    assert (report.verdict, report.findings, report.reasons) == ("clean", [], [])


@pytest.mark.parametrize("name", IN_EQUAL)
def test_a_missing_division_is_told_without_the_coefficient(tmp_path: Path, name: str) -> None:
    (finding,) = trained(tmp_path, WRITTEN[name]).findings
    assert (finding.code, finding.factor.expression, finding.factor.observed) == (
        "GS303",
        "accumulation_steps",
        pytest.approx(STEPS, rel=1e-3),
    )


def test_a_coefficient_that_stands_in_for_a_missing_division_leaves_the_verdict_open(tmp_path: Path) -> None:
    report = trained(tmp_path, lambda x, z, y: 0.25 * F.cross_entropy(x, y) + 0.75 * distilled(x))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "x 4 too large where it is a coefficient" in report.reasons[0]


@pytest.mark.parametrize(
    ("before", "declared", "behind", "found"),
    [
        (0.25, 0.25, STEPS, []),
        (0.25, 0.25, 1, [("GS303", "accumulation_steps")]),
        (0.25, 1.0, 1, []),
        (1.0, 1.0, 1, [("GS303", "accumulation_steps")]),
    ],
)
def test_a_declared_coefficient_of_the_main_loss_tells_what_divides(
    tmp_path: Path, before: float, declared: float, behind: int, found: list[tuple[str, str]]
) -> None:
    def loss(x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        main = mark_loss(F.cross_entropy(x, y, reduction="sum"), len(y), coefficient=declared) / len(y)
        return (before * main + 0.75 * distilled(x)) / behind

    report = trained(tmp_path, loss)
    assert [(one.code, one.factor.expression) for one in report.findings] == found, report.reasons
    assert report.verdict == ("findings" if found else "clean")


def test_where_every_declared_loss_is_a_term_that_is_said(tmp_path: Path) -> None:
    report = trained(tmp_path, lambda x, z, y: mark_loss(F.cross_entropy(x, y, reduction="sum"), len(y), term="ce"))
    assert report.verdict == "undetermined"
    assert "all that mark_loss declares are terms (ce): call it without term=..." in report.reasons[0]


def test_a_division_by_passes_in_the_sum_is_clean(tmp_path: Path) -> None:
    report = trained(tmp_path, lambda x, z, y: F.cross_entropy(x, y) / STEPS + distilled(x) / STEPS)
    assert (report.verdict, report.findings, report.reasons) == ("clean", [], [])


@pytest.mark.parametrize("name", IN_EQUAL)
def test_a_second_division_of_the_whole_is_none_by_a_coefficient(tmp_path: Path, name: str) -> None:
    (finding,) = trained(tmp_path, lambda x, z, y: WRITTEN[name](x, z, y) / STEPS / STEPS).findings
    assert (finding.code, finding.factor.expression, finding.factor.observed) == (
        "GS303",
        "1/accumulation_steps",
        pytest.approx(1 / STEPS, rel=1e-3),
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_means_over_unequal_batches_stay_what_they_are(tmp_path: Path, name: str) -> None:
    report = trained(tmp_path, lambda x, z, y: WRITTEN[name](x, z, y) / STEPS, UNEQUAL)
    assert [finding.code for finding in report.findings] == ["GS301"]


OPEN: dict[str, Loss] = {
    "as much as passes": lambda x, z, y: (4 * F.cross_entropy(x, y) + squared(z)) / STEPS,
    "a mean by hand": lambda x, z, y: (1.7 * F.cross_entropy(x, y, reduction="sum") / 6 + squared(z)) / STEPS,
    "divided by all coefficients": lambda x, z, y: (3 * F.cross_entropy(x, y) + 5 * F.cross_entropy(z, y)) / 8 / STEPS,
    "a mean of losses, by as much as passes": lambda x, z, y: (F.cross_entropy(x, y) + 3 * squared(z)) / 4 / STEPS,
    "a quarter, which may be a share": lambda x, z, y: (1 / STEPS * F.cross_entropy(x, y) + squared(z)) / STEPS,
    "a quarter": lambda x, z, y: (F.cross_entropy(x, y) / 4 + squared(z)) / STEPS,
    "divided by a number that none explains": lambda x, z, y: F.cross_entropy(x, y) / 8 + squared(z),
    "before a sum that is divided there": lambda x, z, y: (
        5 * F.cross_entropy(x, y, reduction="sum") / (6 * STEPS) + squared(z) / STEPS
    ),
    "divided twice at the loss": lambda x, z, y: F.cross_entropy(x, y) / STEPS / STEPS + squared(z),
}


@pytest.mark.parametrize("name", ["as much as passes", "a quarter", "a quarter, which may be a share"])
def test_a_number_that_may_divide_accuses_nobody_where_means_over_unequal_batches_are_told(
    tmp_path: Path, name: str
) -> None:
    """It was told as a normaliser once more, since weights are off by these means without it."""
    report = trained(tmp_path, OPEN[name], UNEQUAL)
    assert [finding.code for finding in report.findings] == ["GS301"]
    assert any("before" in reason and "in a sum of several" in reason for reason in report.reasons)


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL])
def test_a_loss_that_a_coefficient_of_zero_switches_off_accuses_nobody(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """A student's own loss beside its teacher's, as (1 - ratio) * own + ratio * theirs has it for a ratio of 1."""
    report = trained(tmp_path, lambda x, z, y: (0.0 * F.cross_entropy(x, y) + distilled(x)) / STEPS, sizes)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("multiplied by zero in every pass" in reason for reason in report.reasons)


BESIDE: dict[str, Loss] = {
    "by passes": lambda x, z, y: F.cross_entropy(z, y) / STEPS,
    "by passes, with a coefficient": lambda x, z, y: 0.3 * (F.cross_entropy(z, y) / STEPS),
}


@pytest.mark.parametrize("name", BESIDE)
def test_another_loss_that_is_divided_by_passes_once_more_is_left_open(tmp_path: Path, name: str) -> None:
    """All that counts is right by the loss that nothing divides, and this one was taken as written."""
    report = trained(tmp_path, lambda x, z, y: (F.cross_entropy(x, y) + BESIDE[name](x, z, y)) / STEPS)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("divided there by 4" in reason for reason in report.reasons)


def test_a_mean_of_as_many_losses_as_ranks_or_passes_beside_another_is_right(tmp_path: Path) -> None:
    def loss(x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        return (F.cross_entropy(x, y) + (F.cross_entropy(z, y) + F.cross_entropy(z.flip(0), y)) / 2) / 2

    report = trained(tmp_path, loss, EQUAL[:2])
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize("name", OPEN)
def test_what_may_be_a_normaliser_is_left_open(tmp_path: Path, name: str) -> None:
    report = trained(tmp_path, OPEN[name])
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_a_mean_that_is_divided_by_its_own_tokens_is_left_open(tmp_path: Path) -> None:
    report = trained(tmp_path, lambda x, z, y: (F.cross_entropy(x, y) / 24 + 2 * F.cross_entropy(z, y)) / STEPS)
    assert (report.verdict, report.findings) == ("undetermined", [])
    report = trained(tmp_path / "beside", lambda x, z, y: (F.cross_entropy(x, y) / 6 + F.cross_entropy(z, y)) / STEPS)
    assert any("one division too many" in reason for reason in report.reasons)


def test_a_sum_over_the_step_beside_a_penalty_stays_right(tmp_path: Path) -> None:
    def loss(x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, reduction="sum") / sum(UNEQUAL) + 0.01 * z.abs().mean() / STEPS

    report = trained(tmp_path, loss, UNEQUAL)
    assert (report.verdict, report.findings) == ("clean", [])


def test_a_coefficient_before_a_sum_over_the_step_is_right(tmp_path: Path) -> None:
    def loss(x: Tensor, z: Tensor, y: Tensor) -> Tensor:
        return (5 * F.cross_entropy(x, y, reduction="sum") + 0.1 * z.square().sum()) / sum(UNEQUAL)

    report = trained(tmp_path / "right", loss, UNEQUAL)
    assert (report.verdict, report.findings) == ("clean", [])
    (finding,) = trained(tmp_path / "wrong", lambda x, z, y: STEPS * loss(x, z, y), UNEQUAL).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


def test_a_loss_twice_in_the_sum_is_not_taken_for_heads(tmp_path: Path) -> None:
    """Halves of one batch whose means are added, where they should be averaged, or heads: nobody knows."""
    report = trained(tmp_path, lambda x, z, y: (F.cross_entropy(x, y) + F.cross_entropy(z, y)) / STEPS)
    assert (report.verdict, report.findings) == ("undetermined", [])


def together(
    run_dir: Path, numbers: tuple[float, ...], *, heads: bool = True, sizes: tuple[int, ...] = UNEQUAL
) -> Report:
    """One step of a single backward pass over all batches, each with its number before its losses."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 10))
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
    with attach(run_dir, objective="microbatch-mean"):
        total = torch.zeros(())
        for size, number in zip(sizes, numbers, strict=True):
            one, other = body(torch.randn(size, 6)).chunk(2, dim=1)
            loss = F.cross_entropy(one, torch.randint(5, (size,)))
            loss = loss + 0.5 * F.cross_entropy(other, torch.randint(5, (size,))) if heads else loss
            total = total + loss * number
        total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return diagnose(read_run(run_dir))


def test_batches_that_go_backward_together_are_right_where_they_are_divided(tmp_path: Path) -> None:
    report = together(tmp_path, (0.25,) * STEPS, sizes=EQUAL)
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize(
    ("numbers", "heads", "told"),
    [
        ((1.0,) * STEPS, True, "adds up 4 losses of one line, beside others, and 1 x stands before each"),
        ((0.5,) * STEPS, True, "and x 2 of the mean over them where they are parts of one batch"),
        ((0.25, 0.25, 0.25, 0.5), False, "0.25 x stands before the loss in a sum of several"),
    ],
)
def test_batches_that_go_backward_together_and_no_mean_of_them_are_left_open(
    tmp_path: Path, numbers: tuple[float, ...], heads: bool, told: str
) -> None:
    report = together(tmp_path, numbers, heads=heads)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any(told in reason for reason in report.reasons), report.reasons


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(("number", "codes"), [(1 / STEPS, []), (1.0, ["GS303"])])
def test_what_is_multiplied_by_zero_is_no_term(tmp_path: Path, number: float, codes: list[str], mean: bool) -> None:
    """All parameters times zero, so that a wrapper sees each of them: the number before the loss is no coefficient."""
    report = beside_nothing(tmp_path, number, mean=mean)
    assert [finding.code for finding in report.findings] == codes
    assert codes or report.verdict == "clean"


@pytest.mark.parametrize("mean", [True, False])
def test_on_an_accelerator_it_is_a_term_that_weighs_nothing(
    tmp_path: Path, mean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the number is zero is not read in time there."""
    pretend(monkeypatch)
    report = beside_nothing(tmp_path, 1 / STEPS, mean=mean, zero=torch.zeros(()))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert not any("this is a bug" in reason for reason in report.reasons), report.reasons


def beside_nothing(run_dir: Path, number: float, *, mean: bool, zero: float | Tensor = 0.0) -> Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir):
        for size in EQUAL:
            logits, labels = model(torch.randn(size, 6)), torch.randint(5, (size,))
            loss = F.cross_entropy(logits, labels) if mean else squared(logits)
            loss = loss if number == 1 else loss * number
            (loss + zero * sum(param.sum() for param in model.parameters())).backward()
        optimizer.step()
    return diagnose(read_run(run_dir))
