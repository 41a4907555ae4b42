"""Optimizers that are none of torch.optim: a hand-written update, a library's own class. Steps are told apart by what
parameters hold; what cannot be known accuses nobody."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from own_updates import ACCUMULATION, RATE, STEPS, Update, grad, judged, train
from probe_workers import Net, batch
from torch import Tensor, nn

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.report.next_step import next_step
from gradcheck_dist.events import OWN_OPTIMIZER, OptimizerStep
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.recording import module_calls
from gradcheck_dist.trace.run import read_run


def set_to_none(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param -= RATE * grad(param)
            param.grad = None


def zero_by_hand(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.add_(grad(param), alpha=-RATE)
        grad(param).zero_()


def zero_through_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data -= RATE * grad(param).data
        grad(param).data.zero_()


def zero_grad(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data - RATE * grad(param)
    model.zero_grad()


def times_zero(model: nn.Module) -> None:
    for param in model.parameters():
        param.data -= RATE * grad(param)
        grad(param).mul_(0)


def dividing(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param -= RATE / ACCUMULATION * grad(param)
            param.grad = None


def halved_once_more(model: nn.Module) -> None:
    for param in model.parameters():
        grad(param).div_(2)
    set_to_none(model)


@pytest.mark.parametrize("update", [set_to_none, zero_by_hand, zero_through_data, zero_grad])
def test_a_right_one_is_clean_and_trains_as_before(tmp_path: Path, update: Update) -> None:
    report = judged(tmp_path, update)
    assert (report.verdict, report.findings) == ("clean", []), report.reasons
    assert report.run.steps == list(range(STEPS - 1))
    assert train(update) == train(update, folder=tmp_path / "again")
    steps = [event for event in read_run(tmp_path).ranks[0].events if isinstance(event, OptimizerStep)]
    assert {step.optimizer for step in steps} == {OWN_OPTIMIZER}


@pytest.mark.parametrize("update", [set_to_none, zero_by_hand])
def test_one_beside_an_optimizer_of_torchs_that_never_steps_accuses_nobody(tmp_path: Path, update: Update) -> None:
    torch.manual_seed(0)
    model = Net()
    with attach(tmp_path):
        unused = torch.optim.AdamW(model.parameters())
        for step in range(STEPS):
            tokens, labels = batch(0, step)
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
            update(model)
        assert not unused.state
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("change between backward passes" in reason for reason in report.reasons)


@pytest.mark.parametrize("update", [set_to_none, zero_by_hand, zero_grad])
def test_what_divides_twice_is_found(tmp_path: Path, update: Update) -> None:
    [finding] = judged(tmp_path, update, divisor=ACCUMULATION).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "1/accumulation_steps")


def clipped(model: nn.Module) -> None:
    shorter = 0.05 / float(sum((grad(param) ** 2).sum() for param in model.parameters())) ** 0.5
    assert shorter < 1
    for param in model.parameters():
        grad(param).mul_(shorter)
    zero_by_hand(model)


def test_the_norm_that_a_clip_left_is_known_of_gradients_that_were_emptied(tmp_path: Path) -> None:
    report = judged(tmp_path, clipped)
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


def test_what_the_update_itself_does_to_gradients_in_place_is_seen(tmp_path: Path) -> None:
    [finding] = judged(tmp_path, halved_once_more).findings
    assert finding.factor.observed == pytest.approx(0.5)
    assert finding.first_event is not None and finding.first_event.file == __file__


def clipping(norm: float, after: Update) -> Update:
    def clipped(model: nn.Module) -> None:
        grads = [grad(param) for param in model.parameters()]
        total = sum(float(one.norm()) ** 2 for one in grads) ** 0.5
        for one in grads:
            one.mul_(min(1.0, norm / total))
        after(model)

    return clipped


def test_a_clip_by_hand_before_an_update_by_hand_is_one(tmp_path: Path) -> None:
    report = judged(tmp_path, clipping(0.05, set_to_none))
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


def test_the_last_step_of_a_run_ends_where_the_others_do(tmp_path: Path) -> None:
    """The line at which an update by hand is noticed is none of the change's: behind the last step another one is."""
    torch.manual_seed(0)
    model = Net()

    def update(model: nn.Module) -> None:
        for param in model.parameters():
            grad(param).mul_(min(1.0, 0.01 / float(grad(param).norm())))
        zero_by_hand(model)

    with attach(tmp_path):
        for step in range(3):
            tokens, labels = batch(0, step)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / (labels >= 0).sum()).backward()
            update(model)
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert [reason for reason in report.reasons if "steps 0 to 2" in reason]


def test_what_is_never_emptied_is_one_finding_to_the_last_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    with attach(tmp_path):
        for step in range(3):
            tokens, labels = batch(0, step)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / (labels >= 0).sum()).backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= RATE * grad(param)
    (finding,) = diagnose(read_run(tmp_path)).findings
    assert (finding.code, finding.steps) == ("GS402", [1, 2])


