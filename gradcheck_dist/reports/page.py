"""The frame of an HTML page: one file that loads nothing from anywhere, in which only our own scripts may run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Literal

from gradcheck_dist.reports.figure import Figure
from gradcheck_dist.reports.text import printable

PlotlyJs = Literal["inline", "shared"]


def escape(value: str) -> str:
    """`value` as text or attribute value in which nothing is markup."""
    return html.escape(value, quote=True)


def prose_html(value: str) -> str:
    """Escaped prose with its `code spans`."""
    pieces = escape(value).split("`")
    if len(pieces) % 2 == 0:
        return escape(value)
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))


def shared_file() -> str:
    """Name of the plotly.js file that pages with shared plotly.js expect beside them."""
    from plotly.offline import get_plotlyjs_version

    return f"plotly-{get_plotlyjs_version()}.min.js"


def plotly_source() -> str:
    """The text of plotly.js."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def figure_html(figure: Figure, key: str) -> str:
    """A figure's place, its data, and in words what it shows."""
    data = json.dumps(figure.spec, separators=(",", ":"), allow_nan=False)
    # "<" ends a script element in "</script>" and "<!--" only: written otherwise it ends nothing.
    data = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    note = f" {escape(figure.note)}" if figure.note else ""
    height = int(figure.spec["layout"].get("height", 320))
    return (
        f'<figure><h2>{escape(figure.title)}</h2><div class="plot" role="img" style="height:{height}px" '
        f'aria-label="{escape(figure.summary)}" data-figure="{key}"></div>'
        f"<figcaption>{escape(figure.summary)}{note}</figcaption>"
        f'<script type="application/json" id="{key}">{data}</script></figure>'
    )


def page(title: str, body: Iterable[str], figures: Sequence[Figure] = (), plotlyjs: PlotlyJs = "inline") -> str:
    """A whole page. `figures` says whether plotly.js is needed at all."""
    assets = resources.files(__package__) / "assets"
    style = (assets / "report.css").read_text(encoding="utf-8")
    ours = (assets / "report.js").read_text(encoding="utf-8")
    scripts: list[str] = []
    allowed: list[str] = []
    if figures:
        if plotlyjs == "inline":
            source = plotly_source()
            scripts.append(f"<script>{source}</script>")
            allowed.append(_hash(source))
        else:
            scripts.append(f'<script src="{escape(shared_file())}"></script>')
            allowed.append("'self' file:")
        scripts.append(f"<script>{ours}</script>")
        allowed.append(_hash(ours))
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src "
    policy += " ".join(allowed) or "'none'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(printable(title, 200))}</title><style>{style}</style></head><body><main>",
            *body,
            "</main>",
            *scripts,
            "</body></html>\n",
        ]
    )


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
