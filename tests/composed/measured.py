"""Runs a composed trainer and tells, beside the verdict, whether its gradients are those of one process."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path

import torch
from composed_workers import Seen
from composer import MAX_NORM, Script
from torch import Tensor, nn

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trainer.launch import launch

EXACT = 1e-3
LEAST = 1e-2
"""Share of the largest gradient below which one may be rounding alone."""


@dataclass(frozen=True)
class Outcome:
    script: Script
    report: Report
    is_right: bool

    def __str__(self) -> str:
        found = [f"{one.code} {one.pattern}" for one in self.report.findings]
        fault = self.script.fault or "no fault"
        return (
            f"{self.script.seed}: {fault}, right {self.is_right}, {self.report.verdict} {found}, {self.script.pieces}"
        )


def outcome(script: Script, folder: Path) -> Outcome:
    folder.mkdir()
    (folder / "train.py").write_text(script.text)
    launch("composed_workers:train", (str(folder),), script.world, timeout_s=60)
    return Outcome(script, diagnose_run(folder / "run"), _is_right(script, folder))


def _is_right(script: Script, folder: Path) -> bool:
    """Whether all gradients that optimizers read are those of one process, on all ranks; behind a clip that acts,
    whether they are clipped so."""
    trainer = runpy.run_path(str(folder / "train.py"), run_name="reference")
    every: list[Seen] = [torch.load(folder / f"seen.{rank}") for rank in range(script.world)]
    for steps in zip(*every, strict=True):
        model: nn.Module = trainer["make_model"]()
        shapes = {name: param.shape for name, param in model.named_parameters()}
        model.load_state_dict({name: _whole([params[name] for _, _, params in steps], shapes[name]) for name in shapes})
        trainer["reference"](model.double(), steps[0][0], script.world).backward()
        wanted = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        if script.clips:
            norm = float(torch.stack([grad.norm() for grad in wanted.values()]).norm())
            wanted = {name: grad * min(1.0, MAX_NORM / norm) for name, grad in wanted.items()}
        largest = max(float(grad.norm()) for grad in wanted.values())
        for name, grad in wanted.items():
            for found in _copies([gradients.get(name) for _, gradients, _ in steps], shapes[name]):
                off = grad if found is None else found.double() - grad
                if float(off.norm()) > EXACT * max(float(grad.norm()), LEAST * largest):
                    return False
    return True


def _copies(parts: list[Tensor | None], shape: torch.Size) -> list[Tensor | None]:
    """The gradient on each rank, or the one that shards make up."""
    there = [part for part in parts if part is not None]
    if len(there) < len(parts) or all(part.shape == shape for part in there):
        return parts
    return [_whole(there, shape)]


def _whole(parts: list[Tensor], shape: torch.Size) -> Tensor:
    return parts[0] if parts[0].shape == shape else torch.cat([part for part in parts if part.numel()])
