"""A run in a notebook: `run = gradcheck_dist.load("runs/x")` shows its verdict, tables and figures.

pandas and plotly load when a table or figure is asked for.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Container
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gradcheck_dist.diagnosis.finding import Report, ScenarioReport
from gradcheck_dist.diagnosis.rules import all_rules, find_rule
from gradcheck_dist.errors import GradcheckError, unknown_value
from gradcheck_dist.progress_bar import progress_bar
from gradcheck_dist.reports import figures, plain, timeline
from gradcheck_dist.reports.document import Document, build
from gradcheck_dist.reports.figure import Figure
from gradcheck_dist.reports.html_report import culprit_html, table_html
from gradcheck_dist.reports.json_report import decode
from gradcheck_dist.reports.page import prose_html
from gradcheck_dist.reports.tables import COLUMNS, OF_RUN, Column, table
from gradcheck_dist.steps import chosen_steps
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import Run, read_run
from gradcheck_dist.trace.store import Place, Where, place_of

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

_COLOURS = {"clean": "#1e6f3e", "findings": "#b3261e", "undetermined": "#8a5a00"}
_TYPES = {"int": "Int64", "float": "float64", "str": "string", "bool": "boolean"}


def load(path: Where, *, objective: str | None = None, steps: Container[int] | str | None = None) -> LoadedRun:
    """Read and judge a run folder, step by step in bounded memory, or read a JSON report.

    A bar tells how far it is when it takes longer than a second.

    Args:
        path: a run folder or its URL in a store that fsspec opens, or a file that `gradcheck report --format json`
            wrote.
        objective: what a step's gradient is meant to be; None takes what was recorded or inferred.
        steps: optimizer steps to judge: a range, a collection, or text such as "0:3"; None takes all.

    Raises:
        GradcheckError: E504, E505 no run lies there; E701, E702 the file is no report; E712 `steps` names
            none; E901 it holds several runs.
    """
    place = place_of(path)
    if place.is_file():
        report = decode(place.read_bytes(), str(place))
        if isinstance(report, ScenarioReport):
            names = ", ".join(variant.variant for variant in report.variants)
            raise GradcheckError(
                f"{place} is a scenario's report of the variants {names}. Load the run folder of one of them.",
                code="E901",
            )
        return LoadedRun(report, None)
    chosen = chosen_steps(steps)
    with progress_bar(f"judging {place.name}") as say:
        report = diagnose_run(
            place, objective=objective, steps=chosen, progress=lambda done: say(done.share, str(done))
        )
    return LoadedRun(report, place)


def prediction(*what_if: str, **setup: Any) -> Page:
    """Which hand scales a weight by what, without a run: `prediction("loss_scale=R", ddp=4, accum=3)`.

    Args:
        what_if: changes to show beside it, as NAME=VALUE.
        setup: fields of `gradcheck_dist.predict.model.Setup`, the options of `gradcheck predict`.

    Raises:
        GradcheckError: E801, E802 the setup is not possible; E803 no such field.
    """
    from gradcheck_dist.predict import render
    from gradcheck_dist.predict.model import Setup, changed, predict

    legal = [field.name for field in dataclasses.fields(Setup)]
    for key in setup:
        if key not in legal:
            raise unknown_value("setting", key, legal, code="E803")
    asked = Setup(**setup)
    shown = {"as configured": asked} | {f"with {change}": changed(asked, change) for change in what_if}
    return Page("\n\n".join(render.text(predict(one), name) for name, one in shown.items()), is_code=True)


class Page:
    """Markdown that a notebook renders and a terminal prints."""

    def __init__(self, text: str, *, is_code: bool = False) -> None:
        self.text = text
        self._is_code = is_code

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return f"```text\n{self.text}\n```" if self._is_code else self.text


class LoadedRun:
    """A judged run. `report` is the whole document; `run` are the events that it was judged from, read when they are
    asked for (None for a JSON report)."""

    def __init__(self, report: Report, folder: Place | None) -> None:
        self.report = report
        self._folder = folder
        self.figure = Figures(self)

    @cached_property
    def run(self) -> Run | None:
        return read_run(self._folder) if self._folder is not None else None

    @cached_property
    def _document(self) -> Document:
        return build(self.report)

    @property
    def verdict(self) -> str:
        """ "clean", "findings" or "undetermined"."""
        return self.report.verdict

    @property
    def findings(self) -> pandas.DataFrame:
        """One row a finding."""
        return self._frame("findings")

    def weights(self) -> pandas.DataFrame:
        """One row a step, unit, holder rank and contribution; weights in 1/tokens."""
        return self._frame("weights")

    def events(self) -> pandas.DataFrame:
        """One row a recorded event, in the order of each rank; times in ns."""
        self._need_run("events")
        return self._frame("events")

    def norms(self) -> pandas.DataFrame:
        """One row a clipping: norm before and after, threshold, coefficient. Without clipping there is none; `metrics`
        has what was logged of each step."""
        self._need_run("norms")
        return self._frame("norms")

    def tokens(self) -> pandas.DataFrame:
        """One row a contribution with its number of valid tokens."""
        return self._frame("tokens")

    def metrics(self) -> pandas.DataFrame:
        """One row a step and name: loss, grad_norm, num_tokens and logged scalars."""
        return self._frame("metrics")

    @staticmethod
    def columns(name: str) -> tuple[Column, ...]:
        """Name, type, unit and meaning of a table's columns.

        Raises:
            GradcheckError: E902 there is no such table.
        """
        if name not in COLUMNS:
            raise unknown_value("table", name, COLUMNS, code="E902")
        return COLUMNS[name]

    def explain(self, rule: str | None = None) -> Page:
        """The page of a rule by code or name; of the first finding's rule when none is named.

        Raises:
            GradcheckError: E903 there is no such rule, or nothing was found and none was named.
        """
        if rule is None:
            if not self.report.findings:
                raise GradcheckError(
                    "nothing was found that could be explained. Name a rule: run.explain('GS101').", code="E903"
                )
            rule = self.report.findings[0].code
        found = find_rule(rule)
        if found is None:
            raise unknown_value("rule", rule, [one.CODE for one in all_rules()], code="E903")
        return Page(f"# {found.CODE} {found.NAME}\n\n{found.__doc__ or ''}")

    def _frame(self, name: str) -> pandas.DataFrame:
        import pandas as pd

        made = table(name, self.report, self.run if name in OF_RUN else None)
        names = [column.name for column in made.columns]
        types = {column.name: _TYPES[column.kind] for column in made.columns}
        frame = pd.DataFrame.from_records(made.rows, columns=names).astype(types)
        frame.attrs["units"] = {column.name: column.unit for column in made.columns if column.unit}
        return frame

    def _need_run(self, what: str) -> None:
        if self._folder is None:
            raise GradcheckError(
                f"a JSON report holds no {what}. Load the run folder that it was made from.", code="E904"
            )

    def __repr__(self) -> str:
        return plain.render(self._document).rstrip()

    def _repr_html_(self) -> str:
        document = self._document
        colour = _COLOURS[document.verdict]
        parts = [
            f'<div style="border-left:5px solid {colour};padding:2px 12px;overflow-wrap:anywhere">'
            f'<p style="color:{colour};font-weight:600;margin:4px 0">{prose_html(document.headline)}</p>'
            + "".join(
                f'<p style="margin:4px 0"><b>{label.capitalize()}</b> {prose_html(text)}</p>'
                for label, text in document.answer
            )
            + f'<p style="margin:4px 0;opacity:.7">{html.escape(document.title)}</p></div>'
        ]
        if document.findings and document.findings[0].culprit:
            parts.append(culprit_html(document.findings[0].culprit))
        if document.tables:
            parts.append(table_html(document.tables[0]))
        parts.append(
            "<p style='opacity:.7'>.findings .weights() .events() .norms() .tokens() .metrics() "
            ".figure.weights() .explain()</p>"
        )
        return "".join(parts)


class Figures:
    """The figures of a run as plotly figures."""

    def __init__(self, judged: LoadedRun) -> None:
        self._judged = judged

    @property
    def _report(self) -> Report:
        return self._judged.report

    def weights(self) -> plotly.graph_objects.Figure:
        """Ratio of every weight in the first step with a finding: holders by contributions."""
        return _plotly(figures.weights_figure(self._report), "weights", "no weight was recorded")

    def timeline(self) -> plotly.graph_objects.Figure:
        """The events of that step as lanes, one a rank."""
        run = self._judged.run
        made = timeline.timeline_figure(self._report, run) if run is not None else None
        return _plotly(made, "timeline", "it needs the events of a run folder")

    def norms(self) -> plotly.graph_objects.Figure:
        """Gradient norm, loss and tokens by step."""
        return _plotly(figures.norms_figure(self._report), "norms", "fewer than two steps were recorded")

    def ratio(self) -> plotly.graph_objects.Figure:
        """Ratio along every axis of the mesh, the contributions and the steps."""
        return _plotly(figures.ratio_figure(self._report), "ratio", "no axis has more than one coordinate")


def _plotly(made: Figure | None, name: str, reason: str) -> plotly.graph_objects.Figure:
    if made is None:
        raise GradcheckError(f"there is no figure {name}: {reason}.", code="E905")
    import plotly.graph_objects as go

    figure = go.Figure(made.spec)
    figure.update_layout(title={"text": made.title}, margin={"t": 90})
    return figure
