"""A Llama-style decoder. It knows nothing of ranks.

Sources: RMSNorm, arXiv 1910.07467; rotary embedding, arXiv 2104.09864; SwiGLU, arXiv 2002.05202; grouped-query
attention, arXiv 2305.13245; Llama, arXiv 2302.13971; multi-token prediction by parallel heads, arXiv 2404.19737.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradcheck_dist.trainer.auxiliary import AuxiliaryLosses
from gradcheck_dist.trainer.config import TrainConfig

_ROPE_BASE = 10000.0
_NORM_EPS = 1e-5


def attend_causally(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each position looks at itself and those before; [batch, heads, seq, head_dim], fewer heads in key and value."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary embedding; [batch, seq, dim] to the same shape.

    `attend` is what combines the heads; context parallelism puts its own in its place.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.attend = attend_causally
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        query, key = rotate(query, rope), rotate(key, rope)
        heads = self.attend(query, key, value)
        return self.wo(heads.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU; [batch, seq, dim] to the same shape."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.w_gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w_up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w_down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One pre-norm decoder layer; [batch, seq, dim] to the same shape."""

    def __init__(self, config: TrainConfig, auxiliary: AuxiliaryLosses) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=_NORM_EPS)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=_NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)
        if config.num_experts:
            from gradcheck_dist.trainer.moe import MixtureOfExperts

            self.ffn: nn.Module = MixtureOfExperts(config, auxiliary)
        else:
            self.ffn = FeedForward(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rope))
        return x + self.dropout(self.ffn(self.ffn_norm(x)))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The whole model, or what `keep_stage` left of it.

    The first part takes token ids [batch, seq], the others hidden states [batch, seq, dim]; the last part gives
    logits [batch, seq, vocab_size], the others hidden states. With heads that predict further tokens, logits are
    [batch, seq, 1 + num_mtp_heads, vocab_size]: the next token's, the one's after it, and so on. Names of parameters
    are the same in every split.

    Attributes:
        first_position: where in the sequence the tokens begin that this model is given.
        auxiliary: the losses of its mixture-of-experts layers.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocab_size, config.dim)
        self.first_position = 0
        self.seq_len = config.seq_len
        self.auxiliary = AuxiliaryLosses(config)
        self.layers = nn.ModuleDict({str(index): Block(config, self.auxiliary) for index in range(config.n_layers)})
        self.mtp = nn.ModuleDict({str(index): Block(config, self.auxiliary) for index in range(config.num_mtp_heads)})
        self.norm: nn.RMSNorm | None = nn.RMSNorm(config.dim, eps=_NORM_EPS)
        self.head: nn.Linear | None = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.contrast: Callable[[Tensor], Tensor] = lambda hidden: hidden
        if config.contrastive_loss_weight:
            from gradcheck_dist.trainer.contrastive import ContrastiveLoss

            self.contrast = ContrastiveLoss(self.auxiliary)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        rope = rope_table(self.first_position, self.seq_len, self.head_dim, x.device)
        for layer in self.layers.values():
            x = layer(x, rope)
        if self.norm is not None and self.head is not None:
            x = self.contrast(x)
            further = [self.head(self.norm(block(x, rope))) for block in self.mtp.values()]
            x = self.head(self.norm(x))
            if further:
                x = torch.stack([x, *further], dim=2)
        return x

    def block_names(self) -> list[str]:
        """Qualified names of the blocks that are here, first to last."""
        return [*(f"layers.{name}" for name in self.layers), *(f"mtp.{name}" for name in self.mtp)]

    def blocks(self) -> list[nn.Module]:
        """The blocks of `block_names`, perhaps inside of wrappers."""
        return [*self.layers.values(), *self.mtp.values()]


def build_model(config: TrainConfig) -> Decoder:
    """The whole model on the CPU in config.dtype; its weights depend on the seed and the sizes only."""
    model = Decoder(config)
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # 1/sqrt(fan in) keeps every layer's gradient well above rounding noise in a model this small.
                is_embedding = model.embedding is not None and parameter is model.embedding.weight
                std = 1.0 if is_embedding and not config.tied_embeddings else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model.to(getattr(torch, config.dtype))


def keep_stage(model: Decoder, stage: int, num_stages: int) -> None:
    """Cut the model down to one of `num_stages` pipeline stages, in place; layers are dealt out evenly."""
    count = len(model.layers)
    first, end = stage * count // num_stages, (stage + 1) * count // num_stages
    for name in list(model.layers):
        if not first <= int(name) < end:
            del model.layers[name]
    if stage > 0:
        model.embedding = None
    if stage < num_stages - 1:
        model.norm = model.head = None
        model.mtp.clear()


def rope_table(first: int, count: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding from position `first` on, float32 [count, head_dim / 2] each."""
    frequency = _ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(first, first + count, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of [batch, heads, seq, head_dim] by their position, in float32."""
    cos, sin = (table[: x.shape[-2]] for table in rope)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
