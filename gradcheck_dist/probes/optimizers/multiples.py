"""What gradients were multiplied into, and whether that took their place: `p.grad = p.grad / n`, `p.grad.data = ...`.

A product is noted as it is made, where its line is known, and kept weakly: it may be thrown away (a norm is computed of
it). It counts from when it is seen to be a parameter's gradient, by its storage, which stays where the tensor goes
(`.data =`, a view): an address may be another one's by then.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gradcheck_dist.probes.parameters.places import address_of
from gradcheck_dist.probes.parameters.plans import ParamInfo
from gradcheck_dist.probes.parameters.regions import gradient_of

MOST_PRODUCTS = 8
"""Of one gradient that are kept in mind at once."""


@dataclass(eq=False)
class Multiple:
    """`made` out of a gradient, or of another product of its own (`p.grad / n * m`)."""

    info: ParamInfo
    made: weakref.ref[Tensor]
    storage: StorageWeakRef
    address: int
    of: Multiple | None
    infos: dict[int, ParamInfo]
    """To whose gradients the line did this, as far as is known; shared by its calls."""

    @classmethod
    def of_made(cls, info: ParamInfo, made: Tensor, of: Multiple | None, infos: dict[int, ParamInfo]) -> Multiple:
        storage = StorageWeakRef(getattr(made, "_local_tensor", made).untyped_storage())
        return cls(info, weakref.ref(made), storage, address_of(made), of, infos)

    def is_in(self, kept: Tensor) -> bool:
        """Whether a tensor of this rank lies where this was made."""
        return address_of(kept) == self.address and kept.untyped_storage()._cdata == self.storage.cdata

    def forget(self) -> None:
        """It never becomes the gradient."""
        self.infos.pop(self.info.id, None)

    def goes_to(self, owner: ParamInfo) -> None:
        """It is another one's: of the copy that an optimizer steps."""
        self.forget()
        self.infos[owner.id] = owner
        if self.of is not None:
            self.of.goes_to(owner)


class Multiples:
    """Those of a step that are no gradients yet.

    Args:
        whose: whose gradient a tensor is, if anybody's.
    """

    def __init__(self, whose: Callable[[Tensor], ParamInfo | None]) -> None:
        self._whose = whose
        self._open: defaultdict[int | None, list[Multiple]] = defaultdict(list)  # by parameter
        self._by_id: weakref.WeakValueDictionary[int, Multiple] = weakref.WeakValueDictionary()  # of what was made
        self._latest: int | None = None

    def product(self, tensor: Tensor) -> Multiple | None:
        """What this tensor is, if it is no gradient yet."""
        found = self._by_id.get(id(tensor))
        if found is None or found.made() is not tensor:
            return None
        self._confirm(found.info.id)
        return found if found in self._open.get(found.info.id, ()) else None

    def add(self, multiple: Multiple, made: Tensor) -> None:
        self._latest = multiple.info.id
        waiting = self._open[self._latest]
        waiting.append(multiple)
        self._by_id[id(made)] = multiple
        if len(waiting) > MOST_PRODUCTS:
            waiting.pop(0).forget()

    def confirm_for(self, info: ParamInfo) -> None:
        """Look whether this parameter's gradient, and the one that was last multiplied, are such products by now."""
        for param in {info.id, self._latest}:
            self._confirm(param)

    def confirm(self) -> None:
        """Look which gradients are by now."""
        for param, waiting in list(self._open.items()):
            self._confirm(param)
            for one in waiting if param in self._open else ():
                if (made := one.made()) is not None and (owner := self._whose(made)) is not None:
                    one.goes_to(owner)
                    self.taken(one)
                    break

    def _confirm(self, param: int | None) -> None:
        waiting = self._open.get(param, [])
        kept = gradient_of(waiting[0].info) if waiting else None
        now = next((one for one in reversed(waiting) if kept is not None and one.is_in(kept)), None)
        if now is not None:
            self.taken(now)

    def taken(self, multiple: Multiple) -> None:
        """It is the gradient now; others were made of one that is no more."""
        made_of, one = set[Multiple](), cast(Multiple | None, multiple)
        while one is not None:
            made_of.add(one)
            one = one.of
        for other in self._open.pop(multiple.info.id, ()):
            if other not in made_of:
                other.forget()

    def end(self) -> None:
        """A step is over: what is no gradient now will be none."""
        self.confirm()
        for waiting in self._open.values():
            for one in waiting:
                one.forget()
        self._open.clear()
        self._by_id.clear()
