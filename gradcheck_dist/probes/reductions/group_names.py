"""Process groups by the descriptions that their makers gave them, which tell what axis of the mesh they are.

DeviceMesh (torch/distributed/device_mesh.py) and Megatron Core (parallel_state.py) describe each group that they make.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from gradcheck_dist.events import NamedGroup
from gradcheck_dist.probes.recording.recorder import Recorder, guarded

NAMELESS = {"undefined", "default_pg", "mesh_default"}
MAX_NAME = 200


class GroupNames:
    """Writes each group once. `tell` is called as a step ends, when the groups that it used are there."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_groups = 0
        self._told: set[tuple[str, tuple[int, ...]]] = set()

    def tell(self) -> None:
        if dist.is_initialized() and len(distributed_c10d._world.pg_group_ranks) != self._num_groups:
            _write(self._recorder, self)

    def write_new(self) -> None:
        known: dict[Any, dict[int, int]] = {**distributed_c10d._world.pg_group_ranks}
        self._num_groups, own = len(known), dist.get_rank()
        for group, ranks in known.items():
            if not isinstance(group, dist.ProcessGroup):
                continue  # what stands for groups of others
            name, members = str(group.group_desc)[:MAX_NAME], tuple(sorted(ranks))
            if name in NAMELESS or own not in members or len(members) < 2 or (name, members) in self._told:
                continue
            self._told.add((name, members))
            self._recorder.writer.append(NamedGroup(name=name, group=members))


@guarded("group_names")
def _write(_: Recorder, names: GroupNames) -> None:
    names.write_new()
