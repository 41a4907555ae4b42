"""The command `gradcheck`: its subcommands, and what becomes of errors."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import sys
from typing import TYPE_CHECKING

from gradcheck_dist.errors import GradcheckError

if TYPE_CHECKING:
    import typer

COMMANDS = {
    "run": "Record and judge anybody's trainer, without changing it.",
    "scenario": "Reproduce a known bug and diagnose it.",
    "matrix": "Run correct configurations, on which nothing may be found.",
    "study": "Lay the curves of parallel strategies beside those of one process.",
    "diagnose": "Judge a recorded run.",
    "watch": "Look at a run, live or afterwards.",
    "report": "Write a run's report for scripts, pull requests, browsers or CI.",
    "compare": "Compare runs or logs: what factor lies between their norms?",
    "export": "Write a run's tables, timeline or scalars for other programs.",
    "predict": "Say what each part of a configuration scales by; nothing is run.",
    "explain": "Show the page of a rule.",
    "doctor": "Tell what works on this machine.",
    "bench": "Measure what recording and judging cost on this machine.",
}
"""Each is a function of the same name in a module of the same name beside this one, with the first sentence of its
docstring: `gradcheck --help` must not load them all."""

INTERRUPTED = 130
_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_HELP = """Name the factor by which distributed training scales its gradients wrongly,
and the line that does it.

Exit codes: 0 clean, 1 findings, 2 could not run or could not judge.
`gradcheck --version` shows the version."""


def build(*names: str) -> typer.Typer:
    """An app with these commands. One of a single command is that command, without a group around it."""
    import typer

    app = typer.Typer(
        name="gradcheck",
        help=_HELP if len(names) > 1 else None,
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
        no_args_is_help=len(names) > 1,
        context_settings=_SETTINGS,
    )
    for name in names:
        module = importlib.import_module(f"gradcheck_dist.cli.{name}")
        settings = {**_SETTINGS, **getattr(module, "SETTINGS", {})}
        app.command(name, context_settings=settings)(getattr(module, name))
    return app


def run(arguments: list[str]) -> None:
    """Run one command line; ends by SystemExit, or by the error that the command raised."""
    if arguments == ["--version"]:
        from gradcheck_dist import __version__

        print(f"gradcheck {__version__}")
    elif not arguments or arguments[0] in ("--help", "-h"):
        print(overview())
        if not arguments:
            raise SystemExit(2)  # as a group of commands does
    else:
        _run_command(arguments[0], arguments[1:])


def _run_command(name: str, arguments: list[str]) -> None:
    if name not in COMMANDS:
        from gradcheck_dist.cli.usage import unknown_command

        raise unknown_command(name, COMMANDS)
    # Only the one command is loaded, and no group: parsing a group's options makes typer 0.29 load pydantic,
    # which would double the time of `gradcheck COMMAND --help`.
    app = build(name)
    import typer

    command = typer.main.get_command(app)
    if not gc.isenabled():
        gc.freeze()  # nothing of what was loaded is ever garbage, nor need the end of the process look for it
        gc.enable()
    # Not app(): that prints its own words for a wrong command line, and says nothing at all on Ctrl-C.
    try:
        with command.make_context(f"gradcheck {name}", arguments) as context:
            command.invoke(context)
    except typer.Exit as leaving:
        raise SystemExit(leaving.exit_code) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    except Exception as error:
        from gradcheck_dist.cli.usage import refusal

        refused = refusal(error, name, command.params)
        if refused is None:
            raise
        raise refused from None
    raise SystemExit(0)


def overview() -> str:
    """What `gradcheck --help` shows."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items())
    about = "\n".join(f"  {line}".rstrip() for line in _HELP.splitlines())
    return (
        f"Usage: gradcheck COMMAND [ARGS]...\n\n{about}\n\nOptions:\n  -h, --help  Show this message and exit.\n\n"
        f"Commands (each has --help):\n{commands}"
    )


def _has_folder() -> bool:
    from pathlib import Path  # 3 ms, which `gradcheck --help` need not take

    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def main() -> None:
    """The entry point."""
    gc.disable()  # until the command is loaded: looking through it as it grows takes an eighth of a `--help`
    try:
        run(sys.argv[1:])
    except GradcheckError as error:
        print(f"error {error.code}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as interrupt:
        print(f"interrupted: {interrupt}" if interrupt.args else "interrupted before it was done", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read the results has had enough; the interpreter must not stumble over its last flush.
        # 128 + SIGPIPE, as other programs end then: 1 would say that something was found.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except PermissionError as error:
        where = f" {error.filename}" if error.filename else ""
        print(
            f"error E711: this user may not read or write{where}. Name another place, or change its permissions.",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not _has_folder():
            print(
                "error E711: the folder that you are in was removed. Go to another one (cd), and run it again.",
                file=sys.stderr,
            )
            raise SystemExit(2) from None
        if error.errno not in _NO_PLACE:
            raise
        print(
            f"error E711: cannot write the result: {error.strerror}. Make space, or write to another place.",
            file=sys.stderr,
        )
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(2) from None
