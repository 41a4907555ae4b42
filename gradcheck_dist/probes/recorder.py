"""The state of a recording: which step, which contribution, which rows of samples. Knows nothing of single probes."""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable, Container
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from gradcheck_dist.events import (
    AFTER,
    BEFORE,
    LEAF,
    AnyRecord,
    Backward,
    Event,
    ProbeError,
    ProbeStatus,
    Reduce,
    Samples,
    Site,
    StepEnd,
)
from gradcheck_dist.probes.registry import ParamInfo, Registry
from gradcheck_dist.probes.sites import caller_site
from gradcheck_dist.trace.writer import TraceWriter

F = TypeVar("F", bound=Callable[..., Any])
MAX_ERRORS_PER_PROBE = 20
FLUSH_INTERVAL_NS = 50_000_000
"""How long a killed rank's samples may be unwritten, between two backward passes."""


class BackwardPass:
    """A backward pass that is under way: the leaves of one contribution are arriving."""

    __slots__ = (
        "accumulated",
        "armed",
        "microbatch",
        "reduce_ops",
        "seq",
        "site",
        "stage",
        "start_ns",
        "sync",
        "touched",
    )

    def __init__(self, seq: int, microbatch: int, stage: int | None, site: Site | None) -> None:
        self.seq = seq
        self.microbatch = microbatch
        self.stage = stage
        self.site = site
        self.start_ns = time.perf_counter_ns()
        self.sync: bool | None = None
        self.touched: dict[int, ParamInfo] = {}
        self.armed: dict[int, int] = {}  # wrapper id -> seq of its Reduce
        self.accumulated: set[int] = set()  # wrappers with a parameter whose AccumulateGrad ran
        self.reduce_ops: set[str] = set()  # collectives that a user's communication hook called


