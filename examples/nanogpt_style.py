"""nanoGPT's loop: the loss inside the model's forward, require_backward_grad_sync switched by hand, loss / K.

FAULT=no-division forgets the division by gradient_accumulation_steps.

    gradcheck run -- torchrun --nproc-per-node 2 examples/nanogpt_style.py
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FAULT = os.environ.get("FAULT")
gradient_accumulation_steps, batch_size, block_size, vocab_size, n_embd, max_iters = 3, 4, 16, 64, 32, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        q, k, v = self.c_attn(self.ln_1(x)).unflatten(-1, (3, 2, n_embd // 2)).unbind(-3)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return x + self.c_proj(y.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.h = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(1337)
model = DDP(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
generator = torch.Generator().manual_seed(rank)


def get_batch():
    data = torch.randint(vocab_size, (batch_size, block_size + 1), generator=generator)
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


X, Y = get_batch()
for _ in range(max_iters):
    for micro_step in range(gradient_accumulation_steps):
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(X, Y)
        if FAULT != "no-division":
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if rank == 0:
    print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
