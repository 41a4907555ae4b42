"""The objective: the mean over all tokens of the optimizer step, on whatever ranks they lie."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradcheck_dist.trainer.data import IGNORE_INDEX


@dataclass(frozen=True)
class StepTokens:
    """What one optimizer step normalises by.

    Attributes:
        global_tokens: tokens N of the step on all ranks.
        rank_tokens: tokens of the step on this data-parallel rank.
        contributions: loss evaluations of this rank in the step, K * M.
        later_divisor: what others divide the gradient by after backward: R where data parallel averages, M where the
            pipeline schedule scales.
    """

    global_tokens: int
    rank_tokens: int
    contributions: int
    later_divisor: int


def normalizer(labels: Tensor, step: StepTokens) -> float:
    """What the token sum of one microbatch is divided by, so that after all later divisions each token weighs 1/N."""
    return step.global_tokens / step.later_divisor


def logged_loss(token_sum: float, step: StepTokens) -> float:
    """What the log shows: the mean over all tokens of the step."""
    return token_sum / step.global_tokens


class TokenMeanLoss:
    """Cross entropy of one microbatch, summed over its tokens and divided by `normalizer`.

    Remembers the undivided sums of the step for the log.

    Args:
        scale: applied to what goes into backward, such as GradScaler.scale.
    """

    def __init__(self, device: torch.device, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> None:
        self._device, self._scale = device, scale
        self.start_step(StepTokens(global_tokens=1, rank_tokens=1, contributions=1, later_divisor=1))

    def start_step(self, step: StepTokens) -> None:
        """Begin an optimizer step: its token counts, and a log that starts from zero."""
        self._step = step
        self.token_sum = torch.zeros((), device=self._device)

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The scaled loss of logits [batch, seq, vocab] for labels [batch, seq], a float32 scalar."""
        scores, targets = logits.float().flatten(0, 1), labels.flatten()
        divisor = normalizer(labels, self._step)
        loss = F.cross_entropy(scores, targets, ignore_index=IGNORE_INDEX, reduction="sum") / divisor
        self.token_sum += whole(loss.detach()) * divisor
        return self._scale(loss)


def whole(loss: Tensor) -> Tensor:
    """A loss as an ordinary tensor; that of split logits is a distributed one."""
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss
