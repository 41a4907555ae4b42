"""Optimizers and wrappers that have other parameters than the model (GS707, GS103), or in another order (GS105)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch

VOCABULARY, WIDTH = 24, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def optimizer_of(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


Made = tuple[Model, list[Optimizer]]


def loaded_behind() -> Made:
    model = Model()
    optimizer = optimizer_of(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model, [optimizer]


def other_head() -> Made:
    model = Model()
    optimizer = optimizer_of(model)
    model.head = nn.Linear(WIDTH, VOCABULARY)
    return model, [optimizer]


def other_weight() -> Made:
    model = Model()
    optimizer = optimizer_of(model)
    model.head.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    return model, [optimizer]


def loaded_before() -> Made:
    model = Model()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return model, [optimizer_of(model)]


def loaded_into_its_memory() -> Made:
    model = Model()
    optimizer = optimizer_of(model)
    model.load_state_dict(model.state_dict(), assign=True)
    return model, [optimizer]


def added_to_the_optimizer() -> Made:
    model, (optimizer,) = other_head()
    optimizer.add_param_group({"params": list(model.head.parameters())})
    return model, [optimizer]


def put_into_the_optimizer() -> Made:
    model, (optimizer,) = loaded_behind()
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return model, [optimizer]


def another_optimizer() -> Made:
    model, (first,) = other_head()
    return model, [first, torch.optim.SGD(model.head.parameters(), lr=0.1)]


def layers_that_are_left_out() -> Made:
    model = Model()
    whole = nn.ModuleList([model, nn.Linear(4, 4)])
    optimizer = optimizer_of(whole)
    return model, [optimizer]


def by_hand(model: Model) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.data -= 0.1 * param.grad


def report_of(
    run: Path,
    make: Callable[[], Made],
    before: Callable[[Model], None] | None = None,
    behind: Callable[[Model], None] | None = None,
) -> Report:
    torch.manual_seed(0)
    with gradcheck_dist.attach(run):
        model, optimizers = make()
        for _ in range(3):
            for _ in range(2):
                tokens = torch.randint(VOCABULARY, (4, 6))
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten()).div(2).backward()
            if before is not None:
                before(model)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if behind is not None:
                behind(model)
                model.zero_grad()
    return diagnose(read_run(run))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (loaded_behind, "embed.weight, head.bias and head.weight"),
        (loaded_into_its_memory, "embed.weight, head.bias and head.weight"),
        (other_head, "head.bias and head.weight"),
        (other_weight, "head.weight"),
    ],
)
def test_parameters_that_took_the_place_of_an_optimizers_are_found(
    tmp_path: Path, make: Callable[[], Made], names: str
) -> None:
    report = report_of(tmp_path / "run", make)
    (finding,) = report.findings
    assert finding.code == "GS707"
    assert finding.num_parameters == names.count(".")
    assert all(name in finding.explanation for name in names.replace(" and", ",").split(", "))
    assert finding.first_event is not None
    assert (finding.first_event.file, finding.first_event.function) == (__file__, "optimizer_of")


@pytest.mark.parametrize(
    "make",
    [
        loaded_before, added_to_the_optimizer, put_into_the_optimizer, another_optimizer,
        layers_that_are_left_out,
    ],
)  # fmt: skip
def test_who_has_the_new_parameters_is_not_accused(tmp_path: Path, make: Callable[[], Made]) -> None:
    assert not report_of(tmp_path / "run", make).findings


@pytest.mark.parametrize("update", [{"behind": by_hand}, {"before": by_hand}], ids=["behind", "before"])
def test_what_is_updated_by_hand_is_not_accused(tmp_path: Path, update: dict[str, Callable[[Model], None]]) -> None:
    assert "GS707" not in [finding.code for finding in report_of(tmp_path / "run", other_head, **update).findings]


def test_an_optimizer_from_before_the_probes_steps_what_it_has(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    first = optimizer_of(model)

    def made() -> Made:
        whole = nn.ModuleList([model, nn.Linear(4, 4)])
        second = torch.optim.SGD(whole[1].parameters(), lr=0.1)
        whole[1] = nn.Linear(4, 4)  # which the second one has not, and nobody uses
        return model, [first, second]

    assert not report_of(tmp_path / "run", made).findings


@pytest.mark.parametrize("made", ["before", "behind", "after forward"])
def test_an_optimizer_of_fsdp2(tmp_path: Path, made: str) -> None:
    launch("replaced_workers:train", (str(tmp_path / "run"), made), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert [finding.code for finding in report.findings] == ([] if made == "behind" else ["GS707"])
    assert report.verdict == ("clean" if made == "behind" else "findings")


@pytest.mark.parametrize("before", [True, False])
def test_an_adapter_around_what_ddp_has_is_told_by_itself(tmp_path: Path, before: bool) -> None:
    launch("replaced_workers:adapt", (str(tmp_path / "run"), before), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert report.verdict == ("clean" if before else "findings")
    for finding in report.findings:
        assert (finding.code, finding.num_parameters, finding.factor.expression) == ("GS103", 2, "dp_replicate")
        assert "before it is wrapped" in finding.fix


@pytest.mark.parametrize("alike", [True, False])
def test_modules_that_ranks_register_in_another_order_are_mixed(tmp_path: Path, alike: bool) -> None:
    launch("replaced_workers:register", (str(tmp_path / "run"), alike), 2, timeout_s=60)
    report = diagnose(read_run(tmp_path / "run"))
    assert report.verdict == ("clean" if alike else "findings")
    for finding in report.findings:
        assert (finding.code, finding.num_parameters) == ("GS105", 6)
        assert "rank 0's parts.a.weight with what is parts.b.weight there" in finding.explanation
