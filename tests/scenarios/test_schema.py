"""Scenario files: what stands in them and how a mistake is named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.scenarios.jobs import Overrides, configurations
from gradcheck_dist.scenarios.schema import check_name, library, load, parse
from gradcheck_dist.scenarios.skeleton import skeleton

GOOD: dict[str, Any] = {
    "name": "demo",
    "title": "A demo",
    "story": "Somebody divides twice.",
    "citations": ["pytorch/torchtitan#2323"],
    "objective": "global-token-mean",
    "mesh": {"dp_shard": 2, "pp": "nproc"},
    "defaults": {"nproc": 4, "accum": 3, "microbatches": 2},
    "variants": {
        "bad": {
            "story": "Twice.",
            "faults": ["schedule-scales-grads"],
            "expect": {
                "code": "GS201",
                "name": "rescaled-accumulation",
                "ratio": "M**-(K-1-k)",
                "culprit": {"kind": "scale_grads", "file": "loop.py", "line": "step("},
            },
        },
        "good": {"story": "Once.", "expect": "clean"},
    },
}
VARIANTS = {
    "ddp-accum": ["averaging", "sum-every-backward", "fixed"],
    "pp-accum": ["gpipe", "1f1b", "fixed-gpipe", "fixed-1f1b"],
    "token-imbalance": ["rank-means", "microbatch-means", "fixed"],
}


def changed(path: str, value: Any) -> str:
    document = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place = document
    for parent in parents:
        place = place[parent]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return yaml.safe_dump(document)


def test_the_library_holds_the_scenarios_and_variants_that_people_script_against() -> None:
    assert {name: [variant.name for variant in load(name).variants] for name in VARIANTS} == VARIANTS


@pytest.mark.parametrize("name", library())
def test_every_scenario_tells_its_story_cites_a_thread_and_makes_jobs_the_trainer_accepts(name: str) -> None:
    scenario = load(name)
    assert len(scenario.story) > 100
    numbers = [citation.partition("#")[2].removesuffix(" (unverified)") for citation in scenario.citations]
    assert all(number.isdigit() for number in numbers)
    assert configurations(scenario, Overrides()).keys() == {variant.name for variant in scenario.variants}


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("name", "other", ["name is 'other'", "the file's name"]),
        ("title", None, ["title is None", "a text"]),
        ("stroy", "x", ["unknown field stroy", "Did you mean story"]),
        ("mesh.dp", 2, ["mesh.dp is 'dp'", "dp_replicate"]),
        ("mesh.dp_shard", 0, ["mesh.dp_shard is 0", "nproc"]),
        ("mesh.pp", 2, ["mesh is", "exactly one axis"]),
        ("defaults.nproc", None, ["defaults.nproc is None", "integer"]),
        ("defaults.accum", True, ["defaults.accum is True", "integer"]),
        ("defaults.speed", 3, ["defaults.speed is 'speed'", "microbatches"]),
        ("variants", ["bad"], ["variants is ['bad']", "a mapping"]),
        ("variants.good", None, ["variants is ['bad']", "healthy twin"]),
        ("variants.bad.faults", ["ddp-average"], ["variants.bad.faults is 'ddp-average'", "ddp-averages"]),
        ("variants.bad.faults", [], ["variants.bad.expect is", "else clean"]),
        ("variants.bad.expect", "clean", ["variants.bad.expect is 'clean'", "where there are faults"]),
        ("variants.bad.expect.code", "201", ["variants.bad.expect.code is '201'", "GS101"]),
        ("variants.bad.expect.ratio", "1/W", ["formula '1/W'", "unknown name 'W'"]),
        ("mesh", {"dp_shard": 2, "ep": "nproc"}, ["mesh is", "not ep"]),
        ("torch", "2.13", ["torch is '2.13'", "a list of texts"]),
        ("torch", [2], ["torch is [2]", "a list of texts"]),
        ("fixed_sizes", ["depth"], ["fixed_sizes is 'depth'", "accum"]),
        ("variants.bad.expect", [], ["variants.bad.expect is []", "list of findings"]),
        ("variants.bad.expect", ["GS101"], ["variants.bad.expect[0] is 'GS101'", "a mapping"]),
        ("variants.bad.expect", "right", ["variants.bad.expect is 'right'", "gradients-right"]),
        ("variants.good.expect", "gradients-right", ["variants.good.expect is 'gradients-right'", "else clean"]),
        ("variants.bad.expect.parameters", 3, ["variants.bad.expect.parameters is 3", "list of texts"]),
        ("variants.bad.expect.factor", 3, ["variants.bad.expect.factor is 3", "a text"]),
        ("variants.bad.expect.culprit.lines", "x", ["unknown field variants.bad.expect.culprit.lines"]),
    ],
)
def test_a_mistake_is_named_with_field_value_and_legal_values(path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(GradcheckError) as caught:
        parse(changed(path, value), "demo.yaml")
    for word in words:
        assert word in str(caught.value)


def test_a_key_given_twice_is_refused_with_both_lines_and_a_merged_one_is_not() -> None:
    text = changed("title", "A demo")
    lines = text.splitlines()
    first = lines.index("title: A demo") + 1
    with pytest.raises(GradcheckError, match=rf"'title' is given twice: in line {first}(.|\n)*line {len(lines) + 1},"):
        parse(f"{text}title: Another\n", "demo.yaml")
    merged = text.replace("defaults:\n", "defaults: &sizes\n").replace(
        "  good:\n", "  good:\n    config: {<<: *sizes, accum: 5}\n"
    )
    good = parse(merged, "demo.yaml").variants[-1]
    assert good.config == GOOD["defaults"] | {"accum": 5}


def test_a_variant_may_expect_several_findings_of_some_parameters() -> None:
    one = GOOD["variants"]["bad"]["expect"]
    both = [one, one | {"code": "GS101", "parameters": ["layers.0.*", "head.*"], "factor": "1/dp_shard"}]
    first, second = next(iter(parse(changed("variants.bad.expect", both), "demo.yaml").variants)).expect
    assert (first.code, first.parameters, first.factor) == ("GS201", (), None)
    assert second.factor == "1/dp_shard"
    assert [second.concerns(name) for name in ("layers.0.x", "head.weight", "layers.1.x")] == [True, True, False]


def test_a_fault_that_leaves_gradients_right_is_no_healthy_twin() -> None:
    harmless = changed("variants.bad.expect", "gradients-right")
    assert parse(harmless, "demo.yaml").variants[0].expect == ()
    alone = yaml.safe_load(harmless)
    del alone["variants"]["good"]
    with pytest.raises(GradcheckError, match="healthy twin"):
        parse(yaml.safe_dump(alone), "demo.yaml")


def test_a_configuration_of_its_own_may_be_the_bug() -> None:
    document = yaml.safe_load(changed("variants.bad.config", {"scale_grads": True}))
    del document["variants"]["bad"]["faults"]
    assert len(parse(yaml.safe_dump(document), "demo.yaml").variants[0].expect) == 1


def test_a_folder_of_ones_own_is_a_library(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(skeleton("mine"))
    assert library(tmp_path) == ["mine"]
    scenario = load("mine", tmp_path)
    assert [variant.name for variant in scenario.variants] == ["broken", "fixed"]
    assert configurations(scenario, Overrides())["broken"].faults == ("ddp-averages",)
    with pytest.raises(GradcheckError, match=r"unknown scenario 'ddp-accum'.*mine"):
        load("ddp-accum", tmp_path)
    with pytest.raises(GradcheckError, match="no folder") as caught:
        library(tmp_path / "nowhere")
    assert caught.value.code == "E606"


@pytest.mark.parametrize("name", ["", "Mine", "a b", "../x", "-x", "x.yaml"])
def test_a_name_that_makes_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(GradcheckError) as caught:
        check_name(name)
    assert caught.value.code == "E607"


def test_ep_borrows_its_ranks() -> None:
    document = yaml.safe_load(changed("mesh", {"dp_shard": "nproc", "ep": 2}))
    document["variants"]["bad"]["faults"] = ["expert-group-wrong"]
    document["variants"]["bad"]["expect"]["ratio"] = "1/ep"
    document |= {"config": {"num_experts": 4}, "defaults": {"nproc": 4}}
    config = configurations(parse(yaml.safe_dump(document), "demo.yaml"), Overrides())["bad"]
    assert (config.axes.world_size, config.axes.dp_shard, config.axes.ep) == (4, 4, 2)


def test_a_bug_of_torch_need_not_show_on_another_version() -> None:
    scenario = parse(changed("torch", ["2.13"]), "demo.yaml")
    assert [scenario.seen_on(version) for version in ("2.13.0", "2.13", "2.14.0", "2.1")] == [True, True, False, False]
    assert parse(yaml.safe_dump(GOOD), "demo.yaml").seen_on("3.0")


def test_a_file_that_is_no_yaml_mapping_is_refused_by_name() -> None:
    for text in ("a: [", "just words", "!!python/object/apply:os.system ['true']"):
        with pytest.raises(GradcheckError, match=r"demo\.yaml"):
            parse(text, "demo.yaml")


def test_an_unknown_scenario_gets_the_nearest_names() -> None:
    with pytest.raises(GradcheckError, match=r"Did you mean: .*ddp-accum"):
        load("ddp-acum")


def test_the_remaining_ranks_go_to_one_axis() -> None:
    scenario = parse(yaml.safe_dump(GOOD), "demo.yaml")
    config = configurations(scenario, Overrides(nproc=8, microbatches=4))["bad"]
    assert (config.axes.dp_shard, config.axes.pp) == (2, 4)
    assert config.faults == ("schedule-scales-grads",)


@pytest.mark.parametrize("nproc", [-1, 0, 2, 5])
def test_a_number_of_ranks_that_does_not_fit_the_mesh_names_legal_ones(nproc: int) -> None:
    scenario = parse(yaml.safe_dump(GOOD), "demo.yaml")
    with pytest.raises(GradcheckError, match=r"Legal values: 4, 6, 8 and so on\. Try --nproc [46]\.") as caught:
        configurations(scenario, Overrides(nproc=nproc))
    assert f"--nproc is {nproc}" in str(caught.value)


def test_a_size_that_has_to_stay_is_not_replaced() -> None:
    scenario = parse(changed("fixed_sizes", ["microbatches"]), "demo.yaml")
    stays = scenario.defaults["microbatches"]
    assert configurations(scenario, Overrides(microbatches=stays, accum=7))["bad"].accum == 7
    with pytest.raises(GradcheckError, match=f"shows its bug with microbatches={stays} only") as caught:
        configurations(scenario, Overrides(microbatches=stays + 1))
    assert caught.value.code == "E604"


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("ddp-accum", Overrides(accum=1)), ("pp-accum", Overrides(accum=1)), ("ddp-accum", Overrides(nproc=1))],
)
def test_sizes_at_which_a_bug_cannot_show_are_refused(name: str, overrides: Overrides) -> None:
    with pytest.raises(GradcheckError) as caught:
        configurations(load(name), overrides)
    assert caught.value.code in {"E604", "E605"}
