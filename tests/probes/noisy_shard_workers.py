"""Two ranks of FSDP2 whose parameters are gathered in bfloat16, and which divide sums by their own tokens, for
test_noisy_shards.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS, PASSES, VOCABULARY = 3, 2, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.a, self.b = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.h = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.h(self.b(torch.tanh(self.a(self.e(tokens)))))
        return logits


def batch(step: int, rank: int, k: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * k + rank)
    tokens = torch.randint(0, VOCABULARY, (4, 7), generator=generator)
    labels = torch.randint(0, VOCABULARY, (4, 7), generator=generator)
    labels[:, : int(torch.randint(0, 5, (1,), generator=generator))] = -100
    return tokens, labels


def train(run_dir: str) -> None:
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with attach(run_dir):
        for step in range(STEPS):
            batches = [batch(step, rank, k) for k in range(PASSES)]
            count = sum(int((labels >= 0).sum()) for _, labels in batches)
            for tokens, labels in batches:
                logits = model(tokens).flatten(0, 1).float()
                F.cross_entropy(logits, labels.flatten(), reduction="sum").backward()
            for param in model.parameters():
                assert param.grad is not None
                param.grad.mul_(1 / count)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
