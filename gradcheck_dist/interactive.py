"""What a notebook runs: `%%gradcheck` around a training loop, `scenario()` to reproduce a known bug.

    %load_ext gradcheck_dist
    %%gradcheck --steps 0:3
    for batch in loader: ...

What a notebook reads lives in notebook.py, which needs no torch.
"""

from __future__ import annotations

import argparse
import html
import itertools
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gradcheck_dist.diagnosis.finding import ScenarioReport
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.notebook import LoadedRun, load
from gradcheck_dist.reports import formats
from gradcheck_dist.reports.document import build
from gradcheck_dist.steps import parse_steps

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

RESULT = "run"
_SIGNS = {True: "as the file says", False: "NOT as the file says"}


class ReproducedScenario:
    """A scenario that ran: `report` is the whole document, `runs` the judged run of each variant by name."""

    def __init__(self, report: ScenarioReport, runs: Mapping[str, LoadedRun]) -> None:
        self.report = report
        self.runs = dict(runs)

    def __getitem__(self, variant: str) -> LoadedRun:
        return self.runs[variant]

    def __repr__(self) -> str:
        return formats.write(self.report, "md")

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(variant.variant)}</td><td>{html.escape(_headline(variant.report))}</td>"
            f"<td>{_SIGNS[variant.as_expected]}</td></tr>"
            for variant in self.report.variants
        )
        head = "<tr><th>variant</th><th>what gradcheck found</th><th></th></tr>"
        return (
            f"<p><b>{html.escape(self.report.scenario)}</b>: {html.escape(self.report.title)}</p>"
            f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"
            "<p style='opacity:.7'>.runs[variant] is the judged run of a variant</p>"
        )


def _headline(report: Any) -> str:
    return build(report).headline if report is not None else "could not run"


def scenario(name: str, *, library: str | None = None, keep: str | None = None, **overrides: Any) -> ReproducedScenario:
    """Reproduce a known bug on this machine and judge it, as `gradcheck scenario NAME` does.

    Args:
        library: folder of scenarios; None takes the package's.
        keep: folder that gets one run folder a variant; None uses one that goes with the result.
        overrides: nproc, accum, microbatches, seed, steps, dtype, data.

    Raises:
        GradcheckError: E601 no such scenario, E906 no such override, or a variant that could not run.
    """
    from dataclasses import fields

    from gradcheck_dist.errors import unknown_value
    from gradcheck_dist.scenarios.jobs import Overrides
    from gradcheck_dist.scenarios.runner import run_scenario
    from gradcheck_dist.scenarios.schema import load as load_scenario

    legal = [field.name for field in fields(Overrides)]
    for key in overrides:
        if key not in legal:
            raise unknown_value("override", key, legal, code="E906")
    chosen = load_scenario(name, Path(library) if library else None)
    folder = Path(keep) if keep is not None else Path(tempfile.mkdtemp(prefix="gradcheck-")) / "runs"
    with _told(f"{name}: starting") as say:
        result = run_scenario(chosen, Overrides(**overrides), keep=folder, on_progress=say)
    if result.error is not None:
        raise result.error
    runs = {one.variant: load(folder / one.variant) for one in result.report.variants}
    for run in runs.values():
        _ = run.run  # read now: the folder goes with the result, a variant of it may be kept
    reproduced = ReproducedScenario(result.report, runs)
    if keep is None:
        weakref.finalize(reproduced, shutil.rmtree, folder.parent, ignore_errors=True)
    return reproduced


def run_cell(line: str, cell: str, shell: InteractiveShell) -> LoadedRun | None:
    """The cell magic `%%gradcheck`: run the cell with probes attached, then judge and show what it trained.

    The judged run is also bound to the name `run`, or to that of --name. An error of the cell is shown as ever, and
    what was recorded until then is judged.

    Raises:
        GradcheckError: E907 the options are wrong; E301 probes are attached already.
    """
    from gradcheck_dist.probes import attach

    options = _options(line)
    session = attach(options.out or _unused(), objective=options.objective, steps=options.steps)
    try:
        shell.run_cell(cell)  # type: ignore[no-untyped-call, unused-ignore]
    finally:
        session.detach()
    run = load(session.run_dir)
    shell.user_ns[options.name] = run
    return run


def load_ipython_extension(shell: InteractiveShell) -> None:
    """`%load_ext gradcheck_dist`: registers `%%gradcheck`."""

    def gradcheck(line: str, cell: str) -> LoadedRun | None:
        try:
            return run_cell(line, cell, shell)
        except GradcheckError as error:
            print(f"error {error.code}: {error}")
            return None

    gradcheck.__doc__ = run_cell.__doc__
    register: Any = shell.register_magic_function
    register(gradcheck, magic_kind="cell", magic_name="gradcheck")


def _unused() -> Path:
    """A run folder named after the time; two cells may begin in one second."""
    name = time.strftime("%Y%m%d-%H%M%S")
    places = (Path("runs") / f"{name}-{number}" for number in itertools.count(1))
    return next(place for place in places if not place.exists())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise GradcheckError(f"%%gradcheck: {message}. {self.format_usage().strip()}", code="E907")


def _options(line: str) -> argparse.Namespace:
    import shlex

    parser = _Parser(prog="%%gradcheck", add_help=False, allow_abbrev=False)
    parser.add_argument("--out", metavar="DIR")
    parser.add_argument("--objective")
    parser.add_argument("--steps", metavar="A:B", default="0:3")
    parser.add_argument("--name", default=RESULT)
    options = parser.parse_args(shlex.split(line))
    options.steps = parse_steps(options.steps)
    return options


@contextmanager
def _told(text: str) -> Iterator[Callable[[str], None]]:
    """Somewhere to say what is being done: one line of a notebook that is written over and gone at the end."""
    shell: Any = sys.modules.get("IPython")
    if shell is None or shell.get_ipython() is None:
        yield lambda text: None
        return
    clear_output = shell.display.clear_output

    def say(now: str) -> None:
        clear_output(wait=True)
        print(now, flush=True)

    say(text)
    yield say
    clear_output()
