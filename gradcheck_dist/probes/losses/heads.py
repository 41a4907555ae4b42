"""Which of several losses of one pass are parts of one: the same weight made their classes, of other tokens.

    loss = sum(cross_entropy(head(part), labels_of_part) for each part of the batch) / num_parts

Means like these weigh a part's tokens as 1 / their number. So do means of several heads or tasks, and means of
sequences taken one by one, which are meant: heads have weights of their own, a sequence is one row, or, where sequences
are packed, of a length of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gradcheck_dist.probes.backward.graph_leaves import LEAF_NODE
from gradcheck_dist.probes.losses.loss_graph import PARTED, dim_of, edges_of, name_of, operands_of, selects_rows

MAX_HOPS = 12
_CUTS = PARTED - {"UnbindBackward"} | {"SliceBackward"}
_PRODUCTS = {"AddmmBackward": 1, "MmBackward": 0}
"""Which operand of a product its rows are from; the one behind it is the weight."""
_PASSED = (
    *("NllLoss", "LogSoftmax", "Gather", "Neg", "Mul", "Div", "Tanh", "Split"),
    *("View", "Reshape", "Unsafe", "Slice", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias", "Transpose"),
)
"""The begins of names of what a loss and its logits are made by, one operand of which has a gradient."""


class Cut(Enum):
    """Along what a tensor of (rows, tokens, features) is cut; what has no rows holds tokens of one."""

    ROWS = "rows"
    TOKENS = "tokens"
    FEATURES = "features"


@dataclass
class Made:
    """What the classes of a loss are made of: `head` the weight, None where it is not known; `several`: of tokens of
    several rows. `source` is what a piece of `length` tokens was cut from, None for a whole one."""

    head: Hashable | None = None
    several: bool = False
    source: Any = None
    length: int = 0


def parts_of_one(losses: dict[Any, int]) -> dict[int, int]:
    """For each loss that is a part of a larger one: which of these larger ones, numbered in the order of their parts.

    Args:
        losses: ids of the losses of one pass, by the node that computed them.
    """
    found = {loss_id: made for node, loss_id in losses.items() if (made := _made(node)).head is not None}
    pieces: dict[Any, list[int]] = defaultdict(list)
    for made in found.values():
        pieces[made.source].append(made.length)
    alike = {source for source, lengths in pieces.items() if source is not None and _of_one_length(lengths)}
    heads = {loss_id: made.head for loss_id, made in found.items() if made.several or made.source in alike}
    number = {head: index for index, (head, num) in enumerate(Counter(heads.values()).items()) if num > 1}
    return {loss_id: number[head] for loss_id, head in heads.items() if head in number}


def _of_one_length(lengths: list[int]) -> bool:
    """As what is cut into chunks has, but for the last of them."""
    return len(lengths) > 1 and sum(length != max(lengths) for length in lengths) <= (len(lengths) > 2)


def _made(node: Any) -> Made:
    result = Made()
    whole = True
    for behind in _behind(node):
        shape = behind._input_metadata[0].shape
        result.several |= whole and _has_rows(shape)
        if name_of(behind) in _PRODUCTS and result.head is None:
            result.head = _weight_of(behind)
        cut = _cut_of(behind)
        if cut is not None and result.source is None and whole:
            dims = len(behind._saved_self_sym_sizes)
            if cut is Cut.TOKENS or dims == 2:
                result.source, result.length = behind.next_functions[0][0], shape[-2]
        elif result.source is not None and len(shape) > 2 and result.length == shape[-2]:
            result.source = None  # one row of what had been laid flat
        whole &= cut is not Cut.ROWS  # what lies behind holds other losses' rows, too
    return result


def _behind(node: Any) -> Iterator[Any]:
    """The nodes that lead from a loss to the rows that its classes were made of."""
    picked = name_of(node) == "IndexBackward"
    for _ in range(MAX_HOPS):
        yield node
        name = name_of(node)
        if name in _PRODUCTS:
            following = node.next_functions[_PRODUCTS[name]][0]
        else:
            operands = operands_of(node)
            passed = name.startswith(_PASSED) or picked or selects_rows(node)
            following = operands[0] if len(operands) == 1 and passed and _cut_of(node) is not Cut.FEATURES else None
        picked = False
        if following is None:
            return
        node = following


def _has_rows(shape: tuple[int, ...]) -> bool:
    """Whether two dimensions or more are larger than one beside the last, or beside classes in the second: rows, and
    tokens of each."""
    return len(shape) > 2 and _more_than_one(shape[:-1]) > 1 and _more_than_one((shape[0], *shape[2:])) > 1


def _more_than_one(sizes: Iterable[int]) -> int:
    return sum(size > 1 for size in sizes)


def _cut_of(node: Any) -> Cut | None:
    """What a split or a slice takes a part of."""
    if name_of(node) not in _CUTS:
        return None
    dims = len(node._saved_self_sym_sizes)
    dim = dim_of(node) % dims
    if dim == dims - 1:
        return Cut.FEATURES
    return Cut.TOKENS if dim > 0 else Cut.ROWS


def _weight_of(product: Any) -> Hashable | None:
    """The parameter behind the second operand of a product, and which of what was made of it: a flat parameter holds
    several."""
    node, output = product.next_functions[_PRODUCTS[name_of(product)] + 1]
    if node is None:
        return ("frozen",)
    way = [output]
    while node.name() != LEAF_NODE:
        edges = edges_of(node)
        if len(edges) != 1 or len(way) > MAX_HOPS:
            return None
        node, output = edges[0]
        way.append(output)
    return (node, *way)
