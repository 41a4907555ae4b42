"""Activations that ranks combine in forward, and the gradients that come back through it.

Tensor, sequence, context and expert parallelism put collectives into the model, in a torch.autograd.Function of its
own with the conjugate operation in backward (Megatron-LM, arXiv 1909.08053, section 3: f and g). A function is watched
when it called a collective in forward, or was seen to call one in backward; a few elements of what went in, came out,
arrived and came back are recorded. Whether one is the transpose of the other is judged when the ranks are together.

A collective that is called on a tensor of the graph changes it in place, and no node knows of it: what arrives at the
tensor is what goes on. DTensors know what they do, and so do torch's own wrappers; what their local parts are told to
hand back is declared, and compared with what arrives (dtensor_locals.py).
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from gradcheck_dist.events import EXCHANGES_PROBE, MAX_EXCHANGES, MAX_EXCHANGES_ALIKE, SENT
from gradcheck_dist.probes.activations import dtensor_locals, functional
from gradcheck_dist.probes.activations.attention import Attentions, is_attention
from gradcheck_dist.probes.activations.attention import watch as watch_attention
from gradcheck_dist.probes.activations.exchange_calls import (
    BY_RANK,
    COLLECTIVES,
    DIRECT,
    Call,
    Calls,
    call_of,
    may_move_leaves,
)
from gradcheck_dist.probes.activations.exchange_events import (
    Arriving,
    End,
    Watched,
    coarsest,
    param_set,
    watch_arriving,
    watch_node,
    watch_own_part,
    watch_tensor,
)
from gradcheck_dist.probes.activations.exchange_layout import (
    WHOLE,
    boxes,
    each_whole,
    goes_on,
    is_swap_by_gather,
    num_of_each,
    one_to_one,
    take,
    unread,
)
from gradcheck_dist.probes.activations.own_parts import Gathers
from gradcheck_dist.probes.activations.ways import OF_MODULE
from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.backward.graph_leaves import leaves_in_front, shifted_leaves
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.probes.recording.sites import caller_site, defined_at
from gradcheck_dist.probes.recording.world import several_ranks
from gradcheck_dist.probes.reductions import gathered
from gradcheck_dist.probes.reductions.copies import ranks_of

MAX_RANKS = 64
_OWN_SEMANTICS = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed._composable")


class Exchanges:
    """Functions that communicate. `_backward` are those that do in backward, with the ranks; None: not always these."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._open: list[Calls] = []
        self.attentions = Attentions(recorder)
        self._backward: dict[type, tuple[int, ...] | None] = {}
        self.gathered: tuple[Call, Watched, Tensor] | None = None
        self.unplaced = Gathers()
        self._step = -1
        self._alike: Counter[tuple[Any, ...]] = Counter()
        self._indices: Counter[tuple[Any, ...]] = Counter()
        self._over_several: dict[type, int] = {}  # functions, and the last step in which they ran

    @property
    def notes(self) -> bool:
        """Whether it is noted which functions communicate."""
        return self.recorder.samples_upcoming and not self.recorder.suspended and several_ranks()

    @property
    def listens(self) -> bool:
        """Whether what they are given and give is read, too."""
        return self.recorder.impulses is None and self.notes

    def enter(self) -> Calls:
        """A function is about to be applied."""
        calls = Calls()
        self._open.append(calls)
        return calls

    def leave(self) -> None:
        calls = self._open.pop()
        if self._open:
            self._open[-1].join(calls)

    def sent(self, ranks: tuple[int, ...]) -> None:
        """The function that is being applied sends to a single one of these ranks, or receives."""
        self._open[-1].sent.add(ranks)

    def called(self, call: Callable[[], Call]) -> None:
        """A collective is called."""
        gathered: Any = self.recorder.gathered
        if gathered is not None and gathered.is_running:
            gathered.calls(call().reduction)
        if self._open:
            self._open[-1].add(call())
        elif self.recorder.current is not None:
            node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined]
            cls = getattr(type(node), "_forward_cls", None)
            if node is not None and node.name() == OF_MODULE:
                cls = None  # a module's hook acts behind its backward, where nobody looks
            if cls is not None and not cls.__module__.startswith(_OWN_SEMANTICS):
                ranks = call().ranks
                self._backward[cls] = ranks if self._backward.get(cls, ranks) == ranks else None

    def communicates(self, cls: type) -> bool:
        """Whether a function's backward was seen to call a collective."""
        return cls in self._backward

    def may_communicate(self, cls: type, args: tuple[Any, ...], results: Any, calls: list[Call]) -> bool:
        """Whether a function called a collective, was seen to do so in backward, or may in this one."""
        return bool(calls) or cls in self._backward or _hands_on(args, results)

    @property
    def inside(self) -> bool:
        """Whether a function is being applied."""
        return bool(self._open)

    @property
    def runs(self) -> bool:
        """Whether a function is being applied, or some backward is under way."""
        return self.inside or self.recorder.current is not None

    def number(self, ranks: tuple[int, ...], *alike: Any, sent: bool = False) -> int | None:
        """The next number in a group; None where as many were recorded as shall be. What sends to single ranks has
        numbers of its own: only some of the ranks may do it."""
        step = self.recorder.upcoming_step
        if step != self._step:
            self._step = step
            self._alike.clear()
            self._indices.clear()
        self._alike[alike] += 1
        if self._alike[alike] > MAX_EXCHANGES_ALIKE or self._indices.total() >= MAX_EXCHANGES:
            return None
        self._indices[ranks, sent] += 1
        return self._indices[ranks, sent] - 1

    def group_of(self, cls: type, calls: list[Call]) -> tuple[int, ...] | None:
        if not calls and cls not in self._backward:
            return (dist.get_rank(),)
        groups = {call.ranks for call in calls} or {self._backward[cls] or ()}
        ranks = groups.pop()
        return ranks if not groups and 1 < len(ranks) <= MAX_RANKS else None

    def not_followed(self, cls: type, calls: list[Call], leaves: Sequence[Tensor], args: Sequence[Any]) -> None:
        """Note a function that communicates over several groups (a grid of tensor-parallel ranks), and parameters that
        it combines so."""
        if len({call.ranks for call in calls}) < 2:
            return
        self._over_several[cls] = self.recorder.upcoming_step
        if leaves and may_move_leaves(calls, args):
            gathered.not_followed(self.recorder, cls, leaves)

    def tell(self) -> None:
        """The step ends: what of it is not followed."""
        for cls, step in self._over_several.items():
            if step == self.recorder.step:
                reason = f"{cls.__name__} communicates over several groups of ranks: what it combines is not followed"
                self.recorder.status(EXCHANGES_PROBE, False, reason)

    def learnt(self, cls: type, told: Watched) -> Watched:
        """What is told of a function that nobody knew to communicate before backward ran through it."""
        ranks = self._backward.get(cls) or ()
        if len(told.group) > 1 or not 1 < len(ranks) <= MAX_RANKS:
            return told
        return told._replace(group=ranks, number=told.number + MAX_EXCHANGES)  # no other one's number in that group


