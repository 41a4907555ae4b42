"""pytorch-ignite's supervised trainer. FAULT=double-division divides the loss once too often.

gradcheck run -- python examples/ignite_trainer.py
gradcheck run -- torchrun --nproc-per-node 2 examples/ignite_trainer.py
"""

import os
import time

import ignite.distributed as idist
import torch
from ignite.engine import create_supervised_trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FAULT = os.environ.get("FAULT")
ACCUMULATION, CLASSES = 3, 5


def mean_loss(logits, labels):
    loss = cross_entropy(logits, labels)
    return loss / ACCUMULATION if FAULT == "double-division" else loss


def main():
    torch.manual_seed(0)
    distributed = "RANK" in os.environ
    if distributed:
        torch.distributed.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, CLASSES))
    wrapped = idist.auto_model(model) if distributed else model
    rows = TensorDataset(torch.randn(96, 8), torch.randint(CLASSES, (96,)))
    loader = DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows) if distributed else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(wrapped, optimizer, mean_loss, gradient_accumulation_steps=ACCUMULATION)
    trainer.run(loader, max_epochs=1)
    if int(os.environ.get("RANK", "0")) == 0:
        print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
    if distributed:
        torch.distributed.barrier()
        time.sleep(0.3)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
