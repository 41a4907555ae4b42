"""Four ranks with one trunk and a head for each pair of them, for test_own_heads.py."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def train(divisor: float, run_dir: str) -> None:
    """Train two steps of two passes each. `divisor`: what each loss is divided by; 2 is right."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with attach(run_dir):
        torch.manual_seed(0)
        trunk = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh()))
        torch.manual_seed(1 + rank // 2)
        head = DistributedDataParallel(nn.Linear(16, 5), process_group=pairs[rank // 2])
        optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)
        generator = torch.Generator().manual_seed(10 + rank)
        for _ in range(2):
            for k in range(2):
                trunk.require_backward_grad_sync = head.require_backward_grad_sync = k == 1
                features = torch.randn(6, 8, generator=generator)
                labels = torch.randint(0, 5, (6,), generator=generator)
                (F.cross_entropy(head(trunk(features)), labels) / divisor).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def train_by_hand(run_dir: str) -> None:
    """The same with sums over unequal tokens that are reduced by hand, heads over their pair's tokens alone."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    with attach(run_dir):
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        torch.manual_seed(1 + rank // 2)
        head = nn.Linear(16, 5)
        optimizer = torch.optim.SGD([*trunk.parameters(), *head.parameters()], lr=0.1)
        generator = torch.Generator().manual_seed(10 + rank)
        for _ in range(2):
            sizes = torch.randint(3, 12, (2,), generator=generator)
            every, own = sizes.sum(), sizes.sum()
            dist.all_reduce(every)
            dist.all_reduce(own, group=pair)
            for size in sizes.tolist():
                features = torch.randn(size, 8, generator=generator)
                labels = torch.randint(0, 5, (size,), generator=generator)
                (F.cross_entropy(head(trunk(features)), labels, reduction="sum") / every).backward()
            for p in trunk.parameters():
                dist.all_reduce(p.grad)
            for p in head.parameters():
                dist.all_reduce(p.grad, group=pair)
                p.grad.mul_(every / own)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def train_experts(run_dir: str, divisor: float) -> None:
    """Pairs of ranks share a batch and add up what an expert of each makes of it; each has the loss for itself. Experts
    are sharded by FSDP2 over the ranks that hold them. `divisor`: what its reduction divides by, 0 for its choice."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.nn.functional import all_reduce

    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("holders", "experts"))
    with attach(run_dir):
        torch.manual_seed(0)
        embedding, head = nn.Linear(8, 16), nn.Linear(16, 32)
        torch.manual_seed(1 + rank % 2)
        expert = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        fully_shard(expert, mesh=mesh["holders"])
        if divisor:
            expert.set_gradient_divide_factor(divisor)  # type: ignore[attr-defined]
            expert.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined]  # gloo knows no other
        copies = [*embedding.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD([*copies, *expert.parameters()], lr=0.1)
        generator = torch.Generator().manual_seed(10 + rank // 2)
        for _ in range(2):
            hidden = embedding(torch.randn(24, 8, generator=generator))
            labels = torch.randint(0, 32, (24,), generator=generator)
            made = all_reduce(expert(hidden), group=mesh["experts"].get_group())
            F.cross_entropy(head(hidden + made), labels).backward()
            for p in copies:
                dist.all_reduce(p.grad)
                p.grad.div_(4)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


class Gathered(torch.autograd.Function):
    """All ranks' features; backward gives the own ones their gradients, times `times`, of all ranks if `summed`."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, summed: bool, times: float) -> Tensor:
        ctx.how = (summed, times)
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (summed, times), arrived = ctx.how, arrived.contiguous()
        if summed:
            dist.all_reduce(arrived)
        return times * arrived.chunk(dist.get_world_size())[dist.get_rank()], None, None


class PartialLoss(torch.autograd.Function):
    """The mean cross-entropy over classes of which each rank has some."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        largest = logits.amax(1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        total = (logits - largest).exp().sum(1, keepdim=True)
        dist.all_reduce(total)
        shares = (logits - largest).exp() / total
        own = F.one_hot(labels, logits.shape[1] * dist.get_world_size()).chunk(dist.get_world_size(), 1)[
            dist.get_rank()
        ]
        of_labels = (shares * own).sum(1)
        dist.all_reduce(of_labels)
        ctx.save_for_backward((shares - own) / len(labels))
        return -of_labels.log().mean()

    @staticmethod
    def backward(ctx: Any, arrived: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return arrived * ctx.saved_tensors[0], None


def train_parts(run_dir: str, summed: bool, at_loss: bool) -> None:
    """Two ranks with a batch each and half of the classes, as insightface's PartialFC has them: the gather's backward
    makes up for DDP's average, or the loss does (`at_loss`), and each rank divides its part of the head."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        torch.manual_seed(0)
        body = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.Tanh()))
        torch.manual_seed(1 + rank)
        head = nn.Linear(16, 8, bias=False)
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
        generator = torch.Generator().manual_seed(10 + rank)
        for _ in range(2):
            features, labels = torch.randn(6, 8, generator=generator), torch.randint(0, 16, (6,), generator=generator)
            all_labels = [torch.empty_like(labels) for _ in range(ranks)]
            dist.all_gather(all_labels, labels)
            everything = Gathered.apply(body(features), summed, 1.0 if at_loss else ranks)
            (PartialLoss.apply(head(everything), torch.cat(all_labels)) * (ranks if at_loss else 1)).backward()
            if at_loss:
                head.weight.grad.div_(ranks)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
