"""python -m gradcheck_dist.trainer CONFIG.yaml [key=value ...]

Train as the configuration says, one process, or one rank of those that torchrun starts:

    torchrun --nproc-per-node 2 -m gradcheck_dist.trainer CONFIG.yaml accum=3 axes.dp_replicate=2

key=value overrides the file; values are YAML. Prints one line a step. CONFIG.yaml may be left out.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.trainer.config import TrainConfig


def read_config(arguments: list[str]) -> TrainConfig:
    """The configuration that a command line describes.

    Raises:
        GradcheckError: no such file, no YAML mapping, an argument that is neither a file nor key=value, or an illegal
            configuration.
    """
    import yaml

    from gradcheck_dist.yaml_text import load

    values: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        try:
            if equals:
                *parents, last = key.split(".")
                place = values
                for parent in parents:
                    place = place.setdefault(parent, {})
                    if not isinstance(place, dict):
                        raise GradcheckError(
                            f"{argument!r} sets a part of {parent}, which is {place!r}. Only axes has parts.",
                            code="E212",
                        )
                place[last] = load(text, argument)
                continue
            loaded = load(Path(argument).read_text(encoding="utf-8"), argument)
        except OSError as error:
            raise GradcheckError(
                f"{argument!r} is neither key=value nor a file that can be read: {error.strerror}. {__doc__}",
                code="E212",
            ) from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise GradcheckError(
                f"{argument!r} is not YAML: {error}. Write lines such as accum: 3.", code="E212"
            ) from error
        if not isinstance(loaded, dict):
            raise GradcheckError(f"{argument!r} holds {type(loaded).__name__}; legal is a YAML mapping.", code="E212")
        values |= loaded
    return TrainConfig.from_dict(values)


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or 2 for a problem that the message on stderr explains."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        config = read_config(arguments)
        from gradcheck_dist.trainer import loop

        result = loop.train(config)
    except GradcheckError as error:
        print(f"error {error.code}: {error}", file=sys.stderr)
        return error.exit_code
    if result.rank == 0:
        for metrics in result.steps:
            print(
                f"step {metrics.step}  loss {metrics.loss:.4f}  grad_norm {metrics.grad_norm:.4f}  "
                f"tokens {metrics.tokens}  lr {metrics.lr:g}  {metrics.duration_s:.3f} s"
            )
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    # torch 2.13 with gloo may abort while the interpreter shuts down; nothing is left to be done by then.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
