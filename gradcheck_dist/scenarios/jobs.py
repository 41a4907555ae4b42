"""From a scenario and the command line to one training configuration a variant, before any process starts."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.scenarios.formula import Formula
from gradcheck_dist.scenarios.schema import RIGHT, Scenario, Variant
from gradcheck_dist.trace.run import trace_files
from gradcheck_dist.trainer.config import TrainConfig
from gradcheck_dist.trainer.documents import read_documents
from gradcheck_dist.wording import plural


@dataclass(frozen=True)
class Overrides:
    """What the command line sets; None leaves the scenario's own value."""

    nproc: int | None = None
    accum: int | None = None
    microbatches: int | None = None
    seed: int | None = None
    steps: int | None = None
    dtype: str | None = None
    data: str | None = None


def check(scenario: Scenario, overrides: Overrides, keep: Path | None) -> dict[str, TrainConfig]:
    """The training job of each variant, after everything that can be known to fail has been looked at.

    Raises:
        GradcheckError: as `configurations`; the data cannot be used; or `keep` holds recorded data (E511)
            or cannot be a folder that this user may write to (E512).
    """
    configs = configurations(scenario, overrides)
    _check_data(scenario, overrides, configs)
    if keep is not None and (file := next((one for one in (keep, *keep.parents) if one.is_file()), None)) is not None:
        raise GradcheckError(
            f"cannot make the folder {keep}: {file} is a file. Name a folder for the runs.", code="E512"
        )
    there = next((one for one in (keep, *keep.absolute().parents) if one.exists()), None) if keep is not None else None
    if there is not None and not os.access(there, os.W_OK | os.X_OK):
        raise GradcheckError(
            f"cannot write into {keep}: this user may not write to {there}. Name another folder.", code="E512"
        )
    taken = [name for name in configs if keep is not None and trace_files(keep / name)]
    if taken:
        raise GradcheckError(
            f"{keep} already holds recorded runs ({', '.join(taken)}), and nothing recorded is ever overwritten. "
            "Name another folder, or remove this one first.",
            code="E511",
        )
    return configs


def _check_data(scenario: Scenario, overrides: Overrides, configs: Mapping[str, TrainConfig]) -> None:
    """E609 where one step would see a document twice: ranks that share data are a bug of its own (GS701)."""
    documents = len(read_documents(overrides.data))
    wanted = max(config.sequences_per_step for config in configs.values())
    if documents < wanted:
        source = f"--data {overrides.data}" if overrides.data is not None else "the package's own text"
        raise GradcheckError(
            f"{source} holds {plural(documents, 'document')}, and one step of scenario {scenario.name} sees {wanted}: "
            "ranks would train on the same. Name more text (blank lines divide documents), or choose a smaller "
            "--nproc, --accum or --microbatches.",
            code="E609",
        )


def configurations(scenario: Scenario, overrides: Overrides) -> dict[str, TrainConfig]:
    """The training job of each variant.

    Raises:
        GradcheckError: the sizes do not fit the scenario or its mesh (E604) or leave a variant without its bug (E605),
            or the trainer refuses a value.
    """
    configs = {variant.name: _configuration(scenario, variant, overrides) for variant in scenario.variants}
    for variant in scenario.variants:
        config = configs[variant.name]
        for expected in variant.expect:
            if expected.ratio.text != RIGHT and not _shows(expected.ratio, config):
                raise GradcheckError(
                    f"with nproc={config.axes.world_size}, accum={config.accum}, microbatches={config.microbatches} "
                    f"variant {variant.name} of scenario {scenario.name} cannot show its bug: {expected.ratio.text} "
                    "is 1 everywhere. Choose larger sizes.",
                    code="E605",
                )
    return configs


def refusal(scenario: Scenario, overrides: Overrides) -> GradcheckError | None:
    """Why a scenario that is sound by itself cannot have what the command line sets; None where it can.

    Raises:
        GradcheckError: the scenario is not sound by itself.
    """
    configurations(scenario, Overrides())
    try:
        configurations(scenario, overrides)
    except GradcheckError as error:
        return error
    return None


def sizes_of(config: TrainConfig) -> dict[str, int]:
    """The values of the names in formulas that are the same for every weight of a job."""
    sizes = {"R": config.gradient_ranks, "K": config.accum, "M": config.microbatches}
    return {**sizes, "S": config.sequences_per_step, **config.axes.as_dict()}


def _shows(ratio: Formula, config: TrainConfig) -> bool:
    """Whether some weight is off for these sizes, however many tokens there are."""
    fixed = {**sizes_of(config), "N": 1009, "N_r": 101, "n_c": 11}
    ranks = {0, config.gradient_ranks - 1}
    places = itertools.product(range(config.accum), {0, config.microbatches - 1}, ranks, ranks)
    return any(ratio.evaluate({**fixed, "k": k, "m": m, "r": r, "h": h}) != 1 for k, m, r, h in places)


def _configuration(scenario: Scenario, variant: Variant, overrides: Overrides) -> TrainConfig:
    sizes = {size: getattr(overrides, size) for size in scenario.defaults if getattr(overrides, size) is not None}
    for size in scenario.fixed_sizes:
        if sizes.get(size, scenario.defaults[size]) != scenario.defaults[size]:
            raise GradcheckError(
                f"--{size} is {sizes[size]}; scenario {scenario.name} shows its bug with {size}="
                f"{scenario.defaults[size]} only. Leave --{size} out.",
                code="E604",
            )
    # What belongs to one variant beats what belongs to all, and the command line beats both.
    values: dict[str, Any] = {**scenario.config, **scenario.defaults, **variant.config, **sizes}
    values["axes"] = _degrees(scenario, values.pop("nproc"))
    values |= {name: value for name in ("dtype", "data") if (value := getattr(overrides, name)) is not None}
    return TrainConfig.from_dict({**values, "faults": list(variant.faults)})


def _degrees(scenario: Scenario, nproc: int) -> dict[str, int]:
    fixed = {axis: degree for axis, degree in scenario.mesh.items() if isinstance(degree, int)}
    growing = next(axis for axis, degree in scenario.mesh.items() if degree == "nproc")
    # ep borrows its ranks from the others
    taken, least = math.prod(degree for axis, degree in fixed.items() if axis != "ep"), scenario.defaults["nproc"]
    if nproc < least or nproc % taken:
        counts = " * ".join(
            f"{axis}={degree}" for axis, degree in [*fixed.items(), (growing, "the rest")] if axis != "ep"
        )
        raise GradcheckError(
            f"--nproc is {nproc}; scenario {scenario.name} lays its ranks out as {counts}. Legal values: "
            f"{least}, {least + taken}, {least + 2 * taken} and so on. Try --nproc "
            f"{max(least, taken * math.ceil(nproc / taken))}.",
            code="E604",
        )
    return {**fixed, growing: nproc // taken}
