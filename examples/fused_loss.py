"""A fused, chunked linear cross entropy as one's own autograd function, as Liger's: logits never exist as a whole.

No wrapper sees such a loss; its value tells what it adds up. FAULT=divided-in-the-loop halves what was accumulated so
far after every batch, FAULT=passed-by gives back what was computed on the way forward, without what arrives.

gradcheck run -- python examples/fused_loss.py
"""

import os

import torch
from torch import nn

FAULT = os.environ.get("FAULT")
VOCABULARY, WIDTH, ACCUMULATION, STEPS, CHUNK = 64, 32, 3, 5, 24


class FusedLinearCrossEntropy(torch.autograd.Function):
    """The sum over tokens of -log softmax(hidden @ weight.T)[label]; the gradients are computed on the way forward."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        loss = hidden.new_zeros(())
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), CHUNK):
            part = slice(start, start + CHUNK)
            log_probs = (hidden[part] @ weight.T).log_softmax(-1)
            valid = labels[part] != -100
            picked = labels[part].clamp_min(0)[:, None]
            loss -= (log_probs.gather(1, picked)[:, 0] * valid).sum()
            grad_logits = log_probs.exp()
            grad_logits.scatter_add_(1, picked, torch.full_like(picked, -1.0, dtype=grad_logits.dtype))
            grad_logits *= valid[:, None]
            grad_hidden[part] = grad_logits @ weight
            grad_weight += grad_logits.T @ hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad_output):
        grad_hidden, grad_weight = ctx.saved_tensors
        if FAULT == "passed-by":
            return grad_hidden, grad_weight, None
        return grad_hidden * grad_output, grad_weight * grad_output, None


torch.manual_seed(0)
body = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
head = nn.Linear(WIDTH, VOCABULARY, bias=False)
parameters = [*body.parameters(), *head.parameters()]
optimizer = torch.optim.AdamW(parameters, lr=1e-2)
generator = torch.Generator().manual_seed(1)
for _ in range(STEPS):
    step = []
    for _ in range(ACCUMULATION):
        tokens = torch.randint(VOCABULARY, (4, 17), generator=generator)
        labels = tokens[:, 1:].clone()
        for row, length in enumerate(torch.randint(4, 17, (4,), generator=generator)):
            labels[row, length:] = -100
        step.append((tokens[:, :-1], labels))
    num_tokens = sum((labels != -100).sum() for _, labels in step)
    for tokens, labels in step:
        loss = FusedLinearCrossEntropy.apply(body(tokens).flatten(0, 1), head.weight, labels.flatten())
        (loss / num_tokens).backward()
        if FAULT == "divided-in-the-loop":
            for parameter in parameters:
                parameter.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
print("parameters", sum(parameter.double().sum().item() for parameter in parameters).hex())
