"""Which hand scales by what: the nominal ledger of a configuration, beside the expected one.

Symbols: N tokens of the step on all ranks, N_r of one rank, n_c of one contribution (microbatch), R data-parallel
ranks, S shards and G replicas of HSDP, M pipeline microbatches, K accumulation steps, k the accumulation step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from gradcheck_dist.errors import GradcheckError, nearest, unknown_value
from gradcheck_dist.predict.fsdp_factors import Factors, gradient_divide_factors
from gradcheck_dist.predict.monomial import ONE, Monomial, number, symbol

LOSSES = {
    "global-token-mean": "token sum / N (tokens of the step on all ranks)",
    "rank-token-mean": "token sum / N_r (tokens of this rank's step)",
    "microbatch-mean": "mean over the microbatch's tokens n_c",
    "sum": "token sum",
}
OBJECTIVES = ("global-token-mean", "rank-token-mean", "microbatch-mean", "sum")
REDUCTIONS = ("average", "sum")
SYNC = ("last", "every-backward")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Setup:
    """A trainer in numbers. Degrees at 1 are off.

    Attributes:
        loss: how the loss is normalised (LOSSES); `loss_scale` multiplies it: a product of symbols such as "R", "M/K".
        reduction: what DDP does with gradients; FSDP follows `divide_factor` and `force_sum`.
        sync: when data parallelism reduces: at the last accumulation step or in every backward.
        scale_grads: whether the pipeline schedule divides the accumulated gradient by M at each step.
    """

    ddp: int = 1
    fsdp: int = 1
    hsdp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    microbatches: int = 1
    accum: int = 1
    loss: str = "global-token-mean"
    loss_scale: str = "1"
    objective: str = "global-token-mean"
    reduction: str = "average"
    sync: str = "last"
    scale_grads: bool = False
    divide_factor: float | None = None
    force_sum: bool = False
    reduce_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("ddp", "fsdp", "hsdp", "cp", "tp", "pp", "ep", "microbatches", "accum"):
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise GradcheckError(
                    f"{name} is {degree!r}; legal values are integers from 1 up. Set {name}=1 to leave it out.",
                    code="E801",
                )
        choices = (
            ("loss", LOSSES),
            ("objective", OBJECTIVES),
            ("reduction", REDUCTIONS),
            ("sync", SYNC),
            ("reduce_dtype", DTYPES),
        )
        for name, legal in choices:
            if getattr(self, name) not in legal:
                raise unknown_value(name, getattr(self, name), legal, code="E801")
        if self.ddp > 1 and (self.fsdp > 1 or self.hsdp > 1):
            raise GradcheckError(
                f"ddp={self.ddp} and fsdp={self.fsdp}, hsdp={self.hsdp} are two ways of data parallelism. Use "
                f"hsdp={self.ddp} for replicas of shards.",
                code="E802",
            )
        if self.hsdp > 1 and self.fsdp == 1:
            raise GradcheckError(
                f"hsdp={self.hsdp} replicates shards, but fsdp=1 shards nothing. Set fsdp=2 or more, or "
                f"ddp={self.hsdp}.",
                code="E802",
            )
        if (self.fsdp * self.cp) % self.ep:
            raise GradcheckError(
                f"ep={self.ep} does not divide fsdp*cp={self.fsdp * self.cp}, from which it borrows its ranks.",
                code="E802",
            )
        if self.divide_factor is not None and self.divide_factor <= 0:
            raise GradcheckError(f"divide_factor is {self.divide_factor}; it must be positive.", code="E801")
        parse_scale(self.loss_scale)

    @property
    def data_parallel(self) -> int:
        """Ranks whose gradients are combined: replicas, shards and context-parallel ranks."""
        return self.ddp * self.fsdp * self.hsdp * self.cp

    @property
    def world_size(self) -> int:
        return self.data_parallel * self.tp * self.pp

    @property
    def fsdp_factors(self) -> Factors:
        """FSDP reduces over the shards and the context-parallel ranks together."""
        return gradient_divide_factors(
            self.fsdp * self.cp, self.hsdp, self.reduce_dtype, self.divide_factor, self.force_sum
        )


def changed(setup: Setup, assignment: str) -> Setup:
    """The setup with one field set, from "scale_grads=off".

    Raises:
        GradcheckError: E803 no such field, or a value that it cannot have.
    """
    name, _, text = assignment.partition("=")
    name = name.strip().replace("-", "_")
    fields = {entry.name: entry for entry in dataclasses.fields(Setup)}
    if name not in fields or not text:
        close = f" Did you mean {', '.join(nearest(name, fields))}?" if nearest(name, fields) else ""
        raise GradcheckError(
            f"cannot change {assignment!r}.{close} Write NAME=VALUE with one of: {', '.join(fields)}.", code="E803"
        )
    return dataclasses.replace(setup, **{name: _parse(name, text.strip(), getattr(Setup(), name))})


def _parse(name: str, text: str, default: Any) -> Any:
    words = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}
    try:
        if isinstance(default, bool):
            return words[text.lower()]
        if isinstance(default, int):
            return int(text)
        if name == "divide_factor":
            return None if text in ("none", "default") else float(text)
    except (KeyError, ValueError):
        legal = "on or off" if isinstance(default, bool) else "integers from 1 up"
        if name == "divide_factor":
            legal = "positive numbers and none"
        raise GradcheckError(f"{name} is {text!r}; legal values are {legal}.", code="E803") from None
    return text


def parse_scale(text: str) -> Monomial:
    """A product and quotient of R, K, M, N and numbers: "R", "M/K", "1", "R*8".

    Raises:
        GradcheckError: E804 anything else.
    """
    result, sign = ONE, 1
    for part in text.replace("*", " * ").replace("/", " / ").split():
        if part in "*/":
            sign = 1 if part == "*" else -1
            continue
        if part in ("R", "K", "M", "N"):
            factor = symbol(part)
        else:
            try:
                factor = number(Fraction(part))
            except (ValueError, ZeroDivisionError):
                factor = number(0)
            if factor.number <= 0:
                raise GradcheckError(
                    f"loss_scale {text!r} holds {part!r}; legal are R, K, M, N and positive numbers joined by * and /.",
                    code="E804",
                )
        result = result * factor if sign == 1 else result / factor
        sign = 1
    return result


@dataclass(frozen=True)
class Hand:
    """One hand that scales: who, by what, and the weight relative to the objective's after it."""

    who: str
    does: str
    factor: Monomial
    after: Monomial


