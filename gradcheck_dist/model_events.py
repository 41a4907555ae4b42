"""What losses and activations did, and their gradients on the way through the model. Imports no torch.

`events.py` beside this says how events are encoded, names these too, and has what happened to parameters' gradients.
"""

from __future__ import annotations

from gradcheck_dist.records import Count, Index, LossNumber, Rank, Record, Site, Step


class Event(Record, kw_only=True):
    """Something that happened at one time on one rank. `seq` orders the events of a rank."""

    seq: int
    t_ns: int
    step: Step
    site: Site | None = None


FUNCTION = "function "
"""Begins the op of a loss that is what an autograd function of the program's own gives, of which nothing is known."""


class Loss(Event, tag="loss"):
    """A loss was evaluated on labels (forward). `loss_id` joins it with its LossGradient.

    A second Loss of the same `loss_id` corrects the first: the user declared more about it. `coefficient` is the factor
    of the term in the objective, None where nobody declared it. `num_weighted_tokens` is the sum of the class weights
    of the valid labels, where there are any. `inputs_hash` and `targets_hash`, both or none: of a loss without labels,
    checksums of what the first module was given since the pass before, and of what the loss compares with.
    `called_from` numbers, on each rank, the places in the program from which losses were called, through whatever
    functions of its own; branches of one condition that call the same are one place.
    """

    loss_id: int
    term: str = "main"
    coefficient: float | None = None
    op: str = "cross_entropy"
    reduction: str = "mean"
    num_tokens: Count | None = None
    num_labels: Count | None = None
    label_hash: int | None = None
    value: float | None = None
    requires_grad: bool = True
    dtype: str = "float32"
    num_weighted_tokens: float | None = None
    inputs_hash: int | None = None
    targets_hash: int | None = None
    called_from: Index | None = None


class ReducedGradient(Event, kw_only=True):
    """What arrived in backward at one mean or sum over elements. Fields are None where there is none.

    `mean_weight`: a mean over elements that was computed since the pass before gets this weight, which `num_factors`
    numbers come to; NaN where its targets are one number, or one class, for a whole pass. `num_reduced`: it is one
    `reduced_by` ("mean", "sum") over so many elements, `num_rows` along the first dimension, times numbers:
    `reduced_weight` each; `compares`: of a loss that compares with targets. Masks and weights of elements lie behind
    it: `num_elements` get a gradient there, from `element_min` to `element_max` (NaN where some are left out and the
    others weigh apart), which is `element_share` of what the mean or sum alone would give, on average;
    `num_rows_used` of what is reduced are rows of these with one at least. `whole` is the
    gradient that arrived at the sum of several losses which the root is a multiple of. `hooks_factor` is what hooks of
    the program's, the first put at `hooks_site`, multiplied the gradients of activations behind the loss by, where all
    gradients of the pass go through these; all weights here are told with it. `divided_by` are the whole numbers from 2
    on that are read among those that divide, or of which one over it multiplies (the 1/2 before a squared error).
    """

    mean_weight: float | None = None
    num_factors: Count = 0
    reduced_by: str | None = None
    compares: bool = False
    num_reduced: Count | None = None
    num_rows: Count | None = None
    reduced_weight: float | None = None
    num_elements: Count | None = None
    element_min: float | None = None
    element_max: float | None = None
    element_share: float | None = None
    num_rows_used: Count | None = None
    whole: float | None = None
    hooks_factor: float | None = None
    hooks_site: Site | None = None
    divided_by: list[int] | None = None


