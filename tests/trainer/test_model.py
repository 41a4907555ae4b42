"""The decoder is one model, however it is cut."""

import pytest
import torch

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.model import build_model, keep_stage, rope_table, rotate

CONFIG = TrainConfig(n_layers=3)


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 256, (rows, 16), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_one_after_the_other_equal_the_whole(num_stages: int) -> None:
    x = tokens()
    whole = build_model(CONFIG)
    expected = whole(x)
    names: list[str] = []
    for stage in range(num_stages):
        part = build_model(CONFIG)
        keep_stage(part, stage, num_stages)
        names += [name for name, _ in part.named_parameters()]
        x = part(x)
    assert torch.equal(x, expected)
    assert names == [name for name, _ in whole.named_parameters()]


def test_weights_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        return torch.cat([p.flatten() for p in build_model(TrainConfig(seed=seed)).parameters()])

    torch.manual_seed(1)
    first = weights(0)
    torch.manual_seed(2)
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)


def test_no_position_sees_a_later_token() -> None:
    model, x = build_model(CONFIG), tokens()
    changed = x.clone()
    changed[:, 8:] = 7
    assert torch.equal(model(x)[:, :8], model(changed)[:, :8])


def test_rotary_embedding_makes_attention_depend_on_distance() -> None:
    rope = rope_table(0, 10, 8, torch.device("cpu"))
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)).unbind()
    rotated = [rotate(vector.expand(1, 1, 10, 8), rope)[0, 0] for vector in (query, key)]
    scores = rotated[0] @ rotated[1].T
    assert torch.allclose(scores.diagonal(2), scores.diagonal(2)[:1].expand(8), atol=1e-5)
    assert not torch.allclose(scores[0, 0], scores[0, 2], atol=1e-3)


def test_every_parameter_gets_a_gradient_well_above_rounding() -> None:
    model = build_model(CONFIG)
    model(tokens()).logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.norm() > 1e-3 for p in model.parameters())


def test_bfloat16_reaches_every_parameter_and_the_logits() -> None:
    model = build_model(TrainConfig(dtype="bfloat16"))
    assert {p.dtype for p in model.parameters()} | {model(tokens()).dtype} == {torch.bfloat16}
