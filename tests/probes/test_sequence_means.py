"""Losses that are means over sequences: sums over each one's tokens, divided by their number, in several forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch

VOCABULARY = 12
Model = Callable[[Tensor], Tensor]
Loss = Callable[[Model, Sequence[Tensor]], Tensor]
"""The sum over sequences of the mean over each one's tokens."""
BATCHES = ((3, 5), (4, 4, 7), (2,))
"""The lengths of the sequences of each pass."""


def rows(model: Model, batch: Sequence[Tensor]) -> Tensor:
    """Padded, a row a sequence."""
    tokens = nn.utils.rnn.pad_sequence(list(batch), batch_first=True, padding_value=-100)
    logits = model(tokens.clamp_min(0))
    of_tokens = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
    return (of_tokens.sum(1) / (tokens != -100).sum(1)).sum()


def packed(model: Model, batch: Sequence[Tensor]) -> Tensor:
    """One behind the other, with a weight for each token."""
    tokens = torch.cat(list(batch))
    weights = torch.cat([torch.full((len(one),), 1 / len(one)) for one in batch])
    return (F.cross_entropy(model(tokens), tokens, reduction="none") * weights).sum()


def one_by_one(model: Model, batch: Sequence[Tensor]) -> Tensor:
    """Each picked out of its own log-probabilities."""
    picked = [F.log_softmax(model(one), -1).gather(-1, one[:, None]) for one in batch]
    return torch.stack([-one.mean() for one in picked]).sum()


def soft(model: Model, batch: Sequence[Tensor]) -> Tensor:
    """Distilled: targets over all classes."""
    tokens = nn.utils.rnn.pad_sequence(list(batch), batch_first=True, padding_value=-100)
    targets = F.one_hot(tokens.clamp_min(0), VOCABULARY) * 0.5 + 0.5 / VOCABULARY
    of_tokens = -(F.log_softmax(model(tokens.clamp_min(0)), -1) * targets).sum(-1) * (tokens != -100)
    return (of_tokens.sum(1) / (tokens != -100).sum(1)).sum()


FORMS: dict[str, Loss] = {"rows": rows, "packed": packed, "one by one": one_by_one, "soft targets": soft}


