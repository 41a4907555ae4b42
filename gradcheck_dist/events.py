"""The vocabulary of a trace: everything a probe can say. Imports no torch.

One Struct a kind, encoded as msgpack maps whose `kind` names the Struct; fields with their default value are left
out, unknown fields are ignored, so a newer minor writer stays readable. Units stand in the field names (`_ns`, `_s`,
`_bytes`); counts begin with `num_`; indices are 0-based; ranks are global ranks. What has no place in time (parameters,
samples, the header) is defined in `records.py`, what losses and activations did in `model_events.py`, what the probes
tell of themselves in `status_events.py`; all named here.
"""

from __future__ import annotations

from gradcheck_dist.model_events import FUNCTION as FUNCTION
from gradcheck_dist.model_events import HANDED_ON as HANDED_ON
from gradcheck_dist.model_events import HANDED_ON_SUMMED as HANDED_ON_SUMMED
from gradcheck_dist.model_events import MAX_EXCHANGES as MAX_EXCHANGES
from gradcheck_dist.model_events import MAX_EXCHANGES_ALIKE as MAX_EXCHANGES_ALIKE
from gradcheck_dist.model_events import OF_SHARDS as OF_SHARDS
from gradcheck_dist.model_events import OF_SUMMANDS as OF_SUMMANDS
from gradcheck_dist.model_events import SAID_ALIKE as SAID_ALIKE
from gradcheck_dist.model_events import SAID_SUMMANDS as SAID_SUMMANDS
from gradcheck_dist.model_events import SENT as SENT
from gradcheck_dist.model_events import UNSYNCED_PAST as UNSYNCED_PAST
from gradcheck_dist.model_events import UNSYNCED_TOLD as UNSYNCED_TOLD
from gradcheck_dist.model_events import UNSYNCED_WAITS as UNSYNCED_WAITS
from gradcheck_dist.model_events import AddedByFunction as AddedByFunction
from gradcheck_dist.model_events import AttentionBackward as AttentionBackward
from gradcheck_dist.model_events import Backward as Backward
from gradcheck_dist.model_events import Event as Event
from gradcheck_dist.model_events import Exchange as Exchange
from gradcheck_dist.model_events import HandedOn as HandedOn
from gradcheck_dist.model_events import HeadBackward as HeadBackward
from gradcheck_dist.model_events import Loss as Loss
from gradcheck_dist.model_events import LossBackward as LossBackward
from gradcheck_dist.model_events import LossGradient as LossGradient
from gradcheck_dist.model_events import LossTerm as LossTerm
from gradcheck_dist.model_events import ReducedGradient as ReducedGradient
from gradcheck_dist.model_events import RootValue as RootValue
from gradcheck_dist.model_events import StageGradient as StageGradient
from gradcheck_dist.model_events import Tokens as Tokens
from gradcheck_dist.records import Count, Index, Length, Rank
from gradcheck_dist.records import Header as Header
from gradcheck_dist.records import LossNumber as LossNumber
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
from gradcheck_dist.status_events import CUDA_GRAPHS as CUDA_GRAPHS
from gradcheck_dist.status_events import EXCHANGES_PROBE as EXCHANGES_PROBE
from gradcheck_dist.status_events import KEPT_BY_OPTIMIZER as KEPT_BY_OPTIMIZER
from gradcheck_dist.status_events import LATER_MODELS as LATER_MODELS
from gradcheck_dist.status_events import MOVED_NOTHING as MOVED_NOTHING
from gradcheck_dist.status_events import MOVES_NOW as MOVES_NOW
from gradcheck_dist.status_events import OWN_OPTIMIZER_PROBE as OWN_OPTIMIZER_PROBE
from gradcheck_dist.status_events import REPLACED_UNSEEN as REPLACED_UNSEEN
from gradcheck_dist.status_events import THREADS as THREADS
from gradcheck_dist.status_events import TRAIN_AT_ONCE as TRAIN_AT_ONCE
from gradcheck_dist.status_events import UNSEEN_UPDATE as UNSEEN_UPDATE
from gradcheck_dist.status_events import UPDATED_BETWEEN as UPDATED_BETWEEN
from gradcheck_dist.status_events import UPDATED_INSIDE as UPDATED_INSIDE
from gradcheck_dist.status_events import ProbeError as ProbeError
from gradcheck_dist.status_events import ProbeStatus as ProbeStatus
from gradcheck_dist.status_events import RunEnd as RunEnd

SCHEMA_VERSION = 1
"""Raised when an old reader would misread a new trace. Frozen by tests/trace/test_schema.py."""

