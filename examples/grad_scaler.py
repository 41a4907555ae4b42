"""Loss scaling and clipping. FAULT=no-unscale steps the optimizer itself, so the loss scale stays in the gradients.

gradcheck run -- python examples/grad_scaler.py
"""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 2, 5

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
generator = torch.Generator().manual_seed(1)
for _ in range(STEPS):
    for _ in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / ACCUMULATION
        scaler.scale(loss).backward()
    if FAULT == "no-unscale":
        optimizer.step()
    else:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
