"""Putting the probes in place and taking them away."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import get_worker_info

from gradcheck_dist.axes import Axes
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import SCHEMA_VERSION, Header, RunEnd
from gradcheck_dist.objectives import check_objective
from gradcheck_dist.probes.backward.exact import EXACT_BUDGET_BYTES, SAMPLE_SIZE, WHAT_IT_HIDES, Impulses
from gradcheck_dist.probes.marked import mark
from gradcheck_dist.probes.options import check_count, check_names, mesh_degrees, rank_sets
from gradcheck_dist.probes.recording.dynamo import keep_out, known_alike
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.stats.sampling import LEAST, sample_size_of
from gradcheck_dist.steps import chosen_steps, first_of
from gradcheck_dist.trace.run import join_run_dir, next_restart, note_restart, note_unrecorded, trace_files
from gradcheck_dist.trace.writer import DeferredTraceWriter, TraceWriter, trace_path

_IN_ORDER = (
    "backward.autograd",
    "activations.activation_hooks",
    "losses.loss",
    "losses.tokens",
    "losses.log_probs",
    "losses.label_functions",
    "losses.differences",
    "losses.unseen",
    "losses.handed_on",
    "backward.fused",
    "losses.compiled",
    "optimizers.optimizer",
    "optimizers.gradient_norms",
    "optimizers.writes",
    "optimizers.own_optimizer",
    "optimizers.ties",
    "reductions.stale",
    "optimizers.replaced",
    "optimizers.amp",
    "reductions.collectives",
    "reductions.ddp",
    "reductions.fsdp",
    "reductions.fsdp1",
    "activations.pipeline",
    "activations.stage_edges",
    "reductions.redistribute",
    "reductions.replicas",
    "reductions.copies",
    "reductions.unreduced",
    "reductions.gathered",
    "activations.exchanges",
    "backward.recompute",
)
MODULES = {path.rpartition(".")[2]: f"gradcheck_dist.probes.{path}" for path in _IN_ORDER}
PROBES = tuple(MODULES)
RUN_DIR_VARIABLE = "GRADCHECK_RUN_DIR"

_session: Session | None = None


class Session:
    """An attached recording. A context manager: leaving it detaches. `from_outside`: `gradcheck run` attached it."""

    def __init__(self, run_dir: Path, recorder: Recorder, patches: Patches, from_outside: bool = False) -> None:
        self.run_dir = run_dir
        self.from_outside = from_outside
        self.recorder = recorder
        self._patches = patches
        self._open = True

    def detach(self) -> None:
        """Take all probes away and close the trace. May be called more than once."""
        global _session
        if not self._open:
            return
        self._open = False
        if self.recorder.own_optimizer is not None:
            self.recorder.own_optimizer.look()  # which rests when patches are taken back
        originals_come(self.recorder, self._patches)
        self._patches.restore()
        self.recorder.suspended += 1  # functions that the user imported while they were replaced pass everything on
        if not self.recorder.writer.is_inherited:  # a forked child neither writes nor waits for its parent's device
            self.recorder.finish()
            self.recorder.emit(RunEnd, reason="detached")
            self.recorder.writer.close()
        self.recorder.release()
        atexit.unregister(self.detach)
        if _session is self:
            _session = None

    def stop(self) -> None:
        """All steps were recorded: detach, but for the one probe that may have to look on."""
        replicas = self.recorder.replicas
        if replicas is None or not replicas.may_come_later():
            self.detach()
            return
        originals_come(self.recorder, self._patches)
        self._patches.restore()
        self.recorder.finish()
        self.recorder.writer.flush()
        replicas.look_on(self._patches)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


@guarded("dynamo")
def originals_come(_: Recorder, patches: Patches) -> None:
    known_alike(patches.replaced_functions())


def attach(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    objective: str | None = None,
    axes: Axes | Mapping[str, int] | None = None,
    same_data: Sequence[Sequence[int]] | None = None,
    steps: Container[int] | str | None = None,
    sample_size: int | None = None,
    only: Sequence[str] = PROBES,
    restart: int = 0,
    deferred: bool = False,
    verify: bool = False,
    meant: Sequence[str] = (),
    exact: bool = False,
    every_step: bool = False,
) -> Session:
    """Record this process's training from here on. Call it before the model is wrapped for the fullest picture.

    Args:
        run_dir: folder of the run, shared by all ranks; default $GRADCHECK_RUN_DIR, else runs/<time>-<pid>.
        objective: what one step's gradient is meant to be, e.g. "global-token-mean"; None infers it when judging.
        axes: mesh degrees; None infers them when judging.
        same_data: sets of ranks that evaluate the same tokens (tensor parallel ones); None infers them when judging.
        steps: which optimizer steps to record (0-based): a range, a collection, or text as `--steps` takes it; None
            records all. Behind the last one the probes take themselves away.
        sample_size: sampled elements a parameter, 8 or more; None takes 96, and more in a world of more than 24 ranks.
        only: names of the probes to put in place.
        restart: how often this rank was restarted; each restart writes a file of its own.
        deferred: open the trace with the first loss or backward pass, when the rank is known for certain. What
            prevents it is then told on stderr and not raised.
        verify: check the backward of every module in the first recorded step by central differences. It takes some
            dozens of forward passes, before the optimizer steps, and leaves training bit for bit as it was.
        meant: names of modules and torch.autograd.Functions whose backward differs from the derivative on purpose;
            what `verify` finds there is a remark.
        exact: read weights to the last digit: the gradients of the first recorded step are replaced by codes, and the
            process ends before the optimizer applies them.
        every_step: record the other steps too, without samples: tokens, weights at the losses and what scales, some 50
            bytes a contribution.

    Raises:
        GradcheckError: an option is wrong (E302, E401, E712, and E101 and E102 for axes); the run folder holds another
            run or cannot be written; already attached elsewhere (E301). Below `gradcheck run`, whose session stays the
            only one, nothing is raised.
    """
    global _session
    if _session is not None:
        if run_dir is None or Path(run_dir) == _session.run_dir:
            return _session
        if _session.from_outside:
            if os.environ.get("LOCAL_RANK", "0") == "0":  # once a machine
                _tell(f"attach() into {run_dir} is left out: `gradcheck run` records, with its own options")
            return _session
        raise GradcheckError(
            f"already recording into {_session.run_dir}, asked to record into {run_dir}. Call detach() on the first "
            "session before attaching again.",
            code="E301",
        )
    steps, degrees, sets = chosen_steps(steps), mesh_degrees(axes), rank_sets(same_data)
    only, meant = check_names("only", only, PROBES), check_names("meant", meant)
    if sample_size is None:
        sample_size = sample_size_of(_world_size_so_far())
    sample_size = check_count("sample_size", sample_size, least=LEAST)
    if objective is not None:
        check_objective(objective)
    given = run_dir or os.environ.get(RUN_DIR_VARIABLE)
    folder = Path(given) if given else Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

    if exact:
        sample_size = max(sample_size, SAMPLE_SIZE)

    def locate() -> tuple[Path, Header]:
        if get_worker_info() is not None:
            raise _DataWorkerError
        rank, world_size = _rank_and_world_size()
        number = _join(folder, rank, world_size, restart)
        return trace_path(folder, rank, number), Header(
            schema_version=SCHEMA_VERSION,
            tool_version=_version(),
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            started_unix_s=time.time(),
            torch_version=str(torch.__version__),
            device_type="cuda" if torch.cuda.is_available() else "cpu",
            command=tuple(sys.argv),
            objective=objective,
            axes=degrees,
            sample_size=sample_size,
            columns=every_step,
            agent_pid=_agent_pid(),
            same_data=sets,
        )

    writer: TraceWriter = DeferredTraceWriter(locate, _not_recording) if deferred else _open_trace(locate)
    recorder = Recorder(writer, steps=steps, sample_size=sample_size, every_step=every_step)
    if exact:
        recorder.impulses = Impulses(first_of(steps))
        recorder.registry.budget_bytes = EXACT_BUDGET_BYTES
        recorder.status("exact", False, WHAT_IT_HIDES)
    patches = Patches()
    for name in only:
        install(name, recorder, patches)
    if verify:
        recorder.meant = dict.fromkeys(meant, False)
        install("verify", recorder, patches, module="gradcheck_dist.verify.run")
    patches.when_imported("torch._dynamo.eval_frame", lambda _: keep_out())
    writer.flush()
    _session = Session(folder, recorder, patches, from_outside=deferred)
    atexit.register(_session.detach)
    recorder.finished = _session.stop
    return _session


def _open_trace(locate: Callable[[], tuple[Path, Header]]) -> TraceWriter:
    path, header = locate()
    try:
        return TraceWriter(path, header)
    except OSError as error:
        raise GradcheckError(
            f"cannot write a trace into {path.parent}: {error.strerror or error}. Name a folder that you may write to.",
            code="E512",
        ) from error


class _DataWorkerError(OSError):
    """A process that prepares data, with gradients or without (hard examples, augmentation): no rank of the training,
    whose file it would take."""


def _not_recording(error: Exception) -> None:
    if not isinstance(error, _DataWorkerError):
        _tell(f"not recording: {error}")


def _tell(words: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"gradcheck: {words}\n")


def install(name: str, recorder: Recorder, patches: Patches, *, module: str | None = None) -> None:
    """Put one probe in place; one that cannot hook says so in the trace and leaves the others alone."""
    try:
        import_module(module or MODULES[name]).install(recorder, patches)
    except Exception as error:
        recorder.status(name, False, f"{type(error).__name__}: {error} (torch {torch.__version__})")
    else:
        recorder.status(name, True)


def mark_loss(
    loss: Tensor,
    num_tokens: int | Tensor,
    *,
    term: str = "main",
    labels: Tensor | None = None,
    coefficient: float | None = None,
) -> Tensor:
    """Declare a loss that no wrapper sees: the sum of token losses over `num_tokens` tokens, before it is divided.

    What is given must be what the backward root is computed from (`total = mark_loss(losses.sum(), n); (total /
    n).backward()`): a sum beside it tells nothing. Losses that it is computed from (the token losses that a weighted
    sum adds up) are none of their own. The result of F.cross_entropy may be declared too: it is then no part of the
    main loss but of `term`.

    Args:
        num_tokens: a tensor is not read here where that would wait for an accelerator.
        term: "main", or the name of an auxiliary term (load balance, router z-loss, multi-token prediction).
        labels: what tells the ranks that evaluate the same tokens.
        coefficient: what the loss is multiplied by in the objective. Without it an auxiliary term's scale is only
            compared between contributions, and a number before the main loss in a sum of several may divide as well.

    Returns the loss unchanged. Without an attached session it does nothing. Wrong arguments raise nothing: the loss is
    not marked, and the verdict tells why (E303).
    """
    if _session is not None:
        mark(_session.recorder, loss, num_tokens, term, labels, coefficient)
    return loss


def availability() -> dict[str, str]:
    """For each probe "ok", or why it cannot hook into this torch. Tried on a writer that writes nowhere."""
    found: dict[str, str] = {}
    for module in ("torch.distributed.pipelining", "torch.distributed.fsdp"):
        try:
            import_module(module)
        except ImportError as error:
            found[module] = str(error)
    writer = TraceWriter(Path(os.devnull), Header(schema_version=SCHEMA_VERSION, tool_version="", rank=0,
                         world_size=1, pid=os.getpid(), started_unix_s=0.0), background=False)  # fmt: skip
    for name in PROBES:
        recorder, patches = Recorder(writer, steps=None, sample_size=1), Patches()
        try:
            import_module(MODULES["autograd"]).install(recorder, patches)
            if name != "autograd":
                import_module(MODULES[name]).install(recorder, patches)
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        finally:
            patches.restore()
    writer.close()
    return found


def _world_size_so_far() -> int:
    """What is known before the first pass: the program may set the environment up until then."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if given.isdecimal() else 1


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        names = ("RANK", "WORLD_SIZE")
        given = [f"{name} is {os.environ[name]!r}" if name in os.environ else f"{name} is not set" for name in names]
        raise GradcheckError(
            f"{' and '.join(given)} in the environment; legal values are whole numbers, RANK from 0 up to, not "
            "including, WORLD_SIZE (1 if it is not set). Unset both where one process trains alone, else start the "
            "ranks with torchrun.",
            code="E304",
        )
    return int(rank), int(world_size)


def _join(folder: Path, rank: int, world_size: int, restart: int) -> int:
    """Whoever finds no manifest in the run folder makes it. A rank never overwrites its own earlier trace. Returns the
    number of the restart, which torchrun does not count where members come or go."""
    earlier = trace_files(folder).get(rank)
    if earlier is not None and (not restart or trace_path(folder, rank, restart).exists()):
        again = next_restart(folder, rank, _agent_pid())
        if again is None:
            note_unrecorded(folder, rank)
            raise GradcheckError(
                f"{folder} already holds a trace of rank {rank}, and nothing recorded is ever overwritten. A second "
                "training needs a run folder of its own: a `gradcheck run` of its own, or another name.",
                code="E511",
            )
        restart = again
    join_run_dir(folder, {"world_size": world_size, "command": sys.argv})
    if restart:
        note_restart(folder, restart, world_size)
    return restart


def _agent_pid() -> int | None:
    """The process of torchrun that started this rank."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


def _version() -> str:
    from gradcheck_dist import __version__

    return __version__
