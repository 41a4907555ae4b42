"""Batches in a fixed global order: which tokens a step sees does not depend on how the ranks are laid out."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.documents import PAD, encode, read_documents

IGNORE_INDEX = -100
"""Label of a padded position: predicted by nobody, counted nowhere. torch's default for F.cross_entropy."""


@dataclass(frozen=True)
class Batch:
    """The M microbatches of one accumulation step on one data-parallel rank, one after the other.

    Attributes:
        tokens: input ids, int64 [microbatches * batch_size, seq_len].
        labels: the next ids, or IGNORE_INDEX, same shape; where heads predict further tokens [..., 1 + num_mtp_heads],
            the next, the one after it, and so on.
    """

    tokens: Tensor
    labels: Tensor

    @property
    def num_tokens(self) -> int:
        """Labels that count."""
        return self.tokens_by_head[0]

    @property
    def tokens_by_head(self) -> tuple[int, ...]:
        """Labels that count, of the next token, the one after it, and so on."""
        return tuple(int((part != IGNORE_INDEX).sum()) for part in by_head(self.labels))


def by_head(labels: Tensor) -> tuple[Tensor, ...]:
    """Labels [batch, seq] of each head."""
    return labels.unbind(2) if labels.dim() == 3 else (labels,)


def further_labels(labels: Tensor, count: int) -> Tensor:
    """Labels [batch, seq] beside those of the `count` tokens after them, [batch, seq, 1 + count]."""
    shifted = [F.pad(labels[:, ahead:], (0, ahead), value=IGNORE_INDEX) for ahead in range(count + 1)]
    return torch.stack(shifted, dim=2)


def data_rank(config: TrainConfig, position: Mapping[str, int]) -> int:
    """Which part of the data a rank sees, from its position on the mesh axes; ranks along cp, tp and pp share one."""
    return position["dp_replicate"] * config.axes.dp_shard + position["dp_shard"]


class DataLoader:
    """Sequences by position: step, accumulation step, data-parallel rank, microbatch and row decide which one.

    Two layouts with equally many sequences a step see the same ones in the same step, in other places.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._documents = read_documents(config.data)
        self._orders: dict[int, list[int]] = {}

    def step_batches(self, step: int, data_rank: int) -> list[Batch]:
        """The batches of one optimizer step on one data-parallel rank, one an accumulation step, on the CPU."""
        return [self._batch(step, k, data_rank) for k in range(self._config.accum)]

    def _batch(self, step: int, k: int, data_rank: int) -> Batch:
        config = self._config
        rows = config.microbatches * config.batch_size
        first = step * config.sequences_per_step + (k * config.axes.data_parallel_degree + data_rank) * rows
        padded = torch.full((rows, config.seq_len + 1), PAD)
        for row in range(rows):
            tokens = encode(self._document(first + row), config.seq_len)
            padded[row, : len(tokens)] = torch.tensor(tokens)
        labels = padded[:, 1:].masked_fill(padded[:, 1:] == PAD, IGNORE_INDEX)
        if config.num_mtp_heads:
            labels = further_labels(labels, config.num_mtp_heads)
        return Batch(tokens=padded[:, :-1].contiguous(), labels=labels)

    def _document(self, index: int) -> bytes:
        """The `index`-th sequence of the job: a new order in each pass over the documents."""
        epoch, position = divmod(index, len(self._documents))
        if epoch not in self._orders:
            order = list(range(len(self._documents)))
            random.Random(f"{self._config.seed}/{epoch}").shuffle(order)
            self._orders = {epoch: order}
        return self._documents[self._orders[epoch][position]]
