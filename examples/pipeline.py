"""A 1F1B pipeline of two stages inside gradient accumulation. FAULT=rescaled lets the schedule divide, every time anew.

gradcheck run -- torchrun --nproc-per-node 2 examples/pipeline.py
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, MICROBATCHES, ACCUMULATION, STEPS = 64, 32, 4, 3, 5

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY)]
module = nn.Sequential(*(layers[:2] if rank == 0 else layers[2:]))
stage = PipelineStage(module, rank, 2, torch.device("cpu"))
tokens_of_a_step = 16 * 16 * ACCUMULATION


def loss_function(output, labels):
    loss = cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum") / tokens_of_a_step
    return loss * MICROBATCHES if FAULT == "rescaled" else loss


schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_function, scale_grads=FAULT == "rescaled")
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
for _ in range(STEPS):
    for _ in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (16, 17), generator=generator)
        if rank == 0:
            schedule.step(tokens[:, :-1].contiguous())
        else:
            schedule.step(target=tokens[:, 1:].contiguous(), losses=[])
    optimizer.step()
    optimizer.zero_grad()
total = torch.tensor(sum(parameter.double().sum().item() for parameter in module.parameters()), dtype=torch.float64)
dist.all_reduce(total)
if rank == 0:
    print("parameters", total.item().hex())
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
