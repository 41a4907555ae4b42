"""The training loop of one rank."""

import contextlib
import os
import resource
import time
import zlib

import torch
import torch.distributed as dist
from torch import nn

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer import clip, data, loss, parallelize, pipeline, precision, tied
from gradcheck_dist.trainer.auxiliary import AuxiliaryLosses, AuxiliaryStep
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.data import Batch, DataLoader
from gradcheck_dist.trainer.faults import apply_faults
from gradcheck_dist.trainer.layout import stages_of_rank
from gradcheck_dist.trainer.loss import StepTokens, TokenMeanLoss
from gradcheck_dist.trainer.meshes import build_meshes
from gradcheck_dist.trainer.result import StepMetrics, TrainResult
from gradcheck_dist.trainer.writers import build_writers


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
        self.position = config.axes.coordinates(self.rank)
        self.data_rank = data.data_rank(config, self.position)
        stages = stages_of_rank(config, self.position["pp"])
        self.is_first_stage, self.is_last_stage = 0 in stages, config.num_stages - 1 in stages
        self.owns_loss = self.is_last_stage and all(self.position[axis] == 0 for axis in self.position if axis != "pp")
        use_deterministic_algorithms(config)
        meshes = build_meshes(config, self.device)
        self.pipeline_group = meshes.group("pp") if meshes else None
        self.parts = parallelize.build_parts(config, meshes, self.device)
        self.model = self.parts[0] if len(self.parts) == 1 else nn.ModuleList(self.parts)
        if config.seed_checkpoint is not None:
            from gradcheck_dist.trainer.checkpoint import load_weights

            load_weights(self.parts, config.seed_checkpoint)
        self.scaler = precision.build_scaler(config, self.device)
        self.loss = build_loss(config, self.device, self.scaler)
        self.schedule = pipeline.build_schedule(self.parts, config, meshes, self.device, self.loss)
        self.optimizer = build_optimizer(self.model, config)
        self.first_step = 0
        if config.resume is not None:
            from gradcheck_dist.trainer.checkpoint import load_training

            self.first_step = load_training(self.parts, self.model, self.optimizer, self.scaler, config.resume)
            if self.first_step >= config.steps:
                raise GradcheckError(
                    f"resume {config.resume!r} holds a training of {self.first_step} steps, and steps is "
                    f"{config.steps}: nothing is left to do. Set steps to {self.first_step + 1} and up.",
                    code="E218",
                )

    def train_step(self, step: int) -> StepMetrics:
        """One optimizer step: K accumulation steps, clipping, update."""
        start_s = time.perf_counter()
        torch.manual_seed(random_seed(self.config, self.rank, step))
        batches = self.load_batches(step)
        tokens = self.count_tokens(batches)
        self.start_losses(tokens)
        for k, batch in enumerate(batches):
            with parallelize.sync_context(self.model, self.config, is_last=k == len(batches) - 1):
                self.forward_backward(batch)
        grad_norm = self.update()
        return StepMetrics(
            step=step,
            loss=loss.logged_loss(self.global_token_sum(), tokens),
            grad_norm=clip.logged_norm(grad_norm, self.config),
            tokens=tokens.global_tokens,
            lr=self.optimizer.param_groups[0]["lr"],
            duration_s=time.perf_counter() - start_s,
            peak_memory_bytes=peak_memory_bytes(self.device),
        )

    def load_batches(self, step: int) -> list[Batch]:
        """What this rank trains on in a step, one batch an accumulation step."""
        batches = self.loader.step_batches(step, self.data_rank)
        if self.config.axes.cp == 1:
            return batches
        from gradcheck_dist.trainer.context_parallel import local_part

        return [local_part(batch, self.position["cp"], self.config.axes.cp) for batch in batches]

    def start_losses(self, tokens: StepTokens) -> None:
        """Tell the losses what the step normalises by."""
        self.loss.start_step(tokens)
        positions = self.config.sequences_per_step * self.config.seq_len
        scale = float(self.scaler.get_scale()) if self.scaler else 1.0
        step = AuxiliaryStep(positions, tokens.contributions, tokens.later_divisor, scale, self.config.axes.tp)
        for module in self.model.modules():
            auxiliary = getattr(module, "auxiliary", None)
            if isinstance(auxiliary, AuxiliaryLosses):
                auxiliary.start_step(step)

    def update(self) -> float:
        """Finish gradients, clip them, step the optimizer; returns the gradient norm before clipping."""
        parallelize.finish_gradients(self.model, self.config)
        if self.config.tied_embeddings and self.pipeline_group is not None:
            tied.sum_tied_gradients(self.parts, self.pipeline_group)
        precision.unscale(self.scaler, self.optimizer)
        grad_norm = clip.clip_gradients(self.model, self.config.max_norm, self.pipeline_group)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        empty_gradients(self.optimizer)
        return grad_norm

    def forward_backward(self, batch: Batch) -> None:
        """Forward and backward of one accumulation step; gradients add up in the parameters."""
        tokens, labels = batch.tokens.to(self.device), batch.labels.to(self.device)
        if self.schedule is None:
            with self.loss_context():
                differentiate(self, tokens, labels)
        else:
            inputs = (tokens,) if self.is_first_stage else ()
            target = labels if self.is_last_stage else None
            with self.loss_context():
                self.schedule.step(*inputs, target=target, return_outputs=False)

    def count_tokens(self, batches: list[Batch]) -> StepTokens:
        """Tokens of the step, here and on all ranks; known before the first forward."""
        own = torch.tensor([batch.tokens_by_head for batch in batches], device=self.device).sum(0)
        total = own.clone()
        if self.world_size > 1:
            dist.all_reduce(total)
        seen_by = self.config.axes.tp * self.config.axes.pp  # ranks that count the same tokens
        tokens, *further = (total // seen_by).tolist()
        divisor = parallelize.later_divisor(self.config)
        return StepTokens(tokens, int(own[0]), self.config.contributions, divisor, tuple(further))

    def loss_context(self) -> contextlib.AbstractContextManager[None]:
        """Around loss and backward: what split logits need."""
        if not self.config.loss_parallel:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def global_token_sum(self) -> float:
        """The undivided loss of the step over all ranks; stages before the last add nothing to it."""
        if self.world_size > 1:
            if self.position["tp"] > 0:  # the same loss as on rank 0 of tp
                self.loss.token_sum.zero_()
            dist.all_reduce(self.loss.token_sum)
        return float(self.loss.token_sum)

    def close(self) -> None:
        """Leave the process group, all ranks together."""
        if dist.is_initialized():
            # Without the barrier gloo may abort a rank that is still sending while another is gone.
            dist.barrier()
            dist.destroy_process_group()


def differentiate(trainer: Trainer, tokens: torch.Tensor, labels: torch.Tensor) -> None:
    """Add the gradients of one accumulation step, of a model that is no pipeline, to those that are there."""
    loss = trainer.loss(parallelize.forward(trainer.model, tokens), labels)
    loss.backward()


def train(config: TrainConfig) -> TrainResult:
    """Train on this rank, from the first step to the last. Every rank of the job calls it with the same configuration.

    Raises:
        GradcheckError: see Trainer.
    """
    remove_faults = apply_faults(config.faults)
    try:
        trainer = Trainer(config)
        writers = build_writers(config) if trainer.owns_loss else []
        steps = []
        for step in range(trainer.first_step, config.steps):
            metrics = trainer.train_step(step)
            steps.append(metrics)
            names = ("loss", "grad_norm", "tokens", "lr", "tokens_per_s", "peak_memory_bytes")
            for writer in writers:
                writer.write(step, {f"train/{name}": getattr(metrics, name) for name in names})
        for writer in writers:
            writer.close()
        if config.save_checkpoint is not None:
            from gradcheck_dist.trainer.checkpoint import save_training

            save_training(
                trainer.parts, trainer.model, trainer.optimizer, trainer.scaler, config.steps, config.save_checkpoint
            )
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


def random_seed(config: TrainConfig, rank: int, step: int) -> int:
    """Where dropout's random numbers begin in a step. Ranks of tp that hold copies of an activation draw the same ones;
    a training that was resumed draws what it would have drawn."""
    copies = 1 if config.sequence_parallel else config.axes.tp
    streams = config.axes.world_size // copies
    return (config.seed * 1_000_000 + step) * streams + rank // copies


def use_deterministic_algorithms(config: TrainConfig) -> None:
    """Ask torch for operations that give the same bits every time, or let it say where there are none."""
    if config.deterministic != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic != "off", warn_only=config.deterministic == "warn")


def build_loss(config: TrainConfig, device: torch.device, scaler: torch.amp.GradScaler | None) -> TokenMeanLoss:
    """The loss on the model's output, as it goes into backward."""
    further_weight = config.mtp_loss_weight / config.num_mtp_heads if config.num_mtp_heads else 0.0
    if scaler is None:
        return TokenMeanLoss(device, further_weight=further_weight)
    return TokenMeanLoss(device, scaler.scale, further_weight)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer over this rank's parameters."""
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=config.lr)
    return torch.optim.AdamW(model.parameters(), lr=config.lr)


def empty_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Behind the optimizer's step, so that the next backward pass adds to nothing."""
    optimizer.zero_grad()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held so far: of its GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def checksum(model: nn.Module) -> int:
    """CRC-32 of all parameters that this rank holds, bit by bit, in the model's order."""
    crc = 0
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        crc = zlib.crc32(local.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data, crc)
    return crc
