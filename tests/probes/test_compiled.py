"""Compiled trainers: the loss inside of a compiled function is judged, and nothing of the probes is compiled along."""

from __future__ import annotations

import functools
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gradcheck_dist
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import Clip, Loss, LossGradient
from gradcheck_dist.probes.losses.compiled_graph import losses_of
from gradcheck_dist.probes.recording.dynamo import _codes
from gradcheck_dist.trace.run import read_run

VOCABULARY, ACCUMULATION, STEPS = 20, 3, 3
Data = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Gives logits; with labels `loss_of` them."""

    def __init__(self, loss_of: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.loss_of = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), loss_of

    def forward(self, tokens: Tensor, labels: Tensor, num_tokens: Tensor) -> Any:
        return self.loss_of(self.head(torch.tanh(self.embedding(tokens))).flatten(0, 1), labels, num_tokens)


def batches(step: int) -> list[Data]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for k in range(ACCUMULATION):
        tokens, labels = torch.randint(VOCABULARY, (2, 2, 6), generator=generator)
        labels[:, : k + 1] = -100
        found.append((tokens, labels))
    return found


def counted(labels: Tensor) -> Tensor:
    return (labels >= 0).sum()


def train(
    folder: Path, loss_of: Callable[..., Any], *, factor: float = 1.0, backend: str = "aot_eager", record: bool = True
) -> tuple[Report | None, Tensor]:
    """The report, if any, and the parameters that came out."""
    model = Model(loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = gradcheck_dist.attach(folder / "run") if record else None
    compiled = torch.compile(model, backend=backend)
    for step in range(STEPS):
        data = batches(step)
        num_tokens = sum(counted(labels) for _, labels in data)
        for tokens, labels in data:
            result = compiled(tokens, labels, num_tokens)
            ((result["loss"] if isinstance(result, dict) else result) * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
    if session is not None:
        session.detach()
    report = diagnose(read_run(folder / "run")) if record else None
    return report, torch.cat([param.detach().flatten() for param in model.parameters()])


def shifted(logits: Tensor, labels: Tensor, num_tokens: Tensor) -> dict[str, Tensor]:
    """As transformers' models: labels are padded and shifted inside, logits are given beside the loss."""
    labels = F.pad(labels, (0, 1), value=-100)[..., :-1].contiguous().view(-1)
    return {"loss": F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum") / num_tokens,
            "logits": logits}  # fmt: skip


def of_module(logits: Tensor, labels: Tensor, num_tokens: Tensor) -> Tensor:
    loss: Tensor = nn.CrossEntropyLoss(reduction="mean")(logits, labels.flatten())
    loss *= (labels >= 0).sum()
    loss /= num_tokens
    return loss


def masked(logits: Tensor, labels: Tensor, num_tokens: Tensor) -> Tensor:
    losses = F.cross_entropy(logits, labels.flatten().clamp_min(0), reduction="none")
    return (losses * (labels.flatten() >= 0).float()).sum() / num_tokens


def beside_a_term(logits: Tensor, labels: Tensor, num_tokens: Tensor) -> Tensor:
    z_loss = logits.logsumexp(-1).square().mean()
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_tokens + 1e-3 * z_loss


def in_halves(logits: Tensor, labels: Tensor, num_tokens: Tensor) -> Tensor:
    halves = zip(logits.chunk(2), labels.flatten().chunk(2), strict=True)
    return sum(F.cross_entropy(x, y, reduction="sum") for x, y in halves) / num_tokens  # type: ignore[return-value]


LOSSES = [shifted, of_module, masked, beside_a_term, in_halves]


@pytest.mark.parametrize("loss_of", LOSSES)
def test_a_loss_inside_of_a_compiled_model_is_judged(tmp_path: Path, loss_of: Callable[..., Any]) -> None:
    report, recorded = train(tmp_path, loss_of)
    _, alone = train(tmp_path, loss_of, record=False)
    assert report is not None and report.verdict == "clean", report
    assert torch.equal(recorded, alone)


def test_compiled_modules_warn_of_nothing_that_the_probes_do(tmp_path: Path) -> None:
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        train(tmp_path, shifted)
    assert not [str(one.message) for one in told if "global hooks" in str(one.message)]
    assert warnings.filters == filters


