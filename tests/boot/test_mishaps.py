"""Whatever happens to a rank: training goes on as it would, and the trace is judged as far as it goes."""

from __future__ import annotations

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gradcheck_dist.stream.diagnose import diagnose_run
from gradcheck_dist.trace.run import read_run

from .conftest import TRAINER, Outcome, Run, start

END = {
    "os._exit": "os._exit(0)",
    "an exception": "raise RuntimeError('mine')",
    "SIGKILL": "os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize(("how", "code"), END.items())
def test_a_rank_that_ends_mid_step_is_judged_up_to_there(run: Run, how: str, code: str) -> None:
    body = f"""
def end(step, k):
    if (step, k) == (2, 1):
        {code}
train(divide=False, before=end)
"""
    done = run(body, options=("--steps", "0:9"))
    assert done.code == {"os._exit": 0, "an exception": 1, "SIGKILL": 137}[how]
    assert "GS303" in done.stderr


@pytest.mark.parametrize(
    "space", [0, pytest.param(3000, marks=pytest.mark.long)], ids=["no space", "space for the header"]
)
def test_a_full_disk_costs_the_trace_only(run: Run, space: int) -> None:
    body = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({space}, {space}))
train()
print("trained", flush=True)
"""
    done = run(body)
    assert (done.code, done.stdout) == (0, "trained\n")
    assert "CLEAN" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_folder_that_vanished_or_refuses_costs_the_trace_only(run: Run) -> None:
    body = """
import shutil
folder = __import__("json").loads(os.environ["GRADCHECK_BOOT"])["run_dir"]
shutil.rmtree(folder)
open(folder, "w").close()
train()
os.unlink(folder)
print("trained")
"""
    done = run(body)
    assert (done.code, done.stdout) == (0, "trained\n")
    assert done.stderr.count("gradcheck: not recording: ") == 1


@pytest.mark.long
def test_data_loader_workers_write_nothing(run: Run) -> None:
    body = """
from torch.utils.data import DataLoader
if __name__ == "__main__":
    for context in ("fork", "spawn"):
        loader = DataLoader(torch.arange(8).float(), batch_size=4, num_workers=1, multiprocessing_context=context)
        for batch in loader:
            train(2)
    print(sorted(os.listdir(__import__("json").loads(os.environ["GRADCHECK_BOOT"])["run_dir"])))
"""
    done = run(body)
    assert done.stdout == "['manifest.json', 'rank-00000.trace']\n"
    assert "CLEAN" in done.stderr
    assert "not recording" not in done.stderr


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_data_loader_workers_that_compute_gradients_take_no_rank_s_place(run: Run, context: str) -> None:
    body = f"""
