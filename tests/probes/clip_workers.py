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


def train_with_one_stages_norm(config: TrainConfig, run_dir: str) -> TrainResult:
    """The same, clipping by hand by a norm to which the pipeline's last stage adds nothing (DeepSpeed 0.19.8 does)."""
    from gradcheck_dist.trainer import clip

    def clip_gradients(model: torch.nn.Module, max_norm: float, pipeline_group: dist.ProcessGroup | None) -> float:
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        squares = torch.stack([(grad * grad).sum() for grad in grads]).sum()
        total = squares if dist.get_rank() == 0 else torch.zeros(())
        dist.all_reduce(total)
        for grad in grads:
            grad.mul_(min(1.0, max_norm / float(total.sqrt())))
        return float(total.sqrt())

    clip.clip_gradients = clip_gradients
    return train(config, run_dir)
