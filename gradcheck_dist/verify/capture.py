"""In training: which outermost modules ran forward, on what, and which gradients arrived at their outputs.

Only the first call of each outermost module in the chosen step is kept. Tensor hooks return None, clones are taken of
what the trainer could change, and everything is taken away again before the optimizer steps.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten

from gradcheck_dist.compiling import compiles
from gradcheck_dist.events import GradientCheck
from gradcheck_dist.function_apply import in_function
from gradcheck_dist.verify.pieces import frozen, is_distributed, map_tensors, sample, tensors_of
from gradcheck_dist.verify.preserve import RandomState, inner_module, random_state
from gradcheck_dist.verify.tape import Tape, tensors_in

MAX_CALLS = 64
MAX_FROZEN_BYTES = 64 * 2**20
"""So much of parameters without gradient is kept as it was at a call; more of them are a model that is adapted."""
NEVER = "no torch optimizer stepped after its backward, outside of backward"


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def holds_parameters(module: nn.Module) -> bool:
    """A module without any is but code, and is recorded as such."""
    return next(module.parameters(), None) is not None


class Output:
    """One floating tensor of a result, or a leaf among the arguments: samples of its values, and the gradient that
    arrived there. `tensor` and `whole`, its value then, of outputs whose further way is recorded."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self.values = name, sample(tensor)
        self.requires_grad = tensor.requires_grad
        self.gradient: Tensor | None = None
        self.tensor: Tensor | None = None
        self.whole: Tensor | None = None

    def keep(self, tensor: Tensor) -> None:
        """Hold on to an output and its value, for the code that goes on with it."""
        if not is_distributed(tensor):
            self.tensor, self.whole = tensor, tensor.detach().clone()


