"""Which of a log's many names is the loss, the gradient norm, the tokens?"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gradcheck_dist.errors import GradcheckError, nearest
from gradcheck_dist.reports.text import printable

ROLES = ("loss", "grad_norm", "tokens")
STEP_NAMES = ("step", "_step", "global_step", "trainer/global_step", "train/global_step", "iteration", "iter")
_OTHER_DATA = re.compile(r"(?<![a-z])(val|valid|validation|eval|test|dev)(?![a-z])")
# Best first. torchtitan, Hugging Face, Lightning, Megatron-LM, nanoGPT and torchtune all fit one of them.
_PATTERNS = {
    "loss": (r"loss", r"train[/_]?(ce_)?loss", r".*global_avg_loss", r"lm[ _-]loss", r".*(?<![a-z])(ce_)?loss"),
    "grad_norm": (r"grad_norm", r".*grad(ient)?s?[ _/-]?norm", r".*total_norm", r".*gnorm"),
    "tokens": (
        r"num_tokens",
        r"(n_|num_)?tokens",
        r".*tokens[ _-]?(seen|consumed|processed)",
        r".*(consumed|total|num|seen)[ _-](input_)?tokens(_seen)?",
    ),
}
_RATE = re.compile(r"per[ _-]?(s|sec|second|gpu|device)(?![a-z])|/s(ec)?$|throughput|tps")


def find(role: str, names: Iterable[str], wanted: str | None = None) -> str | None:
    """The name that plays a role, None when none looks like it.

    Raises:
        GradcheckError: E912 the name that was asked for does not occur.
    """
    every = list(names)
    if wanted is not None:
        if wanted in every:
            return wanted
        close = ", ".join(printable(name, 80) for name in nearest(wanted, every) or sorted(every)[:8])
        raise GradcheckError(
            f"there is no curve {printable(wanted, 80)!r}; legal values are the names in the log, such as {close}.",
            code="E912",
        )
    ranked = []
    for name in every:
        score = _score(role, name)
        if score is not None:
            ranked.append((score, len(name), name))
    return min(ranked)[2] if ranked else None


def plain(name: str) -> str:
    """A name in small letters, without the run's name that a W&B export puts before it."""
    return name.rpartition(" - ")[2].strip().lower()


def _score(role: str, name: str) -> int | None:
    text = plain(name)
    if text.endswith(("__min", "__max")) or (role == "tokens" and _RATE.search(text)):
        return None
    for score, pattern in enumerate(_PATTERNS[role]):
        for text_tried in (text, text.rpartition("/")[2]):
            if re.fullmatch(pattern, text_tried):
                return 2 * score + (100 if _OTHER_DATA.search(text) else 0) + int(text_tried != text)
    return None
