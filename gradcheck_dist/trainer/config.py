"""What a training job is, checked before any process starts. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gradcheck_dist.axes import AXIS_NAMES, Axes
from gradcheck_dist.errors import GradcheckError, unknown_value
from gradcheck_dist.trainer.documents import VOCAB_SIZE
from gradcheck_dist.trainer.faults import fault_names
from gradcheck_dist.trainer.layout import check_layout, stages_per_rank

CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("float32", "bfloat16"),
    "mixed_precision": ("none", "bfloat16", "float16"),
    "optimizer": ("adamw", "sgd"),
    "schedule": ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbv", "dualpipev"),
    "replication": ("ddp", "composable"),
    "sharding": ("fsdp2", "fsdp1"),
    "reshard_after_forward": ("default", "always", "never"),
    "activation_checkpointing": ("none", "full", "selective"),
    "checkpoint_determinism": ("default", "none"),
    "compile": ("none", "aot_eager", "inductor"),
    "deterministic": ("off", "warn", "on"),
    "gradient_reduction": ("sum", "average"),
    "device": ("auto", "cpu", "cuda"),
}
"""Legal values of every field that takes one name out of a closed set."""
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list of names",
    types.NoneType: "null",
}


@dataclass(frozen=True)
class TrainConfig:
    """One training job. Every rank gets the same object.

    A step trains on `sequences_per_step` sequences: each of the data-parallel ranks runs `accum` accumulation
    steps of `microbatches` microbatches of `batch_size` sequences.

    Attributes:
        axes: degrees of the mesh axes; their product is the number of ranks.
        accum: accumulation steps K of one optimizer step.
        microbatches: pipeline microbatches M of one schedule step; 1 without a pipeline.
        batch_size: sequences of one microbatch on one data-parallel rank.
        seq_len: tokens that one sequence predicts; shorter documents are padded, longer ones cut.
        steps: optimizer steps.
        seed: of the initial weights and of the order of the documents.
        dtype: of parameters, activations and gradients; the loss is always taken in float32.
        mixed_precision: what matrices are multiplied in beside float32 parameters and gradients: FSDP2's policy where
            the model is sharded, autocast elsewhere. "float16" scales the loss with a GradScaler.
        lr: learning rate, constant.
        max_norm: global gradient norm to clip to; None leaves gradients alone.
        schedule: pipeline schedule.
        stages_per_rank: pipeline stages on one rank; None takes what the schedule needs, 1 or 2.
        scale_grads: whether the pipeline schedule divides gradients by M; the loss then leaves that division to it.
            Right for accum=1 only: the schedule divides everything accumulated so far, once per accumulation step.
        gradient_reduction: "sum" adds the data-parallel ranks' gradients and the loss carries the whole 1/N;
            "average" keeps the wrappers' default and the loss carries R/N, R being dp_replicate * dp_shard * cp.
        replication: what keeps replicas equal where nothing is sharded (dp_shard * cp = 1): DistributedDataParallel, or
            the composable `replicate` of torch, which alone goes together with tp.
        sharding: "fsdp2", or "fsdp1": FullyShardedDataParallel, alone on dp_shard.
        reshard_after_forward: FSDP2's; "default" keeps parameters whole between forward and backward of a pipeline.
        sequence_parallel: also split norms and residuals along the sequence over tp.
        loss_parallel: leave the logits split along the vocabulary over tp.
        activation_checkpointing: recompute all blocks ("full") or every second one ("selective") in backward.
        preserve_rng_state: recompute with the random numbers of the forward pass.
        checkpoint_determinism: "default" compares shapes, types and devices of what is recomputed with the forward's.
        checkpoint_debug: have torch tell, when they differ, which operations ran in both.
        compile: torch.compile each block with this back end.
        float8: linear layers of the blocks multiply in float8, by torchao; emulated where the device has no such unit.
        deterministic: torch.use_deterministic_algorithms: "on" raises where there is none, "warn" says so.
        dropout: probability on the output of attention and feed-forward.
        tied_embeddings: one matrix for embedding and output head.
        num_mtp_heads: further heads, each a block of its own before the shared output matrix, that predict the token
            after the next one, the one after that, and so on.
        mtp_loss_weight: of all of them together; each is a mean over the tokens that it predicts.
        num_experts: experts of a mixture-of-experts layer in the place of each feed-forward; 0 for a dense model.
        top_k: experts that a token goes to.
        aux_loss_weight: of the load-balance loss, a mean over positions and summed over layers.
        z_loss_weight: of the router's z-loss, likewise.
        contrastive_loss_weight: of a loss over the features of all ranks, a mean over sequences; 0 takes none.
        balanced_routing: choose experts by position, so that all are used equally.
        vocab_size: at least documents.VOCAB_SIZE, the 256 bytes and the special tokens.
        data: text file, JSONL file or folder of them; None takes the documents of the Python installation.
        tensorboard: folder for TensorBoard scalars; None writes none.
        wandb_project: Weights & Biases project that gets the same scalars; None writes none.
        seed_checkpoint: torch.distributed.checkpoint folder of the first weights; None makes them from seed.
        save_checkpoint: folder that gets the last weights, the optimizer's state and the number of steps; None saves
            none.
        resume: such a folder, of whatever layout: training goes on behind its last step, up to `steps`.
        device: "auto" takes CUDA where every rank of this machine has a GPU of its own, else the CPU.
        faults: names out of faults.py, applied in this order.

    Raises:
        GradcheckError: a value is illegal, alone or beside the others. The message names the legal values.
    """

    axes: Axes = field(default_factory=Axes)
    accum: int = 1
    microbatches: int = 1
    batch_size: int = 2
    seq_len: int = 128
    steps: int = 1
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    mixed_precision: Literal["none", "bfloat16", "float16"] = "none"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = 1e-3
    max_norm: float | None = 1.0
    schedule: Literal["gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbv", "dualpipev"] = (
        "1f1b"
    )
    stages_per_rank: int | None = None
    scale_grads: bool = False
    gradient_reduction: Literal["sum", "average"] = "sum"
    replication: Literal["ddp", "composable"] = "ddp"
    sharding: Literal["fsdp2", "fsdp1"] = "fsdp2"
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    sequence_parallel: bool = False
    loss_parallel: bool = False
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    preserve_rng_state: bool = True
    checkpoint_determinism: Literal["default", "none"] = "default"
    checkpoint_debug: bool = False
    compile: Literal["none", "aot_eager", "inductor"] = "none"
    float8: bool = False
    deterministic: Literal["off", "warn", "on"] = "off"
    dropout: float = 0.0
    tied_embeddings: bool = False
    num_mtp_heads: int = 0
    mtp_loss_weight: float = 0.1
    num_experts: int = 0
    top_k: int = 2
    aux_loss_weight: float = 0.01
    z_loss_weight: float = 0.001
    contrastive_loss_weight: float = 0.0
    balanced_routing: bool = False
    dim: int = 64
    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 2
    ffn_dim: int = 128
    vocab_size: int = VOCAB_SIZE
    data: str | None = None
    tensorboard: str | None = None
    wandb_project: str | None = None
    seed_checkpoint: str | None = None
    save_checkpoint: str | None = None
    resume: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    faults: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_values(self)
        _check_model(self)
        check_layout(self)

    @property
    def contributions(self) -> int:
        """Loss evaluations of one data-parallel rank in one step: K * M."""
        return self.accum * self.microbatches

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline; 1 without one."""
        return self.axes.pp * stages_per_rank(self)

    @property
    def gradient_ranks(self) -> int:
        """Ranks R whose gradients of a parameter belong together: dp_replicate * dp_shard * cp."""
        return self.axes.data_parallel_degree * self.axes.cp

    @property
    def sequences_per_step(self) -> int:
        """Sequences of all ranks in one optimizer step."""
        return self.axes.data_parallel_degree * self.contributions * self.batch_size

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> TrainConfig:
        """The configuration that a YAML file or key=value arguments describe.

        Degrees stand under `axes` or, for short, at the top level (`dp_replicate: 2`).

        Raises:
            GradcheckError: an unknown key (the nearest names are given), or a value of the wrong type or out of range.
        """
        values = dict(mapping)
        axes = values.pop("axes", {})
        if not isinstance(axes, Mapping):
            raise GradcheckError(
                f"axes is {axes!r}; legal is a mapping of degrees, such as axes: {{dp_replicate: 2}}.", code="E201"
            )
        degrees = dict(axes) | {name: values.pop(name) for name in AXIS_NAMES if name in values}
        for key in degrees:
            if key not in AXIS_NAMES:
                raise unknown_value("axis", key, AXIS_NAMES, code="E202")
        fields = typing.get_type_hints(cls)
        for key in values:
            if key not in fields:
                raise unknown_value("key of the training configuration", key, [*fields, *AXIS_NAMES], code="E202")
        typed = {key: _convert(key, value, fields[key]) for key, value in values.items()}
        return cls(axes=Axes(**degrees), **typed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON or YAML; `from_dict` gives the same configuration back."""
        return dataclasses.asdict(self) | {"faults": list(self.faults)}


def _convert(key: str, value: Any, annotation: Any) -> Any:
    """`value` as the field's type: YAML reads 1e-3 as text and on as true, and has no tuples."""
    accepted = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if typing.get_origin(annotation) is tuple:
        if isinstance(value, str):
            return (value,)
        if isinstance(value, list | tuple):
            return tuple(str(item) for item in value)
    elif typing.get_origin(annotation) is Literal:
        written = {True: "on", False: "off"}.get(value) if isinstance(value, bool) else None
        return written if written in CHOICES.get(key, ()) else value
    elif type(value) in accepted or (value is None and None in accepted):
        return value
    elif float in accepted and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    legal = " or ".join(_WORDS[one] for one in _WORDS if one in (*accepted, typing.get_origin(annotation)))
    raise GradcheckError(f"{key} is {value!r}; legal is {legal}.", code="E203")


def _check_values(config: TrainConfig) -> None:
    for name, legal in CHOICES.items():
        if getattr(config, name) not in legal:
            raise unknown_value(name, getattr(config, name), legal, code="E204")
    for name in ("accum", "microbatches", "batch_size", "seq_len", "steps"):
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise GradcheckError(f"{name} is {value!r}; legal values are integers from 1 up.", code="E205")
    if type(config.seed) is not int or not 0 <= config.seed < 2**32:
        raise GradcheckError(f"seed is {config.seed!r}; legal values are integers from 0 to 2^32 - 1.", code="E205")
    if not 0 < config.lr < math.inf:
        raise GradcheckError(f"lr is {config.lr!r}; legal values are finite numbers above 0.", code="E205")
    if not 0 <= config.dropout < 1:
        raise GradcheckError(f"dropout is {config.dropout!r}; legal values are from 0 to below 1.", code="E205")
    for name in ("aux_loss_weight", "z_loss_weight", "mtp_loss_weight", "contrastive_loss_weight"):
        if not 0 <= getattr(config, name) < math.inf:
            raise GradcheckError(
                f"{name} is {getattr(config, name)!r}; legal values are finite numbers from 0 up.", code="E205"
            )
    if config.max_norm is not None and not config.max_norm > 0:
        raise GradcheckError(
            f"max_norm is {config.max_norm!r}; legal values are numbers above 0, or null to switch clipping off.",
            code="E205",
        )
    for name in config.faults:
        if name not in fault_names():
            raise unknown_value("fault", name, fault_names(), code="E206")


def _check_model(config: TrainConfig) -> None:
    for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim"):
        value = getattr(config, name)
        if type(value) is not int or value < 1:
            raise GradcheckError(f"{name} is {value!r}; legal values are integers from 1 up.", code="E205")
    if config.dim % config.n_heads or (config.dim // config.n_heads) % 2:
        raise GradcheckError(
            f"dim={config.dim} over n_heads={config.n_heads} gives {config.dim / config.n_heads:g} numbers a head; "
            f"rotary embedding needs an even whole number. Set dim to a multiple of {2 * config.n_heads}.",
            code="E207",
        )
    if config.n_heads % config.n_kv_heads:
        raise GradcheckError(
            f"n_kv_heads={config.n_kv_heads} does not divide n_heads={config.n_heads}. Legal values here: "
            f"{[n for n in range(1, config.n_heads + 1) if config.n_heads % n == 0]}.",
            code="E207",
        )
    if not 0 <= config.num_mtp_heads < config.seq_len:
        raise GradcheckError(
            f"num_mtp_heads is {config.num_mtp_heads}; legal values here are 0 to seq_len - 1 = {config.seq_len - 1}.",
            code="E207",
        )
    if config.float8 and (config.dim % 16 or config.ffn_dim % 16):
        raise GradcheckError(
            f"float8=true with dim={config.dim} and ffn_dim={config.ffn_dim}: float8 matrix units take multiples of "
            "16. Change them, or set float8=false.",
            code="E207",
        )
    if config.resume is not None and config.seed_checkpoint is not None:
        raise GradcheckError(
            f"resume={config.resume!r} beside seed_checkpoint={config.seed_checkpoint!r}: both say where the weights "
            "come from. Set one of them to null.",
            code="E205",
        )
    if config.num_experts < 0 or (config.num_experts and not 1 <= config.top_k <= config.num_experts):
        raise GradcheckError(
            f"num_experts={config.num_experts} with top_k={config.top_k}: a token goes to 1 to num_experts experts. "
            "Set num_experts=0 for a dense model, or choose top_k within the experts.",
            code="E207",
        )
    if config.vocab_size < VOCAB_SIZE:
        raise GradcheckError(
            f"vocab_size is {config.vocab_size}; legal values are integers from {VOCAB_SIZE} up "
            "(256 bytes and three special tokens).",
            code="E207",
        )