class Recorder:
    """Collects events and samples of one rank and hands them to the writer.

    A step begins with the first loss or backward after an optimizer step and ends with the next optimizer step, so
    that several optimizers share a step. `steps` says which are recorded; outside of them hooks return at once.
    """

    def __init__(self, writer: TraceWriter, *, steps: Container[int] | None, sample_size: int) -> None:
        self.writer = writer
        self.registry = Registry(writer.append, sample_size)
        self.step = 0
        self.accumulation_step = 0
        self.current: BackwardPass | None = None
        self.suspended = 0
        self.in_pipeline = False
        self.in_loss = False
        self.pipeline_site: Site | None = None
        self.discovery: Any = None  # set by the autograd probe
        self.ddp_states: dict[int, Any] = {}  # filled by the ddp probe
        self.armed: set[int] = set()  # wrappers whose next backward reduces
        self.probe_ns = 0
        self._steps = steps
        self.recording = steps is None or 0 in steps
        self.end: int | None = getattr(steps, "end", None)
        if isinstance(steps, range):
            self.end = max(steps, default=-1) + 1
        self.finished: Callable[[], None] | None = None  # called once, when the last step to record is over
        self._stepped = False
        self._seq = 0
        self._rows = array("i")
        self._values: list[Tensor] = []
        self._flushed_ns = 0
        self._errors: dict[str, int] = {}
        self._step_start_ns = time.perf_counter_ns()

    # ---- time

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def ensure_step(self) -> None:
        """Called by whatever belongs to a step: opens the next one if the last has ended."""
        if self._stepped:
            self._stepped = False
            self.step += 1
            self.accumulation_step = 0
            self.recording = self._steps is None or self.step in self._steps
            self.probe_ns = 0
            self._step_start_ns = time.perf_counter_ns()
            if self.end is not None and self.step >= self.end and self.finished is not None:
                finished, self.finished = self.finished, None
                finished()

    def end_step(self) -> None:
        """Called after an optimizer step."""
        if self.recording:
            duration_ns = time.perf_counter_ns() - self._step_start_ns
            self.flush_samples()
            self.emit(StepEnd, duration_s=duration_ns / 1e9, probe_s=self.probe_ns / 1e9)
            self.writer.flush()
        self._stepped = True

    def end_step_if_open(self) -> None:
        """A step that was skipped (a GradScaler found an overflow) ends here all the same."""
        if not self._stepped:
            self.end_step()

    # ---- events

    def emit(self, kind: Callable[..., Event], *, seq: int | None = None, **fields: Any) -> None:
        """Append an event. Fields may be 0-d tensors: on CPU they are read here."""
        for name, value in fields.items():
            if isinstance(value, Tensor):
                fields[name] = value.item()
        event = kind(seq=self.next_seq() if seq is None else seq, t_ns=time.time_ns(), step=self.step, **fields)
        self.writer.append(cast(AnyRecord, event))

    def status(self, probe: str, active: bool, reason: str = "") -> None:
        self.emit(ProbeStatus, probe=probe, active=active, reason=reason)

    def failed(self, probe: str, error: BaseException) -> None:
        """An error inside a probe: counted and recorded, never raised into training."""
        count = self._errors[probe] = self._errors.get(probe, 0) + 1
        if count <= MAX_ERRORS_PER_PROBE:
            self.emit(ProbeError, probe=probe, message=f"{type(error).__name__}: {error}"[:500], count=count)

    # ---- samples

    def sample(self, seq: int, role: int, info: ParamInfo, tensor: Tensor, like: Tensor | None = None) -> bool:
        """Keep the sampled elements of a gradient. Nothing is copied to the host here. False: layout not known.

        `like`: a DTensor whose local part `tensor` stands for.
        """
        registry = self.registry
        plan = registry.plan(info, tensor) if like is None else registry.local_plan(info, tensor, like)
        if plan is None:
            return False
        plan_id, local, indices = plan
        self._rows.extend((seq, role, info.id, plan_id))
        self._values.append(local.detach().take(indices))
        return True

    def sample_grads(self, seq: int, role: int, infos: list[ParamInfo]) -> None:
        """Sample `.grad` of parameters that have one."""
        for info in infos:
            grad = info.param.grad
            if grad is not None and grad.layout is torch.strided:
                self.sample(seq, role, info, grad)

    def flush_samples(self) -> None:
        """Hand the rows to the writer, one record a dtype; on an accelerator this is the one copy to the host."""
        self._flushed_ns = time.perf_counter_ns()
        if not self._values:
            return
        rows, values = self._rows, self._values
        self._rows, self._values = array("i"), []
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, value in enumerate(values):
            by_dtype.setdefault(value.dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            flat = torch.cat([values[index] for index in indices]).cpu()
            chosen = rows
            if len(by_dtype) > 1:
                chosen = array("i")
                for index in indices:
                    chosen.extend(rows[4 * index : 4 * index + 4])
            self.writer.append(
                Samples(
                    step=self.step,
                    rows=chosen.tobytes(),
                    dtype=str(dtype).removeprefix("torch."),
                    values=flat.view(torch.uint8).numpy().tobytes(),
                )
            )

    # ---- backward

    def begin_backward(self, *, microbatch: int = 0, stage: int | None = None) -> BackwardPass | None:
        """Open a contribution; None when one is open already (nested backward) or nothing is recorded."""
        if self.current is not None or self.suspended:
            return None
        self.ensure_step()
        if not self.recording:
            return None
        self.current = BackwardPass(self.next_seq(), microbatch, stage, caller_site())
        return self.current

    def leaf(self, info: ParamInfo, grad: Tensor) -> None:
        """A contribution's own gradient arrived at a parameter."""
        current = self.current
        if current is None:
            return
        current.touched[info.id] = info
        self.sample(current.seq, LEAF, info, grad)

    def end_backward(self, current: BackwardPass, *, sample_after: bool = True) -> None:
        """Close a contribution: emit it, its reductions, and samples of what it left in `.grad`."""
        self.current = None
        touched = list(current.touched.values())
        if not touched:
            return
        reduced = set(current.armed)
        self.emit(
            Backward,
            seq=current.seq,
            site=current.site,
            accumulation_step=self.accumulation_step,
            microbatch=current.microbatch,
            stage=current.stage,
            sync=current.sync,
            params=self.registry.param_set(touched),
            duration_ns=time.perf_counter_ns() - current.start_ns,
        )
        if sample_after:
            plain = [info for info in touched if info.managed_by != "fsdp" and info.wrapper not in reduced]
            self.sample_grads(current.seq, AFTER, plain)
        if time.perf_counter_ns() - self._flushed_ns > FLUSH_INTERVAL_NS:
            self.flush_samples()
        if not self.in_pipeline:
            self.accumulation_step += 1

    def emit_reduce(self, seq: int, infos: list[ParamInfo], **fields: Any) -> None:
        current = self.current
        self.emit(
            Reduce,
            seq=seq,
            params=self.registry.param_set(infos),
            accumulation_step=self.accumulation_step,
            microbatch=current.microbatch if current else 0,
            **{"site": current.site if current else caller_site(), **fields},
        )


def guarded(probe: str) -> Callable[[F], F]:
    """Decorator for probe code `f(recorder, ...)`: an error is recorded and swallowed, the time is counted."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter_ns()
            try:
                return function(recorder, *args, **kwargs)
            except Exception as error:
                recorder.failed(probe, error)
                return None
            finally:
                recorder.probe_ns += time.perf_counter_ns() - start

        return cast(F, wrapper)

    return decorate


__all__ = ["AFTER", "BEFORE", "LEAF", "BackwardPass", "Recorder", "guarded"]
