"""Events of a loss that counts tokens, or of one that counts none: which of them, an accelerator has still to tell.

They are emitted with `known`, a 0-d tensor, and made when it has come to the host.
"""

from __future__ import annotations

from typing import Any

from gradcheck_dist.events import FUNCTION, Loss, LossGradient

_OF_LABELS = {"reduction": "unknown", "num_tokens": None, "num_labels": None, "label_hash": None}
_OF_PASS = {
    *("seq", "step", "t_ns", "site", "loss_id", "accumulation_step", "microbatch", "stage"),
    *("hooks_factor", "hooks_site", "numbers"),
}


def loss(*, known: bool, op: str, **fields: Any) -> Loss:
    """A function's loss of labels, or a function of which nothing else is known."""
    return Loss(op=op, **fields) if known else Loss(op=f"{FUNCTION}{op}", **(fields | _OF_LABELS))


def loss_gradient(*, known: bool, **fields: Any) -> LossGradient:
    """What each token weighs, or the weight of the loss as a whole."""
    if known:
        return LossGradient(**fields)
    kept = {name: value for name, value in fields.items() if name in _OF_PASS}
    return LossGradient(**kept, weight=1.0 if kept.get("hooks_factor") is None else kept["hooks_factor"])
