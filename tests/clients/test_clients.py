"""Other people's trainers, unchanged: bit-identical, clean when healthy, and their seeded fault found at its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from .clients import EXAMPLES, Client, Trained, source_line, train, train_forked

LOSS = "loss = cross_entropy("
DIVIDED_TWICE = ("double-division", "GS303", "1/accumulation_steps")
DIVIDED_NEVER = ("no-division", "GS303", "accumulation_steps")
AGAIN = "loss = loss / ACCUMULATION"
PER_BATCH = ("per-batch-mean", "GS301", None, "loss = F.cross_entropy(")

PLAIN = [
    Client("plain_loop.py", "no-division", "GS303", "num_tokens", LOSS),
    Client("log_probabilities.py", "per-batch-mean", "GS301", None, "token_losses = -log_probs.gather("),
    Client("fused_loss.py", "divided-in-the-loop", "GS000", "0.5 * 0.5^(K-1-k)", "parameter.grad /= 2"),
    Client("fused_loss.py", "passed-by", "GS803", "num_tokens", "def backward(ctx, grad_output):"),
    Client("manual_gradients.py", "overwritten", "GS401", None, "gradients = torch.autograd.grad("),
    Client("several_optimizers.py", "zeroed", "GS401", None, "fast.zero_grad()"),
    Client("grad_scaler.py", "no-unscale", "GS303", "loss_scale", LOSS),
    Client("compiled.py", *DIVIDED_NEVER, LOSS, env={"BACKEND": "aot_eager"}),
    Client("ddp_no_sync.py", "double-averaging", "GS101", "1/dp_replicate", "loss.backward()", nproc=2),
    Client("fsdp2.py", "double-averaging", "GS101", "1/dp_shard", "loss.backward()", nproc=2),
    Client("pipeline.py", "rescaled", "GS201", "microbatches^-(K-1-k)", "schedule.step(", nproc=2),
    Client("nanogpt_style.py", *DIVIDED_NEVER, "return logits, F.cross_entropy(", nproc=2),
    *(
        Client("plain_main_grad.py", "double-averaging", "GS000", "1/world_size", "self.buffer.div_(", nproc=2, env=env)
        for env in ({"OPTIMIZER": "grad"}, {"OPTIMIZER": "master"}, {"OPTIMIZER": "sharded"})
    ),
]

TRAINER = Client("transformers_trainer.py", *PER_BATCH, needs="transformers")
SFT = Client("trl_sft.py", *PER_BATCH, needs="trl")
ACCELERATE = Client("accelerate_loop.py", *DIVIDED_TWICE, AGAIN, needs="accelerate")
SENTENCES = Client(
    "sentence_transformers_trainer.py",
    *DIVIDED_TWICE,
    "return loss / ACCUMULATION if FAULT",
    needs="sentence_transformers",
)
IGNITE = Client("ignite_trainer.py", *DIVIDED_TWICE, "return loss / ACCUMULATION", needs="ignite")
FABRIC = Client("lightning_fabric.py", *DIVIDED_NEVER, LOSS, needs="lightning")
LIGHTNING = Client("lightning_trainer.py", *DIVIDED_TWICE, AGAIN, needs="lightning")
DEEPSPEED = Client("deepspeed_zero.py", *DIVIDED_TWICE, AGAIN, nproc=2, needs="deepspeed")

DEEPSPEED_AVERAGED = replace(
    DEEPSPEED, fault="double-averaging", code="GS101", expression="1/world_size", line="tensor.div_("
)


def degrees(**axes: int) -> tuple[str, ...]:
    """torchtitan's options; a replicate degree alone is DDP."""
    names = {"replicate": "data_parallel_replicate", "shard": "data_parallel_shard", "tp": "tensor_parallel"}
    given = {names.get(axis, "pipeline_parallel"): degree for axis, degree in axes.items()}
    options = [item for name, degree in given.items() for item in (f"--parallelism.{name}_degree", str(degree))]
    return (*options, *(("--parallelism.pipeline_parallel_microbatch_size", "1") if "pp" in axes else ()))


