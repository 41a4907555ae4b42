"""Who is who: parameters, their names, sets of them, and the wrappers around them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import count

import msgspec
import torch
from torch import Tensor, nn

from gradcheck_dist.events import UNNAMED, AnyRecord, Param, ParamSet, Site, Wrapper
from gradcheck_dist.probes.parameters.budget import BUDGET_BYTES, SamplingPlan, sampling_plan
from gradcheck_dist.probes.parameters.identity import embeddings_of, fingerprint, is_expert, partitioned
from gradcheck_dist.probes.parameters.identity import start as first_values
from gradcheck_dist.probes.parameters.in_use import InUse
from gradcheck_dist.probes.parameters.plans import Layout as Layout
from gradcheck_dist.probes.parameters.plans import LocalPlan as LocalPlan
from gradcheck_dist.probes.parameters.plans import ParamInfo as ParamInfo
from gradcheck_dist.probes.parameters.plans import Plans
from gradcheck_dist.probes.parameters.regions import Finder, Region, gradient_of, whole
from gradcheck_dist.probes.parameters.stand_ins import stands_in

PARTED = "(Shard(dim=0),)"
"""How torch's sharded tensors say that ranks hold parts of one."""
_WRAPPER_COMPONENTS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def clean_name(name: str) -> str:
    """A fully qualified name without the components that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_COMPONENTS)


def originals(info: ParamInfo) -> list[ParamInfo]:
    """The model's parameters that an optimizer's tensor stands for: itself, or those of which it holds something."""
    return [region.info for region in info.regions if region.length] if info.regions else [info]


class Registry(Plans):
    """Tables of parameters, plans, parameter sets and wrappers; every new row goes out through `write`."""

    def __init__(self, write: Callable[[AnyRecord], None], sample_size: int) -> None:
        super().__init__(write)
        self._sample_size = sample_size
        self._by_param: dict[int, ParamInfo] = {}
        self._copies: dict[int, ParamInfo] = {}
        self._held: Counter[int] = Counter()  # by id, elements of which there are copies, when so many were known
        self._counted = -1
        self._looked_up: set[int] = set()
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}  # by id, what modules compute with, and whose it is
        self._tables: dict[int, nn.Parameter | weakref.ref[Tensor]] = {}  # by id, tensors of which rows were looked up
        self._written: dict[int, Param] = {}
        self._trained: set[int] = set()  # ids of parameters that were trained when they were last looked at
        self._owned: set[int] = set()  # parameters that an optimizer owns itself
        self._owned_inside: set[int] = set()  # and one that steps inside of another's step
        self._finder = Finder()
        self._in_use = InUse()
        self._names: set[tuple[int | None, str]] = set()
        self._sets: dict[tuple[int, ...], int] = {}
        self._set_ids = count()  # of threads that reduce at once, two may write one set: either tells it
        self._sets_asked: dict[tuple[int, ...], int] = {}  # the same, by what was asked for
        self._asked: dict[tuple[bool, tuple[int, ...]], list[ParamInfo]] = {}
        self._wrappers: dict[int, int] = {}
        self._kept_alive: list[object] = []
        self._plan = SamplingPlan(sample_size)
        self._round = 0
        self.budget_bytes = BUDGET_BYTES
        self.rotates = False
        self.known_modules: dict[int, nn.Module] = {}
        self.wrapper_sites: dict[int, Site | None] = {}
        self.wrappers_built: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the DDP instances that are there
        self.wrapper_trains: dict[int, set[int]] = {}  # ids of what a DDP instance was made to reduce, and holds

    def find(self, param: Tensor) -> ParamInfo | None:
        return self._by_param.get(id(param)) or self._copies.get(id(param))

    def of_id(self, key: int) -> ParamInfo | None:
        """What is known of the tensor whose `id` this is."""
        return self._by_param.get(key) or self._copies.get(key)

    def find_parts(self) -> None:
        """Parameters may have become parts, as which their gradients are about to be reduced."""
        if parts := self._in_use.in_parts():
            self.adopt(parts)

    def read_by_optimizer(self, param: Tensor) -> ParamInfo | None:
        """What one of an optimizer's tensors is: a parameter, or parts of some, as which it was adopted."""
        info = self.find(param)
        return self._copies.get(id(param), info) if info is not None and self._is_in_parts(param, info) else info

    def is_read_in_parts(self, info: ParamInfo) -> bool:
        """Whether a parameter is, where an optimizer reads it, this rank's part of what it is while it is used."""
        return id(info.param) in self._copies

    @staticmethod
    def _is_in_parts(param: Tensor, info: ParamInfo) -> bool:
        """Whether a parameter that is whole while it is used has another size now."""
        return not info.regions and info.param is param and param.numel() != info.numel

    def knows(self, ids: Iterable[int]) -> bool:
        """Whether one of these Python objects is a parameter, or an optimizer's copy."""
        return any(one in self._by_param or one in self._copies for one in ids)

    def infos(self) -> list[ParamInfo]:
        return list(self._by_param.values())

    @property
    def num_known(self) -> int:
        """Parameters and copies."""
        return len(self._by_param) + len(self._copies)

    def copies(self) -> list[ParamInfo]:
        """Tensors that optimizers own instead of the model's parameters."""
        return list(self._copies.values())

    def num_held(self, info: ParamInfo) -> int:
        """How many of a parameter's elements this rank's optimizers own copies of: a part, where parameters are shards
        while nobody uses them; 0 where they own the parameter itself."""
        if self._counted != self.num_known:
            self._counted = self.num_known
            parts = {(part.info.id, part.start): part.length for copy in self.copies() for part in copy.regions}
            self._held = Counter()
            for (id, _), length in parts.items():
                self._held[id] += length
        return self._held[info.id]

    def asked_before(self, params: list[Tensor], *, owner: bool) -> list[ParamInfo] | None:
        """The answer to a question of an earlier step, as long as no parameter has come since. Not to be changed."""
        return self._asked.get((owner, tuple(map(id, params))))

    def answered(self, params: list[Tensor], infos: list[ParamInfo], *, owner: bool) -> list[ParamInfo]:
        """Remember an answer; the parameters stay alive, and so do their addresses."""
        self._asked[owner, tuple(map(id, params))] = infos
        return infos

    def adopt(self, params: Iterable[Tensor], *, owner: bool = False, inside: bool = False) -> None:
        """Find out which of an optimizer's tensors are copies of parameters. `owner`: it is the optimizer that asks;
        `inside`: in a step of another one, which may own the parameters and hand their gradients on."""
        foreign = []
        for param in params:
            info = self.find(param)
            if info is None or self._is_in_parts(param, info):
                foreign.append(param)
            if info is not None and owner:
                self._owned.add(info.id)
        for _ in range(2):  # what holds constants alone is known once others are
            foreign = [param for param in foreign if not self._holds_parts(param)]
        self._adopt_empty(foreign)
        foreign = [param for param in foreign if self.find(param) is None]
        if not foreign:
            return
        owned = self._owned_inside if inside else self._owned
        candidates = [info for info in self.infos() if info.param.requires_grad and info.id not in owned]
        gradients = [([whole(info)], buffer) for info in candidates if (buffer := gradient_of(info)) is not None]
        for index, regions in self._finder.find(foreign, candidates, gradients, self._parts(owned)).items():
            self.add_copy(foreign[index], regions)

    def _adopt_empty(self, foreign: Iterable[Tensor]) -> None:
        """A shard of which this rank has nothing was copied as well: which one is which makes no difference."""
        empty = [copy.regions for copy in self._copies.values() if copy.regions and not copy.param.numel()]
        nothing = [param for param in foreign if self.find(param) is None and not param.numel()]
        for param, regions in zip(nothing, empty, strict=False):
            self.add_copy(param, regions)

    def _parts(self, owned: Collection[int]) -> Iterator[tuple[tuple[Region, ...], Tensor]]:
        """Tensors that hold parts of parameters and that no optimizer owns: others may be copies of these."""
        for copy in self._copies.values():
            if copy.regions and copy.id not in owned and copy.param.numel():
                yield copy.regions, copy.param.detach()

    def steps_inside(self, params: Iterable[Tensor]) -> None:
        """An optimizer that steps inside of another's step owns these itself."""
        self._owned_inside.update(info.id for param in params if (info := self.find(param)) is not None)

    def _holds_parts(self, param: Tensor) -> bool:
        """Whether an optimizer's tensor turns out to hold parts of parameters that are whole only while in use."""
        parts = self._in_use.find(param, self.find(param))
        if parts:
            self.add_copy(param, parts)
        return bool(parts)

    def add_copy(self, param: Tensor, regions: Iterable[Region]) -> ParamInfo:
        """An optimizer's tensor in which parameters of the model, or parts of them, lie."""
        info = ParamInfo(-1 - len(self._copies), "copy", param, None, 0)
        info.regions = tuple(regions)
        self._copies[id(param)] = info
        self._asked.clear()
        return info

    def add_root(self, root: nn.Module, stage: int | None = None) -> Iterator[ParamInfo]:
        """Name all parameters below a root module; yields those that are new.

        Parameters on the meta device and lazy ones are left for later: real ones will take their place (to_empty, the
        first forward). So are the stand-ins of torch.func's transforms, which hold no values.
        """
        for module in root.modules():
            if not any(stands_in(param) for param in module.parameters()):
                self.known_modules[id(module)] = module
        fallback, looked_up = type(root).__name__, embeddings_of(root)
        named = [(name, self._lent.get(id(param), (param,))[0]) for name, param in root.named_parameters()]
        self._trained.update(id(param) for _, param in named if param.requires_grad and not stands_in(param))
        self._plan = sampling_plan(len(self._trained), self._sample_size, self.budget_bytes)
        self.rotates |= self._plan.period > 1
        for name, param in named:
            if self.find(param) is None and not stands_in(param):
                yield self._add(clean_name(name), param, stage, fallback, id(param) in looked_up)

    def lends(self, param: Tensor, lent: Tensor) -> None:
        """A module may hold `lent` where `param` is its parameter."""
        self._lent[id(lent)] = param, lent

    def add_unnamed(self, param: Tensor) -> ParamInfo:
        """A parameter that an optimizer holds and no forward has shown yet."""
        return self._add(f"{UNNAMED}{len(self._by_param)}", param, None, "unnamed")

    def add_elsewhere(self, name: str, stand_in: Tensor) -> ParamInfo:
        """A parameter that lies inside of other tensors; `stand_in` has its shape and no values."""
        return self._add(name, stand_in, None, "flat")

    def as_part(self, leaf: Tensor, length: int, start: int, held: int) -> ParamInfo | None:
        """The parameter of shape (length,) of which `leaf` holds `held` elements from `start` on. None where the leaf
        was sampled already as a parameter of its own."""
        stand_in = nn.Parameter(torch.empty((length,), dtype=leaf.dtype, device="meta"), leaf.requires_grad)
        info = self._by_param.get(id(leaf))
        if info is None:
            info = self.add_elsewhere(f"{UNNAMED}{len(self._by_param)}", stand_in)
        elif info.plans or info.plain is not None or info.regions:
            return None
        else:
            self._by_param = {id(stand_in) if one is info else key: one for key, one in self._by_param.items()}
            info.shows(stand_in, len(info.positions))
            self._write_param(info, info.id in self._looked_up)
        self.add_copy(leaf, [Region(info, start, 0, held)])
        self.holds(info, leaf, leaf)
        return info

    def holds(self, info: ParamInfo, part: Tensor, owner: Tensor) -> None:
        """What this rank holds of a parameter that ranks shard and that has no memory of its own: values tell whether
        other groups of ranks shard another tensor of that name (tensor-parallel layers, experts), and so does what its
        module says of `owner`, in which the part lies."""
        began = first_values(part, len(info.positions))
        told = {"placements": PARTED, "start": began, "partitioned": partitioned(owner), "expert": is_expert(owner)}
        self._written[info.id] = msgspec.structs.replace(self._written[info.id], **told)
        self._write(self._written[info.id])

    def _add(self, name: str, param: Tensor, stage: int | None, fallback: str, looked_up: bool = False) -> ParamInfo:
        while (stage, name) in self._names:
            name = f"{fallback}.{name}"
        self._names.add((stage, name))
        info = ParamInfo(len(self._by_param), name, param, stage, self._plan.elements)
        info.period = self._plan.period
        self._take_turn(info)
        self._by_param[id(param)] = info
        if param.requires_grad:
            self._trained.add(id(param))
        self._asked.clear()
        self._write_param(info, looked_up)
        return info

    def is_whole(self, info: ParamInfo) -> None:
        """A parameter is whole that was empty, or a part, when it was first seen."""
        info.shows(info.param, self._plan.elements)
        info.plans.clear()
        self._in_use.keep(info)
        self._write_param(info, info.id in self._looked_up)

    def write_again(self, info: ParamInfo) -> None:
        """A parameter is trained now that was frozen when it was first written."""
        self._asked.clear()
        self._trained.add(id(info.param))
        self._write_param(info, info.id in self._looked_up)

    def is_table(self, weight: Tensor) -> None:
        """Rows of a tensor were looked up, whatever module it lies in."""
        if self._is_known_table(weight):
            return
        # Module.to cannot swap a parameter that somebody holds weakly; what is computed for a call is to be freed.
        self._tables[id(weight)] = weight if isinstance(weight, nn.Parameter) else weakref.ref(weight)
        info = self.find(weight)
        if info is not None and info.id not in self._looked_up and info.id in self._written:
            self._looked_up.add(info.id)
            self._write(msgspec.structs.replace(self._written[info.id], looked_up=True))

    def _is_known_table(self, weight: Tensor) -> bool:
        known = self._tables.get(id(weight))
        return (known() if isinstance(known, weakref.ref) else known) is weight

    def _write_param(self, info: ParamInfo, looked_up: bool) -> None:
        param = info.param
        looked_up = looked_up or self._is_known_table(param)
        if looked_up:
            self._looked_up.add(info.id)
        written = self._written[info.id] = Param(
            id=info.id,
            name=info.name,
            shape=info.shape,
            dtype=str(param.dtype).removeprefix("torch."),
            num_positions=len(info.positions),
            stage=info.stage,
            placements=str(getattr(param, "placements", "")),
            requires_grad=param.requires_grad,
            fingerprint=fingerprint(param, info.positions),
            sampled_every=info.period,
            start=first_values(param, len(info.positions)),
            looked_up=looked_up,
            partitioned=partitioned(param),
            expert=is_expert(param),
        )
        self._write(written)

    def is_as_begun(self, info: ParamInfo) -> bool:
        """Whether a parameter has the values, at sampled positions, with which it was first seen. Reads them on the
        host."""
        return first_values(info.param, len(info.positions)) == self._written[info.id].start

    def next_round(self) -> None:
        """Another step is recorded: other parameters have their turn."""
        self._round += 1
        for info in self._by_param.values():
            self._take_turn(info)

    def _take_turn(self, info: ParamInfo) -> None:
        info.active = self._round % info.period == info.id % info.period

    def param_set(self, infos: list[ParamInfo]) -> int:
        """The id of a set of parameters, writing it on first use."""
        asked = tuple([info.id for info in infos])
        found = self._sets_asked.get(asked)
        if found is None:
            key = tuple(dict.fromkeys(original.id for info in infos for original in originals(info)))
            found = self._sets.get(key)
            if found is None:
                found = next(self._set_ids)
                self._write(ParamSet(id=found, params=key))
                found = self._sets.setdefault(key, found)
            self._sets_asked[asked] = found
        return found

    def wrapper(self, owner: object, impl: str, name: str, group: tuple[int, ...], **groups: tuple[int, ...]) -> int:
        """The id of a data-parallel wrapper, writing it on first use."""
        found = self._wrappers.get(id(owner))
        if found is None:
            found = self._wrappers[id(owner)] = len(self._wrappers)
            self._kept_alive.append(owner)
            site = self.wrapper_sites.get(id(owner))
            self._write(Wrapper(id=found, impl=impl, name=name, group=group, site=site, **groups))
        return found
