"""Leaving no trace: random states, plain attributes and hooks are afterwards, bit by bit, what they were before."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

RandomState = dict[str, Any]
_DEPTH = 6
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, nn.Module)


def random_state() -> RandomState:
    """The states of torch's generators (CPU, CUDA), Python's and numpy's."""
    state: RandomState = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_random_state(state: RandomState) -> None:
    torch.set_rng_state(state["cpu"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])


@contextlib.contextmanager
def preserved(root: nn.Module) -> Iterator[None]:
    """While open, forward passes of `root` may change what they like of random states, buffers and attributes.

    Plain attributes are followed through lists, dicts, sets and objects, to tensors, arrays and random generators. What
    a forward changes outside of the module (a global variable, a file) or in an iterator is not seen.
    """
    state = random_state()
    memory = _Memory()
    for module in root.modules():
        if not isinstance(module, torch.jit.ScriptModule):  # has tables of its own, and is never run again
            memory.module(module)
    try:
        yield
    finally:
        memory.restore()
        set_random_state(state)


class _Memory:
    """What containers and objects held, and the values of tensors, by identity."""

    def __init__(self) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._others: dict[int, tuple[Any, Callable[[], None]]] = {}

    def module(self, module: nn.Module) -> None:
        parameters = {id(param) for param in module._parameters.values()}
        self._containers[id(module)] = (vars(module), dict(vars(module)))
        for table in (module._parameters, module._buffers, module._modules):
            self._containers[id(table)] = (table, dict(table))
        for name, value in vars(module).items():
            if name not in ("_parameters", "_modules") and id(value) not in parameters:
                self._keep(value, 0)

    def _keep(self, value: Any, depth: int) -> None:
        if id(value) in self._containers or depth > _DEPTH or isinstance(value, _OPAQUE):
            return
        if isinstance(value, Tensor):
            held = getattr(value, "_local_tensor", value)
            if id(held) not in self._tensors and not isinstance(value, nn.Parameter):
                self._tensors[id(held)] = (held, held.detach().clone(), held._version)
            return
        putting_back = _putting_back(value)
        if putting_back is not None:
            self._others.setdefault(id(value), (value, putting_back))
            return
        inner: Any = ()
        if isinstance(value, dict):
            self._containers[id(value)] = (value, value.copy())
            inner = value.values()
        elif isinstance(value, list | set | deque):
            self._containers[id(value)] = (value, value.copy())
            inner = value
        elif isinstance(value, tuple):
            inner = value
        elif isinstance(getattr(value, "__dict__", None), dict) and not type(value).__module__.startswith("torch"):
            self._containers[id(value)] = (value.__dict__, dict(value.__dict__))
            inner = value.__dict__.values()
        for part in list(inner):
            self._keep(part, depth + 1)

    def restore(self) -> None:
        for container, before in self._containers.values():
            if isinstance(container, list):
                container[:] = before
            elif isinstance(container, deque):
                container.clear()
                container.extend(before)
            elif list(container) != list(before) or not _same_values(container, before):
                container.clear()
                container.update(before)
        for tensor, before, version in self._tensors.values():
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(before)
            elif not torch.equal(tensor, before):
                tensor.data.copy_(before)  # changed past its version counter, which backward may ask for
        for _, put_back in self._others.values():
            put_back()


def _putting_back(value: Any) -> Callable[[], None] | None:
    """What gives an array its numbers or a generator of random ones its state again; None for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return functools.partial(_give_state, value, state)
    if isinstance(value, random.Random):
        then = value.getstate()
        return lambda: value.setstate(then)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray) and value.flags.writeable:
        numbers = value.copy()
        return lambda: numpy.copyto(value, numbers)
    if isinstance(value, numpy.random.RandomState):
        legacy = value.get_state()
        return lambda: value.set_state(legacy)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator.state
        return lambda: setattr(value.bit_generator, "state", bits)
    return None


def _give_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _same_values(container: Any, before: Any) -> bool:
    if isinstance(container, dict):
        return all(container[key] is value for key, value in before.items())
    return True  # a set of the same members


_WRAPPERS = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed._tools")


@contextlib.contextmanager
def unwrapped(root: nn.Module) -> Iterator[None]:
    """While open, data-parallel wrappers below `root` and compiled modules call what they wrap, and nothing else."""
    saved: list[tuple[Any, Any]] = []
    forwards: list[tuple[nn.Module, Any]] = []
    for module in root.modules():
        for table in (module._forward_pre_hooks, module._forward_hooks):
            kept = [(key, hook) for key, hook in table.items() if not _is_data_parallel(hook)]
            if len(kept) != len(table):
                saved.append((table, list(table.items())))
                table.clear()
                table.update(kept)
        inner = inner_module(module)
        if inner is not None:
            forwards.append((module, vars(module).get("forward")))
            vars(module)["forward"] = inner.__call__
        if getattr(module, "_compiled_call_impl", None) is not None:
            saved.append((vars(module), list(vars(module).items())))
            module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, forward in forwards:
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
        for table, items in saved:
            table.clear()
            table.update(items)


def inner_module(module: nn.Module) -> nn.Module | None:
    """What DistributedDataParallel or torch.compile wrap; None for any other module."""
    name = type(module).__name__
    inner: nn.Module | None = None
    if isinstance(module, nn.parallel.DistributedDataParallel):
        inner = module.module
    elif name == "OptimizedModule":
        inner = module._modules.get("_orig_mod")
    return inner


def _is_data_parallel(hook: Any) -> bool:
    """Whether a hook belongs to FSDP2 or replicate: a method of their state, or a function of their files."""
    while hasattr(hook, "__wrapped__") and not hasattr(hook, "__self__"):
        hook = hook.__wrapped__
    owner = getattr(hook, "__self__", None)
    home = type(owner).__module__ if owner is not None else getattr(hook, "__module__", "")
    return str(home).startswith(_WRAPPERS)
