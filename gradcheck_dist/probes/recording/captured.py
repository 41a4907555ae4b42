"""CUDA graphs: nothing is recorded while one is captured, and a step that replays what no probe can see says so.

What probes do on a device is not allowed in a capture, or would be replayed with it: asking an event whether it is
done, memory on the host that is pinned and used again, waiting for a number (NVIDIA, CUDA programming guide, stream
capture, "Prohibited and Unhandled Operations"; torch.cuda.graph, `capture_error_mode`). A replay runs no Python. Graphs
that are replayed inside of an autograd function (torch.cuda.make_graphed_callables, torch.compile's "reduce-overhead")
deliver gradients to their leaves as ever: only one with a whole backward pass or an optimizer's step in it hides these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from gradcheck_dist.events import CUDA_GRAPHS
from gradcheck_dist.probes.recording.patching import Patches

if TYPE_CHECKING:
    from gradcheck_dist.probes.recording.recorder import Recorder

HAS_CUDA = torch.backends.cuda.is_built()
BACKWARD, OPTIMIZER = "backward", "optimizer"
REPLAYED = (
    "what was replayed from a CUDA graph, a backward pass or an optimizer's step, was seen by no probe: record steps "
    "that run before the capture (--steps)"
)


class Captures:
    """Graphs that are being captured, and what of training the captured ones hold."""

    def __init__(self) -> None:
        self._open: list[Any] = []
        self._held: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
        self._told = -1  # the last step of which a replay was told

    @property
    def under_way(self) -> bool:
        """Whether a graph is being captured: by torch on any thread, or by anybody on this thread's stream."""
        if HAS_CUDA and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return True
        return bool(self._open)

    def begin(self, graph: Any) -> None:
        self._held.pop(graph, None)
        self._open.append(graph)

    def end(self, graph: Any) -> None:
        self._open = [one for one in self._open if one is not graph]

    def holds(self, what: str) -> None:
        """The graphs that are being captured get a backward pass or an optimizer's step."""
        for graph in self._open:
            self._held.setdefault(graph, set()).add(what)

    def held_by(self, graph: Any) -> set[str]:
        return self._held.get(graph, set())

    def replaying(self, recorder: Recorder, held: set[str]) -> None:
        """A graph with a backward pass belongs to the step that is open, or opens the next one."""
        if BACKWARD in held:
            recorder.ensure_step()
        if recorder.recording and self._told != recorder.step:
            self._told = recorder.step
            recorder.status(CUDA_GRAPHS, False, REPLAYED)


def install(recorder: Recorder, patches: Patches) -> None:
    graph = torch.cuda.CUDAGraph
    patches.replace(graph, "capture_begin", lambda original: _watch_begin(recorder.captures, original))
    for name in ("capture_end", "reset"):
        patches.replace(graph, name, lambda original: _watch_end(recorder.captures, original))
    patches.replace(graph, "replay", lambda original: _watch_replay(recorder, original))


def _watch_begin(captures: Captures, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        captures.begin(self)
        try:
            original(self, *args, **kwargs)
        except BaseException:
            captures.end(self)
            raise

    return capture_begin


def _watch_end(captures: Captures, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def end(self: Any) -> None:
        try:
            original(self)
        finally:
            captures.end(self)

    return end


def _watch_replay(recorder: Recorder, original: Callable[..., None]) -> Callable[..., None]:
    from gradcheck_dist.probes.recording.recorder import guarded

    replaying = guarded(CUDA_GRAPHS)(lambda recorder, held: recorder.captures.replaying(recorder, held))
    stepped = guarded(CUDA_GRAPHS)(lambda recorder: recorder.end_step())

    @functools.wraps(original)
    def replay(self: Any) -> None:
        held = recorder.captures.held_by(self)
        if held:
            replaying(recorder, held)
        original(self)
        if OPTIMIZER in held:
            stepped(recorder)

    return replay
