"""Two ranks below FSDP2 whose optimizer owns plain copies of the shards, to which hooks move gradients, as trainers do
that keep them on the host."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from probe_workers import batch, record_each
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

VARIANTS = ("right", "bfloat16", "replaced in each pass", "kept over steps", "divided again")
OF_DTENSORS = tuple(f"DTensors, {one}" for one in ("right", "bfloat16", "kept over steps", "halved", "clipped apart"))
STEPS, PASSES = 3, 3


def run(folder: str) -> None:
    record_each(folder, (*VARIANTS, *OF_DTENSORS), lambda one: (train_dtensors if one in OF_DTENSORS else train)(one))


class Uneven(nn.Module):
    """Rows that two ranks share unequally, and a norm whose values are all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.inner = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 7)
        self.head = nn.Linear(7, 20, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.inner(self.norm(self.embedding(tokens)))))
        return out


def train(variant: str) -> None:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if variant == "bfloat16" else torch.float32
    model = Uneven().to(dtype)
    fully_shard(model.inner)
    fully_shard(model)
    params: list[nn.Parameter] = list(model.parameters())
    copies = [nn.Parameter(local(param.detach()).float().clone()) for param in params]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    buffers: dict[nn.Parameter, Tensor] = {}

    def move(param: nn.Parameter) -> None:
        assert param.grad is not None
        grad = local(param.grad).float()
        adds = param in buffers and variant != "replaced in each pass"
        buffers[param] = buffers[param] + grad if adds else grad.clone()
        param.grad = None

    for param in params:
        param.register_post_accumulate_grad_hook(move)  # type: ignore[arg-type]
    for step in range(STEPS):
        data = [batch(dist.get_rank(), PASSES * step + k) for k in range(PASSES)]
        count = torch.stack([(labels >= 0).sum() for _, labels in data]).sum()
        dist.all_reduce(count)
        for tokens, labels in data:
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten(), reduction="sum")
            (loss * dist.get_world_size() / count).backward()
        for param, copy in zip(params, copies, strict=True):
            copy.grad = buffers[param] / (PASSES if variant == "divided again" else 1)
        optimizer.step()
        with torch.no_grad():
            for param, copy in zip(params, copies, strict=True):
                local(param).copy_(copy)
        if variant != "kept over steps":
            buffers.clear()


def train_dtensors(variant: str) -> None:
    """Whose optimizer owns float32 copies that are DTensors themselves, and clips what these are given."""
    torch.manual_seed(0)
    model = Uneven().to(torch.bfloat16 if "bfloat16" in variant else torch.float32)
    fully_shard(model.inner)
    fully_shard(model)
    params: list[nn.Parameter] = list(model.parameters())
    copies = [param.detach().clone().float().requires_grad_() for param in params]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    for step in range(STEPS):
        data = [batch(dist.get_rank(), PASSES * step + k) for k in range(PASSES)]
        count = torch.stack([(labels >= 0).sum() for _, labels in data]).sum()
        dist.all_reduce(count)
        for tokens, labels in data:
            loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten(), reduction="sum")
            (loss * dist.get_world_size() / count).backward()
        for param, copy in zip(params, copies, strict=True):
            assert param.grad is not None
            copy.grad = param.grad.detach().float().clone()
            if "halved" in variant:
                copy.grad.mul_(0.5)
            if "kept" not in variant:
                param.grad = None
        if "apart" in variant:
            norm = torch.stack([local(copy.grad).norm() for copy in copies if copy.grad is not None]).norm()
            for copy in copies:
                assert copy.grad is not None
                copy.grad.mul_((0.05 / norm).clamp(max=1.0))
        else:
            nn.utils.clip_grad_norm_(copies, 0.05)
        optimizer.step()
        with torch.no_grad():
            for param, copy in zip(params, copies, strict=True):
                param.copy_(copy)


def local(tensor: Tensor) -> Tensor:
    """A DTensor's part on this rank."""
    part: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return part
