"""What numbers before a loss are called."""

from __future__ import annotations

import pytest

from gradcheck_dist.diagnosis.weights.named_counts import names_passes, names_ranks
from gradcheck_dist.events import LossNumber, Site

RANKS = [
    *(
        "world_size",
        "self.world_size",
        "dist.get_world_size()",
        "args.n_gpu",
        "num_processes",
        "accelerator.num_processes",
    ),
    *("dp_size", "self.dp_degree", "ddp_world_size", "int(os.environ['WORLD_SIZE'])", "num_replicas", "nprocs"),
]
PASSES = [
    *("accum_steps", "ACCUM", "self.args.gradient_accumulation_steps", "grad_acc_steps", "cfg.accumulate_grad_batches"),
    *("self.gas", "num_microbatches", "n_micro"),
]
NEITHER = [
    *("2", "num_tokens", "len(losses)", "num_steps", "graph.num_nodes", "temperature", "x.shape[0]", "gasoline"),
    *("world_model_loss_weight", "accuracy", "accum_scale", "micro_batch_size", "dp_loss_weight", "num_classes"),
]


def number(written: str, assigned: str = "") -> LossNumber:
    return LossNumber(0.5, f"/ {written}", assigned, Site("train.py", 1, "train"))


@pytest.mark.parametrize("written", RANKS)
def test_numbers_of_ranks(written: str) -> None:
    assert names_ranks(number(written)) and not names_passes(number(written))
    assert names_ranks(number("n", written))


@pytest.mark.parametrize("written", PASSES)
def test_numbers_of_passes(written: str) -> None:
    assert names_passes(number(written)) and not names_ranks(number(written))


@pytest.mark.parametrize("written", NEITHER)
def test_other_numbers(written: str) -> None:
    assert not names_passes(number(written)) and not names_ranks(number(written))
