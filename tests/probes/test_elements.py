"""Losses that are a mean or sum over elements: judged by how many these are, where that tells what is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.report.next_step import next_step
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

Loss = Callable[[Tensor, Tensor], Tensor]
EQUAL, UNEQUAL = (5, 5, 5), (5, 6, 7)
CLASSES = 4


def squared(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target, reduction="none")


def masked(output: Tensor, target: Tensor) -> Tensor:
    mask = (target > -0.3).float()
    return (squared(output, target) * mask).sum() / mask.sum()


def min_snr(output: Tensor, target: Tensor) -> Tensor:
    return (squared(output, target).mean(1) * target[:, 0].abs().clamp(0.3, 1)).mean()


def ctc(output: Tensor, target: Tensor) -> Tensor:
    """Each row is a sequence of one letter or two; autograd knows torch's mean over their lengths as a division."""
    log_probs = output[None].expand(4, -1, -1).log_softmax(-1)
    lengths = 1 + (target[:, 0] > 0).long()
    labels = torch.tensor([[1, 2]]).expand(len(target), 2)
    return F.ctc_loss(log_probs, labels, torch.full((len(target),), 4), lengths)


def dice(output: Tensor, target: Tensor) -> Tensor:
    share = output.sigmoid()
    return (1 - 2 * (share * target).sum(1) / (share.sum(1) + target.abs().sum(1))).mean()


MEANS: dict[str, Loss] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "row by row": lambda output, target: squared(output, target).sum(1).mean(),
    "min-SNR": min_snr,
    "ctc": ctc,
    "preference": lambda output, target: -F.logsigmoid(output[:, 0] - output[:, 1]).mean(),
    "preference, negated before": lambda output, target: (-F.logsigmoid(output[:, 0] - output[:, 1])).mean(),
}
NAMELESS: dict[str, Loss] = {
    "dice": dice,
    "log cosh": lambda output, target: (output - target).cosh().log().mean(),
    "curve of one number": lambda output, target: -F.logsigmoid(output).mean(),
}


def trained(
    run_dir: Path, loss: Loss, factor: float, sizes: Sequence[int], objective: str | None = None, classes: int = CLASSES
) -> Report:
    """One step of batches of these sizes, each loss times `factor`; 1 leaves it as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir, objective=objective):
        for size in sizes:
            value = loss(model(torch.randn(size, 6)), torch.randn(size, classes))
            (value if factor == 1 else value * factor).backward()
        optimizer.step()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize("name", [*MEANS, *NAMELESS])
def test_means_over_equal_batches_are_right_as_their_average(tmp_path: Path, name: str) -> None:
    report = trained(tmp_path, (MEANS | NAMELESS)[name], 1 / len(EQUAL), EQUAL)
    assert (report.verdict, report.findings, report.reasons) == ("clean", [], [])


def test_sums_over_the_elements_of_the_step_are_right(tmp_path: Path) -> None:
    def divided(output: Tensor, target: Tensor) -> Tensor:
        return squared(output, target).sum() / (CLASSES * sum(UNEQUAL))

    assert trained(tmp_path, divided, 1, UNEQUAL).verdict == "clean"


@pytest.mark.parametrize("name", MEANS)
def test_means_that_nobody_averages_are_found(tmp_path: Path, name: str) -> None:
    (finding,) = trained(tmp_path, MEANS[name], 1, EQUAL).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


def test_sums_that_are_divided_by_what_they_go_over_are_means(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, masked, 1, EQUAL).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


@pytest.mark.parametrize("name", NAMELESS)
def test_means_of_what_nobody_knows_accuse_nobody(tmp_path: Path, name: str) -> None:
    report = trained(tmp_path, NAMELESS[name], 1, EQUAL)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any(
        "weighs x 3 of what it would in their average (the number of accumulation steps)" in reason
        for reason in report.reasons
    )


class Handed(torch.autograd.Function):
    """One number of one, as a mean over ranks is; its gradient times a number."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, times: float) -> Tensor:
        ctx.times = times
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.times, None


def test_what_a_function_of_one_number_gives_back_is_measured(tmp_path: Path) -> None:
    def loss(times: float) -> Loss:
        return lambda output, target: Handed.apply(F.mse_loss(output, target), times)  # type: ignore[no-any-return]

    assert trained(tmp_path / "right", loss(1), 1 / len(EQUAL), EQUAL).verdict == "clean"
    report = trained(tmp_path / "twice", loss(2), 1 / len(EQUAL), EQUAL)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("weighs x 2 of what it would in their average" in reason for reason in report.reasons)


