"""Ranks that reduce their gradients and update them each in its own way, and such that mean it, for
test_unlike_updates.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from clip_workers import Added, Copied
from probe_workers import record_each
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

NUMBERS = ("learning rates", "weight decay", "learning rates, later", "learning rates, by hand",
           "learning rates, shards", "learning rates, shards and replicas", "learning rates, one batch")  # fmt: skip
DRIFT = ("state of the optimizer", "noise on gradients", "noise on parameters", "a decay behind the step",
         "rates of lines")  # fmt: skip
RIGHT = ("plain", "noise before", "noise behind", "perturbed", "owners", "in each rank's order", "swapped for a look",
         "rounded by chance", "learning rates, one model each")  # fmt: skip
STEPS, WORDS, WIDTH = 4, 24, 12


def run(folder: str) -> None:
    record_each(folder, (*NUMBERS, *DRIFT, *RIGHT), train)


class Parted(nn.Module):
    """Two layers of which each rank holds a part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1 + dist.get_rank())
        self.up, self.down = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + Added.apply(self.down(torch.tanh(self.up(Copied.apply(x)))))  # type: ignore[no-any-return]


class Batches:
    def __init__(self, variant: str) -> None:
        self.random = torch.Generator().manual_seed(0 if variant.endswith("one batch") else dist.get_rank())

    def noise(self, params: list[nn.Parameter]) -> list[Tensor]:
        return [0.01 * torch.randn(param.shape, generator=self.random).to(param) for param in params]

    def loss(self, model: nn.Module) -> Tensor:
        words = torch.randint(WORDS, (16,), generator=self.random)
        return F.cross_entropy(model(words).float(), words.roll(1))


@torch.no_grad()
def add(params: list[nn.Parameter], changes: list[Tensor], times: float = 1.0) -> None:
    for param, change in zip(params, changes, strict=True):
        param.add_(change, alpha=times)


def train(variant: str) -> None:
    torch.manual_seed(0)
    rank, batches = dist.get_rank(), Batches(variant)
    layers = [nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)]
    if variant.endswith("one batch"):
        layers[1:3] = [Parted()]
    net: nn.Module = nn.Sequential(*layers)
    net = net.bfloat16() if variant == "rounded by chance" else net
    params = list(net.parameters())
    by_hand = variant in ("learning rates, by hand", "in each rank's order", "learning rates, one model each")
    shards = variant.startswith("learning rates, shards")
    alone = by_hand or variant.endswith("one batch")
    if shards:
        sizes, names = ((2, 2), ("replicas", "shards")) if "replicas" in variant else ((4,), ("shards",))
        fully_shard(net, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    model = net if alone or shards else DistributedDataParallel(net)
    params = list(net.parameters())
    optimizer = make_optimizer(variant, params) if variant != "rates of lines" else None
    if variant == "state of the optimizer" and rank:
        assert optimizer is not None
        for param in params:
            optimizer.state[param] = {
                "step": torch.tensor(5.0), "exp_avg": torch.full_like(param, 0.01), "exp_avg_sq": torch.ones_like(param)
            }  # fmt: skip
    for step in range(STEPS):
        noise = [] if shards else batches.noise(params)
        if variant in ("noise before", "noise behind"):
            add(params, noise)
        loss = batches.loss(model)
        if variant == "perturbed":
            own = torch.autograd.grad(loss, params)
            add(params, list(own))
            loss = batches.loss(model)
        loss.backward()
        if variant == "perturbed":
            add(params, list(own), -1.0)
        if by_hand and variant != "learning rates, one model each":
            reduce(params, own_first=variant == "in each rank's order")
        if variant == "noise before":
            add(params, noise, -1.0)
        if variant == "noise on gradients":
            for param, of_param in zip(params, noise, strict=True):
                param.grad += of_param
        if variant == "noise on parameters":
            add(params, noise)
        if variant == "learning rates, later" and step == 1 and optimizer is not None:
            optimizer.param_groups[0]["lr"] *= 1 + rank
        if optimizer is None:
            add(params, [param.grad for param in params if param.grad is not None], -0.1 * (1 + rank))
            for param in params:
                param.grad = None
        else:
            optimizer.step()
            optimizer.zero_grad()
        if variant == "noise behind":
            add(params, noise, -1.0)
        if variant == "a decay behind the step":
            add(params, [param.detach().clone() for param in params], -0.01 * rank)
        if variant == "swapped for a look" and rank:
            add(params, noise)
            with torch.no_grad():
                batches.loss(net)
            add(params, noise, -1.0)
        if variant == "rounded by chance":
            add(params, [param.detach() * (2**-8 * torch.sign(of)) for param, of in zip(params, noise, strict=True)])


def make_optimizer(variant: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    if variant == "owners":
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)
    rank = dist.get_rank()
    own_rate = variant.startswith("learning rates") and "later" not in variant
    decay = 0.1 * rank if variant == "weight decay" else 0.0
    return torch.optim.AdamW(params, lr=0.01 * (1 + rank) if own_rate else 0.01, weight_decay=decay)


def reduce(params: list[nn.Parameter], *, own_first: bool) -> None:
    """The mean over ranks; `own_first`: each rank adds up what it gathers, its own part first."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for param in params:
        if own_first:
            parts = [torch.empty_like(param) for _ in range(world)]
            dist.all_gather(parts, param.grad)
            param.grad.copy_(sum((parts[(rank + i) % world] for i in range(1, world)), parts[rank]) / world)
        else:
            dist.all_reduce(param.grad)
            param.grad /= world
