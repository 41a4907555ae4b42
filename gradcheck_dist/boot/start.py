"""What the .pth file imports in every python process below `gradcheck run`: attach when torch has been imported.

Runs before the user's first line, so it imports next to nothing and raises nothing. A process that never imports
torch keeps one more entry in sys.meta_path and nothing else; a launcher is left alone.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from gradcheck_dist.boot.launchers import is_launcher
from gradcheck_dist.boot.protocol import VARIABLE, Boot, decode, restart_count

_booted = False


def boot() -> None:
    """Wait for `import torch`. May be called more than once; never raises."""
    global _booted
    text = os.environ.get(VARIABLE)
    if _booted or not text or is_launcher(sys.orig_argv, os.environ):
        return
    _booted = True
    try:
        from gradcheck_dist.probes.recording.patching import Patches

        options = decode(text)
        Patches().when_imported("torch", lambda torch: attach(torch, options))
    except Exception as error:
        say(f"not recording: {type(error).__name__}: {error}")


def attach(torch: ModuleType, options: Boot) -> None:
    """Put the probes in place. Called at the end of `import torch`; never raises."""
    try:
        from gradcheck_dist.probes import session

        session.attach(
            options.run_dir,
            objective=options.objective,
            steps=options.steps,
            restart=restart_count(),
            deferred=True,
            exact=options.exact,
            axes=options.axes,
            same_data=options.same_data,
            verify=options.verify,
            meant=options.meant,
            every_step=options.every_step,
            sample_size=options.sample_size,
        )
    except Exception as error:
        say(f"not recording: {type(error).__name__}: {error}")


def say(message: str) -> None:
    """One line on stderr, if there is one."""
    try:
        sys.stderr.write(f"gradcheck: {message}\n")
    except (AttributeError, OSError, ValueError):
        return


boot()
