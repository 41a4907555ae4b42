"""A rule's page as text."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static


class RulePage(Static):
    """Headings bold, code kept as it stands."""

    DEFAULT_CSS = "RulePage { height: auto; padding: 0 1; }"

    def show(self, title: str, page: str) -> None:
        text = Text(title + "\n", "bold")
        text.append("\n")
        paragraph: list[str] = []
        for line in [*page.splitlines(), ""]:
            if line and not line.startswith((" ", "#", "-")):
                paragraph.append(line)
                continue
            if paragraph:
                text.append(" ".join(paragraph) + "\n")
                paragraph = []
            if line.startswith("## "):
                text.append(line[3:] + "\n", "bold underline")
            else:
                text.append(line + "\n", "cyan" if line.startswith("    ") else "")
        self.update(text)
