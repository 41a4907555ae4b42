"""Diagnostics for gradient scaling in distributed PyTorch training.

    import gradcheck_dist
    gradcheck_dist.attach()          # in the trainer, before the model is wrapped
    ...
    $ gradcheck diagnose runs/...    # later, anywhere

Names load on first use, so `import gradcheck_dist` costs nothing and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradcheck_dist.errors import GradcheckError
    from gradcheck_dist.interactive import load_ipython_extension, scenario
    from gradcheck_dist.notebook import load, prediction
    from gradcheck_dist.probes import attach, mark_loss
    from gradcheck_dist.stream.diagnose import diagnose
    from gradcheck_dist.trace.run import read_run

__version__ = "0.1.0"

__all__ = [
    "GradcheckError",
    "__version__",
    "attach",
    "diagnose",
    "load",
    "load_ipython_extension",
    "mark_loss",
    "prediction",
    "read_run",
    "scenario",
]

_HOMES = {
    "GradcheckError": "gradcheck_dist.errors",
    "attach": "gradcheck_dist.probes",
    "diagnose": "gradcheck_dist.stream.diagnose",
    "load": "gradcheck_dist.notebook",
    "load_ipython_extension": "gradcheck_dist.interactive",
    "mark_loss": "gradcheck_dist.probes",
    "prediction": "gradcheck_dist.notebook",
    "read_run": "gradcheck_dist.trace.run",
    "scenario": "gradcheck_dist.interactive",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gradcheck_dist' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
