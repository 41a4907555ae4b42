"""What of a module is checked: own parameters and inputs one by one, those of the modules below by child."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from gradcheck_dist.verify.function import Function
    from gradcheck_dist.verify.twin import Twin

MAX_GROUPS = 40
"""More children than these are taken together, neighbours first: each costs a dozen forward passes of the parent."""


@dataclass(frozen=True)
class Target:
    """Variables that are perturbed together. `kind`: "parameter", "input", "parameters" (of a child) or "module"."""

    kind: str
    name: str
    keys: tuple[str, ...]

    @property
    def label(self) -> str:
        return f"{self.kind} {self.name}".strip()


WHOLE = Target("module", "", ())
"""All of a module."""


def targets_of(function: Function, twin: Twin, called: Sequence[str]) -> list[Target]:
    """The targets of a module call; `called` are the paths of all modules whose call is known."""
    path = function.call.path
    found = [Target("input", key.removeprefix("input "), (key,)) for key in function.variables if key[:6] == "input "]
    module = twin.root.get_submodule(path)
    taken: set[str] = set()
    for name, _ in module.named_parameters(recurse=False):
        key = function.key_of(_join(path, name))
        if key is not None and key not in taken:
            taken.add(key)
            found.append(Target("parameter", name, (key,)))
    groups = []
    for name in _children(module, path, set(called)):
        names = twin.below(_join(path, name)).values()
        keys = dict.fromkeys(key for full in names if (key := function.key_of(full)) is not None and key not in taken)
        if keys:
            taken |= set(keys)
            groups.append(Target("parameters", name, tuple(keys)))
    return found + _bundled(groups)


def _children(module: nn.Module, path: str, called: set[str]) -> list[str]:
    """The modules directly below; those inside of a container that is never called itself stand for it."""
    names = []
    for name, child in module.named_children():
        inner = [f"{name}.{below}" for below in _children(child, _join(path, name), called)]
        own = next(child.parameters(recurse=False), None) is not None
        names += [name] if _join(path, name) in called or own or not inner else inner
    return names


def _bundled(groups: list[Target]) -> list[Target]:
    size = -(-len(groups) // MAX_GROUPS) or 1
    if size == 1:
        return groups
    bundles = [groups[start : start + size] for start in range(0, len(groups), size)]
    return [
        Target("parameters", f"{bundle[0].name} to {bundle[-1].name}", tuple(key for one in bundle for key in one.keys))
        for bundle in bundles
    ]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
