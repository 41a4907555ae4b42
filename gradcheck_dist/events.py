"""The vocabulary of a trace: everything a probe can say. Imports no torch.

One Struct a kind, encoded as msgpack maps whose `kind` names the Struct; fields with their default value are left
out, unknown fields are ignored, so a newer minor writer stays readable. Units stand in the field names (`_ns`, `_s`,
`_bytes`); counts begin with `num_`; indices are 0-based; ranks are global ranks. What has no place in time (parameters,
samples, the header) is defined in `records.py` and named here too.
"""

from __future__ import annotations

from gradcheck_dist.records import Count, Index, Rank, Step
from gradcheck_dist.records import Header as Header
from gradcheck_dist.records import NamedGroup as NamedGroup
from gradcheck_dist.records import Norms as Norms
from gradcheck_dist.records import Param as Param
from gradcheck_dist.records import ParamGroup as ParamGroup
from gradcheck_dist.records import ParamSet as ParamSet
from gradcheck_dist.records import ParamValues as ParamValues
from gradcheck_dist.records import Plan as Plan
from gradcheck_dist.records import Record as Record
from gradcheck_dist.records import Samples as Samples
from gradcheck_dist.records import Site as Site
from gradcheck_dist.records import StepColumns as StepColumns
from gradcheck_dist.records import StepShape as StepShape
from gradcheck_dist.records import Wrapper as Wrapper

SCHEMA_VERSION = 1
"""Raised when an old reader would misread a new trace. Frozen by tests/trace/test_schema.py."""

# What a row of samples shows. The order is the order in time around one event.
LEAF = 0  # a contribution's own gradient, as it arrived at the autograd leaf
BEFORE = 1  # the gradient buffer before the event
AFTER = 2  # the gradient buffer after the event
UNNAMED = "unnamed."  # begins the names of parameters that an optimizer holds and no module has shown

SHARDING = frozenset({"fsdp", "hsdp", "replicate", "fsdp1"})
"""`impl` of reductions of a wrapper that keeps a rank's part of the result, and adds it to what is there already."""
DATA_PARALLEL = SHARDING | {"ddp", "fsdp1_no_shard"}

BY_AUTOGRAD = "redistribute"  # `hook` of a reduction that is the backward of a DTensor's redistribution


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
    of the valid labels, where there are any.
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


