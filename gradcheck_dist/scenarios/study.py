"""Comparing parallelisms: one control and several strategies on the same sequences, curve beside curve.

    study.yaml --> one training a strategy --> its TensorBoard log, and its first step recorded --> ratios and verdicts

A strategy that has ended lies in a folder of its own and is not trained again.

Source: torchtitan, docs/converging.md (control: one process that accumulates; the same seed checkpoint and data order).
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from gradcheck_dist.compare.comparison import Comparison, compare
from gradcheck_dist.compare.sources import Source, read
from gradcheck_dist.errors import GradcheckError, unknown_value
from gradcheck_dist.reports.document import build
from gradcheck_dist.scenarios.runner import judge, peak_memory_bytes
from gradcheck_dist.trace.run import create_run_dir, read_run
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.launch import launch
from gradcheck_dist.trainer.scalars import num_written

WORKER = "gradcheck_dist.scenarios.worker:run_study_rank"
TIMEOUT_S = 4 * 3600.0
CONTROL = "control"
POLL_S = 1.0
_KEYS = ("objective", "common", "control", "strategies")
_NAMES = {"loss": "train/loss", "grad_norm": "train/grad_norm", "tokens": "train/tokens"}


@dataclass(frozen=True)
class Study:
    """Configurations by strategy, the control first. All see equally many sequences a step."""

    objective: str
    configs: Mapping[str, TrainConfig]


@dataclass(frozen=True)
class Outcome:
    """What became of one strategy.

    Attributes:
        config: as TrainConfig.to_dict gives it, for resuming.
        verdict: what the first step alone told: the engine's verdict and its findings, in one line.
        first_norm: gradient norm of the first step, before clipping.
        last_loss: of the last step, nats a token.
        peak_memory_bytes: summed over ranks.
    """

    name: str
    config: dict[str, Any]
    verdict: str
    first_norm: float
    last_loss: float
    seconds: float
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class Result:
    outcomes: tuple[Outcome, ...]
    comparison: Comparison


def load(path: Path | None = None, steps: int | None = None, only: tuple[str, ...] = ()) -> Study:
    """Read a study's file; None takes the package's own.

    Args:
        steps: optimizer steps in place of the file's.
        only: strategies to keep; () keeps all. The control always stays.

    Raises:
        GradcheckError: E610 it is no study, or a strategy sees other sequences than the control; E2xx a configuration
            is illegal; E601 no such strategy.
    """
    name, content = _content(path)
    for key in content:
        if key not in _KEYS:
            raise unknown_value(f"key in {name}:", key, _KEYS, code="E610")
    strategies = _mapping(name, "strategies", content)
    common = _mapping(name, "common", content) | ({"steps": steps} if steps is not None else {})
    if not strategies:
        raise GradcheckError(f"{name} has no strategies. Write at least one: `ddp: {{dp_replicate: 2}}`.", code="E610")
    for chosen in only:
        if chosen not in strategies:
            raise unknown_value("strategy", chosen, strategies, code="E601")
    configs = {CONTROL: TrainConfig.from_dict(common | _mapping(name, "control", content))}
    for strategy, values in strategies.items():
        if strategy == CONTROL or not str(strategy).replace("-", "").replace("_", "").isalnum():
            raise GradcheckError(
                f"a strategy in {name} is called {strategy!r}; legal are letters, digits, - and _, but not 'control'.",
                code="E610",
            )
        if not only or strategy in only:
            configs[strategy] = TrainConfig.from_dict(common | dict(values or {}))
    wanted = configs[CONTROL].sequences_per_step
    for strategy, config in configs.items():
        if (config.sequences_per_step, config.steps) != (wanted, configs[CONTROL].steps):
            raise GradcheckError(
                f"strategy {strategy} trains {config.steps} steps of {config.sequences_per_step} sequences, the "
                f"control {configs[CONTROL].steps} of {wanted}. Set accum, microbatches and batch_size so that ranks x "
                "accum x microbatches x batch_size is the same.",
                code="E610",
            )
    return Study(str(content.get("objective", "global-token-mean")), configs)


def run(study: Study, folder: Path, on_progress: Callable[[str], None] = lambda text: None) -> Result:
    """Train what has not ended yet, one strategy after the other, and compare all.

    Args:
        folder: gets one folder a strategy: `log` for TensorBoard, `step-0` the recorded step, `outcome.json`.

    Raises:
        GradcheckError: a strategy could not run; what had ended stays.
    """
    outcomes = []
    for index, (name, config) in enumerate(study.configs.items(), 1):
        label = f"{index} of {len(study.configs)}: {name}"
        on_progress(label)
        outcome = _ended(folder / name, config)
        if outcome is None:
            outcome = _train(study, name, folder, label, on_progress)
        outcomes.append(outcome)
    on_progress("comparing")
    sources = [_source(folder, name, config) for name, config in study.configs.items()]
    return Result(tuple(outcomes), compare(sources[0], sources[1:], {}))


def _train(study: Study, name: str, folder: Path, label: str, on_progress: Callable[[str], None]) -> Outcome:
    """Into a folder with another name first, so that a folder with the strategy's name is whole."""
    config = study.configs[name]
    partial = folder / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    run_dir, log = partial / "step-0", partial / "log"
    manifest = {
        "scenario": "study",
        "variant": name,
        "world_size": config.axes.world_size,
        "axes": config.axes.as_dict(),
        "objective": study.objective,
        "config": config.to_dict(),
    }
    create_run_dir(run_dir, manifest)
    started_s = time.perf_counter()
    with _watched(log, config.steps, lambda text: on_progress(f"{label}, {text}")):
        results = launch(
            WORKER,
            (str(run_dir), config, study.objective, str(log)),
            config.axes.world_size,
            timeout_s=TIMEOUT_S,
            log_dir=partial / "logs",
        )
    seconds = round(time.perf_counter() - started_s, 1)
    metrics = results[0].steps
    outcome = Outcome(
        name=name,
        config=config.to_dict(),
        verdict=build(judge(read_run(run_dir))).headline,
        first_norm=metrics[0].grad_norm,
        last_loss=metrics[-1].loss,
        seconds=seconds,
        peak_memory_bytes=peak_memory_bytes(results),
    )
    (partial / "outcome.json").write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder / name, ignore_errors=True)
    partial.rename(folder / name)
    return outcome


