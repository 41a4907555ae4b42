"""The code between the outermost modules and backward, taken down operation by operation as training runs it.

It belongs to no module, so nothing can be called once more; but every operation passes the dispatcher (torch.utils.
_python_dispatch), and can be run again on other values. Modules that hold parameters are left out: they are checked on
their own. Nothing is recorded inside of backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from gradcheck_dist.events import Site
from gradcheck_dist.function_apply import in_function
from gradcheck_dist.verify.pieces import is_distributed
from gradcheck_dist.verify.place import model_site
from gradcheck_dist.verify.preserve import RandomState, random_state

MAX_ENTRIES = 20_000


@dataclass
class Entry:
    """One operation. `random` are the generators' states before it, where it draws."""

    func: Any
    args: Any
    kwargs: Any
    result: Any
    with_gradient: bool
    in_function: bool
    site: Site | None
    random: RandomState | None

    def read(self) -> Iterator[Tensor]:
        """The tensors that go in, those too that are written to."""
        return tensors_in((self.args, self.kwargs))

    def written(self) -> Iterator[Tensor]:
        """The tensors that come out, and those that are written to."""
        yield from tensors_in(self.result)
        yield from self.written_to()

    def written_to(self) -> Iterator[Tensor]:
        for argument, value in zip(self.func._schema.arguments, self.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_in(value)


class Tape(TorchDispatchMode):
    """Active between `resume` and `pause`. `problem`: why what was recorded is not the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.constants: dict[int, Tensor] = {}
        self.problem = ""
        self.root: Tensor | None = None
        self.loss = 0.0
        self._made: dict[int, Tensor] = {}
        self._memories: set[int] = set()
        self._on = False

    def resume(self) -> None:
        if not self._on and not self.problem:
            dispatch._push_mode(self)
            self._on = True

    def pause(self) -> None:
        """Take the mode off the stack, from below others that the user has put on it since."""
        if self._on:
            self._on = False
            above = []
            while (top := dispatch._pop_mode()) is not self:
                above.append(top)
            for mode in reversed(above):
                dispatch._push_mode(mode)

    def add(self, tensor: Tensor) -> None:
        """A tensor that is known from now on: what a module or an operation gave, or a constant."""
        self._made[id(tensor)] = tensor  # held, so that no other tensor gets its id
        self._memories.add(_memory(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(getattr(kind, "__name__", "") == "DTensor" for kind in types):
            self.problem = "it computes with distributed tensors"
            return NotImplemented
        draws = torch.Tag.nondeterministic_seeded in func.tags
        random = random_state() if draws and not self.problem else None
        self._keep_constants((args, kwargs))
        result = func(*args, **kwargs)
        if not self.problem:
            inside = in_function()
            entry = Entry(func, args, kwargs, result, torch.is_grad_enabled(), inside, model_site(), random)
            self.entries.append(entry)
            for tensor in tensors_in(result):
                self.add(tensor)
            if len(self.entries) > MAX_ENTRIES:
                self.problem = f"it takes more than {MAX_ENTRIES} operations"
        return result

    def _keep_constants(self, values: Any) -> None:
        for tensor in tensors_in(values):
            if id(tensor) not in self._made and not self.problem:
                if tensor.is_floating_point() and _memory(tensor) in self._memories:
                    self.problem = "it takes values past autograd (.data, a view made elsewhere)"
                self.add(tensor)
                self.constants[id(tensor)] = tensor.detach().clone()


def tensors_in(value: Any) -> Iterator[Tensor]:
    return (part for part in tree_flatten(value)[0] if isinstance(part, Tensor))


def needed(tape: Tape, variables: list[Tensor]) -> list[Entry]:
    """The entries through which `variables` reach the root, by the memory that they read and write; with those that
    made the memory that is written to."""
    changed = {_memory(tensor) for tensor in variables}
    depends: set[int] = set()
    for index, entry in enumerate(tape.entries):
        if any(_memory(tensor) in changed for tensor in entry.read()):
            depends.add(index)
            changed |= {_memory(tensor) for tensor in entry.written()}
    assert tape.root is not None
    wanted, memory, kept = {id(tape.root)}, {_memory(tape.root)}, []
    for index in reversed(range(len(tape.entries))):
        entry = tape.entries[index]
        makes = any(id(tensor) in wanted for tensor in tensors_in(entry.result))
        fills = {_memory(tensor) for tensor in entry.written_to()}
        if (makes or fills & memory) and (index in depends or {_memory(one) for one in entry.written()} & changed):
            kept.append(entry)
            wanted |= {id(tensor) for tensor in entry.read()}
            memory |= {_memory(tensor) for tensor in entry.read()} & changed
    return kept[::-1]


def communicates(entry: Entry) -> bool:
    return str(entry.func.namespace) in ("c10d", "_c10d_functional")


def cast_tree(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating dtypes among an operation's keyword arguments, replaced."""
    if dtype is None:
        return value
    return tree_map_only(torch.dtype, lambda own: dtype if own.is_floating_point else own, value)


def _memory(tensor: Tensor) -> int:
    return -id(tensor) if is_distributed(tensor) else tensor.untyped_storage()._cdata
