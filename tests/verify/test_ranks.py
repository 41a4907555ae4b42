"""`--verify` over ranks: every axis is right where it is right, and a missing or doubled sum is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gradcheck_dist
from gradcheck_dist.axes import Axes
from gradcheck_dist.diagnosis.finding import Finding
from gradcheck_dist.events import GradientCheck
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.launch import launch, warm_up
from gradcheck_dist.verify import exchange
from gradcheck_dist.verify.exchange import Exchange, connected

SIZES: dict[str, Any] = {"seq_len": 8, "n_layers": 1, "dim": 16, "ffn_dim": 16, "steps": 2}
PIPELINE = TrainConfig(axes=Axes(pp=2), microbatches=2, accum=2, **{**SIZES, "n_layers": 2})
AXES = {
    "DDP": TrainConfig(axes=Axes(dp_replicate=2), accum=2, **SIZES),
    "FSDP2": TrainConfig(axes=Axes(dp_shard=2), accum=2, **SIZES),
    "sequence and loss parallel": TrainConfig(
        axes=Axes(tp=2), sequence_parallel=True, loss_parallel=True, vocab_size=260, **SIZES
    ),
    "context parallel": TrainConfig(axes=Axes(cp=2), **SIZES),
    "pipeline": PIPELINE,
}


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


def checks(folder: Path) -> dict[int, list[GradientCheck]]:
    ranks = gradcheck_dist.read_run(folder).ranks
    return {rank: [e for e in trace.events if isinstance(e, GradientCheck)] for rank, trace in ranks.items()}


def accusations(folder: Path) -> list[Finding]:
    report = gradcheck_dist.diagnose(gradcheck_dist.read_run(folder))
    return [finding for finding in report.findings if finding.code == "GS801"]


@pytest.mark.parametrize("axis", AXES)
def test_every_axis_is_right_and_trains_on_bit_by_bit(axis: str, tmp_path: Path) -> None:
    config = AXES[axis]
    alone = launch("verify_workers:train_verified", (config, None), 2, timeout_s=60)
    verified = launch("verify_workers:train_verified", (config, str(tmp_path / "run")), 2, timeout_s=60)
    assert [result.checksum for result in verified] == [result.checksum for result in alone]
    for of_rank in checks(tmp_path / "run").values():
        told = [check for check in of_rank if check.target != "leaf"]
        assert {check.outcome for check in told} == {"right"}
        assert {"parameter", "input", "parameters"} <= {check.target for check in told}
    report = gradcheck_dist.diagnose(gradcheck_dist.read_run(tmp_path / "run"))
    assert (report.verdict, report.reasons) == ("clean", [])
    assert "GS801" in report.rules.passed


@pytest.mark.parametrize(
    ("fault", "residual", "pattern", "words"),
    [
        ("", True, None, ""),
        ("biases of both", True, None, ""),
        ("no sum", True, "layers.1: input 0 gets another gradient than the derivative", "collectives"),
        ("no sum", False, "layers.1: input 0 gets a summand over the ranks that nobody added up", "own summand"),
        ("sums again", True, "gets x 2", "The factor is the number of ranks"),
    ],
)
def test_tensor_parallelism_by_hand(
    fault: str, residual: bool, pattern: str | None, words: str, tmp_path: Path
) -> None:
    run = str(tmp_path / "run")
    verified = launch("verify_workers:tensor_parallel_by_hand", (fault, residual, run), 2, timeout_s=60)
    found = accusations(tmp_path / "run")
    if pattern is None:
        assert found == []
        assert verified == launch("verify_workers:tensor_parallel_by_hand", (fault, residual, None), 2, timeout_s=60)
        return
    (one,) = found
    assert one.pattern.startswith("layers.1: ") and pattern in one.pattern
    assert words in one.explanation + one.fix
    assert one.ranks == [0, 1]
    assert one.first_event is not None and one.first_event.function == "Split.forward"


@pytest.mark.parametrize("averages", [False, True])
def test_of_copies_that_got_summands_the_sum_is_told(averages: bool, tmp_path: Path) -> None:
    launch("verify_workers:context_parallel_by_hand", (averages, str(tmp_path / "run")), 2, timeout_s=60)
    factors = [one.factor.observed for one in accusations(tmp_path / "run")]
    assert factors == ([pytest.approx(0.5, rel=1e-3)] if averages else [])


def test_a_bias_of_which_each_rank_adds_a_part_is_named(tmp_path: Path) -> None:
    for fault in ("", "bias divided"):  # pytorch/torchtitan#4332
        launch("verify_workers:tensor_parallel_by_hand", (fault, True, str(tmp_path / f"run {fault}")), 2, timeout_s=60)
    assert gradcheck_dist.diagnose(gradcheck_dist.read_run(tmp_path / "run ")).verdict == "clean"
    report = gradcheck_dist.diagnose(gradcheck_dist.read_run(tmp_path / "run bias divided"))
    (reason,), (finding,) = report.reasons, report.findings
    assert "layers.1.bias is right only as a summand of ranks 0 and 1" in reason and "x 1/2" in reason
    assert (finding.code, finding.factor.exact) == ("GS703", "1/2") and "layers.1.bias" in finding.explanation


def test_a_factor_between_pipeline_stages_is_told_once(tmp_path: Path) -> None:
    launch("verify_workers:train_pipeline", (PIPELINE, 0.5, str(tmp_path / "run")), 2, timeout_s=60)
    run = gradcheck_dist.read_run(tmp_path / "run")
    (found,) = gradcheck_dist.diagnose(run).findings
    assert found.code == "GS202"
    assert found.factor.observed == pytest.approx(0.5, rel=1e-5)
    assert found.ranks == [0]
    checks = [event for event in run.ranks[0].events if isinstance(event, GradientCheck)]
    assert [check.factor for check in checks if check.target == "boundary"] == [pytest.approx(0.5, rel=1e-5)]


def test_ranks_are_connected_through_others() -> None:
    seen = [[0, 1], [], [2, 1], [3]]
    assert [connected(rank, seen) for rank in range(4)] == [(0, 1, 2)] * 3 + [(3,)]


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    from torch.distributed import HashStore

    monkeypatch.setattr(exchange, "TIMEOUT", timedelta(milliseconds=50))
    store = HashStore()
    first = Exchange(0, (0, 1, 2), store)
    store.set("gradcheck/verify//early/1", "2")  # what rank 1 would say
    assert first.of((0, 1)).gather("early", 1) == [1, 2]
    with pytest.raises(exchange.OutOfStepError, match="ranks 1 and 2 did not come to 'late'"):
        first.gather("late", 1)


def test_a_rank_alone_needs_no_store() -> None:
    assert Exchange.of_world("test").gather("tag", [1.5]) == [[1.5]]


def test_hooks_that_take_back_what_an_average_divides_are_a_remark(tmp_path: Path) -> None:
    """The weights hold what they multiply. Where these are wrong with it, the hook is a fault."""
    found = {}
    for name, factors in (("right", (2.0, 2.0, 1.0)), ("output", (1.0, 1.0, 2.0)), ("wrong", (6.0, 2.0, 1.0))):
        launch("verify_workers:hooks_behind_an_average", (factors, str(tmp_path / name)), 2, timeout_s=60)
        found[name] = gradcheck_dist.diagnose(gradcheck_dist.read_run(tmp_path / name))
    for right in (found["right"], found["output"]):
        assert right.verdict == "clean" and {one.severity for one in right.findings} == {"info"}
        assert all("The weights hold that factor, and are right with it" in one.explanation for one in right.findings)
    wrong = found["wrong"]
    accused = [one for one in wrong.findings if one.severity == "error"]
    assert wrong.verdict == "findings" and {unit for one in accused for unit in one.units} <= {
        "3.*",
        "3.weight",
        "3.bias",
    }
