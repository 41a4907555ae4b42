"""Hugging Face's Trainer on sequences of unequal length. FAULT=per-batch-mean overrides the loss.

gradcheck run -- python examples/transformers_trainer.py
gradcheck run -- torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import os
import tempfile
import time

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

FAULT = os.environ.get("FAULT")
VOCABULARY, ACCUMULATION, STEPS = 64, 3, 5


class PerBatchMean(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def collate(rows):
    length = max(len(row) for row in rows)
    input_ids = torch.stack([F.pad(row, (0, length - len(row))) for row in rows])
    labels = torch.stack([F.pad(row, (0, length - len(row)), value=-100) for row in rows])
    return {"input_ids": input_ids, "labels": labels, "attention_mask": (labels != -100).long()}


def main():
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
    rows = [torch.randint(VOCABULARY, (int(length),)) for length in torch.randint(6, 24, (96,))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=ACCUMULATION,
            learning_rate=1e-2,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer_class = PerBatchMean if FAULT == "per-batch-mean" else Trainer
        trainer = trainer_class(model=model, args=arguments, train_dataset=rows, data_collator=collate)
        trainer.train()
    if trainer.is_world_process_zero():
        print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        time.sleep(0.3)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
