"""A small trainer on the devices of tests/support/cards.py: card_trainer.py LIBRARY CASE RUN_DIR|- FAULT.

Prints the sum of what it trained, as a hexadecimal float.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import cards
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, ACCUMULATION, STEPS = 16, 8, 3, 3
PLACES = {"one card": ("card:0", "card:0"), "two cards": ("card:0", "card:1"), "card and host": ("card:1", "cpu")}


class Net(nn.Module):
    """Two parts, each on a device of its own."""

    def __init__(self, front: str, back: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(front)
        self.back = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(back)
        self.head = nn.Linear(WIDTH, VOCABULARY).to(back)
        self.places = front, back

    def hidden(self, tokens: Tensor) -> Tensor:
        front, back = self.places
        return self.back(self.front(tokens.to(front)).to(back))  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))  # type: ignore[no-any-return]


def in_one(model: Net, tokens: Tensor, labels: Tensor, divisor: float) -> None:
    (cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / divisor).backward()


def in_chunks(model: Net, tokens: Tensor, labels: Tensor, divisor: float) -> None:
    hidden = model.hidden(tokens)
    cut = hidden.detach().requires_grad_()
    for states, chunk in zip(cut.chunk(2, 1), labels.chunk(2, 1), strict=True):
        logits = model.head(states).flatten(0, 1)
        (cross_entropy(logits, chunk.flatten(), reduction="sum") / divisor).backward()
    hidden.backward(cut.grad)


def train(case: str, fault: bool) -> float:
    place, _, how = case.partition(", ")
    model = Net(*PLACES[place])
    back = model.places[1]
    chosen: dict[str, Callable[[Net, Tensor, Tensor, float], None]] = {"in chunks": in_chunks}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        batches = torch.randint(VOCABULARY, (ACCUMULATION, 3, 7), generator=generator)
        num_tokens = ACCUMULATION * 3 * 6
        for batch in batches:
            pass_ = chosen.get(how, in_one)
            pass_(model, batch[:, :-1], batch[:, 1:].to(back), num_tokens / (ACCUMULATION if fault else 1))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return sum(float(param.detach().cpu().double().sum()) for param in model.parameters())


if __name__ == "__main__":
    library, case, run_dir, fault = sys.argv[1:]
    cards.register(Path(library))
    from gradcheck_dist.probes import attach

    with attach(run_dir) if run_dir != "-" else contextlib.nullcontext():
        total = train(case, fault == "fault")
    print("trained", total.hex(), flush=True)
    os._exit(0)  # autograd's threads of such devices may still run, which ends a process that waits for nobody badly
