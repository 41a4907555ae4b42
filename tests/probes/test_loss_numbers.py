"""What is written where a line multiplies a loss tells a count from a coefficient, and names the line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import LossGradient, LossNumber
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

ACCUM_STEPS = 3
WORKER = Path(__file__).with_name("loss_number_workers.py")
config = {"mse_weight": 0.3}
several = 2.0
several = 4.0
passed = 5.0


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


def doubled(passed: float) -> float:
    return 2 * passed


def in_place(loss: Tensor) -> Tensor:
    loss /= ACCUM_STEPS
    return loss


def over_lines(loss: Tensor) -> Tensor:
    return (
        loss
        / (ACCUM_STEPS * 2)
    )  # fmt: skip


def trained(
    run_dir: Path, multiply: Callable[[Tensor], Tensor], error: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
) -> Report:
    """One step of three passes, each loss of which is `multiply(loss)`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir):
        for _ in range(ACCUM_STEPS):
            multiply(error(model(torch.randn(5, 6)), torch.randn(5, 4))).backward()
        optimizer.step()
    return diagnose(read_run(run_dir))


def numbers(run_dir: Path) -> list[LossNumber]:
    first = next(event for event in read_run(run_dir).ranks[0].events if isinstance(event, LossGradient))
    return first.numbers or []


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], list[tuple[float, str, str]]]] = {
    "quotient": (lambda loss: loss / ACCUM_STEPS, [(1 / 3, "/ ACCUM_STEPS", "3")]),
    "product": (lambda loss: loss * 0.5, [(0.5, "* 0.5", "")]),
    "reflected": (lambda loss: 0.1 * loss, [(0.1, "* 0.1", "")]),
    "method": (lambda loss: loss.div(ACCUM_STEPS), [(1 / 3, "/ ACCUM_STEPS", "3")]),
    "in place": (in_place, [(1 / 3, "/ ACCUM_STEPS", "3")]),
    "over lines": (over_lines, [(1 / 6, "/ (ACCUM_STEPS * 2)", "")]),
    "an item": (lambda loss: loss * config["mse_weight"], [(0.3, "* config['mse_weight']", "")]),
    "assigned twice": (lambda loss: loss * several, [(4.0, "* several", "")]),
    "an argument elsewhere": (lambda loss: loss * passed, [(5.0, "* passed", "")]),
    "a tensor": (lambda loss: loss * torch.tensor(2.0), [(2.0, "* torch.tensor(2.0)", "")]),
    "several": (lambda loss: 0.1 * loss / ACCUM_STEPS, [(1 / 3, "/ ACCUM_STEPS", "3"), (0.1, "* 0.1", "")]),
    "one": (lambda loss: loss * 1, []),
    "none": (lambda loss: loss, []),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_told(tmp_path: Path, form: str) -> None:
    multiply, expected = FORMS[form]
    trained(tmp_path, multiply)
    found = numbers(tmp_path)
    assert [(one.written, one.assigned) for one in found] == [told[1:] for told in expected]
    assert [one.factor for one in found] == pytest.approx([factor for factor, *_ in expected], rel=1e-6)
    assert all(one.site.file == __file__ for one in found)


def test_what_torch_multiplies_by_is_no_line_of_the_program(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trained(tmp_path, lambda loss: scaler.scale(loss / ACCUM_STEPS))
    assert [one.written for one in numbers(tmp_path)] == ["/ ACCUM_STEPS"]


def test_the_same_bits_are_trained_and_nothing_is_left_behind(tmp_path: Path) -> None:
    methods = {name: getattr(torch.Tensor, name) for name in ("__mul__", "__rmul__", "__truediv__", "mul", "div_")}
    with attach(tmp_path):
        assert torch.Tensor.__mul__ is not methods["__mul__"]
        values = torch.arange(4.0) / 2 * 3
        values /= 2
        assert torch.tensor(1.0).__mul__("text") is NotImplemented
    assert torch.equal(values, torch.tensor([0.0, 0.75, 1.5, 2.25]))
    assert {name: getattr(torch.Tensor, name) for name in methods} == methods
    assert not {"__mul__", "__rmul__", "__truediv__"} & vars(torch.Tensor).keys()


def test_passes_that_are_divided_by_twice_are_told_with_both_lines(tmp_path: Path) -> None:
    report = trained(tmp_path, lambda loss: in_place(loss / ACCUM_STEPS))
    (finding,) = report.findings
    assert (finding.code, finding.factor.expression) == ("GS303", "1/accumulation_steps")
    assert finding.first_event is not None and finding.first_event.file == __file__
    assert finding.first_event.line == in_place.__code__.co_firstlineno + 1
    assert finding.explanation.count("(/ ACCUM_STEPS)") == 2
    assert "one too many" in finding.explanation and finding.fix.startswith("Take it out at")


@pytest.mark.parametrize(
    ("multiply", "verdict"),
    [(lambda loss: 0.1 * loss, "undetermined"), (lambda loss: loss * config["mse_weight"], "clean")],
    ids=["number", "weight"],
)
def test_a_coefficient_hides_no_other_fault(tmp_path: Path, multiply: Callable[[Tensor], Tensor], verdict: str) -> None:
    right = trained(tmp_path / "right", lambda loss: multiply(loss) / ACCUM_STEPS)
    assert (right.verdict, right.findings) == (verdict, [])
    assert any("is taken for its coefficient" in note for note in right.coverage.notes) == (verdict == "clean")
    (finding,) = trained(tmp_path / "wrong", multiply).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


def test_a_weight_before_a_counted_loss_is_its_coefficient_where_all_else_is_right(tmp_path: Path) -> None:
    def entropy(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target.argmax(-1))

    right = trained(tmp_path / "right", lambda loss: loss * config["mse_weight"] / ACCUM_STEPS, entropy)
    assert (right.verdict, right.findings) == ("clean", [])
    (finding,) = trained(tmp_path / "wrong", lambda loss: 0.3 * loss / ACCUM_STEPS, entropy).findings
    assert finding.factor.observed == pytest.approx(0.3)
    assert finding.first_event is not None and finding.first_event.written == "* 0.3"


def some(loss: Tensor) -> Tensor:
    factor = 0.1
    return loss * factor


@pytest.mark.parametrize(
    "multiply",
    [
        lambda loss: loss / 7,
        some,
        lambda loss: 3 * loss / ACCUM_STEPS,
        lambda loss: loss * (1 / 3) * config["mse_weight"] / ACCUM_STEPS,
        lambda loss: (1 / 3) * loss / ACCUM_STEPS,
    ],
    ids=["a divisor", "a factor", "as many as passes", "one over passes, and a weight", "one over passes"],
)
def test_what_may_be_a_count_is_no_coefficient(tmp_path: Path, multiply: Callable[[Tensor], Tensor]) -> None:
    report = trained(tmp_path, multiply)
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_a_line_that_may_be_right_is_not_named_where_the_number_stands_twice(tmp_path: Path) -> None:
    def divided(output: Tensor, target: Tensor) -> Tensor:
        return (F.cross_entropy(output, target.argmax(-1), reduction="none") / ACCUM_STEPS).mean()

    (finding,) = trained(tmp_path, lambda loss: loss / ACCUM_STEPS, divided).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "1/accumulation_steps")
    assert "(/ ACCUM_STEPS)" not in finding.explanation and "Take it out" not in finding.fix


def test_a_line_is_named_beside_a_hook_that_divides_once_more(tmp_path: Path) -> None:
    def divided(output: Tensor, target: Tensor) -> Tensor:
        output.register_hook(lambda grad: grad / ACCUM_STEPS)  # type: ignore[no-untyped-call]
        return F.cross_entropy(output, target.argmax(-1))

    (finding,) = trained(tmp_path, lambda loss: loss / ACCUM_STEPS, divided).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "1/accumulation_steps")
    assert finding.first_event is not None and finding.first_event.written == "/ ACCUM_STEPS"


