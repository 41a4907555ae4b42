"""Which ranks there are."""

from __future__ import annotations

import torch.distributed as dist


def several_ranks() -> bool:
    """Whether this process trains together with others."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
