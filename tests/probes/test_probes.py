"""What each probe sees in a loop of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from elsewhere import pretend
from one_process import accumulate, events_of, healthy, judged, record
from probe_workers import Net, batch, token_sum
from torch import Tensor, nn

from gradcheck_dist.diagnosis.report.next_step import next_step
from gradcheck_dist.events import Clip, Loss, LossGradient, ZeroGrad
from gradcheck_dist.probes import attach, mark_loss
from gradcheck_dist.probes.losses.loss import label_hash


def test_a_healthy_accumulation_is_clean_in_every_step(tmp_path: Path) -> None:
    record(healthy, tmp_path, steps=3)
    report = judged(tmp_path)
    assert (report.verdict, report.run.steps) == ("clean", [0, 1, 2])
    assert {round(weight.ratio or 0, 6) for weight in report.weights} == {1.0}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_weight_of_one_token_is_seen_for_every_reduction(reduction: str, tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tokens, labels = batch(0, 1)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction=reduction)
        (loss if reduction == "mean" else loss.sum() / (labels >= 0).sum()).backward()
        optimizer.step()

    record(step, tmp_path)
    (loss,) = events_of(tmp_path, LossGradient)
    assert loss.num_tokens == int((batch(0, 1)[1] >= 0).sum())
    assert loss.weight == pytest.approx(1 / loss.num_tokens, rel=1e-6)
    assert judged(tmp_path).verdict == "clean"


def test_labels_are_known_by_their_values_however_they_lie_in_memory() -> None:
    labels = torch.arange(12).reshape(3, 4)
    for view in (labels[:, 1], labels.t(), labels[::2, ::3], labels[1, 2]):
        assert label_hash(view) == label_hash(view.clone(memory_format=torch.contiguous_format))
    assert label_hash(labels) != label_hash(labels.t())


def test_an_evaluation_without_backward_is_no_contribution(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            token_sum(model, batch(0, 5))
        healthy(model, optimizer)

    record(step, tmp_path)
    assert len(events_of(tmp_path, Loss)) == 4
    report = judged(tmp_path)
    assert report.verdict == "clean"
    assert {weight.contribution.accumulation_step for weight in report.weights} == {0, 1, 2}


def test_two_optimizers_share_one_step(tmp_path: Path) -> None:
    model = Net()
    first = torch.optim.SGD(model.inner.parameters(), lr=0.1)
    second = torch.optim.AdamW([*model.embedding.parameters(), *model.head.parameters()], lr=0.1)
    with attach(tmp_path):
        for _ in range(2):
            accumulate(model)
            first.step()
            second.step()
            model.zero_grad()
    report = judged(tmp_path)
    assert (report.verdict, report.run.steps) == ("clean", [0, 1])
    assert report.coverage.parameters_observed == 5


def test_gradients_computed_inside_a_closure_are_read_after_it(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = token_sum(model, batch(0, 1)) / int((batch(0, 1)[1] >= 0).sum())
            loss.backward()
            return loss

        optimizer.step(closure)

    record(step, tmp_path)
    assert judged(tmp_path).verdict == "clean"


def test_clipping_scales_all_weights_alike_and_is_no_finding(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        accumulate(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    record(step, tmp_path)
    (clip,) = events_of(tmp_path, Clip)
    assert clip.coefficient == pytest.approx(0.01 / (clip.total_norm + 1e-6))
    assert judged(tmp_path).verdict == "clean"


def test_a_generator_given_to_clipping_is_used_up_as_without_probes(tmp_path: Path) -> None:
    seen: list[float] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        accumulate(model)
        params = (param for param in model.parameters())
        seen.append(float(nn.utils.clip_grad_norm_(params, 0.01)))
        seen.append(len(list(params)))
        optimizer.step()

    record(step, tmp_path)
    assert seen[0] > 0 and seen[1] == 0


def test_a_gradient_scaler_is_followed_through_its_unscale(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = [batch(0, k) for k in range(2)]
        total = sum(int((labels >= 0).sum()) for _, labels in data)
        for part in data:
            scaler.scale(token_sum(model, part) / total).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    record(step, tmp_path, steps=2)
    report = judged(tmp_path)
    assert (report.verdict, report.run.steps) == ("clean", [0, 1])


@pytest.mark.parametrize(("fault", "code"), [("", None), ("twice", "GS303"), ("clipped while scaled", "GS604")])
def test_a_fused_optimizer_divides_by_the_loss_scale_as_it_reads(fault: str, code: str | None, tmp_path: Path) -> None:
    """No unscale_ runs then: what its step reads is sampled with the scale in it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with attach(tmp_path):
        for _ in range(3):
            data = [batch(0, k) for k in range(3)]
            total = sum(int((labels >= 0).sum()) for _, labels in data)
            for part in data:
                loss = token_sum(model, part) * (2 if fault == "twice" else 1) / total
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if fault == "clipped while scaled":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    report = judged(tmp_path)
    assert [finding.code for finding in report.findings] == ([code] if code else [])
    assert report.verdict == ("findings" if code else "clean")
    if fault == "twice":
        assert report.findings[0].factor.observed == pytest.approx(2)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_fused_step_that_overflowed_updates_nothing(
    elsewhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if elsewhere:  # what the scaler found comes behind the optimizer's step
        pretend(monkeypatch)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with attach(tmp_path):
        for turn in range(3):
            total = int((batch(0, 0)[1] >= 0).sum())
            loss = token_sum(model, batch(0, 0)) * (1.0 if turn else 1e9) / total
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update(None if turn else 1024.0)
            optimizer.zero_grad()
    report = judged(tmp_path)
    assert (report.verdict, report.run.steps, report.run.skipped_steps) == ("clean", [1, 2], [0])


@pytest.mark.parametrize(("left", "code"), [("all", "GS303"), ("one optimizer's", "GS000"), ("all, clipped", "GS303")])
def test_a_scale_that_nothing_takes_out_is_called_so(left: str, code: str, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        other = torch.optim.SGD([optimizer.param_groups[0]["params"].pop()], lr=0.1)
        data = [batch(0, k) for k in range(2)]
        total = sum(int((labels >= 0).sum()) for _, labels in data)
        for part in data:
            scaler.scale(token_sum(model, part) / total).backward()
        if "clipped" in left:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if left == "one optimizer's":
            scaler.step(optimizer)
        else:
            optimizer.step()
        other.step()

    record(step, tmp_path)
    (finding,) = judged(tmp_path).findings
    assert (finding.code, finding.factor.expression) == (code, "loss_scale")
    assert "scaler.step(optimizer), for every optimizer" in finding.fix


def test_emptying_gradients_between_microbatches_is_found_with_its_line(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for k in range(2):
            optimizer.zero_grad()
            (token_sum(model, batch(0, k)) / 20).backward()
        optimizer.step()

    record(step, tmp_path)
    assert events_of(tmp_path, ZeroGrad)
    (finding,) = judged(tmp_path).findings
    assert finding.code == "GS401" and finding.first_event is not None
    assert finding.first_event.file == __file__


def test_a_loss_that_no_wrapper_sees_is_completed_by_mark_loss(tmp_path: Path) -> None:
    def own_loss(model: nn.Module, marked: bool) -> Tensor:
        tokens, labels = batch(0, 0)
        valid = labels >= 0
        logits = model(tokens)
        picked = logits.softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1).log()
        total = -(picked * valid).sum()
        if marked:
            mark_loss(total, int(valid.sum()), labels=labels)
        return total.square().sqrt() / valid.sum()  # behind a curve nobody knows what the sum weighs

    for marked in (False, True):
        run_dir = tmp_path / str(marked)

        def step(model: nn.Module, optimizer: torch.optim.Optimizer, marked: bool = marked) -> None:
            own_loss(model, marked).backward()
            optimizer.step()

        record(step, run_dir)
        report = judged(run_dir)
        assert report.verdict == ("clean" if marked else "undetermined")
        assert marked or "mark_loss" in " ".join(report.reasons)


@pytest.mark.parametrize("seen", [True, False])
def test_a_loss_that_is_declared_beside_the_one_that_backward_goes_through_is_told(tmp_path: Path, seen: bool) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        outputs = model(batch(0, 0)[0]).flatten(0, 1)
        target = torch.ones_like(outputs)
        losses = (F.mse_loss(outputs, target, reduction="none") if seen else outputs.cos()).mean(-1)
        mark_loss(losses.sum(), losses.numel())
        losses.mean().backward()
        optimizer.step()

    record(step, tmp_path)
    report = judged(tmp_path)
    assert report.verdict == "undetermined"
    (reason,) = [reason for reason in report.reasons if "mark_loss at test_probes.py:" in reason]
    assert "no backward pass went through" in reason
    assert next_step(report).startswith("Let backward go through what mark_loss returns")


@pytest.mark.parametrize(("divisor", "factor"), [(1.0, None), (1 / 2, 2.0)])
def test_a_cross_entropy_may_be_declared_an_auxiliary_term(
    tmp_path: Path, divisor: float, factor: float | None
) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = [batch(0, k) for k in range(2)]
        counts = [int((labels >= 0).sum()) for _, labels in data]
        for (tokens, labels), count in zip(data, counts, strict=True):
            logits = model(tokens).flatten(0, 1)
            further = F.cross_entropy(logits.flip(0), labels.flatten(), reduction="sum")
            mark_loss(further, count, term="further", coefficient=0.1)
            main = F.cross_entropy(logits, labels.flatten(), reduction="sum")
            ((main + 0.1 / divisor * further) / sum(counts)).backward()
        optimizer.step()

    record(step, tmp_path)
    report = judged(tmp_path)
    told = [(event.term, event.coefficient) for event in events_of(tmp_path, Loss)]
    assert told == [("main", None), ("further", 0.1), ("main", None)] * 2
    assert [finding.factor.observed for finding in report.findings] == ([pytest.approx(factor)] if factor else [])
    assert all(weight.num_tokens is not None and weight.ratio == pytest.approx(1.0) for weight in report.weights)


def test_gradients_from_autograd_grad_are_contributions_too(tmp_path: Path) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = token_sum(model, batch(0, 0)) / int((batch(0, 0)[1] >= 0).sum())
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = grad
        optimizer.step()

    record(step, tmp_path)
    assert judged(tmp_path).verdict == "clean"


def test_a_step_that_the_scaler_skips_is_noted_and_the_others_are_judged(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # overflows at once, then backs off
    steps = 0

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        nonlocal steps
        total = int((batch(0, 0)[1] >= 0).sum())
        scaler.scale(token_sum(model, batch(0, 0)) * (1.0 if steps else 1e9) / total).backward()
        scaler.step(optimizer)
        scaler.update(None if steps else 1024.0)
        optimizer.zero_grad()
        steps += 1

    record(step, tmp_path, steps=2)
    report = judged(tmp_path)
    assert (report.verdict, report.run.steps) == ("clean", [1])
    assert any("skipped the optimizer" in note for note in report.coverage.notes)


@pytest.mark.parametrize("left", ["kept", "emptied", "emptied behind the loss"])
def test_gradients_that_overflowed_and_stay_leave_the_verdict_open(tmp_path: Path, left: str) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    steps = 0

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        nonlocal steps
        total = int((batch(0, 0)[1] >= 0).sum())
        loss = scaler.scale(token_sum(model, batch(0, 0)) * (1e38 if steps == 1 else 1.0) / total)
        if left == "emptied behind the loss":
            optimizer.zero_grad(set_to_none=False)
        loss.backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if left == "emptied" or (left == "kept" and scaler.get_scale() == before):
            optimizer.zero_grad()
        steps += 1

    record(step, tmp_path, steps=4)
    report = judged(tmp_path)
    if left == "kept":
        assert (report.verdict, report.run.steps, report.run.skipped_steps) == ("undetermined", [0], [1, 2, 3])
        assert any("steps 2 and 3 backward added to gradients that had overflowed" in one for one in report.reasons)
        assert report.next_step.startswith("Call optimizer.zero_grad()")
    else:
        assert (report.verdict, report.run.skipped_steps) == ("clean", [1])


def test_what_another_optimizer_empties_before_its_own_pass_is_not_taken_for_left(tmp_path: Path) -> None:
    """Two models in turn, whose scale comes down step by step: each empties its gradients before its own pass."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    other = Net()
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    turns = 0

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        nonlocal turns
        total = int((batch(0, 0)[1] >= 0).sum())
        for one, own in ((other, others), (model, optimizer)):
            own.zero_grad()
            scaler.scale(token_sum(one, batch(0, 0)) * (1e38 if turns < 3 else 1.0) / total).backward()
            scaler.step(own)
            scaler.update(1024.0)
            turns += 1

    record(step, tmp_path, steps=3)
    report = judged(tmp_path)
    assert report.run.skipped_steps == [0, 1, 2]
    assert not any("had overflowed" in reason for reason in report.reasons)


@pytest.mark.parametrize("steps", [None, range(2)])
def test_an_optimizer_that_evaluates_its_closure_several_times_is_judged_by_the_last_one(
    tmp_path: Path, steps: range | None
) -> None:
    """Evaluations that it repeats are no steps that somebody asked for."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = token_sum(model, batch(0, 1)) / int((batch(0, 1)[1] >= 0).sum())
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]

    def lbfgs(params: Iterator[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=lr, max_iter=4)

    record(step, tmp_path, make=lbfgs, asked=steps)
    report = judged(tmp_path)
    assert report.findings == []
    assert report.verdict == "clean"
