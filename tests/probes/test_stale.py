"""Forward passes that compute with values of before the optimizer's step (GS708)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from stale_workers import CLIPPED, OWNERS, VARIANTS
from torch import Tensor, nn

import gradcheck_dist
from gradcheck_dist.diagnosis.finding import Finding, Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch, warm_up

CLASSES, STEPS = 7, 3
WRONG = [one for one in VARIANTS if "before the step" in one or "not resharded" in one or "prefetched" in one]
WRONG.remove("fsdp2: before the step, resharded")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    warm_up()
    folder = tmp_path_factory.mktemp("stale")
    launch("stale_workers:run", (str(folder),), 2, timeout_s=100)
    return {variant: diagnose_run(folder / variant) for variant in (*VARIANTS, CLIPPED, *OWNERS)}


@pytest.mark.parametrize("variant", WRONG)
def test_what_was_gathered_before_the_optimizer_stepped_is_found(reports: dict[str, Report], variant: str) -> None:
    (finding,) = reports[variant].findings
    assert (finding.code, finding.steps) == ("GS708", [1, 2])
    assert "did not gather again" in finding.explanation and "behind optimizer.step()" in finding.fix
    assert finding.first_event is not None and (finding.first_event.file or "").endswith("stale_workers.py")


@pytest.mark.parametrize("variant", [one for one in VARIANTS if one not in WRONG])
def test_what_is_gathered_anew_is_clean(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert report.verdict == "clean" and not report.coverage.problems, report.findings


def test_what_was_gathered_and_is_freed_is_not_read(reports: dict[str, Report]) -> None:
    """A clip is given what modules hold, which is whole there until a pass reshards it."""
    assert reports[CLIPPED].findings and not reports[CLIPPED].coverage.problems


@pytest.mark.parametrize("variant", OWNERS)
def test_what_one_rank_steps_is_to_come_to_the_others(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert not report.reasons and not report.coverage.problems
    if variant in ("owners: all sent", "owners: none sent, nothing moves"):
        assert report.verdict == "clean", report.findings
        return
    (finding,) = report.findings
    assert finding.code == "GS708" and "Other ranks' optimizers step" in finding.explanation
    total = report.coverage.parameters_total
    assert finding.num_parameters == (total if variant == "owners: none sent" else 1)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def loss_of(model: nn.Module, step: int) -> Tensor:
    random = torch.Generator().manual_seed(step)
    inputs, labels = torch.randn(12, 8, generator=random), torch.randint(CLASSES, (12,), generator=random)
    return F.cross_entropy(model(inputs).float(), labels)


def findings_of(folder: Path, train: Callable[[], None]) -> list[Finding]:
    with gradcheck_dist.attach(folder):
        train()
    report = diagnose_run(folder)
    assert not report.coverage.problems and not report.reasons, report.reasons
    return report.findings


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("around", ["the loop", "each pass", "each step"])
def test_autocast_that_is_open_while_the_optimizer_steps(tmp_path: Path, around: str, cached: bool) -> None:
    def context(where: str) -> torch.autocast | nullcontext[None]:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=cached) if around == where else nullcontext()

    def train() -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with context("the loop"):
            for step in range(STEPS):
                with context("each step"):
                    with context("each pass"):
                        loss = loss_of(model, step)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()

    found = findings_of(tmp_path / "run", train)
    if around != "the loop" or not cached:
        assert not found
        return
    (finding,) = found
    assert (finding.code, finding.num_parameters) == ("GS708", 4)
    assert "torch.autocast made in an earlier step" in finding.explanation
    assert "leave it before optimizer.step()" in finding.fix


def test_what_a_line_makes_of_a_parameter_before_the_loop(tmp_path: Path) -> None:
    def train() -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bias = model[2].bias * 2
        for step in range(STEPS):
            random = torch.Generator().manual_seed(step)
            inputs, labels = torch.randn(12, 8, generator=random), torch.randint(CLASSES, (12,), generator=random)
            F.cross_entropy(model(inputs) + bias, labels).backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()

    (finding,) = findings_of(tmp_path / "run", train)
    assert (finding.code, finding.num_parameters) == ("GS708", 1)
    assert "MulBackward0" in finding.explanation


def test_a_view_is_as_new_as_its_parameter_however_old_its_node(tmp_path: Path) -> None:
    def train() -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bias = model[2].bias.view(1, -1)
        for step in range(STEPS):
            random = torch.Generator().manual_seed(step)
            inputs, labels = torch.randn(12, 8, generator=random), torch.randint(CLASSES, (12,), generator=random)
            F.cross_entropy(model(inputs) + bias, labels).backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()

    assert not findings_of(tmp_path / "run", train)


@pytest.mark.parametrize("reads", ["both", "its own"])
def test_an_older_part_of_a_graph_whose_gradients_nobody_reads_is_none_of_it(tmp_path: Path, reads: str) -> None:
    """A generator's sample that was made before the critic stepped, as GANs use it."""

    def train() -> None:
        maker, critic = nn.Linear(4, 8), make_model()
        of_maker = torch.optim.SGD(maker.parameters(), lr=0.1)
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
        for step in range(2 * STEPS):
            made = maker(torch.randn(12, 4, generator=torch.Generator().manual_seed(step)))
            labels = torch.randint(CLASSES, (12,), generator=torch.Generator().manual_seed(step))
            seen = made if reads == "both" else made.detach()
            F.cross_entropy(critic(seen), labels).backward(retain_graph=True)
            of_critic.step()
            of_critic.zero_grad()
            of_maker.zero_grad()
            F.cross_entropy(critic(made), labels).backward()
            of_maker.step()
            of_maker.zero_grad()
            of_critic.zero_grad()

    with gradcheck_dist.attach(tmp_path / "run"):
        train()
    assert "GS708" not in [finding.code for finding in diagnose_run(tmp_path / "run").findings]


