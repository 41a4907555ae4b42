"""Trainers that few people write: the right ones are not accused, the wrong ones are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.judging import judge_step
from gradcheck_dist.diagnosis.report.next_step import next_step
from gradcheck_dist.diagnosis.steps.unexplained import unexplained
from gradcheck_dist.events import Reduce
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

RANKS = {
    "reduced to one, and sent back": ("clean", []),
    "reduced to one": ("findings", ["GS103"]),
    "reduced to one, one steps": ("undetermined", []),
    "in one copy, sent on": ("clean", []),
    "in one copy": ("findings", ["GS103"]),
    "with a critic": ("clean", []),
    "with a critic, never reduced": ("findings", ["GS103"]),
    "a wrapper, then by its own loss": ("findings", ["GS000"]),
    "all at once": ("clean", []),
    "all at once, averaged": ("findings", ["GS101"]),
}


@pytest.mark.parametrize("variant", RANKS)
def test_two_ranks(variant: str, tmp_path: Path) -> None:
    warm_up()
    launch("odd_workers:train", (variant, str(tmp_path / "run")), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, [finding.code for finding in report.findings]) == RANKS[variant], report.reasons
    if variant in ("reduced to one", "in one copy"):
        assert report.findings[0].ranks == [1]
    elif variant == "reduced to one, one steps":
        assert any("on rank 1, no optimizer steps" in reason for reason in report.reasons)


def test_what_a_reduction_to_one_rank_leaves_on_the_others_is_no_change_by_hand(tmp_path: Path) -> None:
    """From three ranks on gloo leaves sums of some ranks in parts of their buffers, no combination of contributions."""
    warm_up()
    launch("odd_workers:train", ("narrow, reduced to one, and sent back", str(tmp_path / "run")), 3, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


@pytest.mark.parametrize(("finds", "found"), [(True, []), (False, ["GS103"])])
def test_a_wrapper_that_waits_for_a_parameter_which_is_left_out_reduces_none(
    finds: bool, found: list[str], tmp_path: Path
) -> None:
    warm_up()
    launch("odd_workers:train_with_one_left_out", (str(tmp_path / "run"), finds), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == found, report.findings
    assert not found or "find_unused_parameters" in report.next_step


@pytest.mark.parametrize(("divides", "found"), [(False, []), (True, [("GS101", [0, 1])])])
def test_a_wrapper_reduces_what_is_frozen_while_another_optimizer_has_its_turn(
    divides: bool, found: list[tuple[str, list[int]]], tmp_path: Path
) -> None:
    warm_up()
    launch("odd_workers:train_in_turns", (str(tmp_path / "run"), divides), 2, timeout_s=60)
    run = read_run(tmp_path / "run")
    report = diagnose(run)
    assert [(finding.code, finding.steps) for finding in report.findings] == found, report.findings
    reduced = [event.step for event in run.ranks[0].events if isinstance(event, Reduce)]
    assert reduced == [0, 1]
    assert diagnose(run, steps=range(1, 2)).run.axes["dp_replicate"] == 2


@pytest.mark.parametrize(("divides", "found"), [(True, []), (False, ["GS303"])])
def test_what_hooks_reduce_of_sharded_parameters_is_recorded(divides: bool, found: list[str], tmp_path: Path) -> None:
    warm_up()
    launch("odd_workers:train_with_sharded_hooks", (str(tmp_path / "run"), divides), 2, timeout_s=60)
    run = read_run(tmp_path / "run")
    by_hooks = [event for event in run.ranks[0].events if isinstance(event, Reduce) and event.impl == "all_reduce"]
    assert len(by_hooks) == 5 * 2
    assert all(event.site is not None and event.site.function.endswith("hook") for event in by_hooks)
    report = diagnose(run)
    assert [finding.code for finding in report.findings] == found
    assert not found or "The reduction at odd_workers.py" in report.findings[0].explanation


@pytest.mark.parametrize(("divisor", "found"), [(2, []), (1, [("GS303", 2.0)]), (4, [("GS101", 0.5)])])
def test_what_hooks_reduce_of_shards_that_are_no_gradients_yet_is_recorded(
    divisor: int, found: list[tuple[str, float]], tmp_path: Path
) -> None:
    warm_up()
    launch("odd_workers:train_with_hooks_on_shards", (str(tmp_path / "run"), divisor), 4, timeout_s=60)
    run = read_run(tmp_path / "run")
    by_hooks = [event for event in run.ranks[0].events if isinstance(event, Reduce) and event.impl == "all_reduce"]
    assert len(by_hooks) == 5 * 2
    assert {event.group for event in by_hooks} == {(0, 2)}
    report = diagnose(run)
    assert [(finding.code, round(finding.factor.observed or 0.0, 3)) for finding in report.findings] == found


def test_losses_that_divide_wrongly_have_the_wrong_constant_too(tmp_path: Path) -> None:
    """They may lack what lines that nobody records divide by: that is no second fault."""
    warm_up()
    launch("odd_workers:train_in_a_flat_buffer", (str(tmp_path / "run"),), 2, timeout_s=60)
    (finding,) = diagnose(read_run(tmp_path / "run")).findings
    assert (finding.code, finding.first_event and finding.first_event.kind) == ("GS302", "loss")
    assert "times accumulation_steps" in finding.explanation


def test_what_one_rank_does_besides_is_told_and_not_what_the_other_leaves_out(tmp_path: Path) -> None:
    """Divided by 2 and multiplied by 2, its gradients look as if nothing was done to them."""
    warm_up()
    launch("odd_workers:train_with_a_factor_of_one_rank", (str(tmp_path / "run"),), 2, timeout_s=60)
    (finding,) = diagnose(read_run(tmp_path / "run")).findings
    assert (finding.code, finding.ranks, finding.factor.observed) == ("GS000", [1], pytest.approx(2))
    assert "Without it the weights would be right" in finding.explanation


def test_what_fsdp_adds_to_an_offloaded_gradient_is_not_kept_apart(tmp_path: Path) -> None:
    warm_up()
    launch("odd_workers:train_offloaded", (str(tmp_path / "run"),), 2, timeout_s=60)
    (finding,) = diagnose(read_run(tmp_path / "run")).findings
    assert (finding.code, "kept apart" in finding.explanation) == ("GS303", False)


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "clean"), (0.5, "findings")])
def test_optimizer_states_that_are_sharded_by_hand(factor: float, verdict: str, tmp_path: Path) -> None:
    warm_up()
    launch("odd_workers:train_sharded", (str(tmp_path / "run"), factor), 2, timeout_s=60)
    run = read_run(tmp_path / "run")
    report = diagnose(run)
    assert (report.verdict, len(report.findings)) == (verdict, int(verdict == "findings")), report.reasons
    if report.findings:
        event = report.findings[0].first_event
        assert event is not None and event.kind == "grad_write" and event.nominal_factor == 0.5
        assert report.findings[0].factor.observed == pytest.approx(0.5)
    else:
        assert unexplained(judge_step(run, 0, report.run.objective, "assumed")) == []


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def two_tasks(folder: Path, shares: tuple[float, float], factor: float = 1.0) -> Report:
    """A body, two heads, a backward pass for each task."""
    model, other = Net(), nn.Linear(16, 20)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.05)
    with attach(folder / "run"):
        for step in range(2):
            tokens, labels = batch(0, step)
            (shares[0] * mean(model(tokens), labels)).backward()
            hidden = torch.tanh(model.inner(model.embedding(tokens)))
            (shares[1] * mean(other(hidden), labels)).backward()
            for param in other.parameters():
                assert param.grad is not None
                param.grad.mul_(factor)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(folder / "run"))


def test_losses_of_several_tasks_are_means_of_their_own(tmp_path: Path) -> None:
    report = two_tasks(tmp_path, (1.0, 1.0))
    assert report.verdict == "clean"
    assert any("objectives of their own" in note for note in report.coverage.notes)


def test_a_task_of_several_without_a_label_in_one_pass_is_judged(tmp_path: Path) -> None:
    """What counts nothing there has no weight to be scaled."""
    body, heads = nn.Linear(8, 16), [nn.Linear(16, 5), nn.Linear(16, 7)]
    optimizer = torch.optim.SGD([*body.parameters(), *heads[0].parameters(), *heads[1].parameters()], lr=0.01)
    with attach(tmp_path / "run", objective="global-token-mean"):
        for num in (3, 0):
            data, (one, other) = torch.randn(9, 8), torch.randint(0, 5, (2, 9))
            other[num:] = -100
            F.cross_entropy(heads[0](torch.relu(body(data))), one, reduction="sum").div(36).backward()
            F.cross_entropy(heads[1](torch.relu(body(data))), other, reduction="sum").div(3).backward()
        optimizer.step()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("differentiated one by one" in reason for reason in report.reasons)


@pytest.mark.parametrize("one_forward", [False, True])
def test_a_loop_over_tasks_accuses_nobody(tmp_path: Path, one_forward: bool) -> None:
    """One line runs all backward passes: a mean over all tasks' tokens is not what was meant. On one forward pass that
    is known."""
    body, heads = nn.Linear(6, 16), [nn.Linear(16, 3), nn.Linear(16, 5)]
    optimizer = torch.optim.SGD([param for part in (body, *heads) for param in part.parameters()], lr=0.05)
    torch.manual_seed(0)
    with attach(tmp_path / "run"):
        for _ in range(2):
            hidden = torch.tanh(body(torch.randn(8, 6)))
            for head in heads:
                hidden = hidden if one_forward else torch.tanh(body(torch.randn(8, 6)))
                mean(head(hidden)[None], torch.randint(0, 3, (8,))).backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("clean" if one_forward else "undetermined", [])
    told = report.coverage.notes if one_forward else report.reasons
    assert any(("taken for tasks" if one_forward else "train parameters of their own") in words for words in told)


def test_coefficients_of_several_tasks_leave_the_verdict_open(tmp_path: Path) -> None:
    report = two_tasks(tmp_path, (0.7, 0.3))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("x 0.7 and x 0.3" in reason for reason in report.reasons)


def test_a_factor_behind_one_task_is_found(tmp_path: Path) -> None:
    (finding,) = two_tasks(tmp_path, (0.7, 0.3), factor=0.5).findings
    assert (finding.code, finding.factor.observed, finding.num_parameters) == ("GS000", pytest.approx(0.5), 2)


def test_two_branches_of_one_loop_are_one_loss(tmp_path: Path) -> None:
    """The last pass stands on a line of its own, and a mean of means is found all the same."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(tmp_path / "run"):
        for _ in range(2):
            (tokens, labels), (later, others) = batch(0, 0), batch(0, 2)
            (mean(model(tokens), labels) / 2).backward()
            (mean(model(later), others) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [finding.code for finding in diagnose(read_run(tmp_path / "run")).findings] == ["GS301"]


def test_a_gradient_that_no_pass_made_is_told(tmp_path: Path) -> None:
    model, extra = Net(), nn.Parameter(torch.randn(5, 5))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.05)
    with attach(tmp_path / "run"):
        for step in range(2):
            tokens, labels = batch(0, step)
            mean(model(tokens), labels).backward()
            extra.grad = torch.randn_like(extra)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("no recorded backward pass" in reason for reason in report.reasons)
    assert next_step(report).endswith("compare them once with those of loss.backward() on the same batch.")