TITAN = Client(
    "torchtitan_cpu.py", "fsdp-averages", "GS101", "1/dp_shard", "loss.backward()", nproc=2, needs="torchtitan"
)
PIPELINE = replace(
    TITAN,
    fault="scale-grads",
    code="GS201",
    expression="microbatches^-(K-1-k)",
    line="self.pp_schedule.step(",
    env={"REPAIR": "1"},
    args=degrees(pp=2),
)
MEGATRON = Client(
    "megatron_core_cpu.py",
    "divided-in-the-loss",
    "GS303",
    "n_c^-1",
    "return _VocabParallelCrossEntropy.apply(",
    nproc=2,
    needs="megatron",
)
INSTALLED = [
    ACCELERATE,
    replace(ACCELERATE, nproc=2),
    Client("accelerate_fsdp2.py", *DIVIDED_TWICE, AGAIN, nproc=2, needs="accelerate"),
    TRAINER,
    replace(TRAINER, nproc=2),
    SENTENCES,
    replace(SENTENCES, nproc=2),
    IGNITE,
    replace(IGNITE, nproc=2),
    FABRIC,
    replace(FABRIC, env={"DEVICES": "2"}),
    LIGHTNING,
    replace(LIGHTNING, fault="no-division", expression="accumulation_steps", line=LOSS, env={"MANUAL": "1"}),
    replace(LIGHTNING, env={"DEVICES": "2"}),
    SFT,
    replace(SFT, nproc=2),
    *(replace(DEEPSPEED, env={"STAGE": stage}) for stage in ("0", "1", "2", "3")),
    *(replace(DEEPSPEED, env={"STAGE": stage, "BF16": "1"}) for stage in ("0", "2", "3")),
    replace(DEEPSPEED_AVERAGED, env={"STAGE": "2", "CLIP": "0.05"}),
    replace(DEEPSPEED_AVERAGED, env={"STAGE": "3", "CLIP": "0.05"}, line="tensor_partition_flat_buffer.div_("),
    replace(DEEPSPEED, env={"STAGE": "1", "BACKWARD": "torch"}),
    TITAN,
    replace(TITAN, nproc=4, args=degrees(replicate=2, shard=2), expression="1/(dp_replicate * dp_shard)"),
    replace(TITAN, nproc=4, args=degrees(tp=2, shard=2)),
    MEGATRON,
    replace(
        MEGATRON, fault="own-tokens", code="GS305", expression="num_tokens/N_r", line="self.grad_data *= scaling_factor"
    ),
    replace(MEGATRON, env={"DISTRIBUTED": "1", "BF16": "1"}),
    PIPELINE,
    replace(PIPELINE, nproc=4, args=degrees(pp=2, shard=2)),
]

HISTORY = Client("transformers_trainer.py", None, "GS301", None, "loss = loss_fct(", needs="transformers")
RELEASED = [  # what is wrong in a client as it can be installed
    replace(HISTORY, beside="transformers-4.45.2"),
    replace(HISTORY, beside="transformers-4.45.2", nproc=2),
    replace(HISTORY, beside="transformers-4.46.2", nproc=2, code="GS103", line="loss.backward(**kwargs)"),
    replace(TITAN, fault=None, args=degrees(replicate=2, shard=1), expression="1/dp_replicate"),
    replace(
        TITAN,
        fault=None,
        args=degrees(pp=2),
        code="GS303",
        expression="num_tokens",
        line="return torch.nn.functional.cross_entropy(",
    ),
]


STARTED = ("plain_loop.py", "ddp_no_sync.py")
"""These are started below `gradcheck run` every time, one of them by torchrun; all others by `make clients`."""


def judged_rightly(client: Client, alone: Trained, healthy: Trained, faulty: Trained) -> None:
    assert healthy.parameters == alone.parameters
    assert (healthy.report["verdict"], healthy.report["findings"]) == (client.judged, [])
    assert healthy.report["coverage"]["problems"] == []
    found_in(client, faulty.report)
    assert len(faulty.report["findings"]) == 1  # one cause


