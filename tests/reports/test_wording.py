"""Numbers in sentences."""

from __future__ import annotations

import pytest

from gradcheck_dist.wording import MAX_RUNS, numbered, plural, sentence


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (1, "parameter", "1 parameter"),
        (0, "parameter", "0 parameters"),
        (1, "backward pass", "1 backward pass"),
        (3, "backward pass", "3 backward passes"),
        (2, "loss", "2 losses"),
        (2, "microbatch", "2 microbatches"),
    ],
)
def test_counts(count: int, noun: str, words: str) -> None:
    assert plural(count, noun) == words


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], "no ranks"),
        ([3], "rank 3"),
        ({1, 0}, "ranks 0 and 1"),
        ([4, 0, 2, 2], "ranks 0, 2 and 4"),
        ([0, 1, 2, 3], "ranks 0 to 3"),
        ([0, 1, 2, 8, 9], "ranks 0 to 2, 8 and 9"),
        ([0, 1, 2, 7, 8, 9], "ranks 0 to 2 and 7 to 9"),
        (range(0, 2 * MAX_RUNS, 2), "ranks 0, 2, 4, 6, 8, 10, 12 and 14"),
        (range(0, 64, 2), "ranks 0 to 62 (32 of them)"),
    ],
)
def test_numbers(numbers: list[int], words: str) -> None:
    assert numbered("rank", numbers) == words


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        ("right where these are tasks", "Right where"),
        ("mark_loss gives each its own term", "mark_loss gives"),
        ("emb.weight, head.bias and 3 more are left", "emb.weight,"),
        ("tokens: unknown", "Tokens:"),
        ("well-known", "Well-known"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_or_a_name(words: str, begins: str) -> None:
    assert sentence(words).startswith(begins)
    assert sentence(words).lower() == words.lower()