# What a row of samples shows. The order is the order in time around one event.
LEAF = 0  # a contribution's own gradient, as it arrived at the autograd leaf
BEFORE = 1  # the gradient buffer before the event
AFTER = 2  # the gradient buffer after the event
UNNAMED = "unnamed."  # begins the names of parameters that an optimizer holds and no module has shown

SHARDING = frozenset({"fsdp", "hsdp", "replicate", "fsdp1", "gathered"})
"""`impl` of reductions of a wrapper that keeps a rank's part of the result, and adds it to what is there already."""
DATA_PARALLEL = (SHARDING - {"gathered"}) | {"ddp", "fsdp1_no_shard"}

GATHERED = "gathered"
"""`impl` of the reduction of a parameter whose parts a function of the trainer's own gathers in forward; the probe of
that name tells, as not active, which of these functions it does not follow."""
BY_AUTOGRAD = "redistribute"  # `hook` of a reduction that is the backward of a DTensor's redistribution


class Reduce(Event, tag="reduce"):
    """Gradients were combined over ranks.

    Semantics: out = sum over `group` of (in / pre_divide) [/ len(group) when op is "avg"] [* premul] / post_divide;
    under HSDP (`replicate_group`), and where a communication hook of DDP's reduces over two groups, the sum runs over
    both, and `all_reduced` is False while the replicate axis is left out. `op` "unknown": a user's communication hook
    or an operation whose arithmetic is not known. `root`: the only rank that holds the result; None where all of the
    group do. `dtype`: what it sums in, None where that is the gradients' own. `scheduled`: while a pipeline's schedule
    ran. `channel`: torch's name of a process group that the program made and reduces over by hand.
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
    scheduled: bool = False
    channel: str | None = None

    @property
    def num_ranks(self) -> int:
        """How many ranks it goes over, along both groups."""
        return len(self.group) * (len(self.replicate_group) or 1)


class ScaleGrads(Event, tag="scale_grads"):
    """The accumulated gradients were divided by `divisor` (a pipeline schedule's scale_grads)."""

    divisor: float
    params: int
    stage: Index | None = None
    accumulation_step: Index = 0


SCALED, WRITTEN = "scaled", "written"


class GradWrite(Event, tag="grad_write"):
    """A line of the trainer's own multiplied gradients by `factor`, None where that is no one number, in place or by
    putting others there; or did so to a part of them, or wrote something else into them (`op` is WRITTEN).

    It tells a line and is no hand of the ledgers: what happened there is measured by the samples around it. `params`
    None: a tensor that is nobody's gradient, such as a buffer that is copied into some.
    """

    params: int | None = None
    factor: float | None = None
    op: str = SCALED


class ZeroGrad(Event, tag="zero_grad"):
    """The gradient buffers were emptied."""

    params: int
    set_to_none: bool = True


class AmpScale(Event, tag="amp_scale"):
    """A GradScaler multiplied something by its scale, for the first time in this step."""

    scale: float


class AmpUnscale(Event, tag="amp_unscale"):
    """A GradScaler divided the gradients by its loss scale. `kept`: some of them had overflowed in the step before,
    and were there when this one's first pass began. `in_step`: a fused optimizer divides as it reads them, and updates
    nothing where some overflowed; what is sampled and measured at its step is not divided yet."""

    scale: float
    params: int
    found_inf: bool = False
    kept: bool = False
    in_step: bool = False


class Clip(Event, tag="clip"):
    """Gradients were clipped. `coefficient` is what torch's formula gives: min(1, max_norm / (total_norm + 1e-6)).

    `partial`: total_norm is this rank's share of a DTensor norm, not the whole. `norm_dtype`: the type that total_norm
    was computed in, "" where that was not seen. `repeated`: parameters whose gradient was given again, once for each
    further time, of which each counts in the norm, and multiplies. `used_up`: it was given an iterator that had been
    read to its end before, in which nothing was left.
    """

    params: int
    max_norm: float
    norm_type: float
    total_norm: float
    coefficient: float
    partial: bool = False
    norm_dtype: str = ""
    repeated: tuple[int, ...] = ()
    used_up: bool = False


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
    another optimizer's step called this one; that optimizer's `seq`. `numbers` are those that an optimizer which is
    none of torch.optim holds or is given beside these, by which it may divide what it reads. `called` are parameters
    with a gradient whose module was called like that: where no backward pass brought one, the program filled it in.
    `repeated`: parameters that one of the groups of an optimizer of torch.optim has more than once.
    """

    optimizer: str
    params: int
    lr: float | None = None
    hyperparameters: dict[str, float] = {}
    grads_missing: Count | None = None
    groups: tuple[ParamGroup, ...] = ()
    unreached: int | None = None
    inside: int | None = None
    numbers: dict[str, float] = {}
    called: int | None = None
    repeated: int | None = None


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


class BrokenTie(Event, tag="broken_tie"):
    """Modules that a program gave one parameter hold several, `params`, which are trained. `in_one_memory`: their
    values lie at one place all the same. `site`, where it is known, is the line below which torch gave one of them
    another."""

    params: int
    in_one_memory: bool = False


class LeftUnreduced(Event, tag="left_unreduced"):
    """FSDP2 still holds gradients of `params` that no pass of an earlier step reduced, though an optimizer has stepped
    since. `over_shards`: they are summed over the ranks of a replica, and wait for the sum over replicas."""

    params: int
    over_shards: bool = False


class StaleParameters(Event, tag="stale_parameters"):
    """A forward pass computed with old values of `params`. FSDP had gathered them before an optimizer stepped:
    `num_changed` of this rank's elements are others by now (0: none). Or autograd made `node` (names of nodes, with a
    comma in between) of them before; `in_autocast`: a context of torch.autocast is open. Or an optimizer steps copies
    (`of_copies`), or none of this rank steps them (`unmoved`), and they are as they were when they were first seen."""

    params: int
    num_changed: int | None = None
    node: str | None = None
    in_autocast: bool = False
    of_copies: bool = False
    unmoved: bool = False


class ReplacedParameters(Event, tag="replaced_parameters"):
    """`params` are trained, and no optimizer has them: they took the place of what one was made with, at `site`."""

    params: int


class Metric(Event, tag="metric"):
    """A number that the user logged (TensorBoard scalar)."""

    name: str
    value: float


class StepEnd(Event, tag="step_end"):
    """A step was recorded whole. `probe_s` is the time spent inside probes. `num_events` (up to and with this one, but
    for Replica), `num_rows` of samples and `num_norms` records are what was recorded of it, `num_passes` are the
    outermost backward passes that began in it, `num_before` the optimizer steps before this rank's first loss; None:
    nobody counted."""

    duration_s: float
    probe_s: float
    num_events: Count | None = None
    num_rows: Count | None = None
    num_norms: Count | None = None
    num_passes: Count | None = None
    num_before: Count | None = None


class Unrecorded(Event, tag="unrecorded"):
    """`num_steps` steps, not recorded, in each of which `num_passes` outermost backward passes began; the first of them
    is `first_step`. `step` and `seq` say when this was told."""

    num_passes: Count
    first_step: Count
    num_steps: Count


class Replica(Event, tag="replica"):
    """A checksum of some of a rank's parameters, equal on ranks that hold the same values: when the first backward
    pass of a step began, or (`after`) when an optimizer had stepped. `num_steps_later` counts optimizer steps behind
    the last recorded one; there only changes that no optimizer made are noted. `exchanged`, where values changed by no
    optimizer: whether collectives moved so much since the change before that other ranks' values may be in them.
    `values` are float32 bytes: `counts[i]` numbers of each parameter `params[i]`, as the last optimizer that was looked
    at had left them, and behind all of these as many as the step begins with; none where nothing was left yet.
    """

    fingerprint: int
    after: bool = False
    num_steps_later: Count = 0
    exchanged: bool | None = None
    params: tuple[int, ...] = ()
    counts: tuple[Length, ...] = ()
    values: bytes = b""


class ParamUpdate(Event, tag="param_update"):
    """What an optimizer's step made of parameters whose gradients nobody was seen to reduce in the step, beside others
    that were: float32 bytes, `counts[i]` values of what this rank holds of each parameter `params[i]`, at positions
    that are equal for equal numbers of elements, as the optimizer's step began, and as many as it was over."""

    params: tuple[int, ...]
    counts: tuple[Length, ...]
    values: bytes


OWN_OPTIMIZER = "an own optimizer"  # stands for the name of one that is none of torch.optim


AnyEvent = (
    Loss
    | LossGradient
    | Backward
    | StageGradient
    | Exchange
    | RootValue
    | AttentionBackward
    | LossBackward
    | HeadBackward
    | HandedOn
    | AddedByFunction
    | Tokens
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
    | BrokenTie
    | LeftUnreduced
    | ReplacedParameters
    | StaleParameters
    | Metric
    | StepEnd
    | Replica
    | ParamUpdate
    | ProbeStatus
    | ProbeError
    | RunEnd
    | Unrecorded
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
