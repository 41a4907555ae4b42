"""One process, gradient accumulation over batches of unequal length. FAULT=no-division forgets to divide.

gradcheck run -- python examples/plain_loop.py
"""

import os

import torch
from torch import nn
from torch.nn.functional import cross_entropy

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 4, 5


def batches(generator):
    """One optimizer step's batches: next-token labels, -100 where a sequence is padded."""
    for _ in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
        labels = tokens[:, 1:].clone()
        for row, length in enumerate(torch.randint(4, 17, (4,), generator=generator)):
            labels[row, length:] = -100
        yield tokens[:, :-1], labels


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
for _ in range(STEPS):
    step = list(batches(generator))
    num_tokens = sum((labels != -100).sum() for _, labels in step)
    for tokens, labels in step:
        loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        if FAULT != "no-division":
            loss = loss / num_tokens
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
