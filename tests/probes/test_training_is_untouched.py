"""With probes on, training stays bit for bit what it is without them, and the weights come out right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradcheck_dist.axes import Axes
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.launch import launch, warm_up

SIZES: dict[str, Any] = {"seq_len": 32, "n_layers": 2, "dim": 32, "ffn_dim": 64, "steps": 2}
MODES = {
    "one process": TrainConfig(accum=3, **SIZES),
    "one process, bfloat16, SGD": TrainConfig(accum=2, dtype="bfloat16", optimizer="sgd", **SIZES),
    "DDP, sum": TrainConfig(axes=Axes(dp_replicate=3), accum=2, **SIZES),
    "DDP, average": TrainConfig(axes=Axes(dp_replicate=3), accum=2, gradient_reduction="average", **SIZES),
    "FSDP2, sum": TrainConfig(axes=Axes(dp_shard=2), accum=2, **SIZES),
    "FSDP2, average": TrainConfig(axes=Axes(dp_shard=2), accum=2, gradient_reduction="average", **SIZES),
    "GPipe": TrainConfig(axes=Axes(pp=2), accum=2, microbatches=2, schedule="gpipe", **SIZES),
    "1F1B": TrainConfig(axes=Axes(pp=2), accum=2, microbatches=2, **SIZES),
    "FSDP2 and 1F1B": TrainConfig(axes=Axes(dp_shard=2, pp=2), accum=2, microbatches=2, **SIZES),
}


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


@pytest.mark.parametrize("mode", MODES)
def test_parameters_losses_and_norms_are_the_same_bits_and_the_weights_are_right(mode: str, tmp_path: Path) -> None:
    config = MODES[mode]
    world = config.axes.world_size
    plain = launch("probe_workers:train_recorded", (config, None), world, timeout_s=60)
    recorded = launch("probe_workers:train_recorded", (config, str(tmp_path / "run")), world, timeout_s=60)

    for without, with_probes in zip(plain, recorded, strict=True):
        assert with_probes.checksum == without.checksum
        assert [(s.loss, s.grad_norm) for s in with_probes.steps] == [(s.loss, s.grad_norm) for s in without.steps]
    report = diagnose(read_run(tmp_path / "run"))
    assert (report.verdict, report.reasons) == ("clean", [])
    assert report.coverage.problems + report.coverage.notes == []
    assert report.coverage.parameters_observed == report.coverage.parameters_total > 0
    assert {weight.step for weight in report.weights} == {0, 1}
    tolerance = 3e-2 if config.dtype == "bfloat16" else 1e-4
    assert all(abs(weight.ratio - 1) < tolerance for weight in report.weights if weight.ratio is not None)
    nominal = [weight.nominal / weight.expected for weight in report.weights if weight.nominal and weight.expected]
    assert len(nominal) == len(report.weights)
    assert all(abs(value - 1) < (1e-2 if config.dtype == "bfloat16" else 1e-5) for value in nominal)


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        ("sum-hook", []),
        ("manual", []),
        ("inverted", [("GS103", "missing-reduction")]),
        ("unrecorded", [("GS000", "unexplained-scale")]),
    ],
)
def test_a_users_own_loop_is_judged_and_left_alone(variant: str, found: list[tuple[str, str]], tmp_path: Path) -> None:
    plain = launch("probe_workers:user_loop", (variant, None), 2, timeout_s=60)
    recorded = launch("probe_workers:user_loop", (variant, str(tmp_path / "run")), 2, timeout_s=60)
    assert recorded == plain

    report = diagnose(read_run(tmp_path / "run"))
    assert [(finding.code, finding.name) for finding in report.findings] == found
    source = (Path(__file__).parent / "probe_workers.py").read_text(encoding="utf-8").splitlines()
    for finding in report.findings:
        event = finding.first_event
        assert event is not None and event.file == str(Path(__file__).parent / "probe_workers.py")
        assert event.line is not None
        assert ("grad.mul_(0.5)" if variant == "unrecorded" else "backward()") in source[event.line - 1]
        if variant == "unrecorded":
            assert event.observed_factor == pytest.approx(0.5, rel=1e-5)
