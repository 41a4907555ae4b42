"""What a fault means for this run, in words: what clipping and the optimizer make of it, and what they hide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradcheck_dist.diagnosis.norms.effect import SAME_DIRECTION, Effect
from gradcheck_dist.events import OptimizerStep

NORMALIZING = ("adam", "rmsprop", "adagrad", "adadelta", "lamb", "adafactor")
"""They divide each element by the root of its own mean square: a factor that never changes is gone but for epsilon.
Adam: arXiv 1412.6980, section 2.1."""
SIGNED = ("lion", "signsgd", "muon", "signum")
"""They keep a direction and no size at all."""
SMALL = 0.01
"""A relative change of the update that nobody would notice."""
NEGLIGIBLE = 1e-4
"""One of which the number itself says nothing any more."""


def consequence(effects: Sequence[Effect]) -> str:
    """A line each on gradient, clipping and optimizer, for a fault found in these steps: the first one described, all
    counted.

    Says what is not recorded instead of guessing it.
    """
    if not effects or effects[0].scale is None:
        return ""
    if effects[0].clip_factors is not None:
        lines = {"In this run": _clip_alone(effects)}
    else:
        lines = {"Gradient": _gradient(effects), "Clipping": _clipping(effects)}
    told = {about: " ".join(words) for about, words in (lines | {"Optimizer": _optimizer(effects)}).items()}
    return "\n".join(f"{about}: {words}" for about, words in told.items() if words)


def _clip_alone(effects: Sequence[Effect]) -> Iterator[str]:
    factors = [factor for effect in effects for factor in effect.clip_factors or ()]
    low, high = min(factors), max(factors)
    if max(abs(low - 1), abs(high - 1)) <= SMALL:
        yield "so far no gradient was scaled wrongly by it."
        return
    how = f"x {low:.4g}" if high <= low * (1 + SMALL) else f"x {low:.4g} to x {high:.4g}"
    where = " in the recorded steps" if len(effects) > 1 else ""
    yield f"gradients are right up to the clip and {how} of what they should be after it{where}."
    if len(effects) > 1:
        off = sum(any(abs(factor - 1) > SMALL for factor in effect.clip_factors or ()) for effect in effects)
        which = f"All {off}" if off == len(effects) else f"{off} of {len(effects)}"
        yield f"{which} recorded steps were scaled wrongly."


def _gradient(effects: Sequence[Effect]) -> Iterator[str]:
    first = effects[0]
    scales = [effect.scale for effect in effects if effect.scale is not None]
    varies = max(scales) > min(scales) * (1 + SMALL)
    low_high = f"x {min(scales):.4g} to x {max(scales):.4g}" if varies else f"x {scales[0]:.4g}"
    norm = f"norm {low_high} of the right one's{' (steps differ)' * varies}"
    if _straight(first) and first.keeps_directions:
        yield f"{norm}, direction right."
        return
    yield f"{norm}, direction {first.angle:.2g} degrees away from it (estimated from samples)."
    if first.keeps_directions and first.param_scales is not None:
        low, high = first.param_scales
        yield f"Each parameter keeps its direction; factors run from x {low:.4g} to x {high:.4g}."
    elif first.ratios is not None:
        low, middle, high = first.ratios
        yield f"Tokens weigh from x {low:.4g} to x {high:.4g} of what they should, median x {middle:.4g}."


def _straight(effect: Effect) -> bool:
    return effect.angle is None or effect.angle < SAME_DIRECTION


def _clipping(effects: Sequence[Effect]) -> Iterator[str]:
    first = effects[0]
    if first.total_norm is None or first.right_norm is None:
        yield "no clip by norm was recorded."
        return
    now, then = first.coefficient < 1, first.right_coefficient < 1
    norms = f"norm {first.total_norm:.4g}, about {first.right_norm:.4g} without the fault"
    if now and then:
        left = "the factor is gone" if first.keeps_directions and _straight(first) else "only the direction is wrong"
        text = f"to {first.max_norm:g}, with the fault and without ({norms}): after it {left}"
    elif now:
        text = f"to {first.max_norm:g}, where nothing should be clipped ({norms})"
    elif then:
        text = f"none, where it should be to {first.max_norm:g}, x {first.right_coefficient:.4g} ({norms})"
    else:
        text = f"none, with the fault or without: below max_norm {first.max_norm:g} ({norms})"
    yield text + "."
    if len(effects) > 1:
        clipped = sum(effect.coefficient < 1 for effect in effects)
        would = sum(effect.right_coefficient < 1 for effect in effects)
        if clipped or would:
            yield f"{clipped} of {len(effects)} recorded steps are clipped; without the fault {would} would be."


def _optimizer(effects: Sequence[Effect]) -> Iterator[str]:
    step = effects[0].optimizer
    if step is None:
        yield "no step was recorded."
        return
    name = step.optimizer.lower()
    if any(part in name for part in NORMALIZING):
        yield from _normalizing(effects, step)
    elif any(part in name for part in SIGNED):
        yield f"{step.optimizer} keeps no size: a factor that is common to all elements of a parameter has no effect."
    elif "sgd" in name:
        yield from _proportional(effects[0], step)
    else:
        yield f"what {step.optimizer} makes of a factor is not known here."


def _normalizing(effects: Sequence[Effect], step: OptimizerStep) -> Iterator[str]:
    first = effects[0]
    settings = _settings(step, "eps", "weight_decay")
    changing = [factors for factors in _of_parameters(effects) if factors and max(factors) > min(factors) * (1 + SMALL)]
    if first.clip_factors is not None:
        if all(abs(factor - 1) <= SMALL for factor in first.clip_factors):
            return
        yield f"{step.optimizer} ({settings}) hides what never changes; a clip's coefficient changes with every norm."
    elif not first.keeps_directions:
        yield (
            f"{step.optimizer} ({settings}) hides a factor that a whole parameter shares, but not this one: updates "
            "follow it."
        )
    elif changing:
        low, high = min(map(min, changing)), max(map(max, changing))
        yield (
            f"{step.optimizer} ({settings}) hides a factor that never changes; this one varies after the clip, from x "
            f"{low:.4g} to x {high:.4g}, and weighs steps against each other by it."
        )
    else:
        yield f"{step.optimizer} ({settings}) divides away a factor that is the same in every step."
    if first.left_by_epsilon is not None and first.keeps_directions:
        largest, middle = first.left_by_epsilon
        by = "(by this step's gradients: the optimizer's state is not recorded)"
        if largest < NEGLIGIBLE:
            yield f"Epsilon lets no update differ by more than {_percent(NEGLIGIBLE)} {by}."
        else:
            yield f"Epsilon lets an update differ by {_percent(largest)} at most, median {_percent(middle)} {by}."
    yield from _decay(first, step)


def _of_parameters(effects: Sequence[Effect]) -> list[list[float]]:
    """What is left behind the clip, step by step, of the least and of the most scaled parameter: these, and not the
    norm of all, are what an optimizer divides by itself."""
    left = [(effect, effect.factor / effect.scale) for effect in effects if effect.factor and effect.scale]
    ends = [effect.param_scales or (effect.scale or 1.0,) * 2 for effect, _ in left]
    return [[end[side] * rest for end, (_, rest) in zip(ends, left, strict=True)] for side in (0, 1)]


def _decay(effect: Effect, step: OptimizerStep) -> Iterator[str]:
    decay = step.hyperparameters.get("weight_decay", 0.0)
    if not decay or not effect.factor:
        return
    decoupled = step.optimizer.lower().startswith("adamw") or step.hyperparameters.get("decoupled_weight_decay") == 1.0
    if decoupled:
        yield "Weight decay is decoupled and stays the same."
    elif abs(effect.factor - 1) > SMALL:
        yield f"Weight decay is added to the gradient: against it, it counts x {1 / effect.factor:.4g}."


def _proportional(effect: Effect, step: OptimizerStep) -> Iterator[str]:
    factor, lr = effect.factor, step.lr
    if factor is None:
        return
    if lr is None:
        yield f"{step.optimizer} follows the factor: its steps are x {factor:.4g} (learning rate not recorded)."
    elif abs(factor - 1) > SMALL:
        yield f"{step.optimizer} follows it, as if the learning rate were {lr * factor:.4g}, not {lr:.4g}."
    else:
        yield f"{step.optimizer}'s step keeps its length (learning rate {lr:.4g})."
    if step.groups:
        yield "Other parameter groups have learning rates of their own, with the same factor."
    yield from _decay(effect, step)


def _settings(step: OptimizerStep, *names: str) -> str:
    given = [f"lr {step.lr:.4g}"] if step.lr is not None else []
    shown = [f"{name} {step.hyperparameters[name]:g}" for name in names if name in step.hyperparameters]
    return ", ".join([*given, *shown]) or "its settings are not recorded"


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"
