"""Numbers that lie on an accelerator are read when they have come; what has no value of its own never comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from elsewhere import pretend
from torch import nn

from gradcheck_dist.events import ProbeError, RootValue
from gradcheck_dist.probes import attach, session
from gradcheck_dist.probes.recording.recorder import Recorder, guarded
from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run


@guarded("probe")
def tell(recorder: Recorder, value: torch.Tensor) -> None:
    recorder.emit(RootValue, accumulation_step=0, microbatch=0, value=value)


def test_a_number_that_a_tracer_holds_is_a_probes_error_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch)
    model = nn.Linear(8, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attach(tmp_path / "run"):
        for _ in range(2):
            nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(5, (6,))).backward()
            assert session._session is not None
            tell(session._session.recorder, torch.zeros((), device="meta"))
            tell(session._session.recorder, torch.tensor(3.0))
            optimizer.step()
            optimizer.zero_grad()
    events = read_run(tmp_path / "run").ranks[0].events
    errors = [event for event in events if isinstance(event, ProbeError)]
    assert len(errors) == 2 and "no number that could be read later" in errors[0].message
    assert [event.value for event in events if isinstance(event, RootValue)].count(3.0) == 2
    assert diagnose_run(tmp_path / "run").verdict == "clean"
