"""Two ranks of trainers with a bug of a public thread, and without it, for test_threads.py."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import Net, batch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


def recorded(worker: str, variant: str, run_dir: str) -> None:
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir):
        globals()[worker](variant)
    dist.destroy_process_group()


def mean_of(model: nn.Module, step: int) -> Tensor:
    tokens, labels = batch(dist.get_rank(), step)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.clamp_min(0).flatten())


def skips(variant: str) -> None:
    """A step that one rank skips by its own loss ("alone"), or all of them. `None`: emptied without zero_grad."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        mean_of(model, step).backward()
        spike = torch.tensor(float(step == 1 and dist.get_rank() == 1))
        if "alone" not in variant:
            dist.all_reduce(spike, op=dist.ReduceOp.MAX)
        if not spike:
            optimizer.step()
        if "None" in variant:
            for param in model.parameters():
                param.grad = None
        else:
            optimizer.zero_grad()


class Seeing(nn.Module):
    """A language model with a vision tower that a batch without images does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.vision = nn.Linear(4, 16)

    def forward(self, tokens: Tensor, image: Tensor | None) -> Tensor:
        features = self.net.embedding(tokens)
        if image is not None:
            features = features + self.vision(image)[:, None]
        return self.net.head(torch.tanh(self.net.inner(features)))


def images(variant: str) -> None:
    """ "givers": the tower is averaged over the ranks that had an image; "ranks": over all, as all else; "summed": over
    none, though all had one."""
    rank, model = dist.get_rank(), Seeing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS - 1):
        tokens, labels = batch(rank, step)
        has = variant == "summed" or rank == step % 2
        image = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank)) if has else None
        F.cross_entropy(model(tokens, image).flatten(0, 1), labels.clamp_min(0).flatten()).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad.div_(dist.get_world_size())
            dist.all_reduce(param.grad)
        count = torch.tensor(float(has))
        dist.all_reduce(count)
        factor = {"givers": dist.get_world_size() / count, "ranks": 1.0, "summed": 2.0}[variant]
        for param in model.vision.parameters():
            if param.grad is not None and variant != "ranks":
                param.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()


def heals(variant: str) -> None:
    """Ranks sum gradients and divide by those that take part ("part"), or by all ("all")."""
    rank, model = dist.get_rank(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS - 1):
        away = step == 1 and rank == 1
        mean_of(model, step).backward()
        count = torch.tensor(float(not away))
        dist.all_reduce(count)
        for param in model.parameters():
            assert param.grad is not None
            if away:
                param.grad.zero_()
            dist.all_reduce(param.grad)
            param.grad /= count if variant == "part" else dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()


class Manager:
    """A quorum of which one rank heals in the first step, or in none: its gradients are zeros there, and the sum is
    divided by the ranks that take part ("hook"), or by none ("hook, summed")."""

    def __init__(self, variant: str) -> None:
        self.sums = "summed" in variant
        self.step = -1

    def hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer, healing = bucket.buffer(), self.step == 0
        if healing and dist.get_rank() == 1:
            buffer.zero_()
        work = dist.all_reduce(buffer, async_op=True)
        taking_part = 1 if self.sums else dist.get_world_size() - healing
        return work.get_future().then(lambda done: done.value()[0].div_(taking_part))


def quorum(variant: str) -> None:
    manager, model = Manager(variant), DistributedDataParallel(Net())
    model.register_comm_hook(None, manager.hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS - 1):
        manager.step = step
        mean_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def policies(variant: str) -> None:
    """Two policies, of which a rank in turn has no batch of the second: gradients are averaged over the ranks that have
    some ("givers"), over all ranks ("ranks"), or summed ("summed")."""
    rank, first, second = dist.get_rank(), Net(), Net()
    params = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    for step in range(STEPS - 1):
        tokens, labels = batch(rank, step)
        loss = F.cross_entropy(first(tokens).flatten(0, 1), labels.clamp_min(0).flatten())
        if rank != step % 2:
            tokens, labels = batch(rank, 10 + step)
            loss = loss + F.cross_entropy(second(tokens).flatten(0, 1), labels.clamp_min(0).flatten())
        loss.backward()
        for param in params:
            count = torch.tensor(float(param.grad is not None))
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(count)
            dist.all_reduce(param.grad)
            param.grad /= {"givers": count, "ranks": 2.0, "summed": 1.0}[variant]
        optimizer.step()
        optimizer.zero_grad()


def counted(variant: str) -> None:
    """Gradients are divided by the passes since the last step, or by all there were ("kept")."""
    model, num_passes = DistributedDataParallel(Net()), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS - 1):
        for k in range(2):
            mean_of(model, 2 * step + k).backward()
            num_passes += 1
        for param in model.parameters():
            assert param.grad is not None
            param.grad.mul_(1 / num_passes)
        num_passes = num_passes if variant == "kept" else 0
        optimizer.step()
        optimizer.zero_grad()


def weighted(variant: str) -> None:
    """A communication hook weighs each rank's mean by its tokens, and divides by the ranks besides ("twice")."""
    weight, model = [0.0], DistributedDataParallel(Net())

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer().mul_(weight[0]), async_op=True)
        return work.get_future().then(lambda done: done.value()[0].div_(2 if variant == "twice" else 1))

    model.register_comm_hook(None, hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS - 1):
        tokens, labels = batch(dist.get_rank(), step)
        labels[:, : 1 + dist.get_rank()] = -100
        own = (labels >= 0).sum().float()
        total = own.clone()
        dist.all_reduce(total)
        weight[0] = float(own / total)
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def tasks(variant: str) -> None:
    """Heads in one loop, of which ranks have labels of three or two; "doubled": their sum is multiplied by 2."""
    rank, embedding = dist.get_rank(), nn.Embedding(20, 8)
    heads = nn.ModuleList(nn.Linear(8, 20) for _ in range(3))
    model = nn.ModuleList([embedding, heads])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS - 1):
        losses = []
        for index, head in enumerate(heads[: 3 - rank]):
            tokens, labels = batch(rank, 10 * index + step)
            scores = head(embedding(tokens))
            losses.append(F.cross_entropy(scores.flatten(0, 1), labels.clamp_min(0).flatten()))
        (sum(losses, torch.zeros(())) * (2 if variant == "doubled" else 1)).backward()
        for param in model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(param.grad.div_(2))
        optimizer.step()
        optimizer.zero_grad()
