"""Comparing parallelisms: the faulty pipeline stands apart, what has ended is kept, bad files are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.scenarios import study, study_render
from gradcheck_dist.scenarios.study_picture import as_svg

SMALL = """
objective: global-token-mean
common: {steps: 3, accum: 3, seq_len: 16, dim: 16, n_layers: 2, n_heads: 2, n_kv_heads: 2, ffn_dim: 16}
control: {batch_size: 4}
strategies:
  pp: {pp: 2, microbatches: 2, batch_size: 2}
  pp-rescaled: {pp: 2, microbatches: 2, batch_size: 2, faults: [schedule-scales-grads]}
"""


def test_the_faulty_pipeline_stands_apart_and_a_second_call_trains_nothing(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(SMALL)
    chosen = study.load(file)

    result = study.run(chosen, tmp_path / "out")

    norms = {test.name: test.metrics[0] for test in result.comparison.tests}
    assert norms["pp"].state == "same"
    assert norms["pp-rescaled"].ratio is not None and norms["pp-rescaled"].ratio.start < 0.8
    verdicts = {outcome.name: outcome.verdict for outcome in result.outcomes}
    assert "GS201" in verdicts["pp-rescaled"]
    assert all(verdicts[name].startswith("CLEAN") for name in ("control", "pp"))
    # A strategy that was cut short is trained again, one that has ended is not.
    kept = (tmp_path / "out/pp/outcome.json").stat().st_mtime_ns
    (tmp_path / "out/pp-rescaled/outcome.json").write_text("{")
    again = study.run(study.load(file, only=("pp",)), tmp_path / "out")
    assert (tmp_path / "out/pp/outcome.json").stat().st_mtime_ns == kept
    assert [outcome.name for outcome in again.outcomes] == ["control", "pp"]
    assert again.comparison.exit_code == 0
    for written in (study_render.as_text(result), study_render.as_markdown(result), study_render.as_html(result)):
        assert "pp-rescaled" in written and "GS201" in written
    assert as_svg(result).count("<polyline") == 3
    assert json.loads(study_render.as_json(result))["comparison"]["tests"][1]["name"] == "pp-rescaled"


def test_the_package_s_own_study_is_the_one_of_the_guideline() -> None:
    own = study.load()

    control = own.configs["control"]
    assert control.axes.world_size == 1
    assert (control.accum, control.sequences_per_step, control.steps) == (10, 320, 500)
    assert set(own.configs) >= {"ddp", "fsdp", "hsdp", "pp", "tp", "cp"}
    assert [name for name, config in own.configs.items() if config.faults] == ["pp-rescaled"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1", "holds list"),
        ("strategy: {}", "'strategy'"),
        ("strategies: {}", "no strategies"),
        ("strategies: {a: 3}", "legal is a mapping"),
        ("strategies: {'../a': {}}", "'../a'"),
        ("strategies: {control: {}}", "not 'control'"),
        ("strategies: {ddp: {dp_replicate: 2}}", "4 sequences"),
        ("strategies: {ddp: {dp_replicat: 2}}", "dp_replicate"),
    ],
)
def test_what_is_no_study_is_refused_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(text)

    with pytest.raises(GradcheckError, match=words.replace("(", r"\(")):
        study.load(file)


def test_a_strategy_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(GradcheckError, match="hsdp"):
        study.load(only=("hsdpp",))
