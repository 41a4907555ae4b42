"""sentence-transformers' trainer on in-batch negatives. FAULT=double-division divides the loss once too often.

gradcheck run -- python examples/sentence_transformers_trainer.py
gradcheck run -- torchrun --nproc-per-node 2 examples/sentence_transformers_trainer.py
"""

import os
import random
import tempfile
import time

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import DistilBertConfig, DistilBertModel, PreTrainedTokenizerFast, set_seed

FAULT = os.environ.get("FAULT")
ACCUMULATION, STEPS, WIDTH = 3, 4, 32


class Trainer(SentenceTransformerTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss / ACCUMULATION if FAULT == "double-division" else loss


def sentence():
    return " ".join(f"w{random.randrange(60)}" for _ in range(random.randint(3, 16)))


def small_model(folder):
    words = ["<pad>", "<unk>", *(f"w{index}" for index in range(60))]
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>").save_pretrained(folder)
    config = DistilBertConfig(vocab_size=len(words), dim=WIDTH, hidden_dim=64, n_layers=2, n_heads=2, dropout=0.0)
    DistilBertModel(config).save_pretrained(folder)
    transformer = models.Transformer(folder, max_seq_length=32)
    return SentenceTransformer(modules=[transformer, models.Pooling(WIDTH)], device="cpu")


def main():
    set_seed(0)
    pairs = Dataset.from_dict({name: [sentence() for _ in range(96)] for name in ("anchor", "positive")})
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(folder)
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=ACCUMULATION,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        loss = losses.MultipleNegativesRankingLoss(model)
        trainer = Trainer(model=model, args=arguments, train_dataset=pairs, loss=loss)
        trainer.train()
    if trainer.is_world_process_zero():
        print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        time.sleep(0.3)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
