"""Running the user's command below us: its streams are inherited, signals go through, its exit code is ours."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradcheck_dist.errors import GradcheckError

_SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGQUIT")
_OF_THE_TERMINAL = {"SIGINT", "SIGQUIT"}


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `command` to its end; its exit code, 128 + n when signal n ended it.

    Raises:
        GradcheckError: E714 the command cannot be started.
    """
    with started(command, environment) as child:
        return exit_code(child.wait())


@contextlib.contextmanager
def started(
    command: Sequence[str], environment: Mapping[str, str], **streams: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """The command while it runs; signals sent to us reach it as long as this is open.

    Raises:
        GradcheckError: E714 the command cannot be started.
    """
    with _forwarded() as children:
        try:
            child = subprocess.Popen(list(command), env=dict(environment), **streams)
        except OSError as error:
            code = 126 if isinstance(error, PermissionError) else 127
            hint = "Write the command as you would without `gradcheck run --`."
            if isinstance(error, FileNotFoundError) and "/" not in command[0]:
                hint = "The PATH holds no such program: activate the environment that has it, or give its whole path."
            if command[0].endswith(".py") and Path(command[0]).is_file():
                hint = (
                    f"It is a script: `gradcheck run -- python {' '.join(command[:2])}{' ...' * (len(command) > 2)}`."
                )
            raise GradcheckError(
                f"cannot start {command[0]!r}: {error.strerror or error}. {hint}",
                code="E714",
                exit_code=code,
            ) from error
        children.append(child)
        yield child


def exit_code(code: int) -> int:
    """As a shell tells it: 128 + n when signal n ended the command."""
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _forwarded() -> Iterator[list[subprocess.Popen[bytes]]]:
    """While open, signals sent to this process go to the child.

    A terminal sends its Ctrl-C to the whole foreground group: there the child has it already.
    """
    children: list[subprocess.Popen[bytes]] = []
    of_terminal = _in_foreground()

    def forward(number: int, _frame: Any) -> None:
        if of_terminal and signal.Signals(number).name in _OF_THE_TERMINAL:
            return
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    before = {}
    for name in _SIGNALS:
        number = getattr(signal, name, None)
        # What was ignored for us (nohup) stays ignored, for us and for the child.
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, forward)
    try:
        yield children
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)
