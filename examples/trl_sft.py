"""TRL's SFTTrainer on its default loss. FAULT=per-batch-mean averages each batch by itself.

gradcheck run -- python examples/trl_sft.py
gradcheck run -- torchrun --nproc-per-node 2 examples/trl_sft.py
"""

import os
import tempfile
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

FAULT = os.environ.get("FAULT")
ACCUMULATION, STEPS = 2, 4


class PerBatchMean(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


def main():
    set_seed(0)
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{index}" for index in range(60))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    lengths = torch.randint(4, 20, (32,))
    texts = [" ".join(f"w{int(word)}" for word in torch.randint(60, (int(length),))) for length in lengths]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=ACCUMULATION,
            learning_rate=1e-2,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            max_length=32,
        )
        trainer_class = PerBatchMean if FAULT == "per-batch-mean" else SFTTrainer
        trainer = trainer_class(
            model=model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer
        )
        trainer.train()
    if trainer.is_world_process_zero():
        print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        time.sleep(0.3)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