def test_of_losses_that_count_nothing_the_documented_weights_are_the_right_ones(tmp_path: Path) -> None:
    """As many weights are off as are right."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(tmp_path / "run"):
        for _ in range(2):
            model(torch.randn(4, 8)).pow(2).mean().backward()
            for param in model[0].parameters():
                assert param.grad is not None
                param.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = diagnose(read_run(tmp_path / "run")).findings
    assert (finding.code, finding.factor.observed) == ("GS000", pytest.approx(0.5))


@pytest.mark.parametrize(("divisor", "found"), [(1, []), (2, ["GS303"])])
def test_gradients_that_were_only_looked_at_are_no_contribution(tmp_path: Path, divisor: int, found: list[str]) -> None:
    """GradNorm asks for the gradient of one layer before it knows a task's coefficient."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with attach(tmp_path / "run"):
        for step in range(2):
            tokens, labels = batch(0, step)
            loss = mean(model(tokens), labels)
            torch.autograd.grad(loss, [model.inner.weight], retain_graph=True)
            (loss / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == found
    assert report.verdict == ("findings" if found else "clean")


def test_a_parameter_that_is_one_number_is_reduced_like_others(tmp_path: Path) -> None:
    """CLIP's logit scale."""
    scale = nn.Parameter(torch.tensor(2.0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with attach(tmp_path / "run"):
            optimizer = torch.optim.SGD([scale], lr=0.05)
            for _ in range(2):
                (scale * F.cross_entropy(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))).backward()
                dist.all_reduce(scale.grad)
                dist.all_reduce(torch.tensor(1.0))  # a number that is no gradient
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    events = read_run(tmp_path / "run").ranks[0].events
    assert [event.step for event in events if isinstance(event, Reduce)] == [0, 1]


def test_a_gradient_that_is_not_there_is_refused_by_torch_and_no_fault_of_a_probe(tmp_path: Path) -> None:
    scale, unused = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(1.0))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with attach(tmp_path / "run"):
            optimizer = torch.optim.SGD([scale, unused], lr=0.05)
            for _ in range(2):
                (scale * F.cross_entropy(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))).backward()
                dist.all_reduce(scale.grad)
                with pytest.raises(TypeError, match="tensor"):
                    dist.all_reduce(unused.grad)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    assert diagnose(read_run(tmp_path / "run")).coverage.problems == []


