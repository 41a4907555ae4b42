"""Which tokens a pass read and which it was to predict, as checksums of runs of them.

A pipeline's first stage looks up tokens, and its last one has labels: nothing holds the two together but their order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcheck_dist.events import Tokens
from gradcheck_dist.probes.parameters.stand_ins import is_host, is_plain
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded, kept_away
from gradcheck_dist.trace.token_runs import FACTOR, NONE, NUM_KEPT, NUM_TOKENS, runs

WHOLE = (torch.int64, torch.int32)
MAX_EMBEDDINGS = 4
"""Of one pass: tokens, positions, segments."""


def install(recorder: Recorder, patches: Patches) -> None:
    patches.replace(torch.nn.functional, "embedding", functools.partial(_watch, recorder))


def _watch(recorder: Recorder, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def embedding(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        output = original(input, *args, **kwargs)
        if not torch.compiler.is_compiling() and not recorder.suspended and recorder.impulses is None:
            _looked_up(recorder, input, args[0] if args else kwargs.get("weight"), output)
        return output

    return embedding


@guarded("tokens")
def _looked_up(recorder: Recorder, tokens: Tensor, weight: Tensor | None, output: Tensor) -> None:
    if isinstance(weight, torch.nn.Parameter):
        recorder.registry.is_table(weight)
    node: Any = output.grad_fn
    if node is not None and recorder.samples_upcoming and _can_be_read(tokens):
        node.register_prehook(kept_away(recorder, "tokens", functools.partial(_arrived, recorder, tokens)))


def _can_be_read(tokens: Tensor) -> bool:
    return tokens.dtype in WHOLE and tokens.numel() >= NUM_TOKENS and is_plain(tokens)


def _arrived(recorder: Recorder, tokens: Tensor, _: object) -> None:
    current = recorder.current
    if current is None or not recorder.sampling or current.num_embedded >= MAX_EMBEDDINGS:
        return
    current.num_embedded += 1
    _tell(recorder, tokens, current.microbatch, None)


@guarded("tokens")
def labels_seen(recorder: Recorder, labels: Tensor, loss_id: int) -> None:
    """A loss was evaluated on labels."""
    if recorder.sampling and recorder.impulses is None and _can_be_read(labels):
        _tell(recorder, labels, 0, loss_id)


def _tell(recorder: Recorder, tokens: Tensor, microbatch: int, loss_id: int | None) -> None:
    flat = tokens.detach().reshape(-1)
    if is_host(flat):
        now = np.from_dlpack(flat).copy()  # a loader may use its memory again
        recorder.emit_later(Tokens, functools.partial(runs, now), microbatch, loss_id=loss_id)
    else:
        recorder.emit_values(Tokens, _on_device(flat.to(torch.int64)), microbatch, loss_id=loss_id)


def _on_device(flat: Tensor) -> Tensor:
    """The same as `runs`, where nobody may wait for the result: what is left out is the largest number."""
    num = flat.numel() - NUM_TOKENS + 1
    parts = [flat[place : place + num] for place in range(NUM_TOKENS)]
    found = functools.reduce(lambda before, part: before * FACTOR + part + 1, parts, torch.zeros_like(parts[0]))
    whole = torch.stack(parts).amin(0) >= 0
    found = torch.where(whole, found, NONE).sort().values
    again = torch.cat([torch.zeros_like(found[:1], dtype=torch.bool), found[1:] == found[:-1]])
    return torch.where(again, NONE, found).sort().values[:NUM_KEPT]
