"""What `--verify` found in a step: wrong modules as groups that share a cause, and what it could not decide."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gradcheck_dist.diagnosis.finding import Unverified
from gradcheck_dist.diagnosis.words import in_short
from gradcheck_dist.events import Event, GradientCheck, NotChecked
from gradcheck_dist.ledger.like_copies import are_joined, got_alike
from gradcheck_dist.ledger.tracks import ParamKey, StepData
from gradcheck_dist.wording import numbered, plural

ALL_PARAMETERS = "all parameters"
NOTHING_VERIFIED = "verify: no module's backward could be checked"
SUMMAND = "is right only as a summand of"
"""In reasons that leave a verdict open, the second of parameters."""


@dataclass(frozen=True)
class Wrong:
    """Checks that came out wrong in the same way at one forward: (rank, check), the plainest first."""

    checks: tuple[tuple[int, GradientCheck], ...]

    @property
    def first(self) -> GradientCheck:
        return self.checks[0][1]

    @property
    def modules(self) -> list[str]:
        return sorted({check.module for _, check in self.checks})

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for rank, _ in self.checks}))


_PLAIN = ("scaled", "cut", "constant", "partial", "flat", "apart", "reversed", "redrawn", "stopped", "other")


def wrong_modules(events: Mapping[int, Iterable[Event]]) -> list[Wrong]:
    """The wrong checks of a step, one entry for each forward that is written wrongly.

    What a module does to several parameters and inputs is one fault; the plainest view of it stands first: a factor
    tells more than a mixture with a path that is right.
    """
    groups: dict[tuple[object, ...], list[tuple[int, GradientCheck]]] = defaultdict(list)
    for rank, check in _checks(events):
        if check.outcome == "wrong":
            place: tuple[object, ...] = (check.site.file, check.site.line) if check.site else (check.module,)
            apart = check.target if check.target in ("leaf", "boundary", "outside") else _kind(check)
            if check.function:
                apart, place = (
                    "function",
                    (check.function, str(check.called_at), check.shape, f"{check.factor or 0:.4g}"),
                )
            if apart == "leaf":  # one hook function on many parameters
                place = (f"{check.factor:.3g}",)
            groups[apart, *place].append((rank, check))
    return [Wrong(tuple(sorted(group, key=lambda one: (_plainness(one[1]), one[0])))) for group in groups.values()]


def _kind(check: GradientCheck) -> str:
    """What one forward may do beside being wrong, and is told apart."""
    if check.shape in ("stopped", "cut") and check.reason:
        return "stopped"
    return check.shape if check.shape in ("apart", "reversed", "redrawn") else ""


def _plainness(check: GradientCheck) -> tuple[int, bool, float]:
    share = abs((check.error or 0.0) / check.numerical) if check.numerical else 1.0
    if check.function and check.factor and check.observed is not None and check.numerical:
        share += abs(
            check.observed / check.numerical / check.factor - 1
        )  # what passes by the function is no part of it
    return (_PLAIN.index(check.shape) if check.shape in _PLAIN else len(_PLAIN), check.factor is None, share)


def was_verified(events: Mapping[int, Iterable[Event]]) -> bool:
    """Whether any module's backward was found right or wrong."""
    return any(check.outcome in ("right", "wrong") for _, check in _checks(events))


def parameters_of(wrong: Wrong, known: Iterable[ParamKey]) -> list[str]:
    """Names of the parameters whose gradients the wrong checks were about, as far as the trace knows them."""
    names = {name for _, name in known}
    found: set[str] = set()
    for _, check in wrong.checks:
        below = any(name.startswith(f"{check.module}.") for name in names)  # else it is the root, named by its type
        full = f"{check.module}.{check.name}" if below else check.name
        if check.name == ALL_PARAMETERS:
            found |= names
        elif check.target in ("parameter", "leaf"):
            found |= {name for name in names if name.split(" ")[0] == full}
        elif check.target == "parameters":
            found |= {name for name in names if name.startswith(f"{full}.")}
    return sorted(found)


