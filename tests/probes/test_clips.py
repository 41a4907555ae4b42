"""Clips of a user's loop: what is right stays clean, however it is written; what is wrong is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from clip_loops import NUM_STEPS, Finish, accumulate, by_hand, codes, utils
from probe_workers import Net, batch, token_sum
from torch import nn
from torch.nn import functional as F

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Clip, OptimizerStep
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run


def trained(run_dir: Path, finish: Finish, model: nn.Module | None = None) -> Report:
    """The judgement of steps that accumulate, `finish` and step."""
    model = model or Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir, objective="global-token-mean"):
        for _ in range(NUM_STEPS):
            accumulate(model)
            finish(model)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


def in_groups(model: Net) -> None:
    utils.clip_grad_norm_(model.inner.parameters(), 0.1)
    utils.clip_grad_norm_([*model.embedding.parameters(), *model.head.parameters()], 0.2)


def one_by_one(model: nn.Module) -> None:
    for param in model.parameters():
        utils.clip_grad_norm_(param, 0.05)


def norm_apart(model: nn.Module) -> None:
    params = list(model.parameters())
    utils.clip_grads_with_norm_(params, 0.3, utils.get_total_norm([param.grad for param in params]))


def by_private_names(model: nn.Module) -> None:
    """As verl clips DTensors."""
    params, clips = list(model.parameters()), utils.clip_grad
    norm = clips._get_total_norm([param.grad for param in params if param.grad is not None])
    clips._clip_grads_with_norm_(params, 0.317, norm)


def value_then_norm(model: nn.Module) -> None:
    utils.clip_grad_value_(model.parameters(), 0.02)
    utils.clip_grad_norm_(model.parameters(), 0.05)


CORRECT: dict[str, Finish] = {
    "clip_grad_norm_": lambda model: utils.clip_grad_norm_(model.parameters(), 0.3),
    "a generator": lambda model: utils.clip_grad_norm_((param for param in model.parameters()), 0.3),
    "a norm that is only logged": lambda model: utils.clip_grad_norm_(model.parameters(), float("inf")),
    "another norm": lambda model: utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf")),
    "norm and clip apart": norm_apart,
    "norm and clip apart, by private names": by_private_names,
    "groups of parameters": in_groups,
    "each parameter": one_by_one,
    "by hand": by_hand(0.25),
    "by hand to another norm": by_hand(0.37),
    "values": lambda model: utils.clip_grad_value_(model.parameters(), 0.01),
    "values, then the norm": value_then_norm,
}


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_clip_is_clean(name: str, tmp_path: Path) -> None:
    report = trained(tmp_path, CORRECT[name])
    assert (report.verdict, codes(report)) == ("clean", [])
    assert {round(weight.ratio or 0, 4) for weight in report.weights} == {1.0}


def test_the_recorded_norms_are_those_of_the_gradients(tmp_path: Path) -> None:
    trained(tmp_path, CORRECT["clip_grad_norm_"])
    trace = read_run(tmp_path).ranks[0]
    clips = [event for event in trace.events if isinstance(event, Clip)]
    assert [norms.seq for norms in trace.norms] == [clip.seq for clip in clips]
    for norms, clip in zip(trace.norms, clips, strict=True):
        values = np.frombuffer(norms.values)
        assert len(values) == 5
        assert np.sqrt((values**2).sum()) == pytest.approx(clip.total_norm, rel=1e-6)
        assert clip.norm_dtype == "float32"


def test_where_nothing_is_clipped_norms_are_those_of_the_step_and_on_the_reports_curve(tmp_path: Path) -> None:
    seen: list[float] = []
    report = trained(
        tmp_path, lambda model: seen.append(float(utils.get_total_norm([p.grad for p in model.parameters()])))
    )
    trace = read_run(tmp_path).ranks[0]
    assert [norms.seq for norms in trace.norms] == [e.seq for e in trace.events if isinstance(e, OptimizerStep)]
    assert report.metrics["grad_norm"] == pytest.approx(seen, rel=1e-6)


def different_steps(run_dir: Path, finish: Finish, num: int, dtype: torch.dtype = torch.float32) -> Report:
    """Steps of other batches each, so that norms differ."""
    model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with attach(run_dir, objective="global-token-mean"):
        for step in range(num):
            data = [batch(0, k + step) for k in range(2)]
            total = sum(int((labels >= 0).sum()) for _, labels in data)
            for part in data:
                (token_sum(model, part) / total).backward()
            finish(model)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


def forget(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.mul(param.grad, 0.0371)  # type: ignore[arg-type]


def to_unit_length(model: nn.Module) -> None:
    norm = torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None]).norm()
    for param in model.parameters():
        param.grad.div_(norm)  # type: ignore[union-attr]


def test_one_step_leaves_open_whether_an_odd_factor_is_a_clip(tmp_path: Path) -> None:
    clip, constant = (different_steps(tmp_path / str(i), f, 1) for i, f in enumerate((by_hand(0.3714), forget)))
    for report in (clip, constant):
        assert [(finding.code, finding.severity) for finding in report.findings] == [("GS501", "warning")]


def test_several_steps_tell_a_clip_by_the_norm_that_stays(tmp_path: Path) -> None:
    report = different_steps(tmp_path, by_hand(0.3714), 3)
    assert (report.verdict, codes(report)) == ("clean", [])
    assert {round(weight.ratio or 0, 4) for weight in report.weights} == {1.0}
    assert sum("by hand to norm 0.3714" in note for note in report.coverage.notes) == 3


def test_several_steps_tell_a_constant_by_the_factor_that_stays(tmp_path: Path) -> None:
    (finding,) = different_steps(tmp_path, forget, 3).findings
    assert (finding.code, finding.severity, finding.steps) == ("GS000", "error", [0, 1, 2])
    assert finding.factor.observed == pytest.approx(0.0371, rel=1e-4)
    assert "a constant, and no clip" in finding.explanation
    assert "as if the learning rate were 0.0371, not 1" in finding.consequence


class DivideAgain:
    """By the tokens of a step of `different_steps`: 20 in the first one, 8 more in each that follows."""

    tokens = 12

    def __call__(self, model: nn.Module) -> None:
        self.tokens += 8
        for param in model.parameters():
            param.grad = torch.div(param.grad, self.tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(("steps", "code"), [(1, "GS501"), (3, "GS000")])
def test_a_name_that_fits_within_what_bfloat16_leaves_open_convicts_in_several_steps_only(
    tmp_path: Path, steps: int, code: str
) -> None:
    (finding,) = different_steps(tmp_path, DivideAgain(), steps, torch.bfloat16).findings
    assert (finding.code, finding.factor.expression, len(finding.steps)) == (code, "1/num_tokens", steps)
    assert ("another number in each" in finding.explanation) == (steps > 1)


class CountPadding:
    """As tokens, when a sum of losses is divided behind its passes: 20 tokens in the first step, 8 more in each."""

    tokens, padding = 12, 0

    def __call__(self, model: nn.Module) -> None:
        self.tokens += 8
        self.padding = (self.padding * 3 + 7) % 11
        for param in model.parameters():
            param.grad *= self.tokens / (self.tokens + self.padding)


@pytest.mark.parametrize(("steps", "code"), [(1, "GS501"), (3, "GS000")])
def test_several_steps_tell_a_count_by_whole_numbers(tmp_path: Path, steps: int, code: str) -> None:
    (finding,) = different_steps(tmp_path, CountPadding(), steps).findings
    assert (finding.code, len(finding.steps)) == (code, steps)
    told = "as if the step had 27 tokens, where 20 enter the loss. So it is in 3 steps, by whole numbers (27, 34, 39)"
    assert (told in finding.explanation) == (steps > 1)


def test_gradients_of_unit_length_are_meant(tmp_path: Path) -> None:
    assert different_steps(tmp_path, to_unit_length, 2).verdict == "clean"


def test_a_norm_of_less_than_was_clipped_is_a_warning(tmp_path: Path) -> None:
    def without_embeddings(model: Net) -> None:
        norm = utils.get_total_norm([param.grad for param in model.inner.parameters()])
        utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)

    (finding,) = trained(tmp_path, without_embeddings).findings
    assert (finding.code, finding.severity) == ("GS602", "warning")
    assert finding.first_event is not None and finding.first_event.kind == "clip"
    model = Net()
    accumulate(model)
    inner = utils.get_total_norm([param.grad for param in model.inner.parameters()])
    whole = utils.get_total_norm([param.grad for param in model.parameters()])
    assert finding.factor.observed == pytest.approx(float(inner / whole), rel=1e-5)
    assert finding.steps == [0, 1]


def test_a_clip_that_finds_nothing_left_has_no_effect(tmp_path: Path) -> None:
    def used_up(model: nn.Module) -> None:
        params = (param for param in model.parameters())
        norm = utils.get_total_norm([param.grad for param in params])
        utils.clip_grads_with_norm_(params, 0.3, norm)

    (finding,) = trained(tmp_path, used_up).findings
    assert finding.code == "GS603"
    assert "no parameter" in finding.explanation


def test_a_clip_that_is_given_gradients_in_the_place_of_parameters_has_no_effect(tmp_path: Path) -> None:
    def on_gradients(model: nn.Module) -> None:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        utils.clip_grads_with_norm_(grads, 0.3, utils.get_total_norm(grads))

    (finding,) = trained(tmp_path, on_gradients).findings
    assert finding.code == "GS603"
    assert "no parameter" in finding.explanation


def test_a_clip_behind_the_optimizer_has_no_effect(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(NUM_STEPS):
            accumulate(model)
            optimizer.step()
            utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert codes(report) == ["GS603"]
    assert "GS603" in report.rules.failed and "GS602" in report.rules.passed


def test_two_optimizers_may_clip_and_step_in_turn(tmp_path: Path) -> None:
    model = Net()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.embedding, model.inner, model.head)]
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(NUM_STEPS):
            accumulate(model)
            for optimizer in optimizers:
                utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
                optimizer.step()
            model.zero_grad()
    assert codes(diagnose(read_run(tmp_path))) == []


def test_clipping_inside_the_accumulation_loop_is_early(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        accumulate(model, lambda: utils.clip_grad_norm_(model.parameters(), 0.05))
        optimizer.step()
    run = read_run(tmp_path)
    first, second, _ = (event.coefficient for event in run.ranks[0].events if isinstance(event, Clip))
    report = diagnose(run)
    assert codes(report) == ["GS605"]
    ratios = {weight.contribution.accumulation_step: weight.ratio for weight in report.weights}
    assert ratios == {
        0: pytest.approx(first * second, rel=1e-3),
        1: pytest.approx(second, rel=1e-3),
        2: pytest.approx(1),
    }


def test_a_part_that_is_cut_off_is_a_remark_and_the_verdict_stays_clean(tmp_path: Path) -> None:
    class Cut(Net):
        def __init__(self) -> None:
            super().__init__()
            self.never_called = nn.Linear(4, 4)
            self.frozen = nn.Linear(16, 16).requires_grad_(False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.frozen(torch.tanh(self.inner(self.embedding(tokens))).detach()))

    report = trained(tmp_path, lambda model: None, Cut())
    (finding,) = report.findings
    assert (report.verdict, finding.code, finding.severity) == ("clean", "GS702", "info")
    assert "embedding.weight, inner.bias, inner.weight" in finding.explanation
    assert finding.num_parameters == 3


@pytest.mark.parametrize("cut", [True, False])
def test_so_is_one_that_another_optimizer_steps_later(cut: bool, tmp_path: Path) -> None:
    class Cut(Net):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.inner(self.embedding(tokens)))
            return self.head(hidden.detach() if cut else hidden)

    model = Cut()
    head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    body = torch.optim.SGD([*model.embedding.parameters(), *model.inner.parameters()], lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        for _ in range(NUM_STEPS):
            accumulate(model)
            for optimizer in (head, body):
                optimizer.step()
            model.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, codes(report)) == ("clean", ["GS702"] if cut else [])


@pytest.mark.parametrize("forgotten", ["critic", "generator", None])
def test_so_is_a_model_whose_loss_never_goes_backward(forgotten: str | None, tmp_path: Path) -> None:
    generator, critic = nn.Linear(4, 6), nn.Linear(6, 1)
    optimizers = [torch.optim.Adam(model.parameters()) for model in (critic, generator)]
    with attach(tmp_path):
        for step in range(NUM_STEPS):
            torch.manual_seed(step)
            fake, real = generator(torch.randn(8, 4)), torch.randn(8, 6)
            scores = critic(torch.cat([real, fake.detach()]))
            wanted = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
            told = F.binary_cross_entropy_with_logits(scores, wanted)
            if forgotten != "critic":
                told.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            critic.requires_grad_(False)
            fooled = F.binary_cross_entropy_with_logits(critic(fake), torch.ones(8, 1))
            if forgotten != "generator":
                fooled.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            critic.requires_grad_(True)
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, codes(report)) == ("clean", ["GS702"] if forgotten else [])
    assert all(finding.num_parameters == 2 and finding.severity == "info" for finding in report.findings)


@pytest.mark.parametrize("cut", [True, False])
def test_zeros_that_the_program_fills_in_are_no_gradient(cut: bool, tmp_path: Path) -> None:
    """So do trainers that reduce every gradient, lest ranks wait for one another (a router that its gates cut off)."""

    class Routed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(16, 4, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens)
            gates = self.router(hidden).softmax(-1)
            return self.head(torch.tanh(self.inner(hidden)) * (gates.detach() if cut else gates).amax(-1, keepdim=True))

    def fill(model: nn.Module) -> None:
        for param in model.parameters():
            if param.grad is None:
                param.grad = torch.zeros_like(param)

    report = trained(tmp_path, fill, Routed())
    assert (report.verdict, codes(report)) == ("clean", ["GS702"] if cut else [])
    assert all("of router.weight was called" in finding.explanation for finding in report.findings)


def test_hyperparameters_that_are_no_numbers_do_not_lose_the_step(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, params: object, lr: float) -> None:
            super().__init__(params, lr=lr)  # type: ignore[arg-type]
            self.param_groups[0]["eps"] = (None, 1e-3)
            self.param_groups[0]["betas"] = None

    model = Net()
    optimizer = Odd([{"params": model.inner.parameters()}, {"params": model.head.parameters(), "lr": 0.2}], lr=0.1)
    with attach(tmp_path):
        accumulate(model)
        optimizer.step()
    (step,) = (event for event in read_run(tmp_path).ranks[0].events if isinstance(event, OptimizerStep))
    assert step.lr == 0.1 and "eps" not in step.hyperparameters
    assert [group.lr for group in step.groups] == [0.1, 0.2]


def test_a_gradient_whose_norm_cannot_be_read_leaves_the_clip_unjudged(tmp_path: Path) -> None:
    model = Net()
    model.embedding = nn.Embedding(20, 16, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        accumulate(model)
        grads = [param.grad.to_dense() for param in model.parameters() if param.grad is not None]
        dense = [*model.inner.parameters(), *model.head.parameters()]
        utils.clip_grads_with_norm_(dense, 0.1, torch.stack([grad.norm() for grad in grads]).norm())
        optimizer.step()
    run = read_run(tmp_path)
    assert sum(int(np.isnan(np.frombuffer(norms.values)).sum()) for norms in run.ranks[0].norms) == 1
    assert not [code for code in codes(diagnose(run)) if code.startswith("GS60")]


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("by_norm", [False, True])
def test_what_is_done_behind_a_clip_by_value_is_seen(tmp_path: Path, factor: float, by_norm: bool) -> None:
    """A clamp is no scaling, so what was there before it stands for what is read, times what follows; a clip by norm
    behind it hides that."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        part = batch(0, 0)
        (token_sum(model, part) / (part[1] >= 0).sum()).backward()  # type: ignore[no-untyped-call]
        utils.clip_grad_value_(model.parameters(), 1e-2)
        if factor != 1:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(factor)
        if by_norm:
            utils.clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
    report = diagnose(read_run(tmp_path))
    assert codes(report) == (["GS000"] if factor != 1 and not by_norm else [])
    assert all(finding.factor.observed == pytest.approx(factor) for finding in report.findings)