@dataclass(frozen=True)
class Prediction:
    """The nominal ledger of a setup. `ratio` is nominal / expected in accumulation step k, as a monomial; `ratios`
    its values for k = 0 .. K-1 where it depends on nothing but degrees, else None."""

    setup: Setup
    hands: list[Hand] = field(default_factory=list)
    ratio: Monomial = ONE
    ratios: list[Fraction] | None = None

    @property
    def right(self) -> bool:
        return self.ratios is not None and all(value == 1 for value in self.ratios)


def ranks(setup: Setup) -> Monomial:
    """The number of data-parallel ranks: R under DDP, S shards times G replicas under FSDP and HSDP."""
    if setup.data_parallel == 1:
        return ONE
    if setup.fsdp == 1:
        return symbol("R")
    return symbol("S") * symbol("G") if setup.hsdp > 1 else symbol("S")


def _scale(setup: Setup) -> Monomial:
    given = parse_scale(setup.loss_scale)
    power = dict(given.powers).get("R", (0, 0))[0]
    for _ in range(abs(power)):
        swap = ranks(setup) / symbol("R")
        given = given * swap if power > 0 else given / swap
    return given


def _root(kind: str) -> Monomial:
    return {
        "global-token-mean": symbol("N", -1),
        "rank-token-mean": symbol("N_r", -1),
        "microbatch-mean": symbol("n_c", -1),
        "sum": ONE,
    }[kind]


def _expected(setup: Setup) -> Monomial:
    return {
        "global-token-mean": symbol("N", -1),
        "rank-token-mean": symbol("N_r", -1) / ranks(setup),
        "microbatch-mean": symbol("n_c", -1) * symbol("K", -1) * symbol("M", -1) / ranks(setup),
        "sum": ONE,
    }[setup.objective]


def predict(setup: Setup) -> Prediction:
    """Walk a weight from the loss to the optimizer."""
    hands: list[Hand] = []
    weight = ONE
    expected = _expected(setup)

    def act(who: str, does: str, factor: Monomial) -> None:
        nonlocal weight
        weight = weight * factor
        hands.append(Hand(who, does, factor, weight / expected))

    act("loss", LOSSES[setup.loss], _root(setup.loss))
    scale = _scale(setup)
    if setup.loss_scale != "1":
        act("loss", f"multiplied by {setup.loss_scale}", scale)
    if setup.pp > 1 or setup.microbatches > 1:
        if setup.scale_grads:
            act("pipeline", "scale_grads divides the accumulated gradient by M at every step", symbol("M", -1, -1))
        else:
            act("pipeline", "adds its microbatches, scale_grads off", ONE)
    if setup.tp > 1:
        act("tensor parallel", "partial sums are added inside the layers", ONE)
    for who, does, factor in _data_parallel(setup):
        act(who, does, factor)
    ratio = weight / expected
    values = {name: Fraction(value) for name, value in _values(setup).items()}
    try:
        ratios = [ratio.value(values, setup.accum, k) for k in range(setup.accum)]
    except KeyError:
        ratios = None
    return Prediction(setup, hands, ratio, ratios)


def _values(setup: Setup) -> dict[str, int]:
    return {
        "R": setup.data_parallel,
        "S": setup.fsdp * setup.cp,
        "G": setup.hsdp,
        "M": setup.microbatches,
        "K": setup.accum,
    }


def _data_parallel(setup: Setup) -> list[tuple[str, str, Monomial]]:
    if setup.data_parallel == 1:
        return []
    every = setup.sync == "every-backward" and setup.accum > 1
    if setup.fsdp == 1 and setup.hsdp == 1:  # DDP, over the context-parallel ranks too
        if setup.reduction == "average":
            again = "; repeating it changes nothing" if every else ""
            return [("DDP", f"averages over R ranks{again}", symbol("R", -1))]
        if every:
            return [("DDP", "sums over R ranks in every backward, what is summed already too", symbol("R", 0, 1))]
        return [("DDP", "sums over R ranks", ONE)]
    factors = setup.fsdp_factors
    found = []
    if factors.pre is not None and factors.pre != 1:
        found.append(
            (
                "FSDP",
                f"divides by {factors.pre:g} before reducing ({setup.reduce_dtype})",
                number(1 / Fraction(factors.pre)),
            )
        )
    shard = {
        "avg": ("reduce-scatter averages over S ranks", symbol("S", -1)),
        "sum": ("reduce-scatter sums over S ranks", ONE),
        "premul_sum": (f"reduce-scatter sums, times {factors.premul or 1:g}", number(factors.premul or 1)),
    }[factors.shard_op]
    found.append(("FSDP", *shard))
    if setup.hsdp > 1:
        averaged = factors.replicate_op == "avg"
        does = f"all-reduce {'averages' if averaged else 'sums'} over G replicas"
        found.append(("HSDP", does, symbol("G", -1) if averaged else ONE))
    if factors.post is not None and factors.post != 1:
        found.append(("FSDP", f"divides by {factors.post:g} after reducing", number(1 / Fraction(factors.post))))
    return found
