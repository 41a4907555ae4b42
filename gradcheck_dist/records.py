"""The tables of a trace: what events refer to, and the records that have no place in time. Imports no torch.

`events.py` beside this says how records are encoded, and gives these names too.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Index = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
Degree = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Length = Annotated[int, msgspec.Meta(ge=0, le=1 << 26)]
"""What a number may be is checked as a frame is read: one that no training can have had is named as damage."""


class Site(msgspec.Struct, array_like=True, frozen=True):
    """A place in the source: the innermost frame that is neither torch nor a probe.

    `called_from` is "file:line" of the innermost frame outside of installed packages, where that is another one: the
    user's own line that led into a library (accelerate, Lightning, transformers).
    """

    file: str
    line: int
    function: str
    called_from: str | None = None

    @property
    def short(self) -> str:
        """The file's name and the line, "train.py:12"."""
        return f"{self.file.rpartition('/')[2]}:{self.line}"


class LossNumber(msgspec.Struct, array_like=True, frozen=True):
    """A number that a line of the program multiplies a loss by, and how: "/ world_size" is written there.

    `assigned` is what the one assignment to that name in the file gives it, "" where it is no name, or there is none or
    several.
    """

    factor: float
    written: str
    assigned: str
    site: Site


class Record(msgspec.Struct, tag_field="kind", omit_defaults=True, kw_only=True):
    """Base of all records. Records that are no events (tables, samples) have no place in time."""


class Param(Record, tag="param"):
    """A parameter, once per rank. `name` is the fully qualified name without wrapper prefixes.

    `shape` is the global shape (of the whole parameter, whatever part of it this rank holds). `stage` is the
    pipeline stage that owns it. Samples are taken at `num_positions` fixed positions of the flattened global
    parameter; `positions` of a Plan index into them. `fingerprint` is a checksum of the values at these positions when
    the parameter was first seen: two ranks' plain tensors of one name and unequal values are not copies of one
    parameter (experts, hand-sharded layers). `sampled_every`: it has its turn in one of so many recorded steps.
    `start` is such a checksum of whatever part this rank holds, None where that is empty or all one number;
    `looked_up`: it is the weight of an embedding. `partitioned`: whether its module says that each tensor-parallel rank
    holds a part of its own (Megatron's `tensor_model_parallel`), None where it says nothing. `expert`: its module says
    that it is not all-reduced with the other parameters (`allreduce` False: Megatron Core, DeepSpeed).
    """

    id: int
    name: str
    shape: tuple[Count, ...]
    dtype: str
    num_positions: Length
    stage: Index | None = None
    placements: str = ""
    wrapper: int | None = None
    requires_grad: bool = True
    fingerprint: int | None = None
    sampled_every: Degree = 1
    start: int | None = None
    looked_up: bool = False
    partitioned: bool | None = None
    expert: bool = False


class ParamValues(Record, tag="param_values"):
    """Some values of parameters, in the step in which these were first seen: when a backward pass began, or (`after`)
    when an optimizer had stepped. They tell copies of one parameter from tensors that only share a name and a shape.

    `values` is float32 bytes: `counts[i]` of them of what this rank holds of parameter `params[i]`, at positions that
    are equal for equal numbers of elements.
    """

    params: tuple[int, ...]
    counts: tuple[Length, ...]
    values: bytes
    after: bool = False
    exchanges: tuple[Count, ...] = ()
    exchanged_with: tuple[Rank, ...] = ()


class ParamSet(Record, tag="param_set"):
    """A set of parameter ids that events refer to."""

    id: int
    params: tuple[int, ...]


class Plan(Record, tag="plan"):
    """Which of a parameter's sampled positions a row of samples holds.

    `positions` is int32 bytes indexing into range(num_positions); None means all. `partial`: the values are a summand
    of the gradient, which is their sum over the ranks `partial_over` of a mesh, divided by `partial_mean` (DTensor
    Partial). `offset` and `extent` are the box of the global parameter that this rank holds in such a layout, or of one
    dimension, in the flattened parameter; None where it is not known.
    """

    id: int
    param: int
    num_values: Length
    positions: bytes | None = None
    partial: bool = False
    partial_over: tuple[Rank, ...] = ()
    partial_mean: Length = 1
    offset: tuple[Count, ...] | None = None
    extent: tuple[Count, ...] | None = None


class Wrapper(Record, tag="wrapper"):
    """A data-parallel wrapper around a module, once: which group it reduces over and where the user made it."""

    id: int
    impl: str  # "ddp" | "fsdp" | "hsdp" | "replicate"
    name: str
    group: tuple[Rank, ...]
    shard_group: tuple[Rank, ...] = ()
    replicate_group: tuple[Rank, ...] = ()
    site: Site | None = None


class NamedGroup(Record, tag="named_group"):
    """A process group of two ranks or more that this rank is in, once, as whoever made it described it (`group_desc`; a
    DeviceMesh writes "mesh_" and its dimension's name)."""

    name: str
    group: tuple[Rank, ...]


class Samples(Record, tag="samples"):
    """Rows of sampled gradient values.

    `rows` is int32 bytes of shape (n, 4): event seq, role, parameter id, plan id. `values` holds the rows one after
    the other in `dtype` ("float32", "float64", "float16" or "bfloat16"), each as long as its plan says.
    """

    step: Step
    rows: bytes
    dtype: str
    values: bytes

    @property
    def num_rows(self) -> int:
        return len(self.rows) // 16


class Norms(Record, tag="norms"):
    """Euclidean norms of whole gradients as they were just before the event `seq`, a row a parameter.

    `rows` is int32 bytes of shape (n, 3): parameter id, plan id (-1: a layout that is not known), number of elements
    that are NaN or infinite (these are left out of the norm). `values` holds the norm of what this rank holds of each
    gradient as float64.
    """

    step: Step
    seq: int
    rows: bytes
    values: bytes


class ParamGroup(msgspec.Struct, array_like=True, frozen=True):
    """One of an optimizer's parameter groups, with its own hyperparameters."""

    params: int
    lr: float | None
    hyperparameters: dict[str, float]


class Header(Record, tag="header"):
    """First record of every trace file. `columns`: steps without samples stand in StepColumns. `agent_pid`: the process
    of torchrun that started this one, None without torchrun. `same_data`: sets of ranks that evaluate the same tokens,
    where the user declared them."""

    schema_version: int
    tool_version: str
    rank: Rank
    world_size: Degree
    pid: int
    started_unix_s: float
    torch_version: str = ""
    device_type: str = "cpu"
    command: tuple[str, ...] = ()
    objective: str | None = None
    axes: dict[str, Degree] | None = None
    sample_size: int = 0
    columns: bool = False
    agent_pid: int | None = None
    same_data: tuple[tuple[int, ...], ...] | None = None


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
    first_step: Step
    num_steps: Index
    first_seqs: bytes
    numbers: memoryview
