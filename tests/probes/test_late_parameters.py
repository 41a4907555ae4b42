"""Parameters that are made, trained or filled late: lazy ones, frozen ones, sparse gradients, those of other models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

VOCAB, DIM, STEPS = 11, 8, 3


class Net(nn.Module):
    def __init__(self, *, lazy: bool = False, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, sparse=sparse)
        self.head = nn.LazyLinear(VOCAB) if lazy else nn.Linear(DIM, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))  # type: ignore[no-any-return]


def trained(run: Path, kind: str, factor: float = 1.0) -> Report:
    torch.manual_seed(0)
    with attach(run, steps=range(STEPS)):
        model = Net(lazy=kind == "lazy", sparse=kind == "sparse")
        if kind == "lazy":
            model(torch.arange(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            model.embed.weight.requires_grad_(kind != "frozen" or step > 0)
            tokens = torch.randint(VOCAB, (24,))
            nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
            if model.embed.weight.grad is not None:
                model.embed.weight.grad = model.embed.weight.grad * factor
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run))


@pytest.mark.parametrize("kind", ["lazy", "frozen", "sparse"])
def test_what_comes_late_is_judged_like_everything_else(kind: str, tmp_path: Path) -> None:
    right = trained(tmp_path / "right", kind)
    assert (right.verdict, right.coverage.unidentifiable) == ("clean", [])
    (finding,) = trained(tmp_path / "wrong", kind, factor=0.25).findings
    assert (finding.code, finding.factor.exact, finding.num_parameters) == ("GS000", "1/4", 1)


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_weights_that_are_computed_for_a_call_are_no_parameters(factor: float, tmp_path: Path) -> None:
    """Meta-learning: what the module is called with is the parameters after a step of an inner loop, tasks in turn."""
    torch.manual_seed(0)
    with attach(tmp_path / "run", steps=range(STEPS)):
        model = nn.Linear(DIM, VOCAB)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(STEPS):
            for _ in range(2):
                weights = {name: param.clone() for name, param in model.named_parameters()}
                for inner in (True, False):
                    x, y = torch.randn(24, DIM), torch.randint(VOCAB, (24,))
                    loss = nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)
                    if inner:
                        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                        weights = {n: w - 0.1 * s for (n, w), s in zip(weights.items(), slopes, strict=True)}
                (factor * loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.coverage.unidentifiable) == ("clean" if factor == 1 else "findings", [])
    assert report.run.steps == list(range(STEPS))
    assert [one.factor.observed for one in report.findings] == ([] if factor == 1 else [pytest.approx(factor)])


class Adapted(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.side = inner, nn.Linear(DIM, VOCAB)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + self.side(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["a module that is put into the model", "another model"])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_what_an_optimizer_gets_behind_the_first_step_is_judged_at_once(
    kind: str, factor: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    with attach(tmp_path / "run", steps=range(2 * STEPS)):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2 * STEPS):
            late = step == STEPS
            if late and kind == "another model":
                model = Net()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            elif late:
                model.head = Adapted(model.head)  # type: ignore[assignment,arg-type]
                optimizer.add_param_group({"params": model.head.side.parameters()})
            tokens = torch.randint(VOCAB, (24,))
            loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
            (loss * factor if late else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    run = read_run(tmp_path / "run")
    report = diagnose(run)
    assert (report.verdict, report.run.steps) == ("clean" if factor == 1 else "findings", list(range(2 * STEPS)))
    assert [(one.step, one.factor.exact) for one in report.findings] == ([] if factor == 1 else [(STEPS, "1/4")])
    names = {param.name for param in run.ranks[0].params.values()}
    assert names > {"Net.head.weight" if kind == "another model" else "head.side.weight"}
    assert not any(name.startswith("unnamed") for name in names)


@pytest.mark.parametrize("late", [1, STEPS - 1])
def test_what_is_put_into_a_group_by_hand_is_told_by_later_steps(late: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    with attach(tmp_path / "run", steps=range(STEPS)):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            if step == late:
                model.head = Adapted(model.head)  # type: ignore[assignment,arg-type]
                optimizer.param_groups[0]["params"] += list(model.head.side.parameters())
            tokens = torch.randint(VOCAB, (24,))
            nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("clean" if late == 1 else "undetermined", [])


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_parameter_of_no_module_is_judged_in_the_first_step(factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, prompt = Net(), nn.Parameter(0.1 * torch.randn(24, VOCAB))
    with attach(tmp_path / "run", steps=range(1)):
        optimizer = torch.optim.SGD([*model.parameters(), prompt], lr=0.1)
        for _ in range(2):
            tokens = torch.randint(VOCAB, (24,))
            (nn.functional.cross_entropy(model(tokens) + prompt, tokens.roll(1)) / 2).backward()
        assert prompt.grad is not None
        prompt.grad.mul_(factor)
        optimizer.step()
    report = diagnose(read_run(tmp_path / "run"))
    assert report.reasons == [] and report.coverage.unidentifiable == []
    assert [(one.units[0].split(".")[0], one.factor.exact) for one in report.findings] == (
        [] if factor == 1 else [("unnamed", "3")]
    )
