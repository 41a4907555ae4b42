"""The state of a recording: which step, which contribution, which rows of samples. Knows nothing of single probes."""

from __future__ import annotations

import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Sequence
from types import NoneType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import (
    AFTER,
    BEFORE,
    LEAF,
    THREADS,
    TRAIN_AT_ONCE,
    AnyRecord,
    Backward,
    Event,
    ProbeError,
    ProbeStatus,
    Reduce,
    RunEnd,
    Samples,
    Site,
    StepEnd,
    Unrecorded,
)
from gradcheck_dist.probes.parameters.places import Places
from gradcheck_dist.probes.parameters.registry import ParamInfo, Registry
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.backward_pass import BackwardPass
from gradcheck_dist.probes.recording.branches import CallPlaces
from gradcheck_dist.probes.recording.captured import Captures
from gradcheck_dist.probes.recording.deferred import Deferred, missing, numbers_of, own_number, read, with_later
from gradcheck_dist.probes.recording.guard import guarded, kept_away
from gradcheck_dist.probes.recording.pass_counts import PassCounts
from gradcheck_dist.probes.recording.read_gradients import ReadGradients, sample_left
from gradcheck_dist.probes.recording.samples import NOTHING, HostCopies, Sampler
from gradcheck_dist.probes.recording.sites import caller_site
from gradcheck_dist.probes.recording.threads import Threads
from gradcheck_dist.probes.recording.unsampled import UnsampledSteps
from gradcheck_dist.steps import end_of
from gradcheck_dist.trace.writer import TraceWriter

MAX_ERRORS_PER_PROBE = 20
ROW_BYTES = 16
FLUSH_INTERVAL_NS = 50_000_000
"""How long a killed rank's samples may be unwritten, between two backward passes."""
PLAIN = frozenset({int, float, bool, str, NoneType, tuple, list, dict, Site})
"""Types of fields that hold no number of a tensor."""
ADDED_FLAG = "grad_added_to_main_grad"
"""Set on a parameter whose backward adds to a buffer by itself: what autograd hands over is a placeholder."""