def not_verified(events: Mapping[int, Iterable[Event]]) -> list[str]:
    """What `--verify` could not decide, in words, alike reasons together."""
    checks = list(_checks(events))
    if not checks:
        return []
    places: dict[str, list[str]] = defaultdict(list)
    for _, check in checks:
        if check.outcome == "undetermined":
            name = f"{check.module} ({check.target} {check.name})" if check.name else check.module
            if name not in places[check.reason]:
                places[check.reason].append(name)
    return [f"verify: undetermined for {in_short(names)}: {reason}" for reason, names in places.items()]


def left_out(events: Mapping[int, Iterable[Event]]) -> list[Unverified]:
    """What `--verify` did not check, each with its reason; what several ranks say alike once."""
    found: dict[tuple[str, str, str, str], set[int]] = defaultdict(set)
    for rank, of_rank in events.items():
        for event in of_rank:
            if isinstance(event, NotChecked):
                found[event.module, event.what, event.name, event.reason].add(rank)
    return [
        Unverified(module=module, what=what, name=name, reason=reason)
        for (module, what, name, reason), ranks in found.items()
        if what != "meant" or len(ranks) == len(events)  # a pipeline's ranks hold different modules
    ]


def verified(events: Mapping[int, Iterable[Event]]) -> str:
    """How much `--verify` decided, in words; "" where it was not asked for."""
    decided = [check for _, check in _checks(events) if check.outcome in ("right", "wrong")]
    calls = {(check.module, check.call) for check in decided if check.target not in ("leaf", "boundary", "outside")}
    modules = {module for module, _ in calls}
    return f"verify: {plural(len(calls), 'call')} of {plural(len(modules), 'module')} checked" if decided else ""


def nothing_verified(events: Mapping[int, Iterable[Event]]) -> list[str]:
    """A reason for no verdict when verification was asked for and decided nothing at all."""
    asked = any(True for _ in _checks(events))
    modules = any(check.outcome in ("right", "wrong") for _, check in _checks(events) if check.target != "outside")
    return [NOTHING_VERIFIED] if asked and not modules else []


def unsummed(data: StepData) -> dict[tuple[int, ...], set[str]]:
    """By ranks, parameters whose gradient is right as a summand of several ranks only, though these hold equal values
    and equal gradients of it and nothing adds them up: shards that began alike, or copies that miss a sum (a bias that
    each tensor-parallel rank adds a part of). Where the ranks' gradients differ, the weights tell."""
    checks = [check for _, check in _checks(data.events) if check.target == "parameter" and check.outcome == "right"]
    whole = {check.module for check in checks if not check.shape}
    found: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for check in checks:
        if check.shape != "partial" or check.module not in whole or len(check.group) < 2:
            continue
        for name in {name.split(" ")[0] for name in parameters_of(Wrong(((0, check),)), data.tracks)}:
            # Biases that began as zeros have names of their own where their module's weights are shards.
            alike = [tracks for key, tracks in data.tracks.items() if key[1].split(" ")[0] == name]
            of_rank = {rank: track for tracks in alike for rank, track in tracks.items()}
            if all(rank in of_rank for rank in check.group) and (
                not are_joined(data, of_rank, check.group) and got_alike(of_rank, check.group)
            ):
                found[check.group].add(name)
    return found


def not_summed(data: StepData) -> list[str]:
    """The same in words."""
    return [
        f"verify: the gradient of {in_short(sorted(names))} {SUMMAND} "
        f"{numbered('rank', group)}, which hold equal values of it, and nothing adds them up: right if these are "
        f"shards that began alike, x 1/{len(group)} if they are copies of one parameter"
        for group, names in unsummed(data).items()
    ]


def _checks(events: Mapping[int, Iterable[Event]]) -> Iterable[tuple[int, GradientCheck]]:
    return ((rank, event) for rank, of_rank in events.items() for event in of_rank if isinstance(event, GradientCheck))
