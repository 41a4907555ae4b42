"""An expert on each of two ranks, which FSDP2 shards over that rank alone, for test_lone_experts.py."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

SIZE, WORDS = 8, 12


class Exchange(torch.autograd.Function):
    """As many rows to each rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        got = torch.empty_like(rows)
        dist.all_to_all_single(got, rows.contiguous())
        return got

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        got = torch.empty_like(gradients[0])
        dist.all_to_all_single(got, gradients[0].contiguous())
        return got


class Net(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.head = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, WORDS)
        torch.manual_seed(2 + rank)
        self.expert = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(h + Exchange.apply(torch.tanh(self.expert(Exchange.apply(h)))))


def train(run_dir: str, divisor: float) -> None:
    """Train three steps of two passes; `divisor`: of the expert's gradients, which hold all ranks' means."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = Net(rank)
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("copies", "experts"))
    fully_shard(net.expert, mesh=mesh["copies"])
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(5 + rank)
    with attach(run_dir, steps=range(3)):
        for _ in range(3):
            for _ in range(2):
                x, labels = torch.randn(6, SIZE, generator=drawn), torch.randint(0, WORDS, (6,), generator=drawn)
                (nn.functional.cross_entropy(net(x), labels) / 2).backward()
            for param in net.expert.parameters():
                assert param.grad is not None
                param.grad.div_(divisor)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


class Gained(nn.Module):
    """An expert with a vector that begins with ones on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gain = nn.Linear(SIZE, SIZE), nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain  # type: ignore[no-any-return]


def train_gained(run_dir: str, divisor: float, first: int = 0) -> None:
    """Experts that DDP leaves alone; `divisor`: of their gradients, which hold all ranks' means."""
    dist.init_process_group("gloo")
    net = Net(dist.get_rank())
    net.expert = Gained()  # type: ignore[assignment]
    _train_beside_ddp(run_dir, net, "expert", divisor, first)


def _train_beside_ddp(run_dir: str, net: nn.Module, own: str, divisor: float = 1.0, first: int = 0) -> None:
    """Three steps of a model of which DDP leaves the parameters alone whose names begin with `own`, recorded from the
    one with number `first` on."""
    from gradcheck_dist.probes import attach

    mine = [name for name, _ in net.named_parameters() if name.startswith(own)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, mine)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(5 + dist.get_rank())
    with attach(run_dir, steps=range(first, 3)):
        model = DistributedDataParallel(net)
        for _ in range(3):
            x, labels = torch.randn(6, SIZE, generator=drawn), torch.randint(0, WORDS, (6,), generator=drawn)
            nn.functional.cross_entropy(model(x), labels).backward()
            for name in mine if divisor != 1 else ():
                net.get_parameter(name).grad.div_(divisor)  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


class OwnHead(nn.Module):
    """A head that each rank drew for itself, with a norm and a number that begin alike; ranks exchange nothing."""

    def __init__(self, rank: int, begins_alike: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(SIZE, SIZE)
        torch.manual_seed(2 + rank)
        norm = nn.LayerNorm(SIZE) if begins_alike else nn.Identity()
        self.own_head = nn.Sequential(norm, nn.Linear(SIZE, WORDS))
        self.own_scale = nn.Parameter(torch.tensor(1.0)) if begins_alike else 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.own_head(torch.tanh(self.first(x))) * self.own_scale  # type: ignore[no-any-return]


def train_own_head(run_dir: str, begins_alike: bool) -> None:
    """A task for each rank: what all share is averaged by DDP, and each rank's head learns by its own mean."""
    dist.init_process_group("gloo")
    net = OwnHead(dist.get_rank(), begins_alike)
    _train_beside_ddp(run_dir, net, "own")
