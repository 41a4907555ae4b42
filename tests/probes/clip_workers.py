"""Ranks whose clips are wrong only together. No postponed annotations, as in probe_workers."""

import torch
import torch.distributed as dist
from probe_workers import Net, batch, token_sum

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.result import TrainResult


def train(config: TrainConfig, run_dir: str) -> TrainResult:
    """The project's trainer, recorded."""
    from gradcheck_dist.probes import attach
    from gradcheck_dist.trainer.loop import train

    with attach(run_dir, objective="global-token-mean", axes=config.axes):
        return train(config)


def reduced_by_hand(run_dir: str, clip: str) -> None:
    """Two ranks that sum their gradients by hand and clip "before" or "after" that."""
    from gradcheck_dist.probes import attach

    dist.init_process_group("gloo")
    with attach(run_dir, objective="global-token-mean"):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [batch(dist.get_rank(), k) for k in range(2)]
        total = torch.tensor(float(sum((labels >= 0).sum() for _, labels in data)))
        dist.all_reduce(total)
        for part in data:
            (token_sum(model, part) / total).backward()
        if clip == "before":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for param in model.parameters():
            dist.all_reduce(param.grad)
        if clip == "after":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