def trained(
    run_dir: Path,
    loss: Loss,
    divisor: Callable[[int], float],
    lengths: Sequence[Sequence[int]] = BATCHES,
    objective: str | None = None,
    behind: int = 1,
) -> Report:
    """One step; each pass is divided by what `divisor` makes of the number of its sequences, but for 1. `behind`: what
    gradients are divided by."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Tanh(), nn.Linear(8, VOCABULARY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir, objective=objective):
        for of_batch in lengths:
            batch = [torch.randint(0, VOCABULARY, (length,)) for length in of_batch]
            value, by = loss(model, batch), divisor(len(batch))
            (value if by == 1 else value / by).backward()
        for param in model.parameters() if behind > 1 else ():
            param.grad = None if param.grad is None else param.grad / behind
        optimizer.step()
    return diagnose(read_run(run_dir))


NUM = sum(map(len, BATCHES))


@pytest.mark.parametrize("form", FORMS)
def test_sequences_that_weigh_alike_are_right(tmp_path: Path, form: str) -> None:
    report = trained(tmp_path, FORMS[form], lambda _: NUM)
    assert (report.verdict, report.reasons, report.run.objective) == ("clean", [], "sequence-mean")
    assert report.run.objective_from.startswith("inferred")
    lengths = [length for of_batch in BATCHES for length in of_batch]
    shortest, longest = min(lengths), max(lengths)
    said = f"one of {shortest} weighs x {longest / shortest:.4g} of a token of one of {longest};"
    assert said in report.run.objective_from


@pytest.mark.parametrize("form", sorted(FORMS.keys() - {"one by one"}))
def test_means_over_the_sequences_of_a_pass_are_means_of_means(tmp_path: Path, form: str) -> None:
    (finding,) = trained(tmp_path, FORMS[form], lambda num: num * len(BATCHES)).findings
    assert (finding.code, finding.severity) == ("GS301", "warning")
    assert finding.factor.expression == "num_sequences/(contributions * n_c)"
    assert "divides each microbatch by its own sequences" in finding.explanation


def test_losses_one_by_one_may_be_tasks(tmp_path: Path) -> None:
    """Of which some batches have fewer; the sum of all is divided by the passes."""
    report = trained(tmp_path, one_by_one, lambda _: len(BATCHES))
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize(("times", "expression"), [(len(BATCHES), "1/accumulation_steps"), (1 / NUM, "num_sequences")])
def test_a_division_too_many_or_none_is_found(tmp_path: Path, times: float, expression: str) -> None:
    (finding,) = trained(tmp_path, rows, lambda _: NUM * times).findings
    assert (finding.code, finding.factor.expression) == ("GS303", expression)


def test_a_wrong_count_of_sequences_is_told(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, rows, lambda _: NUM - 2).findings
    assert finding.code == "GS303"
    assert f"counted as {NUM - 2}" in finding.fix


def test_rows_that_are_divided_by_their_padded_length_are_found(tmp_path: Path) -> None:
    def padded(model: Model, batch: Sequence[Tensor]) -> Tensor:
        tokens = nn.utils.rnn.pad_sequence(list(batch), batch_first=True, padding_value=-100)
        return F.cross_entropy(model(tokens.clamp_min(0)).transpose(1, 2), tokens, reduction="none").mean(1).sum()

    (finding,) = trained(tmp_path, padded, lambda _: NUM).findings
    assert (finding.code, "padding included" in finding.explanation) == ("GS303", True)
    assert finding.factor.expression is not None and finding.factor.expression.endswith("T_c^-1")


def test_sequences_that_are_masked_as_a_whole_may_count(tmp_path: Path) -> None:
    report = trained(tmp_path, rows, lambda _: NUM + 1)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any(f"divided by {NUM + 1} sequences, and tokens of {NUM} enter" in reason for reason in report.reasons)


def test_weights_of_tokens_that_follow_no_length_are_left_open(tmp_path: Path) -> None:
    def by_source(model: Model, batch: Sequence[Tensor]) -> Tensor:
        tokens, weights = torch.cat(list(batch)), torch.cat([torch.full((len(one),), 0.5 + len(one)) for one in batch])
        return (F.cross_entropy(model(tokens), tokens, reduction="none") * weights).sum()

    report = trained(tmp_path, by_source, lambda _: 7)
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize(("divisor", "found"), [(6, []), (12, ["GS303"])])
def test_pairs_of_neighbours_of_one_length_are_told_apart(tmp_path: Path, divisor: int, found: list[str]) -> None:
    """All of one pass, so that no single one beside them tells what a sequence weighs."""
    report = trained(tmp_path, packed, lambda _: divisor, [(4, 4, 2, 2), (3, 5)])
    assert [one.code for one in report.findings] == found
    assert report.verdict == ("findings" if found else "clean")


def test_heads_that_weigh_alike_are_no_sequences(tmp_path: Path) -> None:
    """Two means over labels of one batch, one of them shifted once more, are right as the mean of both at most."""

    def heads(model: Model, batch: Sequence[Tensor]) -> Tensor:
        logits, tokens = model(batch[0]), batch[0]
        losses = []
        for shift in (0, 1):
            losses.append(F.cross_entropy(logits[: len(tokens) - shift], tokens[shift:]))
        return torch.stack(losses).sum()

    report = trained(tmp_path, heads, lambda _: 3, [(6,), (6,), (6,)])
    assert report.findings == []


def test_what_is_declared_decides(tmp_path: Path) -> None:
    def judged(objective: str, divisor: Callable[[int], float]) -> Report:
        return trained(tmp_path / objective, rows, divisor, objective=objective)

    assert judged("microbatch-mean", lambda num: num * len(BATCHES)).verdict == "clean"
    (finding,) = judged("sequence-mean", lambda num: num * len(BATCHES)).findings
    assert finding.severity == "error"
    of_tokens = judged("global-token-mean", lambda _: NUM)
    assert (of_tokens.verdict, of_tokens.findings) == ("undetermined", [])
    assert any("`--objective sequence-mean` judges" in reason for reason in of_tokens.reasons)


@pytest.mark.parametrize(
    ("divided_by", "found"), [("average", []), ("all", [("GS101", "1/dp_replicate")]), ("rank", [("GS302", None)])]
)
def test_ranks_with_unequal_numbers_of_sequences(
    tmp_path: Path, divided_by: str, found: list[tuple[str, str | None]]
) -> None:
    launch("element_workers:train_sequences", (divided_by, str(tmp_path / "run")), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    told = [(finding.code, finding.factor.expression) for finding in report.findings]
    assert [code for code, _ in told] == [code for code, _ in found]
    assert all(name in (None, expression) for (_, name), (_, expression) in zip(found, told, strict=True))
    assert (report.verdict == "clean") == (not found)


def ratios(model: Model, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A clipped policy loss of each token, padded, and which tokens count."""
    tokens = nn.utils.rnn.pad_sequence(list(batch), batch_first=True, padding_value=-100)
    labels, mask = tokens.clamp_min(0), (tokens != -100).float()
    log_probs = F.log_softmax(model(labels), -1).gather(-1, labels[..., None]).squeeze(-1)
    ratio = (log_probs - log_probs.detach() + 0.1 * torch.randn(labels.shape)).exp()
    advantages = torch.randn(len(batch), 1)
    return -torch.min(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages), mask


