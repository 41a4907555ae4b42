"""Trainers as people write them, right and wrong in ways that no document names: nobody right is accused, and what is
wrong is found by name. One process each; two ranks in test_red_team_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from probe_workers import Net, batch
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.reports import plain
from gradcheck_dist.reports.document import build
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run

STEPS, ACCUMULATION = 3, 2
Data = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Data, int], Tensor]
"""The loss of one microbatch, given the tokens of the step."""


def logits_of(model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
    return model(data[0]).flatten(0, 1), data[1].flatten()


def judged(folder: Path) -> Report:
    return diagnose(read_run(folder / "run"))


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def train(folder: Path, loss: Loss, accumulation: int = ACCUMULATION) -> Report:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder / "run"):
        for _ in range(STEPS):
            microbatches = [batch(0, k) for k in range(accumulation)]
            num_tokens = sum(int((labels >= 0).sum()) for _, labels in microbatches)
            for data in microbatches:
                loss(model, data, num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder)


def masked(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    logits, labels = logits_of(model, data)
    mask = (labels >= 0).float()
    return (F.cross_entropy(logits, labels.clamp_min(0), reduction="none") * mask).sum() / num_tokens


def class_weighted_sum(model: nn.Module, data: Data, num_tokens: int, *counted: Data) -> Tensor:
    weight, counted = torch.linspace(0.5, 1.5, 20), counted or tuple(batch(0, k) for k in range(ACCUMULATION))
    whole = sum(weight[labels[labels >= 0]].sum() for _, labels in counted)
    return F.cross_entropy(*logits_of(model, data), weight=weight, reduction="sum") / whole


def class_weighted_without_labels(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    """All labels of the second microbatch are ignored."""
    weight, (logits, labels) = torch.linspace(0.5, 1.5, 20), logits_of(model, data)
    first = batch(0, 0)[1].flatten()
    labels = labels if torch.equal(labels, first) else torch.full_like(labels, -100)
    return F.cross_entropy(logits, labels, weight=weight, reduction="sum") / weight[first[first >= 0]].sum()


def distillation(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    logits, labels = logits_of(model, data)
    kept = logits[labels >= 0]
    soft = F.kl_div(F.log_softmax(kept / 2, -1), torch.softmax(torch.ones_like(kept), -1), reduction="sum")
    return 0.5 * F.cross_entropy(logits, labels, reduction="sum") / num_tokens + 0.5 * 4 * soft / num_tokens


def soft_targets_only(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    logits, labels = logits_of(model, data)
    kept = logits[labels >= 0]
    return 4 * F.kl_div(F.log_softmax(kept / 2, -1), torch.ones_like(kept) / 20, reduction="sum") / num_tokens


def mixed_up(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    """Soft targets as mixup makes them; the mean over a pass."""
    logits, labels = logits_of(model, data)
    hard = F.one_hot(labels.clamp_min(0), 20).float()
    return torch.sum(-(0.7 * hard + 0.3 * hard.flip(0)) * F.log_softmax(logits, -1), dim=-1).mean()


def smoothed_by_hand(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    logits, labels = logits_of(model, data)
    log_probs, valid = F.log_softmax(logits, -1), labels >= 0
    picked = -log_probs.gather(-1, labels.clamp_min(0)[:, None]).squeeze(-1)[valid].sum()
    return (0.9 * picked - 0.1 / 20 * log_probs.sum(-1)[valid].sum()) / num_tokens


def penalty_for_confidence(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    """Looks like label smoothing, and takes nothing from the labels."""
    logits, labels = logits_of(model, data)
    log_probs = F.log_softmax(logits, -1)[labels >= 0]
    return -(log_probs.gather(-1, labels[labels >= 0][:, None]).sum() + 0.1 * log_probs.mean(-1).sum()) / num_tokens


def policy_gradient(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    logits, labels = logits_of(model, data)
    picked = F.log_softmax(logits, -1).gather(-1, labels.clamp_min(0)[:, None]).squeeze(-1)
    return -(picked * torch.linspace(-1, 1, len(labels)) * (labels >= 0)).sum() / num_tokens


def preference(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    logits, labels = logits_of(model, data)
    picked = F.log_softmax(logits, -1).gather(-1, labels.clamp_min(0)[:, None]).squeeze(-1) * (labels >= 0)
    chosen, rejected = picked.view(2, -1).sum(-1)
    return -F.logsigmoid(0.1 * (chosen - rejected)) / ACCUMULATION


def squared(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    return 0.5 * model(data[0]).pow(2).mean() / ACCUMULATION


def gradient_penalty(model: nn.Module, data: Data, num_tokens: int) -> Tensor:
    loss = F.cross_entropy(*logits_of(model, data), reduction="sum") / num_tokens
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.01 * torch.stack([gradient.pow(2).sum() for gradient in gradients]).sum()


RIGHT: dict[str, tuple[Loss, str]] = {
    "a mask over unreduced losses": (masked, "clean"),
    "class weights over their sum": (class_weighted_sum, "clean"),
    "class weights where a microbatch has no labels": (class_weighted_without_labels, "clean"),
    "a gradient penalty": (gradient_penalty, "clean"),
    "distillation beside labels": (distillation, "undetermined"),
    "distillation with a temperature": (soft_targets_only, "undetermined"),
    "soft targets' means, divided": (lambda *given: mixed_up(*given) / ACCUMULATION, "clean"),
    "soft targets' means times a temperature": (lambda *given: 4 * mixed_up(*given), "undetermined"),
    "label smoothing by hand": (smoothed_by_hand, "clean"),
    "a penalty for confidence": (penalty_for_confidence, "undetermined"),
    "a policy gradient": (policy_gradient, "clean"),
    "a preference loss": (preference, "undetermined"),
    "a loss that counts nothing": (squared, "undetermined"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_is_not_accused(tmp_path: Path, name: str) -> None:
    loss, verdict = RIGHT[name]
    report = train(tmp_path, loss)
    assert codes(report) == []
    assert report.verdict == verdict, report.reasons
    if verdict == "undetermined":
        assert any("mark_loss" in reason for reason in report.reasons)


WRONG: dict[str, tuple[Loss, str]] = {
    "smoothed by hand and divided twice": (lambda *given: smoothed_by_hand(*given) / ACCUMULATION, "GS303"),
    "smoothed by hand and not divided": (lambda *given: smoothed_by_hand(*given) * ACCUMULATION, "GS303"),
    "class weights over their sum, divided twice": (
        lambda *given: class_weighted_sum(*given) / ACCUMULATION,
        "GS303",
    ),
    "class weights over each pass's own sum": (
        lambda model, data, num_tokens: class_weighted_sum(model, data, num_tokens, data) / ACCUMULATION,
        "GS301",
    ),
    "masked and divided twice": (lambda *given: masked(*given) / ACCUMULATION, "GS303"),
    "soft targets' means that are added up": (mixed_up, "GS303"),
    "divided by padded tokens": (
        lambda model, data, num_tokens: F.cross_entropy(*logits_of(model, data), reduction="sum") / (ACCUMULATION * 24),
        "GS303",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_found(tmp_path: Path, name: str) -> None:
    loss, code = WRONG[name]
    assert set(codes(train(tmp_path, loss))) & set(code.split())


def test_a_loss_times_its_own_value_is_a_function_of_the_data_as_a_focal_factor_is(tmp_path: Path) -> None:
    report = train(tmp_path, lambda *given: (loss := masked(*given)) * loss.item())
    assert (report.verdict, codes(report)) == ("undetermined", [])
    assert "function of the data, which may be meant" in report.reasons[0]


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> None:
    F.cross_entropy(*logits_of(model, data)).backward()
    optimizer.step()


@pytest.mark.parametrize(("empties", "found"), [(True, []), (False, ["GS402"])])
def test_gradients_that_are_never_emptied_are_found(tmp_path: Path, empties: bool, found: list[str]) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            step_of(model, optimizer, batch(0, step))
            if empties:
                for param in model.parameters():  # as many write it, past every hook
                    param.grad = None
    assert codes(judged(tmp_path)) == found


@pytest.mark.parametrize(("empties", "found"), [(True, []), (False, ["GS402"])])
def test_a_gradient_may_be_left_from_before_another_optimizers_step(
    tmp_path: Path, empties: bool, found: list[str]
) -> None:
    """Two players in turn, as in a GAN: what one leaves is read again two optimizer steps later."""
    players = [Net(), Net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in players]
    with attach(tmp_path / "run"):
        for step in range(4):
            model, optimizer = players[step % 2], optimizers[step % 2]
            if step % 2 or empties:
                model.zero_grad()
            F.cross_entropy(*logits_of(model, batch(0, step))).backward()
            optimizer.step()
    assert codes(judged(tmp_path)) == found


@pytest.mark.parametrize(("share", "verdict"), [(1.0, "undetermined"), (0.5, "clean"), (1.5, "findings")])
def test_two_losses_that_one_pass_adds_up_may_be_tasks(tmp_path: Path, share: float, verdict: str) -> None:
    """Start and end of a span, or a head each."""
    model, other = Net(), nn.Linear(16, 20)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(2):
            tokens, labels = batch(0, step)
            hidden = torch.tanh(model.inner(model.embedding(tokens)))
            both = F.cross_entropy(*logits_of(model, (tokens, labels))) + F.cross_entropy(
                other(hidden).flatten(0, 1), labels.flatten()
            )
            (share * both).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert judged(tmp_path).verdict == verdict


@pytest.mark.parametrize("made_before", [True, False])
def test_a_model_whose_turn_comes_later_is_judged_from_its_first_step_on(tmp_path: Path, made_before: bool) -> None:
    """PPO: some steps of the actor, then some of the critic, which no forward pass has shown until then."""
    actor, critic = Net(), Net()

    def optimizers() -> list[torch.optim.SGD]:
        return [torch.optim.SGD(model.parameters(), lr=0.01) for model in (actor, critic)]

    made = optimizers()
    with attach(tmp_path / "run"):
        made = made if made_before else optimizers()
        for step in range(3):
            model, optimizer = (critic, made[1]) if step == 2 else (actor, made[0])
            if made_before:
                optimizer.zero_grad()
            (F.cross_entropy(*logits_of(model, batch(0, step))) * (3.0 if step == 2 else 1.0)).backward()
            optimizer.step()
            if not made_before:
                optimizer.zero_grad()
    report = judged(tmp_path)
    assert [(finding.code, finding.step) for finding in report.findings] == [("GS303", 2)]
    assert report.findings[0].num_parameters == len(list(critic.parameters()))


def test_two_models_in_one_loop_are_judged_apart(tmp_path: Path) -> None:
    first, second = Net(), Net()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (first, second)]
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            for model in (first, second):
                F.cross_entropy(*logits_of(model, batch(0, step))).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert judged(tmp_path).verdict == "clean"


def test_a_pass_for_a_regulariser_is_no_contribution(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            F.cross_entropy(*logits_of(model, batch(0, step))).backward()
            (1e-3 * torch.stack([param.pow(2).sum() for param in model.parameters()]).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert judged(tmp_path).verdict == "clean"


def test_weights_that_follow_another_objective_are_said_milder(tmp_path: Path) -> None:
    report = train(tmp_path, lambda model, data, _: F.cross_entropy(*logits_of(model, data)) / ACCUMULATION)
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("GS301", "warning")
    assert "follows the mean of per-microbatch means exactly" in finding.explanation
    assert "over-weighted by x" in finding.explanation and "under-weighted by x" in finding.explanation


def test_what_happens_behind_a_loss_that_counts_nothing_is_found_all_the_same(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path / "run"):
        for _ in range(STEPS):
            for k in range(ACCUMULATION):
                squared(model, batch(0, k), 1).backward()
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.mul_(0.5)  # what came before is halved once more
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path)
    assert len(report.findings) == 1
    ratios = sorted({round(weight.ratio or 0, 4) for weight in report.weights})
    assert ratios[0] == pytest.approx(ratios[-1] / 2)
    assert {weight.expected for weight in report.weights} == {None}
    assert not {"GS301", "GS302", "GS303"} & set(report.rules.passed)
    assert "Weight of each contribution's own gradient in step" in plain.render(build(report))


@pytest.mark.parametrize("count", ["own", "of the step before"])
def test_tokens_of_another_step_are_named(tmp_path: Path, count: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = 0
    with attach(tmp_path / "run"):
        for step in range(STEPS):
            data = batch(0, step)
            num_tokens = int((data[1] >= 0).sum())
            divisor = (before or num_tokens) if count == "of the step before" else num_tokens
            (F.cross_entropy(*logits_of(model, data), reduction="sum") / divisor).backward()
            before = num_tokens
            optimizer.step()
            optimizer.zero_grad()
    report = judged(tmp_path)
    if count == "own":
        assert (report.verdict, report.findings) == ("clean", [])
        return
    (finding,) = report.findings
    assert (finding.code, finding.steps) == ("GS303", [1, 2])
    assert finding.factor.expression == "num_tokens/num_tokens of step 0"
    assert "8 tokens are those of step 0; this step has 12" in finding.explanation


@pytest.mark.parametrize("schedule", [(1 / 3, 2 / 3, 1), (0.1, 1, 1), (0.5, 0.5, 1), (0.25, 0.5, 0.75)])
def test_a_coefficient_that_follows_a_schedule_is_not_accused(tmp_path: Path, schedule: tuple[float, ...]) -> None:
    report = train_in_turn(tmp_path, [lambda loss, by=number: by * loss for number in schedule])
    assert (report.verdict, report.findings) == ("undetermined", [])
    off = next(number for number in schedule if number != 1)
    assert any(f"x {off:.6g} of a mean" in reason for reason in report.reasons)
    assert diagnose_run(tmp_path / "run", first=True).verdict == "undetermined"


def test_a_constant_beside_a_schedule_is_accused(tmp_path: Path) -> None:
    report = train_in_turn(tmp_path, [lambda loss, by=number: 3 * (by * loss) for number in (0.1, 1, 1)])
    assert set(codes(report)) == {"GS303"}


@pytest.mark.parametrize("accum_steps", [1.5, 2])
def test_a_division_in_the_first_step_alone_is_no_warm_up(tmp_path: Path, accum_steps: float) -> None:
    losses = [lambda loss: loss / accum_steps, lambda loss: loss, lambda loss: loss]
    assert codes(train_in_turn(tmp_path, losses)) == ["GS303"]


@pytest.mark.parametrize("numbers", [(1, 1, 2 / 3), (3, 1, 1), (1, 2, 2), (0.25, 0.25, 0.25)])
def test_what_does_not_rise_to_one_is_no_warm_up(tmp_path: Path, numbers: tuple[float, ...]) -> None:
    report = train_in_turn(tmp_path, [lambda loss, by=number: loss * by for number in numbers])
    assert codes(report) == ["GS303"]


def train_in_turn(folder: Path, losses: list[Callable[[Tensor], Tensor]]) -> Report:
    """One pass a step, of whose mean each step's loss is made."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(folder / "run"):
        for loss in losses:
            loss(F.cross_entropy(*logits_of(model, batch(0, 0)))).backward()
            optimizer.step()
            optimizer.zero_grad()
    return judged(folder)


