"""A loss written by hand: log_softmax, gather, mask. FAULT=per-batch-mean averages each batch by itself.

gradcheck run -- python examples/log_probabilities.py
"""

import os

import torch
from torch import nn

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 3, 5

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(1)
for _ in range(STEPS):
    tokens = torch.randint(VOCABULARY, (ACCUMULATION, 4, 17), generator=generator)
    lengths = torch.randint(4, 17, (ACCUMULATION, 4, 1), generator=generator)
    masks = torch.arange(16) < lengths
    for batch, mask in zip(tokens, masks, strict=True):
        log_probs = model(batch[:, :-1]).log_softmax(dim=-1)
        token_losses = -log_probs.gather(-1, batch[:, 1:].unsqueeze(-1)).squeeze(-1) * mask
        if FAULT == "per-batch-mean":
            loss = token_losses.sum() / mask.sum() / ACCUMULATION
        else:
            loss = token_losses.sum() / masks.sum()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
