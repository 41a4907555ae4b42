"""Gradients at the edges of pipeline stages: what left one stage's input, and what entered the other one's output.

Only samples are taken, on each side alone; that they belong together is found when the run is judged. A prehook of an
autograd node and a hook of a tensor that return None leave the gradient bit for bit as it was, and a prehook runs
behind the tensor hooks that the user put on a stage's output (torch/csrc/autograd/engine.cpp, call_function).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.events import StageGradient
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.backward.graph_leaves import LEAF_NODE
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.recording.guard import hooking
from gradcheck_dist.probes.recording.marks import SENT
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded
from gradcheck_dist.probes.recording.world import several_ranks

NUM_SAMPLES = 64
MAX_GIVEN = 8
"""Tensors of one stage's input that are watched; a transformer's stage has one."""
MAKES_STATE = "_make_forward_chunk_state"
"""The method that keeps what a stage computed for its backward, since torch 2.15."""
PASSES_LOOKED_AT = 4
"""Passes behind which a graph is no longer searched for what another rank sent, or for outputs that others are computed
from, when none held any."""


def install(recorder: Recorder, patches: Patches) -> None:
    edges = _Edges()

    def on_stage(module: ModuleType) -> None:
        if hasattr(module._PipelineStageBase, MAKES_STATE):
            keeping = functools.partial(_keeping, recorder, edges)
            patches.replace(module._PipelineStageBase, MAKES_STATE, keeping)

    patches.when_imported("torch.distributed.pipelining.stage", hooking(recorder, "stage_edges", on_stage))
    listener = functools.partial(_opened, edges=edges)
    autograd.OPEN_LISTENERS.append(listener)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(listener))


class _Edges:
    def __init__(self) -> None:
        self.indices: dict[tuple[int, torch.device], Tensor] = {}
        self.searches_left = PASSES_LOOKED_AT
        self.looks_left = PASSES_LOOKED_AT

    def inner(self, roots: Sequence[Root]) -> set[Any]:
        """The nodes of outputs that other outputs are computed from (a skip connection that is sent beside)."""
        if len(roots) < 2 or not self.looks_left:
            return set()
        own = {root.grad_fn for root in roots if root.grad_fn is not None}
        seen: set[Any] = set()
        for _ in _leaves([following for node in own for following, _ in node.next_functions], seen):
            pass
        self.looks_left = PASSES_LOOKED_AT if own & seen else self.looks_left - 1
        return own & seen

    def held(self, activation: Root) -> Tensor | None:
        """Elements of an activation, where it is a tensor that still has its memory, or they were kept."""
        if not isinstance(activation, Tensor):
            kept: Tensor | None = activation.grad_fn.metadata.get(SENT, {}).get(activation.output_nr)
            return kept
        if activation.numel() < 2 or activation.layout is not torch.strided:
            return None
        return self.take(activation)

    def take(self, grad: Tensor) -> Tensor:
        """Elements at positions that depend on the number of elements alone, as float32."""
        local = getattr(grad, "_local_tensor", grad).detach()
        key = (local.numel(), local.device)
        indices = self.indices.get(key)
        if indices is None:
            num = min(NUM_SAMPLES, local.numel())
            indices = self.indices[key] = torch.arange(num, device=local.device) * local.numel() // max(num, 1)
        return local.take(indices).float()


def _keeping(recorder: Recorder, edges: _Edges, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make_state(self: Any, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        _keep(recorder, edges, outputs)
        return original(self, outputs, *args, **kwargs)

    return make_state


@guarded("stage_edges")
def _keep(recorder: Recorder, edges: _Edges, outputs: Sequence[Any]) -> None:
    """A stage has computed these and keeps their places in the graph alone."""
    if not recorder.samples_upcoming or recorder.impulses is not None:
        return
    for output in outputs:
        node: Any = getattr(output, "grad_fn", None)
        if node is not None and (kept := edges.held(output)) is not None:
            node.metadata.setdefault(SENT, {})[output.output_nr] = kept


@guarded("stage_edges")
def _opened(
    recorder: Recorder, current: BackwardPass, roots: Sequence[Root], has_gradients: bool, *, edges: _Edges
) -> None:
    if not recorder.sampling or recorder.impulses is not None or current is None or not roots:
        return
    if not several_ranks():
        return
    if torch._C._current_graph_task_id() != -1:
        return  # inside another backward pass: a checkpointed module that runs again
    if has_gradients:
        inner = edges.inner(roots)
        for root, grad in zip(roots, _gradients(current, len(roots)), strict=True):
            if root.grad_fn in inner:
                # What runs through it has the gradients of the other outputs in it as well.
                if grad is not None and grad.numel() > 1:
                    _tell(recorder, edges, "output", grad, edges.held(root))
            elif root.grad_fn is not None:
                _watch_output(recorder, edges, root)
    given = current.given
    if given is None and edges.searches_left:
        given = _given(recorder, roots)
        edges.searches_left = PASSES_LOOKED_AT if given else edges.searches_left - 1
    for tensor in given or ():
        _watch_input(recorder, edges, tensor)


def _watch_output(recorder: Recorder, edges: _Edges, root: Root) -> None:
    node: Any = root.grad_fn
    output = root.output_nr
    forward = edges.held(root)

    def entered(grads: tuple[Tensor | None, ...]) -> None:
        handle.remove()
        grad = grads[output] if output < len(grads) else None
        # A loss is given its gradient too, by some schedules. An output that was sent on may hold no memory any more
        # (Megatron-LM's deallocate_output_tensor leaves one element): only its gradient has its size.
        if grad is not None and grad.numel() > 1:
            _tell(recorder, edges, "output", grad, forward)

    handle = node.register_prehook(entered)


def _watch_input(recorder: Recorder, edges: _Edges, tensor: Tensor) -> None:
    forward = edges.held(tensor)

    def left(grad: Tensor | None) -> None:
        handle.remove()
        _tell(recorder, edges, "input", grad, forward)

    handle = tensor.register_hook(left)
    autograd.put_first(tensor, handle.id)


@guarded("stage_edges")
def _tell(recorder: Recorder, edges: _Edges, side: str, grad: Tensor | None, forward: Tensor | None = None) -> None:
    current = recorder.current
    if current is None or grad is None or grad.layout is not torch.strided:
        return
    values = edges.take(grad)
    held = forward is not None and forward.shape == values.shape and forward.device == values.device

    def told(*, values: bytes, **fields: Any) -> StageGradient:
        half = len(values) // 2 if held else len(values)
        return StageGradient(values=values[:half], forward=values[half:], **fields)

    recorder.emit_values(
        told,
        torch.cat([values, forward]) if held and forward is not None else values,
        current.microbatch,
        stage=current.stage,
        side=side,
        shape=tuple(grad.shape),
        dtype=str(grad.dtype).removeprefix("torch."),
    )


def _given(recorder: Recorder, roots: Sequence[Root]) -> list[Tensor]:
    """Leaves of the graph that are no parameters: what the stage was given and must hand a gradient back for."""
    found: list[Tensor] = []
    for leaf in _leaves([root.grad_fn for root in roots]):
        if recorder.registry.find(leaf) is None and not isinstance(leaf, torch.nn.Parameter):
            found.append(leaf)
            if len(found) == MAX_GIVEN:
                break
    return found


def _gradients(current: BackwardPass, num: int) -> Sequence[Tensor | None]:
    """What the caller gave for each root."""
    given = current.started_from
    found = [given] if isinstance(given, Tensor) else list(given or ())
    return found if len(found) == num else [None] * num


def _leaves(nodes: Sequence[Any], seen: set[Any] | None = None) -> Iterator[Tensor]:
    """The leaves behind some nodes. `seen` comes to hold the nodes that were met."""
    stack = [node for node in nodes if node is not None]
    seen = set() if seen is None else seen
    seen.update(stack)
    while stack:
        node = stack.pop()
        if node.name() == LEAF_NODE:
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
