"""Pairs of runs as a pull request comment and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradcheck_dist import __version__
from gradcheck_dist.reports import html_report, markdown
from gradcheck_dist.reports.page import escape, page, prose_html
from gradcheck_dist.reports.pair import Pair, side_by_side

_SIGNS = {"clean": "✅", "findings": "❌", "undetermined": "⚠️"}
_HEADS = ("", "before", "after", "change")


def as_markdown(pairs: Sequence[Pair]) -> str:
    """One comment for all pairs, below the size of a comment."""
    parts = [markdown.MARK]
    table = side_by_side(pairs)
    if table:
        lines = ["| " + " | ".join(markdown.text(cell) for cell in row) + " |" for row in table]
        parts.append("\n".join([lines[0], "|---" * len(table[0]) + "|", *lines[1:]]))
    for pair in pairs:
        parts += _markdown_parts(pair)
    parts.append(f"<sub>gradcheck {markdown.text(__version__)}</sub>")
    return markdown.fit(parts, markdown.MAX_BYTES)


def _markdown_parts(pair: Pair) -> Iterator[str]:
    text = markdown.text
    yield f"### {_SIGNS[pair.state]} gradcheck, before and after ({text(pair.title)}): {text(pair.headline)}"
    yield markdown.bullets(pair.facts)
    rows = ["| " + " | ".join(_HEADS) + " |", "|---" * len(_HEADS) + "|"]
    rows += [
        f"| {text(row.what)} | {text(row.before)} | {text(row.after)} | {text(row.relation)} |" for row in pair.rows
    ]
    yield "\n".join(rows)
    for word, document in (("Before", pair.before), ("After", pair.after)):
        body = markdown.fit(markdown.parts(document), 20_000)
        yield markdown.folded(f"{word}: {document.headline}", body)


def as_html(pairs: Sequence[Pair]) -> str:
    """One page for all pairs."""
    body = [*_table_html(side_by_side(pairs)), *(part for pair in pairs for part in _html_parts(pair))]
    title = "; ".join(pair.headline for pair in pairs)
    return page(f"gradcheck, before and after: {title}", body)


def _table_html(table: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    if not table:
        return
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in table[0])
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in table[1:]
    )
    yield (
        '<h2>Side by side</h2><div class="scroll" tabindex="0" role="region" aria-label="all pairs"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _html_parts(pair: Pair) -> Iterator[str]:
    yield (
        f'<section class="verdict {pair.state}"><h1>{prose_html(pair.headline)}</h1>'
        f'<p class="soft">{escape(pair.title)}</p>{html_report.bullets(pair.facts)}</section>'
    )
    head = "".join(f'<th scope="col">{name}</th>' for name in _HEADS[1:])
    rows = "".join(
        f'<tr><th scope="row">{escape(row.what)}</th><td>{escape(row.before)}</td><td>{escape(row.after)}</td>'
        f"<td>{escape(row.relation)}</td></tr>"
        for row in pair.rows
    )
    yield (
        '<div class="scroll" tabindex="0" role="region" aria-label="before and after"><table>'
        f"<thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    sides = []
    for word, document in (("Before", pair.before), ("After", pair.after)):
        inner = "".join([*html_report.head(document, "h3"), *html_report.sections(document)])
        sides.append(f"<div><h2>{word}</h2>{inner}</div>")
    yield f'<div class="pair">{"".join(sides)}</div>'
