"""What the worker thread tells the app."""

from __future__ import annotations

from textual.message import Message

from gradcheck_dist.tui.snapshot import Snapshot


class SnapshotReady(Message):
    """A new snapshot. An older one that still waits in the queue is dropped for it."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, SnapshotReady)