class LossGradient(ReducedGradient, tag="loss_gradient"):
    """The gradient that arrived at a loss in backward, as the weight of one token's loss in the backward root.

    For reduction "mean" the arriving gradient is divided by num_tokens; for "none" `weight` is the mean over tokens
    with a non-zero gradient and `weight_min`, `weight_max` tell whether it is the same for all of them. `other_losses`
    counts the losses of other kinds behind the same backward root. `computed`: something that has a gradient itself
    multiplies a loss of this pass, or a curve is drawn over it, so that the weight is a function of the data. A root
    that counts no tokens may be one mean or sum, which the inherited fields tell of. `label_share`: how much of the
    weight falls on the labels, where the trainer smooths these by hand. `multipliers` and `divisors` are the numbers
    that multiply and divide the loss in a sum of several, the outermost first (None for one that is not read: on an
    accelerator, or of a DTensor), `sum_before` is what these come to before all losses of that sum together.
    `num_samples`: the tokens are those of so many samples (rows, or neighbours of one weight), whose weights come to
    `sample_weight` on average and differ from that of the least by `sample_spread`, relative; `shortest_sample` and
    `longest_sample` are the numbers of tokens of one. `beside_weights` multiplies each token beside a weight of its
    own, where these are all that weighs tokens apart; masks among these keep `num_kept`, and in a `batch_of_one` one of
    them is one number for all tokens (an advantage); `of_means`: what is reduced are sums of tokens that tensors
    divide, as the means of sequences are. `part_of` numbers what several losses of one pass are parts of: the same
    weight made their classes, of other rows. `logits` numbers the logits that several losses of one pass compare, each
    with labels of its own. `class_scale`: of a loss that is known by the gradient of its logits z, the mean of the
    logarithm of what exp(z) is multiplied by there, which is one number on all ranks that hold a part of the classes;
    where its own part does not tell the weight (no label lies there), the loss is of reduction "unknown". `num_picked`:
    the largest losses are taken (topk, sort), so many of them, whether they have a label or not. `numbers` are those
    that multiply all that the pass begins at, the outermost first, as far as the source of a line tells what they are.
    """

    loss_id: int
    accumulation_step: Index
    microbatch: Index
    weight: float
    weight_min: float | None = None
    weight_max: float | None = None
    num_tokens: Count | None = None
    stage: Index | None = None
    other_losses: Count = 0
    computed: bool = False
    label_share: float | None = None
    multipliers: list[float | None] | None = None
    divisors: list[float | None] | None = None
    sum_before: float | None = None
    num_samples: Count | None = None
    sample_weight: float | None = None
    sample_spread: float | None = None
    shortest_sample: Count | None = None
    longest_sample: Count | None = None
    beside_weights: float | None = None
    num_kept: Count | None = None
    batch_of_one: bool = False
    of_means: bool = False
    part_of: Index | None = None
    class_scale: float | None = None
    logits: Index | None = None
    num_picked: Count | None = None
    numbers: list[LossNumber] | None = None


class LossTerm(ReducedGradient, tag="loss_term"):
    """A summand of a backward root that is no loss with a count of tokens (a balance loss, a penalty).

    `weight` is the gradient that arrived at it, behind all constants that multiply it; `op` the operation that it comes
    from, as autograd names it. `ordinal` numbers the terms of one pass. `attached`: it is no summand, and an autograd
    function called `op`, which was given it beside activations, brings it into backward. The inherited fields are told
    where all terms of the root are means or sums over elements that count no tokens.
    """

    accumulation_step: Index
    microbatch: Index
    ordinal: Index
    op: str
    weight: float
    stage: Index | None = None
    attached: bool = False


UNSYNCED_TOLD, UNSYNCED_PAST, UNSYNCED_WAITS = "told", "past", "waits"
"""Why a wrapper did not reduce in a pass."""


class Backward(Event, tag="backward"):
    """One backward pass: the leaves of one contribution (accumulation step, microbatch) arrived.

    `sync` is False when a data-parallel wrapper did not reduce in this pass, and `unsynced` says why where that is
    known: UNSYNCED_TOLD (by no_sync and its like), UNSYNCED_PAST (no forward went through it), UNSYNCED_WAITS (for
    parameters that the pass left out). `seq` is taken when the pass
    begins, so reductions inside it come after it. `params` are the parameters whose leaf received a gradient.
    `returned`: the gradients were handed to the caller (torch.autograd.grad) and not accumulated. `first_of_forward`:
    the accumulation step of the first pass that differentiated this one's forward pass, which kept its graph
    (retain_graph); None where it is this one, as far as was seen. `onto_itself`: the parameters at which what arrived
    lay in the memory of `.grad`, which an earlier pass had left, so that autograd added it to itself. `inputs_hash`: a
    checksum of what the first module was given since the pass before, where that was looked at and no parameter moved.
    """

    accumulation_step: Index
    microbatch: Index = 0
    stage: Index | None = None
    sync: bool | None = None
    params: int | None = None
    duration_ns: Count = 0
    returned: bool = False
    first_of_forward: Index | None = None
    onto_itself: int | None = None
    inputs_hash: int | None = None
    unsynced: str | None = None


