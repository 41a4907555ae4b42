"""The objective: the mean over all tokens of the optimizer step, on whatever ranks they lie."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradcheck_dist.trainer.data import IGNORE_INDEX, by_head


@dataclass(frozen=True)
class StepTokens:
    """What one optimizer step normalises by.

    Attributes:
        global_tokens: tokens N of the step on all ranks.
        rank_tokens: tokens of the step on this data-parallel rank.
        contributions: loss evaluations of this rank in the step, K * M.
        later_divisor: what others divide the gradient by after backward: R where data parallel averages, M where the
            pipeline schedule scales.
        further_tokens: tokens of the step on all ranks that each multi-token-prediction head predicts.
    """

    global_tokens: int
    rank_tokens: int
    contributions: int
    later_divisor: int
    further_tokens: tuple[int, ...] = ()


def normalizer(labels: Tensor, step: StepTokens) -> float:
    """What the token sum of one microbatch is divided by, so that after all later divisions each token weighs 1/N."""
    return step.global_tokens / step.later_divisor


def further_normalizer(step: StepTokens, head: int) -> float:
    """What the token sum of a multi-token-prediction head is divided by: its own tokens, the last of a sequence have
    none."""
    return step.further_tokens[head] / step.later_divisor


def logged_loss(token_sum: float, step: StepTokens) -> float:
    """What the log shows: the mean over all tokens of the step."""
    return token_sum / step.global_tokens


class TokenMeanLoss:
    """Cross entropy of one microbatch, summed over its tokens and divided by `normalizer`.

    Further heads' losses are added, weighted and each divided by its own number of tokens. Remembers the undivided sums
    of the step's main loss for the log.

    Args:
        scale: applied to what goes into backward, such as GradScaler.scale.
        further_weight: of each multi-token-prediction head.
    """

    def __init__(
        self,
        device: torch.device,
        scale: Callable[[Tensor], Tensor] = lambda loss: loss,
        further_weight: float = 0.0,
    ) -> None:
        self._device, self._scale, self._further_weight = device, scale, further_weight
        self.start_step(StepTokens(global_tokens=1, rank_tokens=1, contributions=1, later_divisor=1))

    def start_step(self, step: StepTokens) -> None:
        """Begin an optimizer step: its token counts, and a log that starts from zero."""
        self._step = step
        self.token_sum = torch.zeros((), device=self._device)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The scaled loss of logits [batch, seq, vocab] for labels [batch, seq], a float32 scalar; both with one more
        dimension in the third place, of heads, where there are some."""
        targets = by_head(labels)
        scores = logits.unbind(2) if logits.dim() == 4 else (logits,)
        divisor = normalizer(targets[0], self._step)
        loss = sum_of_losses(*flat(scores[0], targets[0])) / divisor
        self.token_sum += whole(loss.detach()) * divisor
        for head in range(len(targets) - 1):
            loss = loss + self._further_loss(scores[head + 1], targets[head + 1], head)
        return self._scale(loss)

    def _further_loss(self, logits: Tensor, labels: Tensor, head: int) -> Tensor:
        from gradcheck_dist.probes import mark_loss

        loss = F.cross_entropy(*flat(logits, labels), ignore_index=IGNORE_INDEX, reduction="sum")
        tokens = int((labels != IGNORE_INDEX).sum())
        mark_loss(loss, tokens, term=f"mtp_{head + 1}", coefficient=self._further_weight)
        return loss * (self._further_weight / further_normalizer(self._step, head))


def sum_of_losses(scores: Tensor, targets: Tensor) -> Tensor:
    """Of scores [tokens, vocab] for targets [tokens]; what is ignored has none."""
    return F.cross_entropy(scores, targets, ignore_index=IGNORE_INDEX, reduction="sum")


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 scores [tokens, vocab] and targets [tokens]."""
    return logits.float().flatten(0, 1), labels.flatten()


def whole(loss: Tensor) -> Tensor:
    """A loss as an ordinary tensor; that of split logits is a distributed one."""
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss
