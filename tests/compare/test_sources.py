"""Reading what a job left behind, and the command on top of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from logs import curves, write_csv, write_tensorboard
from small_runs import write_run
from typer.testing import CliRunner

from gradcheck_dist.cli.main import build
from gradcheck_dist.compare import names, sources
from gradcheck_dist.errors import GradcheckError

NOTHING: dict[str, str | None] = {}


@pytest.mark.parametrize(
    ("every", "role", "found"),
    [
        (["loss", "val/loss"], "loss", "loss"),
        (["val_loss", "train/loss", "lr"], "loss", "train/loss"),
        (
            ["loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm"],
            "loss",
            "loss_metrics/global_avg_loss",
        ),
        (["lm loss", "lm loss validation"], "loss", "lm loss"),
        (["run-7 - train/loss", "run-7 - train/loss__MIN", "run-7 - train/loss__MAX"], "loss", "run-7 - train/loss"),
        (["train/grad_norm", "train/loss"], "grad_norm", "train/grad_norm"),
        (["grad-norm", "lr"], "grad_norm", "grad-norm"),
        (["n_tokens_seen", "throughput(tps)", "tokens_per_second"], "tokens", "n_tokens_seen"),
        (["train/num_input_tokens_seen"], "tokens", "train/num_input_tokens_seen"),
        (["lr", "mfu"], "loss", None),
        (["tokens_per_second"], "tokens", None),
    ],
)
def test_names_of_known_trainers_are_understood(every: list[str], role: str, found: str | None) -> None:
    assert names.find(role, every) == found


def test_a_name_that_is_given_must_be_there() -> None:
    with pytest.raises(GradcheckError, match="train/loss") as caught:
        names.find("loss", ["train/loss"], "trainloss")
    assert caught.value.code == "E912"


def test_a_wandb_export_is_read(tmp_path: Path) -> None:
    file = write_csv(tmp_path / "export.csv", curves(steps=20), {"loss": "run - train/loss"})
    found = sources.read(file, NOTHING)
    assert found.tags["loss"] == "run - train/loss"
    assert set(found.curves) == {"loss", "grad_norm", "tokens"}
    assert sorted(found.curves["loss"]) == list(range(20))


def test_several_runs_in_one_export_are_named_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "export.csv"
    file.write_text("Step,a - loss,a - loss__MIN,b - loss\n0,1,1,2\n1,1,1,2\n")
    assert sources.read(Path(f"{file}#b"), NOTHING).curves == {"loss": {0: 2.0, 1: 2.0}}
    for path in (str(file), f"{file}#c"):
        with pytest.raises(GradcheckError, match=r"holds the runs a, b; name one of them as .*#a") as caught:
            sources.read(Path(path), NOTHING)
        assert caught.value.code == "E911"


def test_jobs_are_called_by_what_tells_them_apart(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tensorboard(tmp_path / name / "tb", curves(steps=3))
    found = sources.read_all([tmp_path / "one" / "tb", tmp_path / "two" / "tb"], NOTHING)
    assert [source.name for source in found] == ["one/tb", "two/tb"]


def test_gaps_and_words_in_a_csv_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "gaps.csv"
    file.write_text("\ufeff_step,loss,grad_norm\n1,2.0,\n2,NaN,1.5\n3,abc,1.6\nx,1,1\n4,1.0\n")
    found = sources.read(file, NOTHING).curves
    assert found == {"loss": {1: 2.0, 4: 1.0}, "grad_norm": {2: 1.5, 3: 1.6}}


def test_rows_without_a_step_are_counted_from_0(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("loss\n3\n2\n")
    assert sources.read_csv(tmp_path / "log.csv") == {"loss": {0: 3.0, 1: 2.0}}


def test_a_tensorboard_folder_and_the_only_one_below_are_read(tmp_path: Path) -> None:
    write_tensorboard(tmp_path / "job" / "tb", curves(steps=30), "train/")
    for place in (tmp_path / "job" / "tb", tmp_path / "job", next((tmp_path / "job" / "tb").iterdir())):
        found = sources.read(place, NOTHING)
        assert found.tags["grad_norm"] == "train/grad_norm"
        assert len(found.curves["grad_norm"]) == 30


def test_several_logs_are_not_guessed_among(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tensorboard(tmp_path / name, curves(steps=3))
    with pytest.raises(GradcheckError, match="holds several logs"):
        sources.read(tmp_path, NOTHING)


def test_a_run_folder_gives_its_curves_and_degrees(tmp_path: Path) -> None:
    found = sources.read(write_run(tmp_path / "run", steps=3), NOTHING)
    assert sorted(found.curves["grad_norm"]) == [0, 1, 2]
    assert found.axes == {"dp_replicate": 2.0}


@pytest.mark.parametrize("content", [None, "", "a,b\n1,2\n", "loss\nx\n"])
def test_what_holds_no_curve_is_refused(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "x.csv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(GradcheckError, match=r"x\.csv") as caught:
        sources.read(file, NOTHING)
    assert caught.value.code == "E911"


def run(*arguments: object) -> tuple[int, str]:
    outcome = CliRunner().invoke(build("compare"), [str(argument) for argument in arguments])
    return outcome.exit_code, outcome.output


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    return [
        write_csv(tmp_path / "control.csv", curves()),
        write_tensorboard(tmp_path / "fixed", curves(seed=1)),
        write_csv(tmp_path / "faulty.csv", curves(seed=2, factor=0.1)),
    ]


def test_the_command_names_the_factor_of_jobs_that_ended_weeks_ago(logs: list[Path]) -> None:
    code, text = run(*logs, "--axes", "accum=10,pp=2")
    assert code == 1
    assert "1 of 2 tests off against control.csv: faulty.csv" in text
    assert "(300 points)" in text or "points)" in text
    assert "1/accum" in text
    assert "Adam divides" in text
    assert max(map(len, text.splitlines())) <= 100
    assert run(logs[0], logs[1])[0] == 0


def test_every_format_tells_the_same(logs: list[Path], tmp_path: Path) -> None:
    for form in ("text", "md", "html", "json"):
        output = tmp_path / f"out.{form}"
        code, _ = run(*logs, "--axes", "accum=10", "--format", form, "--output", output)
        assert code == 1
        assert "1/accum" in output.read_text()
    content = json.loads((tmp_path / "out.json").read_text())
    assert [test["state"] for test in content["tests"]] == ["clean", "findings"]
    assert (tmp_path / "out.html").stat().st_size < 8_000_000


def test_hostile_names_of_jobs_are_inert(tmp_path: Path) -> None:
    control = write_csv(tmp_path / "control.csv", curves(steps=50))
    bad = write_csv(tmp_path / "<img src=x onerror=a()>\x1b[31m@all.csv", curves(steps=50, factor=0.5))
    for form in ("text", "md", "html"):
        output = tmp_path / "out"
        run(control, bad, "--format", form, "--output", output)
        text = output.read_text()
        assert "\x1b" not in text
        if form != "text":
            assert "<img" not in text.replace("<img-", "")