@pytest.mark.parametrize("rows", [False, True], ids=["mean", "sum over rows"])
def test_a_missing_division_is_not_right_by_rows_of_as_many_elements(tmp_path: Path, rows: bool) -> None:
    """Three passes, three elements a row: a third by rows is the same number as none by elements."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return squared(output, target).sum() / output.numel() if rows else F.mse_loss(output, target)

    assert trained(tmp_path, loss, 1, EQUAL, classes=len(EQUAL)).verdict == "findings"


def test_weights_of_elements_may_hold_the_division(tmp_path: Path) -> None:
    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return (squared(output, target) * (target.abs().clamp(max=1) / len(EQUAL))).mean()

    report = trained(tmp_path, weighted, 1, EQUAL)
    assert report.findings == []


def test_an_error_that_is_made_larger_is_not_called_right(tmp_path: Path) -> None:
    report = trained(tmp_path, lambda output, target: -F.mse_loss(output, target), 1 / len(EQUAL), EQUAL)
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_sums_on_real_and_on_generated_data_accuse_nobody(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for shift, label in ((2.0, 1.0), (0.0, 0.0)):
            output = model(torch.randn(5, 6) + shift)
            target = torch.full_like(output, label)
            (F.binary_cross_entropy_with_logits(output, target, reduction="sum") / len(output)).backward()
        optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize("loss", [F.mse_loss, masked], ids=["mse", "masked"])
def test_means_over_unequal_batches_are_right_or_wrong_by_what_is_declared(tmp_path: Path, loss: Loss) -> None:
    left_open = trained(tmp_path / "open", loss, 1 / len(UNEQUAL), UNEQUAL)
    assert (left_open.verdict, left_open.findings) == ("undetermined", [])
    assert "--objective microbatch-mean" in left_open.reasons[0] and "--objective NAME" in next_step(left_open)
    mean = sum(UNEQUAL) / len(UNEQUAL)
    low, high = mean / max(UNEQUAL), mean / min(UNEQUAL)
    if loss is F.mse_loss:  # the other's numbers are those of its mask
        assert f"weigh from x {low:.4g} to x {high:.4g}" in left_open.reasons[0]
    meant = trained(tmp_path / "meant", loss, 1 / len(UNEQUAL), UNEQUAL, "microbatch-mean")
    assert meant.verdict == "clean"
    (finding,) = trained(tmp_path / "wrong", loss, 1 / len(UNEQUAL), UNEQUAL, "global-token-mean").findings
    assert finding.code == "GS301"


def test_ranks_that_hold_shards_of_one_model_have_one_batch(tmp_path: Path) -> None:
    warm_up()
    launch("element_workers:train_tensor_parallel", (str(tmp_path / "run"),), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize(
    ("divided_by", "verdict", "codes"),
    [
        *(("average", "clean", []), ("all", "findings", ["GS101"]), ("rank", "undetermined", [])),
        ("halved", "undetermined", []),  # half a squared error: on two ranks it weighs as if divided by "all"
    ],
)
def test_what_sums_are_divided_by_on_two_ranks(tmp_path: Path, divided_by: str, verdict: str, codes: list[str]) -> None:
    warm_up()
    launch("element_workers:train", (divided_by, str(tmp_path / "run")), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, [finding.code for finding in report.findings]) == (verdict, codes)
    assert divided_by != "rank" or "--objective rank-token-mean" in report.reasons[0]


@pytest.mark.parametrize("kept", [(3, 5), (2, 5)], ids=["as many as one rank's", "other numbers"])
def test_a_mean_over_padding_too_is_no_average_twice_where_masks_keep_as_many_in_all(
    tmp_path: Path, kept: tuple[int, int]
) -> None:
    """Eight rows of a rank's mean are those that masks keep on both: DDP's average was accused in such steps."""
    warm_up()
    launch("element_workers:train_padded", (kept, str(tmp_path / "run")), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert f"weigh x {sum(kept) / 16:g} of what they would in one mean" in report.reasons[0]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("divided", "codes"), [(True, []), (False, ["GS104"])])
def test_means_of_ranks_that_are_summed_by_hand_are_told_at_the_sum(
    tmp_path: Path, divided: bool, codes: list[str], behind: bool
) -> None:
    """Not at the line that divides by passes in front of it."""
    warm_up()
    launch("element_workers:train_by_hand", (divided, behind, str(tmp_path / "run")), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert ([finding.code for finding in report.findings], report.verdict) == (codes, "findings" if codes else "clean")
    for finding in report.findings:
        assert finding.first_event is not None and finding.first_event.kind == "reduce"
        assert "whole mean over its own elements" in finding.explanation


@pytest.mark.parametrize(
    ("passes", "before", "behind", "factor"),
    [(1, 1, 2, "1/2"), (3, 3, 2, "1/2"), (3, 1, 6, "1/2"), (3, 3, 3, "1/3"), (3, 1, 3, None), (3, 3, 1, None)],
)
def test_a_line_that_divides_means_once_more_is_found(
    tmp_path: Path, passes: int, before: float, behind: float, factor: str | None
) -> None:
    """Where nothing but the number of passes stands before the mean, no coefficient is meant."""
    warm_up()
    launch("element_workers:train_divided", (passes, before, behind, str(tmp_path / "run")), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.factor.exact for finding in report.findings] == ([factor] if factor else []), report.reasons
    assert report.verdict == ("findings" if factor else "clean")
    for finding in report.findings:
        # A line that divides by the passes as well is not too much as a whole: the average is.
        kind = "grad_write" if behind < passes * 2 or passes == 1 else "reduce"
        assert finding.first_event is not None and finding.first_event.kind == kind


@pytest.mark.parametrize("coefficient", [1, 0.3])
def test_a_sum_beside_an_average_of_ranks_means_lacks_the_division(tmp_path: Path, coefficient: float) -> None:
    """Most gradients are summed, and still it is not the average that is wrong."""
    warm_up()
    launch("element_workers:train_in_two", (coefficient, False, str(tmp_path / "wrong")), 2, timeout_s=60)
    (finding,) = diagnose(read_run(tmp_path / "wrong")).findings
    assert (finding.code, finding.factor.exact, finding.num_parameters) == ("GS104", "2", 6)
    launch("element_workers:train_in_two", (coefficient, True, str(tmp_path / "right")), 2, timeout_s=60)
    assert diagnose(read_run(tmp_path / "right")).findings == []


def test_an_average_beside_sums_of_what_counts_nothing_is_told_as_that(tmp_path: Path) -> None:
    warm_up()
    launch("element_workers:train_in_two", (0.3, False, str(tmp_path / "run"), "sum"), 2, timeout_s=60)
    (finding,) = diagnose(read_run(tmp_path / "run")).findings
    assert (finding.code, finding.num_parameters) == ("GS101", 4)
    assert finding.explanation.startswith("Other gradients are not divided by the ranks")
    assert "1/dp_replicate of the others'" in finding.explanation


@pytest.mark.parametrize(
    ("reduced_in", "world", "codes"),
    [("last", 2, []), ("first", 2, [("GS103", 0)]), ("first, over replicas", 4, [("GS103", 0)])],
)
def test_passes_that_a_sharded_model_never_reduces_are_missing_and_not_thrown_away(
    tmp_path: Path, reduced_in: str, world: int, codes: list[tuple[str, int]]
) -> None:
    warm_up()
    launch("element_workers:train_sharded", (reduced_in, str(tmp_path / "run")), world, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert ([(one.code, one.step) for one in report.findings], report.verdict == "clean") == (codes, not codes)


@pytest.mark.parametrize(("times", "codes"), [(2.0, []), (1, ["GS101"])])
def test_sums_of_all_ranks_that_are_gathered_without_gradients(tmp_path: Path, times: float, codes: list[str]) -> None:
    warm_up()
    launch("element_workers:train_metrics", (times, str(tmp_path / "run")), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert ([finding.code for finding in report.findings], report.verdict) == (codes, "findings" if codes else "clean")


@pytest.mark.parametrize("kept", [(3, 2, 0), (0, 0, 0)], ids=["one pass", "every pass"])
def test_a_mask_that_keeps_nothing_is_a_loss_over_no_elements(tmp_path: Path, kept: tuple[int, ...]) -> None:
    sizes = iter(kept)

    def of_kept(output: Tensor, target: Tensor) -> Tensor:
        mask = torch.arange(len(output)) < next(sizes)
        return (output[mask] - target[mask]).square().sum() / (CLASSES * max(sum(kept), 1))

    report = trained(tmp_path, of_kept, 1, EQUAL)
    assert (report.verdict, report.findings) == ("clean" if any(kept) else "undetermined", [])
    assert not any("bug" in reason for reason in report.reasons)


@pytest.mark.parametrize(
    ("coefficient", "factor", "changed"),
    [(1.0, 0.5, slice(1, None)), (0.5, 2.0, slice(0, 1))],
    ids=["most are halved", "one is doubled behind a coefficient"],
)
def test_gradients_that_lines_of_ones_own_change_are_accused_and_not_the_others(
    tmp_path: Path, coefficient: float, factor: float, changed: slice
) -> None:
    """Where most are changed by hand, what is usual is wrong, and what the loss's elements ask for is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())[changed]
    with attach(tmp_path):
        for size in EQUAL:
            (coefficient * F.mse_loss(model(torch.randn(size, 6)), torch.randn(size, 4)) / len(EQUAL)).backward()
        for param in params:
            param.grad *= factor
        optimizer.step()
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.code, finding.num_parameters) == ("GS000", len(params))
    assert finding.factor.observed == pytest.approx(factor, rel=1e-4)


def test_a_gradient_that_was_left_undivided_is_accused_and_not_those_that_were_divided(tmp_path: Path) -> None:
    """The losses leave the division by passes to lines behind them, which forget one parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    *divided, _ = model.parameters()
    with attach(tmp_path):
        for size in EQUAL:
            (0.7 * F.mse_loss(model(torch.randn(size, 6)), torch.randn(size, 4))).backward()
        for param in divided:
            param.grad /= len(EQUAL)
        optimizer.step()
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.num_parameters, finding.factor.exact) == (1, "3")
