"""accelerate with its FSDP2 plugin. FAULT=double-division divides by hand what backward() divides already.

gradcheck run -- torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py
"""

import os
import time

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 3, 5

set_seed(0)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
plugin.transformer_cls_names_to_wrap = ["Linear"]
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin  # not offered on CPU
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.randint(VOCABULARY, (4 * ACCUMULATION * STEPS * accelerator.num_processes, 17))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=4, shuffle=True))
for batch in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        if FAULT == "double-division":
            loss = loss / ACCUMULATION
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
total = sum(parameter.full_tensor().double().sum().item() for parameter in model.parameters())
accelerator.print("parameters", total.hex())
accelerator.wait_for_everyone()
time.sleep(0.3)
accelerator.end_training()
