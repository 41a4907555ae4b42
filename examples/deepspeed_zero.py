"""DeepSpeed on CPU; STAGE chooses ZeRO 0 to 3, BF16=1 its mixed precision, with float32 copies in one flat tensor.

FAULT=double-division divides by hand what backward() divides too, FAULT=double-averaging leaves out the number of
ranks, over which the engine averages. BACKWARD=torch calls loss.backward() (ZeRO 1 to 3), where the engine divides by
accumulation steps in hooks on its outputs. CLIP is the norm that gradients are clipped to.

gradcheck run -- torchrun --nproc-per-node 2 examples/deepspeed_zero.py
"""

import os
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

FAULT, STAGE = os.environ.get("FAULT"), int(os.environ.get("STAGE", "1"))
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 3, 4

deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled: torch's own optimizers and gloo do
deepspeed.init_distributed("gloo", verbose=False)
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(VOCABULARY, WIDTH),
    nn.LayerNorm(WIDTH),
    nn.Linear(WIDTH, WIDTH),
    nn.GELU(),
    nn.LayerNorm(WIDTH),
    nn.Linear(WIDTH, VOCABULARY),
)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": ACCUMULATION,
    "zero_optimization": {"stage": STAGE, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": float(os.environ.get("CLIP", "1.0")),
    "bf16": {"enabled": os.environ.get("BF16") == "1"},
}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
generator = torch.Generator().manual_seed(rank)
for _ in range(STEPS):
    step = []
    for _ in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
        labels = tokens[:, 1:].clone()
        for row, length in enumerate(torch.randint(4, 17, (4,), generator=generator)):
            labels[row, length:] = -100
        step.append((tokens[:, :-1], labels))
    num_tokens = torch.tensor(sum(int((labels != -100).sum()) for _, labels in step))
    dist.all_reduce(num_tokens)
    for tokens, labels in step:
        loss = cross_entropy(engine(tokens).float().flatten(0, 1), labels.flatten(), reduction="sum")
        averaged_over = 1 if FAULT == "double-averaging" else world_size
        loss = (
            loss * averaged_over * ACCUMULATION / num_tokens
        )  # the engine divides by ACCUMULATION, and averages ranks
        if FAULT == "double-division":
            loss = loss / ACCUMULATION
        if os.environ.get("BACKWARD") == "torch":
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
if rank == 0:
    held = [getattr(parameter, "ds_tensor", parameter) for parameter in model.parameters()]  # ZeRO 3: this rank's part
    print("parameters", sum(part.double().sum().item() for part in held).hex())
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
