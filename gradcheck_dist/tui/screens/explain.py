"""Screen 7: a rule's page beside its finding; copy the fix, write the report."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Static

from gradcheck_dist.reports.text import by_line
from gradcheck_dist.tui.screens.base import RunScreen
from gradcheck_dist.tui.snapshot import Selection, Snapshot
from gradcheck_dist.tui.widgets.rule_page import RulePage


class Explain(RunScreen):
    """Left what was found here, right what the rule says in general. Of a run that could not be judged: why, and the
    coverage."""

    MODE = "explain"
    DEFAULT_CSS = """
    Explain #finding-side { width: 2fr; border-right: solid $primary; padding: 0 1; }
    Explain #page-side { width: 3fr; }
    Explain #finding-side:focus { border-right: heavy $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "copy", "Copy the fix"),
        Binding("e", "export", "Write report"),
        Binding("n", "finding(1)", "Next finding"),
    ]

    def body(self) -> ComposeResult:
        with Horizontal():
            with VerticalScroll(id="finding-side"):
                yield Static(id="finding")
            with VerticalScroll(id="page-side", classes="main"):
                yield RulePage()

    def nothing(self, snapshot: Snapshot) -> str | None:
        if snapshot.report is None or not (snapshot.report.findings or snapshot.report.verdict == "undetermined"):
            return "Nothing was found in this run, so there is nothing to explain. e writes the report all the same."
        return None

    def show(self, snapshot: Snapshot, selection: Selection) -> None:
        from gradcheck_dist.diagnosis.rules import find_rule

        if snapshot.report is None or snapshot.document is None:
            return
        text = Text()
        if snapshot.report.verdict == "undetermined":  # whole: the Overview's box may be too small for it
            answer = sorted(snapshot.document.answer, key=lambda row: row[0] == "why")
            for label, told in (("verdict", snapshot.document.headline), *answer):
                text.append(f"{label}\n", "bold underline").append(f"{told}\n\n")
        if not snapshot.report.findings:
            self.query_one("#finding", Static).update(text)
            self.query_one(RulePage).show("coverage", "\n".join(f"- {line}" for line in snapshot.document.coverage))
            return
        index = min(selection.finding, len(snapshot.report.findings) - 1)
        finding, words = snapshot.report.findings[index], snapshot.document.findings[index]
        text.append(f"{words.title}\n", "bold")
        text.append(f"finding {index + 1} of {len(snapshot.report.findings)}\n\n", "dim")
        text.append(f"{words.factor}\n\n")
        text.append(f"{words.where}\n\n", "dim")
        text.append("why\n", "bold underline").append(f"{words.explanation}\n\n")
        if finding.consequence:
            text.append("what it means for this run\n", "bold underline").append(f"{by_line(finding.consequence)}\n\n")
        text.append("fix\n", "bold underline").append(f"{words.fix}\n\n")
        if words.culprit is not None:
            text.append("where\n", "bold underline").append(f"{words.culprit.line}\n")
            for fact in words.culprit.facts:
                text.append(f"{fact}\n", "dim")
        for fact in words.facts[len(words.consequences) :]:
            text.append(f"\n{fact}\n")
        self.query_one("#finding", Static).update(text)
        rule = find_rule(finding.code)
        page = inspect.cleandoc(rule.__doc__ or "") if rule is not None else "This version has no page for this rule."
        self.query_one(RulePage).show(words.title, page)

    def action_copy(self) -> None:
        report, selection = self.watch_app.shown.report, self.watch_app.selection
        if report is None or not report.findings:
            self.notify("There is no fix to copy.", markup=False)
            return
        self.app.copy_to_clipboard(report.findings[min(selection.finding, len(report.findings) - 1)].fix)
        # Whether a terminal takes it (OSC 52), it does not say.
        self.notify("The fix was sent to the terminal's clipboard. If it is not there, e writes it down.", markup=False)

    def action_finding(self, by: int) -> None:
        report = self.watch_app.shown.report
        if report is None or len(report.findings) < 2:
            self.notify("There is no other finding.", markup=False)
        else:
            self.watch_app.select_finding((self.watch_app.selection.finding + by) % len(report.findings))

    def action_export(self) -> None:
        from gradcheck_dist.reports import markdown

        report = self.watch_app.shown.report
        if report is None:
            self.notify("There is no report yet.", severity="warning", markup=False)
            return
        try:
            path = write_new(Path.cwd(), "gradcheck-report", markdown.render(report))
        except OSError as error:
            self.notify(f"Cannot write the report: {error.strerror}", severity="error", markup=False)
            return
        self.notify(f"Wrote {path}", markup=False)


def write_new(folder: Path, name: str, text: str) -> Path:
    """Write NAME.md, or NAME-2.md and so on: nothing is overwritten."""
    for number in range(1, 1000):
        path = folder / (f"{name}.md" if number == 1 else f"{name}-{number}.md")
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(17, f"{name}-1.md to {name}-999.md all exist")
