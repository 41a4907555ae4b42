"""Two ranks with collectives inside the model, as people write them, for test_exchanges.py."""

import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from exchange_functions import (
    Copy,
    CopyInPlace,
    CopyInVain,
    CopyUnsummed,
    FunctionalGather,
    FunctionalGathered,
    FunctionalScatter,
    FunctionalSliced,
    FunctionalSum,
    Gather,
    GatherMean,
    GatherSliced,
    GatherSummedTwice,
    Joined,
    JoinedSummed,
    Masked,
    MeanBack,
    MeanInPlaceBack,
    Neighbour,
    NeighbourHalved,
    NeighbourHandedOn,
    ReduceScatter,
    Repeated,
    Scatter,
    ScatterMean,
    Stack,
    StackSliced,
    Sum,
    SumInPlace,
    SumInPlaceTwice,
    SumTwice,
    Swap,
    SwapByGather,
    SwapByGatherDoubled,
    SwapByGatherHandedOn,
    SwapDoubled,
    SwapHandedOn,
)
from probe_workers import with_and_without
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

WIDTH, WORDS, STEPS, PASSES = 8, 16, 2, 2
MAX_NORM = 0.1
AVG = dist.ReduceOp.AVG
TENSOR = (
    "tensor parallel",
    "tensor parallel, summed again in backward",
    "tensor parallel, summed in place",
    "tensor parallel, summed in place and again in backward",
    "tensor parallel, no sum in front of the columns",
    "tensor parallel, handed back unsummed in front of the columns",
    "tensor parallel, dropout from unlike seeds",
    "tensor parallel, averaged in backward",
    "tensor parallel, averaged in place in backward",
    "tensor parallel, bias divided",
    "tensor parallel, bias on every rank",
    "tensor parallel, bias divided in forward alone",
    "tensor parallel, bias divided, its parts summed",
    "tensor parallel, bias divided, its parts summed by a hook",
    "tensor parallel, bias divided, its parts averaged",
    "tensor parallel, summed by a hook in front of the columns",
    "tensor parallel, summed by a hook of the norm's module",
    "tensor parallel, bias joined",
    "tensor parallel, bias joined and summed",
    "tensor parallel, shift that softmax leaves out",
    "tensor parallel, one seed",
    "tensor parallel, losses added up",
    "tensor parallel, losses added up, gradients divided",
    "tensor parallel, losses added up, columns halved",
    "tensor parallel, losses added up, times ranks",
    "tensor parallel, losses added up, frozen where whole",
    "tensor parallel, a batch each",
    "tensor parallel, functional sum",
    "tensor parallel, not summed in front of the head",
    "tensor parallel, summed once more",
    "tensor parallel, one seed, summed once more",
    "tensor parallel, summed once more without a gradient",
    "tensor parallel, clipped by hand",
    "tensor parallel, clipped by hand, copies counted twice",
    "tensor parallel, clipped by hand, each rank by its own norm",
    "tensor parallel, no sum in front of the columns, clipped by hand, with own copies",
    "tensor parallel, a batch each, clipped by hand, with own copies",
)
SEQUENCE = ("sequence parallel", "sequence parallel, sliced in backward", "sequence parallel, scattered part repeated",
            "sequence parallel, norms summed twice", "sequence parallel, parts not summed",
            "sequence parallel, functional", "sequence parallel, functional also before the head")  # fmt: skip
CONTEXT = ("context parallel", "context parallel, sliced in backward", "context parallel, own put back",
           "context parallel, own put back, detached", "context parallel, averaged in backward",
           "context parallel, own joined", "context parallel, own joined, detached",
           "context parallel, gathered for a look", "context parallel, sliced in backward, functional")  # fmt: skip
EXPERTS = ("experts", "experts, handed on in backward", "experts, doubled in backward", "experts, not divided",
           "experts, others summed", "experts, by a gather", "experts, by a gather, handed on in backward",
           "experts, by a gather, doubled in backward")  # fmt: skip
SLOTS = ("slots, masked before the sum", "slots, masked before the sum, others' used",
         "slots, masked in the function", "slots, masked in the function, others' used")  # fmt: skip