def test_a_gradient_that_torch_func_computed_for_a_second_model_leaves_the_verdict_open(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = Net(), Net()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    named = dict(second.named_parameters())
    with attach(tmp_path):
        for step in range(2):
            inputs, labels = batch(0, step)
            F.cross_entropy(first(inputs).flatten(0, 1), labels.flatten()).backward()

            def loss(params: dict[str, Tensor], inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
                logits = torch.func.functional_call(second, params, (inputs,))
                return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

            computed = torch.func.grad(loss)({name: param.detach() for name, param in named.items()})
            for name, param in named.items():
                param.grad = computed[name]
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings, report.coverage.problems + report.coverage.notes) == (
        "undetermined",
        [],
        [],
    )
    assert any("no recorded backward pass of the step made" in reason for reason in report.reasons)


def test_a_trainer_that_asks_torch_func_for_all_its_gradients_is_told_what_is_not_followed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = batch(0, 0)

    def loss(params: dict[str, Tensor]) -> Tensor:
        rows = torch.func.functional_call(model, params, (inputs,)).log_softmax(-1)
        return -rows.gather(-1, labels.clamp(min=0)[..., None]).mean()

    with attach(tmp_path):
        for _ in range(2):
            computed = torch.func.grad(loss)({name: param.detach() for name, param in model.named_parameters()})
            for name, param in model.named_parameters():
                param.grad = computed[name]
            optimizer.step()
    report = diagnose(read_run(tmp_path))
    (reason,) = report.reasons
    assert (report.verdict, report.coverage.problems) == ("undetermined", [])
    assert "gradients by torch.func, or by hand, are not followed" in reason
    assert "compared once with those that it does" in next_step(report)


def test_a_gradient_that_waits_for_an_optimizer_which_steps_less_often_is_told(tmp_path: Path) -> None:
    body, head = nn.Linear(4, 16), nn.Linear(16, 3)
    often, seldom = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head))
    with attach(tmp_path / "run"):
        for index in range(6):
            often.zero_grad()
            if index % 3 == 0:
                seldom.zero_grad()
            F.cross_entropy(head(torch.tanh(body(torch.randn(8, 4)))), torch.arange(8) % 3).backward()
            often.step()
            if index % 3 == 2:
                seldom.step()
    report = diagnose_run(tmp_path / "run")
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("passes of steps 0 and 1" in reason and "did not step there" in reason for reason in report.reasons)


@pytest.mark.parametrize(("given", "verdict"), [("all", "clean"), ("some", "undetermined"), ("later", "undetermined")])
def test_gradients_that_no_optimizer_reads_leave_the_verdict_open(given: str, verdict: str, tmp_path: Path) -> None:
    """Unless the rest is frozen, or its optimizer steps in one of the recorded steps."""
    body, head = nn.Linear(4, 16), nn.Linear(16, 3)
    often = torch.optim.SGD([*body.parameters(), *(head.parameters() if given == "all" else ())], lr=0.1)
    seldom = torch.optim.SGD(head.parameters(), lr=0.1)
    with attach(tmp_path / "run", steps=range(3)):
        for index in range(6):
            F.cross_entropy(head(torch.tanh(body(torch.randn(8, 4)))), torch.arange(8) % 3).backward()
            often.step()
            often.zero_grad()
            if given == "later" and index == 5:
                seldom.step()
    report = diagnose_run(tmp_path / "run")
    assert (report.verdict, report.findings) == (verdict, [])
    assert any("no optimizer reads the gradients of 2 parameters" in one for one in report.reasons) == (given != "all")
    assert given == "all" or "Give these parameters to an optimizer" in report.next_step
