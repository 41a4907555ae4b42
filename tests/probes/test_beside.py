"""DDP averages a loss that was divided by all tokens, beside another loss: what divides it is no coefficient."""

from __future__ import annotations

import pytest
import torch
from beside_workers import LOSSES, Unread
from msgspec import structs

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.events import LossGradient
from gradcheck_dist.probes.losses.reductions import numbers_at
from gradcheck_dist.trace.run import Run, read_run
from gradcheck_dist.trainer.launch import launch, warm_up

EQUAL, UNEQUAL = [6, 6], [5, 8]


@pytest.fixture(scope="module", params=[EQUAL, UNEQUAL], ids=["equal", "unequal"])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, dict[str, Report]]:
    folder = tmp_path_factory.mktemp("beside")
    warm_up()
    launch("beside_workers:train_all", (list(LOSSES), request.param, str(folder)), 2, timeout_s=90)
    runs = {name: read_run(folder / name.replace(" ", "_")) for name in LOSSES}
    found = {name: diagnose(run) for name, run in runs.items()}
    return request.param == EQUAL, found | {f"{name}, unread": diagnose(unread(run)) for name, run in runs.items()}


def unread(run: Run) -> Run:
    """The same run of ranks whose numbers in tensors lie on a device."""
    for rank in run.ranks.values():
        rank.events[:] = [
            structs.replace(event, divisors=[None for _ in event.divisors or ()])
            if isinstance(event, LossGradient)
            else event
            for event in rank.events
        ]
    return run


@pytest.mark.parametrize("name", [name for name in LOSSES if name.startswith("divided")])
def test_an_average_of_what_all_tokens_divide_is_accused(reports: tuple[bool, dict[str, Report]], name: str) -> None:
    equal, of = reports
    if equal and name == "divided, as a share":  # 1/2 of each rank's mean, as a coefficient makes it
        assert (of[name].verdict, of[name].findings) == ("undetermined", [])
        return
    (finding,) = of[name].findings
    assert (finding.code, finding.factor.expression) == ("GS101", "1/dp_replicate")


def test_a_coefficient_of_one_over_the_ranks_accuses_nobody(reports: tuple[bool, dict[str, Report]]) -> None:
    equal, of = reports
    assert (of["right"].verdict, of["right"].findings) == ("clean", [])
    assert (of["a coefficient"].verdict, of["a coefficient"].findings) == ("undetermined", [])
    if equal:
        before = of["a coefficient before the mean"]
        assert (before.verdict, before.findings) == ("undetermined", [])


def test_ranks_times_a_sum_over_each_rank_s_own_tokens_is_left_open(reports: tuple[bool, dict[str, Report]]) -> None:
    """Beside a loss that nothing multiplies 2 may be a coefficient, or tokens were not summed over the ranks."""
    equal, of = reports
    for read in ("", ", unread"):
        twice, own = of[f"alone, twice a mean{read}"], of[f"alone, its own count{read}"]
        assert (twice.verdict, twice.findings) == ("clean", [])
        assert (own.verdict, own.findings) == ("clean" if equal else "undetermined", [])
        assert equal or any("summed over these first" in reason for reason in own.reasons)


def test_a_number_that_may_call_a_collective_is_not_read() -> None:
    """A DTensor is gathered from the ranks where it is turned into a number."""
    loss = torch.ones((), requires_grad=True)
    plain = numbers_at([(loss / torch.tensor(2.0)).grad_fn])
    assert (plain.multipliers, plain.divisors) == ([], [2.0])
    node = (loss / torch.tensor(2.0).as_subclass(Unread)).grad_fn
    assert node is not None
    unread = numbers_at([node.next_functions[0][0]])
    assert (unread.multipliers, unread.divisors) == ([], [None])
