"""Inner products: what makes tensors a number, the same number on every layout."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcheck_dist.events import Site
from gradcheck_dist.verify.pieces import is_distributed, local


@dataclass
class Base:
    """The function at the unperturbed point: its outputs, its gradient by variable, what its arithmetic was like.

    `added` is what backward gives when zeros arrive: an auxiliary loss that puts its gradient in there (as Megatron's
    MoEAuxLossAutoScaler does), or a backward that does not look at what arrives. `site`: the first line that
    communicates.
    """

    outputs: list[Tensor]
    gradient: dict[str, Tensor | None]
    added: dict[str, Tensor | None]
    epsilon: float
    site: Site | None = None


class Terms:
    """A number that is a sum of inner products with fixed tensors, `cotangents` (None: left out), as a function of
    variables. `share` of each counts 1 / (number of ranks that hold the same)."""

    cotangents: list[Tensor | None]
    share: list[float]
    variables: dict[str, Tensor]
    dtype: torch.dtype | None
    within: Callable[[], AbstractContextManager[None]] | None = None

    @property
    def module_call(self) -> Terms:
        """What runs forward; `within` surrounds that."""
        return self

    @property
    def path(self) -> str:
        """The module that it is about, as its root knows it."""
        raise NotImplementedError

    def terms(self, variables: Mapping[str, Tensor]) -> AbstractContextManager[list[Tensor]]:
        """The other sides of the inner products, with some variables replaced."""
        raise NotImplementedError

    def value(self, variables: Mapping[str, Tensor]) -> float:
        """This rank's share of the number, with some variables replaced."""
        with self.terms(variables) as found:
            return sum(
                inner(cotangent, term) * share
                for term, cotangent, share in zip(found, self.cotangents, self.share, strict=True)
                if cotangent is not None
            )

    def magnitude(self, base: Base) -> float:
        """The sum of the squares of this rank's summands."""
        return sum(
            float((local(cotangent).double() * local(term).double()).square().sum()) * share
            for term, cotangent, share in zip(base.outputs, self.cotangents, self.share, strict=True)
            if cotangent is not None and local(cotangent).shape == local(term).shape
        )


def inner(one: Tensor, other: Tensor) -> float:
    """The inner product in float64; of DTensors this rank's share of the whole."""
    if not is_distributed(one) and not is_distributed(other):
        return float((one.detach().double() * other.detach().double()).sum())
    from torch.distributed.tensor import DTensor, Replicate

    like = other if isinstance(other, DTensor) else one
    assert isinstance(like, DTensor)
    placements = [Replicate() if placement.is_partial() else placement for placement in like.placements]
    parts, copies = [], 1
    for tensor in (one, other):
        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, like.device_mesh, [Replicate()] * like.device_mesh.ndim)
        assert isinstance(tensor, DTensor)
        parts.append(tensor.detach().redistribute(placements=placements).to_local().double())  # type: ignore[attr-defined]
    for dim, placement in enumerate(placements):
        if placement.is_replicate():
            copies *= like.device_mesh.size(dim)
    return float((parts[0] * parts[1]).sum()) / copies


def random_direction(like: Tensor, seed: str) -> Tensor:
    """Standard normal numbers in the shape, dtype and layout of a tensor, the same wherever the seed is the same."""
    generator = torch.Generator("cpu").manual_seed(zlib.crc32(seed.encode()))
    numbers = torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu").to(
        local(like).device, like.dtype
    )
    if not is_distributed(like):
        return numbers
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    assert isinstance(like, DTensor)
    placements = [Replicate() if placement.is_partial() else placement for placement in like.placements]
    return distribute_tensor(numbers, like.device_mesh, placements, src_data_rank=None)
