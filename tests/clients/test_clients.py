"""Other people's trainers, unchanged: bit-identical, clean when healthy, and their seeded fault found at its line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from .clients import EXAMPLES, Client, source_line, train

LOSS = "loss = cross_entropy("
PLAIN = [
    Client("plain_loop.py", "no-division", "GS303", "num_tokens", LOSS),
    Client("log_probabilities.py", "per-batch-mean", "GS301", None, "token_losses = -log_probs.gather("),
    Client("manual_gradients.py", "overwritten", "GS000", None, "gradients = torch.autograd.grad("),
    Client("several_optimizers.py", "zeroed", "GS401", None, "fast.zero_grad()"),
    Client("grad_scaler.py", "no-unscale", "GS303", None, LOSS),
    Client("compiled.py", "no-division", "GS303", "accumulation_steps", LOSS, env={"BACKEND": "aot_eager"}),
    Client("ddp_no_sync.py", "double-averaging", "GS101", "1/dp_replicate", "loss.backward()", nproc=2),
    Client("fsdp2.py", "double-averaging", "GS101", "1/dp_shard", "loss.backward()", nproc=2),
    *(
        Client(
            "plain_main_grad.py",
            "double-averaging",
            "GS000",
            "1/world_size",
            "(loss * world_size",
            nproc=2,
            env={"OPTIMIZER": reads},
        )
        for reads in ("grad", "master", "sharded")
    ),
    Client("pipeline.py", "rescaled", "GS201", "microbatches^-(K-1-k)", "schedule.step(", nproc=2),
    Client(
        "nanogpt_style.py", "no-division", "GS303", "accumulation_steps", "return logits, F.cross_entropy(", nproc=2
    ),
]
INSTALLED = [
    Client("accelerate_loop.py", "double-division", "GS303", "1/accumulation_steps", "loss = ", needs="accelerate"),
    Client(
        "accelerate_loop.py", "double-division", "GS303", "1/accumulation_steps", "loss = ", nproc=2, needs="accelerate"
    ),
    Client("transformers_trainer.py", "per-batch-mean", "GS301", None, "loss = F.cross_entropy(", needs="transformers"),
    Client(
        "transformers_trainer.py",
        "per-batch-mean",
        "GS301",
        None,
        "loss = F.cross_entropy(",
        nproc=2,
        needs="transformers",
    ),
    Client("lightning_fabric.py", "no-division", "GS303", "accumulation_steps", LOSS, needs="lightning"),
    Client(
        "lightning_fabric.py",
        "no-division",
        "GS303",
        "accumulation_steps",
        LOSS,
        env={"DEVICES": "2"},
        needs="lightning",
    ),
    Client("lightning_trainer.py", "double-division", "GS303", "1/accumulation_steps", LOSS, needs="lightning"),
    Client(
        "lightning_trainer.py",
        "no-division",
        "GS303",
        "accumulation_steps",
        LOSS,
        env={"MANUAL": "1"},
        needs="lightning",
    ),
    Client(
        "lightning_trainer.py",
        "double-division",
        "GS303",
        "1/accumulation_steps",
        LOSS,
        env={"DEVICES": "2"},
        needs="lightning",
    ),
    Client("trl_sft.py", "per-batch-mean", "GS301", None, "loss = F.cross_entropy(", needs="trl"),
]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "client",
    [*PLAIN, *(pytest.param(client, marks=pytest.mark.clients) for client in INSTALLED)],
    ids=str,
)
def test_a_client_trains_as_before_and_is_judged_rightly(client: Client, tmp_path: Path) -> None:
    if importlib.util.find_spec(client.needs) is None:
        pytest.skip(f"{client.needs} is not installed")
    alone, healthy = train(client, None), train(client, tmp_path / "healthy")
    assert healthy.parameters == alone.parameters
    assert (healthy.report["verdict"], healthy.report["findings"]) == ("clean", [])
    faulty = train(client, tmp_path / "faulty", fault=True).report
    found = {finding["code"]: finding for finding in faulty["findings"]}
    assert client.code in found
    if client.expression is not None:
        assert found[client.code]["factor"]["expression"] == client.expression
    assert source_line(found[client.code]).startswith(client.line)
    assert Path(found[client.code]["first_event"]["file"]).parent == EXAMPLES


def test_examples_of_clients_do_not_know_this_project() -> None:
    for client in [*PLAIN, *INSTALLED]:
        code = (EXAMPLES / client.script).read_text()
        assert "import gradcheck" not in code
        assert "gradcheck_dist" not in code