def _ended(folder: Path, config: TrainConfig) -> Outcome | None:
    """What an earlier run left, when it had the same configuration."""
    try:
        outcome = Outcome(**json.loads((folder / "outcome.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return outcome if outcome.config == json.loads(json.dumps(config.to_dict())) else None


def _source(folder: Path, name: str, config: TrainConfig) -> Source:
    degrees = {axis: float(degree) for axis, degree in config.axes.as_dict().items() if degree > 1}
    degrees |= {"K": float(config.accum)} if config.accum > 1 else {}
    degrees |= {"M": float(config.microbatches)} if config.microbatches > 1 else {}
    return replace(read(folder / name / "log", _NAMES), name=name, axes=degrees)


@contextmanager
def _watched(log: Path, steps: int, say: Callable[[str], None]) -> Iterator[None]:
    """Tell how far the log has come while the body runs."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(POLL_S):
            say(f"step {num_written(log)} of {steps}")

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _content(path: Path | None) -> tuple[str, dict[str, Any]]:
    import yaml

    from gradcheck_dist.yaml_text import in_words, load

    try:
        text = (
            (resources.files(__package__) / "study.yaml").read_text(encoding="utf-8")
            if path is None
            else path.read_text(encoding="utf-8")
        )
        content = load(text, str(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise GradcheckError(
            f"cannot read {path}: {in_words(error)}. Name a YAML file of a study.", code="E610"
        ) from error
    if not isinstance(content, dict):
        raise GradcheckError(
            f"{path} holds {type(content).__name__}, not a study. Legal keys: {', '.join(_KEYS)}.", code="E610"
        )
    return (str(path) if path is not None else "study.yaml"), content


def _mapping(name: str, key: str, content: Mapping[str, Any]) -> dict[str, Any]:
    value = content.get(key) or {}
    if not isinstance(value, dict) or (
        key == "strategies" and not all(isinstance(one, dict | None) for one in value.values())
    ):
        raise GradcheckError(f"{key} in {name} is {value!r}; legal is a mapping, such as {{accum: 10}}.", code="E610")
    return value
