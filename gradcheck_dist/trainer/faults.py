"""Known bugs of gradient scale, each put in by replacing ONE named function of the trainer.

The trainer itself has no switch for them. Imports no torch. The faults stand in faults_reduction.py (who adds up
gradients), faults_loss.py (what a loss is divided by), faults_update.py (between the last backward and the log),
faults_torch.py (what torch itself gets wrong) and faults_field.py (in the accumulation loop and on the wire).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable

from gradcheck_dist.errors import unknown_value
from gradcheck_dist.trainer import faults_field, faults_loss, faults_reduction, faults_torch, faults_update
from gradcheck_dist.trainer.fault import Fault

FAULTS: dict[str, Fault] = {
    fault.name: fault
    for module in (faults_reduction, faults_loss, faults_update, faults_torch, faults_field)
    for fault in module.FAULTS
}


def fault_names() -> list[str]:
    """The names of all injectable faults, sorted."""
    return sorted(FAULTS)


def apply_faults(names: Iterable[str]) -> Callable[[], None]:
    """Put faults into the trainer of this process.

    Args:
        names: names of faults, applied in this order; of two with the same target the later one wins.

    Returns:
        a function that takes them out again.

    Raises:
        GradcheckError: an unknown name.
    """
    chosen = list(names)
    for name in chosen:
        if name not in FAULTS:
            raise unknown_value("fault", name, FAULTS, code="E206")
    undo = contextlib.ExitStack()
    for name in chosen:
        module_name, function = FAULTS[name].target.split(":")
        module = importlib.import_module(module_name)
        undo.callback(setattr, module, function, getattr(module, function))
        setattr(module, function, FAULTS[name].replacement)
    return undo.close
