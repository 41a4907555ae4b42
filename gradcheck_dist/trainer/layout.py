"""Which layouts run, and why the others are refused. Imports no torch.

Facts about torch in these messages were measured on torch 2.13 with gloo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from gradcheck_dist.axes import divisors
from gradcheck_dist.errors import GradcheckError

if TYPE_CHECKING:
    from gradcheck_dist.trainer.config import TrainConfig

SINGLE_STAGE_SCHEDULES = ("gpipe", "1f1b")
V_SCHEDULES = ("zbv", "dualpipev")
"""A rank holds stage r and the stage opposite: 2 * pp - 1 - r."""
WHOLE_BACKWARD_SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b", "loopedbfs")
SPLIT_BACKWARD_SCHEDULES = ("interleavedzerobubble", "zbv", "dualpipev")
"""Backward for inputs and for weights run apart, through torch.autograd.grad."""


def stages_per_rank(config: TrainConfig) -> int:
    """Pipeline stages that one rank holds."""
    if config.axes.pp == 1:
        return 1
    if config.stages_per_rank is not None:
        return config.stages_per_rank
    return 1 if config.schedule in SINGLE_STAGE_SCHEDULES else 2


def stages_of_rank(config: TrainConfig, pipeline_rank: int) -> list[int]:
    """Indices of the stages that a rank of the pipeline holds, first to last."""
    if config.schedule in V_SCHEDULES and config.axes.pp > 1:
        return [pipeline_rank, config.num_stages - 1 - pipeline_rank]
    return list(range(pipeline_rank, config.num_stages, config.axes.pp))


def is_sharded(config: TrainConfig) -> bool:
    """Whether FSDP2 shards the model, alone or inside of replicas."""
    return config.axes.dp_shard * config.axes.cp > 1


def uses_fsdp1(config: TrainConfig) -> bool:
    """Whether FullyShardedDataParallel shards the model."""
    return is_sharded(config) and config.sharding == "fsdp1"


def uses_fsdp(config: TrainConfig) -> bool:
    """Whether FSDP2's machinery combines gradients: sharded, or replicated by the composable `replicate`."""
    return (is_sharded(config) and config.sharding == "fsdp2") or (
        config.axes.dp_replicate > 1 and config.replication == "composable"
    )


def uses_ddp(config: TrainConfig) -> bool:
    """Whether DistributedDataParallel combines gradients."""
    return config.axes.dp_replicate > 1 and not uses_fsdp(config) and not uses_fsdp1(config)


def check_layout(config: TrainConfig) -> None:
    """Refuse what cannot run, or would run wrong.

    Raises:
        GradcheckError: with the value, the legal values and the next step.
    """
    _check_tensor_parallel(config)
    _check_context_parallel(config)
    _check_experts(config)
    if config.contrastive_loss_weight and config.axes.world_size > config.axes.data_parallel_degree:
        _refuse(
            f"contrastive_loss_weight={config.contrastive_loss_weight} with cp={config.axes.cp}, tp={config.axes.tp}, "
            f"pp={config.axes.pp}: features are gathered over data-parallel ranks, each with whole sequences. Set cp, "
            "tp and pp to 1.",
            "E213",
        )
    if config.sharding == "fsdp1" and (
        config.axes.world_size != config.axes.dp_shard
        or config.gradient_reduction != "average"
        or config.tied_embeddings
    ):
        _refuse(
            f"sharding=fsdp1 with a world size of {config.axes.world_size}, dp_shard={config.axes.dp_shard}, "
            f"gradient_reduction={config.gradient_reduction}, tied_embeddings={config.tied_embeddings}: this trainer "
            "runs it alone, to be watched. Set dp_shard to the number of ranks, gradient_reduction=average and "
            "tied_embeddings=false, or sharding=fsdp2.",
            "E213",
        )
    _check_pipeline(config)
    if config.axes.pp > 1:
        _check_pipeline_with_others(config)
    if config.mixed_precision != "none" and config.dtype != "float32":
        _refuse(
            f"mixed_precision={config.mixed_precision} with dtype={config.dtype}: mixed precision keeps float32 "
            "parameters. Set dtype=float32, or mixed_precision=none.",
            "E213",
        )
    if config.reshard_after_forward != "default" and not uses_fsdp(config):
        _refuse(
            f"reshard_after_forward={config.reshard_after_forward} without FSDP2: nothing is sharded. Set dp_shard, "
            "cp or replication=composable, or reshard_after_forward=default.",
            "E213",
        )


def _refuse(message: str, code: str) -> NoReturn:
    raise GradcheckError(message, code=code)


