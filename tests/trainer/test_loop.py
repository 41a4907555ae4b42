"""The trainer trains, logs and repeats itself bit by bit."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradcheck_dist.axes import Axes
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer.__main__ import read_config
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.launch import launch
from gradcheck_dist.trainer.loop import train
from gradcheck_dist.trainer.result import TrainResult

SMALL = {"n_layers": 2, "dim": 32, "ffn_dim": 64, "seq_len": 32}


def run(config: TrainConfig, log_dir: Path | None = None) -> list[TrainResult]:
    if config.axes.world_size == 1 and log_dir is None:
        return [train(config)]
    return launch("gradcheck_dist.trainer.loop:train", (config,), config.axes.world_size, timeout_s=60, log_dir=log_dir)


def test_the_loss_falls() -> None:
    losses = [step.loss for step in train(TrainConfig.from_dict(SMALL | {"steps": 30, "lr": 1e-2})).steps]
    assert losses[-1] < 0.75 * losses[0]


def test_a_repeated_job_is_the_same_bit_by_bit_and_another_seed_is_not() -> None:
    first, again, other = (train(TrainConfig.from_dict(SMALL | {"seed": seed})) for seed in (0, 0, 1))
    assert first.checksum == again.checksum != other.checksum
    assert first.steps[0].grad_norm == again.steps[0].grad_norm


def test_clipping_bounds_the_update_and_reports_the_norm_before() -> None:
    import torch

    from gradcheck_dist.trainer.loop import Trainer

    trainer = Trainer(TrainConfig.from_dict(SMALL | {"optimizer": "sgd", "lr": 1.0, "max_norm": 0.25}))
    before = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    metrics = trainer.train_step(0)
    update = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach() - before
    assert metrics.grad_norm > 1
    assert float(update.norm()) == pytest.approx(0.25, rel=1e-4)


@pytest.mark.slow
def test_clipping_is_the_same_over_pipeline_stages_and_shards_as_in_one_process() -> None:
    common = SMALL | {"optimizer": "sgd", "max_norm": 0.25, "steps": 3, "lr": 1.0}
    layouts = ({"accum": 4}, {"axes": {"dp_shard": 2}, "accum": 2}, {"axes": {"pp": 2}, "microbatches": 4})
    curves = [[step.grad_norm for step in run(TrainConfig.from_dict(common | layout))[0].steps] for layout in layouts]
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[2] == pytest.approx(curves[0], rel=1e-4)


@pytest.mark.slow
def test_tensorboard_reads_what_the_rank_that_owns_the_loss_wrote(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = TrainConfig.from_dict(
        SMALL | {"axes": {"pp": 2}, "microbatches": 2, "steps": 3, "tensorboard": str(tmp_path)}
    )
    results = run(config)
    assert len(list(tmp_path.iterdir())) == 1
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    names = ("grad_norm", "loss", "lr", "peak_memory_bytes", "tokens", "tokens_per_s")
    assert sorted(events.Tags()["scalars"]) == [f"train/{name}" for name in names]
    for name in names:
        written = [(event.step, event.value) for event in events.Scalars(f"train/{name}")]
        assert written == [(step.step, pytest.approx(getattr(step, name), rel=1e-6)) for step in results[1].steps]


@pytest.mark.slow
def test_ranks_of_a_replicated_model_stay_equal() -> None:
    results = run(TrainConfig.from_dict(SMALL | {"axes": {"dp_replicate": 2}, "accum": 2, "steps": 3}))
    assert results[0].checksum == results[1].checksum
    assert [r.steps[-1].loss for r in results] == [results[0].steps[-1].loss] * 2


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dp_replicate": 2}, {"dp_shard": 2}, {"pp": 2}])
def test_bfloat16_trains(axes: dict[str, int]) -> None:
    config = TrainConfig.from_dict(
        SMALL | {"axes": axes, "dtype": "bfloat16", "microbatches": 2 if "pp" in axes else 1, "accum": 2}
    )
    assert 5 < run(config)[0].steps[0].loss < 8


@pytest.mark.slow
def test_bad_data_in_a_rank_is_explained_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(GradcheckError, match=r"does not exist\. Legal are") as caught:
        run(TrainConfig(axes=Axes(dp_replicate=2), data=str(tmp_path / "nothing")))
    assert caught.value.code == "E221"


def test_arguments_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("accum: 2\nlr: 1e-2\naxes: {dp_replicate: 2}\n")
    config = read_config([str(path), "accum=5", "axes.dp_replicate=3", "faults=[rank-means]"])
    assert config == TrainConfig(accum=5, lr=1e-2, axes=Axes(dp_replicate=3), faults=("rank-means",))


def test_arguments_that_make_no_configuration_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("{")
    (tmp_path / "twice.yaml").write_text("accum: 2\naxes:\n  pp: 2\n  dp_shard: 2\n  pp: 4\n")
    for argument, words in (
        ("nothing.yaml", "neither key=value nor a file"),
        (str(tmp_path / "list.yaml"), "holds list"),
        (str(tmp_path / "broken.yaml"), "is not YAML"),
        (str(tmp_path / "twice.yaml"), r"the key 'pp' is given twice: in line 3 and here(.|\n)* line 5"),
        ("lr=2020-13-45", "no value of its type: month must be"),
        ("accum.deep=1", "accum"),
    ):
        with pytest.raises(GradcheckError, match=words):
            read_config([argument])


@pytest.mark.slow
def test_torchrun_runs_it(tmp_path: Path) -> None:
    command = (
        "-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 -m gradcheck_dist.trainer"
    )
    ended = subprocess.run(
        [sys.executable, *command.split(), "axes.dp_replicate=2", "steps=2", "accum=2"],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr
    assert [line.split()[:2] for line in ended.stdout.splitlines()] == [["step", "0"], ["step", "1"]]


def test_a_user_error_on_the_command_line_exits_with_two() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "gradcheck_dist.trainer", "dtype=half"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr.startswith("error E204: unknown dtype 'half'")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"mixed_precision": "float16"},
        {"axes": {"dp_shard": 2}, "accum": 2, "dropout": 0.1},
        {"axes": {"pp": 2}, "microbatches": 4, "schedule": "zbv", "n_layers": 4},
        pytest.param(
            {"axes": {"dp_replicate": 2, "tp": 2}, "sequence_parallel": True, "activation_checkpointing": "full"},
            marks=pytest.mark.library,
        ),
    ],
    ids=str,
)
def test_a_training_that_was_resumed_ends_as_if_it_had_never_stopped(layout: dict[str, Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    values = SMALL | layout
    whole = run(TrainConfig.from_dict(values | {"steps": 3}))
    run(TrainConfig.from_dict(values | {"steps": 2, "save_checkpoint": folder}))
    resumed = run(TrainConfig.from_dict(values | {"steps": 3, "resume": folder}))
    assert [result.checksum for result in resumed] == [result.checksum for result in whole]
    assert [step.step for step in resumed[0].steps] == [2]
    assert resumed[0].steps[0].loss == whole[0].steps[2].loss


@pytest.mark.slow
def test_a_training_is_resumed_on_another_layout(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    values = SMALL | {"n_layers": 4, "batch_size": 1}
    split = values | {"axes": {"dp_replicate": 2, "tp": 2}, "accum": 2}  # plain parts of tensors, whole on disk
    run(TrainConfig.from_dict(split | {"steps": 2, "save_checkpoint": folder}))
    losses = [
        run(TrainConfig.from_dict(other | {"steps": 4, "resume": folder}))[0].steps[-1].loss
        for other in (
            split,
            values | {"axes": {"dp_shard": 2}, "accum": 2},
            values | {"axes": {"pp": 2}, "microbatches": 4, "schedule": "interleaved1f1b"},
        )
    ]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)


def test_what_cannot_be_resumed_is_named(tmp_path: Path) -> None:
    with pytest.raises(GradcheckError, match=r"resume .* holds no file \.metadata") as caught:
        train(TrainConfig.from_dict(SMALL | {"resume": str(tmp_path)}))
    assert caught.value.code == "E218"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 1}, r"nothing is left to do\. Set steps to 2 and up"),
        ({"steps": 2, "optimizer": "sgd"}, r"Missing key in checkpoint state_dict: optimizer\S+\. Sizes and optimizer"),
        ({"steps": 2, "ffn_dim": 32}, "Size mismatch .* Sizes and optimizer"),
    ],
    ids=str,
)
def test_a_state_of_another_training_is_refused(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    train(TrainConfig.from_dict(SMALL | {"save_checkpoint": folder}))
    with pytest.raises(GradcheckError, match=words) as caught:
        train(TrainConfig.from_dict(SMALL | {"resume": folder} | values))
    assert caught.value.code == "E218"
    assert "Traceback" not in str(caught.value)


def test_weights_and_biases_gets_the_same_scalars_as_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    class Run:
        def __init__(self, **given: Any) -> None:
            self.given, self.rows, self.is_over = given, [], False
            runs.append(self)

        def log(self, values: dict[str, float], step: int) -> None:
            self.rows.append((step, values))

        def finish(self) -> None:
            self.is_over = True

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=Run))
    result = train(TrainConfig.from_dict(SMALL | {"steps": 2, "wandb_project": "scales"}))
    (made,) = runs
    assert (made.given["project"], made.given["config"]["steps"], made.is_over) == ("scales", 2, True)
    assert [step for step, _ in made.rows] == [0, 1]
    assert made.rows[1][1]["train/loss"] == result.steps[1].loss
    assert made.rows[1][1].keys() >= {"train/grad_norm", "train/tokens_per_s", "train/peak_memory_bytes"}


def test_wandb_and_torchao_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value, module, code in (
        ("wandb_project", "scales", "wandb", "E220"),
        ("float8", True, "torchao.float8", "E219"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(GradcheckError, match=f"needs {module.partition('.')[0]}") as caught:
            train(TrainConfig.from_dict(SMALL | {key: value}))
        assert caught.value.code == code


def test_torch_is_asked_for_deterministic_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []
    for mode in ("warn", "on", "off"):
        train(TrainConfig.from_dict(SMALL | {"deterministic": mode}))
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )
    assert seen == [(True, True), (True, False), (False, False)]