def install(recorder: Recorder, patches: Patches) -> None:
    exchanges = recorder.exchanges = Exchanges(recorder)

    def watched(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            signature = inspect.signature(original)

            @functools.wraps(original)
            def collective(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling() or not exchanges.notes:
                    return original(*args, **kwargs)
                call = functools.partial(call_of, name, signature, args, kwargs)
                note(recorder, exchanges, call)
                before = begins(recorder, exchanges, call) if name in DIRECT and exchanges.listens else None
                result = original(*args, **kwargs)
                if before is not None and result is None:  # else it is under way
                    is_over(recorder, exchanges, before, call)
                return result

            return collective

        return make

    for name in COLLECTIVES:
        for module in (distributed_c10d, dist):
            if hasattr(module, name):
                patches.replace(module, name, watched(name))
    runs = functools.partial(note, recorder, exchanges)
    functional.install(patches, lambda: exchanges.notes and exchanges.runs, runs)
    for name in BY_RANK:
        patches.replace(dist.ProcessGroup, name, functools.partial(_watch_sending, recorder, exchanges))
    patches.on_restore(lambda: setattr(recorder, "exchanges", None))

    def begin(recorder: Recorder, _: Any, roots: Sequence[Root], *__: Any) -> None:
        look_back(recorder, exchanges)
        look_for_own_parts(recorder, exchanges, roots)

    autograd.OPEN_LISTENERS.append(begin)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))