from torch.utils.data import DataLoader, Dataset
class Hard(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        scores = torch.zeros(1, 3, requires_grad=True)
        cross_entropy(scores, torch.tensor([1])).backward()
        return scores.grad
if __name__ == "__main__":
    loader = DataLoader(Hard(), num_workers=1, persistent_workers=True, multiprocessing_context="{context}")
    print(len(list(loader)))
    train(divide=False)
"""
    done = run(body)
    assert (done.code, done.stdout, done.traces) == (0, "4\n", ["rank-00000.trace"])
    assert "GS303" in done.stderr
    assert "not recording" not in done.stderr


SPAWNED = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
def worker(rank, method):
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for step in range(4):
        cross_entropy(model(torch.randn(4, 8)), torch.randint(5, (4,))).backward()
        optimizer.step(); optimizer.zero_grad()
    dist.barrier()
    os._exit(0)
if __name__ == "__main__":
    mp.start_processes(worker, (sys.argv[1],), nprocs=2, start_method=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_ranks_that_multiprocessing_starts_are_found_by_their_process_group(run: Run, method: str) -> None:
    done = run(SPAWNED, method, prelude="")
    assert done.traces == ["rank-00000.trace", "rank-00001.trace"]
    assert "CLEAN" in done.stderr


OF_A_MACHINE = """
import os, sys, torch, torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{os.environ['STORE']}", rank=rank, world_size=size)
torch.manual_seed(0)
model = DDP(torch.nn.Linear(8, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(rank)
for step in range(4):
    inputs, labels = torch.randn(4, 8), torch.randint(5, (4,))
    (2 * cross_entropy(model(inputs), labels)).backward()  # each rank takes its mean for the share of all
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "shared", [True, pytest.param(False, marks=pytest.mark.long)], ids=["one folder", "folders that are put together"]
)
def test_each_machine_records_its_ranks_and_they_are_judged_together(tmp_path: Path, shared: bool) -> None:
    folders = [tmp_path / ("shared" if shared else f"machine-{rank}") for rank in range(2)]
    for folder in folders:
        folder.mkdir(exist_ok=True)

    def start_rank(rank: int) -> Outcome:
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "STORE": str(tmp_path / "store")}
        return start(folders[rank], "", env=env, prelude=OF_A_MACHINE)

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(start_rank, range(2)))
    assert [one.code for one in done] == [0, 0], done[0].stderr + done[1].stderr
    if not shared:
        for one in done:
            assert "COULD NOT JUDGE" in one.stderr
            assert "the same --out" in " ".join(one.stderr.split())
        shutil.copy(done[1].folder / "rank-00001.trace", done[0].folder)
    report = diagnose_run(done[0].folder)
    assert [(finding.code, finding.factor.exact) for finding in report.findings] == [("GS303", "2")]


@pytest.mark.slow
@pytest.mark.long
def test_an_elastic_restart_writes_its_own_files_and_the_last_is_judged(run: Run) -> None:
    body = """
def fail(step, k):
    if step == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        sys.exit(7)
train(before=fail)
os._exit(0)
"""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1")
    done = run(body, command=torchrun)
    assert done.code == 0
    assert done.traces == ["rank-00000.1.trace", "rank-00000.trace"]
    assert read_run(done.folder).ranks[0].path.name == "rank-00000.1.trace"
    assert "CLEAN" in done.stderr


@pytest.mark.parametrize("count", [1, pytest.param(0, marks=pytest.mark.long)], ids=["counted", "not counted"])
def test_a_restart_with_fewer_ranks_is_judged_without_those_that_left(run: Run, count: int) -> None:
    """Members that come or go make a restart that torchrun does not count: TORCHELASTIC_RESTART_COUNT stays."""
    body = f"""
import os, subprocess, sys
if "RANK" not in os.environ:
    for rank, world_size, restart in ((0, 2, 0), (1, 2, 0), (0, 1, {count})):
        names = {{"RANK": rank, "WORLD_SIZE": world_size, "TORCHELASTIC_RESTART_COUNT": restart}}
        names["TORCHELASTIC_RUN_ID"] = "none"
        environment = os.environ | {{name: str(value) for name, value in names.items()}}
        subprocess.run([sys.executable, __file__], env=environment, check=True)
    sys.exit()
"""
    done = run("train(2)", prelude=body + TRAINER)  # the process that starts them needs no torch
    assert done.traces == ["rank-00000.1.trace", "rank-00000.trace", "rank-00001.trace"]
    recorded = read_run(done.folder)
    assert (recorded.world_size, sorted(recorded.ranks), recorded.missing_ranks) == (1, [0], ())
    assert "CLEAN" in done.stderr


@pytest.mark.long
def test_a_second_training_under_one_command_is_told(run: Run) -> None:
    body = """
import subprocess
train(2)
if len(sys.argv) < 2:
    print(subprocess.run([sys.executable, __file__, "again"], capture_output=True, text=True, check=True).stderr)
"""
    done = run(body)
    assert "already holds a trace of rank 0" in done.stdout
    assert "training needs a run folder of its own" in done.stdout
    assert "CLEAN" in done.stderr
    (told,) = (problem for problem in diagnose_run(done.folder).coverage.problems if "further training" in problem)
    assert told.startswith("rank 0 did not record 1 further training under")
