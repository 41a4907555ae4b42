"""A prediction in words: the hands, what is left over, and the constant that mends it."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from fractions import Fraction
from typing import Any

from gradcheck_dist.predict.model import Prediction, Setup, predict

MAX_SHOWN = 12


def advice(prediction: Prediction) -> list[str]:
    """How to make it right; empty when it is. Code for plain torch."""
    setup = prediction.setup
    lines: list[str] = []
    if prediction.right:
        return lines
    mended = setup
    if setup.loss not in ("sum", setup.objective):
        lines.append(
            f"Normalise the loss for {setup.objective}: what differs between contributions cannot be undone later."
        )
        mended = replace(mended, loss=setup.objective)
    growing = [symbol for symbol, (_, slope) in prediction.ratio.powers if slope]
    if "M" in growing:
        lines.append("Build the schedule with scale_grads=False: it divides earlier accumulation steps again.")
        mended = replace(mended, scale_grads=False)
    if "R" in growing:
        lines.append("Reduce once, at the last accumulation step: no_sync() around the others, forward and backward.")
        mended = replace(mended, sync="last")
    rest = predict(mended)
    if rest.right:
        return lines
    constant = rest.ratio.inverse()
    lines.append(f"Multiply the loss by {constant}{_equals(rest, constant)}:")
    lines.append('    loss = F.cross_entropy(logits, labels, reduction="sum")')
    divided = "" if setup.objective == "sum" else " / num_tokens_of_the_step"
    times = f"* {_code(str(constant))}".replace("* 1/", "/ ")
    lines.append(f"    loss = loss {times}{divided}")
    if setup.data_parallel > 1 and mended.loss == "global-token-mean" and mended == setup:
        lines.append("or let the reduction sum instead of average:")
        if setup.fsdp > 1:
            lines += [
                "    for module in fsdp_modules:",
                "        module.set_gradient_divide_factor(1.0)",
                "        module.set_force_sum_reduction_for_comms(True)   # needed on gloo",
            ]
        else:
            lines += [
                "    def sum_hook(_, bucket):",
                "        work = dist.all_reduce(bucket.buffer(), async_op=True)",
                "        return work.get_future().then(lambda done: done.value()[0])",
                "    ddp.register_comm_hook(None, sum_hook)",
            ]
    return lines


def _code(text: str) -> str:
    names = {"R": "data_parallel_size", "S": "shard_size", "G": "num_replicas", "M": "num_microbatches", "K": "accum"}
    return "".join(names.get(part, part) for part in _words(text)).replace("^", "**")


def _words(text: str) -> list[str]:
    """Runs of letters, and everything else one character at a time."""
    words: list[str] = []
    for char in text:
        if char.isalpha() and words and words[-1].isalpha():
            words[-1] += char
        else:
            words.append(char)
    return words


def _equals(prediction: Prediction, constant: object) -> str:
    ratios = prediction.ratios
    if not ratios or len(set(ratios)) > 1 or not ratios[0]:
        return ""
    value = str(1 / ratios[0])
    return "" if value == str(constant) else f" = {value}"


def shown(ratios: list[Fraction]) -> str:
    """The ratios of all accumulation steps, abridged."""
    texts = [str(value) for value in ratios]
    if len(set(texts)) == 1:
        return f"{texts[0]} in every accumulation step" if len(texts) > 1 else texts[0]
    if len(texts) > MAX_SHOWN:
        texts = [*texts[: MAX_SHOWN - 2], "...", texts[-1]]
    return "  ".join(texts)


def _legend(prediction: Prediction) -> str:
    """What the ratio's letters stand for, with their numbers."""
    setup = prediction.setup
    known = {
        "R": f"R = {setup.data_parallel} data-parallel ranks",
        "S": f"S = {setup.fsdp * setup.cp} shards",
        "G": f"G = {setup.hsdp} replicas",
        "M": f"M = {setup.microbatches} microbatches",
        "K": f"K = {setup.accum} accumulation steps",
        "k": "k the accumulation step",
        "N": "N tokens of the step on all ranks",
        "N_r": "N_r those of one rank",
        "n_c": "n_c those of one microbatch",
    }
    used = {symbol for symbol, _ in prediction.ratio.powers}
    if any(slope for _, (_, slope) in prediction.ratio.powers):
        used |= {"K", "k"}
    return ", ".join(words for symbol, words in known.items() if symbol in used)


def unused(setup: Setup) -> list[str]:
    """Settings that were given and have nothing to act on in this setup."""
    ddp, fsdp = setup.data_parallel > 1 and setup.fsdp == 1, setup.fsdp > 1
    acts = {
        "reduction": (ddp, "DDP, as --ddp 2"),
        "sync": (ddp or fsdp, "data parallelism, as --ddp 2"),
        "divide_factor": (fsdp, "FSDP2, as --fsdp 2"),
        "force_sum": (fsdp, "FSDP2, as --fsdp 2"),
        "reduce_dtype": (fsdp, "FSDP2, as --fsdp 2"),
        "scale_grads": (setup.pp > 1 or setup.microbatches > 1, "a pipeline, as --pp 2 --microbatches 4"),
    }
    given, default = vars(setup), vars(Setup())
    return [
        f"{name} changes nothing here: it needs {what}"
        for name, (does, what) in acts.items()
        if not does and given[name] != default[name]
    ]


def text(prediction: Prediction, title: str = "") -> str:
    """The prediction for a terminal, at most 100 columns where names allow."""
    setup = prediction.setup
    lines = [title] if title else []
    state = "RIGHT" if prediction.right else "OFF"
    lines.append(f"  verdict  {state}: nominal / expected = {prediction.ratio} under {setup.objective}")
    if prediction.right and str(prediction.ratio) != "1":
        lines.append("           at these sizes only: the factors cancel because their numbers happen to be equal")
    margin = " " * 11
    lines += textwrap.wrap(_legend(prediction), 100, initial_indent=margin, subsequent_indent=margin)
    if prediction.ratios is not None:
        steps = f"  (k = 0 .. {setup.accum - 1})" if len(set(prediction.ratios)) > 1 else ""
        lines.append(f"  ratio    {shown(prediction.ratios)}{steps}")
    else:
        lines.append("  differs between contributions: it depends on their tokens (n_c, N_r)")
    wide = max(18, *(len(str(hand.after)) for hand in prediction.hands))
    lines += ["", f"  {'part':<16} {'factor':<12} {'weight / expected':<{wide}} what it does"]
    for hand in prediction.hands:
        lines.append(f"  {hand.who:<16} {hand.factor!s:<12} {hand.after!s:<{wide}} {hand.does}")
    lines += [f"  {remark}" for remark in unused(setup)]
    mend = advice(prediction)
    if mend:
        lines += ["", "  to fix it", *(f"    {line}" for line in mend)]
    return "\n".join(lines)


def as_json(predictions: dict[str, Prediction]) -> str:
    """All variants as one JSON object: name -> ratio, ratios, hands, advice."""
    document: dict[str, Any] = {
        name: {
            "setup": vars(prediction.setup),
            "right": prediction.right,
            "ratio": str(prediction.ratio),
            "ratios": None if prediction.ratios is None else [str(value) for value in prediction.ratios],
            "hands": [
                {"who": hand.who, "does": hand.does, "factor": str(hand.factor), "after": str(hand.after)}
                for hand in prediction.hands
            ],
            "advice": advice(prediction),
            "unused": unused(prediction.setup),
        }
        for name, prediction in predictions.items()
    }
    return json.dumps(document, indent=1)
