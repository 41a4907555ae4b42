"""python -m gradcheck_dist.scenarios.selftest: what torch can do here, one JSON object a line, for `gradcheck doctor`.

Lines go out as they are known, so that a hang or a crash still tells where it happened.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

TRIED = ("2.13", "2.14", "2.15")
"""Versions of torch that the probes were tried on."""
_TIMEOUT = timedelta(seconds=30)

Line = tuple[str, bool, str, bool]


def checks() -> Iterator[Line]:
    """(what, works, detail, needed) of each check."""
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:
        yield "torch", False, f"cannot be imported: {type(error).__name__}: {error}", True
        return
    tried = ".".join(torch.__version__.split(".")[:2]) in TRIED
    yield "torch", True, f"{torch.__version__}" + ("" if tried else f" (tried on {', '.join(TRIED)})"), True
    if not dist.is_available():
        yield "torch.distributed", False, "this torch was built without it", True
        return
    yield _all_reduce("gloo", "cpu", needed=True)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    yield "CUDA", count > 0, names or "no device", False
    if count and dist.is_nccl_available():
        yield _all_reduce("nccl", "cuda", needed=False)
    else:
        yield "nccl", False, "needs CUDA" if dist.is_nccl_available() else "not in this torch", False
    yield from _probes()


def _all_reduce(backend: str, device: str, *, needed: bool) -> Line:
    import torch
    import torch.distributed as dist

    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=_TIMEOUT)
        value = torch.ones(1, device=device)
        dist.all_reduce(value)
        works = float(value) == 1.0
        dist.destroy_process_group()
    except Exception as error:
        return backend, False, f"{type(error).__name__}: {error}", needed
    return backend, works, f"an all-reduce on {device} came back {'right' if works else 'wrong'}", needed


def _probes() -> Iterator[Line]:
    from gradcheck_dist.probes import availability

    for probe, state in availability().items():
        yield f"probe {probe}", state == "ok", "can hook into this torch" if state == "ok" else state, False


def main() -> None:
    """Print the lines, then leave at once: torch 2.13 with gloo may abort while the interpreter shuts down."""
    for what, works, detail, needed in checks():
        print(json.dumps({"what": what, "works": works, "detail": detail, "needed": needed}), flush=True)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