@pytest.mark.parametrize("first", [1, 3])
def test_steps_before_the_first_recorded_one_are_counted(tmp_path: Path, first: int) -> None:
    """Nothing else tells there that a step is over, and none would ever be recorded."""
    torch.manual_seed(0)
    model = Net()
    with attach(tmp_path, steps=range(first, 5)):
        for step in range(5):
            for k in range(2):
                tokens, labels = batch(0, 2 * step + k)
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / 40
                (loss * (3 if step == 3 and k == 1 else 1)).backward()
            set_to_none(model)
    report = diagnose(read_run(tmp_path), objective="sum")
    assert report.run.steps == list(range(first, 5))
    assert {step for one in report.findings for step in one.steps if one.code == "GS000"} == {3}


@pytest.mark.parametrize("stays", [False, True])
def test_gradients_are_held_no_longer_than_to_the_next_forward_pass(tmp_path: Path, stays: bool) -> None:
    """Beside activations they would be memory that training does not have."""
    held: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    class Watched(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            alive.append(sum(one() is not None for one in held))
            out: Tensor = super().forward(tokens)
            return out

    torch.manual_seed(0)
    model = Watched()
    with attach(tmp_path, steps=range(STEPS)):
        for _ in range(STEPS):
            tokens, labels = batch(0, 0)
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
            held[:] = [weakref.ref(grad(param)) for param in model.parameters()]
            (zero_by_hand if stays else set_to_none)(model)
            for param in model.parameters():
                param.grad = None
            with torch.no_grad():
                nn.Linear(1, 1)(torch.zeros(1, 1))  # nothing is trained by that
    assert alive == [0] * STEPS
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.run.steps) == ("clean", list(range(STEPS))), report.reasons
    assert not module_calls._listeners  # the hook itself stays where an earlier test has compiled something


def test_gradients_that_were_replaced_before_they_were_emptied_by_hand_are_what_was_read(tmp_path: Path) -> None:
    def replaced(model: nn.Module) -> None:
        for param in model.parameters():
            param.grad = grad(param) * ACCUMULATION
        zero_by_hand(model)

    report = judged(tmp_path, replaced, divisor=ACCUMULATION)
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


def test_gradients_that_were_replaced_and_seen_before_they_were_taken_away_are_what_was_read(tmp_path: Path) -> None:
    """One that was summed over ranks behind that is known, and made all others look wrong."""

    def replaced(model: nn.Module) -> None:
        for param in model.parameters():
            param.grad = grad(param) * ACCUMULATION
        assert torch.stack([grad(param).norm() for param in model.parameters()]).norm() > 0
        set_to_none(model)

    report = judged(tmp_path, replaced, divisor=ACCUMULATION)
    assert (report.verdict, report.findings) == ("clean", []), report.reasons


def set_to_none_at_once(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.add_(grad(param), alpha=-RATE)
            param.grad = None


@pytest.mark.parametrize(("update", "verdict"), [(set_to_none_at_once, "undetermined"), (set_to_none, "clean")])
@pytest.mark.parametrize("again", [False, True])
def test_where_some_gradients_are_seen_to_be_replaced_others_that_nobody_saw_leave_the_step_open(
    again: bool, update: Callable[[nn.Module], None], verdict: str, tmp_path: Path
) -> None:
    """`again`: they lie where those of the step before lay, as memory that is used again may. A product of a gradient
    is a look at it."""
    buffers: dict[int, Tensor] = {}

    def replaced(model: nn.Module) -> None:
        for nr, param in enumerate(model.parameters()):
            buffer = buffers.setdefault(nr, torch.empty_like(param)) if again else None
            param.grad = torch.mul(grad(param), ACCUMULATION, out=buffer)
            if nr == 0:
                grad(param).mul_(1.0)
        update(model)

    report = judged(tmp_path, replaced, divisor=ACCUMULATION)
    assert (report.verdict, report.findings) == (verdict, [])
    assert verdict == "clean" or any("put in the place of others" in reason for reason in report.reasons)


def test_an_update_that_may_divide_by_itself_accuses_nobody(tmp_path: Path) -> None:
    report = judged(tmp_path, dividing, divisor=1 / ACCUMULATION)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("x 3 = accumulation_steps in .grad" in reason for reason in report.reasons), report.reasons
    assert next_step(report).startswith("Look whether the update divides by that number")


def adding(model: nn.Module) -> None:
    """Gradient ascent."""
    with torch.no_grad():
        for param in model.parameters():
            param.add_(RATE * grad(param))
    model.zero_grad()


@pytest.mark.parametrize(("maximize", "codes"), [(True, []), (False, ["GS303"]), (None, [])])
def test_the_negative_of_a_loss_may_be_maximized(tmp_path: Path, maximize: bool | None, codes: list[str]) -> None:
    """By an optimizer that is told to, or by one that is written by hand (None)."""
    made: list[torch.optim.Optimizer] = []

    def update(model: nn.Module) -> None:
        if maximize is None:
            adding(model)
            return
        if not made:
            made.append(torch.optim.SGD(model.parameters(), lr=RATE, maximize=maximize))
        made[0].step()
        made[0].zero_grad()

    report = judged(tmp_path, update, divisor=-1)
    assert [finding.code for finding in report.findings] == codes
    assert codes or (report.verdict == "undetermined" and "x -1 in .grad" in report.reasons[0])


def test_gradients_that_nobody_saw_before_they_were_emptied_are_told(tmp_path: Path) -> None:
    report = judged(tmp_path, times_zero)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("empty them with zero_grad()" in reason for reason in report.reasons), report.reasons


def test_what_differs_between_contributions_is_found_also_there(tmp_path: Path) -> None:
    def halve(model: nn.Module) -> None:
        for param in model.parameters():
            grad(param).mul_(0.5)

    [finding] = judged(tmp_path, times_zero, after=halve).findings
    assert (finding.code, finding.factor.observed) == ("GS000", pytest.approx(0.5))


def test_values_that_change_before_an_optimizer_of_torch_comes_are_no_step(tmp_path: Path) -> None:
    """An embedding that is renormalised in forward, and gradients of which one is emptied on purpose."""
    torch.manual_seed(0)
    with attach(tmp_path, steps=range(2)):
        embed, head = nn.Embedding(12, 8, max_norm=0.5), nn.Linear(8, 12)
        for step in range(3):
            for k in range(2):
                tokens = torch.arange(6) + k
                (F.cross_entropy(head(embed(tokens)), tokens) / 2).backward()
            if step == 0:
                optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=RATE)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.run.steps) == ("clean", [0, 1]), report.reasons


