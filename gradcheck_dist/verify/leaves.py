"""What a replay cannot show: what training delivered at the parameters."""

from __future__ import annotations

from dataclasses import replace

from gradcheck_dist.verify.capture import RootCall
from gradcheck_dist.verify.difference import ACCUSE
from gradcheck_dist.verify.replay import Replay
from gradcheck_dist.verify.result import Result
from gradcheck_dist.verify.targets import Target

ALL = "all parameters"
PROPORTIONAL = 1e-3
"""A gradient is a multiple of another when no larger share of it is anything else."""


def compare_leaves(call: RootCall, played: Replay) -> list[Result]:
    """Training's gradients at plain parameters against the replay's, on samples.

    Only a multiple is accused (a hook on the parameter, or on a tensor outside of any module): anything else comes
    about where the trainer uses a parameter outside of the module too.
    """
    if not call.leaves:
        reason = "what arrives at distributed tensors is not compared, only what the modules give"
        return [Result("", Target("leaf", "", ()), "undetermined", reason=reason)] if played.trained else []
    if call.several:
        reason = "several forward passes of it share a backward, so what arrives at the parameters is their sum"
        return [Result("", Target("leaf", "", ()), "undetermined", reason=reason)]
    results: list[Result] = []
    numbers: list[Result] = []
    alike, others = 0, list[str]()
    for name, trained in call.leaves.items():
        replayed = played.gradients.get(name)
        if replayed is None or replayed.shape != trained.shape or not float(replayed.norm()) > 0:
            continue
        factor = float(trained @ replayed / (replayed @ replayed))
        rest = float((trained - factor * replayed).norm()) / max(float(trained.norm()), float(replayed.norm()))
        limit, off = max(PROPORTIONAL, 16 * played.epsilon), abs(factor - 1)
        # In few elements a little of something else lies nearly in line by chance, so what is off must be much more.
        if rest > limit or (off > max(ACCUSE, limit) and rest > max(PROPORTIONAL * off, 16 * played.epsilon)):
            others.append(name)
        elif off > max(ACCUSE, limit):
            path, _, own = name.rpartition(".")
            observed = float(trained.norm()) * (1 if factor >= 0 else -1)
            numerical = float(replayed.norm())
            target = Target("leaf", own, ())
            found = Result(path, target, "wrong", observed, numerical, rest * numerical, factor, shape="scaled")
            (results if trained.numel() > 1 else numbers).append(found)
        else:
            alike += 1
    factors = [result.factor or 0.0 for result in results]
    hooked = " too, or a hook multiplies it" if numbers and not others else " too"
    for found in numbers:  # one number is a multiple of any other: it bears out what longer gradients show
        if any(abs((found.factor or 0.0) - factor) <= ACCUSE * abs(factor) for factor in factors):
            results.append(found)
        else:
            others.append(f"{found.path}.{found.target.name}".removeprefix("."))
    if len(results) > 1 and not alike and not others and max(factors) - min(factors) <= ACCUSE * abs(factors[0]):
        results = [replace(results[0], path="", target=Target("leaf", ALL, ()))]
    if alike:
        results.append(Result("", Target("leaf", f"{alike} parameters", ()), "right"))
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        reason = (
            f"the gradient of {others[0]}{more} is not its module's alone: it is used outside of the module{hooked}"
        )
        results.append(Result("", Target("leaf", "", ()), "undetermined", reason=reason))
    return results
