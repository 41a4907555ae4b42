"""Parameters that an optimizer holds and that lie in no module that is called: a temperature, a prompt, an image.

Nothing shows them before the optimizer's first step, and what backward brings them in that step would not be seen. So
the graph of a pass is looked through for them while there are any that no module has shown.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from gradcheck_dist.probes.backward import autograd
from gradcheck_dist.probes.backward.forwards import leaves_behind
from gradcheck_dist.probes.backward.roots import Root
from gradcheck_dist.probes.optimizers.params import params_of
from gradcheck_dist.probes.parameters.stand_ins import is_plain
from gradcheck_dist.probes.recording.patching import Patches
from gradcheck_dist.probes.recording.recorder import BackwardPass, Recorder, guarded


def install(recorder: Recorder, patches: Patches, made: weakref.WeakSet[Optimizer]) -> None:
    """`made`: optimizers of which not all parameters are known to be watched."""

    def begin(recorder: Recorder, current: BackwardPass, roots: Sequence[Root], has_gradients: bool) -> None:
        if len(made) and recorder.recording and recorder.sampling and not recorder.in_pipeline:
            look(recorder, roots, made)

    autograd.OPEN_LISTENERS.append(begin)
    patches.on_restore(lambda: autograd.OPEN_LISTENERS.remove(begin))


@guarded("optimizer")
def look(recorder: Recorder, roots: Sequence[Root], made: weakref.WeakSet[Optimizer]) -> None:
    params = (param for one in list(made) for group in one.param_groups for param in group["params"])
    unknown = {id(param): param for param in params if _may_be_loose(recorder, param)}
    if unknown:
        reached = leaves_behind(roots)
        params_of(recorder, [param for key, param in unknown.items() if key in reached])


def _may_be_loose(recorder: Recorder, param: Tensor) -> bool:
    trained = param.requires_grad and param.is_leaf and param.numel() > 0 and is_plain(param)
    return trained and recorder.registry.find(param) is None
