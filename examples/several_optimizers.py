"""Two optimizers share a step. FAULT=zeroed empties the second one's gradients before every batch, not every step.

gradcheck run -- python examples/several_optimizers.py
"""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 3, 5

torch.manual_seed(0)
embedding = nn.Embedding(VOCABULARY, WIDTH)
body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
slow = torch.optim.SGD(embedding.parameters(), lr=0.1)
fast = torch.optim.AdamW(body.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
for _ in range(STEPS):
    slow.zero_grad()
    fast.zero_grad()
    for _ in range(ACCUMULATION):
        if FAULT == "zeroed":
            fast.zero_grad()
        tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
        loss = cross_entropy(body(embedding(tokens[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten())
        (loss / ACCUMULATION).backward()
    slow.step()
    fast.step()
parameters = [*embedding.parameters(), *body.parameters()]
print("parameters", sum(parameter.double().sum().item() for parameter in parameters).hex())
