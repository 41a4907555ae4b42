"""Lightning Fabric with no_backward_sync. FAULT=no-division forgets to divide by the accumulation steps.

gradcheck run -- python examples/lightning_fabric.py              # DEVICES=2: two processes
"""

import os

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 3, 5
DEVICES = int(os.environ.get("DEVICES", "1"))

fabric = Fabric(accelerator="cpu", devices=DEVICES, strategy="ddp" if DEVICES > 1 else "auto")
fabric.launch()
fabric.seed_everything(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
generator = torch.Generator().manual_seed(fabric.global_rank)
for _ in range(STEPS):
    for index in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
        with fabric.no_backward_sync(model, enabled=index < ACCUMULATION - 1):
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            fabric.backward(loss if FAULT == "no-division" else loss / ACCUMULATION)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
if fabric.is_global_zero:
    print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