def test_a_gradient_that_is_replaced_is_not_stale(tmp_path: Path) -> None:
    """Gradients are gathered in buffers of the loop's own, while .grad still holds the last step's."""
    model = Net()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.01)
    with attach(tmp_path / "run"):
        for _ in range(STEPS):
            gathered = [torch.zeros_like(param) for param in params]
            num_tokens = sum(int((batch(0, k)[1] >= 0).sum()) for k in range(ACCUMULATION))
            for k in range(ACCUMULATION):
                loss = F.cross_entropy(*logits_of(model, batch(0, k)), reduction="sum") / num_tokens
                torch._foreach_add_(gathered, torch.autograd.grad(loss, params))
            for param, gradient in zip(params, gathered, strict=True):
                param.grad = gradient
            optimizer.step()
    report = judged(tmp_path)
    assert (report.verdict, codes(report)) == ("clean", [])


@pytest.mark.parametrize("empties", [True, False])
def test_a_mean_that_the_last_step_read_is_no_stale_gradient(tmp_path: Path, empties: bool) -> None:
    """Variance reduction (SVRG): its first step reads the mean of all batches, later ones add it to a difference."""
    model = Net()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    data = [batch(0, k) for k in range(3)]

    def loss(k: int) -> Tensor:
        return F.cross_entropy(*logits_of(model, data[k]))

    snapshot = [param.detach().clone() for param in params]
    mean = torch.autograd.grad(sum((loss(k) for k in range(3)), torch.zeros(())) / 3, params)
    with attach(tmp_path / "run"):
        for step in range(3):
            now = [param.detach().clone() for param in params]
            for param, value in zip(params, snapshot, strict=True):
                param.data.copy_(value)
            before = torch.autograd.grad(loss(step), params)
            for param, value in zip(params, now, strict=True):
                param.data.copy_(value)
            if empties:
                optimizer.zero_grad()
            loss(step).backward()
            for param, old, whole in zip(params, before, mean, strict=True):
                assert param.grad is not None
                param.grad += whole - old if empties else 0.0
            optimizer.step()
    report = judged(tmp_path)
    assert report.verdict == ("undetermined" if empties else "findings")
    assert ("GS402" in codes(report)) != empties


def test_class_weights_below_a_loss_scale_count_as_without_it(tmp_path: Path) -> None:
    """Also where a clip by parameter hides what the weights come to."""
    model, scaler = Net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=300.0)
    with attach(tmp_path / "run"):
        for _ in range(STEPS):
            for k in range(ACCUMULATION):
                scaler.scale(class_weighted_sum(model, batch(0, k), 0)).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1e-3 * parameter.detach().norm() / parameter.grad.norm())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    report = judged(tmp_path)
    assert (report.verdict, report.findings) == ("undetermined", [])
