"""What a clip that nobody recorded may hide: its own number is not known, so what stands before it is told with it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from probe_workers import Net, batch, token_sum

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.diagnosis.report.next_step import next_step
from gradcheck_dist.probes import attach
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run

NUM_BATCHES = 3


def squares(grads: list[torch.Tensor]) -> float:
    """A norm that no probe watches."""
    return float(sum((grad * grad).sum() for grad in grads)) ** 0.5


def flat(grads: list[torch.Tensor]) -> float:
    return float(torch.cat([grad.flatten() for grad in grads]).norm())


def one_by_one(grads: list[torch.Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(grad.data) for grad in grads]).norm())


def all_at_once(grads: list[torch.Tensor]) -> float:
    return float(torch.linalg.norm(torch.stack(torch._foreach_norm(grads))))


def trained(
    run_dir: Path,
    loss_factor: float,
    divides: bool,
    max_norm: float | tuple[float, float],
    hooked: float = 1.0,
    norm_of: Callable[[list[torch.Tensor]], float] = squares,
    behind: bool = False,
    over: float = 1.0,
    seen: bool = False,
    twice: float = 1.0,
    clip_seen: bool = True,
) -> Report:
    """Two steps of token sums times a factor; before the optimizer gradients are divided by all tokens, or not, and
    clipped to a norm, one for both steps or one for each. Where `hooked` is not 1, a hook multiplies each gradient by
    it as it arrives. `behind`: their norm is taken before the division, and divided as well. `over`: what tokens are
    divided by before gradients are divided by them. `seen`: that is done where gradients lie; `twice`: a second line
    divides by this of it. `clip_seen`: so is the clip."""
    model = Net()
    for param in model.parameters() if hooked != 1.0 else ():
        param.register_hook(lambda grad: grad * hooked)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir, objective="global-token-mean"):
        for step in range(2):
            data = [batch(0, NUM_BATCHES * step + k) for k in range(NUM_BATCHES)]
            total = sum(int((labels >= 0).sum()) for _, labels in data)
            for part in data:
                (token_sum(model, part) * (loss_factor if divides else loss_factor / total)).backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            norm = norm_of(grads) / (total / over if divides else 1) if behind else 0.0
            for param in model.parameters():
                assert param.grad is not None
                if seen:
                    param.grad /= total / over / twice if divides else 1
                    if twice != 1:
                        param.grad /= twice
                else:
                    param.grad = torch.div(param.grad, total / over if divides else 1)
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            norm = norm if behind else norm_of(grads)
            coefficient = min(1.0, (max_norm if isinstance(max_norm, float) else max_norm[step]) / norm)
            for param, grad in zip(model.parameters(), grads, strict=True):
                param.grad = grad.mul_(coefficient) if clip_seen else torch.mul(grad, coefficient)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


def test_a_clip_that_may_divide_besides_is_open(tmp_path: Path) -> None:
    report = trained(tmp_path, 1.0, divides=True, max_norm=0.25, clip_seen=False)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert all("unless the same lines divide by this number" in reason for reason in report.reasons)
    assert {round(weight.ratio or 0, 4) for weight in report.weights} == {1.0}
    assert report.coverage.notes and all("are taken to divide by" in note for note in report.coverage.notes)


def test_a_clip_to_no_round_norm_that_may_divide_besides_is_open(tmp_path: Path) -> None:
    """Two steps tell it: unscaled twice, gradients have a clip's norm over the loss scale in each."""
    report = trained(tmp_path, 1.0, divides=True, max_norm=0.5 / 4096, clip_seen=False)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert all("unless the same lines divide by this number" in reason for reason in report.reasons)
    assert any("the same in several steps" in note for note in report.coverage.notes)


def test_a_clip_to_no_round_norm_of_gradients_that_are_right_is_clean(tmp_path: Path) -> None:
    assert trained(tmp_path, 1.0, divides=False, max_norm=0.5 / 4096, clip_seen=False).verdict == "clean"


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, "clean"), (1 / NUM_BATCHES, "findings"), (NUM_BATCHES, "undetermined")]
)
def test_a_clip_that_is_seen_shows_what_was_done_besides(
    tmp_path: Path, factor: float, verdict: str, seen: bool
) -> None:
    """The rest of what happened to gradients is the tokens of each step, seen or not. The clip's own number may hold a
    division that the losses lack, and no multiplication."""
    report = trained(tmp_path, factor, divides=True, max_norm=0.05, seen=seen)
    assert report.verdict == verdict
    assert [one.factor.expression for one in report.findings] == ["1/accumulation_steps"] * (factor < 1)
    assert factor <= 1 or all(f"before it are x {NUM_BATCHES} unless" in reason for reason in report.reasons)


