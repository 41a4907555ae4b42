"""What a pipeline's stage says of a chunk, however it is called."""

from __future__ import annotations

from typing import Any

import pytest

from gradcheck_dist.probes.activations import pipeline


class Stage:
    """The two methods of torch's stage that are watched, as torch 2.13 declares them."""

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> str:
        return "one"

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> str:
        return "weight"


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "last"),
    [
        ("backward_one_chunk", (3,), {"loss": None, "last_backward": True}, True),
        ("backward_one_chunk", (3, None, True, True), {}, True),
        ("backward_one_chunk", (3, None, True, False), {}, False),
        ("backward_one_chunk", (3,), {}, False),
        ("backward_weight_one_chunk", (3, True), {}, True),
        ("backward_weight_one_chunk", (3,), {"last_backward": True}, True),
    ],
)
def test_the_last_chunk_is_known_however_it_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], last: bool
) -> None:
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr(pipeline, "open_chunk", lambda _recorder, _stage, chunk, is_last: seen.append((chunk, is_last)))
    watched = pipeline._watch_chunk(None, getattr(Stage, name))  # type: ignore[arg-type]
    assert watched(Stage(), *args, **kwargs) == name.split("_")[1]
    assert seen == [(3, last)]
