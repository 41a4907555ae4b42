"""The one environment variable between `gradcheck run` and the processes below it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

VARIABLE = "GRADCHECK_BOOT"
"""Also written in purelib/gradcheck_dist_boot.pth, which may import nothing to look it up."""

DEFAULT_STEPS = range(3)


@dataclass(frozen=True)
class Steps:
    """Which optimizer steps are recorded: from `first` up to, not including, `stop`, and every `every`-th after."""

    first: int = DEFAULT_STEPS.start
    stop: int = DEFAULT_STEPS.stop
    every: int | None = None

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int):
            return False
        return self.first <= step < self.stop or (
            self.every is not None and step >= self.stop and step % self.every == 0
        )

    @property
    def end(self) -> int | None:
        """The step from which on nothing is recorded any more; None when there is none."""
        return self.stop if self.every is None and self.stop < sys.maxsize else None


@dataclass(frozen=True)
class Boot:
    """What a booted process has to know. `run_dir` is absolute: the trainer may change its folder."""

    run_dir: str
    steps: Steps = Steps()
    objective: str | None = None
    verify: bool = False
    exact: bool = False
    every_step: bool = False
    axes: dict[str, int] | None = None
    same_data: tuple[tuple[int, ...], ...] | None = None
    meant: tuple[str, ...] = ()
    sample_size: int | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))


def decode(text: str) -> Boot:
    """The reverse of Boot.encode.

    Raises:
        ValueError: not written by this version's `encode`.
    """
    try:
        fields = json.loads(text)
        options: dict[str, Any] = {name: bool(fields[name]) for name in ("verify", "exact", "every_step")}
        shared = fields["same_data"]
        same_data = tuple(tuple(group) for group in shared) if shared is not None else None
        steps = Steps(**fields["steps"])
        options |= {"axes": fields["axes"], "same_data": same_data, "meant": tuple(fields["meant"])}
        options["sample_size"] = fields["sample_size"]
        return Boot(fields["run_dir"], steps, fields["objective"], **options)
    except (TypeError, KeyError) as error:
        raise ValueError(
            f"{VARIABLE} is {text!r}, which this version of gradcheck did not write ({error!r})"
        ) from error


def restart_count(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun restarted this rank."""
    count = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdecimal() else 0