@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_a_step_that_broke_off_accuses_no_common_factor(tmp_path: Path, divisor: float) -> None:
    """Two of three microbatches of a right trainer weigh two thirds of what their tokens alone would."""
    torch.manual_seed(0)
    with attach(tmp_path):
        model = Net()
        torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(2):
            tokens, labels = batch(0, 0)
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / divisor).backward()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("so far: whether more was to come" in reason for reason in report.reasons), report.reasons


class Master(torch.optim.AdamW):
    """Holds copies of a model's parameters in float32, and hands gradients on to them in its own step."""

    def __init__(self, model: nn.Module, *, flat: bool) -> None:
        self.model = list(model.parameters())
        copies = [param.detach().float().clone() for param in self.model]
        self.copies = [torch.cat([one.flatten() for one in copies])] if flat else copies
        super().__init__(self.copies, lr=RATE / 10)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        grads = [grad(param).float() for param in self.model]
        flat = len(self.copies) < len(grads)
        for copy, one in zip(self.copies, [torch.cat([g.flatten() for g in grads])] if flat else grads, strict=True):
            copy.grad = one
        super().step(closure)
        values = self.copies[0].split([param.numel() for param in self.model]) if flat else self.copies
        with torch.no_grad():
            for param, value in zip(self.model, values, strict=True):
                param.copy_(value.view_as(param))
                param.grad = None
        for copy in self.copies:
            copy.grad = None


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_copies_that_get_their_gradients_inside_of_the_step_are_judged_by_the_model_s(
    flat: bool, divisor: float, tmp_path: Path
) -> None:
    with attach(tmp_path / "run", steps=range(STEPS)):
        model = Net().bfloat16()
        optimizer = Master(model, flat=flat)
        for step in range(STEPS):
            for k in range(ACCUMULATION):
                tokens, labels = batch(k, step)
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.clamp_min(0).flatten())
                (loss / ACCUMULATION / divisor).backward()
            optimizer.step()
    report = diagnose(read_run(tmp_path / "run"))
    assert report.verdict == ("clean" if divisor == 1 else "findings")
    assert [(one.code, one.step) for one in report.findings] == ([] if divisor == 1 else [("GS303", 0)])


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_one_that_reads_buffers_into_which_hooks_move_gradients_ends_its_steps(
    copied: bool, divisor: float, tmp_path: Path
) -> None:
    def moved(param: Tensor) -> None:
        param.main_grad.add_(grad(param))
        param.grad = None

    torch.manual_seed(0)
    with attach(tmp_path / "run", steps=range(STEPS), objective="global-token-mean"):
        model = Net()
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param)
            param.register_post_accumulate_grad_hook(moved)
        for step in range(STEPS):
            for k in range(ACCUMULATION):
                tokens, labels = batch(k, step)
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.clamp_min(0).flatten())
                (loss / ACCUMULATION / divisor).backward()
            with torch.no_grad():
                for param in model.parameters():
                    param.grad = param.main_grad.clone() if copied else param.main_grad
                    param -= RATE * grad(param)
                    param.main_grad.zero_()
                    param.grad = None
    report = diagnose(read_run(tmp_path / "run"))
    assert report.run.steps == list(range(STEPS))
    assert [one.code for one in report.findings] == ([] if divisor == 1 else ["GS303"]), report.reasons
    assert report.verdict == ("clean" if divisor == 1 else "findings"), report.reasons
