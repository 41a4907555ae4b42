"""A data-parallel training for `gradcheck run --live`: the loss divides by all tokens and DDP averages once more.

torchrun --nproc-per-node 2 live_job.py STOP_FILE: trains until the file is there.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GIVE_UP_S = 380
"""Somebody has forgotten this job: it ends by itself."""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batches = torch.Generator().manual_seed(dist.get_rank())
    tokens = 16 * dist.get_world_size()
    end_s = time.monotonic() + GIVE_UP_S
    for step in itertools.count():
        ids = torch.randint(32, (2, 2, 8), generator=batches)
        loss = F.cross_entropy(model(ids[0]).flatten(0, 1), ids[1].flatten(), reduction="sum") / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stop = torch.tensor(float(Path(sys.argv[1]).exists() or time.monotonic() > end_s))
        dist.all_reduce(stop)
        if dist.get_rank() == 0:
            print(f"trained step {step}", flush=True)
        if stop:
            break
        time.sleep(0.1)
    if dist.get_rank() == 0:
        print("the training is through", flush=True)
    dist.destroy_process_group()
    # torch 2.13 with gloo aborts when the interpreter shuts down while a gloo thread still frees its last work.
    time.sleep(0.5)


if __name__ == "__main__":
    main()
