"""Two ranks of trainers that few people write, for test_odd_trainers.py."""

import torch
import torch.distributed as dist
from probe_workers import Net, batch, token_sum
from torch.nn.parallel import DistributedDataParallel

STEPS = 2


def train(variant: str, run_dir: str) -> None:
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        model = Net()
        if "narrow" in variant:  # a bias of so few elements that three contributions nearly make up any values
            model.inner = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Linear(4, 16))
        wrapped = DistributedDataParallel(model) if "wrapper" in variant else model
        critic = torch.nn.Linear(4, 12)
        params = [*model.parameters(), *(critic.parameters() if "critic" in variant else ())]
        optimizer = torch.optim.SGD(params, lr=0.05)
        num_tokens = sum(int((batch(r, k)[1] >= 0).sum()) for r in range(world) for k in range(2))
        for _ in range(STEPS):
            share = world if "wrapper" in variant else 1
            loss = sum(token_sum(wrapped, batch(rank, k)) * share / num_tokens for k in range(2))
            loss.backward()
            if "critic" in variant:
                seen = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
                torch.nn.functional.mse_loss(critic(seen), torch.ones(8, 12)).backward()
            for param in params:
                assert param.grad is not None
                if "critic" in variant and (param.shape[0] != 12 or "never" not in variant):
                    dist.all_reduce(param.grad)
                if "reduced to one" in variant:
                    dist.reduce(param.grad, 0)
                if "and sent back" in variant:
                    dist.broadcast(param.grad, 0)
                if "own loss" in variant:
                    param.grad.mul_(1 / (1 + float(loss.detach())))
            if "in one copy" in variant:
                grads = [param.grad for param in params if param.grad is not None]
                flat = torch.cat([grad.flatten() for grad in grads])
                dist.reduce(flat, 0)
                if "sent on" in variant:
                    dist.broadcast(flat, 0)
                for grad, values in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                    grad.copy_(values.view_as(grad))
            if "all at once" in variant:
                op = dist.ReduceOp.AVG if "averaged" in variant else dist.ReduceOp.SUM
                dist.all_reduce_coalesced([param.grad for param in params if param.grad is not None], op=op)
            if "one steps" not in variant or rank == 0:
                optimizer.step()
            optimizer.zero_grad()
            if "one steps" in variant:
                for param in model.parameters():
                    dist.broadcast(param.data, 0)
    dist.barrier()
    dist.destroy_process_group()


