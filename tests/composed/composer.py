"""Random trainers as people write them: made of pieces that know nothing of one another, right or with one fault.

A piece is a wrapper or a reduction by hand, a loss, where it is divided, a loss scale, a clip, an optimizer, a way to
empty gradients, what is logged beside. Whether a script is right nobody declares: `measured.py` measures it, for each
script holds a `reference` that one process can evaluate.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

TOKEN_SUMS = {
    "sum": "F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100, reduction='sum')",
    "masked": "(F.cross_entropy(out.transpose(1, 2), y.clamp(min=0), reduction='none') * (y >= 0)).sum()",
    "nll": "F.nll_loss(F.log_softmax(out, -1).flatten(0, 1), y.flatten(), ignore_index=-100, reduction='sum')",
    "gathered": "-(torch.log_softmax(out, -1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * (y >= 0)).sum()",
    "logsumexp": "((out.logsumexp(-1) - out.gather(-1, y.clamp(min=0)[..., None])[..., 0]) * (y >= 0)).sum()",
    "indexed": "F.cross_entropy(out[y >= 0], y[y >= 0], reduction='sum')",
    "sequences": "sum(F.cross_entropy(o, t, ignore_index=-100, reduction='sum') for o, t in zip(out, y))",
    "smoothed": "F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction='sum', label_smoothing=0.1)",
}
ELEMENT_MEANS = {
    "squares": "F.mse_loss(out, t)",
    "squares by hand": "((out - t) ** 2).mean()",
    "absolute": "(out - t).abs().mean()",
    "huber": "nn.SmoothL1Loss()(out, t)",
    "binary": "F.binary_cross_entropy_with_logits(out, (t > 0).float())",
    "rows": "F.mse_loss(out, t, reduction='sum') / out.shape[0]",
    "divergence": "F.kl_div(F.log_softmax(out, -1), F.softmax(t, -1), reduction='batchmean')",
    "cosine": "(1 - F.cosine_similarity(out, t, dim=-1)).mean()",
    "classes": "F.cross_entropy(out.flatten(0, 1), t.flatten(0, 1).argmax(-1))",
}
REDUCTIONS = {
    "each": "for p in params: dist.all_reduce({grad})",
    "async": "works = [dist.all_reduce({grad}, async_op=True) for p in params]\nfor work in works: work.wait()",
    "flat": "flat = torch.cat([{grad}.flatten() for p in params])\ndist.all_reduce(flat)\nat = 0\nfor p in params:\n"
    "    {grad}.copy_(flat[at : at + p.numel()].view_as(p))\n    at += p.numel()",
    "gather": "for p in params:\n    parts = [torch.empty_like(p) for _ in range(world)]\n"
    "    dist.all_gather(parts, {grad})\n    {grad}.copy_(torch.stack(parts).sum(0))",
    "root": "for p in params:\n    dist.reduce({grad}, 0)\n    dist.broadcast({grad}, 0)",
    "divided": "for p in params:\n    {grad}.div_(world)\n    dist.all_reduce({grad})",
    "averaged": "for p in params:\n    dist.all_reduce({grad})\n    {grad} /= world",
}
AVERAGES = {"ddp", "ddp no_sync", "fsdp", "hooks", "by hand divided", "by hand averaged"}
OPTIMIZERS = {
    "sgd": "[torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)]",
    "adam": "[torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)]",
    "groups": "[torch.optim.AdamW([dict(params=[p for p in net.parameters() if p.ndim > 1], weight_decay=0.1),"
    " dict(params=[p for p in net.parameters() if p.ndim < 2], weight_decay=0.0)], lr=1e-3)]",
    "two": "[torch.optim.SGD([p for p in net.parameters() if p.ndim > 1], lr=0.01),"
    " torch.optim.Adam([p for p in net.parameters() if p.ndim < 2], lr=1e-3)]",
    "by hand": "[]",
}
EMPTIED = {
    "optimizer": "for optimizer in optimizers: optimizer.zero_grad()",
    "model": "net.zero_grad()",
    "kept": "for optimizer in optimizers: optimizer.zero_grad(set_to_none=False)",
    "none": "for p in net.parameters(): p.grad = None",
    "zeros": "for p in net.parameters():\n    if p.grad is not None: p.grad.zero_()",
}
MAX_NORM = 0.05
CLIPS = {
    "": "",
    "torch": f"torch.nn.utils.clip_grad_norm_(net.parameters(), {MAX_NORM})",
    "loose": "torch.nn.utils.clip_grad_norm_(net.parameters(), 1e6)",
    "by hand": "total = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in net.parameters() if p.grad is not None))\n"
    f"if total > {MAX_NORM}:\n    for p in net.parameters():\n"
    f"        if p.grad is not None: p.grad.mul_({MAX_NORM} / (total + 1e-6))",
}
BESIDE = {
    "loss": "shown = torch.tensor(float(running))\ndist.all_reduce(shown)",
    "norm": "norm = torch.sqrt(sum(p.detach().pow(2).sum() for p in net.parameters()))",
    "labels": "seen = torch.tensor(7)\ndist.all_reduce(seen)",
    "evaluation": "net.eval()\nwith torch.no_grad():\n    x, y, t = batch(step, rank, 77)\n    net(x)\nnet.train()",
    "barrier": "dist.barrier()",
}
FAULTS = ("one rank", "one pass", "world more", "world less", "stale", "one parameter", "twice", "lost", "emptied")
HEAD = """import math, os, torch, torch.nn as nn, torch.nn.functional as F, torch.distributed as dist
from contextlib import nullcontext
from torch.nn.parallel import DistributedDataParallel

