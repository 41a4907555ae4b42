"""The training loop of one rank."""

import os
import time
import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer import parallelize
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.data import Batch, DataLoader
from gradcheck_dist.trainer.faults import apply_faults
from gradcheck_dist.trainer.loss import StepTokens, TokenMeanLoss
from gradcheck_dist.trainer.model import build_model
from gradcheck_dist.trainer.result import StepMetrics, TrainResult
from gradcheck_dist.trainer.scalars import ScalarWriter


class Trainer:
    """Model, data and optimizer of one rank, laid out as the configuration says.

    Joins the process group of the torchrun environment; without RANK it is one process and needs none.

    Raises:
        GradcheckError: the degrees do not multiply to the world size, the data is unusable, or there is no such device.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        config.axes.check_world_size(self.world_size)
        self.device = pick_device(config)
        self.loader = DataLoader(config)
        if "RANK" in os.environ and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        coordinates = config.axes.coordinates(self.rank)
        self.data_rank = coordinates["dp_replicate"] * config.axes.dp_shard + coordinates["dp_shard"]
        self.is_first_stage, self.is_last_stage = coordinates["pp"] == 0, coordinates["pp"] == config.axes.pp - 1
        self.owns_loss = self.is_last_stage and all(coordinates[axis] == 0 for axis in coordinates if axis != "pp")
        mesh = parallelize.build_mesh(config, self.device)
        self.data_group = parallelize.axis_group(mesh, *parallelize.DATA_AXES)
        self.pipeline_group = parallelize.axis_group(mesh, "pp")
        self.model = parallelize.parallelize(build_model(config), config, mesh, self.device)
        self.loss = TokenMeanLoss(self.device)
        self.schedule = parallelize.build_schedule(self.model, config, mesh, self.device, self.loss)
        self.optimizer = build_optimizer(self.model, config)

    def train_step(self, step: int) -> StepMetrics:
        """One optimizer step: K accumulation steps, clipping, update."""
        start_s = time.perf_counter()
        batches = self.loader.step_batches(step, self.data_rank)
        tokens = self.count_tokens(batches)
        self.loss.start_step(tokens)
        for k, batch in enumerate(batches):
            with parallelize.sync_context(self.model, self.config, is_last=k == len(batches) - 1):
                self.forward_backward(batch)
        grad_norm = clip_gradients(self.model, self.config.max_norm, self.pipeline_group)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepMetrics(
            step=step,
            loss=self.global_token_sum() / tokens.global_tokens,
            grad_norm=grad_norm,
            tokens=tokens.global_tokens,
            lr=self.optimizer.param_groups[0]["lr"],
            duration_s=time.perf_counter() - start_s,
        )

    def forward_backward(self, batch: Batch) -> None:
        """Forward and backward of one accumulation step; gradients add up in the parameters."""
        tokens, labels = batch.tokens.to(self.device), batch.labels.to(self.device)
        if self.schedule is None:
            loss = self.loss(self.model(tokens), labels)
            loss.backward()
        else:
            inputs = (tokens,) if self.is_first_stage else ()
            target = labels if self.is_last_stage else None
            self.schedule.step(*inputs, target=target, return_outputs=False)

    def count_tokens(self, batches: list[Batch]) -> StepTokens:
        """Tokens of the step, here and on all data-parallel ranks; known before the first forward."""
        own = sum(batch.num_tokens for batch in batches)
        total = torch.tensor(own, device=self.device)
        if self.data_group is not None:
            dist.all_reduce(total, group=self.data_group)
        return StepTokens(int(total), own, self.config.contributions, parallelize.later_divisor(self.config))

    def global_token_sum(self) -> float:
        """The undivided loss of the step over all ranks; stages before the last add nothing to it."""
        if self.world_size > 1:
            dist.all_reduce(self.loss.token_sum)
        return float(self.loss.token_sum)

    def close(self) -> None:
        """Leave the process group, all ranks together."""
        if dist.is_initialized():
            # Without the barrier gloo may abort a rank that is still sending while another is gone.
            dist.barrier()
            dist.destroy_process_group()


def train(config: TrainConfig) -> TrainResult:
    """Train on this rank, from the first step to the last. Every rank of the job calls it with the same configuration.

    Raises:
        GradcheckError: see Trainer.
    """
    remove_faults = apply_faults(config.faults)
    try:
        trainer = Trainer(config)
        writer = ScalarWriter(config.tensorboard) if config.tensorboard and trainer.owns_loss else None
        steps = []
        for step in range(config.steps):
            metrics = trainer.train_step(step)
            steps.append(metrics)
            if writer is not None:
                names = ("loss", "grad_norm", "tokens", "lr")
                writer.write(step, {f"train/{name}": getattr(metrics, name) for name in names})
        if writer is not None:
            writer.close()
        result = TrainResult(trainer.rank, trainer.world_size, trainer.device.type, checksum(trainer.model), steps)
        trainer.close()
        return result
    finally:
        remove_faults()


def pick_device(config: TrainConfig) -> torch.device:
    """This rank's device.

    Raises:
        GradcheckError: CUDA was asked for and there are fewer GPUs than ranks on this machine.
    """
    local_rank, num_local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if config.device == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus >= num_local:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if config.device == "cuda":
        raise GradcheckError(
            f"device is 'cuda', but this machine has {num_gpus} usable GPUs for {num_local} ranks. "
            "Set device=cpu or device=auto, or start fewer processes.",
            code="E211",
        )
    return torch.device("cpu")


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer over this rank's parameters."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=config.lr)
    return torch.optim.AdamW(model.parameters(), lr=config.lr)


def clip_gradients(model: nn.Module, max_norm: float | None, pipeline_group: dist.ProcessGroup | None) -> float:
    """Scale gradients down to a global 2-norm of max_norm (None: leave them); returns the norm before.

    The norm is that of the whole model: over shards and over pipeline stages.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm: Tensor = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # a DTensor under FSDP2
        norm = norm.full_tensor()
    if pipeline_group is not None:
        squared = norm.float() ** 2
        dist.all_reduce(squared, group=pipeline_group)
        norm = squared.sqrt()
    if max_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)


def checksum(model: nn.Module) -> int:
    """CRC-32 of all parameters that this rank holds, bit by bit, in the model's order."""
    crc = 0
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        crc = zlib.crc32(local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, crc)
    return crc
