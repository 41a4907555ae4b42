"""A training configuration is right, or refused with a message that says what to do."""

import re
from typing import Any

import pytest

from gradcheck_dist.axes import Axes
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.faults import FAULTS, apply_faults, fault_names


def test_a_configuration_survives_the_way_through_a_dictionary() -> None:
    config = TrainConfig(axes=Axes(dp_shard=2, pp=2), accum=3, microbatches=2, faults=("ddp-averages",), max_norm=None)
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_degrees_may_stand_at_the_top_level() -> None:
    assert TrainConfig.from_dict({"dp_replicate": 2}).axes == Axes(dp_replicate=2)


def test_numbers_that_yaml_takes_for_text_are_read() -> None:
    assert TrainConfig.from_dict({"lr": "1e-3", "max_norm": 2}) == TrainConfig(lr=1e-3, max_norm=2.0)


def test_the_sequences_of_a_step_are_those_of_all_ranks_and_microbatches() -> None:
    assert TrainConfig(axes=Axes(dp_shard=2, pp=2), accum=3, microbatches=2, batch_size=4).sequences_per_step == 48


@pytest.mark.parametrize(
    ("values", "code", "words"),
    [
        ({"acum": 3}, "E202", "Did you mean: accum"),
        ({"axes": {"dp_repl": 2}}, "E202", "Did you mean: dp_replicate"),
        ({"axes": 2}, "E201", "mapping of degrees"),
        ({"accum": "three"}, "E203", "accum is 'three'; legal is a whole number"),
        ({"scale_grads": 1, "pp": 2, "microbatches": 2}, "E203", "scale_grads is 1; legal is true or false"),
        ({"lr": "fast"}, "E203", "lr is 'fast'; legal is a number"),
        ({"max_norm": "big"}, "E203", "legal is a number or null"),
        ({"faults": 3}, "E203", "legal is a list of names"),
        ({"lr": "inf"}, "E205", "finite numbers above 0"),
        ({"seed": -1}, "E205", "from 0 to"),
        ({"aux_loss_weight": "nan"}, "E205", "finite numbers from 0 up"),
        ({"stages_per_rank": 0, "pp": 2, "microbatches": 2}, "E210", "legal values: 1"),
        ({"stages_per_rank": 2}, "E210", "the model is one stage"),
        ({"pp": 2, "schedule": "interleaved1f1b", "microbatches": 3}, "E210", "a multiple of 2. Legal values: 2, 4, 6"),
        ({"deterministic": "yes"}, "E204", "Legal values: off, on, warn"),
        ({"accum": 0}, "E205", "accum is 0; legal values are integers from 1"),
        ({"lr": -1.0}, "E205", "above 0"),
        ({"max_norm": 0.0}, "E205", "null to switch clipping off"),
        ({"dtype": "float64"}, "E204", "Legal values: bfloat16, float32"),
        ({"schedule": "zbw", "pp": 2}, "E204", "Did you mean: zbv.*Legal values: 1f1b, dualpipev, gpipe"),
        ({"gradient_reduction": "mean"}, "E204", "average, sum"),
        ({"faults": ["ddp-average"]}, "E206", "Did you mean: ddp-averages"),
        ({"dim": 62}, "E207", "multiple of 8"),
        ({"n_kv_heads": 3}, "E207", r"\[1, 2, 4\]"),
        ({"vocab_size": 256}, "E207", "from 259 up"),
        ({"dropout": 1.0}, "E205", "from 0 to below 1"),
        ({"num_experts": 2, "top_k": 3}, "E207", "top_k within the experts"),
        ({"mixed_precision": "float16", "dtype": "bfloat16"}, "E213", "Set dtype=float32"),
        ({"reshard_after_forward": "never"}, "E213", "nothing is sharded"),
        ({"sequence_parallel": True}, "E214", "tp=2 and up"),
        ({"tp": 4}, "E214", r"n_kv_heads=2.*\[1, 2\]"),
        ({"tp": 2, "loss_parallel": True}, "E214", "Set vocab_size=260"),
        ({"tp": 2, "sequence_parallel": True, "seq_len": 33}, "E214", "multiple of 2"),
        ({"float8": True, "dim": 40}, "E207", "multiples of 16"),
        ({"resume": "a", "seed_checkpoint": "b"}, "E205", "Set one of them to null"),
        ({"contrastive_loss_weight": 0.1, "cp": 2}, "E213", "Set cp, tp and pp to 1"),
        ({"dp_shard": 2, "sharding": "fsdp1"}, "E213", "gradient_reduction=average"),
        ({"compile": "fast"}, "E204", "aot_eager, inductor, none"),
        ({"cp": 3}, "E215", "multiple of 3"),
        ({"dp_shard": 2, "ep": 2}, "E216", "no experts to spread"),
        ({"dp_shard": 2, "ep": 2, "num_experts": 3}, "E216", r"\[1, 3\]"),
        ({"dp_shard": 6, "ep": 2, "num_experts": 4}, "E216", "must divide"),
        ({"tp": 2, "dp_shard": 4, "ep": 2, "num_experts": 4, "ffn_dim": 6}, "E216", "must divide"),
        ({"num_mtp_heads": 128}, "E207", "0 to seq_len - 1 = 127"),
        ({"dp_shard": 2, "ep": 4, "num_experts": 4}, "E102", r"\[1, 2\]"),
        (
            {"dp_replicate": 2, "pp": 2, "microbatches": 4, "schedule": "zbv"},
            "E217",
            "gpipe, 1f1b, interleaved1f1b, loopedbfs",
        ),
        (
            {"dp_shard": 2, "pp": 2, "microbatches": 4, "schedule": "zbv", "reshard_after_forward": "always"},
            "E217",
            "reshard_after_forward=never",
        ),
        ({"pp": 2, "microbatches": 3, "schedule": "interleaved1f1b"}, "E210", "multiple of 2"),
        ({"pp": 2, "microbatches": 2, "schedule": "zbv"}, "E210", "4 and up"),
        ({"pp": 2, "microbatches": 4, "schedule": "zbv", "stages_per_rank": 1}, "E210", "legal values: 2"),
        ({"pp": 2, "microbatches": 2, "stages_per_rank": 2}, "E210", "legal values: 1"),
        ({"pp": 4, "microbatches": 4, "schedule": "loopedbfs"}, "E209", "8 stages.*1 to 2"),
        ({"pp": 5, "microbatches": 5}, "E209", "n_layers=4.*1 to 4"),
        ({"microbatches": 2, "accum": 3}, "E210", "Set microbatches=1 and accum=6"),
        ({"pp": 4, "microbatches": 2}, "E210", "4 and up"),
        ({"scale_grads": True}, "E210", "without a pipeline"),
        ({"pp": 0}, "E101", "degree of axis pp is 0"),
    ],
)
def test_an_illegal_configuration_is_refused_by_name(values: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(GradcheckError, match=re.compile(words, re.DOTALL)) as caught:
        TrainConfig.from_dict(values)
    assert caught.value.code == code


def test_degrees_that_do_not_multiply_to_the_world_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradcheck_dist.trainer.loop import Trainer

    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(GradcheckError, match="multiply to 2, but the world size is 3"):
        Trainer(TrainConfig(axes=Axes(dp_replicate=2)))


def test_every_fault_replaces_one_function_and_can_be_taken_out_again() -> None:
    import importlib

    for name in fault_names():
        module_name, function = FAULTS[name].target.split(":")
        module = importlib.import_module(module_name)
        healthy = getattr(module, function)
        remove = apply_faults([name])
        assert getattr(module, function) is FAULTS[name].replacement
        remove()
        assert getattr(module, function) is healthy


def test_an_unknown_fault_changes_nothing() -> None:
    from gradcheck_dist.trainer import parallelize

    before = parallelize.combine_gradients
    with pytest.raises(GradcheckError, match="Did you mean: rank-means"):
        apply_faults(["ddp-averages", "rank-mean"])
    assert parallelize.combine_gradients is before