PASSES, STEPS, EQUAL, OF_TOKENS = {passes}, 3, {equal}, {of_tokens}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.up = nn.Embedding(17, 8), nn.Linear(8, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 17)

    def forward(self, x):
        return self.head(self.norm(F.gelu(self.up(self.emb(x)))))


def make_model():
    torch.manual_seed(1)
    return Net()


def batch(step, rank, k):
    g = torch.Generator().manual_seed(1000 * step + 100 * rank + k)
    x, y = (torch.randint(0, 17, (5, 7), generator=g) for _ in range(2))
    for i in range(0 if EQUAL else 5):
        y[i, int(torch.randint(1, 8, (1,), generator=g)) :] = -100
    return x, y, torch.randn(5, 7, 17, generator=g)


def reference(model, step, world):
    total, num_tokens = 0.0, 0
    for rank in range(world):
        for k in range(PASSES):
            x, y, t = batch(step, rank, k)
            out, t = model(x), t.double()
            total, num_tokens = total + {loss}, num_tokens + int((y >= 0).sum())
    return total / (num_tokens if OF_TOKENS else PASSES * world)


def train(rank, world, check):
"""
TAIL = """

if __name__ == "__main__":
    train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), CHECK)
"""


@dataclass(frozen=True)
class Script:
    """A trainer's text, and of which pieces it is made. `clips`: by a norm that acts, which hides what all share."""

    seed: int
    world: int
    fault: str | None
    clips: bool
    text: str
    pieces: dict[str, object] = field(default_factory=dict)


def compose(seed: int) -> Script:
    draw = random.Random(seed)
    world, passes = draw.choice([1, 2, 2, 2, 3]), draw.choice([1, 2, 3, 4])
    of_tokens, equal = draw.random() < 0.5, draw.random() < 0.3
    loss = draw.choice(sorted(TOKEN_SUMS if of_tokens else ELEMENT_MEANS))
    wrapper = draw.choice(["ddp", "ddp no_sync", "ddp summing", "fsdp", "hooks", "main_grad", *["by hand"] * 3])
    if wrapper == "ddp summing":
        passes = 1  # else what is reduced in one pass is reduced again in the next
    reduction = draw.choice(sorted(REDUCTIONS))
    optimizer, emptied, clip = (draw.choice(sorted(one)) for one in (OPTIMIZERS, EMPTIED, CLIPS))
    behind, scale = draw.random() < 0.3, draw.choice([1, 1, 1, 1024])
    beside = [name for name in sorted(BESIDE) if draw.random() < 0.25]
    fault = draw.choice([*[None] * 4, *FAULTS])
    if wrapper in ("fsdp", "main_grad"):
        optimizer = "adam" if optimizer == "by hand" else optimizer
    if wrapper == "fsdp" and clip == "by hand":
        clip = "torch"
    if wrapper == "main_grad":
        emptied = "none"
    if optimizer == "by hand" and emptied in ("optimizer", "kept"):
        emptied = "model"
    if fault in ("one pass", "lost", "emptied") and passes == 1:
        fault = "twice"
    expression = (TOKEN_SUMS if of_tokens else ELEMENT_MEANS)[loss]
    text = HEAD.format(passes=passes, equal=equal, of_tokens=of_tokens, loss=expression)
    told: dict[str, object] = {"wrapper": wrapper, "reduction": reduction, "loss": loss, "passes": passes}
    told |= {"optimizer": optimizer, "emptied": emptied, "clip": clip, "behind": behind, "scale": scale}
    told |= {"beside": beside, "equal": equal}
    lines = _Lines(text)
    by_hand = wrapper in ("by hand", "main_grad")
    averages = f"by hand {reduction}" in AVERAGES if by_hand else wrapper in AVERAGES
    _set_up(lines, wrapper, optimizer)
    grad = "p.main_grad" if wrapper == "main_grad" else "p.grad"
    lines.add("for step in range(STEPS):\n    data = [batch(step, rank, k) for k in range(PASSES)]\n    running = 0.0")
    lines.depth = 2
    if of_tokens:
        lines.add("num = sum((y >= 0).sum() for _, y, _ in data)\ndist.all_reduce(num)")
    share = ("world" if averages else "1") if of_tokens else ("1" if averages else "1 / world")
    share = f"({share}) / {'num' if of_tokens else 'PASSES'}"
    share += {"world more": " / world", "world less": " * world"}.get(fault or "", "")
    _passes(lines, wrapper, expression, "1" if behind else share, scale, fault)
    if by_hand:
        lines.add(REDUCTIONS[reduction].format(grad=grad))
    for number in ([share] if behind else []) + ([f"1 / {scale}"] if scale > 1 else []):
        lines.add(f"for p in net.parameters():\n    if {grad} is not None: {grad}.mul_({number})")
    if wrapper == "main_grad":
        lines.add("for p in params: p.grad = p.main_grad.clone()")
    if fault == "one parameter":
        lines.add("model.head.weight.grad.mul_(2)")
    lines.add(CLIPS[clip])
    lines.add("check(step, model)\nfor optimizer in optimizers: optimizer.step()")
    if optimizer == "by hand":
        lines.add("with torch.no_grad():\n    for p in net.parameters(): p.sub_(p.grad, alpha=0.01)")
    if fault != "stale":
        lines.add(EMPTIED[emptied])
        lines.add("for p in params: p.main_grad.zero_()" if wrapper == "main_grad" else "")
    for name in beside:
        lines.add(BESIDE[name])
    return Script(seed, world, fault, clip in ("torch", "by hand"), lines.text + TAIL, told)


