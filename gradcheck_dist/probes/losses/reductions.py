"""What the means or sums that a backward root adds up go over: how many elements, with what weight each.

From the root down lie numbers that multiply the whole and its summands (`summands`), then torch's own loss with its
reduction, or a mean or sum, and behind that what multiplies elements apart: masks, weights of samples, means over some
dimensions. What stands behind these (`Reduced.body`) computes one number an element, and gets one gradient for each.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor

from gradcheck_dist.probes.losses.differences import to_one_number
from gradcheck_dist.probes.losses.log_probs import PASS_THROUGH
from gradcheck_dist.probes.losses.loss_graph import (
    FACTORS,
    MAX_FACTORS,
    OTHERS,
    edges_of,
    is_times_zero,
    name_of,
    other_operand,
)
from gradcheck_dist.probes.losses.loss_terms import (
    JOINS,
    MAX_TERMS,
    SUMS,
    WHOLE_SUMS,
    Edge,
    handed_on,
    shape_of,
    side_by_side,
)
from gradcheck_dist.probes.parameters.stand_ins import is_host
from gradcheck_dist.probes.recording.backward_pass import NumbersBefore
from gradcheck_dist.probes.recording.deferred import made_of

MEAN, SUM = 1, 2  # torch.nn._reduction.get_enum
WITH_REDUCTION = {
    *("MseLossBackward", "SmoothL1LossBackward", "HuberLossBackward", "SoftMarginLossBackward"),
    *("BinaryCrossEntropyBackward", "BinaryCrossEntropyWithLogitsBackward"),
}
_OF_ROWS = {"MultiMarginLossBackward", "MultilabelMarginLossBackward"}
DISTANCES = {"PowBackward", "AbsBackward"}
MARGINS = {"ReluBackward", "ClampBackward", "ClampMinBackward"}
LOG_ODDS = "LogSigmoidBackward"
_IN_PARTS = (*JOINS, "Split", "Unbind", "Chunk")
MAX_PARTS = 4096
"""Nodes between a root and what its one body is looked for behind: a list of sequences has a handful for each."""
_PICKS = ("Index", "MaskedSelect")
_LEAVES_OUT = (*_PICKS, "MaskedFill", "Where")
_GOES_THROUGH = ("Sum", "Mean", "Nansum", *PASS_THROUGH, *_LEAVES_OUT, *_IN_PARTS)
SAME = 1e-3
ROUNDED = 1e-6


@dataclass
class Reduced:
    """`node` reduces `num` elements to one. `body` is the node behind what multiplies elements apart, None where `node`
    is torch's own loss; `share` is what of the reduction's gradient arrives at each of its elements, on average, by
    partial means and picks alone, and the `numbers` (nodes) multiply all elements beneath it. `is_weighted`: a tensor
    without a gradient multiplies them apart (`weights`: such of as many elements, `factors`: what multiplies and does
    not divide), `has_lengths`: one divides them; `of_one`: a tensor of one element multiplies them that may be data, as
    `num_of_one` of the numbers may be; `adds_up`: there are means or sums beneath."""

    node: Any
    is_mean: bool
    num: int
    num_rows: int
    body: Any = None
    share: float = 1.0
    numbers: list[Any] = field(default_factory=list)
    of_torch: bool = False
    is_weighted: bool = False
    of_one: bool = False
    num_of_one: int = 0
    has_lengths: bool = False
    adds_up: bool = False
    weights: list[Tensor] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)

    @property
    def weighs_alone(self) -> bool:
        """Whether weights of elements are all that multiplies them beneath the reduction."""
        return self._weighs and not self.adds_up

    @property
    def weighs_sums(self) -> bool:
        """Whether tensors alone multiply elements that are sums themselves, or what these go over."""
        return self._weighs and self.adds_up

    @property
    def _weighs(self) -> bool:
        """Whether tensors weigh elements, and no number multiplies all of them; one that may be data is none here."""
        num_numbers = len(self.numbers) - (self.num_of_one if self.of_one else 0)
        return (self.is_weighted or self.of_one) and not num_numbers

    @property
    def masks_sums(self) -> bool:
        """Whether elements are sums themselves (a divergence's over some classes), of which masks may keep some."""
        return bool(self.weights) and self.adds_up and not self.numbers

    @property
    def compares(self) -> bool | Tensor:
        """Whether the elements are those of a loss that compares with targets: a bool, or 0-d on its device. A distance
        from one number may be a discriminator's, whose losses on several kinds of data add up by design, and so may the
        log-odds of one."""
        name = name_of(self.body)
        if name == LOG_ODDS:
            return self._is_of_difference
        if name in DISTANCES and not self.of_torch:
            alike = to_one_number(self.body)
            return ~alike if isinstance(alike, Tensor) else not alike
        return self.body is None or self.of_torch or name in OTHERS

    @property
    def is_margin(self) -> bool:
        """Whether the elements are what the difference of two computed numbers misses a margin by: triplets, rankings.
        A hinge on one number may be a discriminator's, too."""
        return name_of(self.body) in MARGINS and self._is_of_difference

    @property
    def _is_of_difference(self) -> bool:
        """Whether the elements are functions of the difference of two computed numbers."""
        node = self.body
        for _ in range(MAX_FACTORS):
            operands = edges_of(node)
            if len(operands) != 1:
                return len(operands) == 2 and name_of(node) == "SubBackward"
            node = operands[0][0]
        return False


def summands(root: Any, output: int, joined: bool = False) -> tuple[Edge, list[Any], list[tuple[Edge, list[Any]]]]:
    """The node that a root is a multiple of, the nodes that multiply it by numbers, and what it adds up, each with the
    nodes that multiply it in the sum; itself where it is no sum, and where it has more terms than are told apart.
    What is multiplied by zero there (all parameters, so that a wrapper sees each) is no term. `joined`: a sum of what
    was put side by side is one, too."""
    top, above = _factors_above((root, output))
    found: list[tuple[Edge, list[Any]]] = []
    todo: list[tuple[Edge, list[Any]]] = [(top, [])]
    while todo and len(found) + len(todo) <= MAX_TERMS:
        edge, factors = todo.pop()
        parts = edges_of(edge[0]) if name_of(edge[0]) in SUMS else side_by_side(edge) if joined else []
        if parts:
            todo += [(below, [*factors, *more]) for below, more in map(_factors_above, reversed(parts))]
        else:
            found.append((edge, factors))
    there = [(edge, factors) for edge, factors in found if not any(map(is_times_zero, factors))]
    return top, above, (there or found) if not todo else [(top, [])]


def _factors_above(edge: Edge) -> tuple[Edge, list[Any]]:
    """The node that another is a multiple of, and the nodes that multiply it."""
    factors: list[Any] = []
    while len(factors) < MAX_FACTORS:
        while (below := handed_on(edge)) is not None:
            edge = below
        operands = edges_of(edge[0])
        if len(operands) != 1 or not (name_of(edge[0]) in FACTORS or _of_one_number(edge, operands[0])):
            break
        factors.append(edge[0])
        edge = operands[0]
    return edge, factors


def _of_one_number(edge: Edge, below: Edge) -> bool:
    """Whether an autograd function of somebody's own makes one number of one (its mean over ranks). What its backward
    multiplies by shows in the gradient that arrives below."""
    written = getattr(type(edge[0]), "_forward_cls", None)
    return written is not None and shape_of(edge) in ((), (1,)) and shape_of(below) in ((), (1,))


def numbers_at(factors: list[Any]) -> NumbersBefore:
    """What nodes multiply and divide by."""
    found = NumbersBefore([], [])
    for node in factors:
        (found.divisors if name_of(node) == "DivBackward" else found.multipliers).append(_number_at(node))
    return found


def _number_at(node: Any) -> float | Tensor | None:
    name, other = name_of(node), other_operand(node)
    if name == "NegBackward":
        return -1.0
    if type(other) is not Tensor or other.numel() != 1:
        return None  # reading a DTensor may call a collective
    if name == "DivBackward" and node.next_functions[0][0] is None:
        return None
    # As it is now, where it is read later: its memory may be used again.
    return float(other) if is_host(other) else other.detach().reshape(()).double().clone()


def num_factors(factors: list[Any], more: int = 0) -> Any:
    """How many numbers multiply a loss, and `more`: those that are 1 count where there are no others. An int, or a
    Later of it."""
    return made_of(
        [_number_at(node) for node in factors],
        lambda numbers: (sum(number != 1 for number in numbers) or len(numbers)) + more,
    )


def divided_by(factors: list[Any]) -> Any:
    """Whole numbers from 2 on that nodes divide by, or multiply by one over, as far as they are read: a list, None for
    none, or a Later of it."""
    found = numbers_at(factors)
    num_divisors = len(found.divisors)

    def whole_ones(numbers: list[float | None]) -> list[int] | None:
        divisors, multipliers = numbers[:num_divisors], numbers[num_divisors:]
        read = [*(one for one in divisors if one), *(1 / one for one in multipliers if one)]
        whole = {round(one) for one in read if isfinite(one) and abs(one - round(one)) <= ROUNDED * abs(one)}
        return sorted(one for one in whole if one > 1) or None

    return made_of([*found.divisors, *found.multipliers], whole_ones)


def leads_to(edge: Edge, nodes: Container[Any]) -> Any:
    """The first of some nodes behind an edge, where one path alone goes on from it; None where there is none."""
    for _ in range(MAX_FACTORS):
        if edge[0] in nodes:
            return edge[0]
        operands = edges_of(edge[0])
        if len(operands) != 1:
            return None
        edge = operands[0]
    return None


def reduced_at(edge: Edge) -> Reduced | None:
    """What the reduction at an edge of the graph goes over; None where there is none, or it joins several losses."""
    node = edge[0]
    name, operands = name_of(node), edges_of(node)
    if not operands:
        return None
    if name in WITH_REDUCTION or name in _OF_ROWS:
        shape = shape_of(operands[0])
        if shape is None or node._saved_reduction not in (MEAN, SUM):
            return None
        shape = shape[:1] if name in _OF_ROWS else shape
        return Reduced(node, node._saved_reduction == MEAN, prod(shape), _rows(shape))
    shape = shape_of(operands[0]) if name in ("MeanBackward", *WHOLE_SUMS) else None
    if shape is None:
        return None
    found = Reduced(node, name == "MeanBackward", prod(shape), _rows(shape))
    if found.is_mean:
        found.share = 1 / max(found.num, 1)
    return found if _descend(found, operands[0]) else None


def _descend(found: Reduced, edge: Edge) -> bool:
    """Follow what multiplies elements apart down to the body."""
    for _ in range(MAX_FACTORS):
        node = edge[0]
        name, operands = name_of(node), edges_of(node)
        shape = shape_of(edge)
        if shape is None or name.startswith("Stack"):
            return False
        found.body = node
        if name.startswith("Cat"):
            return any(prod(shape_of(part) or ()) > 1 for part in operands)
        if name == "DivBackward" and name_of(node.next_functions[0][0]) == "CtcLossBackward":
            found.of_torch = True  # torch's own mean over sequences, each by its number of labels
            return True
        if len(operands) != 1:
            return edge[1] == 0
        if name in FACTORS:
            other = other_operand(node)
            if name != "NegBackward" and (other is None or other.numel() == 1):
                found.numbers.append(node)
                # What has dimensions may stand for the data of a batch of one: its advantage, its length.
                of_one = other is not None and other.dim() > 0
                found.num_of_one += of_one
                found.of_one |= of_one and name == "MulBackward"
            if other is not None and other.numel() > 1:
                found.is_weighted = True
                found.weights += [other] if prod(shape) == found.num else []
                found.factors += [other] if name == "MulBackward" else []
                found.has_lengths |= name == "DivBackward"
        elif name in ("MeanBackward", *WHOLE_SUMS) or name.startswith(_PICKS):
            sizes = shape_of(operands[0])
            if sizes is None:
                return False
            found.adds_up |= not name.startswith(_PICKS)
            if name not in WHOLE_SUMS:
                found.share *= max(prod(shape), 1) / max(prod(sizes), 1)
        elif not name.startswith((*PASS_THROUGH, *_LEAVES_OUT)):
            return edge[1] == 0
        edge = operands[0]
    return False


def of_reduction(found: Reduced, arrived: Tensor) -> dict[str, Any]:
    """Fields of a LossGradient: what the gradient that arrives at the reduction tells."""
    return {
        "reduced_by": "mean" if found.is_mean else "sum",
        "compares": found.compares,
        "num_reduced": found.num,
        "num_rows": found.num_rows,
        "reduced_weight": arrived.reshape(()).double() / (max(found.num, 1) if found.is_mean else 1),
    }


def element_weights(found: Reduced, arrived: Tensor, grad: Tensor) -> dict[str, Any]:
    """The same, and what the gradient that arrives at the body tells of elements."""
    told = of_reduction(found, arrived)
    weight = told["reduced_weight"]
    local = getattr(grad, "_local_tensor", grad).detach()
    if found.body is None or not local.numel():
        return told | {"num_elements": found.num, "element_min": weight, "element_max": weight, "element_share": 1.0}
    used = local != 0
    most = torch.where(used, local, local.min()).max().double()
    least = torch.where(used, local, local.max()).min().double()
    mixed = ~used.all() & ((most - least).abs() > SAME * most.abs())
    alone = (arrived.double() * found.share).abs() * max(local.numel(), 1)
    return told | {
        "num_elements": used.sum(),
        "element_min": torch.where(mixed, torch.nan, least),
        "element_max": most,
        "element_share": local.abs().sum(dtype=torch.float64) / alone.reshape(()),
        "num_rows_used": used.reshape(len(used), -1).any(1).sum() if local.dim() and len(local) == found.num else None,
    }


def num_kept(found: Reduced) -> Tensor | None:
    """How many of the elements that are reduced the masks among their weights keep: tensors of zeros and ones, one for
    each element. None where no weights are."""
    kept = None
    for one in found.weights:
        if type(one) is not Tensor or one.numel() != found.num:
            continue
        used = one.detach().reshape(-1) != 0
        is_mask = (~used | (one.detach().reshape(-1) == 1)).all()
        kept = (used | ~is_mask) & (True if kept is None else kept)
    return None if kept is None else kept.sum()


def has_own_weights(found: Reduced) -> bool | Tensor:
    """Whether something but masks multiplies elements apart, or what they are sums of: a bool, or 0-d on its device."""
    others = [((one.detach() != 0) & (one.detach() != 1)).any() for one in found.factors if type(one) is Tensor]
    return True if found.of_one else torch.stack(others).any() if others else False


def num_unmasked(found: Reduced) -> int | Tensor:
    """The same where all weights of what is reduced are masks; else 0."""
    kept: Tensor | None = None
    for one in found.weights:
        used = one.detach().reshape(-1) != 0
        is_mask = (~used | (one.detach().reshape(-1) == 1)).all()
        kept = used & is_mask if kept is None else kept & used & is_mask
    return 1 if kept is None else kept.sum()


def only_body(edge: Edge) -> Any:
    """The node that computes all that the mean or sum at an edge goes over, sequence by sequence too (in a list of
    parts, each with a mean of its own); None where several do, and where it is one number, a mean already."""
    queue, visited = [edge], set[Edge]()
    bodies = set[Edge]()
    while queue and len(visited) < MAX_PARTS:
        one = queue.pop()
        if one in visited:
            continue
        visited.add(one)
        name, operands = name_of(one[0]), edges_of(one[0])
        adds = name in SUMS and shape_of(one) in ((), (1,))
        scales = name in FACTORS and len(operands) == 1
        if operands and (adds or scales or name.startswith(_GOES_THROUGH)):
            queue += operands
        else:
            bodies.add(one)
    if len(bodies) != 1 or queue:
        return None
    ((node, output),) = bodies
    return node if output == 0 and prod(shape_of((node, output)) or (1,)) > 1 else None  # one number is no mean or sum


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1
