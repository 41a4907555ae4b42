"""Labels are found again among the tokens that their own pass read, or in another pass's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from one_process import judged, record
from torch import Tensor, nn

from gradcheck_dist.events import Event, LossGradient, Tokens
from gradcheck_dist.ledger.mispaired import mispaired
from gradcheck_dist.ledger.tracks import StepData
from gradcheck_dist.probes import attach
from gradcheck_dist.probes.losses.tokens import _on_device
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trace.token_runs import FACTOR, NONE, NUM_KEPT, NUM_TOKENS, found_in, runs

PASSES, ROWS, LENGTH, WORDS = 3, 4, 24, 20

Batch = tuple[Tensor, Tensor]


def batches(generator: torch.Generator) -> list[Batch]:
    texts = torch.randint(WORDS, (PASSES, ROWS, LENGTH + 1), generator=generator)
    return [(text[:, :-1], text[:, 1:].clone()) for text in texts]


def paired(data: list[Batch], _: torch.Generator) -> list[Batch]:
    return data


def of_the_next(data: list[Batch], _: torch.Generator) -> list[Batch]:
    return [(tokens, labels) for (tokens, _), (_, labels) in zip(data, [*data[1:], data[0]], strict=True)]


def of_the_same_text(data: list[Batch], _: torch.Generator) -> list[Batch]:
    return [data[0]] * PASSES


def without_the_question(data: list[Batch], _: torch.Generator) -> list[Batch]:
    for _, labels in data:
        labels[:, : LENGTH // 2] = -100
    return data


def filled_in(data: list[Batch], generator: torch.Generator) -> list[Batch]:
    """A masked language model: labels are the tokens that the model does not see."""
    hidden = [torch.arange(LENGTH).expand(ROWS, LENGTH) % 5 == 1 for _ in data]
    return [
        (tokens.masked_fill(mask, 0), tokens.masked_fill(~mask, -100))
        for (tokens, _), mask in zip(data, hidden, strict=True)
    ]


def classes(data: list[Batch], generator: torch.Generator) -> list[Batch]:
    """Few words, so that labels which have nothing to do with them are found there."""
    return [(tokens % 4, torch.randint(4, tokens.shape, generator=generator)) for tokens, _ in data]


@pytest.mark.parametrize("make", [paired, of_the_same_text, without_the_question, filled_in, classes, of_the_next])
def test_labels_of_another_pass_leave_the_verdict_open(
    make: Callable[[list[Batch], torch.Generator], list[Batch]], tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        data = make(batches(generator), generator)
        total = sum(int((labels >= 0).sum()) for _, labels in data)
        for tokens, labels in data:
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / total).backward()
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path, steps=2)
    report = judged(tmp_path)
    assert (report.verdict, report.findings) == ("undetermined" if make is of_the_next else "clean", [])
    assert all("labels are not those of the tokens that the model read" in reason for reason in report.reasons)


def of_a_pass(words: np.ndarray, labels: np.ndarray) -> list[Event]:
    base = {"t_ns": 0, "step": 0}
    slot = {"accumulation_step": 0, "microbatch": 0}
    return [
        Tokens(seq=0, **slot, values=runs(words).tobytes(), **base),
        Tokens(seq=1, **slot, values=runs(labels).tobytes(), loss_id=1, **base),
        LossGradient(seq=2, **slot, loss_id=1, weight=1.0, **base),
    ]


def test_ranks_of_one_batch_may_each_look_up_a_part_of_the_words() -> None:
    """Of an embedding that is parted, a rank whose part holds no word of the text looks up one and the same row."""
    text = np.random.default_rng(0).integers(0, WORDS, 200)
    masked = [text[:-1], np.zeros_like(text[:-1])]
    events = {rank: of_a_pass(words, text[1:]) for rank, words in enumerate(masked)}
    data = StepData(0, events, {}, {}, True)
    assert mispaired(data, {0: 0, 1: 0}) == []
    (one,) = mispaired(data, {0: 0, 1: 1})
    assert (one.loss, one.meant) == ((1, (0, 0)), (0, (0, 0)))


def test_a_device_keeps_the_same_runs() -> None:
    generator = torch.Generator().manual_seed(1)
    for high in (3, 50_000):
        tokens = torch.randint(-1, high, (6, 100), generator=generator)
        kept = _on_device(tokens.reshape(-1)).numpy()
        assert np.array_equal(kept[kept != NONE], runs(tokens.numpy()))


def test_a_part_is_found_in_a_whole_that_holds_much_else() -> None:
    text = np.random.default_rng(0).integers(0, 1000, 4000)
    whole, part = runs(text), runs(text[:1000])
    assert len(whole) == NUM_KEPT
    hits, compared = found_in(part, whole)
    assert hits == compared and 10 < compared < NUM_KEPT
    assert found_in(part, runs(text[1000:]))[0] == 0
    assert found_in(part, runs(text[:3])) == (0, 0)


def test_labels_are_those_of_their_loss_though_a_loader_uses_their_memory_again(tmp_path: Path) -> None:
    given = batches(torch.Generator().manual_seed(0))
    labels = torch.empty_like(given[0][1])
    expected: list[bytes] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for tokens, new in given:
            labels.copy_(new)
            expected.append(runs(new.numpy()).tobytes())
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    record(step, tmp_path, steps=1)
    events = read_run(tmp_path).ranks[0].events
    assert len({*expected}) > 1
    assert [one.values for one in events if isinstance(one, Tokens) and one.loss_id is not None] == expected


class Tied(nn.Module):
    """One matrix that no embedding module holds, rows of which are looked up, and another one of its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mixing = (nn.Parameter(torch.randn(WORDS, 8) / 4) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.embedding(tokens, self.table)
        return (hidden + torch.tanh(hidden @ self.mixing.T) @ self.mixing) @ self.table.T


def test_a_matrix_of_which_rows_are_looked_up_is_an_embeddings(tmp_path: Path) -> None:
    (tokens, labels), *_ = batches(torch.Generator().manual_seed(0))
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path):
        for _ in range(2):
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    params = read_run(tmp_path).ranks[0].params.values()
    assert {param.name: param.looked_up for param in params} == {"table": True, "mixing": False}


@pytest.mark.parametrize("size", [0, NUM_TOKENS - 1, NUM_TOKENS, 50, 2000])
@pytest.mark.parametrize("words", [1, 3, 1000])
def test_runs_are_the_smallest_different_checksums(size: int, words: int) -> None:
    tokens = np.random.default_rng(size).integers(words, size=size)
    kept = tokens.copy()
    found = runs(tokens)
    sums = {
        sum((int(token) + 1) * FACTOR**place for place, token in enumerate(tokens[at : at + NUM_TOKENS][::-1])) % 2**64
        for at in range(size - NUM_TOKENS + 1)
    }
    assert found.tolist() == sorted(one - 2**64 if one >= 2**63 else one for one in sums)[:NUM_KEPT]
    assert np.array_equal(tokens, kept)
