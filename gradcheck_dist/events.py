"""The vocabulary of a trace: everything a probe can say. Imports no torch.

One Struct a kind, encoded as msgpack maps whose `kind` names the Struct; fields with their default value are left
out, unknown fields are ignored, so a newer minor writer stays readable. Units stand in the field names (`_ns`, `_s`,
`_bytes`); counts begin with `num_`; indices are 0-based; ranks are global ranks.
"""

from __future__ import annotations

import msgspec

SCHEMA_VERSION = 1
"""Raised when an old reader would misread a new trace. Frozen by tests/trace/test_schema.py."""

# What a row of samples shows. The order is the order in time around one event.
LEAF = 0  # a contribution's own gradient, as it arrived at the autograd leaf
BEFORE = 1  # the gradient buffer before the event
AFTER = 2  # the gradient buffer after the event
ROLE_NAMES = ("leaf", "before", "after")


class Site(msgspec.Struct, array_like=True, frozen=True):
    """A place in the source: the innermost frame that is neither torch nor a probe.

    `called_from` is "file:line" of the innermost frame outside of installed packages, where that is another one: the
    user's own line that led into a library (accelerate, Lightning, transformers).
    """

    file: str
    line: int
    function: str
    called_from: str | None = None


class Record(msgspec.Struct, tag_field="kind", omit_defaults=True, kw_only=True):
    """Base of all records. Records that are no events (tables, samples) have no place in time."""


class Param(Record, tag="param"):
    """A parameter, once per rank. `name` is the fully qualified name without wrapper prefixes.

    `shape` is the global shape (of the whole parameter, whatever part of it this rank holds). `stage` is the
    pipeline stage that owns it. Samples are taken at `num_positions` fixed positions of the flattened global
    parameter; `positions` of a Plan index into them. `fingerprint` is a checksum of the values at these positions when
    the parameter was first seen: two ranks' plain tensors of one name and unequal values are not copies of one
    parameter (experts, hand-sharded layers). `sampled_every`: it has its turn in one of so many recorded steps.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    num_positions: int
    stage: int | None = None
    placements: str = ""
    wrapper: int | None = None
    requires_grad: bool = True
    fingerprint: int | None = None
    sampled_every: int = 1


class ParamSet(Record, tag="param_set"):
    """A set of parameter ids that events refer to."""

    id: int
    params: tuple[int, ...]


class Plan(Record, tag="plan"):
    """Which of a parameter's sampled positions a row of samples holds.

    `positions` is int32 bytes indexing into range(num_positions); None means all. `partial`: the values are a summand
    of the gradient, the sum over the ranks of a tensor-parallel mesh is the gradient (DTensor Partial). `offset` and
    `extent` are the box of the global parameter that this rank holds in such a layout; None where it is not known.
    """

    id: int
    param: int
    num_values: int
    positions: bytes | None = None
    partial: bool = False
    offset: tuple[int, ...] | None = None
    extent: tuple[int, ...] | None = None


class Wrapper(Record, tag="wrapper"):
    """A data-parallel wrapper around a module, once: which group it reduces over and where the user made it."""

    id: int
    impl: str  # "ddp" | "fsdp" | "hsdp" | "replicate"
    name: str
    group: tuple[int, ...]
    shard_group: tuple[int, ...] = ()
    replicate_group: tuple[int, ...] = ()
    site: Site | None = None


class Samples(Record, tag="samples"):
    """Rows of sampled gradient values.

    `rows` is int32 bytes of shape (n, 4): event seq, role, parameter id, plan id. `values` holds the rows one after
    the other in `dtype` ("float32", "float64", "float16" or "bfloat16"), each as long as its plan says.
    """

    step: int
    rows: bytes
    dtype: str
    values: bytes


class Norms(Record, tag="norms"):
    """Euclidean norms of whole gradients as they were just before the event `seq`, a row a parameter.

    `rows` is int32 bytes of shape (n, 3): parameter id, plan id (-1: a layout that is not known), number of elements
    that are NaN or infinite (these are left out of the norm). `values` holds the norm of what this rank holds of each
    gradient as float64.
    """

    step: int
    seq: int
    rows: bytes
    values: bytes


class ParamGroup(msgspec.Struct, array_like=True, frozen=True):
    """One of an optimizer's parameter groups, with its own hyperparameters."""

    params: int
    lr: float | None
    hyperparameters: dict[str, float]


class Event(Record, kw_only=True):
    """Something that happened at one time on one rank. `seq` orders the events of a rank."""

    seq: int
    t_ns: int
    step: int
    site: Site | None = None


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
    num_tokens: int | None = None
    num_labels: int | None = None
    label_hash: int | None = None
    value: float | None = None
    requires_grad: bool = True
    dtype: str = "float32"
    num_weighted_tokens: float | None = None


class LossGradient(Event, tag="loss_gradient"):
    """The gradient that arrived at a loss in backward, as the weight of one token's loss in the backward root.

    For reduction "mean" the arriving gradient is divided by num_tokens; for "none" `weight` is the mean over tokens
    with a non-zero gradient and `weight_min`, `weight_max` tell whether it is the same for all of them. `other_losses`
    counts the losses of other kinds behind the same backward root.
    """

    loss_id: int
    accumulation_step: int
    microbatch: int
    weight: float
    weight_min: float | None = None
    weight_max: float | None = None
    num_tokens: int | None = None
    stage: int | None = None
    other_losses: int = 0


