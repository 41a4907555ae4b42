"""What a clip that nobody recorded may hide: its own number is not known, so what stands before it is told with it."""

from __future__ import annotations

from pathlib import Path

import torch
from probe_workers import Net, batch, token_sum

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes import attach
from gradcheck_dist.trace.run import read_run

NUM_BATCHES = 3


def trained(run_dir: Path, loss_factor: float, divides: bool, max_norm: float, hooked: float = 1.0) -> Report:
    """Two steps of token sums times a factor; before the optimizer gradients are divided by all tokens, or not, and
    clipped to a norm. Where `hooked` is not 1, a hook multiplies each gradient by it as it arrives."""
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
            for grad in grads:
                grad.div_(total if divides else 1)
            norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
            for grad in grads:
                grad.mul_(min(1.0, max_norm / norm))
            optimizer.step()
            optimizer.zero_grad()
    return diagnose(read_run(run_dir))


def test_a_clip_that_divides_besides_is_right(tmp_path: Path) -> None:
    report = trained(tmp_path, 1.0, divides=True, max_norm=0.25)
    assert (report.verdict, report.findings) == ("clean", [])
    assert {round(weight.ratio or 0, 4) for weight in report.weights} == {1.0}
    assert all("are taken to divide by" in problem for problem in report.coverage.problems)


def test_a_loss_before_a_clip_that_divides_besides_is_told_with_what_the_clip_may_hide(tmp_path: Path) -> None:
    (finding,) = trained(tmp_path, 1 / NUM_BATCHES, divides=True, max_norm=0.1).findings
    assert (finding.code, finding.factor.expression) == ("GS303", "1/accumulation_steps")
    assert [candidate.expression for candidate in finding.factor.candidates] == [
        "1/accumulation_steps",
        "num_tokens/accumulation_steps",
    ]
    assert "if they do not, the factor is" in finding.explanation
    assert "not clipped" in (finding.suggested_experiment or "")


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


def test_a_clip_whose_norm_counts_what_no_rank_sees_is_told_by_the_steps_in_which_it_does_not_act(
    tmp_path: Path,
) -> None:
    """Of tensor-parallel shards nobody but the trainer knows the norm."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, objective="global-token-mean"):
        for step in range(2):
            features_and_labels = batch(0, step)
            count = int((features_and_labels[1] >= 0).sum())
            (token_sum(model, features_and_labels) / count).backward()
            for param in model.parameters() if step == 0 else ():
                assert param.grad is not None
                param.grad.mul_(0.936232)
            optimizer.step()
            optimizer.zero_grad()
    report = diagnose(read_run(tmp_path))
    assert (report.verdict, report.findings) == ("clean", [])
    assert {round(weight.ratio or 0, 4) for weight in report.weights} == {1.0}
    assert any("change nothing in other steps" in problem for problem in report.coverage.problems)
