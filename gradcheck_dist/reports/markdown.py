"""A report as a pull request comment: verdict, the culprit's source, why, what to do, one table, the rest folded.

A comment has room for 65,536 characters, so whole parts are left out, last first, beyond MAX_BYTES. Names come from the
user's code or a stranger's trace: they can neither mention people, nor link, nor add markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gradcheck_dist.diagnosis.finding import Report, ScenarioReport
from gradcheck_dist.reports.culprit import Culprit
from gradcheck_dist.reports.document import Document, FindingText, build, scenario_summary
from gradcheck_dist.reports.text import printable
from gradcheck_dist.reports.weights import WeightTable
from gradcheck_dist.wording import plural

MAX_BYTES = 58_000
MARK = "<!-- gradcheck -->"
"""First line of every comment, so that a bot can find and replace its own."""
_SIGNS = {"clean": "✅", "findings": "❌", "undetermined": "⚠️"}
_MARKUP = re.compile(r"[\\*_\[\]#|>~$]|^[-+=](?=\s|[-+=]|$)|(?<=^\d)[.)](?=\s)")


def render(report: Report) -> str:
    """One run's report as Markdown."""
    tool = f"<sub>{text(printable(report.tool.name, 80))} {text(printable(report.tool.version, 80))}</sub>"
    return fit([MARK, *parts(build(report)), tool], MAX_BYTES)


def render_scenario(report: ScenarioReport) -> str:
    """A scenario's reports as Markdown: the summary, then one folded report a variant."""
    sentence, lines = scenario_summary(report)
    head = [MARK, f"### {'✅' if report.as_expected else '❌'} {text(sentence)}", bullets(lines)]
    share = (MAX_BYTES - 8_000) // max(1, len(report.variants))
    for variant in report.variants:
        if variant.report is not None:
            body = fit(parts(build(variant.report)), share)
            head.append(folded(printable(variant.variant, 80), body))
    return fit(head, MAX_BYTES)


def code(value: str) -> str:
    """`value` as an inline code span, whatever backticks it holds."""
    fence = "`" * (max((len(run) for run in re.findall("`+", value)), default=0) + 1)
    pad = " " if value.startswith("`") or value.endswith("`") or not value.strip() else ""
    return f"{fence}{pad}{value}{pad}{fence}"


def text(value: str) -> str:
    """`value` as prose in which nothing is markup but `code spans`."""
    pieces = value.split("`")
    if len(pieces) % 2 == 0:
        return _inert(value.replace("`", "'"))
    return "".join(code(piece) if index % 2 and piece else _inert(piece) for index, piece in enumerate(pieces))


def _inert(value: str) -> str:
    value = value.replace("&", "&amp;").replace("<", "&lt;")
    value = _MARKUP.sub(lambda match: "\\" + match[0], value)
    # GitHub links these after Markdown has been resolved, so a backslash does not stop it.
    value = re.sub(r"@(?=\w)", "@&#8203;", value)
    value = re.sub(r"\\#(?=\w)|(?<=GH)-(?=\d)", lambda match: match[0] + "&#8203;", value)
    return re.sub(r"(?i)(:)(?=//)|(\bwww)(?=\.)", lambda match: match[0] + "&#8203;", value)


def parts(document: Document) -> Iterable[str]:
    """A report's parts, the most important first."""
    yield f"### {_SIGNS[document.verdict]} gradcheck: {text(document.headline)}"
    yield f"<sub>{text(document.title)}</sub>"
    culprit = document.findings[0].culprit if document.where else None
    for label, words in document.answer:
        yield f"**{label.capitalize()}** {code(words) if label == 'where' else text(words)}"
        if label == "where" and culprit:
            yield from _source(culprit)
    if document.tables:
        yield from _table(document.tables[0])
    yield from _details(document)


def _details(document: Document) -> Iterable[str]:
    yield folded("Run and coverage", bullets(document.coverage))
    for index, finding in enumerate(document.findings[:20]):
        yield folded(
            f"{finding.title}: the finding in full", _finding(finding, with_culprit=index > 0 or not document.where)
        )
    if len(document.findings) > 20:
        yield f"{plural(len(document.findings) - 20, 'more finding')} in the JSON report."
    for table in document.tables[1:]:
        yield folded("More weights", "\n\n".join(_table(table)))


def _finding(finding: FindingText, *, with_culprit: bool) -> str:
    lines = bullets([finding.factor, finding.where, finding.explanation, finding.fix, *finding.facts])
    if with_culprit and finding.culprit:
        return "\n\n".join([lines, *_culprit(finding.culprit)])
    return lines


def _culprit(culprit: Culprit) -> Iterable[str]:
    yield f"**Where** {code(culprit.line)}"
    yield from _source(culprit)


def _source(culprit: Culprit) -> Iterable[str]:
    if culprit.excerpt:
        rows = [f"{'>' if marked else ' '} {number:>4} | {line}" for marked, number, line in culprit.excerpt.numbered()]
        body = "\n".join(rows)
        fence = "`" * max(3, max((len(run) for run in re.findall("`+", body)), default=0) + 1)
        yield f"{fence}text\n{body}\n{fence}"
    yield text("; ".join(culprit.facts))


def _table(table: WeightTable) -> Iterable[str]:
    yield f"{text(table.caption)}: {text(table.note)}. Each cell: ratio (observed of expected)."
    rows = ["| " + " | ".join(["", *(text(column) for column in table.columns)]) + " |"]
    rows.append("|---" * (len(table.columns) + 1) + "|")
    for label, cells in table.rows:
        shown = (
            f"{f'**{text(cell.ratio)}**' if cell.off else text(cell.ratio)} "
            f"({text(cell.observed)} of {text(cell.expected)})"
            for cell in cells
        )
        rows.append(f"| {text(label)} | " + " | ".join(shown) + " |")
    yield "\n".join(rows)


def bullets(lines: Iterable[str]) -> str:
    """A list of prose."""
    return "\n".join(f"- {text(line)}" for line in lines if line)


def folded(title: str, body: str) -> str:
    """A part that opens on a click."""
    return f"<details><summary>{text(title)}</summary>\n\n{body}\n\n</details>"


def fit(pieces: Iterable[str], limit: int) -> str:
    """The parts that fit, whole, with a word about those that do not."""
    kept, size, left_out = [], 200, 0
    for part in pieces:
        cost = len(part.encode()) + 2
        if size + cost > limit:
            left_out += 1
        else:
            kept.append(part)
            size += cost
    if left_out:
        kept.append(f"_{plural(left_out, 'part')} left out for size: see the JSON report._")
    return "\n\n".join(kept) + "\n"
