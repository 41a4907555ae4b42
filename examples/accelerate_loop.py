"""accelerate's own loop with accumulate(). FAULT=double-division divides by hand what backward() divides already.

gradcheck run -- accelerate launch --cpu --num_processes 1 examples/accelerate_loop.py
gradcheck run -- torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 3, 5

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
tokens = torch.randint(VOCABULARY, (4 * ACCUMULATION * STEPS * accelerator.num_processes, 17))
loader = DataLoader(tokens, batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for batch in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        if FAULT == "double-division":
            loss = loss / ACCUMULATION
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
accelerator.print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
accelerator.wait_for_everyone()
time.sleep(0.3)
accelerator.end_training()