class Backward(Event, tag="backward"):
    """One backward pass: the leaves of one contribution (accumulation step, microbatch) arrived.

    `sync` is False when a data-parallel wrapper was told not to reduce in this pass. `seq` is taken when the pass
    begins, so reductions inside it come after it. `params` are the parameters whose leaf received a gradient.
    """

    accumulation_step: int
    microbatch: int = 0
    stage: int | None = None
    sync: bool | None = None
    params: int | None = None
    duration_ns: int = 0


class Reduce(Event, tag="reduce"):
    """Gradients were combined over ranks.

    Semantics: out = sum over `group` of (in / pre_divide) [/ len(group) when op is "avg"] [* premul] / post_divide;
    under HSDP (`replicate_group`) the sum runs over both groups, and `all_reduced` is False while the replicate axis
    is left out. `op` "unknown": a user's communication hook or an operation whose arithmetic is not known.
    """

    impl: str
    op: str
    group: tuple[int, ...]
    params: int
    wrapper: int | None = None
    accumulation_step: int = 0
    microbatch: int = 0
    pre_divide: float | None = None
    post_divide: float | None = None
    premul: float | None = None
    hook: str | None = None
    replicate_group: tuple[int, ...] = ()
    replicate_op: str | None = None
    all_reduced: bool = True


class ScaleGrads(Event, tag="scale_grads"):
    """The accumulated gradients were divided by `divisor` (a pipeline schedule's scale_grads)."""

    divisor: float
    params: int
    stage: int | None = None
    accumulation_step: int = 0


class ZeroGrad(Event, tag="zero_grad"):
    """The gradient buffers were emptied."""

    params: int
    set_to_none: bool = True


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


class OptimizerStep(Event, tag="optimizer_step"):
    """The optimizer read its gradients; BEFORE samples hang on it. Ends the recorded step.

    `lr` and `hyperparameters` are those of the first parameter group; `groups` are all of them where there are
    several. `unreached` are parameters without any gradient whose module was called, with gradients enabled.
    """

    optimizer: str
    params: int
    lr: float | None = None
    hyperparameters: dict[str, float] = {}
    grads_missing: int | None = None
    groups: tuple[ParamGroup, ...] = ()
    unreached: int | None = None


class PipelineStep(Event, tag="pipeline_step"):
    """One schedule.step of a pipeline. `group` are the ranks of this pipeline, `stages` those that this rank runs."""

    schedule: str
    num_microbatches: int
    scale_grads: bool | None
    group: tuple[int, ...]
    stages: tuple[int, ...]
    num_stages: int
    accumulation_step: int


class GradientCheck(Event, tag="gradient_check"):
    """One outcome of `--verify`: autograd's derivative of a module's output along a direction (`observed`) against
    central differences (`numerical`, with `error`, all in the unit of the function).

    `target` is "parameter", "input", "parameters" (of the child `name`), "leaf" (what training delivered at the
    parameter), "boundary" (from the output to the next rank's module `name`) or "module" (the whole of it). `outcome`
    is "right", "wrong", "undetermined" or "zero" (nothing depends on it); `shape` says how: "scaled" by `factor`, "cut"
    (no gradient), "constant" (whatever arrives), "flat" (a gradient where there is no
    dependence), "other", "partial" (a summand over the ranks of `group`). `group` are the ranks that
    were checked together. `site` is the module's forward.
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
    group: tuple[int, ...] = ()
    reason: str = ""


class Metric(Event, tag="metric"):
    """A number that the user logged (TensorBoard scalar)."""

    name: str
    value: float


class StepEnd(Event, tag="step_end"):
    """A step was recorded whole. `probe_s` is the time spent inside probes."""

    duration_s: float
    probe_s: float


class ProbeStatus(Event, tag="probe_status"):
    """A probe became active, could not hook (`reason`) or was not needed."""

    probe: str
    active: bool
    reason: str = ""


class ProbeError(Event, tag="probe_error"):
    """An error inside a probe; training went on."""

    probe: str
    message: str
    count: int = 1


class RunEnd(Event, tag="run_end"):
    """The rank stopped in good order (atexit or detach)."""

    reason: str = ""


class Header(Record, tag="header"):
    """First record of every trace file. `columns`: steps without samples stand in StepColumns."""

    schema_version: int
    tool_version: str
    rank: int
    world_size: int
    pid: int
    started_unix_s: float
    torch_version: str = ""
    device_type: str = "cpu"
    command: tuple[str, ...] = ()
    objective: str | None = None
    axes: dict[str, int] | None = None
    sample_size: int = 0
    columns: bool = False


AnyEvent = (
    Loss
    | LossGradient
    | Backward
    | Reduce
    | ScaleGrads
    | ZeroGrad
    | AmpUnscale
    | Clip
    | ClipValue
    | OptimizerStep
    | PipelineStep
    | GradientCheck
    | Metric
    | StepEnd
    | ProbeStatus
    | ProbeError
    | RunEnd
)


class StepShape(Record, tag="step_shape"):
    """What the steps of a StepColumns have in common: the events of the first of them, as msgpack of a list of them.

    `seq` and `loss_id` count from the step's first event, `step` is 0. Encoded, since most ranks write the same.
    """

    id: int
    events: bytes


class StepColumns(Record, tag="step_columns"):
    """Consecutive steps of one shape, recorded without samples: of each event only the numbers that change from step to
    step (trace/columns.py says which). Read back, `numbers` is a view into what was read, without a copy.

    `first_seqs` is int64 bytes of shape (num_steps,); `numbers` of shape (num_numbers, num_steps), int64 or float64 as
    the field is, all little endian.
    """

    shape: int
    first_step: int
    num_steps: int
    first_seqs: bytes
    numbers: memoryview


AnyRecord = AnyEvent | Header | Param | ParamSet | Plan | Wrapper | Samples | Norms | StepShape | StepColumns
