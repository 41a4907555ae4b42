"""A model as a function of copies of its parameters.

The copies stand in for the parameters while forward and backward run, so the model's own are never touched, no
reducer hears of a backward, and any of them may be perturbed or stand in another dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradcheck_dist.verify.pieces import cast
from gradcheck_dist.verify.preserve import inner_module

MAX_UNSHARDED_SHARE = 0.5
"""Share of an accelerator's free memory that the unsharded copies may take."""


class NotVerifiableError(Exception):
    """Why a module cannot be checked, in words for the user."""


class Twin:
    """An outermost module and detached values of its parameters.

    `buffers` are by name, as they were at the call. `values` of parameters are by name, whole where FSDP2 shards them
    (in its param_dtype), DTensors where a model axis does; tied parameters share one tensor. `frozen` are parameters
    without gradient as they were at the call; `changing` are the ids of values that
    forward has written to since.
    """

    def __init__(
        self, root: nn.Module, buffers: Mapping[str, Tensor], frozen: Mapping[str, Tensor] | None = None
    ) -> None:
        self.root = unwrap(root)
        self._buffers = buffers
        self.names = {id(module): name for name, module in self.root.named_modules()}
        self.trained: set[str] = set()
        self.values: dict[str, Tensor] = {}
        self.changing: set[int] = set()
        frozen = frozen or {}
        with _unsharded(self.root) as sharded:
            copies: dict[int, Tensor] = {}
            for name, param in self.root.named_parameters(remove_duplicate=False):
                if param.is_meta or (not param.numel() and hasattr(param, "ds_id")):
                    raise NotVerifiableError(f"the values of parameter {name} are not on this rank")
                if id(param) not in copies:
                    then = frozen.get(name)
                    if then is not None and then.shape == param.shape and not torch.equal(then, param):
                        copies[id(param)] = then
                        self.changing.add(id(then))
                    else:
                        copies[id(param)] = param.detach().clone() if sharded else param.detach()
                self.values[name] = copies[id(param)]
                if param.requires_grad:
                    self.trained.add(name)

    def below(self, prefix: str) -> dict[str, str]:
        """Names of parameters of the module at `prefix`, as it knows them, with their names in the root."""
        start = f"{prefix}." if prefix else ""
        return {name[len(start) :]: name for name in self.values if name.startswith(start)}

    @contextlib.contextmanager
    def standing_in(
        self, prefix: str, values: Mapping[str, Tensor], dtype: torch.dtype | None = None
    ) -> Iterator[nn.Module]:
        """While open, the module at `prefix` has `values` (by its own names) for its parameters and fresh copies of its
        buffers as they were when the root was called, floating ones in `dtype`. Backward belongs inside too:
        checkpointing runs forward again in it."""
        module = self.root.get_submodule(prefix)
        copies: dict[int, Tensor] = {}
        saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for name, owner in module.named_modules():
            saved += [(owner._parameters, dict(owner._parameters)), (owner._buffers, dict(owner._buffers))]
            for own in owner._parameters:
                full = f"{name}.{own}" if name else own
                if full in values:
                    owner._parameters[own] = values[full]  # type: ignore[assignment]
            if isinstance(getattr(owner, "_flat_weights", None), list):  # nn.RNN and its kin keep a list of their own
                saved.append((vars(owner), dict(vars(owner))))
                names: list[str] = getattr(owner, "_flat_weights_names", [])
                vars(owner)["_flat_weights"] = [owner._parameters[own] for own in names]
            for own, buffer in owner._buffers.items():
                if buffer is not None:
                    then = self._buffers.get(".".join(part for part in (prefix, name, own) if part), buffer)
                    copies.setdefault(id(buffer), cast(then.detach().clone(), dtype))
                    owner._buffers[own] = copies[id(buffer)]
        try:
            yield module
        finally:
            for table, before in saved:
                table.clear()
                table.update(before)


def unwrap(root: nn.Module) -> nn.Module:
    """The module inside of data-parallel and compiling wrappers.

    Raises:
        NotVerifiableError: FSDP1 or a scripted module keeps parameters where no function of them can be made.
    """
    while (inner := inner_module(root)) is not None:
        root = inner
    if any(isinstance(module, torch.jit.ScriptModule) for module in root.modules()):
        raise NotVerifiableError("scripted modules (torch.jit) keep parameters where no function of them can be made")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in root.modules()):
        raise NotVerifiableError("FSDP1 (FullyShardedDataParallel) flattens parameters; fully_shard can be verified")
    return root


@contextlib.contextmanager
def _unsharded(root: nn.Module) -> Iterator[bool]:
    """While open, FSDP2's parameters below `root` are whole; tells whether there are any. A collective."""
    sharded = [module for module in root.modules() if hasattr(module, "unshard") and hasattr(module, "reshard")]
    if sharded:
        _check_memory(sharded)
    for module in sharded:
        module.unshard()  # type: ignore[operator]
    try:
        yield bool(sharded)
    finally:
        for module in sharded:
            module.reshard()  # type: ignore[operator]


def _check_memory(sharded: list[nn.Module]) -> None:
    params = {id(param): param for module in sharded for param in module.parameters()}
    needed = sum(param.numel() * param.element_size() for param in params.values())
    device = next(iter(params.values())).device if params else torch.device("cpu")
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if 2 * needed > free * MAX_UNSHARDED_SHARE * 2:
            raise NotVerifiableError(
                f"{needed / 2**30:.1f} GiB of unsharded parameters do not fit twice into {free / 2**30:.1f} GiB: "
                "verify with fewer layers"
            )
