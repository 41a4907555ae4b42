"""Wrong arguments of attach(), mark_loss() and diagnose(): named where they are given, and no harm to training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gradcheck_dist
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import Loss, ProbeError
from gradcheck_dist.trace.run import read_run

WRONG_OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"steps": 3}, "E712", "steps is 3"),
    ({"steps": "3:1"}, "E712", "steps is '3:1'"),
    ({"steps": range(-1, 2)}, "E712", "steps is range"),
    ({"steps": [0, -1]}, "E712", "steps is"),
    ({"steps": [0.5]}, "E712", "steps is"),
    ({"objective": "token-mean"}, "E401", "Did you mean: rank-token-mean"),
    ({"axes": "dp=2"}, "E302", "axes is 'dp=2'"),
    ({"axes": {"dp": 2}}, "E302", "unknown axis 'dp'"),
    ({"axes": {"tp": 0}}, "E101", "axis tp is 0"),
    ({"sample_size": 0}, "E302", "integers from 8 up"),
    ({"sample_size": 2}, "E302", "integers from 8 up"),
    ({"sample_size": "96"}, "E302", "sample_size is '96'"),
    ({"only": "loss"}, "E302", "only is 'loss'"),
    ({"only": ["los"]}, "E302", "Did you mean: loss"),
    ({"meant": "Block"}, "E302", "meant is 'Block'"),
    ({"same_data": [0, 1]}, "E302", "same_data is"),
    ({"same_data": [[0, 1], [1, 2]]}, "E302", "each rank in one"),
    ({"same_data": []}, "E302", "same_data is"),
]


@pytest.mark.parametrize(("options", "code", "words"), WRONG_OPTIONS)
def test_a_wrong_option_is_named_and_nothing_is_put_in_place(
    options: dict[str, Any], code: str, words: str, tmp_path: Path
) -> None:
    backward = torch.Tensor.backward
    with pytest.raises(GradcheckError, match=words) as caught:
        gradcheck_dist.attach(tmp_path / "run", **options)
    assert caught.value.code == code
    assert torch.Tensor.backward is backward
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("steps", ["1:3", range(1, 3), [1, 2], {1, 2}])
def test_steps_may_be_named_in_several_ways_and_recording_ends_behind_them(steps: Any, tmp_path: Path) -> None:
    backward = torch.Tensor.backward
    with gradcheck_dist.attach(tmp_path / "run", steps=steps):
        train(5)
        assert torch.Tensor.backward is backward
    run = read_run(tmp_path / "run")
    assert {event.step for event in run.ranks[0].events if isinstance(event, Loss)} == {1, 2}


@pytest.mark.parametrize("steps", ["1:", range(1, 10**15), range(10**15, 0, -1)])
def test_steps_may_go_on_for_ever(steps: Any, tmp_path: Path) -> None:
    """The last of them was looked for one by one."""
    with gradcheck_dist.attach(tmp_path / "run", steps=steps):
        train(3)
    run = read_run(tmp_path / "run")
    assert {event.step for event in run.ranks[0].events if isinstance(event, Loss)} == {1, 2}


@pytest.mark.parametrize("steps", ["2:", "2:3", [4, 2], range(3, 1, -1)])
def test_impulse_mode_takes_the_first_of_the_steps(steps: Any, tmp_path: Path) -> None:
    with gradcheck_dist.attach(tmp_path / "run", steps=steps, exact=True) as session:
        assert session.recorder.impulses.step == 2


def test_degrees_that_are_not_named_are_one(tmp_path: Path) -> None:
    with gradcheck_dist.attach(tmp_path / "run", axes={"tp": 1}, same_data=[[1, 0]], steps="0:1"):
        train(1)
    header = read_run(tmp_path / "run").ranks[0].header
    assert header.axes == dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1)
    assert header.same_data == ((0, 1),)


def test_a_folder_is_judged_as_the_run_read_from_it(tmp_path: Path) -> None:
    with gradcheck_dist.attach(tmp_path / "run"):
        train(2)
    of_folder, of_run = gradcheck_dist.diagnose(tmp_path / "run"), gradcheck_dist.diagnose(read_run(tmp_path / "run"))
    assert of_folder.verdict == of_run.verdict == "clean"
    assert len(of_folder.weights) == len(of_run.weights) > 0
    with pytest.raises(GradcheckError) as caught:
        gradcheck_dist.diagnose(str(tmp_path / "nowhere"))
    assert caught.value.code == "E504"


WRONG_MARKS: list[tuple[dict[str, Any], str]] = [
    ({"num_tokens": -1}, "num_tokens is -1"),
    ({"num_tokens": "12"}, "num_tokens is '12'"),
    ({"num_tokens": 3.5}, "num_tokens is 3.5"),
    ({"num_tokens": float("inf")}, "num_tokens is inf"),
    ({"num_tokens": torch.tensor([1, 2])}, "num_tokens is tensor"),
    ({"coefficient": "0.1"}, "coefficient is '0.1'"),
    ({"term": ""}, "term is ''"),
    ({"labels": [1, 2]}, "labels is a list"),
    ({"loss": torch.ones(3, requires_grad=True) * 2}, "loss is a tensor of shape (3,)"),
    ({"loss": 2.0}, "loss is float 2.0"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG_MARKS)
def test_a_loss_marked_with_wrong_arguments_is_told_and_trains_on(
    wrong: dict[str, Any], words: str, tmp_path: Path
) -> None:
    loss = torch.ones((), requires_grad=True) * 3
    arguments = {"loss": loss, "num_tokens": 6} | wrong
    with gradcheck_dist.attach(tmp_path / "run"):
        assert gradcheck_dist.mark_loss(**arguments) is arguments["loss"]
        train(1)
    run = read_run(tmp_path / "run")
    assert not run.problems
    [told] = [event for event in run.ranks[0].events if isinstance(event, ProbeError)]
    assert told.probe == "mark_loss" and words in told.message
    assert not any(isinstance(event, Loss) and event.op == "mark_loss" for event in run.ranks[0].events)


@pytest.mark.parametrize("num_tokens", [6, 6.0, torch.tensor(6), torch.tensor([6.0])])
def test_a_count_may_be_any_whole_number(num_tokens: Any, tmp_path: Path) -> None:
    with gradcheck_dist.attach(tmp_path / "run"):
        gradcheck_dist.mark_loss(torch.ones((), requires_grad=True) * 3, num_tokens)
    [loss] = [event for event in read_run(tmp_path / "run").ranks[0].events if isinstance(event, Loss)]
    assert loss.num_tokens == 6


def train(num_steps: int) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(layer(torch.randn(6, 8)), torch.randint(0, 5, (6,))).backward()
        optimizer.step()
