"""What the steps in columns give as curves: loss, tokens and gradient norm by step, as a report's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gradcheck_dist.diagnosis.finding import Report

MAX_POINTS = 10_000
"""Points of one curve; of a longer one every 2nd, 4th, ... step stays."""


@dataclass
class Series:
    """Curves that grow, with bounded memory: `stride` is the distance of the steps that stay."""

    stride: int = 1
    points: dict[str, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
        """Values of some steps, shape (num_steps,) each; NaN where there is none."""
        kept = (steps % self.stride == 0) & np.isfinite(values)
        found = self.points.setdefault(name, [])
        found += zip(steps[kept].tolist(), values[kept].tolist(), strict=True)
        while len(found) > MAX_POINTS:
            self.stride *= 2
            found[:] = [point for point in found if point[0] % self.stride == 0]

    def add_to(self, report: Report) -> None:
        """Put the curves beside those of the sampled steps."""
        steps, metrics = dict(report.metric_steps), dict(report.metrics)
        for name, found in self.points.items():
            thinned = {step: value for step, value in found if step % self.stride == 0}
            together: Mapping[int, float | None] = thinned | dict(report.series(name))
            if together:
                steps[name] = sorted(together)
                metrics[name] = [together[step] for step in steps[name]]
        report.metrics, report.metric_steps = metrics, steps
        if self.stride > 1:
            report.coverage.notes.append(
                f"of the curves of steps recorded without samples every {self.stride}th step is listed"
            )