@pytest.mark.parametrize("loss_of", [shifted, masked])
def test_a_factor_behind_it_is_found_at_its_line(tmp_path: Path, loss_of: Callable[..., Any]) -> None:
    report, _ = train(tmp_path, loss_of, factor=float(ACCUMULATION))
    assert report is not None
    (finding,) = report.findings
    assert finding.code == "GS303" and finding.factor.expression == "accumulation_steps"
    event = finding.first_event
    assert event is not None and Path(event.file or "").name == Path(__file__).name
    source = Path(__file__).read_text(encoding="utf-8").splitlines()[(event.line or 1) - 1]
    assert "* factor).backward()" in source and event.written == "* factor"
    evaluated = int((event.evaluated_at or "").rpartition(":")[2])
    assert "F.cross_entropy(" in Path(__file__).read_text(encoding="utf-8").splitlines()[evaluated - 1]


def test_a_backend_that_only_runs_the_graph_counts_nothing_twice(tmp_path: Path) -> None:
    report, _ = train(tmp_path, of_module, backend="eager")
    assert report is not None and report.verdict == "clean"
    (trace,) = read_run(tmp_path / "run").ranks.values()
    kinds = [type(event) for event in trace.events if isinstance(event, Loss | LossGradient)]
    assert kinds == [Loss, LossGradient] * (STEPS * ACCUMULATION)


def test_a_compiled_loss_function_is_judged(tmp_path: Path) -> None:
    """As torchtitan's: the sum is compiled, and divided behind it; another number of tokens each time."""
    model = nn.Linear(4, VOCABULARY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcheck_dist.attach(tmp_path / "run"):
        loss_fn = torch.compile(lambda x, y: F.cross_entropy(x.float(), y, reduction="sum"), backend="aot_eager")
        for _ in range(2):
            for size in (5, 6, 9):
                (loss_fn(model(torch.randn(size, 4)), torch.randint(VOCABULARY, (size,))) / 20).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize("ignored", [-100, 3])
def test_a_loss_function_that_is_given_the_ignored_label_is_judged(tmp_path: Path, ignored: int) -> None:
    """As cut_cross_entropy's: where shapes are dynamic, the argument is a number of the graph's own."""
    model = nn.Linear(4, VOCABULARY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="aot_eager", dynamic=True)
    def loss_fn(x: Tensor, y: Tensor, *, ignore_index: int) -> Tensor:
        return F.cross_entropy(x.float(), y, ignore_index=ignore_index, reduction="sum")

    with gradcheck_dist.attach(tmp_path / "run"):
        for _ in range(2):
            for size in (5, 6, 9):
                labels = torch.randint(VOCABULARY, (size,)).where(torch.arange(size) < 3, ignored)
                labels[:3] = torch.tensor([1, 4, 0])
                (loss_fn(model(torch.randn(size, 4)), labels, ignore_index=ignored) / 9).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.coverage.problems) == ("clean", []), report.reasons


def test_what_was_compiled_in_one_session_is_seen_in_the_next(tmp_path: Path) -> None:
    """As two cells of a notebook that call the same compiled model."""
    model = nn.Linear(4, VOCABULARY)
    compiled = torch.compile(lambda x, y: F.cross_entropy(model(x), y), backend="aot_eager")
    for name in ("first", None, "second"):
        session = gradcheck_dist.attach(tmp_path / name) if name else None
        compiled(torch.randn(6, 4), torch.arange(6)).backward()
        if session is not None:
            session.detach()
    for name in ("first", "second"):
        (trace,) = read_run(tmp_path / name).ranks.values()
        (gradient,) = [event for event in trace.events if isinstance(event, LossGradient)]
        assert (gradient.num_tokens, gradient.weight) == (6, pytest.approx(1 / 6))