CONTRASTIVE = (
    "whole contrastive loss",
    "whole contrastive loss, sliced in backward",
    "whole contrastive loss, sliced in backward, times ranks",
    "whole contrastive loss, functional, summed in backward",
    "whole contrastive loss, functional, sliced in backward",
    "whole contrastive loss, full tensor",
    "whole contrastive loss, full tensor, times ranks",
    "whole contrastive loss, own put back",
    "whole contrastive loss, own put back, detached",
    "whole contrastive loss, own put back, times ranks, last pass on a line of its own",
    "whole contrastive loss, own put back, pickled",
    "whole contrastive loss, own put back, pickled, times ranks",
    "whole contrastive loss, summed twice",
    "whole divergence, own put back",
    "whole contrastive loss, stacked",
    "whole contrastive loss, stacked, sliced in backward",
    "whole contrastive loss beside own ones",
    "whole contrastive loss beside own ones, sliced in backward",
    "whole contrastive loss beside own ones, sliced in backward, gradients summed",
    "whole score beside own losses, sliced in backward",
    "statistics in place",
    "own losses on statistics in place",
    "neighbours",
    "neighbours, handed on in backward",
    "neighbours, halved in backward",
)
GATHERED = ("experts gathered", "experts gathered, summed in backward")
SUMMED = ("losses summed over ranks", "losses summed over ranks, head halved")
PARTS = ("parts of one batch", "parts of one batch, not divided in backward", "parts of one batch, sliced in backward")
VARIANTS = (*TENSOR, *SEQUENCE, *CONTEXT, *EXPERTS, *SLOTS, *GATHERED, *CONTRASTIVE, *SUMMED, *PARTS)


def summed(grad: Tensor) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total)
    return total


