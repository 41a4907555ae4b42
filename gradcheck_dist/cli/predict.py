"""gradcheck predict"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradcheck_dist.cli.output import DataFormat
from gradcheck_dist.errors import GradcheckError


def predict(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A YAML file with the options below as keys.")
    ] = None,
    ddp: Annotated[int | None, typer.Option(help="Ranks of DistributedDataParallel.")] = None,
    fsdp: Annotated[int | None, typer.Option(help="Ranks that FSDP2 shards over.")] = None,
    hsdp: Annotated[int | None, typer.Option(help="Replicas of the FSDP2 shards.")] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.")] = None,
    pp: Annotated[int | None, typer.Option(help="Pipeline stages.")] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel ranks, out of fsdp * cp.")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Pipeline microbatches a schedule step.")] = None,
    accum: Annotated[int | None, typer.Option(help="Gradient accumulation steps.")] = None,
    loss: Annotated[
        str | None, typer.Option(help="global-token-mean, rank-token-mean, microbatch-mean or sum.")
    ] = None,
    loss_scale: Annotated[str | None, typer.Option(help="What the loss is multiplied by: R, M/K, 8 ...")] = None,
    objective: Annotated[
        str | None, typer.Option(help="What the gradient is meant to be: a name as for --loss.")
    ] = None,
    reduction: Annotated[str | None, typer.Option(help="What DDP does: average or sum.")] = None,
    sync: Annotated[str | None, typer.Option(help="When it reduces: last or every-backward.")] = None,
    scale_grads: Annotated[
        bool | None,
        typer.Option(
            "--scale-grads/--no-scale-grads",
            help="The schedule divides by its microbatches. torch's default; here off.",
        ),
    ] = None,
    divide_factor: Annotated[float | None, typer.Option(help="FSDP2's set_gradient_divide_factor.")] = None,
    force_sum: Annotated[
        bool | None, typer.Option("--force-sum/--no-force-sum", help="FSDP2's set_force_sum_reduction_for_comms.")
    ] = None,
    reduce_dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    what_if: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Also show it with this changed; may be repeated.")
    ] = None,
    form: Annotated[DataFormat, typer.Option("--format", help="How to write it.")] = DataFormat.text,
) -> None:
    """Say what each part of a configuration scales by; nothing is run.

    Exit code 0 when every token weighs what the objective says, 1 when not.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("config", "what_if", "form"):
        given.pop(name, None)
    from gradcheck_dist.predict import render
    from gradcheck_dist.predict.model import Setup, changed
    from gradcheck_dist.predict.model import predict as ask

    setup = Setup(**{**_read(config), **given})
    predictions = {"as configured": ask(setup)}
    for assignment in what_if or []:
        predictions[f"with {assignment}"] = ask(changed(setup, assignment))
    if form == DataFormat.json:
        typer.echo(render.as_json(predictions))
    else:
        typer.echo("\n\n".join(render.text(prediction, name) for name, prediction in predictions.items()))
    raise typer.Exit(0 if predictions["as configured"].right else 1)


def _read(path: Path | None) -> dict[str, Any]:
    """The settings of a YAML file.

    Raises:
        GradcheckError: E714 it cannot be read, is no mapping, or has keys that are no settings.
    """
    if path is None:
        return {}
    from dataclasses import fields

    import yaml

    from gradcheck_dist.errors import unknown_value
    from gradcheck_dist.predict.model import Setup
    from gradcheck_dist.yaml_text import in_words, load

    try:
        content = load(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise GradcheckError(
            f"cannot read {path}: {in_words(error)}. Name a YAML file of settings.", code="E714"
        ) from error
    if not isinstance(content, dict):
        raise GradcheckError(f"{path} holds no settings by name. Write lines like `ddp: 4`.", code="E714")
    legal = {entry.name for entry in fields(Setup)}
    for key in content:
        if key not in legal:
            raise unknown_value(f"setting in {path}:", key, legal, code="E714")
    return content
