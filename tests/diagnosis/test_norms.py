"""The norm of a model's gradient out of what each rank holds, and which norm a clip used. Made by hand, no process."""

from __future__ import annotations

from math import inf, prod, sqrt
from types import SimpleNamespace
from typing import Any

import pytest

from gradcheck_dist.diagnosis.norms.clips import COPIES, RIGHT, SHARDS, SOME, STAGE, UNNAMED, is_round, judge_clips
from gradcheck_dist.diagnosis.norms.hand_norms import wrong_norm
from gradcheck_dist.diagnosis.norms.step_norms import ClipCall, Interval, Part, StepNorms, norm_of
from gradcheck_dist.diagnosis.weights.factors import name_number
from gradcheck_dist.events import Clip, OptimizerStep

Box = tuple[tuple[int, ...], tuple[int, ...]]
SIZE = 8
WHOLE: Box = ((0,), (SIZE,))
FIRST: Box = ((0,), (SIZE // 2,))
SECOND: Box = ((SIZE // 2,), (SIZE // 2,))


def part(name: str, rank: int, norm: float, box: Box | None = WHOLE, *, stage: int = -1, **known: object) -> Part:
    fields = {"partial": False, "num_nonfinite": 0, "dtype": "float32", "size": SIZE} | known
    whole = box is not None and prod(box[1]) == fields["size"]
    return Part(key=(stage, name), rank=rank, norm=norm, box=box, whole=whole, **fields)  # type: ignore[arg-type]


def clipped(parts: dict[int, list[Part]], norms: dict[int, float], max_norm: float = 1.0) -> StepNorms:
    """One call of a clip on every rank, all of one model."""
    calls = []
    for rank, norm in norms.items():
        event = Clip(seq=1, t_ns=0, step=0, params=0, max_norm=max_norm, norm_type=2.0, total_norm=norm,
                     coefficient=min(1.0, max_norm / (norm + 1e-6)), norm_dtype="float32")  # fmt: skip
        calls.append(ClipCall(rank, event, tuple(parts[rank]), ("train.py", 3, 0)))
    held = {(one.rank, one.key): one for of_rank in parts.values() for one in of_rank}
    return StepNorms(calls, held, [frozenset(parts)])


def meanings(norms: StepNorms) -> list[str]:
    return [one.meaning for one in judge_clips(norms)]


SHARDED = {0: [part("w", 0, 3.0, FIRST)], 1: [part("w", 1, 4.0, SECOND)]}
STAGES = {0: [part("w", 0, 3.0, stage=0)], 1: [part("w", 1, 4.0, stage=1)]}
REPLICATED = {rank: [part("w", rank, 3.0), part("n", rank, 4.0)] for rank in (0, 1)}
TENSOR = {0: [part("w", 0, 3.0, FIRST), part("n", 0, 1.0)], 1: [part("w", 1, 4.0, SECOND), part("n", 1, 1.0)]}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [(SHARDED, 5.0), (STAGES, 5.0), (REPLICATED, 5.0), (TENSOR, sqrt(26.0))],
    ids=["shards", "stages", "copies", "shards and copies"],
)
def test_parts_add_up_and_copies_count_once(parts: dict[int, list[Part]], expected: float) -> None:
    norm = norm_of(one for of_rank in parts.values() for one in of_rank)
    assert norm.known and norm.exact
    assert norm.middle == pytest.approx(expected)


def test_a_missing_shard_leaves_the_norm_unknown() -> None:
    assert not norm_of(SHARDED[0]).known


def test_overflowed_elements_leave_the_norm_unknown() -> None:
    assert not norm_of([part("w", 0, 3.0, num_nonfinite=1)]).known


def test_summands_leave_an_interval() -> None:
    norm = norm_of([part("n", 0, 3.0, partial=True), part("n", 1, 4.0, partial=True)])
    assert (norm.low, norm.high, norm.exact) == (0.0, pytest.approx(7.0), False)


def test_copies_that_disagree_may_be_parts() -> None:
    norm = norm_of([part("b", 0, 3.0), part("b", 1, 4.0)])
    assert (norm.low, norm.high) == (pytest.approx(3.0), pytest.approx(5.0))


def test_a_layout_that_is_not_known_may_be_either() -> None:
    norm = norm_of([part("flat", 0, 3.0, None), part("flat", 1, 4.0, None)])
    assert (norm.low, norm.high) == (pytest.approx(4.0), pytest.approx(5.0))


def test_tied_matrices_may_count_once_or_twice() -> None:
    norm = norm_of([part("embedding", 0, 3.0, stage=0), part("head", 1, 3.0, stage=1)])
    assert norm.holds(3.0, 1e-6) and norm.holds(sqrt(18.0), 1e-6)


@pytest.mark.parametrize("parts", [SHARDED, STAGES, REPLICATED], ids=["shards", "stages", "copies"])
def test_the_norm_of_the_model_is_right(parts: dict[int, list[Part]]) -> None:
    assert meanings(clipped(parts, {0: 5.0, 1: 5.0})) == [RIGHT, RIGHT]


def test_a_norm_within_torchs_own_error_is_right() -> None:
    size = 67_000_000
    large: Box = ((0,), (size,))
    parts = {0: [part("w", 0, 1.0, large, size=size)]}
    assert meanings(clipped(parts, {0: 1.0 + 5.1e-3})) == [RIGHT]
    assert meanings(clipped({0: [part("w", 0, 1.0)]}, {0: 1.0 + 5.1e-3})) == [UNNAMED]


@pytest.mark.parametrize(
    ("parts", "used", "meaning"),
    [
        (SHARDED, (3.0, 4.0), SHARDS),
        (STAGES, (3.0, 4.0), STAGE),
        (REPLICATED, (sqrt(50.0), sqrt(50.0)), COPIES),
        (TENSOR, (sqrt(27.0), sqrt(27.0)), COPIES),
        (SHARDED, (3.5, 3.5), "the mean of the ranks' own norms"),
        (SHARDED, (sqrt(12.5), sqrt(12.5)), "the root of the mean of the squares of the ranks' own norms"),
        (STAGES, (7.0, 7.0), "the sum of the ranks' own norms, without squares"),
        (REPLICATED, (2.5, 2.5), UNNAMED),
    ],
    ids=[
        "own shards",
        "own stage",
        "copies once a rank",
        "replicated parts twice",
        "mean",
        "mean square",
        "sum",
        "half",
    ],
)
def test_a_wrong_norm_is_named_by_what_it_is_the_norm_of(
    parts: dict[int, list[Part]], used: tuple[float, float], meaning: str
) -> None:
    judged = judge_clips(clipped(parts, dict(enumerate(used))))
    assert [one.meaning for one in judged] == [meaning, meaning]
    assert all(one.matters for one in judged)


def test_a_norm_that_only_is_reported_does_not_matter() -> None:
    assert not any(one.matters for one in judge_clips(clipped(SHARDED, {0: 3.0, 1: 4.0}, max_norm=inf)))


def test_ranks_that_train_models_of_their_own_clip_by_their_own_norms() -> None:
    norms = clipped(STAGES, {0: 3.0, 1: 4.0})
    norms.linked = [frozenset({0}), frozenset({1})]
    assert meanings(norms) == [RIGHT, RIGHT]


def test_nothing_is_said_of_a_norm_that_is_not_wholly_known() -> None:
    assert meanings(clipped({0: SHARDED[0]}, {0: 3.5})) == []
    flat = {0: [part("flat", 0, 3.0, None)], 1: [part("flat", 1, 4.0, None)]}
    assert judge_clips(clipped(flat, {0: 3.5, 1: 3.5})) == []


@pytest.mark.parametrize("value", [1.0, 0.5, 0.25, 10.0, 0.1 * (1 + 5e-5)])
def test_people_write_round_numbers(value: float) -> None:
    assert is_round(value)


@pytest.mark.parametrize("value", [0.3714, 1.003, 0.0, -1.0, inf, 0.1 * (1 + 5e-4)])
def test_other_numbers_come_out_of_something(value: float) -> None:
    assert not is_round(value)


def test_where_rounding_is_coarse_only_one_digit_counts() -> None:
    assert is_round(0.5015, 5e-3) and not is_round(0.25, 5e-3)


def test_an_interval_holds_what_lies_inside() -> None:
    assert Interval(1.0, 2.0).holds(1.5, 0.0) and not Interval(1.0, 2.0).holds(2.1, 1e-3)


def test_a_rank_without_norms_may_hold_what_is_missing() -> None:
    norms = clipped({0: STAGES[0]}, {0: 5.0})
    assert meanings(norms) == [UNNAMED]
    norms = clipped({0: STAGES[0]}, {0: 5.0})
    norms.blind = frozenset({1})
    assert meanings(norms) == []


MESH = {
    0: [part("w", 0, 3.0, FIRST, stage=0)],
    1: [part("w", 1, 4.0, SECOND, stage=0)],
    2: [part("w", 2, 5.0, FIRST, stage=1)],
    3: [part("w", 3, 7.0, SECOND, stage=1)],
}
SHARD_GROUPS = frozenset({frozenset({0, 1}), frozenset({2, 3})})
STAGE_GROUPS = frozenset({frozenset({0, 2}), frozenset({1, 3})})


@pytest.mark.parametrize(
    ("used", "meaning", "ranks"),
    [
        ({0: sqrt(34), 1: sqrt(65), 2: sqrt(34), 3: sqrt(65)}, SOME, [{0, 2}, {1, 3}, {0, 2}, {1, 3}]),
        ({0: 5.0, 1: 5.0, 2: sqrt(74), 3: sqrt(74)}, STAGE, [set()] * 4),
        ({0: 3.0, 1: 4.0, 2: 5.0, 3: 7.0}, SHARDS, [set()] * 4),
        ({0: 6.0, 1: 6.0, 2: 6.0, 3: 6.0}, UNNAMED, [set()] * 4),
        (dict.fromkeys(range(4), sqrt(99)), RIGHT, [set()] * 4),
    ],
    ids=["over stages alone", "over shards alone", "over nothing", "of nothing", "over both"],
)
def test_a_norm_that_is_combined_along_some_axes_only_is_told(
    used: dict[int, float], meaning: str, ranks: list[set[int]]
) -> None:
    norms = clipped(MESH, used)
    norms.axes = [SHARD_GROUPS, STAGE_GROUPS]
    judged = judge_clips(norms)
    assert [one.meaning for one in judged] == [meaning] * 4
    assert [set(one.ranks) for one in judged] == ranks


COUNTED_AGAIN = {
    "copies": {rank: [part("w", rank, 0.45 / sqrt(2))] for rank in (0, 1)},
    "experts": {rank: [part("w", rank, 0.06), part(f"expert {rank % 2}", rank, 0.04)] for rank in range(4)},
}
"""What makes a round norm, where that of the model is none."""


@pytest.mark.parametrize("kind", COUNTED_AGAIN)
@pytest.mark.parametrize(("factor", "counted"), [(0.4871, True), (0.5, False)], ids=["a norm's", "a number of ranks"])
def test_a_round_norm_of_what_is_counted_again_is_no_clips_where_the_factor_is_a_constant(
    factor: float, counted: bool, kind: str
) -> None:
    parts = COUNTED_AGAIN[kind]
    quantities = {"accumulation_steps": 2.0, "num_tokens": 97.0}
    cells = [SimpleNamespace(ratio=factor, margin=1e-5)]
    held: Any = SimpleNamespace(rank=0, ranks=tuple(parts), cells=cells, param=None)
    step = OptimizerStep(seq=9, t_ns=0, step=0, optimizer="SGD", params=0)
    culprit = SimpleNamespace(unrecorded=True, before=step, kind="loss", event=None, write=None, rank=0)
    pattern = SimpleNamespace(kind="uniform", factor=factor, tolerance=1e-5)
    names = name_number(factor, quantities, 1e-5)
    case: Any = SimpleNamespace(
        culprit=culprit, held=[held], pattern=pattern, names=names, combined_unseen=False,
        context=SimpleNamespace(quantities=quantities, contributions=SimpleNamespace(coordinate={0: 0, 1: 0})),
    )  # fmt: skip
    data: Any = SimpleNamespace(events={rank: [] for rank in parts}, tracks={})
    found = wrong_norm([case], [held], data, clipped(parts, {}))
    assert (found is not None and found.meaning == COPIES) is counted