def found_in(client: Client, report: dict[str, Any]) -> None:
    """The fault, its factor, its line, and the user's own line that led there."""
    found = {finding["code"]: finding for finding in report["findings"]}
    assert client.code in found, report["reasons"]
    finding = found[client.code]
    if client.expression is not None:
        assert finding["factor"]["expression"] == client.expression
    assert source_line(finding).startswith(client.line)
    event = finding["first_event"]
    assert Path((event["called_from"] or event["file"]).partition(":")[0]).parent == EXAMPLES


@pytest.mark.slow
@pytest.mark.timeout(800)
@pytest.mark.parametrize(
    "client",
    [
        *(client for client in PLAIN if client.script in STARTED),
        *(
            pytest.param(client, marks=pytest.mark.clients)
            for client in [*PLAIN, *INSTALLED]
            if client.script not in STARTED
        ),
    ],
    ids=str,
)
def test_a_client_trains_as_before_and_is_judged_rightly(client: Client, tmp_path: Path) -> None:
    if client.missing is not None:
        pytest.skip(f"{client.missing} is not installed")
    alone, healthy = train(client, None), train(client, tmp_path / "healthy")
    judged_rightly(client, alone, healthy, train(client, tmp_path / "faulty", fault=True))


@pytest.mark.slow
@pytest.mark.parametrize("client", [client for client in PLAIN if client.script not in STARTED], ids=str)
def test_a_client_in_forked_ranks_trains_as_before_and_is_judged_rightly(client: Client, tmp_path: Path) -> None:
    alone = train_forked(client, tmp_path / "alone", recorded=False)
    healthy = train_forked(client, tmp_path / "healthy")
    judged_rightly(client, alone, healthy, train_forked(client, tmp_path / "faulty", fault=True))


@pytest.mark.slow
def test_what_ranks_print_at_once_does_not_run_into_the_line_that_is_compared(tmp_path: Path) -> None:
    script = tmp_path / "half_lines.py"
    script.write_text(
        "import os, sys, time\n"
        "rank = int(os.environ['RANK'])\n"
        "time.sleep(0 if rank else 1)\n"
        "sys.stdout.write('parameters 0x1p+0\\n' if rank == 0 else 'half a line ')\n"
        "sys.stdout.flush()\n"
        "time.sleep(0 if rank == 0 else 2)\n"
    )
    trained = train(Client(str(script), None, "", None, "", nproc=2), None)
    assert trained.parameters == "parameters 0x1p+0"


@pytest.mark.clients
@pytest.mark.timeout(800)
@pytest.mark.parametrize("client", RELEASED, ids=str)
def test_what_is_wrong_in_a_client_as_released_is_found(client: Client, tmp_path: Path) -> None:
    if client.missing is not None:
        pytest.skip(f"{client.missing} is not installed")
    alone, recorded = train(client, None), train(client, tmp_path / "run")
    assert recorded.parameters == alone.parameters
    found_in(client, recorded.report)


@pytest.mark.clients
@pytest.mark.timeout(800)
def test_later_releases_of_a_mended_client_count_tokens_otherwise_and_nothing_else_is_wrong(tmp_path: Path) -> None:
    """4.46.3 divides by the labels before they are shifted: one more for each sequence than have a prediction."""
    client = replace(HISTORY, beside="transformers-4.46.3", code="GS303", line="loss = nn.functional.cross_entropy(")
    if client.missing is not None:
        pytest.skip(f"{client.missing} is not installed")
    report = train(client, tmp_path / "run").report
    found_in(client, report)
    assert [finding["code"] for finding in report["findings"]] == ["GS303"]
    assert 0.85 < report["findings"][0]["factor"]["observed"] < 1


def test_examples_of_clients_do_not_know_this_project() -> None:
    for client in [*PLAIN, *INSTALLED]:
        code = (EXAMPLES / client.script).read_text()
        assert "import gradcheck" not in code
        assert "gradcheck_dist" not in code
