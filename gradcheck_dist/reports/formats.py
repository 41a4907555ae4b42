"""The formats of a report. Each is one module with `render(report)` and `render_scenario(report)`."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from gradcheck_dist.diagnosis.finding import Report, ScenarioReport
from gradcheck_dist.errors import unknown_value

if TYPE_CHECKING:
    from gradcheck_dist.reports.page import PlotlyJs
    from gradcheck_dist.trace.run import Run

MODULES = {
    "json": "json_report",
    "md": "markdown",
    "html": "html_report",
    "sarif": "sarif",
    "junit": "junit",
    "github": "github",
}
SUFFIXES = {".json": "json", ".md": "md", ".html": "html", ".htm": "html", ".sarif": "sarif", ".xml": "junit"}


def write(report: Report | ScenarioReport, form: str, *, run: Run | None = None, plotlyjs: PlotlyJs = "inline") -> str:
    """A report in one of the formats. `run`, where it is at hand, adds the timeline to HTML.

    Raises:
        GradcheckError: E703 unknown format.
    """
    module = _module(form)
    more = {"plotlyjs": plotlyjs} if form == "html" else {}
    if isinstance(report, ScenarioReport):
        return str(module.render_scenario(report, **more))
    if form == "html":
        return str(module.render(report, run, **more))
    return str(module.render(report))


def _module(form: str) -> ModuleType:
    if form not in MODULES:
        raise unknown_value("format", form, MODULES, code="E703")
    return importlib.import_module(f"gradcheck_dist.reports.{MODULES[form]}")
