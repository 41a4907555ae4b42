"""FSDP2 whose optimizer is made before or behind fully_shard, for test_replaced_parameters.py."""

from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from gradcheck_dist.probes import attach

WIDTH, WORDS, TOKENS = 8, 16, 12


def train(run_dir: str, before: bool) -> None:
    """Each rank reads a batch of its own, of as many tokens."""
    dist.init_process_group("gloo")
    with attach(Path(run_dir)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
        if before:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        fully_shard(model)
        if not before:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(2):
            words = torch.randint(0, WORDS, (TOKENS,), generator=generator)
            F.cross_entropy(model(words), words.roll(-1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
