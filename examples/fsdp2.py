"""FSDP2, each layer its own unit. FAULT=double-averaging divides by the tokens of all ranks, FSDP averages once more.

gradcheck run -- torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 2, 5

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
for layer in model:
    if any(True for _ in layer.parameters()):
        fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(rank)
for _ in range(STEPS):
    step = []
    for _ in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
        labels = tokens[:, 1:].clone()
        for row, length in enumerate(torch.randint(4, 17, (4,), generator=generator)):
            labels[row, length:] = -100
        step.append((tokens[:, :-1], labels))
    num_tokens = torch.tensor(sum(int((labels != -100).sum()) for _, labels in step))
    dist.all_reduce(num_tokens)
    for index, (tokens, labels) in enumerate(step):
        model.set_requires_gradient_sync(index == ACCUMULATION - 1)
        loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens
        if FAULT != "double-averaging":
            loss = loss * world_size  # FSDP averages over the ranks
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
if rank == 0:
    print("parameters", total.hex())
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
