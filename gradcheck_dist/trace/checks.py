"""What msgspec's types cannot say of a record: lengths that must fit. Checked as a frame is read, so that what does not
fit is named as damage there, and nothing behind the reader stumbles over it."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import numpy as np

from gradcheck_dist.events import (
    AFTER,
    LEAF,
    AmpUnscale,
    AnyRecord,
    Header,
    Norms,
    Param,
    ParamUpdate,
    ParamValues,
    Plan,
    Replica,
    Samples,
    ScaleGrads,
)

SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
"""Bytes of a sampled value, by legal dtype."""


class Checks:
    """Takes records in their order and remembers the tables that later ones refer to. `unsound`: which records of the
    last frame failed."""

    def __init__(self) -> None:
        self.params: dict[int, Param] = {}
        self.plans: dict[int, Plan] = {}
        self.unsound: tuple[int, ...] = ()
        self._begun = False
        self._joined = False

    def of_one_trace(self, records: list[Any], note: Callable[[str], None]) -> list[Any]:
        """The records of a frame, as they come first in a file, up to where a second trace begins, which is named."""
        if self._joined:
            return []
        for index, record in enumerate(records):
            if type(record) is Header:
                self._begun, self._joined = True, self._begun
                if self._joined:
                    note("a second header begins another trace, which is left out: this file was joined from several")
                    return records[:index]
        return records

    def sort(self, records: list[AnyRecord], note: Callable[[str], None]) -> list[AnyRecord]:
        """The records that are sound; each other is named to `note`."""
        sound, self.unsound = [], ()
        for index, record in enumerate(records):
            check: Any = _CHECKS.get(type(record))
            problem = check(self, record) if check is not None else ""
            if problem:
                self.unsound += (index,)
                note(f"a {record.__struct_config__.tag} record {problem}")
            else:
                sound.append(record)
        return sound

    def _param(self, param: Param) -> str:
        known = self.params.get(param.id)
        # One that was no whole parameter when it was first seen (ZeRO 3) was not sampled yet.
        sampled = known is not None and any(plan.param == param.id for plan in self.plans.values())
        if known is not None and sampled and known.num_positions != param.num_positions:
            return f"gives parameter {param.id} {param.num_positions} positions, an earlier one {known.num_positions}"
        self.params[param.id] = param
        return ""

    def _plan(self, plan: Plan) -> str:
        param = self.params.get(plan.param)
        if param is None:
            return f"names parameter {plan.param}, of which nothing was recorded"
        if plan.positions is None:
            if plan.num_values != param.num_positions:
                return f"holds all {param.num_positions} positions of {param.name!r}, and {plan.num_values} values"
        elif len(plan.positions) != 4 * plan.num_values:
            return f"has {len(plan.positions)} bytes of positions for {plan.num_values} values"
        elif plan.num_values and _ends(plan.positions)[1] >= param.num_positions:
            return f"holds position {_ends(plan.positions)[1]} of {param.name!r}, which has {param.num_positions}"
        elif plan.num_values and _ends(plan.positions)[0] < 0:
            return f"holds position {_ends(plan.positions)[0]}"
        for name, box in (("offset", plan.offset), ("extent", plan.extent)):
            if box is not None and len(box) not in (1, len(param.shape)):  # one: of the flattened parameter
                return f"has an {name} of {len(box)} dimensions for {param.name!r} of {len(param.shape)}"
        self.plans[plan.id] = plan
        return ""

    def _samples(self, samples: Samples) -> str:
        size = SIZES.get(samples.dtype)
        if size is None:
            return f"of step {samples.step} has dtype {samples.dtype!r}; legal are {', '.join(SIZES)}"
        if len(samples.rows) % 16:
            return f"of step {samples.step} has {len(samples.rows)} bytes of rows, no multiple of 16"
        rows = np.frombuffer(samples.rows, dtype="<i4").reshape(-1, 4)
        if len(rows) and not LEAF <= rows[:, 1].min() <= rows[:, 1].max() <= AFTER:
            return f"of step {samples.step} has a row of no known role"
        count = 0
        for _, _, param, id in rows.tolist():
            plan = self.plans.get(id)
            if plan is None:
                return ""  # its table is damaged, which has been said
            if plan.param != param:
                return f"of step {samples.step} has a row of parameter {param} laid out as parameter {plan.param}"
            count += plan.num_values
        if len(samples.values) != count * size:
            return f"of step {samples.step} has {len(samples.values)} bytes of values, not {count * size}"
        return ""

    def _param_values(self, record: ParamValues) -> str:
        for name, numbers in (("counts", record.counts), ("exchanges", record.exchanges or record.params)):
            if len(numbers) != len(record.params):
                return f"has {len(numbers)} {name} for {len(record.params)} parameters"
        if len(record.values) != 4 * sum(record.counts):
            return f"has {len(record.values)} bytes of values, not {4 * sum(record.counts)}"
        return ""

    def _two_rows(self, event: Replica | ParamUpdate) -> str:
        if len(event.counts) != len(event.params) or len(event.values) != 8 * sum(event.counts):
            return f"of step {event.step} has {len(event.values)} bytes of values of {len(event.params)} parameters"
        return ""

    def _norms(self, norms: Norms) -> str:
        if len(norms.rows) % 12 or len(norms.values) * 12 != len(norms.rows) * 8:
            return f"of step {norms.step} has {len(norms.rows)} bytes of rows and {len(norms.values)} of values"
        return ""

    def _amp_unscale(self, event: AmpUnscale) -> str:
        if event.found_inf:
            return ""  # a scale that was halved ever again ends at zero, and nothing is stepped by then
        return _divides(event.step, event.scale)

    def _scale_grads(self, event: ScaleGrads) -> str:
        return _divides(event.step, event.divisor)


def header_problem(header: Header) -> str:
    """What cannot be in a header; empty when it is sound."""
    if header.rank >= header.world_size:
        return f"rank {header.rank} of a world of {header.world_size}"
    return ""


def _divides(step: int, divisor: float) -> str:
    return "" if isfinite(divisor) and divisor else f"of step {step} divides gradients by {divisor:g}"


def _ends(positions: bytes) -> tuple[int, int]:
    found = np.frombuffer(positions, dtype="<i4")
    return int(found.min()), int(found.max())


_CHECKS = {
    Param: Checks._param,
    ParamValues: Checks._param_values,
    Replica: Checks._two_rows,
    ParamUpdate: Checks._two_rows,
    Plan: Checks._plan,
    Samples: Checks._samples,
    Norms: Checks._norms,
    AmpUnscale: Checks._amp_unscale,
    ScaleGrads: Checks._scale_grads,
}
