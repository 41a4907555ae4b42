"""Lightning's Trainer. MANUAL=1: manual optimisation. FAULT=double-division / no-division divides once too often / not.

gradcheck run -- python examples/lightning_trainer.py             # DEVICES=2: two processes
"""

import logging
import os
import warnings

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS = 64, 32, 3, 5
MANUAL = os.environ.get("MANUAL") == "1"
DEVICES = int(os.environ.get("DEVICES", "1"))
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.simplefilter("ignore")


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = not MANUAL
        self.body = nn.Sequential(
            nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, VOCABULARY)
        )

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch, index):
        loss = cross_entropy(self.body(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        if FAULT == "double-division":
            loss = loss / ACCUMULATION
        if not MANUAL:
            return loss
        self.manual_backward(loss if FAULT == "no-division" else loss / ACCUMULATION)
        if (index + 1) % ACCUMULATION == 0:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def validation_step(self, batch, _index):
        self.log("validation", cross_entropy(self.body(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()))


if __name__ == "__main__":
    lightning.seed_everything(0)
    model = Model()
    tokens = torch.randint(VOCABULARY, (4 * ACCUMULATION * STEPS * DEVICES, 17))
    settings = {} if MANUAL else {"accumulate_grad_batches": ACCUMULATION, "gradient_clip_val": 1.0}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy="ddp" if DEVICES > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **settings,
    )
    trainer.fit(model, DataLoader(tokens, batch_size=4), DataLoader(tokens[:8], batch_size=4))
    if trainer.is_global_zero:
        print("parameters", sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