@dataclass
class _Lines:
    text: str
    depth: int = 1

    def add(self, lines: str) -> None:
        for line in lines.splitlines():
            self.text += f"{'    ' * self.depth}{line}\n"


def _set_up(lines: _Lines, wrapper: str, optimizer: str) -> None:
    lines.add("model = net = make_model()\nparams = list(model.parameters())")
    if wrapper.startswith("ddp"):
        lines.add("net = DistributedDataParallel(model)")
    if wrapper == "ddp summing":
        lines.add(
            "def summed(_, bucket):\n    done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()\n"
            "    return done.then(lambda one: one.value()[0])\nnet.register_comm_hook(None, summed)"
        )
    if wrapper == "fsdp":
        lines.add(
            "from torch.distributed.device_mesh import init_device_mesh\n"
            "from torch.distributed.fsdp import fully_shard\n"
            "net = fully_shard(model, mesh=init_device_mesh('cpu', (world,)))"
        )
    if wrapper == "hooks":
        lines.add(
            "last = [False]\ndef arrived(p):\n    if last[0]:\n"
            "        dist.all_reduce(p.grad)\n        p.grad.div_(world)\n"
            "for p in params: p.register_post_accumulate_grad_hook(arrived)"
        )
    if wrapper == "main_grad":
        lines.add(
            "for p in params: p.main_grad = torch.zeros_like(p)\n"
            "def arrived(p):\n    p.main_grad.add_(p.grad)\n    p.grad = None\n"
            "for p in params: p.register_post_accumulate_grad_hook(arrived)"
        )
    lines.add(f"optimizers = {OPTIMIZERS[optimizer]}")


def _passes(lines: _Lines, wrapper: str, loss: str, share: str, scale: int, fault: str | None) -> None:
    lines.add("for k, (x, y, t) in enumerate(data):")
    lines.depth += 1
    if fault == "emptied":
        lines.add("net.zero_grad()" if wrapper != "main_grad" else "for p in params: p.main_grad.zero_()")
    if fault == "lost":
        lines.add("if k == 1: continue")
    if wrapper == "fsdp":
        lines.add("net.set_requires_gradient_sync(k == PASSES - 1)")
    if wrapper == "hooks":
        lines.add("last[0] = k == PASSES - 1")
    waits = "net.no_sync() if k < PASSES - 1 else nullcontext()" if wrapper == "ddp no_sync" else "nullcontext()"
    lines.add(f"with {waits}:")
    lines.depth += 1
    lines.add(f"out = net(x)\nloss = {loss}\nrunning += loss.item()")
    lines.add(f"loss = loss * ({share})" if share != "1" else "")
    lines.add("if rank == world - 1: loss = loss * 3" if fault == "one rank" else "")
    lines.add("if k == 0: loss = loss * 2" if fault == "one pass" else "")
    lines.add(f"loss = loss * {scale}" if scale > 1 else "")
    lines.add("if k == 0: loss.backward(retain_graph=True)" if fault == "twice" else "")
    lines.add("loss.backward()")
    lines.depth -= 2
