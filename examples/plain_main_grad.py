"""Hand-written data parallelism in Megatron's style: gradients live in a flat float32 buffer, main_grad, not in .grad.

A hook adds each .grad into the parameter's part of the buffer and drops it; the buffer is reduced bucket by bucket.
What the optimizer reads is chosen by OPTIMIZER: grad (`.grad = main_grad` just before the step), master (float32 copies
of bfloat16 parameters), sharded (each rank owns a part of all parameters, from a reduce-scatter).
FAULT=double-averaging divides the buffer by the number of ranks and lets the collective average too.

gradcheck run -- torchrun --nproc-per-node 2 examples/plain_main_grad.py
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

FAULT, OPTIMIZER = os.environ.get("FAULT"), os.environ.get("OPTIMIZER", "grad")
VOCABULARY, WIDTH, ACCUMULATION, STEPS, BUCKETS = 64, 32, 3, 5, 2


class DataParallel(nn.Module):
    """Parameters and gradients as views into two flat buffers, padded to a multiple of buckets times ranks."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        params = list(module.parameters())
        size = sum(param.numel() for param in params)
        size += -size % (BUCKETS * dist.get_world_size())
        self.weights = torch.zeros(size, dtype=params[0].dtype)
        self.buffer = torch.zeros(size)
        offset = 0
        for param in reversed(params):  # in the order in which backward delivers them
            flat = slice(offset, offset + param.numel())
            self.weights[flat].copy_(param.detach().flatten())
            param.data = self.weights[flat].view_as(param)
            param.main_grad = self.buffer[flat].view_as(param)
            param.register_post_accumulate_grad_hook(self.accumulate)
            offset += param.numel()

    @staticmethod
    def accumulate(param):
        param.main_grad.add_(param.grad.float())
        param.grad = None

    def forward(self, tokens):
        return self.module(tokens)

    def buckets(self, flat):
        """For each bucket all of it, and the part that this rank owns."""
        for bucket in flat.chunk(BUCKETS):
            yield bucket, bucket.chunk(dist.get_world_size())[dist.get_rank()]

    def finish_grad_sync(self):
        self.buffer.div_(dist.get_world_size())
        op = dist.ReduceOp.AVG if FAULT == "double-averaging" else dist.ReduceOp.SUM
        for bucket, own in self.buckets(self.buffer):
            if OPTIMIZER == "sharded":
                dist.reduce_scatter_tensor(own, bucket, op=op)
            else:
                dist.all_reduce(bucket, op=op)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layers = [nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY)]
model = DataParallel(nn.Sequential(*layers).to(torch.float32 if OPTIMIZER == "grad" else torch.bfloat16))
params = list(model.parameters())
if OPTIMIZER == "grad":
    read = params
elif OPTIMIZER == "master":
    read = [param.detach().float().clone() for param in params]
else:
    read = [own.detach().float().clone() for _, own in model.buckets(model.weights)]
optimizer = torch.optim.AdamW(read, lr=1e-2)
generator = torch.Generator().manual_seed(rank)
for _ in range(STEPS):
    model.buffer.zero_()
    step = []
    for _ in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
        labels = tokens[:, 1:].clone()
        for row, length in enumerate(torch.randint(4, 17, (4,), generator=generator)):
            labels[row, length:] = -100
        step.append((tokens[:, :-1], labels))
    num_tokens = torch.tensor(sum(int((labels != -100).sum()) for _, labels in step))
    dist.all_reduce(num_tokens)
    for tokens, labels in step:
        loss = cross_entropy(model(tokens).float().flatten(0, 1), labels.flatten(), reduction="sum")
        (loss * world_size / num_tokens).backward()  # the buffer is averaged over the ranks
    model.finish_grad_sync()
    if OPTIMIZER == "sharded":
        for master, (_, own) in zip(read, model.buckets(model.buffer), strict=True):
            master.grad = own
    else:
        for master, param in zip(read, params, strict=True):
            master.grad = param.main_grad
    optimizer.step()
    if OPTIMIZER == "master":
        for master, param in zip(read, params, strict=True):
            param.data.copy_(master)
    elif OPTIMIZER == "sharded":
        for master, (bucket, own) in zip(read, model.buckets(model.weights), strict=True):
            own.copy_(master)
            dist.all_gather_into_tensor(bucket, own.clone())
    for master in read:
        master.grad = None
if rank == 0:
    print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
