"""Telling the processes that start ranks from those that train."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

_PROGRAMS = {"torchrun", "accelerate", "deepspeed", "fabric", "trl", "horovodrun", "gradcheck"}
_MODULES = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.distributed.elastic",
    "accelerate.commands",
    "deepspeed.launcher",
    "lightning.fabric.cli",
    "lightning_fabric.cli",
    "torch._inductor.compile_worker",
    "gradcheck_dist",
    "pip",
)
_OPTIONS_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}


def is_launcher(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether `command` (sys.orig_argv of a python process) starts ranks and trains nothing itself.

    A process with RANK was started by a launcher and is none. What is not recognised here and trains nothing is
    harmless too: a trace is opened by the first loss, not before.
    """
    kind, name = _program(command)
    if kind == "module":
        return any(name == module or name.startswith(f"{module}.") for module in _MODULES)
    return "RANK" not in environment and name.rpartition(os.sep)[2] in _PROGRAMS


def _program(command: Sequence[str]) -> tuple[str, str]:
    """("module", name) or ("file", path) of what a python command line runs; ("", "") when it is neither."""
    arguments = list(command[1:])
    while arguments:
        argument = arguments.pop(0)
        if argument == "-m":
            return "module", arguments[0] if arguments else ""
        if argument.startswith("-m"):
            return "module", argument[2:]
        if argument.startswith("-c") or argument == "-":
            return "", ""
        if argument in _OPTIONS_WITH_VALUE:
            arguments[:1] = []
        elif not argument.startswith("-"):
            return "file", argument
        elif argument.endswith("m") and not argument.startswith("--"):  # -Im module
            return "module", arguments[0] if arguments else ""
    return "", ""