def train_sharded(run_dir: str, factor: float) -> None:
    """The optimizer's state is sharded by hand: parts of a padded copy of all gradients, parts of all parameters."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        model = Net()
        params = list(model.parameters())
        size = -(-sum(param.numel() for param in params) // 8) * 4  # of a part: a multiple of 4
        padding = torch.zeros(size * world - sum(param.numel() for param in params))
        whole = torch.cat([*(param.detach().flatten() for param in params), padding])
        part = torch.nn.Parameter(whole[rank * size : (rank + 1) * size].clone())
        optimizer = torch.optim.SGD([part], lr=0.05)
        num_tokens = sum(int((batch(r, k)[1] >= 0).sum()) for r in range(world) for k in range(2))
        for _ in range(STEPS):
            for k in range(2):
                (token_sum(model, batch(rank, k)) / num_tokens).backward()
            flat = torch.cat([*(param.grad.flatten() for param in params if param.grad is not None), padding])
            part.grad = torch.empty(size)
            dist.reduce_scatter_tensor(part.grad, flat)
            part.grad.mul_(factor)
            optimizer.step()
            model.zero_grad()
            dist.all_gather_into_tensor(whole, part.detach())
            for param, values in zip(params, whole.split([*(p.numel() for p in params), len(padding)]), strict=False):
                param.data.copy_(values.view_as(param))
    dist.barrier()
    dist.destroy_process_group()


def train_with_one_left_out(run_dir: str, finds: bool) -> None:
    """One step of a wrapped model of which one layer takes no part. The next forward would raise unless it `finds`
    what is not used."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        model = Net()
        model.spare = torch.nn.Linear(16, 16)
        wrapped = DistributedDataParallel(model, find_unused_parameters=finds)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        num_tokens = sum(int((batch(r, k)[1] >= 0).sum()) for r in range(world) for k in range(2))
        for k in range(2):
            wrapped.require_backward_grad_sync = k == 1
            (token_sum(wrapped, batch(rank, k)) * world / num_tokens).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def train_in_turns(run_dir: str, divides: bool) -> None:
    """Two optimizers that step by turns, each with the other's parameters frozen for its passes, in one wrapped model.
    `divides` their losses by the ranks once more, which is wrong."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        model = Net()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        parts = [list(model.head.parameters()), [*model.embedding.parameters(), *model.inner.parameters()]]
        num_tokens = sum(int((batch(r, k)[1] >= 0).sum()) for r in range(world) for k in range(2))
        scale = 1 if divides else world
        for mine in parts:
            for param in model.parameters():
                param.requires_grad_(any(param is one for one in mine))
            for k in range(2):
                wrapped.require_backward_grad_sync = k == 1
                (token_sum(wrapped, batch(rank, k)) * scale / num_tokens).backward()
            torch.optim.SGD(mine, lr=0.05).step()
    dist.barrier()
    dist.destroy_process_group()


def train_with_sharded_hooks(run_dir: str, divides: bool) -> None:
    """Parameters that FSDP2 shards over one rank each, whose hooks add up the ranks' gradients; `divides` is right."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicas", "shards"))

    def hook(param: torch.Tensor) -> None:
        gradient = param.grad.to_local()
        dist.all_reduce(gradient)
        if divides:
            gradient /= world

    with attach(run_dir):
        model = Net()
        fully_shard(model.inner, mesh=mesh["shards"])
        fully_shard(model, mesh=mesh["shards"])
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        num_tokens = sum(int((batch(r, 0)[1] >= 0).sum()) for r in range(world))
        for _ in range(STEPS):
            (token_sum(model, batch(rank, 0)) * world / num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def train_with_hooks_on_shards(run_dir: str, divisor: int) -> None:
    """FSDP2 over one axis, whose hooks add up what was reduced over the other; two is right to divide by."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    num_tokens = sum(int((batch(r, k)[1] >= 0).sum()) for r in range(world) for k in range(2))

    def hook(reduced: torch.Tensor) -> None:
        dist.all_reduce(reduced, group=mesh["replicas"].get_group())
        reduced /= divisor

    with attach(run_dir):
        model = Net()
        for module in (model.inner, model):
            fully_shard(module, mesh=mesh["shards"])
            module.set_all_reduce_hook(hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(STEPS):
            for k in range(2):
                model.set_requires_gradient_sync(k == 1)
                (token_sum(model, batch(rank, k)) * world / num_tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def train_offloaded(run_dir: str) -> None:
    """FSDP2 keeps shards and their gradients on the CPU, and adds what a pass brings there. Nothing divides."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    with attach(run_dir):
        model = Net()
        fully_shard(model.inner, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(STEPS):
            for k in range(2):
                tokens, labels = batch(rank, 2 * step + k)
                torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten().clamp(min=0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def train_in_a_flat_buffer(run_dir: str) -> None:
    """Losses divide by each rank's own tokens, times the ranks; behind their sum all gradients are divided at once."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        model = Net()
        params = list(model.parameters())
        flat = torch.zeros(sum(param.numel() for param in params))
        for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
            param.main_grad = part.view_as(param)
        optimizer = torch.optim.SGD(params, lr=0.05)
        for step in range(STEPS):
            flat.zero_()
            parts = [batch(rank, 2 * step + k) for k in range(2)]
            num_tokens = sum(int((labels >= 0).sum()) for _, labels in parts)
            for part in parts:
                (token_sum(model, part) * world / num_tokens).backward()
                for param in params:
                    param.main_grad.add_(param.grad)
                    param.grad = None
            dist.all_reduce(flat)
            flat.div_(world)
            for param in params:
                param.grad = param.main_grad
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def train_with_a_factor_of_one_rank(run_dir: str) -> None:
    """A loss without tokens, whose sum over the ranks is divided; rank 1 multiplies by their number once more."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    with attach(run_dir):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        torch.manual_seed(1 + rank)
        for _ in range(STEPS):
            torch.nn.functional.mse_loss(model(torch.randn(6, 8)), torch.randn(6, 8)).backward()
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= world
                if rank == 1:
                    param.grad.mul_(2.0)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()