def test_a_line_that_is_seen_shows_what_a_clip_divides_by_besides(tmp_path: Path) -> None:
    report = trained(tmp_path, 1.0, divides=True, max_norm=0.25, seen=True)
    assert (report.verdict, report.findings) == ("clean", [])


def test_a_number_that_is_made_of_degrees_and_tokens_is_no_clip(tmp_path: Path) -> None:
    """NUM_BATCHES over the tokens of the second step: of two numbers one is the clip's, and losses that passes do not
    divide are too large by these alone."""
    for factor, verdict in ((1 / NUM_BATCHES, "clean"), (1.0, "undetermined")):
        folder = tmp_path / verdict
        trained(folder, factor, divides=True, max_norm=0.05, seen=True, over=NUM_BATCHES)
        report = diagnose(read_run(folder), steps=[1])
        assert (report.verdict, report.findings) == (verdict, [])
    assert f"before it are x {NUM_BATCHES} unless" in report.reasons[0]


def test_lines_that_are_seen_show_together_what_a_clip_divides_by_besides(tmp_path: Path) -> None:
    assert trained(tmp_path, 1.0, divides=True, max_norm=1e-3, seen=True, twice=NUM_BATCHES).verdict == "clean"


def test_a_step_without_a_clip_shows_what_its_lines_divide_by(tmp_path: Path) -> None:
    report = trained(tmp_path, 1.0, divides=True, max_norm=(0.25, 1e9))
    assert (report.verdict, report.findings) == ("clean", [])


@pytest.mark.parametrize("norm_of", [flat, one_by_one, all_at_once])
def test_what_stands_before_a_clip_shows_where_the_norm_is_taken(
    tmp_path: Path, norm_of: Callable[[list[torch.Tensor]], float]
) -> None:
    right = trained(tmp_path / "right", 1.0, divides=True, max_norm=0.25, norm_of=norm_of)
    assert (right.verdict, right.findings) == ("clean", [])
    assert not any("are taken to divide by" in note for note in right.coverage.problems + right.coverage.notes)
    (finding,) = trained(tmp_path / "wrong", NUM_BATCHES, divides=True, max_norm=0.1, norm_of=norm_of).findings
    assert finding.factor.expression == "accumulation_steps"
    assert finding.first_event is not None
    assert finding.first_event.before is None or finding.first_event.before["kind"] == "gradient_norm"


def test_a_loss_with_a_constant_that_has_no_name_is_freed_of_the_clip_whose_norm_was_taken(tmp_path: Path) -> None:
    """Tokens that are counted before labels are shifted: B S where B (S-1) have a label."""
    report = trained(tmp_path, 31 / 32, divides=False, max_norm=0.1, norm_of=one_by_one)
    (finding,) = report.findings
    assert (finding.code, finding.factor.observed) == ("GS303", pytest.approx(31 / 32, rel=1e-5))
    assert {round(weight.ratio or 0, 5) for weight in report.weights} == {0.96875}


def test_tokens_that_a_clip_divides_by_behind_its_norm_are_open_until_a_step_shows_them(tmp_path: Path) -> None:
    hidden = {"max_norm": 0.25, "norm_of": all_at_once, "behind": True, "clip_seen": False}
    report = trained(tmp_path / "open", 1.0, divides=True, **hidden)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert all("where their norm is taken" in reason for reason in report.reasons)
    known = trained(tmp_path / "known", 1.0, divides=True, max_norm=(0.25, 1e9), norm_of=all_at_once, behind=True)
    assert (known.verdict, known.findings) == ("clean", [])


def test_a_loss_before_a_clip_that_divides_besides_is_told_with_what_the_clip_may_hide(tmp_path: Path) -> None:
    """Losses that are multiplied by the tokens of the first step."""
    (finding,) = trained(tmp_path, 36, divides=True, max_norm=0.1, clip_seen=False).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "num_tokens^2")
    assert [candidate.expression for candidate in finding.factor.candidates] == ["num_tokens^2", "num_tokens"]
    assert "If the same lines divide by 36 besides, the factor is 36 = num_tokens" in finding.explanation
    assert "not clipped" in (finding.suggested_experiment or "")


def test_a_loss_that_passes_divide_before_a_clip_that_may_divide_by_tokens_over_them_is_open(tmp_path: Path) -> None:
    """The first is right and the second lacks the passes: behind a clip that was not seen no number tells which."""
    for name, over in (("right", NUM_BATCHES), ("wrong", 1)):
        report = trained(tmp_path / name, 1 / NUM_BATCHES, divides=True, max_norm=0.05, over=over, clip_seen=False)
        assert (report.verdict, report.findings) == ("undetermined", [])
        assert all("unless the same lines divide by this number" in reason for reason in report.reasons)
    shown = trained(tmp_path / "shown", 1 / NUM_BATCHES, divides=True, max_norm=(0.05, 1e9), over=NUM_BATCHES)
    assert (shown.verdict, shown.findings) == ("clean", [])
    (finding,) = trained(tmp_path / "told", 1 / NUM_BATCHES, divides=True, max_norm=(0.05, 1e9)).findings
    assert finding.factor.expression == "1/accumulation_steps"


