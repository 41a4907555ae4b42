"""Data parallelism and single-stage pipelines give the gradient of one process, contribution by contribution."""

from typing import Any

import pytest
from trainer_checks import assert_same, contributions, norm_of, run, weighted

from gradcheck_dist.axes import Axes
from gradcheck_dist.trainer.config import TrainConfig

pytestmark = pytest.mark.slow

K, M = 3, 2
SIZES: dict[str, Any] = {"seq_len": 32, "n_layers": 2, "dim": 32, "ffn_dim": 64, "max_norm": None}
DDP, FSDP, PIPELINE = Axes(dp_replicate=2), Axes(dp_shard=2), Axes(pp=2)

LAYOUTS = {
    "one process": TrainConfig(accum=K, **SIZES),
    "DDP": TrainConfig(axes=DDP, accum=K, **SIZES),
    "DDP average": TrainConfig(axes=DDP, accum=K, gradient_reduction="average", **SIZES),
    "FSDP2": TrainConfig(axes=FSDP, accum=K, **SIZES),
    "FSDP2 average": TrainConfig(axes=FSDP, accum=K, gradient_reduction="average", **SIZES),
    "GPipe": TrainConfig(axes=PIPELINE, accum=K, microbatches=M, schedule="gpipe", **SIZES),
    "1F1B": TrainConfig(axes=PIPELINE, accum=K, microbatches=M, **SIZES),
    "GPipe that scales, no accumulation": TrainConfig(
        axes=PIPELINE, microbatches=4, schedule="gpipe", scale_grads=True, **SIZES
    ),
    "FSDP2 and 1F1B": TrainConfig(axes=Axes(dp_shard=2, pp=2), accum=2, microbatches=M, **SIZES),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_gradient_of_one_process(layout: str) -> None:
    config = LAYOUTS[layout]
    gradients, results = run(config)
    expected = weighted(config)
    for grads in gradients:
        assert_same(grads, expected)
    assert set().union(*gradients) == set(expected)
    total = sum(tokens for tokens, _ in contributions(config).values())
    for result in results:
        assert result.steps[0].grad_norm == pytest.approx(norm_of(expected), rel=1e-6)
        assert result.steps[0].tokens == total
        assert result.steps[0].loss == pytest.approx(results[0].steps[0].loss, rel=0)


def test_layouts_agree_on_the_loss_of_the_same_sequences() -> None:
    losses = [
        run(config)[1][0].steps[0].loss
        for config in (TrainConfig(accum=12, batch_size=1, **SIZES), LAYOUTS["DDP"], LAYOUTS["1F1B"])
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
