"""Gradients by torch.autograd.grad, summed by hand into .grad. FAULT=overwritten keeps those of the last batch only.

gradcheck run -- python examples/manual_gradients.py
"""

import os

import torch
from torch import nn

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 3, 5

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
parameters = list(model.parameters())
generator = torch.Generator().manual_seed(1)
for _ in range(STEPS):
    for _ in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
        loss = criterion(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) / ACCUMULATION
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is None or FAULT == "overwritten":
                parameter.grad = gradient
            else:
                parameter.grad += gradient
    optimizer.step()
    optimizer.zero_grad()
print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
