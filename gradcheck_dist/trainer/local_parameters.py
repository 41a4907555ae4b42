"""Parameters that are split over a mesh, as plain tensors: DistributedDataParallel knows no others.

torch 2.13: DDP cannot broadcast a DTensor ("c10d.broadcast_ does not have a sharding strategy"), and its own private
answer (torch/distributed/tensor/parallel/ddp.py) makes new parameters in every forward, which DDP does not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

_LAYOUT = "gradcheck_layout"


@dataclass(frozen=True)
class Layout:
    """Which part of which tensor a plain one is."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: Any
    stride: tuple[int, ...]

    def distributed(self, local: Tensor) -> DTensor:
        """The whole of which `local` is this rank's part; differentiable."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def use_local_parameters(model: nn.Module) -> None:
    """Have every distributed parameter registered as its local part, in place.

    Each forward of the model sees them as distributed tensors again, and so does its state_dict. Gradients come out in
    the parameter's own layout: norms under sequence parallelism are summed over tp on the way.
    """
    made: dict[int, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    parameter: Any
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if not isinstance(parameter, DTensor):
                continue
            local = made.get(id(parameter))
            if local is None:
                local = made[id(parameter)] = nn.Parameter(parameter.to_local().detach())
                layout = Layout(parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
                setattr(local, _LAYOUT, layout)
            module._parameters[name] = local
            places.append((module, name, local))

    def before_forward(*_: Any) -> None:
        seen = {id(local): as_distributed(local, local) for local in made.values()}
        for module, name, local in places:
            module.__dict__[name] = seen[id(local)]  # found before the parameter, also when backward recomputes

    def in_state_dict(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for owner, name, local in places:
            if owner is module and f"{prefix}{name}" in state:
                state[f"{prefix}{name}"] = as_distributed(local, local.detach())

    model.register_forward_pre_hook(before_forward)
    for module in {owner for owner, _, _ in places}:
        module.register_state_dict_post_hook(in_state_dict)


def as_distributed(parameter: Tensor, local: Tensor) -> Tensor:
    """`local` in the layout of the parameter that it lies like, such as its gradient; itself for an ordinary one."""
    layout: Layout | None = getattr(parameter, _LAYOUT, None)
    return local if layout is None else layout.distributed(local)


def is_local_part(parameter: Tensor) -> bool:
    """Whether `use_local_parameters` made it."""
    return hasattr(parameter, _LAYOUT)
