"""What `--verify` found wrong, in words."""

from __future__ import annotations

from pathlib import PurePath

from gradcheck_dist.diagnosis.audits.verified import ALL_PARAMETERS, Wrong
from gradcheck_dist.events import GradientCheck, Site
from gradcheck_dist.wording import numbered

RECEIVED = "a collective"
SIZE = 1e-3


def is_group_size(check: GradientCheck) -> bool:
    """Whether a factor is the number of ranks that were checked together."""
    size = len(check.group)
    return size > 1 and check.factor is not None and abs(check.factor / size - 1) < SIZE


def _what(check: GradientCheck) -> str:
    """What the check was about, in words."""
    if check.target == "parameters":
        return f"the parameters of {check.name}"
    if check.target == "input":
        return f"input {check.name}"
    if check.name == ALL_PARAMETERS:
        return ALL_PARAMETERS
    if check.target == "outside":
        return "the output" + (f" {check.name}" if check.name else "")
    if check.target == "boundary":
        return f"the output that goes to {check.name}"
    return f"parameter {check.name}"


def pattern(wrong: Wrong) -> str:
    check = wrong.first
    where = f"{', '.join(wrong.modules[:3])}{' and others' if len(wrong.modules) > 3 else ''}"
    how = {
        "scaled": f"x {check.factor:.6g}" if check.factor is not None else "scaled",
        "cut": "no gradient where the output does depend on it"
        + (f", cut off by {check.reason}" if check.reason else ""),
        "constant": "the same gradient whatever gradient arrives",
        "flat": "a gradient where the output does not depend on it",
        "partial": "a summand over the ranks that nobody added up",
        "apart": "the gradient of its own rank's share alone",
        "stopped": f"a gradient that takes for constant what comes from {check.reason}",
        "reversed": "the gradient with the other sign on the way through a function",
    }.get(check.shape, "another gradient than the derivative")
    if check.shape == "redrawn":
        return f"{where}: run again in backward with other random numbers than in forward"
    through = f", {_through(check)}" if check.function else ""
    if check.shape == "reversed":
        through = through.replace("on the way through ", "")  # it is said already
    return f"{where}{_which_calls(wrong)}: {_what(check)} gets {how}{through}"


def _through(check: GradientCheck) -> str:
    """The function that makes the difference, and where it is applied."""
    place = f" at {_line(check.called_at)}" if check.called_at is not None else ""
    if not check.at_its_word:
        return f"not by {check.function}{place} alone, whose backward is not its derivative"
    return f"on the way through {check.function}{place}"


def _line(site: Site) -> str:
    return f"{PurePath(site.file).name}:{site.line}"


def _which_calls(wrong: Wrong) -> str:
    """Which calls of a module that is called several times; "" where all are wrong."""
    check = wrong.first
    calls = sorted({one.call for _, one in wrong.checks if one.module == check.module})
    if check.num_calls == 1 or len(calls) == check.num_calls:
        return ""
    return f" in {numbered('call', calls)} of {check.num_calls}"


def explain(wrong: Wrong) -> str:
    check = wrong.first
    if check.target == "leaf":
        everywhere = check.name == ALL_PARAMETERS
        where = "on the model's output" if everywhere else "on the parameter, or on a tensor outside of any module"
        return (
            f"Training delivered {check.factor:.6g} times the gradient that forward and backward of {check.module} "
            f"give at {_what(check)} when they run once more. A hook {where}, scales it."
        )
    if check.target == "boundary":
        return (
            f"The gradient that arrived at the output of {check.module} is {check.factor:.6g} times the one that left "
            f"the input of the next stage on {check.name}: it was scaled on the way between them."
        )
    if check.shape == "apart":
        return (
            f"On {numbered('rank', check.group)} what {check.module} ({check.module_type}) computes depends "
            f"on {_what(check)} of the other ranks too, and each rank's gradient is that of its own share alone: "
            f"what the others want of it is lost. In sum over these ranks {_numbers(check)}."
        )
    if check.shape == "redrawn":
        return (
            f"{' and '.join(wrong.modules[:3])} ({check.module_type}): run again in backward, as a checkpoint does, "
            "from another state of the random number generators than in forward. What is drawn there (dropout) is not "
            f"what forward drew. Around it {_numbers(check)}."
        )
    if check.shape == "partial":
        return (
            f"All of {numbered('rank', check.group)} hold the same output of {check.module} "
            f"({check.module_type}) and get the same gradient there, but what leaves at {_what(check)} is each rank's "
            "own summand, and what comes before takes it for the whole."
        )
    behind = check.target == "parameters" and not check.function
    rest = (
        f" {check.name} by itself was not found wrong: it happens behind it, inside {check.module}." if behind else ""
    )
    other = sorted({_what(one) for _, one in wrong.checks} - {_what(check)})
    also = f" The same holds for {', '.join(other[:3])}, in its own measure." if other else ""
    times = (
        " The factor is the number of ranks: a sum in forward is summed again in backward."
        if is_group_size(check)
        else ""
    )
    if check.shape == "stopped":
        times = f" With what comes from {check.reason} for a constant, they agree."
    elif check.shape == "cut" and check.reason:
        times = f" It is cut off by {check.reason}."
    elif check.reason:
        times = f" It is the gradient {check.reason}."
    if check.function:
        also = f"{_by_function(check)}{also}"
    if check.target == "outside":
        return f"Between {_what(check)} of {check.module} and the loss, outside of modules: {_numbers(check)}.{times}"
    return f"In {check.module} ({check.module_type}), for {_what(check)}: {_numbers(check)}.{times}{rest}{also}"


