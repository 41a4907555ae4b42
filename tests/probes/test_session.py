"""When probes record and when not, and that a probe in trouble never harms training."""

from __future__ import annotations

import copy
import gc
import os
import signal
import time
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from one_process import accumulate, events_of, healthy, judged, record
from probe_workers import Net, batch
from torch import nn

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.events import Backward, OptimizerStep, ProbeError, RunEnd, StepEnd
from gradcheck_dist.probes import attach, availability
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.recording.recorder import Recorder


def test_only_the_steps_asked_for_are_recorded(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path, steps=range(1, 3)):
        for _ in range(5):
            healthy(model, optimizer)
    assert [event.step for event in events_of(tmp_path, OptimizerStep)] == [1, 2]
    assert len(events_of(tmp_path, RunEnd)) == 1  # else who looks at the run takes the rank for dead
    assert judged(tmp_path).verdict == "clean"


def test_the_time_that_probes_took_is_told_of_each_step_alone(tmp_path: Path) -> None:
    record(healthy, tmp_path, steps=8)
    ends = events_of(tmp_path, StepEnd)
    assert all(end.probe_s <= end.duration_s for end in ends)
    assert ends[-1].probe_s < sum(end.probe_s for end in ends) / 2


def test_what_a_recorded_trainer_saves_is_loaded_without_the_probes(tmp_path: Path) -> None:
    """Checkpoints with the loss in them, leaves that are no Parameters, copies for a moving average."""
    model, bias = Net(), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([*model.parameters(), bias], lr=0.1)
    with attach(tmp_path / "run"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for reduction in ("mean", "none"):
            tokens, labels = batch(0, 0)
            logits = (model(tokens) + bias).flatten(0, 1)
            kept = F.cross_entropy(logits, labels.flatten(), reduction=reduction)
            picked = logits.log_softmax(-1).gather(-1, labels.flatten().clamp_min(0)[:, None])
            kept.sum().backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            content = {"loss": kept, "picked": picked, "bias": bias, "model": model.state_dict()}
            torch.save(content, tmp_path / "checkpoint")
            loaded = torch.load(tmp_path / "checkpoint", weights_only=True)
            assert torch.equal(loaded["loss"], kept) and not vars(kept)
            average = copy.deepcopy(model)
            assert all(not param._backward_hooks for param in average.parameters())
            assert torch.equal(copy.deepcopy(bias), bias)
    assert not events_of(tmp_path / "run", ProbeError)


def test_a_probe_that_fails_behind_a_pass_leaves_the_next_passes_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a listener in trouble")

    monkeypatch.setattr(autograd, "CLOSE_LISTENERS", [*autograd.CLOSE_LISTENERS, broken])
    record(healthy, tmp_path)
    assert {event.message for event in events_of(tmp_path, ProbeError)} == {"RuntimeError: a listener in trouble"}
    assert [event.accumulation_step for event in events_of(tmp_path, Backward)][:2] == [0, 1]


def test_models_that_follow_one_another_are_not_kept_by_modules_without_parameters(tmp_path: Path) -> None:
    model, late = Net(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([*model.parameters(), late], lr=0.1)  # the second is never reached
    with attach(tmp_path) as session:
        for _ in range(3):
            tokens, labels = batch(0, 0)
            nn.CrossEntropyLoss()(nn.Dropout(0.0)(model(tokens)).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert set(session.recorder.registry.known_modules) == {id(module) for module in model.modules()}


def test_a_model_is_freed_when_recording_is_over_though_a_replaced_function_was_imported(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = attach(tmp_path, steps=range(2))
    from torch.nn.functional import cross_entropy

    for _ in range(4):
        tokens, labels = batch(0, 0)
        cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert [event.step for event in events_of(tmp_path, OptimizerStep)] == [0, 1]
    assert not events_of(tmp_path, ProbeError)
    params = [weakref.ref(param) for param in model.parameters()]
    del model, optimizer
    gc.collect()
    assert not any(param() is not None for param in params) and session.recorder is not None
    assert cross_entropy is not F.cross_entropy


def test_an_error_inside_a_probe_is_recorded_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = record(healthy, tmp_path / "fine")

    def broken(*args: object) -> None:
        raise RuntimeError("a probe in trouble")

    monkeypatch.setattr(Recorder, "sample_grads", broken)
    model = record(healthy, tmp_path / "broken")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
    errors = events_of(tmp_path / "broken", ProbeError)
    assert errors and "a probe in trouble" in errors[0].message
    report = judged(tmp_path / "broken")
    assert report.verdict == "undetermined"
    assert any("a probe in trouble" in problem for problem in report.coverage.problems)


def test_a_full_disk_stops_the_trace_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path) as session:
        healthy(model, optimizer)

        def full(fd: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "writev", full)
            healthy(model, optimizer)
        assert session.recorder.writer.error is not None
        healthy(model, optimizer)
    assert judged(tmp_path).run.steps == [0]


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    with attach(tmp_path) as session:
        before = sum(file.stat().st_size for file in tmp_path.glob("*.trace"))
        child = os.fork()
        if child == 0:
            session.recorder.emit(ProbeError, probe="child", message="x")
            session.recorder.writer.flush()
            os._exit(0)
        os.waitpid(child, 0)
        assert sum(file.stat().st_size for file in tmp_path.glob("*.trace")) == before


def test_a_forked_child_ends_although_the_writer_was_at_work(tmp_path: Path) -> None:
    with attach(tmp_path) as session:
        before = sum(file.stat().st_size for file in tmp_path.glob("*.trace"))
        with session.recorder.writer._lock:  # as the thread that writes holds it, which the child does not have
            child = os.fork()
            if child == 0:
                session.detach()  # what atexit does in a child that ends by itself
                os._exit(0)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended == (0, 0):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended == (child, 0)
        assert sum(file.stat().st_size for file in tmp_path.glob("*.trace")) == before


def patched_attributes() -> Iterator[object]:
    yield torch.autograd.backward
    yield torch.autograd.grad
    yield F.cross_entropy
    yield F.nll_loss
    yield nn.utils.clip_grad_norm_
    yield torch.optim.Optimizer.zero_grad
    yield torch.amp.GradScaler.unscale_
    yield torch.distributed.all_reduce
    yield nn.parallel.DistributedDataParallel._post_forward


def test_detaching_takes_every_probe_away(tmp_path: Path) -> None:
    before = list(patched_attributes())
    model = Net()
    with attach(tmp_path):
        assert all(now is not then for now, then in zip(patched_attributes(), before, strict=True))
        accumulate(model)
    assert all(now is then for now, then in zip(patched_attributes(), before, strict=True))
    assert not any(param._backward_hooks for param in model.parameters())


def test_classes_hold_behind_detaching_what_they_held_before(tmp_path: Path) -> None:
    """What a class gives for a method of pybind11's is no method any more when a class holds it."""
    classes = (torch.distributed.ProcessGroup, torch.Tensor, torch.autograd.Function, torch.optim.Optimizer)
    before = [dict(vars(one)) for one in classes]
    attach(tmp_path / "run").detach()
    after = [dict(vars(one)) for one in classes]
    for was, now in zip(before, after, strict=True):
        assert {name for name in {**was, **now} if was.get(name) is not now.get(name)} == set()


def test_a_function_imported_while_it_was_replaced_keeps_nothing_after_detaching(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path) as session:
        healthy(model, optimizer)
        cross_entropy = F.cross_entropy
    assert F.cross_entropy is not cross_entropy
    inputs, labels = batch(0, 0)
    cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).backward()
    assert session.recorder.writer._records == []


def test_every_probe_hooks_into_this_torch() -> None:
    assert set(availability().values()) == {"ok"}


def test_attaching_twice_is_one_session_and_elsewhere_is_refused(tmp_path: Path) -> None:
    with attach(tmp_path / "a") as session:
        assert attach() is session
        with pytest.raises(GradcheckError, match="already recording into") as caught:
            attach(tmp_path / "b")
        assert caught.value.code == "E301"


def test_a_trainer_that_attaches_itself_goes_on_below_gradcheck_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach(tmp_path / "run", deferred=True) as session:
        assert attach(tmp_path / "own", objective="sum") is session
        assert "attach()" in capsys.readouterr().err
        monkeypatch.setenv("LOCAL_RANK", "1")  # of many ranks one says it
        assert attach(tmp_path / "own") is session
        assert capsys.readouterr().err == ""
    assert not (tmp_path / "own").exists()


def test_a_recorded_rank_is_never_overwritten(tmp_path: Path) -> None:
    record(healthy, tmp_path)
    with pytest.raises(GradcheckError, match="nothing recorded is ever overwritten"):
        attach(tmp_path)


@pytest.mark.parametrize(
    ("world_size", "said"), [(None, "WORLD_SIZE is not set"), ("2", "WORLD_SIZE is '2'"), ("", "WORLD_SIZE is ''")]
)
def test_ranks_that_the_environment_cannot_mean_are_refused_as_it_says_them(
    world_size: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size is not None:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(GradcheckError, match=f"RANK is '5' and {said} in the environment") as refused:
        attach(tmp_path / "run")
    assert refused.value.code == "E304"
    assert not list(tmp_path.rglob("*.trace"))