def _check_tensor_parallel(config: TrainConfig) -> None:
    tp = config.axes.tp
    for name in ("sequence_parallel", "loss_parallel"):
        if getattr(config, name) and tp == 1:
            _refuse(f"{name}=true with tp=1: there is nothing to split over. Set {name}=false, or tp=2 and up.", "E214")
    if tp == 1:
        return
    for name in ("n_kv_heads", "n_heads", "ffn_dim"):
        if getattr(config, name) % tp:
            _refuse(
                f"tp={tp} does not divide {name}={getattr(config, name)}. Legal values of tp here: "
                f"{divisors(getattr(config, name))}; or change {name}.",
                "E214",
            )
    if config.loss_parallel and config.vocab_size % tp:
        _refuse(
            f"tp={tp} does not divide vocab_size={config.vocab_size}, as loss_parallel needs. Set vocab_size="
            f"{-(-config.vocab_size // tp) * tp}.",
            "E214",
        )
    if config.sequence_parallel and (config.seq_len // config.axes.cp) % tp:
        _refuse(
            f"tp={tp} does not divide the {config.seq_len // config.axes.cp} tokens of a sequence on one rank "
            f"(seq_len={config.seq_len}, cp={config.axes.cp}), as sequence_parallel needs. Set seq_len to a multiple "
            f"of {tp * config.axes.cp}.",
            "E214",
        )


def _check_context_parallel(config: TrainConfig) -> None:
    if config.seq_len % config.axes.cp:
        _refuse(
            f"cp={config.axes.cp} does not divide seq_len={config.seq_len}. Legal values of cp here: "
            f"{divisors(config.seq_len)}; or set seq_len to a multiple of {config.axes.cp}.",
            "E215",
        )


def _check_experts(config: TrainConfig) -> None:
    axes = config.axes
    if axes.ep > 1 and config.num_experts % axes.ep:
        _refuse(
            f"ep={axes.ep} does not divide num_experts={config.num_experts}. Legal values of ep here: "
            f"{divisors(config.num_experts)}.",
            "E216",
        )
    if axes.ep > 1 and config.num_experts == 0:
        _refuse(
            f"ep={axes.ep} with num_experts=0: a dense model has no experts to spread. Set ep=1, or num_experts to a "
            f"multiple of {axes.ep}.",
            "E216",
        )
    sharded = axes.dp_shard * axes.cp // axes.ep
    if axes.ep > 1 and (config.ffn_dim % (sharded * axes.tp) or config.dim % sharded):
        _refuse(
            f"each expert is sharded over dp_shard*cp/ep={sharded} ranks along dim={config.dim} and ffn_dim="
            f"{config.ffn_dim}, and split over tp={axes.tp} along ffn_dim; these must divide them. Change one of them.",
            "E216",
        )


def _check_pipeline(config: TrainConfig) -> None:
    pp, stages = config.axes.pp, config.num_stages
    if pp == 1:
        if config.microbatches > 1:
            _refuse(
                f"microbatches={config.microbatches} without a pipeline (pp=1): only a pipeline schedule splits a "
                f"batch into microbatches. Set microbatches=1 and accum={config.contributions}, or set pp.",
                "E210",
            )
        if config.scale_grads:
            _refuse(
                "scale_grads=true without a pipeline (pp=1): there is no schedule to scale gradients. "
                "Set scale_grads=false, or set pp.",
                "E210",
            )
        if config.stages_per_rank not in (None, 1):
            _refuse(
                f"stages_per_rank={config.stages_per_rank} without a pipeline (pp=1): the model is one stage. Set "
                "stages_per_rank=null, or set pp.",
                "E210",
            )
        return
    per_rank = stages_per_rank(config)
    legal = "1" if config.schedule in SINGLE_STAGE_SCHEDULES else "2" if config.schedule in V_SCHEDULES else "2 and up"
    if (per_rank == 1) != (legal == "1") or (legal == "2" and per_rank != 2) or per_rank < 1:
        _refuse(
            f"stages_per_rank={per_rank} with schedule={config.schedule}; legal values: {legal}. Or set "
            "stages_per_rank=null, which takes what the schedule needs.",
            "E210",
        )
    if stages > config.n_layers:
        _refuse(
            f"pp={pp} with {per_rank} stages a rank makes {stages} stages, which need at least one layer each, but "
            f"n_layers={config.n_layers}. Legal values of pp here: 1 to {config.n_layers // per_rank}; or raise "
            "n_layers.",
            "E209",
        )
    least = {"gpipe": 1, "loopedbfs": 1, "zbv": 2 * pp, "dualpipev": 2 * pp}.get(config.schedule, pp)
    step = pp if config.schedule in ("interleaved1f1b", "interleavedzerobubble") else 1
    if config.microbatches < least or config.microbatches % step:
        needs = f"at least {least}" if step == 1 else f"a multiple of {step}"
        wanted = f"{least} and up" if step == 1 else f"{step}, {2 * step}, {3 * step} and so on"
        _refuse(
            f"microbatches={config.microbatches} with pp={pp}: schedule {config.schedule} needs {needs}. Legal values: "
            f"{wanted}; or set schedule=gpipe.",
            "E210",
        )


def _check_pipeline_with_others(config: TrainConfig) -> None:
    split = config.schedule in SPLIT_BACKWARD_SCHEDULES
    if uses_ddp(config) and split:
        _refuse(
            f"dp_replicate={config.axes.dp_replicate} with schedule={config.schedule}: torch is wrong there. It "
            "computes weight gradients apart, without the nodes at which DistributedDataParallel waits, and most "
            "stages are never reduced, without an error (pytorch#144530; gradcheck scenario zero-bubble-in-ddp shows "
            f"it). Legal schedules: {', '.join(WHOLE_BACKWARD_SCHEDULES)}; or set replication=composable.",
            "E217",
        )
    if split and uses_fsdp(config) and config.reshard_after_forward == "always":
        _refuse(
            f"reshard_after_forward=always with schedule={config.schedule}: FSDP2 frees weights that the schedule's "
            "separate weight gradient still needs, and some gradients are wrong or missing without an error. Set "
            "reshard_after_forward=never.",
            "E217",
        )