@pytest.mark.parametrize(("taken", "weight"), [(0, 1 / 6), (1, 1 / 12)])
def test_one_of_two_results_of_a_loss_is_differentiated(tmp_path: Path, taken: int, weight: float) -> None:
    model = nn.Linear(4, VOCABULARY)

    @torch.compile(backend="aot_eager")
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(x), y)
        return loss, loss / 2

    with gradcheck_dist.attach(tmp_path / "run"):
        both(torch.randn(6, 4), torch.arange(6))[taken].backward()
    (trace,) = read_run(tmp_path / "run").ranks.values()
    (gradient,) = [event for event in trace.events if isinstance(event, LossGradient)]
    assert gradient.weight == pytest.approx(weight)


TERMS: list[tuple[Callable[[dict[str, Tensor]], Tensor], int]] = [
    (lambda result: 0.9 * result["loss"] + 0.1 * result["logits"].abs().mean(), 1),
    (lambda result: 0.9 * result["loss"] + result["logits"].mean() * (result["loss"] * 2 / 3), 0),
]


@pytest.mark.parametrize(("root", "others"), TERMS)
def test_logits_of_a_compiled_model_are_no_loss(
    tmp_path: Path, root: Callable[[dict[str, Tensor]], Tensor], others: int
) -> None:
    """They leave the same autograd node; a term that is made of them alone is one beside the loss."""

    def loss_of(logits: Tensor, labels: Tensor, _: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(logits, labels.flatten())
        return {"loss": loss, "logits": logits}

    model = Model(loss_of)
    with gradcheck_dist.attach(tmp_path / "run"):
        result = torch.compile(model, backend="aot_eager")(*batches(0)[0], torch.tensor(1))
        root(result).backward()
    (trace,) = read_run(tmp_path / "run").ranks.values()
    (gradient,) = [event for event in trace.events if isinstance(event, LossGradient)]
    assert gradient.other_losses == others
    if others:
        assert gradient.weight * (gradient.num_tokens or 0) == pytest.approx(0.9)


def test_a_whole_compiled_step_is_recorded(tmp_path: Path) -> None:
    """backward() and optimizer.step() break the graph; what runs there of the probes is not compiled itself."""
    model = nn.Linear(4, VOCABULARY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    told: list[Tensor] = []

    @torch.compile(backend="aot_eager")
    def step(x: Tensor, y: Tensor) -> None:
        for _ in range(2):
            loss = F.cross_entropy(model(x), y)
            (loss / 2).backward()
        told.append(loss.detach())  # so that it is a result of the graph, and its half another one
        optimizer.step()
        optimizer.zero_grad()

    with gradcheck_dist.attach(tmp_path / "run"), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # Dynamo warns of what it cannot trace
        for _ in range(3):
            step(torch.randn(6, 4), torch.arange(6))
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.findings) == ("clean", [])
    assert not [name for name in torch._dynamo.utils.compilation_time_metrics if "gradcheck" in name]


def test_where_no_graph_break_is_allowed_the_probes_make_none(tmp_path: Path) -> None:
    model = nn.Linear(4, VOCABULARY)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def clip() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    with gradcheck_dist.attach(tmp_path / "run"):
        F.cross_entropy(model(torch.randn(6, 4)), torch.arange(6)).backward()
        clip()
    (trace,) = read_run(tmp_path / "run").ranks.values()
    assert not [event for event in trace.events if isinstance(event, Clip)]
    norms = [param.grad.norm() for param in model.parameters() if param.grad is not None]
    assert torch.stack(norms).norm() == pytest.approx(0.1, rel=1e-4)


def test_torchs_functions_are_known_to_the_compiler_with_the_probes_and_without(tmp_path: Path) -> None:
    """Also where something is compiled after the last recorded step."""

    def compiled() -> Callable[[Tensor], Any]:
        @torch.compile(backend="eager", fullgraph=True)
        def function(x: Tensor) -> Any:
            picked = torch.gather(x, 1, torch.zeros(6, 1, dtype=torch.int64))
            return picked, torch._foreach_norm([x, picked]), torch.linalg.vector_norm(x), F.cross_entropy(x, x)

        return function

    x = torch.randn(6, 4)
    expected = compiled()(x)
    torch._dynamo.reset()
    with gradcheck_dist.attach(tmp_path / "run"):
        inside = compiled()
        while_recorded = inside(x)
    torch._dynamo.reset()
    for found in (while_recorded, inside(x), compiled()(x)):
        flat = [tensor for one in found for tensor in ([one] if isinstance(one, Tensor) else one)]
        whole = [tensor for one in expected for tensor in ([one] if isinstance(one, Tensor) else one)]
        assert all(torch.equal(one, other) for one, other in zip(flat, whole, strict=True))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * 2


@pytest.mark.parametrize("beside", [False, True])
def test_a_compiled_module_is_compiled_once(tmp_path: Path, beside: bool) -> None:
    """With the first call, and not again where probes that wait for a module's call begin or end to do so. `beside`: an
    optimizer by hand steps."""
    graphs: list[Any] = []

    def counting(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model: Any = nn.Sequential(nn.Embedding(VOCABULARY, 8), torch.compile(Block(), backend=counting), nn.Linear(8, 20))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(step: int) -> None:
        for tokens, labels in batches(step):
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        if beside:
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
                    param.grad = None
        else:
            optimizer.step()
            optimizer.zero_grad()

    with gradcheck_dist.attach(tmp_path / "run", steps="0:2"):
        for step in range(STEPS):
            train(step)
    train(STEPS)
    assert len(graphs) == 1
    with gradcheck_dist.attach(tmp_path / "again"):
        train(STEPS + 1)
    train(STEPS + 2)
    assert len(graphs) == 1


def test_torchs_functions_are_compiled_by_themselves(tmp_path: Path) -> None:
    logits, labels = torch.randn(6, 4, requires_grad=True), torch.arange(6) % 4
    with gradcheck_dist.attach(tmp_path / "run"):
        for function, inputs in ((F.cross_entropy, (logits, labels)), (torch.linalg.vector_norm, (logits,))):
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(*inputs), function(*inputs))


def test_in_a_process_of_its_own_the_table_is_made_while_functions_are_replaced(tmp_path: Path) -> None:
    script = """
import sys, torch, gradcheck_dist
with gradcheck_dist.attach(sys.argv[1]):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
@torch.compile(backend="eager", fullgraph=True)
def function(x):
    return torch.gather(x, 1, torch.zeros(6, 1, dtype=torch.int64)), torch._foreach_norm([x])
function(torch.randn(6, 4))
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], check=True, timeout=120)


def test_who_wraps_a_replaced_function_is_compiled_as_it_is_written(tmp_path: Path) -> None:
    """functools.wraps copies what is noted on a function."""
    with gradcheck_dist.attach(tmp_path / "run"):

        @functools.wraps(F.cross_entropy)
        def half(*args: Any) -> Tensor:
            return 0.5 * F.cross_entropy(*args)

        logits = torch.randn(6, 4, requires_grad=True)
        labels = torch.arange(6) % 4
        halved = torch.compile(half, backend="eager")(logits, labels)
    assert torch.equal(halved, 0.5 * F.cross_entropy(logits, labels))


def test_all_code_of_a_module_is_found_once() -> None:
    module = types.ModuleType("like_ours")
    source = """
class Outer:
    @property
    def value(self): return [one for one in (lambda: self)()]
    @staticmethod
    def still(): ...
Outer.itself = Outer
Outer.other = int
def function():
    def inner(): ...
    return inner
"""
    exec(source, vars(module))
    names = sorted(code.co_qualname for code in _codes(module))
    assert {"Outer.value", "Outer.still", "function", "function.<locals>.inner"} <= set(names)
    assert len(names) == len(set(names)) and list(_codes(module)) == []


def traced(function: Callable[..., Any], *inputs: Any) -> torch.fx.GraphModule:
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    return graphs[0]


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda x, y: F.cross_entropy(x, y) * x.std(),  # needs the model
        lambda x, y: F.cross_entropy(x, x.argmax(-1)),
        lambda x, y: F.cross_entropy(x, y.add_(1)),  # would be done twice
        lambda x, y: x.abs().mean(),
    ],
)
def test_what_would_have_to_run_again_in_the_model_is_left_alone(loss_of: Callable[..., Any]) -> None:
    graph = traced(loss_of, torch.randn(6, 5, requires_grad=True), torch.arange(6) % 4)
    assert losses_of(graph) == []
