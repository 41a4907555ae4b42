"""Tensor parallelism of a decoder, with or without sequence and loss parallelism.

Sources: Megatron-LM, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198; the plan is torchtitan's for Llama.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
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
from gradcheck_dist.trainer.moe import SPLIT_OVER_TP


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


class MixtureParallel(ParallelStyle):
    """A mixture of experts that sees whole sequences on every rank and holds a part of each expert.

    Experts that are spread over ep as well are split together with that: `splits_experts` is False. Every rank
    computes a summand of the output, and so of what flows back to input and router. Source: torchtitan's plan for its
    mixture of experts.
    """

    def __init__(self, between: Placement, splits_experts: bool) -> None:
        super().__init__()
        self._between, self._splits_experts = between, splits_experts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for part in (module.experts, module.router) if self._splits_experts else (module.router,):
            for name, parameter in list(part.named_parameters()):  # type: ignore[union-attr]
                placement = Shard(SPLIT_OVER_TP[name]) if name in SPLIT_OVER_TP else Replicate()
                split = distribute_tensor(parameter.detach(), device_mesh, [placement])
                part.register_parameter(name, nn.Parameter(split))  # type: ignore[union-attr]
        return distribute_module(module, device_mesh, None, self._enter, self._leave)  # type: ignore[arg-type]

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Tensor:
        whole = DTensor.from_local(inputs[0], mesh, [self._between], run_check=False).redistribute(
            placements=[Replicate()]
        )
        return whole.to_local(grad_placements=[Partial()])

    def _leave(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        summands = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return summands.redistribute(placements=[self._between]).to_local()


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
    for name in model.block_names():
        plan |= _block_plan(name, config, between, norm)
    parallelize_module(model, mesh, plan)
    if config.tied_embeddings:
        tie_again(model)


def tie_again(model: Decoder) -> None:
    """One matrix for embedding and head, where both lie on this stage: splitting gave each a parameter of its own."""
    if model.head is not None and model.embedding is not None:
        model.head.weight = model.embedding.weight


def _block_plan(
    name: str, config: TrainConfig, between: Placement, norm: Callable[[], ParallelStyle]
) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        f"{name}.attention_norm": norm(),
        f"{name}.attention": PrepareModuleInput(  # the second input is the rotary table
            input_layouts=(between, None), desired_input_layouts=(Replicate(), None)
        ),
        f"{name}.attention.wq": ColwiseParallel(),
        f"{name}.attention.wk": ColwiseParallel(),
        f"{name}.attention.wv": ColwiseParallel(),
        f"{name}.attention.wo": RowwiseParallel(output_layouts=between),
        f"{name}.ffn_norm": norm(),
    }
    if config.num_experts:
        return plan | {f"{name}.ffn": MixtureParallel(between, splits_experts=config.axes.ep == 1)}
    return plan | {
        f"{name}.ffn": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        f"{name}.ffn.w_gate": ColwiseParallel(),
        f"{name}.ffn.w_up": ColwiseParallel(),
        f"{name}.ffn.w_down": RowwiseParallel(output_layouts=between),
    }


def sum_partial_gradients(model: nn.Module) -> None:
    """Bring every gradient into its parameter's layout: norms under sequence parallelism hold partial sums until here.

    FSDP2 does so itself, before it reduces.
    """
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)
