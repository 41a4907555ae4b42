"""gradcheck run -- CMD..."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradcheck_dist.cli.diagnose import MAX_JOBS, Objective
from gradcheck_dist.cli.interrupted import telling
from gradcheck_dist.cli.output import Format, check_folder, check_report, show, write_report
from gradcheck_dist.cli.places import local, quoted
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.steps import parse_steps

if TYPE_CHECKING:
    from gradcheck_dist.diagnosis.finding import Report

SETTINGS = {"allow_interspersed_args": False}
"""What follows the first word that is no option of ours belongs to the user's command."""


def run(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD...", help="The command, as you run it now.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=local("recording"), help="Run folder. Default: runs/<time>-<pid>."),
    ] = None,
    steps: Annotated[str, typer.Option(metavar="A:B", help="Record the optimizer steps A to B-1.")] = "0:3",
    every: Annotated[int | None, typer.Option(min=1, metavar="N", help="And every N-th step after them.")] = None,
    every_step: Annotated[
        bool,
        typer.Option("--every-step", help="Record all other steps too, without samples: tokens, weights, factors."),
    ] = False,
    sample_size: Annotated[
        int | None,
        typer.Option(min=8, metavar="N", help="Sampled elements a parameter. Default: 96, more beyond 24 ranks."),
    ] = None,
    objective: Objective = None,
    axes: Annotated[
        str | None, typer.Option(metavar="NAME=N,...", help="Mesh degrees, as dp_shard=4,tp=2. Default: inferred.")
    ] = None,
    same_data: Annotated[
        str | None,
        typer.Option(metavar="R,R/R,R", help="Ranks that evaluate the same tokens, as 0,1/2,3. Default: inferred."),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Weights to the last digit: replaces one step's gradients, then stops training."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Also check every module's backward by central differences, once. Not free."),
    ] = False,
    meant: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A module or autograd Function that --verify shall not accuse; repeatable."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 on findings, 2 when nothing could be judged.")
    ] = False,
    report: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Write the report too, by ending: .json .md .html .sarif .xml (JUnit); repeatable.",
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Add ratios, norms and findings to this TensorBoard folder.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Open the screens beside the command.")] = False,
    form: Annotated[
        Format, typer.Option("--format", help="text: on stderr. json, md: on stdout, at the end.")
    ] = Format.text,
) -> None:
    """Record and judge anybody's trainer, without changing it.

    Put `gradcheck run --` before the command that you have: torchrun, accelerate launch, python train.py. Its output,
    signals and exit code pass through. The verdict follows on stderr.

    --live: the screens take the terminal, the command's output goes into DIR/output.log (ctrl+o), and is printed when
    the screens close. Closing them, and Ctrl-C in them, leave the command alone; after that Ctrl-C interrupts it.

    Exit codes: the command's own; with --strict, where that is 0: 1 findings, 2 could not judge.
    """
    from gradcheck_dist.boot.protocol import VARIABLE, Boot, Steps

    if meant and not verify:
        raise GradcheckError(
            f"--meant {meant[0]} exempts what --verify checks, and --verify is missing. Add it, or leave --meant out.",
            code="E726",
        )
    if exact and (every is not None or every_step):
        more = "--every-step" if every_step else "--every"
        raise GradcheckError(
            f"--exact stops the training in the first recorded step, and {more} records later ones. Give one of them.",
            code="E726",
        )
    chosen = parse_steps(steps) or range(3)
    if objective is not None:
        from gradcheck_dist.objectives import check_objective

        check_objective(objective)
    degrees = None
    if axes is not None:
        from gradcheck_dist.axes import parse_axes

        degrees = parse_axes(axes).as_dict()
    shared = None
    if same_data is not None:
        from gradcheck_dist.axes import parse_same_data

        shared = parse_same_data(same_data)
    for file in report or ():
        check_report(file)
    if tensorboard is not None:
        check_folder(tensorboard, "--tensorboard")
    if live:
        from gradcheck_dist.cli.live import check_terminal

        check_terminal()
    folder, made = _make_folder(out, command)
    _say(f"recording into {folder}")
    if exact:
        chosen = range(chosen.start, chosen.start + 1)
        _say(f"--exact: training stops in step {chosen.start}, before the optimizer")
    boot = Boot(
        str(folder),
        Steps(chosen.start, chosen.stop, every),
        objective,
        verify,
        exact,
        every_step,
        degrees,
        shared,
        tuple(meant or ()),
        sample_size,
    )
    environment = {**os.environ, VARIABLE: boot.encode()}
    try:
        if live:
            from gradcheck_dist.cli.live import run_beside

            code = run_beside(command, environment, folder)
        else:
            from gradcheck_dist.cli import child

            code = child.run(command, environment)
    except GradcheckError:  # the command cannot start: nothing of it stays
        _unmake(folder, made)
        raise
    sys.stdout.flush()
    judged = _judge(folder, command, code, chosen.start)
    if judged is None:
        raise typer.Exit(code or (2 if strict else 0))
    for file in report or ():
        write_report(file, judged)
    if tensorboard is not None:
        _add_scalars(judged, folder, tensorboard)
    _show(judged, form, folder)
    raise typer.Exit(code or (judged.exit_code if strict else 0))


