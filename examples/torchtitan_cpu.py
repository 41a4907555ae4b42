"""torchtitan's own train.py on CPU with gloo: its debug model, a word tokenizer and random text made here.

What follows the script's name goes to torchtitan:

    gradcheck run -- torchrun --nproc-per-node 2 examples/torchtitan_cpu.py --parallelism.tensor_parallel_degree 2

torchtitan 0.2.2 divides by the tokens of all ranks. That is right under FSDP, and wrong, as released, under DDP, which
averages once more, and under pipelines, whose loss is divided only after backward; REPAIR=1 divides it before.
FAULT=fsdp-averages leaves FSDP its own average; FAULT=scale-grads lets a pipeline divide the accumulated gradient in
every schedule step, as torchtitan once did.
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

FAULT, REPAIR = os.environ.get("FAULT"), os.environ.get("REPAIR")
ACCUMULATION, BATCH, SEQUENCE, STEPS = 2, 4, 32, 3


def be_a_device():
    """Let torchtitan find a CPU where it looks for an accelerator."""
    names = dict(vars(torch.cpu))
    names["get_device_name"] = lambda device=None: "cpu"
    names["get_device_properties"] = lambda device=None: SimpleNamespace(total_memory=2**33)
    names["memory_stats"] = lambda device=None: {}
    names["current_device"] = lambda: 0
    for name in ("set_device", "reset_peak_memory_stats", "empty_cache"):
        names[name] = lambda *unused: None
    module = SimpleNamespace(**names)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device_type: module
    barrier = dist.barrier
    dist.barrier = lambda *args, device_ids=None, **kwargs: barrier(*args, **kwargs)


def sum_on_gloo():
    """gloo knows no premultiplied sum: a divide factor needs a plain sum."""
    set_factor = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self, factor):
        if FAULT != "fsdp-averages":
            set_factor(self, factor)
            self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


def make_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(500))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def make_data_set():
    from datasets import Dataset
    from torchtitan.hf_datasets import text_datasets

    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(500)}" for _ in range(200)) for _ in range(200)]
    known = text_datasets.DATASETS["c4_test"]
    known.loader = lambda path: Dataset.from_dict({"text": texts})


def rescale_pipelines(num_tokens):
    """REPAIR divides the loss of every microbatch by all tokens; FAULT divides gradients by the microbatches too."""
    base, rescaled = schedules._PipelineSchedule, FAULT == "scale-grads"
    init = base.__init__

    def patched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        factor = (1 / num_tokens if REPAIR else 1) * (self._n_microbatches if rescaled else 1)
        loss_fn, self.scale_grads = self._loss_fn, rescaled
        self._loss_fn = lambda *given: loss_fn(*given) * factor

    base.__init__ = patched


def report_parameters(titan):
    close = titan.Trainer.close

    def closing(self):
        total = 0.0
        for part in self.model_parts:
            for parameter in part.parameters():
                whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                total += whole.detach().double().sum().item()
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, total.hex())
        if dist.get_rank() == 0:
            print("parameters", *every, flush=True)
        close(self)

    titan.Trainer.close = closing


def main():
    be_a_device()
    sum_on_gloo()
    given = sys.argv[1:]
    replicas = int(os.environ["WORLD_SIZE"])
    for axis in ("tensor", "pipeline"):
        name = f"--parallelism.{axis}_parallel_degree"
        replicas //= int(given[given.index(name) + 1]) if name in given else 1
    batch = BATCH * ACCUMULATION * replicas
    if REPAIR or FAULT == "scale-grads":
        rescale_pipelines(batch * SEQUENCE)
    with tempfile.TemporaryDirectory() as folder:
        make_tokenizer(Path(folder))
        options = {
            "job.dump_folder": folder,
            "model.hf_assets_path": folder,
            "training.seq_len": SEQUENCE,
            "training.local_batch_size": BATCH,
            "training.global_batch_size": batch,
            "training.steps": STEPS,
            "debug.seed": 0,
            "training.mixed_precision_param": "float32",
            "optimizer.implementation": "foreach",
            "activation_checkpoint.mode": "none",
            "comm.trace_buf_size": 0,
            "lr_scheduler.warmup_steps": 1,
        }
        for name, value in options.items():
            if f"--{name}" not in given:
                given += [f"--{name}", str(value)]
        sys.argv[1:] = given  # torchtitan reads them while it is imported
        import torchtitan.train as titan

        make_data_set()
        report_parameters(titan)
        titan.main(titan.Trainer)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