def policy(model: Model, batch: Sequence[Tensor]) -> Tensor:
    losses, mask = ratios(model, batch)
    return ((losses * mask).sum(1) / mask.sum(1)).sum()


def policy_of_sums(model: Model, batch: Sequence[Tensor]) -> Tensor:
    losses, mask = ratios(model, batch)
    return (losses * mask).sum(1).sum()


def policy_in_parts(model: Model, batch: Sequence[Tensor]) -> Tensor:
    """As Megatron's schedules are given it: a list of sequences, packed."""
    losses, mask = ratios(model, batch)
    parts = losses[mask > 0].split([len(one) for one in batch])
    return torch.stack([part.mean() for part in parts]).sum()


POLICIES = {"rows": policy, "sums of rows": policy_of_sums, "parts": policy_in_parts}


@pytest.mark.parametrize("form", POLICIES)
def test_functions_of_the_data_are_judged_by_what_they_are_summed_over(tmp_path: Path, form: str) -> None:
    report = trained(tmp_path / "right", POLICIES[form], lambda _: NUM)
    assert (report.verdict, report.reasons) == ("clean", [])
    means = trained(tmp_path / "means", POLICIES[form], lambda num: num * len(BATCHES))
    assert (means.verdict, means.findings) == ("undetermined", [])
    assert any("mean of means" in reason for reason in means.reasons)


def test_neighbours_of_one_length_are_told_by_what_a_sequence_weighs(tmp_path: Path) -> None:
    lengths = [(3, 5), (4, 4), (2, 6)]
    assert trained(tmp_path, policy_in_parts, lambda _: 6, lengths).verdict == "clean"


