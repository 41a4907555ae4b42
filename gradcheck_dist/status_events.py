"""What the probes tell of themselves: which are there, what they could not follow, what failed. Imports no torch.

`events.py` beside this says how events are encoded, and names these too.
"""

from __future__ import annotations

from gradcheck_dist.model_events import Event
from gradcheck_dist.records import Count

OWN_OPTIMIZER_PROBE = "own_optimizer"
EXCHANGES_PROBE = "exchanges"
UNSEEN_UPDATE = (
    "parameters are changed by no optimizer of torch.optim, and .grad was emptied before anybody saw what was read. "
    "Leave gradients there until the next forward pass, or empty them with zero_grad() or .grad = None"
)
REPLACED_UNSEEN = (
    "parameters are changed by no optimizer of torch.optim, gradients were put in the place of others, and some were "
    "emptied before anybody saw what was read. Write to gradients in place (p.grad.mul_), or leave them there until "
    "the next forward pass"
)
UPDATED_BETWEEN = (
    "parameters change between backward passes, and the optimizer of torch.optim that was made has not stepped: what "
    "updates them is not followed beside it"
)
UPDATED_INSIDE = (
    "parameters are changed inside of the backward pass, by no step of an optimizer of torch.optim: what such an "
    "update reads is not followed"
)
KEPT_BY_OPTIMIZER = "optimizer_keeps"
"""What is told under this probe's name, as not active, is an optimizer that keeps gradients for a later step; as
active, that one which was told so does not."""
MOVED_NOTHING = "was given gradients and moved no parameter"
MOVES_NOW = "moves parameters in one step after the other"
CUDA_GRAPHS = "cuda_graphs"
"""What is told under this probe's name, as not active, is a step of which a part was replayed from a CUDA graph."""
LATER_MODELS = "later_models"
"""What is told under this probe's name, as not active, is an optimizer that steps parameters behind the last recorded
step which no recorded one stepped."""
THREADS = "threads"
"""What is told under this probe's name, as not active, is a step in which several threads trained at once."""
TRAIN_AT_ONCE = "several threads of this process train at once: which passes belong to whose step is not known"


class ProbeStatus(Event, tag="probe_status"):
    """A probe became active, could not hook (`reason`) or was not needed."""

    probe: str
    active: bool
    reason: str = ""


class ProbeError(Event, tag="probe_error"):
    """An error inside a probe; training went on."""

    probe: str
    message: str
    count: Count = 1


class RunEnd(Event, tag="run_end"):
    """The rank stopped in good order (atexit or detach)."""

    reason: str = ""
