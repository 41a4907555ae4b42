"""The command `gradcheck`: its subcommands, and what becomes of errors."""

from __future__ import annotations

import importlib
import os
import sys

import typer

from gradcheck_dist.errors import GradcheckError

COMMANDS = (
    "run",
    "scenario",
    "matrix",
    "study",
    "diagnose",
    "watch",
    "report",
    "compare",
    "export",
    "predict",
    "explain",
    "doctor",
)
"""Each is a function of the same name in a module of the same name beside this one."""

INTERRUPTED = 130
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_HELP = """Name the factor by which distributed training scales its gradients wrongly, and the line that does it.

Exit codes: 0 clean, 1 findings, 2 could not run or could not judge. `gradcheck --version` shows the version."""


def build(*names: str) -> typer.Typer:
    """An app with these commands. One of a single command is that command, without a group around it."""
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
    elif arguments and arguments[0] in COMMANDS:
        # Only the one command is loaded, and no group: parsing a group's options makes typer 0.29 load pydantic,
        # which would double the time of `gradcheck COMMAND --help`.
        build(arguments[0])(args=arguments[1:], prog_name=f"gradcheck {arguments[0]}")
    else:
        build(*COMMANDS)(args=arguments, prog_name="gradcheck")


def main() -> None:
    """The entry point."""
    try:
        run(sys.argv[1:])
    except GradcheckError as error:
        print(f"error {error.code}: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read the results has had enough; the interpreter must not stumble over its last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
