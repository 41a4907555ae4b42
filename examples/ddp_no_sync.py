"""DDP with no_sync on all but the last batch of a step. FAULT=double-averaging lets DDP divide once more.

gradcheck run -- torchrun --nproc-per-node 2 examples/ddp_no_sync.py
"""

import contextlib
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 2, 5

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
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
        last = index == ACCUMULATION - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss = cross_entropy(ddp(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens
            if FAULT != "double-averaging":
                loss = loss * world_size  # DDP averages over the ranks
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
