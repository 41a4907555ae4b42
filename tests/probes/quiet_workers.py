"""Two ranks whose gradients tell little: zero but for rounding, of one direction, or alike in their labels."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

PASSES, SCALE = 2, 512
VARIANTS = (
    "float16 hook",
    "float16 hook, halved",
    "PowerSGD hook, halved",
    "gathered",
    "gathered, not used",
    "gathered, signs",
    "clipped by parameter",
    "unused head",
    "one batch's labels",
    "running mean",
    "running mean between roots",
    "coefficient, clipped",
    "constant",
    "no advantage",
)
HEADS = ("unused head", "running mean between roots")


class Attention(nn.Module):
    """Whose key bias has no gradient but what rounding leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.out(F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))).flatten(0, 1)


def checksum(model: nn.Module) -> float:
    return sum(float(parameter.detach().double().abs().sum()) for parameter in model.parameters())


def compressed(name: str, attached: AbstractContextManager[object]) -> float:
    body = Attention()
    with attached:
        model = DistributedDataParallel(body)
        if name.startswith("PowerSGD"):
            model.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=100), powerSGD_hook)
        else:
            model.register_comm_hook(None, fp16_compress_hook)
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(2):
            for _ in range(PASSES):
                tokens = torch.randint(12, (4, 6))
                loss = F.cross_entropy(model(tokens), tokens.roll(-1, 1).flatten())
                (loss / PASSES / (2 if "halved" in name else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return checksum(body)


def mean_of_all(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, parameter.grad)
    return torch.stack(parts).mean(0)


def by_hand(name: str, attached: AbstractContextManager[object]) -> float:
    """Three steps whose gradients the program's own lines reduce."""
    outputs = 1 if "gathered" in name else 6
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, outputs))
    if name == "clipped by parameter":
        body.insert(3, nn.PReLU(8))
        body.insert(4, nn.LayerNorm(8))
    model = nn.ModuleDict({"body": body, "other": nn.Linear(8, 2)} if name in HEADS else {"body": body})
    scale = SCALE if name in ("running mean", "constant") else 1
    kept = [torch.zeros_like(parameter) for parameter in model.parameters()]
    with attached:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if name == "clipped by parameter":  # each rank steps other ones
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        torch.manual_seed(1 + dist.get_rank())
        for step in range(3):
            if name == "one batch's labels":
                body[0].requires_grad_(step != 1)
                body[2].requires_grad_(step != 1)
            for _ in range(PASSES):
                x = torch.randn(5, 6)
                output = body(x)
                labels = torch.zeros(5).long() if name == "one batch's labels" else torch.randint(6, (5,))
                loss = F.mse_loss(output[:, 0], x[:, 0]) if "gathered" in name else F.cross_entropy(output, labels)
                if "signs" in name:
                    loss = F.l1_loss(output, torch.full_like(output, 10.0))
                if name in HEADS:
                    other = model["other"](body[:3](x))
                    if "roots" in name and step == 1:
                        loss = F.cross_entropy(other, labels % 2) + 0.0 * output.sum()
                    else:
                        loss = loss + 0.0 * other.sum()
                if "coefficient" in name:
                    loss = 0.5 * loss + 0.5 * F.mse_loss(output, output.detach().roll(1, 0))
                (loss * scale / PASSES).backward()
            trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
            for parameter in trained:
                assert parameter.grad is not None
                if "gathered" in name:
                    mean = mean_of_all(parameter)
                    if "not used" not in name:
                        parameter.grad.copy_(mean)
                else:
                    if "roots" in name:
                        parameter.grad.div_(dist.get_world_size() ** 0.5)
                    dist.reduce(parameter.grad, 0)
                    parameter.grad.div_(dist.get_world_size() ** (0.5 if "roots" in name else 1) * scale)
                    dist.broadcast(parameter.grad, 0)
            if name.startswith(("running mean", "constant")):
                for before, parameter in zip(kept, trained, strict=True):
                    assert parameter.grad is not None
                    before.mul_(0.0 if name == "constant" else 0.9).add_(parameter.grad, alpha=0.1)
                    parameter.grad.add_(before, alpha=2.0)
            if name == "clipped by parameter":
                for parameter in trained:
                    assert parameter.grad is not None
                    most, norm = 0.01 * parameter.detach().norm().clamp(min=1e-3), parameter.grad.norm()
                    parameter.grad.mul_((most / norm).clamp(max=1))
            elif "clipped" in name:
                gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
                norm = torch.norm(torch.stack([gradient.norm() for gradient in gradients]))
                for gradient in gradients:
                    gradient.mul_(0.05 / norm)
            nn.utils.clip_grad_norm_(model.parameters(), 100.0)
            optimizer.step()
            optimizer.zero_grad()
    return checksum(model)


def policy(attached: AbstractContextManager[object]) -> float:
    """A policy gradient, the mean over sequences, each a mean over its tokens: those of one rank are all as good."""
    body = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))
    with attached:
        model = DistributedDataParallel(body)
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
        torch.manual_seed(1 + dist.get_rank())
        for _ in range(PASSES):
            tokens = torch.randint(12, (4, 6))
            log_probs = model(tokens).log_softmax(-1).gather(-1, tokens.roll(1, 1)[..., None])[..., 0]
            mask = torch.arange(6) < torch.tensor([[4], [6], [5], [6]])
            advantages = torch.tensor([0.7, -0.3, 0.4, 0.9]) * (dist.get_rank() == 0)
            (-(log_probs * advantages[:, None] * mask).sum(-1) / mask.sum(-1)).mean().div(PASSES).backward()
        optimizer.step()
    return checksum(body)


def train(folder: str) -> list[tuple[float, float]]:
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")

    def run(name: str, attached: AbstractContextManager[object]) -> float:
        torch.manual_seed(0)
        if name == "no advantage":
            return policy(attached)
        return compressed(name, attached) if "hook" in name else by_hand(name, attached)

    found = [(run(name, nullcontext()), run(name, attach(f"{folder}/{name}"))) for name in VARIANTS]
    dist.barrier()
    dist.destroy_process_group()
    return found
