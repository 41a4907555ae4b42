"""What recording every step costs, beside other tools that look at gradients: process CPU time per step, as ratios.

    python benchmarks/bench_overhead.py [--quick] [--only tiny]

Four trainers: a decoder of 4 layers with d=256 (the arithmetic weighs most), one with d=64 (Python weighs most), FSDP2
on 2 ranks and a pipeline of 2 ranks. Every round runs each tool for some steps in turn; what putting a tool in place
costs once is not counted. Goals: 1.02 on the first, 1.05 on the second, and there a tenth of what CommDebugMode adds.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from measure import Ratio, alternate, arguments, cpu_s, keep, paired_ratio
from torch import Tensor, nn

import gradcheck_dist
from gradcheck_dist.axes import Axes
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.loop import Trainer
from gradcheck_dist.trainer.model import build_model

Step = Callable[[], Any]
TRAINERS: dict[str, tuple[TrainConfig, int, int]] = {
    "4 layers d=256": (
        TrainConfig(dim=256, ffn_dim=688, n_heads=8, n_kv_heads=8, vocab_size=2048, seq_len=128, batch_size=8), 4, 9,
    ),
    "tiny d=64": (TrainConfig(dim=64, seq_len=32, batch_size=2), 48, 9),
    "FSDP2 2 ranks": (TrainConfig(axes=Axes(dp_shard=2), dim=128, ffn_dim=256, batch_size=4), 4, 9),
    "pipeline 2 ranks": (TrainConfig(axes=Axes(pp=2), dim=128, ffn_dim=256, batch_size=2, microbatches=4), 3, 9),
}  # fmt: skip
"""Configuration, steps a turn, rounds. Of a fast trainer so many that what is written for several steps counts."""
GOALS = {"4 layers d=256": 1.02, "tiny d=64": 1.05}
RECORDING = "gradcheck"
WARM_UP = 4
"""Steps behind the putting in place: the first three of a recording find parameters, plans and the order of arrival."""


def plain_step(config: TrainConfig) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """A loop as people write it: cross-entropy, backward, clip, AdamW, zero_grad."""
    model = build_model(config)
    for block in model.layers.values():
        del block.dropout  # it does nothing here, and CommDebugMode fails on a module that is called twice
        block.dropout = _same
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, labels = torch.randint(0, 256, (2, config.batch_size, config.seq_len))

    def step() -> None:
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _same(x: Tensor) -> Tensor:
    return x


def recorded(**options: Any) -> Callable[[nn.Module], contextlib.AbstractContextManager[None]]:
    @contextlib.contextmanager
    def tool(_: nn.Module) -> Iterator[None]:
        with tempfile.TemporaryDirectory() as folder, gradcheck_dist.attach(Path(folder) / "run", **options):
            yield

    return tool


OURS: dict[str, Any] = {
    RECORDING: recorded(),
    "gradcheck, every step without samples": recorded(steps=range(0), every_step=True),
    "gradcheck, between recorded steps": recorded(steps={0}),
    "gradcheck, after the last recorded step": recorded(steps=range(1)),
}


@contextlib.contextmanager
def hooked_norms(model: nn.Module) -> Iterator[None]:
    """The home-made way: a full backward hook on every module that reads one norm."""

    def on_backward(_module: nn.Module, _inputs: Any, outputs: tuple[Tensor | None, ...]) -> None:
        if outputs and outputs[0] is not None:
            outputs[0].norm().item()

    hooks = [module.register_full_backward_hook(on_backward) for module in model.modules() if module is not model]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def histograms(model: nn.Module) -> Iterator[Callable[[], Any]]:
    """TensorBoard's histogram of every gradient, every step, where the gradient has just been accumulated."""
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder, contextlib.closing(SummaryWriter(folder)) as writer:

        def write(name: str) -> Callable[[Tensor], None]:
            def on_gradient(param: Tensor) -> None:
                grad = getattr(param.grad, "_local_tensor", param.grad)
                if grad is not None and grad.numel():
                    writer.add_histogram(name, grad)

            return on_gradient

        hooks = [param.register_post_accumulate_grad_hook(write(name)) for name, param in model.named_parameters()]
        try:
            yield contextlib.nullcontext
        finally:
            for hook in hooks:
                hook.remove()


@contextlib.contextmanager
def hashed() -> Iterator[None]:
    """DebugMode with a hash of every operation's result."""
    from torch.utils._debug_mode import DebugMode

    with DebugMode(), DebugMode.log_tensor_hashes():
        yield


def each_step(make: Callable[[], Any]) -> Callable[[nn.Module], contextlib.AbstractContextManager[Any]]:
    """A tool that is entered around every single step, as its documentation shows it."""

    @contextlib.contextmanager
    def tool(_: nn.Module) -> Iterator[Callable[[], Any]]:
        yield make

    return tool