def _make_folder(out: Path | None, command: list[str]) -> tuple[Path, list[Path]]:
    """The run folder, and which folders were made for it, the innermost first."""
    from gradcheck_dist.trace.run import create_run_dir

    folder = (out or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    existed = folder.is_dir() and any(folder.iterdir())
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    create_run_dir(folder, {"command": command})
    if not existed:
        folder.chmod(0o700)
    return folder, made


def _unmake(folder: Path, made: list[Path]) -> None:
    from gradcheck_dist.trace.run import MANIFEST

    with contextlib.suppress(OSError):  # somebody else's things are in it by now
        (folder / MANIFEST).unlink()
        if folder in made:
            (folder / "output.log").unlink(missing_ok=True)  # of --live, and empty
        for one in made:
            one.rmdir()


def _unwritable(folder: Path) -> str | None:
    """Why no rank could write into the run folder, None when one could."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _judge(folder: Path, command: list[str], code: int, first: int) -> "Report | None":
    """The report; None, and why on stderr, when there is nothing to judge. The command's result stands either way.

    `first`: the first step that was to be recorded.
    """
    from gradcheck_dist.cli.progress import Progress
    from gradcheck_dist.stream.diagnose import diagnose_run
    from gradcheck_dist.trace.run import trace_files

    if not trace_files(folder):
        if (reason := _unwritable(folder)) is not None:
            _say(f"nothing was recorded: {folder} cannot be written ({reason}). --out names another run folder.")
            return None
        if code:
            _say(f"nothing was recorded: the command ended with exit code {code} before any loss. Its output says why.")
            return None
        too_early = f"Training may have ended before step {first} (--steps; the first is 0). " if first else ""
        _say(
            "nothing was recorded: gradcheck saw no loss go backward into a parameter below this command, or said "
            f"above why it did not record. {too_early}Is gradcheck-dist installed in the environment that "
            f"{command[0]!r} uses? `gradcheck doctor` tells what works here. Not followed are torch.func's transforms "
            "(grad, vjp, vmap) and functions that add to `.grad` by themselves: judge the same loss by .backward()."
        )
        return None
    try:
        again = f"the run is kept. gradcheck diagnose {quoted(folder)} judges it."
        with telling(lambda: again), Progress(f"judging {folder}") as progress:
            return diagnose_run(
                folder,
                jobs=min(os.cpu_count() or 1, MAX_JOBS),
                progress=lambda done: progress.update(f"judging {folder}: {done}"),
            )
    except GradcheckError as error:
        _say(f"could not judge. error {error.code}: {error}")
        return None
    except Exception as error:  # the command's result must not be lost with ours
        _say(f"could not judge: {type(error).__name__}: {error}. `gradcheck diagnose {quoted(folder)}` shows where.")
        return None


def _add_scalars(judged: "Report", folder: Path, log: Path) -> None:
    """What cannot be written is told: the command's result stands either way."""
    from gradcheck_dist.reports import exports
    from gradcheck_dist.trace.run import read_run

    try:
        for path in exports.write(judged, read_run(folder, samples=False), "tensorboard", log):
            _say(f"wrote {path}")
    except (OSError, GradcheckError) as error:
        _say(f"could not write to {log}: {error}")


def _show(judged: "Report", form: Format, folder: Path) -> None:
    if form != Format.text:
        show(judged, form)
    else:
        from gradcheck_dist.reports import terminal

        terminal.write_report(judged, sys.stderr)
    here = Path.cwd()
    place = quoted(folder.relative_to(here) if folder.is_relative_to(here) else folder)
    _say(f"to see this again: gradcheck diagnose {place}; as screens: gradcheck watch {place}")


def _say(message: str) -> None:
    print(f"gradcheck: {message}", file=sys.stderr, flush=True)