class Row(nn.Module):
    """The rows of a linear layer that belong to this rank; its bias is everybody's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))


class Block(nn.Module):
    def __init__(self, index: int, variant: str) -> None:
        super().__init__()
        self.variant = variant
        self.norm = nn.LayerNorm(WIDTH)
        if "hook of the norm" in variant:
            self.norm.register_full_backward_pre_hook(lambda _, grads: (summed(grads[0]),))
        torch.manual_seed(100 * index + (0 if "one seed" in variant else dist.get_rank()))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), Row()
        torch.manual_seed(index)

    def forward(self, h: Tensor) -> Tensor:
        if "sequence" in self.variant:
            enter = GatherSliced if "sliced" in self.variant else Gather
            leave = Repeated if "repeated" in self.variant else ReduceScatter
            leave = Scatter if "not summed" in self.variant else leave
            if "functional" in self.variant:
                enter, leave = FunctionalGather, FunctionalScatter
        else:
            enter = MeanBack if "averaged in backward" in self.variant else Copy
            enter = CopyUnsummed if "unsummed" in self.variant else enter
            leave = SumTwice if "again" in self.variant or "added up" in self.variant else Sum
            leave = FunctionalSum if "functional" in self.variant else leave
            if "in place" in self.variant:
                leave = SumInPlaceTwice if "again" in self.variant else SumInPlace
                enter = MeanInPlaceBack if "averaged" in self.variant else CopyInPlace
        x = self.norm(h)
        if "by a hook in front" in self.variant:
            x.register_hook(summed)
        elif "hook of the norm" in self.variant:
            pass
        elif "no sum" not in self.variant and "added up" not in self.variant:
            x = enter.apply(x)
        x, weight, bias = F.gelu(self.up(x)), self.down.weight, self.down.bias
        if "shift" in self.variant:  # the norm's bias gets no gradient there, as a bias of attention's keys
            x = torch.softmax(x + self.norm.bias.sum(), -1)
        if "joined" in self.variant:
            join = JoinedSummed if "and summed" in self.variant else Joined
            return h + leave.apply(join.apply(F.linear(x, weight), bias))
        if "in forward alone" in self.variant:
            part = bias + (bias / dist.get_world_size() - bias).detach()
            return h + leave.apply(F.linear(x, weight, part))
        if "bias divided" in self.variant:
            return h + leave.apply(F.linear(x, weight, bias / dist.get_world_size()))
        if "bias on every" in self.variant:
            return h + leave.apply(F.linear(x, weight, bias))
        result: Tensor = h + leave.apply(F.linear(x, weight)) + bias
        return result


class Model(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant = variant
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        if variant in TENSOR + SEQUENCE:
            self.blocks = nn.ModuleList([Block(1, variant), Block(2, variant)])
        else:
            self.keys = nn.Linear(WIDTH, WIDTH)
            torch.manual_seed(7 + dist.get_rank())
            self.expert = nn.Linear(WIDTH, WIDTH) if variant in EXPERTS + SLOTS + GATHERED else nn.Identity()
        for name, param in self.named_parameters():
            if "its parts summed by a hook" in variant and "down.bias" in name:
                param.register_hook(summed)
        for name, param in self.named_parameters():  # whose gradients are whole on each rank
            param.requires_grad_("frozen" not in variant or not ("head" in name or "down.bias" in name))
        self.through = [nn.parallel.DistributedDataParallel(self) if variant in PARTS else self]

    def forward(self, ids: Tensor) -> Tensor:
        h: Tensor = self.words(ids)
        if self.variant in TENSOR + SEQUENCE:
            in_parts = self.variant in SEQUENCE
            h = Scatter.apply(h) if in_parts else h
            for index, block in enumerate(self.blocks):
                h = block(h)
                if index == 0 and "without a gradient" in self.variant:
                    with torch.no_grad():
                        dist.all_reduce(h)
                elif index == 0 and "once more" in self.variant:
                    h = Sum.apply(h)
            before_head = FunctionalGather if "also" in self.variant else GatherSliced
            h = before_head.apply(h) if in_parts else h
            if "in front of the head" in self.variant:  # whose columns are shared out
                return gathered_columns(F.linear(CopyInVain.apply(h), self.head.weight, self.head.bias))
        elif self.variant in CONTEXT:
            k = self.keys(h)
            if "own put back" in self.variant:
                parts = [torch.empty_like(k) for _ in range(2)]
                with torch.set_grad_enabled("detached" not in self.variant):
                    dist.all_gather(parts, k.contiguous())
                parts[dist.get_rank()] = k
                k = torch.cat(parts, 1)
            elif "own joined" in self.variant or "a look" in self.variant:
                parts = [torch.empty_like(k) for _ in range(2)]
                dist.all_gather(parts, (k.detach() if "detached" in self.variant else k).contiguous())
                if "joined" in self.variant:
                    k = torch.cat([k if rank == dist.get_rank() else part for rank, part in enumerate(parts)], 1)
                else:  # and a sink, that is no part of another rank
                    k = Gather.apply(k)
                    k = torch.cat([k, torch.zeros_like(k[:, :1])], 1)[:, :-1]
            else:
                wrong = GatherSliced if "sliced" in self.variant else GatherMean
                wrong = FunctionalSliced if "functional" in self.variant else wrong
                k = (Gather if self.variant == CONTEXT[0] else wrong).apply(k)
            h = h + F.scaled_dot_product_attention(h, k, k)
        elif self.variant in EXPERTS:
            ways = (Swap, SwapHandedOn, SwapDoubled)
            if "by a gather" in self.variant:
                ways = (SwapByGather, SwapByGatherHandedOn, SwapByGatherDoubled)
            there = ways["handed on" in self.variant or 2 * ("doubled" in self.variant)]
            h = h + Swap.apply(torch.tanh(self.expert(there.apply(self.keys(h)))))
        elif self.variant in SLOTS:
            h = h + self.routed(h)
        elif self.variant in GATHERED:
            every = (Gather if "summed" in self.variant else GatherSliced).apply(self.expert(Copy.apply(self.keys(h))))
            h = h + torch.tanh(every).unflatten(1, (dist.get_world_size(), -1)).sum(1)
        elif self.variant in SUMMED:
            h = h + self.keys(h)
        elif self.variant in PARTS:  # as FastVideo's sequence parallelism, below an average over these ranks, too
            h = (Scatter if "not divided" in self.variant else ScatterMean).apply(h)
            h = h + torch.tanh(self.keys(h))
            h = (GatherSliced if "sliced" in self.variant else Gather).apply(h)
        if "dropout" in self.variant:
            kept = torch.Generator().manual_seed(dist.get_rank())
            h = h * (torch.rand(h.shape, generator=kept) > 0.2)
        logits: Tensor = self.head(h)
        return logits

    def routed(self, h: Tensor) -> Tensor:
        """Both ranks hold all tokens and two experts each; of what they make of a token, slots of other ranks count
        nothing. Without their mask there, as transformers#48687 had it, they have a gradient."""
        before = "before" in self.variant
        x = Copy.apply(h)
        scores, chosen = torch.softmax(self.keys(x if before else h)[..., :4], -1).topk(2, -1)
        own = chosen // 2 == dist.get_rank()
        if before:
            scores = Copy.apply(scores.masked_fill(~own, 0.0))
        else:
            scores = Masked.apply(scores, own.float(), "others" in self.variant)
        made = torch.stack([torch.tanh(self.expert(x)), torch.tanh(self.expert(-x))], -2)
        slots = made.gather(-2, (chosen % 2)[..., None].expand(*chosen.shape, WIDTH))
        if before and "others" not in self.variant:
            scores = scores.masked_fill(~own, 0.0)
        result: Tensor = Sum.apply((slots * scores[..., None]).sum(-2))
        return result