class StageGradient(Event, tag="stage_gradient"):
    """A gradient at a pipeline stage's edge, in one backward pass.

    `side` is "input" (as autograd delivered it at what the stage was given, before it is sent on) or "output" (as it
    entered the stage's graph, after hooks on the output). `values` are float32 bytes of shape (n,): elements at fixed
    positions of the flattened tensor, equal for equal `shape`. `forward` are those of the activation itself, as it was
    when backward began; none where it holds no memory any more.
    """

    accumulation_step: Index
    microbatch: Index
    side: str
    shape: tuple[Count, ...]
    dtype: str
    values: bytes
    stage: Index | None = None
    forward: bytes = b""


MAX_EXCHANGES_ALIKE, MAX_EXCHANGES = 16, 64
"""Applications of one function, and of all, that are recorded in a step: those that come first in forward."""
SENT = "send"
HANDED_ON, HANDED_ON_SUMMED = "copy", "copy, summed"
OF_SHARDS, OF_SUMMANDS = "copy of shards", "copy of summands"
SAID_ALIKE, SAID_SUMMANDS = "said alike", "said summands"
"""Operations of an Exchange: a copy that goes on, whose gradient is declared to be whole, or a summand on each rank;
the first of these where the copy was made of the ranks' shards or summands just before; and what ranks declare to be
copies, or summands."""


class Exchange(Event, tag="exchange"):
    """Activations were combined over ranks in a forward pass, and their gradients came back through it.

    `function` is the torch.autograd.Function that did it, `defined_at` its backward; "" where a collective changed a
    tensor in place and backward hands on what arrives. `index` counts those of `group`, in the order of forward, so
    that it is equal on its ranks. `input_counts` and `output_counts` are the numbers of values of each part, one part
    for each rank of the group or one in all. `values` are float32 bytes: elements of the input, of the output, of the
    gradient that arrived at the output, and of the one that backward gave for the input. `lost`: it gave none.
    `params`: what the input was computed from, up to other functions of somebody's own. `put_back`: an all-gather,
    which has no gradient, behind which the rank put its own input back; there is no output then. `stopped`: and what it
    took was detached, or gradients were disabled. `operation`: one of torch's functional collectives, by what it does
    ("sum", "gather", "reduce-scatter", "all-to-all"), or a DTensor's local part (HANDED_ON and others above); there are
    elements of the input and of the gradient that arrived alone, and `function` is its name. A `group` of this rank
    alone: a function that hands its input on, and may scale the gradient that others' backward scaled; or a hook on a
    tensor.
    `of_leaf`: it was applied to `params` themselves. `collectives` are those that it called in forward, or SENT alone:
    it sent to single ranks, and each of its tensors is a part. `shifted`: those of `params` that a tensor without
    gradient was added to before they were used, so that forward has another number than their gradient is of.
    """

    function: str
    group: tuple[Rank, ...]
    index: Count
    accumulation_step: Index
    microbatch: Index
    input_counts: tuple[Count, ...]
    output_counts: tuple[Count, ...]
    values: bytes
    dtype: str = "float32"
    collectives: tuple[str, ...] = ()
    lost: bool = False
    defined_at: Site | None = None
    params: int | None = None
    put_back: bool = False
    stopped: bool = False
    operation: str = ""
    of_leaf: bool = False
    shifted: int | None = None


