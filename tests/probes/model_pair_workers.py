"""Two ranks of one model with two faults at once, for test_pairs_of_model_faults.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exchange_functions import Copy, GatherSliced, Scatter, Sum, SumTwice
from torch import Tensor, nn

WIDTH, WORDS, PASSES = 8, 16, 2


class Parted(nn.Module):
    """A norm of each rank's part of a sequence, and rows of a layer on each rank whose outputs are summed."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__()
        self.sum = SumTwice if "summed twice in backward" in faults else Sum
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        for param in self.norm.parameters():
            param.tensor_model_parallel = False  # a copy, though parted layers stand beside it
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        torch.manual_seed(1 + dist.get_rank())
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        torch.manual_seed(2)

    def forward(self, tokens: Tensor) -> Tensor:
        h = GatherSliced.apply(self.norm(Scatter.apply(self.embedding(tokens))))
        h = h + self.sum.apply(self.down(F.gelu(self.up(Copy.apply(h)))))
        return self.head(h)


def train(faults: tuple[str, ...], run_dir: str) -> None:
    """Two steps of means over all tokens.

    Args:
        faults: "norms not summed" leaves each rank the gradient of its part of the sequence, "norm doubled" multiplies
            one of these, "head doubled" that of the head, "late norm" does not empty that of the norm's bias, "summed
            twice in backward" sums what comes back once more.
    """
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir):
        model = Parted(faults)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            data = torch.randint(0, WORDS, (PASSES, 2, 2, 6), generator=generator)
            for tokens, labels in data:
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
                (loss / (PASSES * labels.numel())).backward()
            for param in () if "norms not summed" in faults else model.norm.parameters():
                dist.all_reduce(param.grad)
            if "norm doubled" in faults:
                model.norm.weight.grad.mul_(2)
            if "head doubled" in faults:
                model.head.weight.grad.mul_(2)
            optimizer.step()
            for param in model.parameters():
                if param is not model.norm.bias or "late norm" not in faults:
                    param.grad = None
    dist.barrier()
    dist.destroy_process_group()
