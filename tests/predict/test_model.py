"""The analytic model alone: which hand scales by what, and what is left over."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.predict.fsdp_factors import gradient_divide_factors
from gradcheck_dist.predict.model import Setup, changed, predict
from gradcheck_dist.predict.monomial import Monomial, number, symbol
from gradcheck_dist.predict.render import advice, text, unused


def ratios(**settings: object) -> list[Fraction]:
    found = predict(Setup(**settings)).ratios  # type: ignore[arg-type]
    assert found is not None
    return found


def test_ddp_that_averages_a_loss_divided_by_all_tokens_leaves_one_over_r() -> None:
    prediction = predict(Setup(ddp=4, accum=3))
    assert str(prediction.ratio) == "1/R"
    assert prediction.ratios == [Fraction(1, 4)] * 3


def test_a_sum_in_every_backward_grows_with_the_remaining_steps() -> None:
    assert ratios(ddp=2, accum=3, reduction="sum", sync="every-backward") == [4, 2, 1]


def test_an_average_in_every_backward_changes_nothing() -> None:
    assert ratios(ddp=2, accum=3, sync="every-backward", loss_scale="R") == [1, 1, 1]


def test_a_schedule_that_rescales_leaves_the_last_step_right() -> None:
    found = ratios(pp=2, microbatches=4, accum=3, scale_grads=True, loss_scale="M")
    assert found == [Fraction(1, 16), Fraction(1, 4), 1]


def test_a_mean_of_means_depends_on_tokens_and_has_no_constant() -> None:
    prediction = predict(Setup(ddp=2, accum=2, loss="microbatch-mean", loss_scale="1/K"))
    assert prediction.ratios is None and not prediction.right
    assert str(prediction.ratio) == "N/(K * R * n_c)"
    assert "Normalise the loss for global-token-mean" in advice(prediction)[0]


def test_a_mean_of_means_is_right_when_it_is_the_objective() -> None:
    assert predict(Setup(ddp=2, accum=2, loss="microbatch-mean", loss_scale="1/K", objective="microbatch-mean")).right


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fsdp": 8}, Fraction(1, 8)),
        ({"fsdp": 8, "hsdp": 4}, Fraction(1, 32)),
        ({"fsdp": 8, "hsdp": 4, "reduce_dtype": "float16"}, Fraction(1, 32)),
        ({"fsdp": 8, "divide_factor": 1.0, "force_sum": True}, 1),
        ({"fsdp": 8, "divide_factor": 1.0}, 1),
        ({"fsdp": 8, "divide_factor": 8.0}, Fraction(1, 8)),
        ({"fsdp": 4, "cp": 2, "loss_scale": "R"}, 1),
        ({"fsdp": 50_000, "hsdp": 2, "loss_scale": "R"}, 1),
    ],
)
def test_fsdp_and_hsdp_divide_as_their_factors_say(settings: dict[str, object], expected: Fraction) -> None:
    assert ratios(**settings) == [expected]


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("factor", [None, 1.0, 4.0, 6.0, 16.0])
@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize(("shard", "replicate"), [(1, 1), (4, 1), (4, 2), (6, 3)])
def test_the_mirrored_factors_are_torchs_own(
    reduce_dtype: str, factor: float | None, force_sum: bool, shard: int, replicate: int
) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    from gradcheck_dist.probes.reductions.collectives import op_name

    class Group:
        def __init__(self, size: int) -> None:
            self._size = size

        def size(self) -> int:
            return self._size

    pre, post, shard_op, replicate_op = _get_gradient_divide_factors(
        Group(shard),
        Group(replicate) if replicate > 1 else None,
        getattr(torch, reduce_dtype),
        "cpu",
        factor,
        force_sum,
    )
    mine = gradient_divide_factors(shard, replicate, reduce_dtype, factor, force_sum)
    assert (mine.pre, mine.post) == (pre, post)
    assert (mine.shard_op, mine.replicate_op) == (op_name(shard_op), op_name(replicate_op))
    assert mine.premul is None or mine.premul == shard_op.factor


def test_what_if_changes_one_field_and_names_what_it_does_not_know() -> None:
    setup = Setup(pp=2, microbatches=2, accum=2, scale_grads=True)
    assert changed(setup, "scale_grads=off").scale_grads is False
    assert changed(setup, "accum=7").accum == 7
    with pytest.raises(GradcheckError, match="Did you mean scale_grads"):
        changed(setup, "scale_grad=off")
    with pytest.raises(GradcheckError, match="legal values are on or off"):
        changed(setup, "scale_grads=perhaps")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ddp": 0}, "integers from 1 up"),
        ({"ddp": 2, "fsdp": 2}, "two ways of data parallelism"),
        ({"hsdp": 2}, "shards nothing"),
        ({"fsdp": 2, "ep": 3}, "does not divide"),
        ({"loss": "tokens"}, "Legal values"),
        ({"loss_scale": "Q"}, "legal are R, K, M, N"),
        ({"divide_factor": -1.0}, "must be positive"),
    ],
)
def test_a_setup_that_cannot_be_is_refused_with_the_legal_values(settings: dict[str, object], words: str) -> None:
    with pytest.raises(GradcheckError, match=words):
        Setup(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"ddp": 4, "divide_factor": 3.0}, {"divide_factor": "FSDP2"}),
        ({"fsdp": 4, "reduction": "sum"}, {"reduction": "DDP"}),
        ({"accum": 3, "scale_grads": True, "sync": "every-backward"}, {"sync": "--ddp 2", "scale_grads": "pipeline"}),
        ({"pp": 2, "scale_grads": True}, {}),
        ({"fsdp": 4, "divide_factor": 3.0, "force_sum": True, "reduce_dtype": "float16"}, {}),
        ({"cp": 2, "reduction": "sum"}, {}),
    ],
)
def test_a_setting_that_has_nothing_to_act_on_is_told(settings: dict[str, Any], needed: dict[str, str]) -> None:
    setup = Setup(**settings)
    told = dict(zip(needed, unused(setup), strict=True))
    for name, remark in told.items():
        assert remark.startswith(f"{name} changes nothing here") and needed[name] in remark
        assert predict(replace(setup, **{name: getattr(Setup(), name)})).ratio == predict(setup).ratio
        assert remark in text(predict(setup))


def test_following_the_advice_makes_it_right() -> None:
    prediction = predict(Setup(ddp=4, pp=2, microbatches=3, accum=5, scale_grads=True, loss_scale="M"))
    lines = " ".join(advice(prediction))
    assert "scale_grads=False" in lines and "Multiply the loss by R/M" in lines
    assert predict(Setup(ddp=4, pp=2, microbatches=3, accum=5, loss_scale="M*R/M")).right


def test_a_mean_of_means_counts_all_that_it_averages_over() -> None:
    means = {"objective": "microbatch-mean", "loss": "microbatch-mean"}
    assert ratios(**means, ddp=2, pp=2, microbatches=4, accum=3) == [Fraction(12)] * 3
    assert ratios(**means, ddp=2, pp=2, microbatches=4, accum=3, loss_scale="1/M/K") == [Fraction(1)] * 3


def test_factors_that_cancel_by_their_numbers_only_are_pointed_out() -> None:
    assert "at these sizes only" in text(predict(Setup(ddp=4, pp=2, microbatches=4, loss_scale="M")))


def test_the_ratio_is_shown_by_accumulation_step_where_it_differs() -> None:
    assert "  ratio    1/4 in every accumulation step\n" in text(predict(Setup(ddp=4, accum=10)))
    assert "  ratio    1/64  1/16  1/4  (k = 0 .. 2)\n" in text(
        predict(Setup(pp=2, microbatches=4, accum=3, scale_grads=True))
    )


@pytest.mark.parametrize(
    ("change", "legal"),
    [
        ("ddp=x", "integers from 1 up"),
        ("scale_grads=maybe", "on or off"),
        ("divide_factor=x", "positive numbers and none"),
    ],
)
def test_a_change_that_cannot_be_is_told_with_the_legal_values(change: str, legal: str) -> None:
    with pytest.raises(GradcheckError, match=f"legal values are {legal}"):
        changed(Setup(), change)


def test_a_hundred_thousand_ranks_take_no_time() -> None:
    started = time.perf_counter()
    assert predict(Setup(fsdp=25_000, hsdp=4, tp=8, pp=16, microbatches=64, accum=100, loss_scale="R")).right
    assert time.perf_counter() - started < 0.5


powers = st.dictionaries(st.sampled_from("RMKS"), st.tuples(st.integers(-3, 3), st.integers(-2, 2)), max_size=3)


@given(powers, powers, st.integers(1, 5), st.integers(0, 4))
def test_the_value_of_a_product_is_the_product_of_the_values(
    first: dict[str, tuple[int, int]], second: dict[str, tuple[int, int]], num_accumulation: int, k: int
) -> None:
    k = min(k, num_accumulation - 1)
    values = {"R": Fraction(3), "M": Fraction(4), "K": Fraction(num_accumulation), "S": Fraction(5)}

    def build(exponents: dict[str, tuple[int, int]]) -> Monomial:
        result = number(Fraction(2, 3))
        for name, (constant, slope) in exponents.items():
            result = result * symbol(name, constant, slope)
        return result

    one, other = build(first), build(second)
    assert (one * other).value(values, num_accumulation, k) == one.value(values, num_accumulation, k) * other.value(
        values, num_accumulation, k
    )
    assert (one / one) == Monomial()
