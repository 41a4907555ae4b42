"""Megatron Core on CPU: its GPT model, buffers of gradients, optimizer, schedule and finalize_model_grads.

Tokens are counted in the loss function, and the schedule divides all gradients by their sum over data ranks
(calculate_per_token_loss). PP=2 makes a pipeline (1F1B) of two ranks, DISTRIBUTED=1 shares the optimizer's work between
data ranks, BF16=1 keeps float32 copies of bfloat16 parameters.
FAULT=divided-in-the-loss divides in the loss function, too. FAULT=own-tokens divides by the tokens of each rank alone.

gradcheck run -- torchrun --nproc-per-node 2 examples/megatron_core_cpu.py
"""

import os
import time

import torch
import torch.distributed as dist

FAULT, PIPELINE = os.environ.get("FAULT"), int(os.environ.get("PP", "1"))
DISTRIBUTED, BF16 = os.environ.get("DISTRIBUTED") == "1", os.environ.get("BF16") == "1"
VOCABULARY, LENGTH, SEQUENCES, ACCUMULATION, STEPS = 64, 16, 4, 3, 4


def on_cpu(make):
    """Megatron names the device "cuda" in many places."""
    return lambda *args, **given: make(*args, **{**given, **({"device": "cpu"} if "device" in given else {})})


for name in ("zeros", "tensor", "empty"):
    setattr(torch, name, on_cpu(getattr(torch, name)))
type_of = torch.Tensor.type
torch.Tensor.type = lambda self, *kind: type_of(self, *kind) if kind else type_of(self).replace("torch.", "torch.cuda.")
torch.cuda.current_device = lambda: "cpu"
torch.cuda.manual_seed = lambda seed: None
torch.cuda.get_rng_state = torch.get_rng_state
torch.cuda.set_rng_state = torch.set_rng_state

import megatron.core.tensor_parallel.random as random_states  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

random_states._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
random_states._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

dist.init_process_group("gloo")
rank = dist.get_rank()
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=PIPELINE)
random_states.model_parallel_cuda_manual_seed(0)
torch.manual_seed(0)
dtype = torch.bfloat16 if BF16 else torch.float32
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    ffn_hidden_size=64,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    persist_layer_norm=False,
    pipeline_model_parallel_size=PIPELINE,
    pipeline_dtype=dtype,
    params_dtype=dtype,
    bf16=BF16,
    deallocate_pipeline_outputs=True,
    batch_p2p_comm=False,
    calculate_per_token_loss=True,
)
model = GPTModel(
    config,
    get_gpt_layer_local_spec(),
    VOCABULARY,
    LENGTH,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
)
buffers = DistributedDataParallelConfig(
    grad_reduce_in_fp32=True, use_distributed_optimizer=DISTRIBUTED, bucket_size=4000
)
model = DistributedDataParallel(config, buffers, model.to(dtype))
optimizer = get_megatron_optimizer(
    OptimizerConfig(lr=1e-2, clip_grad=10.0, bf16=BF16, params_dtype=dtype, use_distributed_optimizer=DISTRIBUTED),
    [model],
)


def finalize(models, num_tokens=None, **groups):
    if FAULT != "own-tokens":
        finalize_model_grads(models, num_tokens, **groups)
        return
    finalize_model_grads(models, None, **groups)
    for module in models:
        module.scale_gradients(1.0 / num_tokens)


config.finalize_model_grads_func = finalize
config.grad_scale_func = optimizer.scale_loss


def microbatches(generator):
    for _ in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH + 1), generator=generator)
        lengths = torch.randint(4, LENGTH + 1, (SEQUENCES, 1), generator=generator)
        yield tokens, (torch.arange(LENGTH) < lengths).float()


def forward_step(data, module):
    tokens, mask = next(data)
    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    output = module(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:].contiguous())

    def loss_func(losses):
        loss, num_tokens = (losses.float() * mask).sum(), mask.sum().int()
        if FAULT == "divided-in-the-loss":
            loss = loss / num_tokens
        return loss, num_tokens, {}

    return output, loss_func


run = get_forward_backward_func()
generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
for _ in range(STEPS):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    run(
        forward_step_func=forward_step,
        data_iterator=microbatches(generator),
        model=[model],
        num_microbatches=ACCUMULATION,
        seq_length=LENGTH,
        micro_batch_size=SEQUENCES,
    )
    optimizer.step()
if rank == 0:
    print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
