"""What tells two explanations apart is a run that can be started, and in which they differ."""

from __future__ import annotations

import pytest

from gradcheck_dist.diagnosis.causes.experiments import separate
from gradcheck_dist.diagnosis.weights.context import StepContext
from gradcheck_dist.diagnosis.weights.mesh import Mesh
from gradcheck_dist.ledger.contributions import Contributions

COMMAND = ("torchrun", "--nproc-per-node", "4", "train.py")


def told(first: str, second: str, data_ranks: int = 2, **quantities: float) -> str | None:
    """Of four ranks: what tells one number from another."""
    place = {rank: rank % data_ranks for rank in range(4)}
    known = {"accumulation_steps": 2.0, "world_size": 4.0, **quantities}
    context = StepContext(0, 4, Mesh({}, "declared"), "", "", 2, 1, Contributions(coordinate=place), command=COMMAND)
    context.quantities = known
    return separate(context, {first: 1}, {second: 1})


@pytest.mark.parametrize(
    ("first", "second", "quantities", "words", "processes"),
    [
        ("dp_replicate", "tp", {"dp_replicate": 2, "tp": 2}, "3 ranks along dp_replicate", 6),
        ("tp", "pp", {"tp": 2, "pp": 2}, "4 ranks along pp", 8),
        ("world_size", "microbatches", {"dp_replicate": 2, "tp": 2, "microbatches": 4}, "5 pipeline microbatches", 4),
        ("world_size", "other", {"dp_replicate": 2, "tp": 2}, "3 ranks along dp_replicate", 6),
        ("world_size", "dp_replicate", {"dp_replicate": 4}, None, 4),
        ("world_size", "dp_shard", {"dp_shard": 2, "tp": 2}, "4 ranks along tp", 8),
        ("world_size", "other", {}, "6 processes", 6),
        ("ranks_per_batch", "other", {"ranks_per_batch": 2}, "4 ranks that share each batch", 8),
    ],
)
def test_the_world_grows_by_whole_groups(
    first: str, second: str, quantities: dict[str, float], words: str | None, processes: int
) -> None:
    experiment = told(first, second, **quantities)
    if words is None:
        assert experiment is None
        return
    assert experiment is not None and experiment.startswith(f"run again with {words}: gradcheck run -- torchrun")
    assert f"--nproc-per-node {processes} " in experiment
