"""torch.compile around the whole model; BACKEND chooses the compiler. FAULT=no-division forgets to divide.

gradcheck run -- python examples/compiled.py
"""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 2, 5

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
compiled = torch.compile(model, backend=os.environ.get("BACKEND", "inductor"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
for _ in range(STEPS):
    for _ in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
        loss = cross_entropy(compiled(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        if FAULT != "no-division":
            loss = loss / ACCUMULATION
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