def _by_function(check: GradientCheck) -> str:
    """What the function does, and what is left without it."""
    does = {
        "scaled": f"gives {check.factor:.6g} times the derivative" if check.factor is not None else "",
        "reversed": f"gives {check.factor:.6g} times what arrives" if check.factor is not None else "",
        "flat": "gives a gradient where its forward is constant (a straight-through estimator does)",
        "cut": "gives no gradient",
    }.get(check.shape if check.at_its_word else "", "does not give the derivative of its forward")
    forward = "hands its input on as it is and " if check.hands_on else ""
    written = f", written at {_line(check.defined_at)}," if check.defined_at is not None else ""
    rest = f" Apart from what is named, {check.module} is right." if check.at_its_word else ""
    return f" {check.function}{written} {forward}{does}.{rest}"


def _numbers(check: GradientCheck) -> str:
    ranks = f", checked together on {numbered('rank', check.group)}" if len(check.group) > 1 else ""
    if check.observed is None or check.numerical is None or check.error is None:
        return "autograd and central differences part"
    return (
        f"autograd gives {check.observed:.6g} along a direction where central differences give {check.numerical:.6g} "
        f"+- {check.error:.1g} ({check.precision}{ranks})"
    )


def fix(wrong: Wrong, meant: str) -> str:
    check = wrong.first
    if check.target == "boundary":
        return "Look at what sends and receives gradients between the stages, and at hooks on the stages' outputs."
    if check.target == "leaf":
        return "Look for register_hook on the parameter or on the module's output in the training code."
    if check.shape == "apart" or (check.shape == "stopped" and check.reason.startswith(RECEIVED)):
        return (
            "Communicate with a gradient: torch.distributed.nn.functional.all_gather, or a torch.autograd.Function "
            "whose backward adds up what all ranks want." + (f" If this is {meant}, nothing is wrong." if meant else "")
        )
    if check.shape == "redrawn":
        return (
            "Keep the states of the generators in forward and set them before running again (torch.get_rng_state, "
            "torch.cuda.get_rng_state), or use torch.utils.checkpoint, which does."
        )
    name = check.function or check.module
    if check.meant:
        return f"Nothing: {name} was declared as meant (--meant)."
    if meant:
        declare = f", and --meant {name} (attach: meant=[{name!r}]) says so"
        return f"If this is {meant}, nothing is wrong{declare}. Otherwise mend the backward of {_written(check)}."
    if len(check.group) > 1:
        return (
            f"Look at the backward of the collectives in {check.module}: a replicated input's gradient is the sum over "
            "the group, and a sum in forward passes the gradient on as it is."
        )
    if check.function:
        return f"Mend the backward of {_written(check)}, and hold it with torch.autograd.gradcheck in a unit test."
    return f"Mend the backward of what {check.module} calls, and hold it with torch.autograd.gradcheck in a unit test."


def _written(check: GradientCheck) -> str:
    if not check.function:
        return check.module
    return check.function + (f" ({_line(check.defined_at)})" if check.defined_at is not None else "")
