"""Tensor parallelism of a decoder, with or without sequence and loss parallelism.

Sources: Megatron-LM, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198; the plan is torchtitan's for Llama.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.model import Decoder


class Replicated(ParallelStyle):
    """The same module with the same input on every rank; its parameters become distributed tensors like the others."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]

    @staticmethod
    def _enter(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

    @staticmethod
    def _leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        return output.to_local()


def apply_tensor_parallel(model: Decoder, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Split a model, or a pipeline stage of one, over a one-dimensional mesh, in place."""
    between = Shard(1) if config.sequence_parallel else Replicate()
    norm = partial(SequenceParallel, use_local_output=True) if config.sequence_parallel else Replicated
    plan: dict[str, ParallelStyle] = {}
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if model.norm is not None:
        plan["norm"] = norm()
        plan["head"] = ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if config.loss_parallel else Replicate(),
            use_local_output=not config.loss_parallel,
        )
    for name in model.layers:
        plan |= {
            f"layers.{name}.attention_norm": norm(),
            f"layers.{name}.attention": PrepareModuleInput(  # the second input is the rotary table
                input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
            ),
            f"layers.{name}.attention.wq": ColwiseParallel(),
            f"layers.{name}.attention.wk": ColwiseParallel(),
            f"layers.{name}.attention.wv": ColwiseParallel(),
            f"layers.{name}.attention.wo": RowwiseParallel(output_layouts=between),
            f"layers.{name}.ffn_norm": norm(),
            f"layers.{name}.ffn": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
            f"layers.{name}.ffn.w_gate": ColwiseParallel(),
            f"layers.{name}.ffn.w_up": ColwiseParallel(),
            f"layers.{name}.ffn.w_down": RowwiseParallel(output_layouts=between),
        }
    parallelize_module(model, mesh, plan)
    if config.tied_embeddings and model.head is not None and model.embedding is not None:
        model.head.weight = model.embedding.weight  # splitting gave each a parameter of its own


def sum_partial_gradients(model: nn.Module) -> None:
    """Bring every gradient into its parameter's layout: norms under sequence parallelism hold partial sums until here.

    FSDP2 does so itself, before it reduces.
    """
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