def _watch_sending(recorder: Recorder, exchanges: Exchanges, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sending(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if exchanges.inside and exchanges.listens:
            note_sent(recorder, exchanges, group)
        return original(group, *args, **kwargs)

    return sending


@guarded("exchanges")
def note_sent(_: Recorder, exchanges: Exchanges, group: dist.ProcessGroup) -> None:
    exchanges.sent(tuple(ranks_of(group)))


@guarded("exchanges")
def note(recorder: Recorder, exchanges: Exchanges, call: Callable[[], Call]) -> None:
    exchanges.called(call)
    look_back(recorder, exchanges)


@guarded("exchanges")
def begins(recorder: Recorder, exchanges: Exchanges, make: Callable[[], Call]) -> Tensor | None:
    """Some elements of a tensor of the graph that a collective is about to take; None for any other. What is gathered
    may be a copy of one that is detached: whether it is shows when the own part is put back."""
    call = make()
    tensor = call.tensor
    inside = exchanges.inside or recorder.current is not None
    if inside or not isinstance(tensor, Tensor) or not is_plain(tensor) or not tensor.is_floating_point():
        return None
    of_graph = tensor.grad_fn is not None and (torch.is_grad_enabled() or call.parts is None)
    if not of_graph and (call.parts is None or tensor.numel() < 2 or isinstance(tensor, nn.Parameter)):
        return None  # a number that ranks tell one another, or a parameter's part
    return take([tensor], [WHOLE])[0]


@guarded("exchanges")
def is_over(recorder: Recorder, exchanges: Exchanges, before: Tensor, called: Callable[[], Call]) -> None:
    """A collective took a tensor of the graph. One that changed it in place hands on what arrives; a gather hands back
    nothing, and a rank that wants its own part's gradient puts that in the place of the copy, which is seen later."""
    call = called()
    if not 1 < len(call.ranks) <= MAX_RANKS or call.tensor is None:
        return
    counts = (len(before),)
    dtype = coarsest([call.tensor])
    if call.parts is not None:
        stopped = not torch.is_grad_enabled() or call.tensor.grad_fn is None
        told = Watched("", call.ranks, 0, counts, (), (call.name,), None, caller_site(), dtype, stopped=stopped)
        exchanges.gathered = (call, told, before)
    elif (index := exchanges.number(call.ranks, call.name)) is not None:
        told = Watched("", call.ranks, index, counts, counts, (call.name,), None, caller_site(), dtype)
        after = take([call.tensor], [WHOLE])[0]
        watch_tensor(recorder, call.tensor, told, before, after)


@guarded("exchanges")
def look_back(recorder: Recorder, exchanges: Exchanges) -> None:
    """Whether the last all-gather's own part was put back."""
    if exchanges.gathered is None:
        return
    (call, told, before), exchanges.gathered = exchanges.gathered, None
    own = (call.parts or [])[call.ranks.index(dist.get_rank())]
    if not isinstance(own, Tensor) or not own.requires_grad or own.shape != getattr(call.tensor, "shape", None):
        exchanges.unplaced.add_call(call, told, before)
        return
    index = exchanges.number(call.ranks, call.name)
    if index is not None:
        watch_tensor(recorder, own, told._replace(put_back=True, number=index), before, before[:0])


@guarded("exchanges")
def look_for_own_parts(recorder: Recorder, exchanges: Exchanges, roots: Sequence[Root]) -> None:
    """A backward pass begins: whether an all-gather's own part was joined with copies of the others'."""
    for node, output, (_, _, _, told, before) in exchanges.unplaced.put_back(roots):
        index = exchanges.number(told.group, *told.collectives)
        if index is not None:
            watch_own_part(recorder, node, output, told._replace(put_back=True, number=index), before)


@guarded("exchanges")
def watch(
    recorder: Recorder, exchanges: Exchanges, cls: type, args: tuple[Any, ...], results: Any, calls: Calls
) -> None:
    """A function was applied: watch what arrives at its outputs and what its backward gives for its inputs."""
    if exchanges.listens and (told_of := _by_torch(cls)) is not None:
        for arriving in told_of(exchanges, args, results):
            watch_arriving(recorder, results, *arriving)
        return
    if not exchanges.listens or not (calls.sent or exchanges.may_communicate(cls, args, results, calls)):
        if exchanges.notes and any(isinstance(arg, nn.Parameter) for arg in args) and may_move_leaves(calls, args):
            gathered.not_followed(recorder, cls)
        return
    tensors = [arg for arg in args if isinstance(arg, Tensor)]  # as autograd numbers the inputs
    given = [(place, one) for place, one in enumerate(tensors) if one.requires_grad]
    found = results if isinstance(results, tuple | list) else (results,)
    made = [one for one in found if isinstance(one, Tensor) and one.grad_fn is not None and one.is_floating_point()]
    ranks = exchanges.group_of(cls, calls)
    sent = bool(calls.sent) and not calls
    if sent:
        ranks = calls.sent.pop() if len(calls.sent) == 1 else None
    leaves = [one for _, one in given if one.is_leaf]
    if ranks is None:
        exchanges.not_followed(cls, calls, leaves, tensors)
    waits = len(made) == len(calls) == 1 and functional.on_its_way(made[0])
    if ranks is None or not given or not made or not all(map(is_plain, tensors if waits else [*tensors, *made])):
        return
    if cls.__module__.startswith(_OWN_SEMANTICS) or len({id(one.grad_fn) for one in made}) > 1:
        return
    inputs = [one for _, one in given]
    if not sent and not waits and gathered.watch(recorder, cls, ranks, inputs, made, bool(calls)):
        return
    if not calls and (own := goes_on(given, made)) is not None:
        given, inputs = [own], [own[1]]
        leaves = [one for one in inputs if one.is_leaf]
    if leaves and (len(ranks) > 1 or len(inputs) > 1):
        if may_move_leaves(calls, tensors):
            gathered.not_followed(recorder, cls, leaves)
        return  # a parameter that is gathered: its gradient is reduced, as the trainer means it
    if not waits and is_attention(inputs, made):
        watch_attention(recorder, exchanges.attentions, cls, ranks, given, made[0], coarsest([*inputs, made[0]]))
        return
    splits = next((call.splits for call in calls if call.splits is not None), None)
    if splits is None and is_swap_by_gather([call.name for call in calls], inputs, made):
        splits = [], []
    parts = each_whole(inputs, made) if sent else boxes(inputs, made, len(ranks), splits)
    if parts is None or len(ranks) > MAX_RANKS:
        return
    index = exchanges.number(ranks, cls, sent=sent)
    if index is None:
        return
    num = num_of_each(parts)
    before, input_counts = take(inputs, parts[0], num)
    if parts[0] == [WHOLE]:
        before = calls.as_given(inputs[0], before)
    after, output_counts = unread(made, parts[1], num) if waits else take(made, parts[1], num)
    names = (SENT,) if sent else tuple(dict.fromkeys(call.name for call in calls))
    written = defined_at(getattr(cls, "backward", None))
    params = param_set(recorder, leaves or [leaf for one in inputs for leaf in leaves_in_front(one)])
    shifted = None if leaves else param_set(recorder, [leaf for one in inputs for leaf in shifted_leaves(one)])
    dtype = coarsest([*inputs, *made])
    told = Watched(
        cls.__name__, ranks, index, input_counts, output_counts, names, written, caller_site(), dtype, params,
        of_leaf=bool(leaves), shifted=shifted,
    )  # fmt: skip
    ends = (
        End(tuple(place for place, _ in given), tuple(tuple(one.shape) for one in inputs), parts[0]),
        End(tuple(one.output_nr for one in made), tuple(tuple(one.shape) for one in made), parts[1]),
    )
    watch_node(recorder, made[0].grad_fn, functools.partial(exchanges.learnt, cls, told), before, after, ends)


def _by_torch(cls: type) -> Callable[[Exchanges, tuple[Any, ...], Any], list[Arriving]] | None:
    """What is to be told of a function of torch's that documents its backward; None for any other."""
    if (name := dtensor_locals.known(cls)) is not None:
        return functools.partial(dtensor_locals.watched, name)
    known = functional.known(cls)
    return None if known is None else functools.partial(functional.watched, *known)


def _hands_on(args: tuple[Any, ...], results: Any) -> bool:
    """Whether a function gives its only differentiable input on as it is."""
    pair = one_to_one(args, results)
    return pair is not None and pair[0].data_ptr() == pair[1].data_ptr()