class RootValue(Event, tag="root_value"):
    """A backward pass begins at one number, which is one loss times constants, as far as was seen: the number."""

    accumulation_step: Index
    microbatch: Index
    value: float


class AttentionBackward(Event, tag="attention_backward"):
    """Backward ran through a function that ranks of `group` applied together to queries, keys and values.

    `function` is the torch.autograd.Function, `defined_at` its backward, `index` counts its applications in the group.
    `values` are 8 float32 as bytes: the inner products of output, values, queries and keys with their gradients, and
    the products of these tensors' norms; `counts` are their numbers of elements (of a part: one sequence, one head).
    """

    function: str
    group: tuple[Rank, ...]
    index: Count
    accumulation_step: Index
    microbatch: Index
    values: bytes
    counts: tuple[Count, ...]
    dtype: str = "float32"
    defined_at: Site | None = None


class LossBackward(Event, tag="loss_backward"):
    """A function of somebody's own gave a cross-entropy for each label, or one sum of them, and its backward was held
    against the derivative of that on a few of them (probes/losses/loss_backward.py). It follows the LossGradient of the
    same application.

    `function` is the torch.autograd.Function, `defined_at` its backward, `dtype` what rounds most. `values` are float32
    bytes of shape (labels, 5): the gradient that arrived at the label's loss, or at the sum; the multiple of the
    derivative that backward gave; the share of what it gave that is no multiple of it; how far the loss is from a
    cross-entropy, relative to 1 + loss (-1: the label lies in another rank's shard of the vocabulary, and the
    derivative is known but for its size; NaN: it is left out); and by how much the label's logit differs from the mean
    of all, relative to 1 + loss: where logits are alike, the loss is the same at any temperature. Of a rank that holds
    a shard of the vocabulary, which the ranks of `group` hold in this order, they have shape (labels, 8): behind these
    the logsumexp of the shard's logits, that of all logits as the loss tells it (NaN where the label lies elsewhere),
    and the label.
    """

    function: str
    accumulation_step: Index
    microbatch: Index
    values: bytes
    dtype: str = "float32"
    defined_at: Site | None = None
    group: tuple[Rank, ...] = ()


class HeadBackward(Event, tag="head_backward"):
    """Backward ran through a function of somebody's own that computes cross-entropies from hidden states and the output
    layer's weight (probes/losses/head_backward.py).

    `function` is the torch.autograd.Function, `defined_at` its backward, `params` the weight, `dtype` what rounds most.
    `values` are 5 float32 as bytes: what arrived at its result (the mean, of several labels), the inner product of the
    hidden states with their gradient and the norm of the elements' products, and both of the weight. NaN where
    something was written over, or other results had gradients too.
    """

    function: str
    accumulation_step: Index
    microbatch: Index
    values: bytes
    dtype: str = "float32"
    defined_at: Site | None = None
    params: int | None = None


class Tokens(Event, tag="tokens"):
    """Runs of neighbouring tokens that an embedding looked up in one backward pass's forward, or that are the labels of
    a loss (`loss_id`; its LossGradient tells the pass).

    `values` are int64 bytes, ascending: the smallest of the checksums of all runs (trace/token_runs.py).
    """

    accumulation_step: Index
    microbatch: Index
    values: bytes
    loss_id: int | None = None


class AddedByFunction(Event, tag="added_by_function"):
    """A gradient arrived, in one backward pass, at functions that were given parameters which keep a gradient buffer of
    their own (`main_grad`), and that add to it by themselves. Whether they did shows in the pass's leaves.

    `values` are float32 bytes of shape (n,), for each of `params` in the order of that set: the largest element, by its
    size, of what arrived at the function.
    """

    accumulation_step: Index
    microbatch: Index
    params: int
    values: bytes


class HandedOn(Event, tag="handed_on"):
    """A backward pass began with the gradient that earlier ones had left at a cut in the graph, times `multiple`.
    `passes` are these, as (accumulation step, microbatch); none where an accelerator told late that it began with
    another one."""

    accumulation_step: Index
    microbatch: Index
    multiple: float
    passes: tuple[tuple[Index, Index], ...]