@pytest.mark.parametrize(("divided_by", "found"), [("average", []), ("all", ["GS101"])])
def test_a_policy_loss_that_is_divided_by_all_ranks_sequences(
    tmp_path: Path, divided_by: str, found: list[str]
) -> None:
    launch("element_workers:train_sequences", (divided_by, str(tmp_path / "run"), True), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert ([one.code for one in report.findings], report.verdict) == (found, "findings" if found else "clean")


def test_a_learned_weight_over_a_mean_hides_what_the_mean_goes_over(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.tensor(0.3))

    def learned(model: Model, batch: Sequence[Tensor]) -> Tensor:
        tokens = torch.cat(list(batch))
        return F.cross_entropy(model(tokens), tokens) * weight.exp()

    assert trained(tmp_path, learned, lambda _: len(BATCHES)).verdict == "undetermined"


def preference(model: Model, batch: Sequence[Tensor]) -> Tensor:
    """The mean over pairs, the first half of the batch chosen."""
    picked = torch.stack([F.log_softmax(model(one), -1).gather(-1, one[:, None]).sum() for one in batch])
    chosen, rejected = picked.chunk(2)
    return (-F.logsigmoid(0.1 * (chosen - rejected))).mean()


def test_a_sign_before_a_mean_over_pairs_is_no_coefficient(tmp_path: Path) -> None:
    def gain(model: Model, batch: Sequence[Tensor]) -> Tensor:
        picked = torch.stack([F.log_softmax(model(one), -1).gather(-1, one[:, None]).sum() for one in batch])
        return -F.logsigmoid(picked[:2] - picked[2:]).mean()

    assert trained(tmp_path, gain, lambda _: 3, [(2, 3, 4, 5)] * 3).verdict == "clean"


@pytest.mark.parametrize(("divisor", "found"), [(3, []), (1, ["GS303"])])
def test_means_over_pairs_are_averaged_over_passes(tmp_path: Path, divisor: int, found: list[str]) -> None:
    report = trained(tmp_path, preference, lambda _: divisor, [(2, 3, 4, 5)] * 3)
    assert ([one.code for one in report.findings], report.verdict) == (found, "findings" if found else "clean")


def test_a_second_division_of_a_function_of_the_data_is_told(tmp_path: Path) -> None:
    report = trained(tmp_path, preference, lambda _: 6, [(2, 3, 4, 5)] * 3)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("weighs x 0.5 of what it would" in problem for problem in report.reasons), report.reasons


def unpaired(model: Model, batch: Sequence[Tensor]) -> Tensor:
    """One curve over what is wanted, another over the rest, side by side."""
    picked = torch.stack([F.log_softmax(model(one), -1).gather(-1, one[:, None]).sum() for one in batch])
    return torch.cat([1 - picked[:1].sigmoid(), 0.5 * picked[1:].sigmoid()]).nanmean()


@pytest.mark.parametrize(("divisor", "verdict"), [(3, "clean"), (1, "undetermined")])
def test_losses_side_by_side_are_one_mean(tmp_path: Path, divisor: int, verdict: str) -> None:
    report = trained(tmp_path, unpaired, lambda _: divisor, [(2, 3, 4, 5)] * 3)
    assert (report.verdict, report.findings) == (verdict, [])


def divergence(model: Model, batch: Sequence[Tensor]) -> Tensor:
    """From a mixture with a teacher's distribution, summed over the tokens that a mask picks, and over one pass."""
    tokens = nn.utils.rnn.pad_sequence(list(batch), batch_first=True, padding_value=-100)
    student = F.log_softmax(model(tokens.clamp_min(0)), -1)
    teacher = torch.full_like(student, 1 / VOCABULARY).log()
    mixture = torch.stack([student, teacher]).logsumexp(0)
    apart = F.kl_div(mixture, student, reduction="none", log_target=True)
    return apart[tokens != -100].sum() / 1


def test_rows_that_a_mask_picks_are_all_of_them(tmp_path: Path) -> None:
    tokens = sum(map(sum, BATCHES))
    assert trained(tmp_path / "right", divergence, lambda _: tokens).verdict == "clean"
    report = trained(tmp_path / "halves", divergence, lambda _: 2 * tokens)
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_means_of_heads_that_nobody_divides_are_told_with_their_factor(tmp_path: Path) -> None:
    def heads(model: Model, batch: Sequence[Tensor]) -> Tensor:
        return torch.stack([F.cross_entropy(model(one), one) for one in batch]).mean()

    lengths = ((3, 5), (4, 7))
    assert trained(tmp_path / "right", heads, lambda _: len(lengths), lengths).verdict == "clean"
    report = trained(tmp_path / "undivided", heads, lambda _: 1, lengths)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("weigh x 2 of what they would in one mean" in reason for reason in report.reasons)


def test_heads_that_are_divided_behind_the_loss_by_as_many_as_passes_are_left_open(tmp_path: Path) -> None:
    def heads(model: Model, batch: Sequence[Tensor]) -> Tensor:
        one, other = (F.cross_entropy(model(tokens), tokens) for tokens in batch)
        return one + other

    report = trained(tmp_path / "twice", heads, lambda _: 1, ((3, 5), (3, 5)), behind=4)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "one division by ranks or passes too many" in report.reasons[0]
    assert trained(tmp_path / "right", heads, lambda _: 2, ((3, 5), (3, 5)), behind=2).verdict == "clean"


def labelled_by_flat_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Each row's mean, of losses that are computed of all rows at once: nothing tells where one ends."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    return (losses.sum(1) / (labels >= 0).sum(1)).sum()


@pytest.mark.parametrize("beside", [False, True])
def test_rows_of_one_length_that_look_like_one_are_counted_by_their_means(tmp_path: Path, beside: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(5,), (4, 4), (3,)]
    num = sum(map(len, batches))
    with attach(tmp_path):
        for lengths in batches:
            tokens, labels = torch.randint(9, (2, len(lengths), 6))
            logits = model(tokens)
            labels = torch.where(torch.arange(6) < torch.tensor(lengths)[:, None], labels, -100)
            loss = labelled_by_flat_rows(logits, labels) / num
            (loss + 0.01 * logits.square().mean() / len(batches) if beside else loss).backward()
        optimizer.step()
    assert diagnose(read_run(tmp_path)).verdict == "clean"
