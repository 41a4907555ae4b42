"""Attention over several ranks in one function: what comes back is held against two sums that have to be equal."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attention_workers import VARIANTS
from beside import judged_beside
from torch import Tensor

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.probes.activations import attention
from gradcheck_dist.probes.activations.attention import Attentions, hold, is_attention


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    return judged_beside(tmp_path_factory, "attention_workers:train_all", VARIANTS)


@pytest.mark.parametrize(
    "variant", ["ring", "ring, bfloat16", "ring, sends and receives", "gathered", "gathered, bfloat16"]
)
def test_what_is_attentions_gradient_is_clean(reports: dict[str, Report], variant: str) -> None:
    assert (reports[variant].verdict, reports[variant].findings) == ("clean", [])


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        ("ring, not sent back", ["Ring (attention_workers.py:"]),
        ("ring, keys and values divided", ["summed over these ranks (x 0.5)"]),
        ("ring, sends at once, divided", ["summed over these ranks (x 0.5)"]),
        ("gathered, not summed", ["Gathered (attention_workers.py:"]),
        ("gathered, keys not summed", ["Gathered (attention_workers.py:"]),
        ("delta rule", ["If it is attention"]),
    ],
)
def test_what_cannot_be_leaves_the_verdict_open(reports: dict[str, Report], variant: str, says: list[str]) -> None:
    report = reports[variant]
    assert (report.verdict, report.findings) == ("undetermined", [])
    (reason,) = [reason for reason in report.reasons if "attention over ranks 0 and 1" in reason]
    assert all(one in reason for one in says) and ("(x " in reason) == ("divided" in variant)
    assert "--verify" in report.next_step


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def products(given: list[Tensor], causal: bool, limit: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], int]:
    """What a probe would write of one rank's attention, and how many elements of the output it took."""
    monkeypatch.setattr(attention, "MAX_HELD_BYTES", limit)
    given = [one.requires_grad_() for one in given]
    output = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=True)
    held = hold(Attentions(SimpleNamespace(upcoming_step=0)), given, output)  # type: ignore[arg-type]
    assert held is not None
    upstream = drawn(*output.shape)
    queries, keys, values = torch.autograd.grad(output, given, upstream)
    pairs = zip((upstream, values, queries, keys), held.tensors, strict=True)
    return [float((held.part(one) * other).sum()) for one, other in pairs], held.tensors[0].numel()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("limit", "share"), [(1 << 20, 1), (40_000, 3), (9_000, 12)])
def test_the_sums_are_equal_also_of_one_sequence_and_of_one_head(
    causal: bool, limit: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [drawn(3, 4, 32, 16) + index for index in range(3)]
    (output, values, queries, keys), num = products(given, causal, limit, monkeypatch)
    assert num == 3 * 4 * 32 * 16 // share
    assert output == pytest.approx(values, rel=1e-4) and queries == pytest.approx(keys, abs=1e-3 * abs(output))


def test_heads_that_share_keys_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [drawn(2, 4, 32, 16), drawn(2, 2, 32, 16), drawn(2, 2, 32, 16)]
    assert products(given, False, 30_000, monkeypatch)[1] == 4 * 32 * 16
    with pytest.raises(AssertionError):
        products(given, False, 20_000, monkeypatch)


def test_shapes_tell_queries_keys_and_values() -> None:
    queries, keys, values = drawn(2, 6, 4), drawn(2, 8, 4), drawn(2, 8, 5)
    assert is_attention([queries, keys, values], [drawn(2, 6, 5)])
    assert not is_attention([queries, keys, values], [drawn(2, 6, 4)])
    assert not is_attention([queries, keys], [drawn(2, 6, 4)])
    assert not is_attention([drawn(6, 4)] * 3, [drawn(6, 4)])


def test_what_is_held_keeps_no_graph_and_is_left_out_when_it_changed() -> None:
    given = [drawn(2, 2, 8, 4).requires_grad_() for _ in range(3)]
    output = torch.nn.functional.scaled_dot_product_attention(*given)
    attentions = Attentions(SimpleNamespace(upcoming_step=0))  # type: ignore[arg-type]
    held: Any = hold(attentions, given, output)
    assert all(not one.requires_grad for one in held.tensors) and held.unchanged
    assert attentions.held_bytes == held.num_bytes == 4 * 2 * 2 * 8 * 4 * 4
    with torch.no_grad():
        given[0].add_(1.0)
    assert not held.unchanged
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None