@contextlib.contextmanager
def msprobe_monitor(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[None]:
    """The monitor of msprobe: norms of all weights' gradients, before and after reduction, into a CSV."""
    from msprobe.pytorch import TrainerMon

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "monitor.json")
        targets = {name: {} for name, module in model.named_modules() if name and not list(module.children())}
        wanted = {"targets": targets, "wg_distribution": True, "format": "csv", "ops": ["norm"]}
        config.write_text(msgspec.json.encode(wanted).decode(), encoding="utf-8")
        config.chmod(0o600)
        os.environ["MONITOR_OUTPUT_DIR"] = folder
        with contextlib.redirect_stdout(io.StringIO()):  # it tells of every module
            monitor = TrainerMon(str(config), params_have_main_grad=False)
            monitor.set_monitor(model, optimizer)
            try:
                yield
            finally:
                monitor._remove_all_hooks_final(optimizer)
                del optimizer.step  # its own, put over the class's


def peers(
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, Callable[[nn.Module], contextlib.AbstractContextManager[Any]]]:
    """Tools beside the recording, by name."""
    from torch.distributed.tensor.debug import CommDebugMode

    found: dict[str, Any] = {
        "backward hooks with norms": hooked_norms,
        "CommDebugMode": each_step(CommDebugMode),
        "torch.profiler": each_step(lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])),
    }
    with contextlib.suppress(ImportError):
        from torch.utils._debug_mode import DebugMode

        found["DebugMode"] = each_step(DebugMode)
        found["DebugMode with hashes"] = each_step(hashed)
    if optimizer is not None and importlib.util.find_spec("msprobe") is not None:
        found["msprobe monitor"] = functools.partial(msprobe_monitor, optimizer)
    found["TensorBoard histograms"] = histograms
    return found


def turns(model: nn.Module, step: Step, tools: dict[str, Any], num_steps: int) -> dict[str, Callable[[], float]]:
    """For every tool a function that puts it in place, warms up and gives CPU seconds a step."""

    def turn(tool: Any) -> float:
        with tool(model) as around:
            run = step if around is None else lambda: _inside(around, step)
            for _ in range(WARM_UP):
                run()
            return cpu_s(run, num_steps)

    return {name: lambda tool=tool: turn(tool) for name, tool in tools.items()}


def _inside(around: Callable[[], Any], step: Step) -> None:
    with around():
        step()


@contextlib.contextmanager
def nothing(_: nn.Module) -> Iterator[None]:
    yield


def measure(name: str, quick: bool) -> dict[str, list[float]]:
    """CPU seconds a step by tool, one entry a round, of this process."""
    config, num_steps, rounds = TRAINERS[name]
    if quick:
        num_steps, rounds = 1, 2
    torch.set_num_threads(1)
    tools: dict[str, Any] = {"plain": nothing, **OURS}
    if config.axes.world_size == 1:
        model, optimizer, step = plain_step(config)
        tools |= peers(optimizer)
    else:
        trainer = Trainer(config)
        model, step = trainer.model, lambda: trainer.train_step(0)
        if config.axes.dp_shard > 1:  # a pipeline's stage has no one module to hook
            tools |= {"torch.profiler": peers()["torch.profiler"], "TensorBoard histograms": histograms}
    for _ in range(3):
        step()
    found = alternate(turns(model, step, tools, num_steps), rounds)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return found


def on_ranks(name: str, quick: bool) -> dict[str, list[float]]:
    """The sum over the processes of all ranks."""
    world_size = TRAINERS[name][0].axes.world_size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(world_size):
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size,
               "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}  # fmt: skip
        command = [sys.executable, __file__, "--only", name, *(["--quick"] if quick else [])]
        started.append(
            subprocess.Popen(command, env={**os.environ, **{k: str(v) for k, v in env.items()}}, stdout=subprocess.PIPE)
        )
    outputs = [process.communicate(timeout=600)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"a rank of {name!r} failed with {[process.returncode for process in started]}")
    ranks = [msgspec.json.decode(output, type=dict[str, list[float]]) for output in outputs]
    return {tool: [sum(of_rank) for of_rank in zip(*(rank[tool] for rank in ranks), strict=True)] for tool in ranks[0]}


def report(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Print one trainer's table; returns it for keeping."""
    plain = times.pop("plain")
    plain_ms = statistics.median(plain) * 1e3
    print(f"\n{name}: plain {plain_ms:.2f} ms of CPU a step")
    table: dict[str, Any] = {}
    for tool, values in times.items():
        ratio: Ratio = paired_ratio(values, plain)
        added_ms = statistics.median(value - base for value, base in zip(values, plain, strict=True)) * 1e3
        goal = f"  (goal {GOALS[name]:.2f})" if tool == RECORDING and name in GOALS else ""
        print(f"  {tool:<28} {ratio!s:<24} {added_ms:+8.2f} ms{goal}")
        table[tool] = {"ratio": ratio, "added_ms": round(added_ms, 4)}
    return {"plain_ms": round(plain_ms, 4), "goal": GOALS.get(name), "tools": table}


def main() -> None:
    """All trainers; with RANK set, this rank's part of one."""
    options = arguments(__doc__ or "")
    if "RANK" in os.environ:
        sys.stdout.buffer.write(msgspec.json.encode(measure(options.only, options.quick)))
        return
    results = {}
    for name, (config, _, _) in TRAINERS.items():
        if options.only in name:
            run = on_ranks if config.axes.world_size > 1 else measure
            results[name] = report(name, run(name, options.quick))
            keep(f"overhead_{name.split()[0]}", {name: results[name]}, quick=options.quick)


if __name__ == "__main__":
    main()
