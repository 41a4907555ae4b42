"""Elements of which each rank keeps some, with zeros in place of the others: the slots of its own experts.

What arrives at a zero belongs to nothing that the rank has used.
"""

from __future__ import annotations

import numpy as np

from gradcheck_dist.ledger.exchange_parts import Parts


def is_mask(given: Parts, made: Parts) -> bool:
    """Whether each rank keeps elements as they are and makes zeros of the others, not the same on all of them."""
    kept = {rank: made[rank][0] != 0 for rank in made}
    if any(kept[rank].shape != given[rank][0].shape for rank in given):
        return False
    as_given = all(np.array_equal(made[rank][0][kept[rank]], given[rank][0][kept[rank]]) for rank in given)
    return as_given and len({one.tobytes() for one in kept.values()}) > 1


def kept_apart(given: Parts, arrived: Parts, back: Parts) -> bool:
    """Whether backward gives what arrived wherever a rank's own input is no zero. Where it is one, a mask in front (the
    slots of other ranks' experts) keeps whatever is added there."""
    pairs = [(back[rank][0][given[rank][0] != 0], arrived[rank][0][given[rank][0] != 0]) for rank in given]
    return any(len(mine) for mine, _ in pairs) and all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def of_what_is_kept(given: Parts, made: Parts, arrived: Parts, back: Parts) -> tuple[Parts, Parts]:
    """What arrived at elements that each rank kept, and what was given for elements of which it shows who kept them."""
    kept = {rank: [arrived[rank][0] * (made[rank][0] != 0)] for rank in arrived}
    return kept, {rank: [back[rank][0] * (given[rank][0] != 0)] for rank in back}