def trained_on_ranks(folder: Path, variant: str, *passes: int) -> Report:
    launch("loss_number_workers:train", (str(folder), variant, *passes), 2, timeout_s=60)
    return diagnose(read_run(folder))


def line_of(text: str) -> int:
    return next(at for at, line in enumerate(WORKER.read_text().splitlines(), 1) if line.strip() == text)


@pytest.mark.parametrize("variant", ["ranks", "likelihood ranks"])
def test_a_loss_that_is_divided_by_what_its_source_calls_ranks_is_averaged_twice(tmp_path: Path, variant: str) -> None:
    (finding,) = trained_on_ranks(tmp_path, variant).findings
    assert (finding.code, finding.factor.expression) == ("GS101", "1/dp_replicate")
    place = f"{WORKER.name}:{line_of('loss = loss / world_size')}"
    assert finding.explanation.startswith("The losses are means that already weigh what they should, and DDP then")
    assert f"{place} (/ world_size)" in finding.explanation and f"Take it out at {place}" in finding.fix


def test_a_line_that_writes_to_gradients_is_to_be_dropped_before_one_that_does_as_much_to_losses(
    tmp_path: Path,
) -> None:
    (finding,) = trained_on_ranks(tmp_path, "counted more").findings
    assert finding.factor.observed == pytest.approx(2)
    assert finding.first_event is not None and finding.first_event.line == line_of("param.grad *= world_size")
    place = f"{WORKER.name}:{line_of('loss = loss * world_size')}"
    assert finding.fix.startswith("Drop it") and finding.fix.endswith(f"Or: take it out at {place}.")


@pytest.mark.parametrize("variant", ["number", "likelihood number"])
def test_a_number_that_nobody_calls_ranks_may_be_a_coefficient(tmp_path: Path, variant: str) -> None:
    report = trained_on_ranks(tmp_path, variant)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any(f"{WORKER.name}:{line_of('loss = loss / halves')} (/ halves)" in reason for reason in report.reasons)


