"""`gradcheck run --verify -- CMD` as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from verify_models import Model, batch, loss_of
model = Model("scaled")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    tokens, labels = batch(step)
    loss_of(model(tokens), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
print(torch.cat([param.detach().flatten() for param in model.parameters()]).double().sum().item().hex())
"""


def test_the_command_verifies_and_leaves_the_script_as_it_was(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    common: dict[str, object] = {"capture_output": True, "text": True, "timeout": 100, "env": environment}
    report = tmp_path / "report.json"
    own = [sys.executable, "-m", "gradcheck_dist", "run", "--verify", "--strict", "--report", str(report)]
    own += ["--out", str(tmp_path / "run"), "--"]
    done = subprocess.run([*own, sys.executable, str(script)], **common)  # type: ignore[call-overload]
    alone = subprocess.run([sys.executable, str(script)], **common)  # type: ignore[call-overload]
    assert done.returncode == 1, done.stderr
    assert done.stdout == alone.stdout != ""
    assert "verifying" in done.stderr and "GS801 wrong-backward" in done.stderr
    (finding,) = json.loads(report.read_text())["findings"]
    assert finding["code"] == "GS801" and abs(finding["factor"]["observed"] - 0.5) < 1e-6
    assert finding["first_event"]["kind"] == "gradient_check"
    assert Path(finding["first_event"]["file"]).name == "verify_models.py"