class RootCall:
    """One forward call of an outermost module, `when` (step, accumulation step) it was. `several` when a backward pass
    may hold more than this call; `further` calls of it in this step are not kept."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], when: tuple[int, int]) -> None:
        self.module, self.when = module, when
        self.random: RandomState = random_state()
        self.args, self.kwargs = map_tensors(frozen, (args, kwargs))
        device = next((tensor.device.type for _, tensor in tensors_of([*args, *kwargs.values()])), None)
        self.device_type = device or next((param.device.type for param in module.parameters()), "cpu")
        self.autocast = (torch.is_autocast_enabled(self.device_type), torch.get_autocast_dtype(self.device_type))
        self.root = module
        while (inner := inner_module(self.root)) is not None:
            self.root = inner
        self.buffers: dict[str, Tensor] = {}
        self.frozen: dict[str, Tensor] = {}
        self.training = module.training
        self.outputs: list[Output] = []
        self.inputs: list[Output] = []
        self.leaves: dict[str, Tensor] = {}
        self.several = False
        self.further = 0

    def starts(self) -> None:
        """What is inside of the wrappers is about to run; a spectral norm changes its buffers in every forward, and a
        code book that follows a running mean is often a parameter without gradient."""
        if not self.buffers:
            self.buffers = {name: buffer.detach().clone() for name, buffer in self.root.named_buffers()}
        if not self.frozen:
            params = {name: param for name, param in self.root.named_parameters() if not param.requires_grad}
            if sum(param.numel() * param.element_size() for param in params.values()) <= MAX_FROZEN_BYTES:
                self.frozen = {n: p.detach().clone() for n, p in params.items() if not is_distributed(p)}

    @property
    def has_gradient(self) -> bool:
        return any(output.gradient is not None for output in self.outputs)


class Capture:
    """What was seen so far; `verify` is called once, with everything, before the optimizer steps."""

    def __init__(self, recorder: Any, patches: Any, verify: Callable[[Any, list[RootCall], Tape], None]) -> None:
        self._recorder, self._verify = recorder, verify
        self._tape = Tape()
        self._tape_done = False
        self._calls: dict[int, RootCall] = {}
        self._others: dict[int, int] = {}
        self._inside = threading.local()
        self._done = False
        self._hooks: list[Any] = []
        patches.replace(nn.Module, "__call__", self._watch)
        patches.on_restore(self._forget)
        patches.replace(torch.autograd, "backward", self._watch_backward)
        patches.replace(torch.autograd, "grad", self._watch_grad)
        patches.on_restore(register_optimizer_step_pre_hook(self._stepping).remove)

    def _watch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        capture = self

        @functools.wraps(original)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if capture._done or torch.compiler.is_compiling():
                return original(self, *args, **kwargs)
            running = getattr(capture._inside, "call", None)
            if running is not None and running.root is self:
                capture._starts(running)
            if not capture._wanted():
                return original(self, *args, **kwargs)
            apart = capture._leaves_tape(self, (args, kwargs))
            taken = capture._before(self, args, kwargs)
            capture._inside.depth, capture._inside.call = True, taken
            if taken is not None and taken.root is self:
                capture._starts(taken)
            try:
                result = original(self, *args, **kwargs)
            finally:
                capture._inside.depth, capture._inside.call = False, None
            if taken is not None:
                capture._after(taken, [*args, *kwargs.values()], result)
            if apart:
                capture._resume_tape()
            return result

        return call

    def _wanted(self) -> bool:
        recorder = self._recorder
        return (
            not getattr(self._inside, "depth", False)
            and recorder.recording
            and not recorder.suspended
            and torch.is_grad_enabled()
            and recorder.current is None  # a forward inside of a backward is a recomputation
        )

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RootCall | None:
        with self._guarded():
            when = (self._recorder.step, self._recorder.accumulation_step)
            known = self._calls.get(id(module))
            if known is not None and (known.has_gradient or known.when == when):
                known.several |= not known.leaves
                known.further += known.when[0] == when[0]
                return None
            if len(self._calls) < MAX_CALLS:
                return RootCall(module, args, kwargs, when)
        return None

    def _starts(self, call: RootCall) -> None:
        with self._guarded():
            call.starts()

    def _after(self, call: RootCall, given: list[Any], result: Any) -> None:
        with self._guarded():
            outputs = [(name, tensor) for name, tensor in tensors_of(result) if tensor.requires_grad]
            if not outputs:
                return
            self._calls[id(call.module)] = call
            for name, tensor in tensors_of(given):
                if tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, nn.Parameter):
                    call.inputs.append(self._hooked(name, tensor))
            for name, tensor in outputs:
                call.outputs.append(self._hooked(name, tensor))
                if not self._tape_done and holds_parameters(call.module):
                    call.outputs[-1].keep(tensor)
                    self._tape.add(tensor)
            for name, param in call.root.named_parameters():
                if param.requires_grad and not is_distributed(param):
                    call.several |= self._others.setdefault(id(param), id(call)) != id(call)
                    self._hooks.append(param.register_hook(functools.partial(self._leaf, call, name)))

    def _leaves_tape(self, module: nn.Module, given: Any) -> bool:
        """An outermost module is about to run: what it does is recorded where it holds no parameter and is but code."""
        holds = holds_parameters(module)
        with self._guarded():
            self._tape.pause()
            if holds and any(part.requires_grad and not part.is_leaf for part in tensors_in(given)):
                self._tape.problem = self._tape.problem or "the output of one outermost module goes into another"
        if not holds:
            self._resume_tape()
        return holds

    def _resume_tape(self) -> None:
        with self._guarded():
            if self._tape_done or not self._calls or threading.current_thread() is not threading.main_thread():
                return
            if compiles():
                self._tape.problem = self._tape.problem or "torch.compile is in use, which a record would turn off"
            self._tape.resume()

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        capture = self

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not capture._tape_done and not torch.compiler.is_compiling():
                capture._backward_begins(tensors, grad_tensors)
            return original(tensors, grad_tensors, *args, **kwargs)

        return backward

    def _watch_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        capture = self

        @functools.wraps(original)
        def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            again = kwargs.get("create_graph", args[1] if len(args) > 1 else False)
            if not capture._tape_done and not again and not torch.compiler.is_compiling():
                capture._backward_begins(outputs, grad_outputs)
            return original(outputs, inputs, grad_outputs, *args, **kwargs)

        return grad

    def _backward_begins(self, outputs: Any, given: Any) -> None:
        """The code between modules and backward ends here; it is recorded once. A function that differentiates in its
        forward (a loss that keeps its own gradient) is a part of that code."""
        if not self._calls or self._recorder.suspended or in_function():
            return
        with self._guarded():
            self._tape.pause()
            self._tape_done = True
            made = [
                output.tensor for call in self._calls.values() for output in call.outputs if output.tensor is not None
            ]
            outputs_alone = {id(tensor) for tensor in made}
            edges_alone = {(tensor.grad_fn, tensor.output_nr) for tensor in made}
            roots, gradients = tree_flatten(outputs, is_leaf=_is_edge)[0], tree_flatten(given)[0]
            alone = len(roots) == 1 and isinstance(roots[0], Tensor) and roots[0].numel() == 1
            if all(root[:2] in edges_alone if _is_edge(root) else id(root) in outputs_alone for root in roots):
                return  # an earlier pipeline stage: nothing lies between
            if not alone or is_distributed(roots[0]) or any(grad is not None for grad in gradients):
                self._tape.problem = self._tape.problem or "backward begins with more than one number"
            else:
                self._tape.root, self._tape.loss = roots[0], float(roots[0].detach())

    def _hooked(self, name: str, tensor: Tensor) -> Output:
        output = Output(name, tensor)
        self._hooks.append(tensor.register_hook(functools.partial(self._arrived, output)))
        return output

    def _arrived(self, output: Output, gradient: Tensor | None) -> None:
        with self._guarded():
            # Gradients that are differentiated again (a penalty) pass here too, and are no backward yet.
            if gradient is not None and output.gradient is None and self._recorder.current is not None:
                output.gradient = gradient.detach().clone()

    def _leaf(self, call: RootCall, name: str, gradient: Tensor | None) -> None:
        with self._guarded():
            if gradient is not None:  # a function that adds a parameter's gradient by itself hands over nothing
                call.leaves.setdefault(name, sample(gradient))

    def _stepping(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """All ranks come to the first optimizer of the step. One process alone may wait for a later one (a GAN's)."""
        recorder = self._recorder
        if self._done or not recorder.recording or recorder.suspended or recorder.current is not None:
            return  # an optimizer that steps inside of backward finds gradients half done
        ready = [call for call in self._calls.values() if call.has_gradient]
        if not ready and not several_ranks():
            return
        with self._guarded():
            self._verify(recorder, ready, self._tape)
            self._tape = Tape()
        for call in ready:
            del self._calls[id(call.module)]
        if several_ranks() or not self._calls:
            self._forget()

    def _forget(self) -> None:
        """Take everything away; what was captured and never verified is told."""
        self._done = self._tape_done = True
        self._tape.pause()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        with self._guarded():
            for call in self._calls.values():
                self._recorder.emit(GradientCheck, module=type(call.module).__name__, reason=NEVER)
        self._calls.clear()

    @contextlib.contextmanager
    def _guarded(self) -> Any:
        try:
            yield
        except Exception as error:  # training goes on
            self._recorder.failed("verify", error)


def _is_edge(root: Any) -> bool:
    """Whether it stands for a tensor that is gone, as those that a pipeline sent."""
    return isinstance(root, GradientEdge)
