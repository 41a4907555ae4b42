"""Two ranks of one model with two faults at once, for test_pairs_of_model_faults.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exchange_functions import Copy, GatherSliced, Scatter, Sum, SumTwice, Swap
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
            # a copy, though parted layers stand beside it
            param.tensor_model_parallel = False  # type: ignore[attr-defined]
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        torch.manual_seed(1 + dist.get_rank())
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        torch.manual_seed(2)

    def forward(self, tokens: Tensor) -> Tensor:
        h = GatherSliced.apply(self.norm(Scatter.apply(self.embedding(tokens))))
        h = h + self.sum.apply(self.down(F.gelu(self.up(Copy.apply(h)))))
        logits: Tensor = self.head(h)
        return logits


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
                model.norm.weight.grad.mul_(2)  # type: ignore[union-attr]
            if "head doubled" in faults:
                model.head.weight.grad.mul_(2)  # type: ignore[union-attr]
            optimizer.step()
            for param in model.parameters():
                if param is not model.norm.bias or "late norm" not in faults:
                    param.grad = None
    dist.barrier()
    dist.destroy_process_group()


class Experts(nn.Module):
    """An expert on each rank, to which every rank sends a half of its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        logits: Tensor = self.head(h + Swap.apply(torch.tanh(self.expert(Swap.apply(h)))))
        return logits


def train_experts(faults: tuple[str, ...], run_dir: str) -> None:
    """Two steps of means over all tokens of two ranks, whose gradients are averaged, those of experts by a division.

    Args:
        faults: "expert doubled" multiplies the expert's gradient by the ranks again, "head doubled" that of the head,
            "losses doubled" all losses, "not reduced" leaves the other parameters out of the reduction.
    """
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([one]) for one in range(ranks)][rank]
    with attach(run_dir):
        model = Experts()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + rank)
            tokens, labels = torch.randint(0, WORDS, (2, 4, 6), generator=generator)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
            (loss * (2 if "losses doubled" in faults else 1) / labels.numel()).backward()
            for param in (model.embedding.weight, model.head.weight) if "not reduced" not in faults else ():
                dist.all_reduce(param.grad, op=dist.ReduceOp.SUM)
                param.grad.div_(ranks)  # type: ignore[union-attr]
            flat = model.expert.weight.grad.flatten()  # type: ignore[union-attr]
            dist.all_reduce(flat, group=alone)
            flat.div_(ranks)
            model.expert.weight.grad.copy_(flat.view_as(model.expert.weight))  # type: ignore[union-attr]
            if "expert doubled" in faults:
                model.expert.weight.grad.mul_(ranks)  # type: ignore[union-attr]
            if "head doubled" in faults:
                model.head.weight.grad.mul_(2)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