@pytest.mark.parametrize("to_none", [True, False])
def test_what_a_step_left_as_it_was_is_not_old(tmp_path: Path, to_none: bool) -> None:
    """One optimizer for a maker and its critic, of which the maker has no gradient, or zeros, in every second step."""

    def train() -> None:
        maker, critic = nn.Linear(4, 8), make_model()
        optimizer = torch.optim.SGD([*maker.parameters(), *critic.parameters()], lr=0.1)
        for step in range(STEPS):
            labels = torch.randint(CLASSES, (12,), generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16):
                made = maker(torch.randn(12, 4, generator=torch.Generator().manual_seed(step)))
                of_critic = F.cross_entropy(critic(made).float(), labels)
            of_critic.backward(retain_graph=True)
            maker.zero_grad(set_to_none=to_none)
            optimizer.step()
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                of_maker = F.cross_entropy(critic(made).float(), labels)
            of_maker.backward()
            optimizer.step()
            optimizer.zero_grad()

    with gradcheck_dist.attach(tmp_path / "run"):
        train()
    assert "GS708" not in [finding.code for finding in diagnose_run(tmp_path / "run").findings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("back", ["at once", "a step later", "never"])
def test_copies_that_an_optimizer_steps_come_back_to_the_model(tmp_path: Path, back: str, dtype: torch.dtype) -> None:
    def train() -> None:
        model = make_model().to(dtype)
        params = list(model.parameters())
        copies = [param.detach().clone().float().requires_grad_() for param in params]
        optimizer = torch.optim.AdamW(copies, lr=1e-2)
        kept = [copy.detach().clone() for copy in copies]
        for step in range(STEPS):
            random = torch.Generator().manual_seed(step)
            inputs, labels = torch.randn(12, 8, generator=random), torch.randint(CLASSES, (12,), generator=random)
            F.cross_entropy(model(inputs.to(dtype)).float(), labels).backward()
            for param, copy, before in zip(params, copies, kept, strict=True):
                copy.grad, param.grad = param.grad.float(), None
                before.copy_(copy.detach())
            optimizer.step()
            with torch.no_grad():
                for param, now in zip(params, kept if back == "a step later" else copies, strict=True):
                    param.copy_(now if back != "never" else param)

    found = findings_of(tmp_path / "run", train)
    if back != "never":
        assert not found
        return
    (finding,) = found
    assert (finding.code, finding.num_parameters) == ("GS708", 4)
    assert "nothing has brought the new ones back" in finding.explanation
