"""The model is measured, not believed: predictions against the observed ledger of real runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradcheck_dist.axes import Axes
from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.predict.model import Setup, predict
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.launch import launch, warm_up

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {"seq_len": 32, "n_layers": 2, "dim": 32, "ffn_dim": 64}
DDP, FSDP, PIPELINE = Axes(dp_replicate=2), Axes(dp_shard=2), Axes(pp=2)
CASES = {
    "DDP sums": (TrainConfig(axes=DDP, accum=2, **SIZES), Setup(ddp=2, accum=2, reduction="sum")),
    "DDP averages": (TrainConfig(axes=DDP, accum=2, faults=("ddp-averages",), **SIZES), Setup(ddp=2, accum=2)),
    "DDP sums every backward": (
        TrainConfig(axes=DDP, accum=3, faults=("sync-every-backward",), **SIZES),
        Setup(ddp=2, accum=3, reduction="sum", sync="every-backward"),
    ),
    "DDP averages R/N": (
        TrainConfig(axes=DDP, accum=2, gradient_reduction="average", **SIZES),
        Setup(ddp=2, accum=2, loss_scale="R"),
    ),
    "FSDP2 sums": (
        TrainConfig(axes=FSDP, accum=2, **SIZES),
        Setup(fsdp=2, accum=2, divide_factor=1.0, force_sum=True),
    ),
    "FSDP2 averages": (TrainConfig(axes=FSDP, accum=2, faults=("ddp-averages",), **SIZES), Setup(fsdp=2, accum=2)),
    "1F1B rescales": (
        TrainConfig(axes=PIPELINE, accum=3, microbatches=2, faults=("schedule-scales-grads",), **SIZES),
        Setup(pp=2, microbatches=2, accum=3, scale_grads=True, loss_scale="M"),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    warm_up()


@pytest.mark.parametrize("case", CASES)
def test_the_predicted_ratio_of_every_accumulation_step_is_observed(case: str, tmp_path: Path) -> None:
    config, setup = CASES[case]
    launch(
        "gradcheck_dist.scenarios.worker:run_rank",
        (str(tmp_path / "run"), config, "global-token-mean"),
        config.axes.world_size,
        timeout_s=60,
    )
    report = diagnose(read_run(tmp_path / "run"))
    predicted = predict(setup).ratios
    assert predicted is not None and report.weights
    for weight in report.weights:
        expected = float(predicted[weight.contribution.accumulation_step])
        assert weight.ratio == pytest.approx(expected, rel=1e-4)
