"""Units: parameters that came out alike, and the weights of each as rows of a table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from statistics import median

from gradcheck_dist.diagnosis.finding import (
    ContributionKey as ReportKey,
)
from gradcheck_dist.diagnosis.finding import UnitInfo, Weight
from gradcheck_dist.diagnosis.weights.cells import Cell, Held, average
from gradcheck_dist.ledger.contributions import ContributionKey, Contributions
from gradcheck_dist.ledger.tracks import ParamKey

Ratios = dict[tuple[int, ContributionKey], tuple[float, float]]
MAX_WRITTEN = 10**4
ALL_PARAMETERS = "all parameters"


def unit_of(held: list[Held]) -> dict[ParamKey, str]:
    """Parameters that came out alike, within tolerance, share a unit, named by what its parameters have in common."""
    cells: dict[ParamKey, Ratios] = defaultdict(dict)
    for one in held:
        cells[one.param].update({(one.rank, cell.key): (cell.ratio, cell.margin) for cell in by_contribution(one)})
    groups: dict[int, list[tuple[Ratios, list[ParamKey]]]] = defaultdict(list)
    for param, ratios in sorted(cells.items(), key=lambda item: _looseness(item[1])):
        for reference, members in groups[param[0]]:
            if _alike(reference, ratios):
                members.append(param)
                break
        else:
            groups[param[0]].append((ratios, [param]))
    names: dict[ParamKey, str] = {}
    taken: set[str] = set()
    for stage, of_stage in sorted(groups.items()):
        for _, params in of_stage:
            name = ALL_PARAMETERS if len(of_stage) == 1 else _unit_name([param[1] for param in sorted(params)])
            if len(groups) > 1:
                name = f"stage {stage}" if len(of_stage) == 1 else f"stage {stage}: {name}"
            names.update(dict.fromkeys(params, _free(name, taken)))
    return names


def parted(
    units: Mapping[ParamKey, str], concerned: Sequence[Collection[ParamKey]], held: Iterable[Held]
) -> dict[ParamKey, str]:
    """The same units, those cut in pieces of which a fault concerns some parameters and not the others: weights may
    come out alike and be wrong in these alone (summands of ranks, what an earlier step left). What is called all
    parameters has another name where a fault concerns some besides, of which nothing was measured.

    Args:
        units: the unit of each parameter.
        concerned: the parameters of each fault.
        held: what was measured. Parameters of which nothing was are not known to be right: they cut no unit.
    """
    measured = {one.param for one in held if one.cells}
    faults: dict[ParamKey, list[int]] = defaultdict(list)
    for nr, params in enumerate(concerned):
        for param in params:
            faults[param].append(nr)
    pieces: dict[str, dict[tuple[int, ...], list[ParamKey]]] = defaultdict(lambda: defaultdict(list))
    for param, unit in units.items():
        pieces[unit][tuple(faults[param])].append(param)
    names, taken = dict(units), set(units.values())
    beside = {nr for nr, params in enumerate(concerned) if not units.keys() >= set(params)}
    several = len({stage for stage, _ in units}) > 1
    for unit, of_unit in pieces.items():
        if len(of_unit) == 2 and measured.isdisjoint(of_unit.get((), measured)):
            continue
        misnamed = unit == ALL_PARAMETERS and any(not beside.isdisjoint(numbers) for numbers in of_unit)
        for params in of_unit.values() if len(of_unit) > 1 or misnamed else ():
            name = _unit_name([param[1] for param in sorted(params)])
            name = _free(f"stage {params[0][0]}: {name}" if several else name, taken)
            names.update(dict.fromkeys(params, name))
    return names


def _free(name: str, taken: set[str]) -> str:
    """A name that no unit has yet, which it is from now on."""
    base, count = name, 2
    while name in taken:
        name, count = f"{base} ({count})", count + 1
    taken.add(name)
    return name


def _looseness(ratios: Ratios) -> float:
    """How badly a parameter was measured: the best measured ones become the references."""
    return max((margin for _, margin in ratios.values()), default=float("inf"))


def _alike(first: Ratios, second: Ratios) -> bool:
    common = first.keys() & second.keys()
    if not common:  # shards on different ranks: compare what each contribution weighs
        one, other = ({key[1]: value for key, value in ratios.items()} for ratios in (first, second))
        return all(_same(one[key], other[key]) for key in one.keys() & other.keys())
    return all(_same(first[key], second[key]) for key in common)


def _same(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return abs(first[0] - second[0]) <= first[1] + second[1] + 1e-9


def _unit_name(params: list[str]) -> str:
    if len(params) == 1:
        return params[0]
    split = [name.split(".") for name in params]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common) + ".*" if common else f"{params[0]} and {len(params) - 1} more"


def unit_list(of_steps: Sequence[Mapping[ParamKey, str]]) -> list[UnitInfo]:
    """The units of the first step, and those of later ones that have names of their own."""
    members: dict[str, list[str]] = {}
    for units in of_steps:
        of_step: dict[str, list[str]] = defaultdict(list)
        for param, unit in units.items():
            of_step[unit].append(param[1])
        members = {**of_step, **members}
    return [UnitInfo(unit=unit, parameters=sorted(set(names))) for unit, names in sorted(members.items())]


def weights(
    step: int,
    held: list[Held],
    names: dict[ParamKey, str],
    contributions: Contributions,
    expected: dict[ContributionKey, Fraction] | None,
) -> list[Weight]:
    """One row for each unit, holder and contribution: the mean over the unit's parameters. Without expected weights the
    observed ones are relative to the contribution's own gradient."""
    rows: dict[tuple[str, int, ContributionKey], list[Cell]] = defaultdict(list)
    alike: dict[tuple[str, int], set[int]] = defaultdict(set)
    for one in held:
        if one.alike and one.cells:
            alike[names[one.param], one.rank].update(one.alike)
        for cell in by_contribution(one):
            rows[names[one.param], one.rank, cell.key].append(cell)
    result = []
    for (unit, rank, key), cells in sorted(rows.items()):
        nominal = median(cell.nominal for cell in cells)
        together = average(cells)
        result.append(
            Weight(
                step=step,
                unit=unit,
                holder_rank=rank,
                contribution=ReportKey(data_rank=key[0], accumulation_step=key[1], microbatch=key[2]),
                num_tokens=contributions.by_key[key].num_tokens,
                expected=float(expected[key]) if expected is not None else None,
                expected_exact=_exact(expected[key]) if expected is not None else None,
                nominal=nominal if nominal == nominal else None,
                observed=together.observed,
                ratio=together.ratio,
                stderr=together.stderr * max(abs(together.ratio), 1.0) * float(together.expected),
                alike_ranks=sorted(alike.get((unit, rank), ())),
            )
        )
    return result


def by_contribution(held: Held) -> list[Cell]:
    """One cell a contribution, also where its gradient arrived as several summands."""
    cells: dict[ContributionKey, list[Cell]] = defaultdict(list)
    for cell in held.cells:
        cells[cell.key].append(cell)
    return [_share(summands) for summands in cells.values()]


def _share(summands: list[Cell]) -> Cell:
    """A contribution whose gradient arrived as summands on several ranks (tensor parallel), as one cell: their mean."""
    if len(summands) == 1:
        return summands[0]
    count = len(summands)
    return replace(
        summands[0],
        nominal=sum(cell.nominal for cell in summands) / count,
        observed=sum(cell.observed for cell in summands) / count,
        ratio=sum(cell.ratio for cell in summands) / count,
        stderr=sum(cell.stderr**2 for cell in summands) ** 0.5 / count,
    )


def _exact(weight: Fraction) -> str | None:
    """A weight as a fraction, where it is one that a person would write."""
    return str(weight) if weight.numerator < MAX_WRITTEN else None
