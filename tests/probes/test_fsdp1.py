"""FSDP1: parameters inside of flat ones are judged under their own names, whatever the strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_dist.diagnosis.engine import diagnose
from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.trace.run import read_run
from gradcheck_dist.trainer.launch import launch, warm_up

NAMES = ["block.down.bias", "block.down.weight", "block.norm.bias", "block.norm.weight", "block.up.bias",
         "block.up.weight", "embed.weight", "head.weight"]  # fmt: skip
RIGHT = ("FULL_SHARD", "FULL_SHARD flat no-sync", "SHARD_GRAD_OP no-sync bf16", "NO_SHARD flat", "NO_SHARD no-sync",
         "FULL_SHARD frozen", "FULL_SHARD masters", "SHARD_GRAD_OP flat no-sync masters",
         "NO_SHARD masters")  # fmt: skip
CLIPS_ALONE = "dist.get_rank() or nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # the others do not"
TOKEN_SUM = 'return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")'
WRONG = {
    "FULL_SHARD flat double-averaging": ("GS101", 0.5, "loss.backward()"),
    "NO_SHARD no-sync double-averaging": ("GS101", 0.5, "loss.backward()"),
    "FULL_SHARD times-ranks": ("GS303", 2.0, TOKEN_SUM),
    "SHARD_GRAD_OP halved": ("GS000", 0.5, "param.grad.mul_(0.5)"),
    "FULL_SHARD no-sync divided-twice": ("GS104", 0.5, "loss.backward()"),
    "FULL_SHARD local-clip": ("GS601", None, "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
    "FULL_SHARD flat local-clip": ("GS601", None, "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
    "FULL_SHARD no-sync left": ("GS402", None, "optimizer.step()"),
    "FULL_SHARD flat left": ("GS402", None, "optimizer.step()"),
    "NO_SHARD left": ("GS402", None, "optimizer.step()"),
    "FULL_SHARD masters double-averaging": ("GS101", 0.5, "loss.backward()"),
    "FULL_SHARD flat masters times-ranks": ("GS303", 2.0, TOKEN_SUM),
    "SHARD_GRAD_OP masters halved": ("GS000", 0.5, "param.grad.mul_(0.5)"),
    "FULL_SHARD masters local-clip": ("GS601", None, "nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
    "FULL_SHARD masters left": ("GS402", None, "self._optimizer.step()"),
    "FULL_SHARD flat masters left": ("GS402", None, "self._optimizer.step()"),
    "NO_SHARD one-clips": ("GS608", None, CLIPS_ALONE),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """All variants in one start of two ranks; parameters are the same bits with and without probes."""
    warm_up()
    folder = tmp_path_factory.mktemp("fsdp1")
    variants = [*RIGHT, *WRONG]
    found = launch("fsdp1_workers:run", (variants, str(folder)), 2, timeout_s=90)
    for of_rank in found:
        for variant, (plain, recorded) in zip(variants, of_rank, strict=True):
            assert plain == recorded, variant
    return {variant: diagnose(read_run(folder / variant)) for variant in variants}


@pytest.mark.parametrize("variant", RIGHT)
def test_a_right_trainer_is_clean_and_every_parameter_has_its_name(reports: dict[str, Report], variant: str) -> None:
    report = reports[variant]
    assert (report.verdict, report.reasons, report.coverage.problems + report.coverage.notes) == ("clean", [], [])
    frozen = ["block.up.bias", "block.up.weight"] if "frozen" in variant else []
    names = sorted(name for unit in report.units for name in unit.parameters)
    assert names == [name for name in NAMES if name not in frozen]
    sharded = "NO_SHARD" not in variant
    assert (report.run.axes["dp_shard"], report.run.axes["dp_replicate"]) == ((2, 1) if sharded else (1, 2))


@pytest.mark.parametrize("variant", WRONG)
def test_a_fault_is_found_with_its_factor_and_line(reports: dict[str, Report], variant: str) -> None:
    code, factor, line = WRONG[variant]
    (finding,) = reports[variant].findings
    assert finding.code == code
    if factor is not None:
        assert finding.factor.observed == pytest.approx(factor, rel=1e-4)
    event = finding.first_event
    assert event is not None and event.file is not None and event.line is not None
    assert Path(event.file).read_text().splitlines()[event.line - 1].strip() == line


def test_a_communication_hook_that_divides_again_is_named(reports: dict[str, Report]) -> None:
    (finding,) = reports["FULL_SHARD no-sync divided-twice"].findings
    assert "the communication hook fsdp1_workers.divides_twice" in finding.fix


def test_a_division_before_the_sum_makes_an_average_of_it(reports: dict[str, Report]) -> None:
    (finding,) = reports["FULL_SHARD times-ranks"].findings
    assert "adds up" not in finding.explanation


def test_replicas_of_shards_of_one_rank_each_are_not_reduced_by_torch(tmp_path: Path) -> None:
    """In each pass torch divides what was summed up before, too: that is no fault of its own."""
    warm_up()
    variants = ["HYBRID_SHARD no-sync", "HYBRID_SHARD"]
    launch("fsdp1_workers:run", (variants, str(tmp_path)), 2, timeout_s=90)
    for variant in variants:
        (finding,) = diagnose(read_run(tmp_path / variant)).findings
        assert finding.code == "GS103"
        assert "joins this rank alone, and divides by 2 in each pass" in finding.explanation
        assert finding.first_event is not None and finding.first_event.kind == "reduce"


def test_two_replicas_of_two_shards_are_judged_over_both(tmp_path: Path) -> None:
    warm_up()
    variants = ["HYBRID_SHARD no-sync", "HYBRID_SHARD flat double-averaging"]
    launch("fsdp1_workers:run", (variants, str(tmp_path)), 4, timeout_s=90)
    clean, averaged = (diagnose(read_run(tmp_path / variant)) for variant in variants)
    assert (clean.verdict, clean.findings) == ("clean", [])
    (finding,) = averaged.findings
    assert (finding.code, finding.factor.expression) == ("GS101", "1/(dp_replicate * dp_shard)")