def gathered_columns(logits: Tensor) -> Tensor:
    """Of the logits each rank's own half, of both."""
    first = torch.arange(WORDS) < WORDS // 2
    result: Tensor = Sum.apply(logits * (first if dist.get_rank() == 0 else ~first))
    return result


def own_loss(model: Model, ids: Tensor) -> Tensor:
    return F.cross_entropy(model.head(model.words(ids[:, :-1])).flatten(0, 1), ids[:, 1:].flatten())


def loss_of(model: Model, ids: Tensor) -> Tensor:
    if model.variant in CONTRASTIVE:
        features = model.keys(model.words(ids)).mean(1)[None]
        if "statistics" in model.variant:  # Barlow Twins: every rank goes on with the whole correlation
            correlation = features[0].T @ features[0]
            dist.all_reduce(correlation)
            own = torch.eye(WIDTH) * (1 + dist.get_rank()) if "own" in model.variant else torch.eye(WIDTH)
            return F.cross_entropy(correlation + own, torch.arange(WIDTH)) / PASSES
        if "neighbours" in model.variant:
            wrong = NeighbourHandedOn if "handed on" in model.variant else NeighbourHalved
            others = (Neighbour if model.variant == "neighbours" else wrong).apply(features[0])
            every = torch.cat([features[0], others])
            return F.cross_entropy(features[0] @ every.T, torch.arange(len(features[0]))) / PASSES
        every = every_rank(features, model.variant)[0]
        if "score" in model.variant:
            return (own_loss(model, ids) - every.std(0).mean()) / PASSES
        if "divergence" in model.variant:  # from a teacher's scores
            teacher = torch.softmax(torch.eye(len(every)), -1)
            return F.kl_div(F.log_softmax(every @ every.T, -1), teacher, reduction="batchmean") / PASSES
        loss = F.cross_entropy(every @ every.T, torch.arange(len(every))) / PASSES
        if "beside" in model.variant:
            own = own_loss(model, ids) / PASSES
            return loss + (own / dist.get_world_size() if "gradients summed" in model.variant else own)
        return loss * dist.get_world_size() if "times ranks" in model.variant else loss
    logits = model.through[0](ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / PASSES
    if model.variant in SUMMED:  # each rank goes on with the sum of all ranks' shares, as XTuner does
        return SumTwice.apply(loss / dist.get_world_size())  # type: ignore[no-any-return]
    divided = "added up" in model.variant and not {"times ranks", "gradients divided"} & set(model.variant.split(", "))
    return loss / dist.get_world_size() if divided else loss


def every_rank(features: Tensor, variant: str) -> Tensor:
    if "own put back" in variant:
        parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
        if "pickled" in variant:  # as DPR does
            dist.all_gather_object(parts, features.detach())
        else:
            dist.all_gather(parts, features.detach() if "detached" in variant else features)
        parts[dist.get_rank()] = features
        return torch.cat(parts, 1)
    if "full tensor" in variant:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return DTensor.from_local(features, mesh, [Shard(1)]).full_tensor()
    if "stacked" in variant:
        parts = (StackSliced if "sliced" in variant else Stack).apply(features)
        return torch.cat(list(parts), 1)
    how = GatherSliced if "sliced" in variant else GatherSummedTwice if "twice" in variant else Gather
    if "functional" in variant:
        how = FunctionalSliced if "sliced" in variant else FunctionalGathered
    result: Tensor = how.apply(features)
    return result


def reduce(model: Model) -> None:
    for name, param in model.named_parameters():
        assert param.grad is not None or "head" in name or not param.requires_grad
        if param.grad is None:
            continue
        of_parts = model.variant in SEQUENCE and ("norm" in name or "down.bias" in name)
        of_shares = "added up" in model.variant and "up." not in name and "down.weight" not in name
        if of_parts or of_shares:
            dist.all_reduce(param.grad)
            if "norms summed twice" in model.variant:
                dist.all_reduce(param.grad)
        elif "its parts" in model.variant and "down.bias" in name and "by a hook" not in model.variant:
            dist.all_reduce(param.grad)
            if "averaged" in model.variant:
                param.grad /= dist.get_world_size()  # parts averaged
        elif "added up" in model.variant:
            pass
        elif model.variant in SLOTS + GATHERED:
            if "keys" in name and "before" in model.variant:
                dist.all_reduce(param.grad)
        elif "not divided" in model.variant:
            if "expert" not in name:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        elif "expert" in name:
            param.grad /= dist.get_world_size()
        elif "others summed" in model.variant:
            dist.all_reduce(param.grad)
        elif model.variant not in TENSOR + SEQUENCE:
            dist.all_reduce(param.grad, op=dist.ReduceOp.SUM if "gradients summed" in model.variant else AVG)
        if ("head halved" in model.variant and "head" in name) or ("columns halved" in model.variant and "up." in name):
            param.grad /= 2
        if "gradients divided" in model.variant:
            param.grad /= dist.get_world_size()


def clip(model: Model) -> None:
    """Clip by the norm of all gradients, as Megatron-LM does: shards of all ranks, and copies once."""
    rank, squares, copies = dist.get_rank(), torch.zeros(()), torch.zeros(())
    for name, param in model.named_parameters():
        assert param.grad is not None
        shard = "up." in name or "down.weight" in name
        own = "own copies" in model.variant
        if shard or (rank == 0 and not own) or "twice" in model.variant or "own norm" in model.variant:
            squares = squares + param.grad.norm() ** 2
        elif own:
            copies = copies + param.grad.norm() ** 2
    if "own norm" not in model.variant:
        dist.all_reduce(squares)
    coefficient = (MAX_NORM / ((squares + copies).sqrt() + 1e-6)).clamp(max=1.0)
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(coefficient)


def train(variant: str) -> int:
    """Two steps of two passes; returns a checksum of the parameters."""
    model = Model(variant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shared = variant in TENSOR + SEQUENCE + PARTS + SLOTS + GATHERED and "a batch each" not in variant
    data = torch.Generator().manual_seed(3 if shared else 3 + dist.get_rank())
    for _ in range(STEPS):
        for index in range(PASSES):
            loss = loss_of(model, torch.randint(WORDS, (4, 5), generator=data))
            if "last pass on" in variant and index == PASSES - 1:  # outside of no_sync
                loss.backward()
            else:
                loss.backward()
        if variant not in PARTS:
            reduce(model)
        if "clipped by hand" in variant:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return zlib.crc32(b"".join(param.detach().numpy().tobytes() for param in model.parameters()))


def train_all(folder: str) -> list[tuple[int, int]]:
    """Every variant without probes and with them; checksums of both."""
    return with_and_without(train, VARIANTS, folder)