def test_a_clip_only_shortens_so_what_is_too_long_behind_it_was_wrong_before(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, NUM_BATCHES, divides=False, max_norm=2.0).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


def test_what_is_clipped_to_unit_length_may_be_meant_so(tmp_path: Path) -> None:
    report = trained(tmp_path, NUM_BATCHES, divides=False, max_norm=1.0)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert [reason for reason in report.reasons if "to unit length on purpose" in reason and "x 3" in reason]


def test_a_clip_behind_another_unrecorded_change_is_freed_of_as_well(tmp_path: Path) -> None:
    healthy = trained(tmp_path / "healthy", NUM_BATCHES, divides=False, max_norm=0.1, hooked=1 / NUM_BATCHES)
    assert (healthy.verdict, healthy.findings) == ("clean", [])
    trained(tmp_path / "faulty", NUM_BATCHES**2, divides=False, max_norm=0.5, hooked=1 / NUM_BATCHES)
    (finding,) = diagnose(read_run(tmp_path / "faulty"), steps=[1]).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "accumulation_steps")


def two_steps(folder: Path, at_lines: Callable[[int, int], float], *, in_loss: bool) -> Report:
    """`at_lines`: what gradients are multiplied by, from step and tokens; `in_loss`: the loss divides by these."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(folder, objective="global-token-mean"):
        for step in range(2):
            features_and_labels = batch(0, step)
            count = int((features_and_labels[1] >= 0).sum())
            (token_sum(model, features_and_labels) / (count if in_loss else 1)).backward()
            factor = at_lines(step, count)
            for param in model.parameters() if factor != 1 else ():
                assert param.grad is not None
                param.grad.mul_(factor)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose_run(folder)


def test_a_clip_whose_norm_counts_what_no_rank_sees_is_told_by_the_steps_in_which_it_does_not_act(
    tmp_path: Path,
) -> None:
    """Of tensor-parallel shards nobody but the trainer knows the norm."""
    report = two_steps(tmp_path, lambda step, _: 0.936232 if step == 0 else 1, in_loss=True)
    assert (report.verdict, report.findings) == ("clean", [])
    assert {round(weight.ratio or 0, 4) for weight in report.weights} == {1.0}
    assert any("change nothing in other steps" in note for note in report.coverage.notes)


def test_a_line_that_always_divides_is_no_clip_in_the_step_in_which_its_number_is_another(tmp_path: Path) -> None:
    report = two_steps(tmp_path, lambda step, count: (0.936232 if step == 0 else 1) / count, in_loss=False)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("x 0.9362" in reason and "wrong in some steps" in reason for reason in report.reasons)
    assert "tokens of all its passes" in report.next_step


def test_watched_norms_are_scripted_and_called_as_ever(tmp_path: Path) -> None:
    def scripted(values: torch.Tensor) -> torch.Tensor:
        return torch.norm(values) + torch.linalg.vector_norm(values) + values.norm() + torch.linalg.norm(values)

    values = torch.arange(4.0)
    before = (torch.linalg.vector_norm, torch.linalg.norm, torch._foreach_norm)
    with attach(tmp_path):
        assert torch.linalg.vector_norm is not before[0]
        assert torch.jit.script(scripted)(values) == 4 * torch.tensor(14.0).sqrt()  # type: ignore[no-untyped-call]
        assert torch.linalg.vector_norm(x=values) == torch._foreach_norm(self=[values])[0]
        compiled = torch.compile(torch.linalg.vector_norm, backend="eager", fullgraph=True)
        assert compiled(values) == torch.linalg.vector_norm(values)
    assert (torch.linalg.vector_norm, torch.linalg.norm, torch._foreach_norm) == before


def test_sums_that_are_divided_behind_their_clip_accuse_no_loss(tmp_path: Path) -> None:
    """The clip's norm knows of no tokens, but the loss is not what lacks a division."""
    of_step = (36, 68)  # tokens
    max_norms = (0.25 / of_step[0], 0.25 / of_step[1])
    report = trained(tmp_path, 1.0, divides=True, max_norm=max_norms, norm_of=one_by_one, behind=True)
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert any("if it divides by this number as well" in reason for reason in report.reasons)
    assert any("weights are x 36 from the loss on" in reason for reason in report.reasons)


