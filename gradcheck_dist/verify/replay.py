"""One replay of an outermost call, in training's own dtype: what goes into every module, and what comes back to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcheck_dist.verify.calls import Calls
from gradcheck_dist.verify.capture import RootCall
from gradcheck_dist.verify.gradients import gradients, reentrant_checkpoints
from gradcheck_dist.verify.observe import Observer
from gradcheck_dist.verify.pieces import frozen, is_distributed, local, map_tensors, sample, tensors_of
from gradcheck_dist.verify.preserve import set_random_state
from gradcheck_dist.verify.twin import NotVerifiableError, Twin

FAITHFUL = 64
"""How many machine epsilons a replay's output may be off, relative to its norm."""


@dataclass
class Replay:
    """`calls` of modules; `gradients` of parameters by name, samples of plain ones; `trained`:
    there are parameters that require a gradient."""

    calls: Calls
    gradients: dict[str, Tensor]
    ranks: set[int]
    epsilon: float
    trained: bool


@contextlib.contextmanager
def training_precision(call: RootCall) -> Iterator[None]:
    """Autocast as it was in training's forward."""
    enabled, dtype = call.autocast
    with torch.autocast(call.device_type, dtype=dtype, enabled=enabled, cache_enabled=False):
        yield


def replay(call: RootCall, twin: Twin) -> Replay:
    """Run forward and backward of a captured call once more.

    Raises:
        NotVerifiableError: the replay gives another result than training did.
    """
    leaves: dict[int, Tensor] = {}
    values = {}
    for name, value in twin.values.items():
        if id(value) not in leaves:
            leaves[id(value)] = value.detach().clone().requires_grad_(name in twin.trained)
        values[name] = leaves[id(value)]
    calls = Calls(twin)
    observer = Observer()
    set_random_state(call.random)
    args, kwargs = map_tensors(frozen, (call.args, call.kwargs))
    wanted = list({id(value): value for value in values.values() if value.requires_grad}.values())
    with twin.standing_in("", values) as root:
        with torch.enable_grad(), training_precision(call), calls.watched(), observer:
            copies, named = map_tensors(Tensor.clone, (args, kwargs))  # forward may change them
            result = root(*copies, **named)
        outputs = [(name, tensor) for name, tensor in tensors_of(result) if tensor.requires_grad]
        _check_faithful(call, outputs)
        given = [tensor for _, tensor in tensors_of([*args, *kwargs.values()]) if tensor.requires_grad]
        with observer:
            with reentrant_checkpoints():
                pairs = _from_outside(
                    [
                        (tensor, seen.gradient)
                        for (_, tensor), seen in zip(outputs, call.outputs, strict=True)
                        if seen.gradient is not None
                    ]
                )
            for output in (output for known in calls.kept for output in known.outputs):
                output.gradient = None  # what arrives now is the whole
            with calls.watched(backward=True):
                found = gradients(
                    [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs], [*wanted, *given]
                )
    by_leaf = dict(zip(map(id, wanted), found, strict=False))
    by_name = {name: by_leaf.get(id(value)) for name, value in values.items()}
    samples = {name: sample(grad) for name, grad in by_name.items() if grad is not None and not is_distributed(grad)}
    return Replay(calls, samples, observer.ranks, observer.epsilon, bool(wanted))


def _from_outside(arrived: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Outputs with the part of the gradients that arrived there in training that came from outside of the module.

    An output that others are made of (logits beside the loss) also gets what comes back from them, which the replay
    itself brings: latest first, it is taken off.
    """
    latest_first = sorted(arrived, key=lambda pair: pair[0].grad_fn._sequence_nr() if pair[0].grad_fn else 0)[::-1]
    outside: list[tuple[Tensor, Tensor]] = []
    for tensor, gradient in latest_first:
        if any(tensor is other for other, _ in outside):
            continue
        if outside:
            (inside,) = torch.autograd.grad(
                [other for other, _ in outside],
                [tensor],
                [brought for _, brought in outside],
                retain_graph=True,
                allow_unused=True,
            )
            if inside is not None:
                rest = gradient - inside
                allowed = FAITHFUL * torch.finfo(tensor.dtype).eps * float(local(gradient).norm())
                gradient = rest if float(local(rest).norm()) > allowed else torch.zeros_like(rest)
        outside.append((tensor, gradient))
    return outside


def _check_faithful(call: RootCall, outputs: list[tuple[str, Tensor]]) -> None:
    if [name for name, _ in outputs] != [output.name for output in call.outputs]:
        raise NotVerifiableError("run once more, it gives other tensors than in training")
    for (name, tensor), seen in zip(outputs, call.outputs, strict=True):
        values = sample(tensor)
        same = values.shape == seen.values.shape
        allowed = FAITHFUL * torch.finfo(tensor.dtype).eps
        if not same or float((values - seen.values).norm()) > allowed * float(seen.values.norm()):
            raise NotVerifiableError(
                f"run once more, it gives another output{' ' + name if name else ''} than in training: its forward "
                "depends on something that was only there then (a context manager, a global state)"
            )