class LossGradient(Event, tag="loss_gradient"):
    """The gradient that arrived at a loss in backward, as the weight of one token's loss in the backward root.

    For reduction "mean" the arriving gradient is divided by num_tokens; for "none" `weight` is the mean over tokens
    with a non-zero gradient and `weight_min`, `weight_max` tell whether it is the same for all of them. `other_losses`
    counts the losses of other kinds behind the same backward root. `computed`: something that has a gradient itself
    multiplies a loss of this pass, or a curve is drawn over it, so that the weight is a function of the data.
    `mean_weight`: the root is one mean over elements, computed since the pass before, times `num_factors` numbers; what
    these come to, NaN where its targets are one number, or one class, for a whole pass. `num_reduced`: the root is one
    `reduced_by` ("mean", "sum") over so many elements, `num_rows` along the first dimension, times numbers:
    `reduced_weight` each; `compares`: of a loss that compares with targets. Masks and weights of elements lie behind
    it: `num_elements` get a gradient there, from `element_min` to `element_max` (NaN where some are left out and the
    others weigh apart), which is `element_share` of what the mean or sum alone would give, on average. `label_share`:
    how much of the weight falls on the labels, where the trainer smooths these by hand.
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
    mean_weight: float | None = None
    num_factors: Count = 0
    label_share: float | None = None
    reduced_by: str | None = None
    compares: bool = False
    num_reduced: Count | None = None
    num_rows: Count | None = None
    reduced_weight: float | None = None
    num_elements: Count | None = None
    element_min: float | None = None
    element_max: float | None = None
    element_share: float | None = None


class LossTerm(Event, tag="loss_term"):
    """A summand of a backward root that is no loss with a count of tokens (a balance loss, a penalty).

    `weight` is the gradient that arrived at it, behind all constants that multiply it; `op` the operation that it comes
    from, as autograd names it. `ordinal` numbers the terms of one pass. `attached`: it is no summand, and an autograd
    function called `op`, which was given it beside activations, brings it into backward.
    """

    accumulation_step: Index
    microbatch: Index
    ordinal: Index
    op: str
    weight: float
    stage: Index | None = None
    attached: bool = False


class Backward(Event, tag="backward"):
    """One backward pass: the leaves of one contribution (accumulation step, microbatch) arrived.

    `sync` is False when a data-parallel wrapper was told not to reduce in this pass. `seq` is taken when the pass
    begins, so reductions inside it come after it. `params` are the parameters whose leaf received a gradient.
    `returned`: the gradients were handed to the caller (torch.autograd.grad) and not accumulated.
    """

    accumulation_step: Index
    microbatch: Index = 0
    stage: Index | None = None
    sync: bool | None = None
    params: int | None = None
    duration_ns: Count = 0
    returned: bool = False


class StageGradient(Event, tag="stage_gradient"):
    """A gradient at a pipeline stage's edge, in one backward pass.

    `side` is "input" (as autograd delivered it at what the stage was given, before it is sent on) or "output" (as it
    entered the stage's graph, after hooks on the output). `values` are float32 bytes of shape (n,): elements at fixed
    positions of the flattened tensor, equal for equal `shape`.
    """

    accumulation_step: Index
    microbatch: Index
    side: str
    shape: tuple[Count, ...]
    dtype: str
    values: bytes
    stage: Index | None = None


class Exchange(Event, tag="exchange"):
    """Activations were combined over ranks in a forward pass, and their gradients came back through it.

    `function` is the torch.autograd.Function that did it, `defined_at` its backward; "" where a collective changed a
    tensor in place and backward hands on what arrives. `index` counts those of `group`, in the order of forward, so
    that it is equal on its ranks. `input_counts` and `output_counts` are the numbers of values of each part, one part
    for each rank of the group or one in all. `values` are float32 bytes: elements of the input, of the output, of the
    gradient that arrived at the output, and of the one that backward gave for the input. `lost`: it gave none.
    `params`: what the input was computed from, up to other functions of somebody's own. `put_back`: an all-gather,
    which has no gradient, behind which the rank put its own input back; there is no output then. A `group` of this rank
    alone: a function that hands its input on, and may scale the gradient that others' backward scaled.
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
    of all, relative to 1 + loss: where logits are alike, the loss is the same at any temperature.
    """

    function: str
    accumulation_step: Index
    microbatch: Index
    values: bytes
    dtype: str = "float32"
    defined_at: Site | None = None


class HandedOn(Event, tag="handed_on"):
    """A backward pass began with the gradient that earlier ones had left at a cut in the graph, times `multiple`.
    `passes` are these, as (accumulation step, microbatch)."""

    accumulation_step: Index
    microbatch: Index
    multiple: float
    passes: tuple[tuple[Index, Index], ...]


class Reduce(Event, tag="reduce"):
    """Gradients were combined over ranks.

    Semantics: out = sum over `group` of (in / pre_divide) [/ len(group) when op is "avg"] [* premul] / post_divide;
    under HSDP (`replicate_group`) the sum runs over both groups, and `all_reduced` is False while the replicate axis
    is left out. `op` "unknown": a user's communication hook or an operation whose arithmetic is not known. `root`: the
    only rank that holds the result; None where all of the group do. `dtype`: what it sums in, None where that is the
    gradients' own.
    """

    impl: str
    op: str
    group: tuple[Rank, ...]
    params: int
    wrapper: int | None = None
    accumulation_step: Index = 0
    microbatch: Index = 0
    pre_divide: float | None = None
    post_divide: float | None = None
    premul: float | None = None
    hook: str | None = None
    replicate_group: tuple[Rank, ...] = ()
    replicate_op: str | None = None
    all_reduced: bool = True
    root: int | None = None
    dtype: str | None = None


class ScaleGrads(Event, tag="scale_grads"):
    """The accumulated gradients were divided by `divisor` (a pipeline schedule's scale_grads)."""

    divisor: float
    params: int
    stage: Index | None = None
    accumulation_step: Index = 0


class GradWrite(Event, tag="grad_write"):
    """A line of the trainer's own multiplied gradients in place by `factor`; None where that is no one number.

    It tells a line and is no hand of the ledgers: what happened there is measured by the samples around it. `params`
    None: a tensor that is nobody's gradient, such as a buffer that is copied into some.
    """

    params: int | None = None
    factor: float | None = None


class ZeroGrad(Event, tag="zero_grad"):
    """The gradient buffers were emptied."""

    params: int
    set_to_none: bool = True


class AmpScale(Event, tag="amp_scale"):
    """A GradScaler multiplied something by its scale, for the first time in this step."""

    scale: float


class AmpUnscale(Event, tag="amp_unscale"):
    """A GradScaler divided the gradients by its loss scale."""

    scale: float
    params: int
    found_inf: bool = False


class Clip(Event, tag="clip"):
    """Gradients were clipped. `coefficient` is what torch's formula gives: min(1, max_norm / (total_norm + 1e-6)).

    `partial`: total_norm is this rank's share of a DTensor norm, not the whole. `norm_dtype`: the type that total_norm
    was computed in, "" where that was not seen.
    """

    params: int
    max_norm: float
    norm_type: float
    total_norm: float
    coefficient: float
    partial: bool = False
    norm_dtype: str = ""


class ClipValue(Event, tag="clip_value"):
    """Every element of the gradients was clamped to [-clip_value, clip_value]; BEFORE samples hang on it."""

    params: int
    clip_value: float


class GradientNorm(Event, tag="gradient_norm"):
    """The trainer took the norm of gradients by itself; BEFORE samples hang on it. Norms that one line takes of one
    gradient after the other have one `seq`."""

    params: int


class OptimizerStep(Event, tag="optimizer_step"):
    """The optimizer read its gradients; BEFORE samples hang on it. Ends the recorded step.

    `lr` and `hyperparameters` are those of the first parameter group; `groups` are all of them where there are
    several. `unreached` are parameters without any gradient whose module was called, with gradients enabled. `inside`:
    another optimizer's step called this one; that optimizer's `seq`.
    """

    optimizer: str
    params: int
    lr: float | None = None
    hyperparameters: dict[str, float] = {}
    grads_missing: Count | None = None
    groups: tuple[ParamGroup, ...] = ()
    unreached: int | None = None
    inside: int | None = None


class PipelineStep(Event, tag="pipeline_step"):
    """One schedule.step of a pipeline. `group` are the ranks of this pipeline, `stages` those that this rank runs."""

    schedule: str
    num_microbatches: Count
    scale_grads: bool | None
    group: tuple[Rank, ...]
    stages: tuple[Index, ...]
    num_stages: Count
    accumulation_step: Index


class GradientCheck(Event, tag="gradient_check"):
    """One outcome of `--verify`: autograd's derivative of a module's output along a direction (`observed`) against
    central differences (`numerical`, with `error`, all in the unit of the function).

    `target` is "parameter", "input", "parameters" (of the child `name`), "leaf" (what training delivered at the
    parameter), "boundary" (from the output to the next rank's module `name`), "outside" (from the output to the loss,
    outside of modules), "attached" (losses put into backward) or "module" (the whole of it). `outcome`
    is "right", "wrong", "undetermined" or "zero" (nothing depends on it); `shape` says how: "scaled" by `factor`, "cut"
    (no gradient), "constant" (whatever arrives), "flat" (a gradient where there is no dependence), "other", "partial"
    (a summand over the ranks of `group`), "stopped" (right where the stop-gradient that `reason` names is constant),
    "reversed" (by a function that turns the sign), "apart" (the derivative of each rank's own share alone), "redrawn"
    (run again in backward with other random numbers). `group` are the ranks that were checked together. `site` is the
    module's forward; where ranks are apart, what communicates.
    `call` of `num_calls` is which call of the module it was. `function` is the name of a torch.autograd.Function inside
    whose backward alone is not the derivative of its forward, `defined_at` where it is written, `called_at` where it is
    applied; `hands_on`: its forward gives its input unchanged; `at_its_word`: the rest of the module is right when its
    backward is taken for the derivative. `meant`: the user said so.
    """

    module: str
    module_type: str = ""
    target: str = "module"
    name: str = ""
    outcome: str = "undetermined"
    shape: str = ""
    observed: float | None = None
    numerical: float | None = None
    error: float | None = None
    factor: float | None = None
    precision: str = ""
    group: tuple[Rank, ...] = ()
    reason: str = ""
    call: Index = 0
    num_calls: Count = 1
    function: str = ""
    defined_at: Site | None = None
    called_at: Site | None = None
    hands_on: bool = False
    at_its_word: bool = False
    meant: bool = False


class NotChecked(Event, tag="not_checked"):
    """What `--verify` left out, and why. `what` is "module", "calls" (`name` of them), "parameter" (`name`), "forward"
    (further passes of an outermost module, `name` of them) or "meant" (declared, and nothing of that name found)."""

    module: str
    what: str = "module"
    name: str = ""
    reason: str = ""


class Recompute(Event, tag="recompute"):
    """A checkpointed region that draws random numbers was run again in backward from another random state than in
    forward. `params` are those of its module, `site` is where forward ran it."""

    params: int | None = None


class Metric(Event, tag="metric"):
    """A number that the user logged (TensorBoard scalar)."""

    name: str
    value: float


class StepEnd(Event, tag="step_end"):
    """A step was recorded whole. `probe_s` is the time spent inside probes. `num_events` (up to and with this one, but
    for Replica), `num_rows` of samples and `num_norms` records are what was recorded of it; None: nobody counted."""

    duration_s: float
    probe_s: float
    num_events: Count | None = None
    num_rows: Count | None = None
    num_norms: Count | None = None


class Replica(Event, tag="replica"):
    """A checksum of some of a rank's parameters, equal on ranks that hold the same values: when the first backward
    pass of a step began, or (`after`) when an optimizer had stepped. `num_steps_later` counts optimizer steps behind
    the last recorded one; there only changes that no optimizer made are noted."""

    fingerprint: int
    after: bool = False
    num_steps_later: Count = 0


OWN_OPTIMIZER = "an own optimizer"  # stands for the name of one that is none of torch.optim
OWN_OPTIMIZER_PROBE = "own_optimizer"
UNSEEN_UPDATE = (
    "parameters are changed by no optimizer of torch.optim, and .grad was emptied before anybody saw what was read. "
    "Leave gradients there until the next forward pass, or empty them with zero_grad() or .grad = None"
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


AnyEvent = (
    Loss
    | LossGradient
    | Backward
    | StageGradient
    | Exchange
    | AttentionBackward
    | LossBackward
    | HandedOn
    | LossTerm
    | Reduce
    | ScaleGrads
    | GradWrite
    | ZeroGrad
    | AmpScale
    | AmpUnscale
    | Clip
    | ClipValue
    | GradientNorm
    | OptimizerStep
    | PipelineStep
    | GradientCheck
    | NotChecked
    | Recompute
    | Metric
    | StepEnd
    | Replica
    | ProbeStatus
    | ProbeError
    | RunEnd
)


AnyRecord = (
    AnyEvent
    | Header
    | Param
    | ParamValues
    | ParamSet
    | Plan
    | Wrapper
    | NamedGroup
    | Samples
    | Norms
    | StepShape
    | StepColumns
)