@pytest.mark.parametrize(("variant", "code", "factor"), [("undivided", "GS303", 3), ("ranks", "GS101", 0.5)])
def test_a_half_that_may_be_the_ranks_hides_no_other_fault(
    tmp_path: Path, variant: str, code: str, factor: float
) -> None:
    (finding,) = trained_on_ranks(tmp_path, f"half, {variant}").findings
    assert (finding.code, finding.factor.observed) == (code, pytest.approx(factor, rel=1e-4))


def test_a_half_that_may_be_the_ranks_and_nothing_else_accuses_nobody(tmp_path: Path) -> None:
    report = trained_on_ranks(tmp_path, "half")
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("(* 0.5) multiplies the loss by" in reason for reason in report.reasons)


def test_a_half_that_makes_up_for_a_sum_that_is_done_twice_leaves_the_verdict_open(tmp_path: Path) -> None:
    (finding,) = trained_on_ranks(tmp_path / "alone", "again").findings
    assert finding.code == "GS102"
    report = trained_on_ranks(tmp_path / "half", "half, again")
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "adds up again what these hold alike" in report.reasons[0]
    run = read_run(tmp_path / "half")
    assert diagnose(run, objective="global-token-mean").verdict == "undetermined", "that declares no coefficient"


def test_what_is_off_by_more_than_the_ranks_that_divide_it_accuses_nobody(tmp_path: Path) -> None:
    report = trained_on_ranks(tmp_path, "likelihood ranks undivided")
    assert (report.verdict, report.findings) == ("undetermined", [])


@pytest.mark.parametrize("variant", ["loud", "labels loud", "half, loud", "masked, loud", "focal, loud"])
def test_the_line_that_makes_a_rank_loud_is_the_culprit(tmp_path: Path, variant: str) -> None:
    (finding,) = trained_on_ranks(tmp_path, variant).findings
    assert (finding.code, finding.pattern) == ("GS000", "x 3 on data rank 1, the rest right")
    event = finding.first_event
    assert event is not None and (event.line, event.written) == (line_of("loss = 3 * loss"), "* 3")


def test_a_weight_of_each_rank_s_own_before_a_function_of_the_data_accuses_nobody(tmp_path: Path) -> None:
    report = trained_on_ranks(tmp_path, "focal, own weight")
    assert (report.verdict, report.findings) == ("undetermined", [])


def test_a_number_that_may_be_that_of_the_passes_is_not_named_for_what_follows(tmp_path: Path) -> None:
    (finding,) = trained_on_ranks(tmp_path, "labels undivided, number, behind", 2).findings
    event = finding.first_event
    assert event is not None and event.line == line_of("param.grad /= world_size")
    assert "(/ halves)" not in finding.explanation and "Take it out" not in finding.fix


def test_the_line_that_divides_tokens_again_is_the_culprit(tmp_path: Path) -> None:
    (finding,) = trained_on_ranks(tmp_path, "labels twice").findings
    assert (finding.code, finding.factor.expression) == ("GS303", "1/accumulation_steps")
    event = finding.first_event
    assert event is not None and event.line == line_of("loss /= PASSES")


@pytest.mark.parametrize("variant", ["summed, sum alone", "labels summed, sum alone"])
def test_a_collective_on_the_loss_whose_backward_adds_up_is_the_culprit(tmp_path: Path, variant: str) -> None:
    (finding,) = trained_on_ranks(tmp_path, variant).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "dp_replicate")
    event = finding.first_event
    assert event is not None
    assert (event.line, event.written) == (line_of("loss = all_reduce(loss)"), "through all_reduce over 2 ranks")


@pytest.mark.parametrize("variant", ["summed", "labels summed"])
def test_the_mean_of_the_ranks_losses_is_right(tmp_path: Path, variant: str) -> None:
    assert trained_on_ranks(tmp_path, variant).verdict == "clean"


def test_a_collective_on_a_number_beside_the_loss_is_no_line_of_the_loss(tmp_path: Path) -> None:
    (finding,) = trained_on_ranks(tmp_path, "labels undivided beside", 2).findings
    assert finding.code == "GS303" and "all_reduce" not in finding.explanation


def test_a_pass_without_tokens_hides_no_line(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_tokens = 5 * (ACCUM_STEPS - 1)
    with attach(tmp_path):
        for index in range(ACCUM_STEPS):
            labels = torch.randint(0, 4, (5,)) if index else torch.full((5,), -100)
            loss = F.cross_entropy(model(torch.randn(5, 6)), labels, reduction="sum") / num_tokens
            loss = loss / ACCUM_STEPS
            loss.backward()
        optimizer.step()
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "1/accumulation_steps")
    assert finding.first_event is not None and finding.first_event.written == "/ ACCUM_STEPS"
    assert "or let it multiply all losses" not in finding.fix
