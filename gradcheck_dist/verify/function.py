"""A module call as a number: the inner product of its outputs with the gradients that arrived there.

Its derivative with respect to a parameter or an input is what backward must give. Each rank computes a share; the
shares of all ranks that communicate inside of the module add up to the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradcheck_dist.verify.attached import Attached, Injected, watched
from gradcheck_dist.verify.calls import Call
from gradcheck_dist.verify.capture import RootCall
from gradcheck_dist.verify.gradients import gradients
from gradcheck_dist.verify.inner import Base, Terms, random_direction
from gradcheck_dist.verify.observe import Observer
from gradcheck_dist.verify.pieces import cast, is_distributed, local, tensors_of
from gradcheck_dist.verify.preserve import set_random_state
from gradcheck_dist.verify.replay import training_precision
from gradcheck_dist.verify.twin import NotVerifiableError, Twin


@dataclass
class Function(Terms):
    """A module call in one dtype (None: training's own, with its autocast).

    `variables` by key: "input N" and names of parameters in the root; tied parameters are one variable.
    `within` surrounds forward.
    """

    twin: Twin
    root: RootCall
    call: Call
    dtype: torch.dtype | None
    variables: dict[str, Tensor] = field(default_factory=dict)
    share: list[float] = field(default_factory=list)
    within: Callable[[], contextlib.AbstractContextManager[None]] | None = None

    def __post_init__(self) -> None:
        self._leaves, self._spec = tree_flatten((self.call.args, self.call.kwargs))
        self._inputs: dict[int, str] = {}
        for index, leaf in enumerate(self._leaves):
            if isinstance(leaf, Tensor):
                self._leaves[index] = cast(leaf.detach(), self.dtype)
                if leaf.requires_grad and leaf.is_floating_point():
                    self._inputs[index] = f"input {len(self._inputs)}"
                    self.variables[self._inputs[index]] = self._leaves[index]
        self._names = self.twin.below(self.call.path)
        self._fixed: dict[int, Tensor] = {}
        self._key: dict[str, str] = {}
        first: dict[int, str] = {}
        for name in self._names.values():
            value = self.twin.values[name]
            key = self._key[name] = first.setdefault(id(value), name)
            if name in self.twin.trained and value.is_floating_point():
                if key not in self.variables:
                    self.variables[key] = _copied(value, self.dtype)
            elif id(value) not in self._fixed:
                self._fixed[id(value)] = _copied(value, self.dtype)
        self.cotangents = [self._cotangent(index) for index in range(len(self.call.outputs))]
        self.share = [1.0] * len(self.cotangents)

    @property
    def path(self) -> str:
        return self.call.path

    def key_of(self, name: str) -> str | None:
        """The variable that a parameter of the root is here; None when it is not trained."""
        key = self._key.get(name)
        return key if key in self.variables else None

    def _cotangent(self, index: int) -> Tensor | None:
        outputs = self.call.outputs
        gradient = outputs[index].gradient
        if gradient is not None:
            return cast(gradient, self.dtype)
        return None

    @contextlib.contextmanager
    def run(self, variables: Mapping[str, Tensor]) -> Iterator[list[Tensor]]:
        """The module's floating outputs, with some variables replaced; random numbers are those of the replay."""
        leaves = [
            leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves
        ]  # forward may change them
        for index, key in self._inputs.items():
            leaves[index] = _asking(variables.get(key, self.variables[key])).clone()
        args, kwargs = tree_unflatten(leaves, self._spec)
        values: dict[str, Tensor] = {}
        asking: dict[str, Tensor] = {}
        for name, full in self._names.items():
            key = self._key[full]
            if key in self.variables:
                values[name] = asking.setdefault(key, _asking(variables.get(key, self.variables[key])))
            else:
                value = self.twin.values[full]
                fixed = self._fixed[id(value)]
                values[name] = fixed.clone() if id(value) in self.twin.changing else fixed
        set_random_state(self.call.random)
        precision = (
            training_precision(self.root)
            if self.dtype is None
            else torch.autocast(self.root.device_type, enabled=False)
        )
        with self.twin.standing_in(self.call.path, values, self.dtype) as module:
            within = self.within() if self.within is not None else contextlib.nullcontext()
            with torch.enable_grad(), precision, within:  # as in training, also where nothing requires a gradient
                result = module(*args, **kwargs)
            found = [tensor for _, tensor in tensors_of(result)]
            if len(found) != len(self.cotangents):
                raise NotVerifiableError("run once more, it gives another number of tensors")
            yield found

    def terms(self, variables: Mapping[str, Tensor]) -> contextlib.AbstractContextManager[list[Tensor]]:
        return self.run(variables)

    def base(self) -> Base:
        """Forward and backward, watched; backward with what arrived and with zeros."""
        observer = Observer()
        outputs, gradient = self.differentiated(1.0, observer)
        _, added = self.differentiated(0.0, observer)
        return Base(outputs, gradient, added, observer.epsilon, observer.site)

    def attached(self) -> Attached | None:
        """The losses that are attached inside; None where there are none, or distributed ones."""
        first = Injected()
        self.differentiated(0.0, watch=first.watch)
        if not first.found:
            return None
        again = Injected()
        with watched(first.classes) as calls:
            self.differentiated(0.0, watch=again.watch)
        number = {ctx: index for index, (ctx, _) in enumerate(calls)}
        places = {(number[node], index): grad for (node, index), grad in again.found.items() if node in number}
        if any(
            is_distributed(part) for (call, index), grad in places.items() for part in (calls[call][1][index], grad)
        ):
            return None
        share = [1.0] * len(places)
        return Attached(self, first.classes, list(places), list(places.values()), share) if places else None

    def differentiated(
        self, scale: float, observer: Observer | None = None, watch: Callable[[list[Tensor]], None] | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor | None]]:
        """Outputs, and the gradients of the variables when `scale` times what arrived in training arrives.

        Args:
            watch: is given the outputs before backward begins.
        """
        leaves = {key: value.detach().clone().requires_grad_() for key, value in self.variables.items()}
        params = [*(leaf for key, leaf in leaves.items() if key in self.twin.values), *self._fixed.values()]
        before = list(map(_written, params))
        with observer or contextlib.nullcontext(), self.run(leaves) as outputs:
            if list(map(_written, params)) != before:
                raise NotVerifiableError("its forward changes its own parameters")
            for index, output in enumerate(outputs):
                if self.dtype is not None and output.dtype not in (self.dtype, torch.float32):
                    raise NotVerifiableError(f"computes in {output.dtype} whatever its input is")
                if self.cotangents[index] is None and self._use_random(index):
                    self.cotangents[index] = random_direction(output.detach(), f"{self.call.path} {index}")
            pairs = [
                (output, cotangent.to(output.dtype) * scale)
                for output, cotangent in zip(outputs, self.cotangents, strict=True)
                if cotangent is not None and output.requires_grad
            ]
            found: list[Tensor | None] = [None] * len(leaves)
            if watch is not None:
                watch([output for output, _ in pairs])
            if pairs and leaves:
                arriving = [cotangent for _, cotangent in pairs]
                found = gradients([output for output, _ in pairs], arriving, list(leaves.values()))
        return [output.detach() for output in outputs], dict(zip(leaves, found, strict=True))

    def _use_random(self, index: int) -> bool:
        """Where backward brought nothing at all, because the outputs are cut off behind, any gradient will do."""
        outputs = self.call.outputs
        return outputs[index].requires_grad and all(output.gradient is None for output in outputs)


def _written(param: Tensor) -> tuple[int, int]:
    """Changes when a tensor is written to, or given other memory (`.data = ...`)."""
    return param._version, local(param).data_ptr()


def _copied(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """In memory of its own: a forward may write to its parameters."""
    copy = cast(value, dtype)
    return copy.clone() if copy is value else copy


def _asking(variable: Tensor) -> Tensor:
    """A variable that asks for a gradient, as in training: a forward may hook what it makes of it."""
    return variable if variable.requires_grad else variable.detach().requires_grad_()