@pytest.mark.parametrize(
    ("max_norm", "behind", "assigned", "found"),
    [
        (0.1, 1 / 3, True, "GS000"),
        (1.0, 1 / 3, True, "GS000"),
        (1.0, 1 / 3, False, "GS000"),
        (1.0, 1 / 2, False, "undetermined"),
        (1.0, 0.1, False, "clean"),
        (0.1, 1.0, True, "clean"),
    ],
)
def test_what_multiplies_behind_a_clip_shows_beside_its_line(
    tmp_path: Path, max_norm: float, behind: float, assigned: bool, found: str
) -> None:
    """Also where no line is seen. Unit length times a number may be the clip, or may lack a division by two passes."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="microbatch-mean"):
        for step in range(2):
            for k in range(2):
                part = batch(0, 2 * step + k)
                (token_sum(model, part) / int((part[1] >= 0).sum()) / 2).backward()
            coefficient = max_norm / one_by_one([p.grad for p in model.parameters() if p.grad is not None])
            for param in model.parameters():
                assert param.grad is not None
                param.grad.mul_(coefficient)
            for param in model.parameters():
                assert param.grad is not None
                if assigned:
                    param.grad = torch.mul(param.grad, behind)
                else:
                    param.grad *= behind
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    if found != "GS000":
        assert (report.verdict, report.findings) == (found, [])
        alone = [reason for reason in report.reasons if "scaled by hand to norm 1" in reason]
        assert len(alone) == (found == "undetermined")
        if alone:
            assert next_step(msgspec.structs.replace(report, reasons=alone)).startswith("Record a step whose gradients")
        return
    (finding,) = report.findings
    assert (finding.code, finding.factor.observed) == (found, pytest.approx(behind, rel=1e-5))


def test_a_clip_by_the_norm_of_some_gradients_is_told_as_a_clip(tmp_path: Path) -> None:
    """As in radixark's Megatron-LM#80, where experts were left out of the norm."""

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for step in range(3):
            data = [batch(0, 2 * step + k) for k in range(2)]
            total = sum(int((labels >= 0).sum()) for _, labels in data)
            for part in data:
                (token_sum(model, part) / total).backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            factor = 0.13 / squares(grads[1:])
            for grad in grads:
                grad.mul_(factor)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("undetermined", [])
    assert "multiplies all gradients of a step by one number, another in each" in report.reasons[0]
    assert "a clip by a norm that is not theirs does this" in report.reasons[0]


def clipped_in_place(run_dir: Path, loss_of: Callable[[Net, int], torch.Tensor], num_passes: int = 2) -> Report:
    """Two steps; a line multiplies all gradients where they lie, so that they have norm 0.001."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(run_dir):
        for step in range(2):
            for k in range(num_passes):
                loss_of(model, num_passes * step + k).backward()  # type: ignore[no-untyped-call]
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            norm = squares(grads)
            for grad in grads:
                grad.mul_(1e-3 / norm)
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


@pytest.mark.parametrize(("over", "verdict"), [(3, "clean"), (9, "undetermined")])
def test_a_clip_that_is_seen_leaves_no_loss_open_that_counts_nothing(tmp_path: Path, over: int, verdict: str) -> None:
    def loss_of(model: Net, index: int) -> torch.Tensor:
        logits = model(batch(0, index)[0])
        return F.mse_loss(logits, torch.ones_like(logits)) / over

    assert clipped_in_place(tmp_path, loss_of, num_passes=3).verdict == verdict


def test_a_clip_that_is_seen_is_no_part_of_what_sets_passes_apart(tmp_path: Path) -> None:
    def loss_of(model: Net, index: int) -> torch.Tensor:
        count = sum(int((batch(0, index // 2 * 2 + k)[1] >= 0).sum()) for k in range(2))
        return token_sum(model, batch(0, index)) / count * (5 if index % 2 else 1)

    (finding,) = clipped_in_place(tmp_path, loss_of).findings
    assert (finding.pattern, round(finding.factor.observed or 0, 4)) == (
        "x 5 on the last accumulation step (1), the rest right",
        5,
    )


@pytest.mark.parametrize(
    ("scale", "times", "verdict"),
    [(1.0, torch.mul, "clean"), (512.0, torch.mul, "undetermined"), (512.0, operator.mul, "clean")],
)
def test_tokens_and_a_loss_scale_that_an_assignment_divides_by_at_once_accuse_nobody(
    tmp_path: Path, scale: float, times: Callable[..., torch.Tensor], verdict: str
) -> None:
    """Of an operator the number is seen, of one of torch's functions it is not."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attach(tmp_path, objective="global-token-mean"):
        for step in range(2):
            data = [batch(0, NUM_BATCHES * step + k) for k in range(NUM_BATCHES)]
            for part in data:
                (token_sum(model, part) * scale).backward()
            grads = []
            for param in model.parameters():
                assert param.grad is not None
                param.grad = times(param.grad, 1 / scale / sum(int((labels >= 0).sum()) for _, labels in data))
                grads.append(param.grad)
            shorter = 0.05 / squares(grads)
            assert shorter < 1
            for grad in grads:
                grad.mul_(shorter)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == (verdict, []), report.reasons
