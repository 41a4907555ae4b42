"""Replacing attributes of torch, reversibly, and at the moment a module is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

_INHERITED = object()
"""In the place of an original that a base class has."""


class Patches:
    """A set of replaced attributes that can be taken back."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._finders: list[_AfterImport] = []
        self._removers: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set owner.name to make(original).

        Raises:
            AttributeError: there is no such attribute (this torch differs from the ones tried).
        """
        original = getattr(owner, name)
        # What a class holds may be another object than what it gives: a method of pybind11's would come back unbound.
        held = owner.__dict__.get(name, _INHERITED) if isinstance(owner, type) else original
        patched = make(original)
        self._script_as(original, patched)
        setattr(owner, name, patched)
        self._undo.append((owner, name, held, patched))

    def _script_as(self, original: Any, patched: Any) -> None:
        """Let TorchScript take a replaced function for torch's own: by its source, or by the identity of what has none
        (torch/jit/_recursive.py, try_compile_fn; torch/jit/_builtins.py)."""
        if not isinstance(patched, FunctionType):
            return
        # Not at the top: what boots below `gradcheck run` imports this module before the user's first line.
        from torch.jit import _builtins

        if isinstance(original, FunctionType):
            patched.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]
        elif (operator := _builtins._find_builtin(original)) is not None:
            _builtins._register_builtin(patched, operator)
            self.on_restore(lambda: _builtins._get_builtin_table().pop(id(patched), None) and None)

    def replaced_functions(self) -> list[tuple[Any, Any]]:
        """(original, what stands in its place) of all that is replaced in modules."""
        return [(old, new) for owner, _, old, new in self._undo if isinstance(owner, ModuleType)]

    def on_restore(self, remove: Callable[[], None]) -> None:
        self._removers.append(remove)

    def when_imported(self, module: str, apply: Callable[[ModuleType], None]) -> None:
        """Call apply(module) now if it is imported, else right after its import."""
        if module in sys.modules:
            apply(sys.modules[module])
            return
        finder = _AfterImport(module, apply)
        self._finders.append(finder)
        sys.meta_path.insert(0, finder)

    def restore(self) -> None:
        """Take everything back; an attribute that somebody else replaced in the meantime is left alone."""
        for finder in self._finders:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
        for owner, name, original, patched in reversed(self._undo):
            if getattr(owner, name, None) is not patched:
                continue
            if original is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        for remove in self._removers:
            remove()
        self._finders, self._undo, self._removers = [], [], []


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module by the finders behind it and runs a callback after its code has run."""

    def __init__(self, module: str, apply: Callable[[ModuleType], None]) -> None:
        self._module, self._apply, self._busy = module, apply, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._apply)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, apply: Callable[[ModuleType], None]) -> None:
        self._inner, self._apply = inner, apply

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its loader (inspect, importlib.resources) finds its own.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._inner.exec_module(module)
        self._apply(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
