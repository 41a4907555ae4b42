"""Mesh axes and their degrees. Pure arithmetic: imports no torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from gradcheck_dist.errors import GradcheckError

AXIS_NAMES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
"""In the field's order (torchtitan's ParallelDims). `ep` borrows its ranks from dp_shard * cp."""

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes that multiply to the world size, outermost (slowest varying rank) first."""


@dataclass(frozen=True)
class Axes:
    """Degrees of the six mesh axes; each is at least 1.

    Raises:
        GradcheckError: a degree is not a positive integer, or ep does not divide dp_shard * cp.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in AXIS_NAMES:
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise GradcheckError(
                    f"degree of axis {name} is {degree!r}; legal values are integers from 1 up. "
                    f"Set {name}=1 to switch the axis off.",
                    code="E101",
                )
        if (self.dp_shard * self.cp) % self.ep:
            raise GradcheckError(
                f"ep={self.ep} does not divide dp_shard*cp={self.dp_shard * self.cp}; expert parallelism borrows its "
                f"ranks from these two axes. Legal values of ep here: {divisors(self.dp_shard * self.cp)}.",
                code="E102",
            )

    @property
    def world_size(self) -> int:
        return math.prod(getattr(self, name) for name in MESH_AXES)

    @property
    def data_parallel_degree(self) -> int:
        """Number of ranks that see different samples: dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    def check_world_size(self, world_size: int) -> None:
        """Raise GradcheckError unless the degrees multiply to `world_size` (number of ranks)."""
        if self.world_size != world_size:
            product = " * ".join(f"{name}={getattr(self, name)}" for name in MESH_AXES)
            raise GradcheckError(
                f"the degrees {product} multiply to {self.world_size}, but the world size is {world_size}. "
                f"Change a degree, or start {self.world_size} processes.",
                code="E103",
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """The position of a global rank on each mesh axis (ep left out: it is a view of dp_shard and cp)."""
        position: dict[str, int] = {}
        for name in reversed(MESH_AXES):
            degree = getattr(self, name)
            rank, position[name] = divmod(rank, degree)
        return {name: position[name] for name in MESH_AXES}

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def parse_axes(text: str) -> Axes:
    """ "dp_shard=4,tp=2" as Axes; axes that are not named have degree 1.

    Raises:
        GradcheckError: E104 it reads differently; E101, E102 as for Axes.
    """
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in AXIS_NAMES or not value.isdecimal() or name in degrees:
            raise GradcheckError(
                f"--axes is {text!r}, where {part!r} is no axis with its degree. Legal names are "
                f"{', '.join(AXIS_NAMES)}, each once, as in dp_shard=4,tp=2.",
                code="E104",
            )
        degrees[name] = int(value)
    return Axes(**degrees)


def parse_same_data(text: str) -> tuple[tuple[int, ...], ...]:
    """ "0,1/2,3" as sets of ranks that evaluate the same tokens; ranks that are not named have their own.

    Raises:
        GradcheckError: E105 it reads differently, or names a rank twice.
    """
    groups = [[word.strip() for word in group.split(",")] for group in text.split("/")]
    words = [word for group in groups for word in group]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise GradcheckError(
            f"--same-data is {text!r}, which names no sets of ranks. Write ranks that evaluate the same tokens with "
            "commas and a slash between sets, each rank once, as in 0,1/2,3.",
            code="E105",
        )
    return tuple(tuple(sorted(int(word) for word in group)) for group in groups)


def divisors(number: int) -> list[int]:
    """All positive divisors of `number`, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
