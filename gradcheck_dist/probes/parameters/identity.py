"""What tells one rank's parameter from another's: checksums of values, and whether it is an embedding's."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from gradcheck_dist.stats.sampling import sample_positions


def fingerprint(param: Tensor, positions: Any) -> int | None:
    """A checksum of a plain parameter's values at the sampled positions; read once, when it is first seen. A DTensor on
    one rank alone (experts that FSDP2 shards over a group of one) is as whole as a plain one."""
    whole = _on_one_rank(param)
    if whole is None or not whole.numel() or whole.is_meta:
        return None
    values = whole.take(torch.as_tensor(positions, device=param.device)).cpu()
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().tobytes())


def _on_one_rank(param: Tensor) -> Tensor | None:
    """A parameter's values where all of them lie here and nowhere else as its own."""
    local = getattr(param, "_local_tensor", None)
    if local is None:
        return param.detach()
    alone = param.device_mesh.size() == 1 and local.shape == param.shape  # type: ignore[attr-defined]
    return local.detach() if alone else None


def start(param: Tensor, sample_size: int) -> int | None:
    """A checksum of the values that this rank holds of a parameter, at sampled positions; None for a constant."""
    local = getattr(param, "_local_tensor", param).detach()
    if not local.numel() or local.is_meta:
        return None
    positions = sample_positions("local", local.numel(), sample_size)
    values = local.take(torch.as_tensor(positions, device=local.device)).cpu().contiguous()
    if bool((values == values[0]).all()):
        return None
    return zlib.crc32(values.view(torch.uint8).numpy().tobytes())


def partitioned(param: Tensor) -> bool | None:
    """Whether its module says that each tensor-parallel rank holds a part of its own; None where it says nothing.

    Source: set_tensor_model_parallel_attributes in megatron/core/tensor_parallel/layers.py; Transformer Engine's, too.
    """
    told = vars(param).get("tensor_model_parallel") if hasattr(param, "__dict__") else None
    return told if isinstance(told, bool) else None


def is_expert(param: Tensor) -> bool:
    """Whether its module says that it is not all-reduced with the model's other parameters, but with its copies alone.

    Source: TEGroupedLinear and others in megatron/core/extensions/transformer_engine.py and tensor_parallel/layers.py;
    deepspeed/moe/experts.py.
    """
    return hasattr(param, "__dict__") and vars(param).get("allreduce") is False


def embeddings_of(root: nn.Module) -> set[int]:
    """Weights of embeddings, torch's and others' (Megatron's VocabParallelEmbedding)."""
    modules = [m for m in root.modules() if isinstance(m, nn.Embedding) or "Embedding" in type(m).__name__]
    return {id(param) for module in modules for param in module.parameters(recurse=False)}
