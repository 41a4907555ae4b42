"""Label smoothing by hand: a part of a token's loss falls on its label, the rest on all classes alike.

`(1 - e) * nll + e * mean over classes` (Szegedy et al., arXiv 1512.00567) takes both parts from one log_softmax. The
gradients that arrive there sum, over the classes, to minus the token's whole weight, which is the same as without
smoothing; the label's own part alone is 1 - e of it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.probes.losses.log_probs import PASS_THROUGH, emit_weights, summary
from gradcheck_dist.probes.losses.loss_graph import Found, dim_of, is_product, log_probs_of, name_of
from gradcheck_dist.probes.recording.backward_pass import BackwardPass, TokenWeights
from gradcheck_dist.probes.recording.recorder import Recorder, guarded

SHARE_DECIMALS = 6
"""A share is a constant of the trainer's, seen through rounding."""
_LINEAR = (
    *PASS_THROUGH,
    *("Sum", "Mean", "Neg", "Add", "Sub", "Mul", "Div", "MaskedFill", "Where", "Index", "Gather", "MaskedSelect"),
)
"""What passes a multiple of its input on, by the begin of a node's name; products of two gradients are none."""


def smoothed_losses(found: Found, ids: dict[Any, int]) -> dict[Any, Any]:
    """Of those losses that are smoothed by hand, the node of the labels' part and the log_softmax that all of it comes
    from. `ids`: the nodes of losses with labels that are known."""
    if not found.log_softmaxes:
        return {}
    parts = dict.fromkeys([*ids, *(pick for pick, source in found.picks if name_of(source) == "NegBackward")])
    sources = {part: source for part in parts if name_of(source := log_probs_of(part)) == "LogSoftmaxBackward"}
    once = list(sources.values())
    return {part: source for part, source in sources.items() if once.count(source) == 1 and _is_summed(found, source)}


def _is_summed(found: Found, source: Any) -> bool:
    """Whether all classes of a log_softmax are added up beside the labels', by constants only."""
    if source not in found.log_softmaxes:
        return False
    queue, visited = deque([source]), set[Any]()
    while queue:
        for node in found.above.get(queue.popleft(), ()):
            if node in visited:
                continue
            visited.add(node)
            if not name_of(node).startswith(_LINEAR) or is_product(node):
                return False
            queue.append(node)
    return True


def watch_whole(
    recorder: Recorder,
    current: BackwardPass,
    source: Any,
    loss_id: int,
    hook: Callable[[Any, Callable[[Tensor], None]], None],
) -> None:
    """Record the weight of a loss where all of it arrives: at the log_softmax `source`."""
    current.smoothed[loss_id] = None
    hook(source, functools.partial(_arrived, recorder, current, dim_of(source), loss_id))


@guarded("unseen")
def _arrived(recorder: Recorder, current: BackwardPass, dim: int, loss_id: int, grad: Tensor) -> None:
    part = current.smoothed.pop(loss_id, None)
    if part is None or recorder.current is not current:
        return  # nothing arrived at the labels, or a loss that was declared stands above them
    whole = summary(-getattr(grad, "_local_tensor", grad).detach().sum(dim, dtype=torch.float64))
    # Where other rows are smoothed than have labels that count (padding), the labels' part tells by itself. Which it is
    # may not be known yet: an accelerator is not waited for.
    same = whole.num_tokens == part.num_tokens
    chosen = TokenWeights(*(torch.where(same, one, other) for one, other in zip(whole, part, strict=True)))
    share = torch.where(same, (part.mean / whole.mean).abs().round(decimals=SHARE_DECIMALS), 1.0)
    emit_weights(
        recorder, current, chosen, loss_id, label_share=share, other_losses=current.other_losses + (~same).int()
    )
