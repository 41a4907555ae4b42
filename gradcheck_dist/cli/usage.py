"""A command line that cannot be read: what typer says of it, in the words of this package's errors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradcheck_dist.cli.places import quoted
from gradcheck_dist.errors import GradcheckError, nearest, unknown_value

EXAMPLES = {
    "run": "gradcheck run -- torchrun --nproc-per-node 2 train.py",
    "diagnose": "gradcheck diagnose runs/mine",
    "watch": "gradcheck watch runs/mine",
    "export": "gradcheck export runs/mine",
    "compare": "gradcheck compare runs/control runs/test",
}
"""Of the commands that cannot do without an argument."""

MEANT = {
    **dict.fromkeys(("tui", "ui", "view", "show", "live", "open"), "gradcheck watch RUN"),
    **dict.fromkeys(("check", "judge", "analyze", "analyse"), "gradcheck diagnose RUN"),
    **dict.fromkeys(("record", "trace"), "gradcheck run -- CMD"),
    **dict.fromkeys(("list", "scenarios", "demo"), "gradcheck scenario --list"),
    "rules": "gradcheck explain",
    "help": "gradcheck --help",
    "version": "gradcheck --version",
}
"""What other programs call what a command here does."""

_NUMBERS = {int: "integers", float: "numbers"}


def unknown_command(word: str, commands: Iterable[str]) -> GradcheckError:
    """E721: the first word is no command. It may be an option, a run, or a program to record."""
    if word.startswith("-"):
        return GradcheckError(
            f"{word!r} stands before a command. Options follow the command, as in `gradcheck diagnose RUN --first`; "
            "alone there are --help and --version.",
            code="E721",
        )
    meant = ""
    if word in MEANT:
        meant = f" Did you mean `{MEANT[word]}`?"
    elif Path(word).exists():
        meant = f" To judge a run: `gradcheck diagnose {quoted(word)}`."
    elif shutil.which(word):
        meant = f" To record a program: `gradcheck run -- {word} ...`."
    if meant:
        return GradcheckError(
            f"{word!r} is no command of gradcheck.{meant} `gradcheck --help` lists the commands.", code="E721"
        )
    return unknown_value("command", word, commands, code="E721", hint="`gradcheck --help` says what each does.")


def refusal(error: Exception, command: str, parameters: list[Any]) -> GradcheckError | None:
    """What is wrong with the command line of `gradcheck COMMAND`, whose typer parameters these are; None where `error`
    is no usage error of typer's.

    Codes: E722 an unknown option, E723 something is missing, E724 something is too many, E725 a value is not legal.
    """
    # The types of these errors are private to typer; what they carry is not.
    if not hasattr(error, "format_message"):
        return None
    name, see = f"gradcheck {command}", f"`gradcheck {command} --help` explains it."
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        return _unknown_option(option, command, parameters)
    if option is not None:
        found = next((one for one in parameters if option in (*one.opts, *one.secondary_opts)), None)
        if found is None or found.is_flag:
            return GradcheckError(f"{option} of {name} takes no value. Write {option} alone.", code="E724")
        return GradcheckError(f"{option} of {name} needs {_about(found)}{see}", code="E723")
    found = getattr(error, "param", None)
    if hasattr(error, "param_type"):
        example = EXAMPLES.get(command)
        return GradcheckError(
            f"{name} needs {_about(found)}" + (f"For example: `{example}`." if example else see),
            code="E723",
        )
    if found is not None:
        return _illegal(error, found, see)
    return _too_many(error, name, parameters, see)


def _unknown_option(option: str, command: str, parameters: list[Any]) -> GradcheckError:
    legal = {name for one in parameters for name in (*one.opts, *one.secondary_opts) if name.startswith("--")}
    bare = {name.lstrip("-"): name for name in sorted(legal)}  # the dashes would make all of them look alike
    close = [bare[name] for name in nearest(option.lstrip("-"), bare)]
    meant = f" Did you mean: {', '.join(close)}?" if close else ""
    theirs = " An option of your own command belongs behind `--`." if command == "run" else ""
    return GradcheckError(
        f"unknown option {option!r} of gradcheck {command}.{meant}{theirs} `gradcheck {command} --help` lists all.",
        code="E722",
    )


def _illegal(error: Exception, parameter: Any, see: str) -> GradcheckError:
    name = parameter.opts[0] if parameter.opts[0].startswith("-") else _metavar(parameter)
    given = _given(error)
    descriptor = parameter.type_descriptor
    if descriptor.choices is not None:
        return unknown_value(name, given, [str(getattr(one, "value", one)) for one in descriptor.choices], code="E725")
    kind = _NUMBERS.get(getattr(descriptor.annotation, "__origin__", descriptor.annotation))
    if kind is None:
        return GradcheckError(f"{name} is {given!r}: {getattr(error, 'message', error)}. {see}", code="E725")
    low, high = parameter.min, parameter.max
    span = "" if low is None else f" from {low} up" if high is None else f" from {low} to {high}"
    return GradcheckError(f"{name} is {given!r}; legal values are {kind}{span}. {see}", code="E725")


def _given(error: Exception) -> object:
    """The value that was refused: pydantic has it, behind typer's error."""
    cause = error.__cause__
    problems = cause.errors() if cause is not None and hasattr(cause, "errors") else []
    return problems[0].get("input") if problems else None


def _too_many(error: Exception, name: str, parameters: list[Any], see: str) -> GradcheckError:
    words = re.search(r"\((?!s\))(.*)\)", str(getattr(error, "message", error)), re.DOTALL)
    if words is None:
        return GradcheckError(f"{name}: {error}. {see}", code="E724")
    takes = " ".join(_metavar(one) for one in parameters if one.param_type_name == "argument")
    quotes = " A name with spaces needs quotes." if takes else ""
    return GradcheckError(
        f"{words[1]!r} is too many: {name} takes {takes or 'options only'}.{quotes} {see}", code="E724"
    )


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name)


def _about(parameter: Any) -> str:
    """What it stands for, with the beginning of its help."""
    said = str(parameter.help or "").strip().rstrip(".")
    return f"{parameter.metavar or 'a value'}{': ' if said else ''}{said[:1].lower()}{said[1:]}. "
