"""The tabs at the top: which screen this is, and which key or click leads to the others."""

from __future__ import annotations

from rich.text import Text
from textual import events
from textual.message import Message
from textual.widget import Widget

TABS = ("Overview", "Weights", "Timeline", "Event", "Parameters", "Compare", "Explain")


class TopBar(Widget):
    """One line of tabs; where their names do not fit, the others' keys only."""

    COMPONENT_CLASSES = {"top--here", "top--key"}
    DEFAULT_CSS = """
    TopBar { height: 1; background: $panel; color: $foreground; }
    TopBar .top--here { background: $primary; color: $background; text-style: bold; }
    TopBar .top--key { color: $accent; text-style: bold; }
    """

    class Picked(Message):
        """A tab was clicked."""

        def __init__(self, mode: str) -> None:
            super().__init__()
            self.mode = mode

    def __init__(self, here: str) -> None:
        super().__init__()
        self._here = here

    def _labels(self) -> list[str]:
        labels = [f"{index} {name}" for index, name in enumerate(TABS, 1)]
        if sum(map(len, labels)) + len(TABS) - 1 <= self.size.width:
            return labels
        return [label if label[2:].lower() == self._here else label[0] for label in labels]

    def render(self) -> Text:
        text, gap = Text(no_wrap=True, overflow="ellipsis"), self._gap()
        for label in self._labels():
            if label[2:].lower() == self._here:
                text.append(label, self.get_component_rich_style("top--here", partial=True))
            else:
                text.append(label[0], self.get_component_rich_style("top--key", partial=True)).append(label[1:])
            text.append(gap)
        return text

    def _gap(self) -> str:
        length = sum(len(label) for label in self._labels())
        return " " * max(1, min(3, (self.size.width - length) // len(TABS)))

    def on_click(self, event: events.Click) -> None:
        start, gap = 0, len(self._gap())
        for label in self._labels():
            if start <= event.x < start + len(label):
                self.post_message(self.Picked(TABS[int(label[0]) - 1].lower()))
            start += len(label) + gap
