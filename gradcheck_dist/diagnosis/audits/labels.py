"""What labels of another pass than the tokens' leave open."""

from __future__ import annotations

from gradcheck_dist.ledger.contributions import Contributions
from gradcheck_dist.ledger.mispaired import Mispaired, mispaired
from gradcheck_dist.ledger.tracks import StepData


def open_labels(data: StepData, contributions: Contributions) -> list[str]:
    """Why the verdict on a step is open, where losses were evaluated on the labels of other tokens."""
    found = mispaired(data, contributions.coordinate)
    if not found:
        return []
    more = f", and so have {len(found) - 1} more" if len(found) > 1 else ""
    return [
        f"labels are not those of the tokens that the model read: {_told(found[0])}{more}. Of a language model, look "
        "at which microbatch's labels go to the loss: every token is learnt from another text's next one"
    ]


def _told(one: Mispaired) -> str:
    (rank, slot), (reader, own), (other, meant) = one
    return (
        f"the loss of pass {_slot(slot)} on rank {rank} has labels that are hardly found among its tokens (rank "
        f"{reader}, pass {_slot(own)}), but among those of pass {_slot(meant)} on rank {other}"
    )


def _slot(slot: tuple[int, int]) -> str:
    return f"(accumulation step {slot[0]}, microbatch {slot[1]})"