class Recorder(Sampler):
    """Collects events and samples of one rank and hands them to the writer.

    A step begins with the first loss or backward after an optimizer step and ends with the next optimizer step, so
    that several optimizers share a step. `steps` says which are recorded; outside of them hooks return at once,
    or, with `every_step`, record events without samples, in columns.
    """

    def __init__(
        self, writer: TraceWriter, *, steps: Container[int] | None, sample_size: int, every_step: bool = False
    ) -> None:
        super().__init__(Registry(writer.append, sample_size))
        self.writer = writer
        self.step = 0
        self.accumulation_step = 0
        self.current: BackwardPass | None = None
        self.meant: dict[str, bool] = {}  # what --verify shall not accuse, and whether it was met
        self.suspended = 0
        self.in_pipeline = False
        self.in_loss = False
        self.in_norm = False
        self.closure_passes: int | None = None  # backward passes inside a running optimizer.step(closure)
        self.loss_seen_in: int | None = None  # seq of the last pass in which a loss received its gradient
        self.pipeline_site: Site | None = None
        self.impulses: Any = None  # set in impulse mode: probes/backward/exact.py
        # By tensor, and not as an attribute of one, which would be saved with it.
        self.losses: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.label_hashes: dict[int, int | Tensor | None] = {}  # by loss id, in impulse mode
        self.covered: dict[int, int] = {}  # by loss id: the declared loss that was computed from it, in this step
        self.labels: dict[int, dict[str, Any]] = {}  # by loss id, in this step: num_labels and label_hash
        self.calls = CallPlaces()
        self.discovery: Any = None  # set by the autograd probe
        self.read = ReadGradients()
        self.places = Places(self.registry)
        self.fsdp_groups: weakref.WeakSet[Any] = weakref.WeakSet()  # FSDP2's groups of parameters, by the fsdp probe
        self.ddp_states: dict[int, Any] = {}  # filled by the ddp probe
        self.armed: set[int] = set()  # wrappers whose next backward reduces
        self.hooked: dict[int, int] = {}  # by wrapper: parameters with a hook of the user's on what was accumulated
        self.reduced_in = -1  # the last step in which gradients were combined over several ranks
        self.replicas: Any = None  # set by the replicas probe
        self.activation_hooks: Any = None  # set by the activation_hooks probe
        self.exchanges: Any = None  # set by the exchanges probe
        self.gathered: Any = None  # set by the gathered probe
        self.writes: Any = None  # set by the writes probe
        self.ties: Any = None  # set by the ties probe
        self.replaced: Any = None  # set by the replaced probe
        self.stale: Any = None  # set by the stale probe
        self.flats: Any = None  # FSDP1's flat parameters, set by the fsdp1 probe
        self.before_first_pass: list[Callable[[], None]] = []  # of probes that look at what an earlier step left
        self.group_names: Any = None  # set by the collectives probe
        self.between_passes = False  # behind a backward pass, and before the optimizer, its clip and the next pass
        self.own_optimizer: Any = None  # set by the own_optimizer probe, while no optimizer of torch's is in use
        self.clipped: set[int] = set()  # parameters whose norms a clip of this step has shown
        self.probe_ns = self._probe_ns_before = 0
        self._steps = steps
        self.sampling = steps is None or 0 in steps
        self.copies = HostCopies()
        self.unsampled = UnsampledSteps(writer.append, self.copies) if every_step else None
        self.recording = self.sampling or every_step
        # Of the step that a forward pass belongs to that runs now; no properties, which could fail into training.
        self.samples_upcoming, self.records_upcoming = self.sampling, self.recording
        self.end = None if every_step else end_of(steps)
        self.finished: Callable[[], None] | None = None  # called once, when the last step to record is over
        self._stepped = False
        self._abandoned = 0  # evaluations that an optimizer repeated: steps of their own that nobody asked for
        self.without_pass = False  # whether this step began with a reduction or an optimizer
        self.trained = False  # whether a loss or a backward pass was seen at all
        self.num_before = 0  # optimizer steps before that: of a rank without a batch, or to make the optimizer's state
        self.passes = PassCounts()
        self._begun = -1  # the last step in which a backward pass began
        self._seq = 0
        self.num_events = self.num_rows = self.num_norms = 0  # of this step: StepEnd tells, so that a loss shows
        self._flushed_ns = 0
        self.captures = Captures()
        self.threads = Threads()
        self._deferred: Deferred = []
        self._later: deque[tuple[Callable[..., Event], Callable[[], np.ndarray]]] = deque()
        self._errors: dict[str, int] = {}
        self._step_start_ns = time.perf_counter_ns()

    # ---- time

    def next_seq(self, room: int = 0) -> int:
        """The number of an event. `room`: numbers left free before it, for what will turn out to come first."""
        self._seq += 1 + room
        return self._seq

    @property
    def upcoming_step(self) -> int:
        """The step that a forward pass belongs to that runs now."""
        return self.step + self._stepped

    @property
    def records_next(self) -> bool:
        """Whether the step behind this one, which is not recorded, is."""
        return not self.recording and self._is_asked(self.step + 1 - self._abandoned)

    def _is_asked(self, step: int) -> bool:
        return self._steps is None or step in self._steps

    @property
    def may_begin_empty(self) -> bool:
        """Whether a step has ended and gradients were emptied since."""
        return self._stepped and self.read.num_emptied > 0

    @property
    def last_seq(self) -> int:
        """The number of the latest event."""
        return self._seq

    def ensure_step(self, *, may_finish: bool = True) -> None:
        """Called by whatever belongs to a step: opens the next one if the last has ended. `may_finish`: probes may be
        taken away now; inside of an optimizer's hooks torch goes through the very dict that they would leave."""
        self.trained = True
        if self.own_optimizer is not None:
            self.own_optimizer.look()
        if self._stepped:
            if self.replaced is not None:
                self.replaced.settle()
            self._stepped = False
            if self._kept or self._on_host or self._later:
                self.flush_samples()  # of what came behind the optimizer
            self._end_unsampled()
            self.passes.step_over(self.step - self._abandoned, self.recording)
            self.step += 1
            self.num_events = self.num_rows = self.num_norms = 0
            self.accumulation_step = 0
            self.without_pass = False
            self.clipped.clear()
            self.covered.clear()
            self.labels.clear()
            self.places.step_begins()
            self.threads.step_begins()
            asked = self.step - self._abandoned
            self.sampling = self._is_asked(asked)
            self.recording = self.sampling or self.unsampled is not None
            self.samples_upcoming, self.records_upcoming = self.sampling, self.recording
            if self.sampling:
                self.passes.tell(self.emit)
                if self.registry.rotates:
                    self.registry.next_round()
            self._probe_ns_before = self.probe_ns  # not emptied: guarded code that began this step adds to what was
            self._step_start_ns = time.perf_counter_ns()
            if may_finish and self.end is not None and asked >= self.end and self.finished is not None:
                finished, self.finished = self.finished, None
                finished()

    def begins_empty(self, infos: Sequence[ParamInfo]) -> None:
        """Called when gradients are reduced or read: those that were emptied since an optimizer read them belong to
        the next step, though no pass of this rank has begun it (it has no batch, and takes part with zeros)."""
        if infos and self.may_begin_empty and self.read.are_emptied([info.id for info in infos]):
            self.ensure_step(may_finish=False)
            self.without_pass = True

    def end_step(self) -> None:
        """Called after an optimizer step."""
        self.between_passes = False
        try:
            if self.recording:
                self._tell_end()
        finally:  # whatever fails, this rank's steps keep the numbers of the others'
            self._stepped = True
            self.samples_upcoming = self._is_asked(self.step + 1 - self._abandoned)
            self.records_upcoming = self.samples_upcoming or self.unsampled is not None

    def _tell_end(self) -> None:
        duration_ns = time.perf_counter_ns() - self._step_start_ns
        if self.writes is not None:
            self.writes.tell()
        if self.group_names is not None:
            self.group_names.tell()
        if self.gathered is not None:
            self.gathered.tell(self)
        if self.exchanges is not None:
            self.exchanges.tell()
        for probe in (self.ties, self.replaced):
            if probe is not None and self.sampling:
                probe.tell()
        if self.threads.at_once and self.sampling:
            self.status(THREADS, False, TRAIN_AT_ONCE)
        self.flush_samples()
        told = {"num_events": self.num_events + 1, "num_rows": self.num_rows, "num_norms": self.num_norms,
                "num_passes": self.passes.begun, "num_before": self.num_before}  # fmt: skip
        self.emit(StepEnd, duration_s=duration_ns / 1e9, probe_s=(self.probe_ns - self._probe_ns_before) / 1e9,
                  **(told if self.sampling else {}))  # fmt: skip
        if self.sampling:
            self.writer.flush()

    def abandon_evaluation(self) -> None:
        """An optimizer that evaluates its closure more than once (LBFGS) empties the gradients in between: what came
        before is a step of its own, which never reached the optimizer."""
        if self.closure_passes:
            self.closure_passes = 0
            self._abandoned += 1
            self.end_step()
            self.ensure_step()

    def end_step_if_open(self) -> None:
        """A step that was skipped (a GradScaler found an overflow) ends here all the same."""
        if not self._stepped:
            self.end_step()

    # ---- events

    def emit(self, kind: Callable[..., Event], *, seq: int | None = None, **fields: Any) -> None:
        """Append an event that happens now, unless `t_ns` says when. Fields may be 0-d tensors: on CPU they are read
        here, on an accelerator later."""
        fields["seq"] = self.next_seq() if seq is None else seq
        fields.setdefault("t_ns", time.time_ns())
        current = self.current
        if current is not None and current.hooks is not None and current.hooks.takes(kind, fields):
            return
        on_device: dict[str, Tensor] = {}
        if not PLAIN.issuperset(map(type, fields.values())):
            kind = with_later(kind, fields)
            for name, value in fields.items():
                if isinstance(value, Tensor):
                    if is_host(value):
                        fields[name] = value.item()
                    else:
                        on_device[name] = own_number(value)
                        self.streams.note(value)
        self.num_events += 1
        if on_device:
            rest = {name: value for name, value in fields.items() if name not in on_device}
            self._deferred.append((functools.partial(kind, step=self.step, **rest), on_device))
        else:
            event = kind(step=self.step, **fields)
            if isinstance(event, StepEnd) and self.sampling:  # behind all that an accelerator still has of the step
                self.copies.bring(NOTHING, lambda _: self.writer.append(event))
            elif self.sampling or isinstance(event, ProbeStatus | ProbeError | RunEnd | Unrecorded):
                self.writer.append(cast(AnyRecord, event))
            elif self.unsampled is not None:
                self.unsampled.add(event)

    def emit_values(self, kind: Callable[..., Event], values: Tensor, microbatch: int, **fields: Any) -> None:
        """Append an event of a backward pass of which `values`, all but those known, may lie on a device."""
        event = self._in_pass(kind, microbatch, fields)

        def arrived(host: Tensor) -> None:
            self.writer.append(cast(AnyRecord, event(values=host.numpy().tobytes())))

        self.copies.bring(values, arrived)

    def emit_later(
        self, kind: Callable[..., Event], make: Callable[[], np.ndarray], microbatch: int, **fields: Any
    ) -> None:
        """The same, of values that are made when samples are written: what runs for many one behind the other finds its
        code in the cache."""
        self._later.append((self._in_pass(kind, microbatch, fields), make))

    def _in_pass(self, kind: Callable[..., Event], microbatch: int, fields: dict[str, Any]) -> Callable[..., Event]:
        fields |= {"step": self.step, "accumulation_step": self.accumulation_step, "microbatch": microbatch}
        self.num_events += 1
        return functools.partial(kind, seq=self.next_seq(), t_ns=time.time_ns(), **fields)

    def status(self, probe: str, active: bool, reason: str = "") -> None:
        self.emit(ProbeStatus, probe=probe, active=active, reason=reason)

    def failed(self, probe: str, error: BaseException) -> None:
        """An error inside a probe: counted and recorded, never raised into training."""
        count = self._errors[probe] = self._errors.get(probe, 0) + 1
        if count <= MAX_ERRORS_PER_PROBE:
            kind = "" if isinstance(error, GradcheckError) else f"{type(error).__name__}: "
            self.emit(ProbeError, probe=probe, message=f"{kind}{error}"[:500], count=count)

    # ---- samples

    def flush_samples(self) -> None:
        """Hand the rows to the writer, one record a dtype and device; on an accelerator this is the one copy to the
        host. What fails (no memory is left there) is told, and keeps no step from its end."""
        try:
            self._flush_samples()
        except Exception as error:
            self.failed("samples", error)

    def _flush_samples(self) -> None:
        self._flushed_ns = time.perf_counter_ns()
        if self.current is not None:  # an optimizer that steps inside backward
            self.keep_leaves(self.current.seq, self.current.leaves)
        while self._later:  # one by one: if one fails, the rest come with the next flush
            event, make = self._later.popleft()
            self.writer.append(cast(AnyRecord, event(values=make().tobytes())))
        for written in self.drain_host():
            self.num_rows += len(written[1]) // ROW_BYTES
            self.copies.bring(NOTHING, functools.partial(self._write_samples, self.step, *written))
        for dtype, rows, values in self.drain():
            self.num_rows += len(rows) // ROW_BYTES
            self.copies.bring(values, functools.partial(self._write_samples, self.step, dtype, rows, None))
        if self._deferred and self.sampling:
            deferred, self._deferred = self._deferred, []
            self.streams.join(missing(deferred))
            self.copies.bring_together(numbers_of(deferred), functools.partial(self._write_deferred, deferred))
        self.streams.clear()
        self.copies.poll()

    def finish(self) -> None:
        """Write all that is left, waiting for what is still on its way."""
        if self._stepped:
            self.passes.step_over(self.step - self._abandoned, self.recording)
            if self.replaced is not None:
                self.replaced.settle()
        self.passes.tell(self.emit)
        self.flush_samples()
        self._end_unsampled()
        self.copies.poll(wait=True)
        if self.unsampled is not None:
            self.unsampled.flush()

    def release(self) -> None:
        """Recording is over: let go of the model. Functions that the user imported while they were replaced keep this
        recorder alive, and a model that the user drops is to be freed all the same."""
        self.registry = Registry(self.writer.append, 0)
        self.places, self.read = Places(self.registry), ReadGradients()
        self.current = self.discovery = self.replicas = self.writes = self.ties = self.replaced = None
        self._bundles, self._arrivals, self.ddp_states = {}, {}, {}

    def _end_unsampled(self) -> None:
        if self.unsampled is not None and not self.sampling:
            deferred, self._deferred = self._deferred, []
            self.streams.join(missing(deferred))
            self.streams.clear()
            self.unsampled.end_step(self.step, deferred)

    def _write_samples(self, step: int, dtype: str, rows: bytes, kept: bytes | None, host: Tensor) -> None:
        values = host.numpy().tobytes() if kept is None else kept
        self.writer.append(Samples(step=step, rows=rows, dtype=dtype, values=values))

    def _write_deferred(self, deferred: Deferred, host: Tensor) -> None:
        for event in read(deferred, host):
            self.writer.append(cast(AnyRecord, event))

    # ---- backward

    def begin_backward(self, *, microbatch: int = 0, stage: int | None = None) -> BackwardPass | None:
        """Open a contribution; None when one is open already (nested backward) or nothing is recorded."""
        if self.current is not None and not self.suspended:
            self.threads.beside(self.current.thread)
        if self.current is not None or self.suspended:
            return None
        self.ensure_step()
        if not self.recording:
            if self.own_optimizer is not None:
                self.own_optimizer.idles()
            return None
        if self._begun != self.step:
            before = self.read.recall(self.step - 1, self.registry.of_id)
            for look in self.before_first_pass:
                look()
        self.current = BackwardPass(self.next_seq(), microbatch, stage, caller_site())
        self.between_passes = False
        self.places.pass_changes()
        if self._begun != self.step:
            self._begun = self.step
            sample_left(self, self.read, self.current.seq, self.step - 1, before)
        return self.current

    def loss_arrived(self, current: BackwardPass, loss_id: int) -> None:
        """A loss received its gradient, before any parameter did."""
        current.arrived.add(loss_id)
        if self.impulses is not None:
            found = self.label_hashes.pop(loss_id, None)
            current.label_hash = int(found) if found is not None else None

    def leaf(self, current: BackwardPass, info: ParamInfo, grad: Tensor) -> None:
        """A contribution's own gradient arrived at a parameter."""
        touched = current.touched
        again = info.id in touched  # in a pass inside of this one (reentrant checkpoints)
        touched[info.id] = info
        if not (self.sampling and info.active) or info.param.__dict__.get(ADDED_FLAG):
            return
        if info.id in current.folded:
            folded, before = current.folded[info.id]
            self.keep(current.seq, LEAF, folded, grad.detach().take(folded.indices) - before)
            return
        plan = info.plain
        plain = type(grad) is Tensor and grad.is_cpu and grad.layout is torch.strided
        if plan is not None and plain and not (again or grad.requires_grad):
            slot = plan.slot
            if slot is None or slot.dtype is not grad.dtype:
                slot = plan.new_slot(grad.dtype)
            torch.take(grad, plan.indices, out=slot)
            current.leaves.append(plan)
        elif info.id not in current.reduced_inside:  # else what arrives is no contribution any more
            if info.numel != info.param.numel() == grad.numel() and not info.plans:
                self.registry.is_whole(info)
            self.sample(current.seq, LEAF, info, grad, info.arrives_as)

    def end_backward(self, current: BackwardPass, *, sample_after: bool = True) -> None:
        """Close a contribution: emit it, its reductions, and samples of what it left in `.grad`."""
        self.current = None
        for kind, fields in current.hooks.release(self) if current.hooks is not None else ():
            self.emit(kind, **fields)
        self.places.pass_changes()
        for info, grad in current.not_brought():
            self.leaf(current, info, grad)
        if not current.touched:
            return
        self.threads.pass_over(current.touched)
        self.keep_leaves(current.seq, current.leaves)
        if current.forward is not None and self.discovery is not None:
            self.discovery.forwards.reached_parameters(current.forward, self.accumulation_step)
        self.emit(Backward, accumulation_step=self.accumulation_step, **current.told(self.registry))
        if sample_after:
            self.sample_grads(current.seq, AFTER, current.not_reduced())
        if self._stepped or time.perf_counter_ns() - self._flushed_ns > FLUSH_INTERVAL_NS:
            self.flush_samples()
        if self.closure_passes is not None:
            self.closure_passes += 1
        if not self.in_pipeline:
            self.accumulation_step += 1
            self.between_passes = self.sampling

    def emit_reduce(self, seq: int, infos: list[ParamInfo], **fields: Any) -> None:
        current = self.current
        if len(fields.get("group", ())) > 1 or len(fields.get("replicate_group", ())) > 1:
            self.reduced_in = self.step
            for info in infos:
                info.reduced_in = self.step
        self.emit(
            Reduce,
            seq=seq,
            params=self.registry.param_set(infos),
            accumulation_step=self.accumulation_step,
            microbatch=current.microbatch if current else 0,
            scheduled=self.in_pipeline,
            **{"site": current.site if current else caller_site(), **fields},
        )


__all__ = ["AFTER", "BEFORE", "LEAF", "BackwardPass", "Recorder", "guarded", "kept_away"]
