"""A small language model of the DeepSeek-V2 architecture, in two forms that share their weights.

Attention is multi-head latent attention: each token is cached as a latent vector c (kv_lora_rank)
and a rotated key part r (qk_rope_head_dim) that all heads share. For head h

    k_h = [W_uk_h c, r],  v_h = W_uv_h c,  score = S * dot([q_nope_h, q_rope_h], k_h)

`PlainModel` computes exactly that, caching k and v of every head. `PagedModel` absorbs W_uk into
the query and W_uv into the output: attention then runs over the cached vectors [c, r] themselves,
as key and (their first kv_lora_rank components) value: what `flash_mla_with_kvcache` computes over
a paged cache.

Differences from DeepSeek-V2: every layer has a dense feed-forward network (no experts), q is not
compressed, and the embedding also gives the logits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Planner = Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]]
Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, each (tokens, 1, rope / 2)


@dataclass(frozen=True)
class Config:
    """Sizes of a model, named as in DeepSeek-V2's configuration."""

    vocab_size: int = 1024
    context_length: int = 1024
    hidden_size: int = 256
    num_layers: int = 6
    num_heads: int = 8
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 64
    v_head_dim: int = 32
    kv_lora_rank: int = 512
    intermediate_size: int = 704
    rope_theta: float = 10000.0
    norm_epsilon: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5

    @property
    def cached_dim(self) -> int:
        """Components of a cached vector: the head_dim of the attention call."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def rotation(positions: torch.Tensor, config: Config) -> Rotation:
    """The angles of rotary embedding (arXiv:2104.09864) at positions (tokens)."""
    half = config.qk_rope_head_dim // 2
    steps = torch.arange(half, device=positions.device, dtype=torch.float32)
    angles = positions.float()[:, None, None] * config.rope_theta ** (-steps / half)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Turns x (..., tokens, heads, rope); its halves are the pairs' first and second components."""
    cosine, sine = by
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned, dim=-1).to(x.dtype)


class LatentAttention(nn.Module):
    """The projections of a layer's attention, and the plain form over a whole sequence."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = c = config
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.qk_head_dim, bias=False)
        self.kv_down_proj = nn.Linear(c.hidden_size, c.cached_dim, bias=False)
        self.kv_norm = nn.RMSNorm(c.kv_lora_rank, eps=c.norm_epsilon)
        self.kv_up_proj = nn.Linear(
            c.kv_lora_rank, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(c.num_heads * c.v_head_dim, c.hidden_size, bias=False)

    def query(self, x: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """(..., tokens, heads, nope) and the rotated (..., tokens, heads, rope)."""
        c = self.config
        q = self.q_proj(x).unflatten(-1, (c.num_heads, c.qk_head_dim))
        nope, rope = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        return nope, rotate(rope, by)

    def latent(self, x: torch.Tensor, by: Rotation) -> torch.Tensor:
        """The vectors to cache: (..., tokens, kv_lora_rank + rope)."""
        c = self.config
        latent, rope = self.kv_down_proj(x).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        rope = rotate(rope.unsqueeze(-2), by).squeeze(-2)
        return torch.cat((self.kv_norm(latent), rope), dim=-1)

    def keys_and_values(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per head, unabsorbed: (..., tokens, heads, qk) and (..., tokens, heads, v)."""
        c = self.config
        latent, rope = cached.split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        up = self.kv_up_proj(latent).unflatten(-1, (c.num_heads, c.qk_nope_head_dim + c.v_head_dim))
        nope, values = up.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        rope = rope.unsqueeze(-2).expand(*nope.shape[:-1], c.qk_rope_head_dim)
        return torch.cat((nope, rope), dim=-1), values

    def absorbed_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """W_uk (heads, nope, rank) and W_uv transposed (heads, rank, v), each contiguous."""
        c = self.config
        weight = self.kv_up_proj.weight.view(c.num_heads, -1, c.kv_lora_rank)
        w_uk, w_uv = weight.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
        return w_uk.contiguous(), w_uv.transpose(1, 2).contiguous()

    def forward(self, x: torch.Tensor, by: Rotation, dropout: float) -> torch.Tensor:
        """Causal attention of whole sequences (batch, tokens, hidden); for training."""
        q = torch.cat(self.query(x, by), dim=-1)
        keys, values = self.keys_and_values(self.latent(x, by))
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            dropout_p=dropout if self.training else 0.0,
            scale=self.config.softmax_scale,
        )
        return self.o_proj(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward network, each after a norm; who calls them adds what they give."""

    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.attention = LatentAttention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.feed_forward = FeedForward(config)


class LanguageModel(nn.Module):
    """The weights, and the forward pass of whole sequences that training uses."""

    def __init__(self, config: Config, dropout: float = 0.0):
        super().__init__()
        self.config = config
        self.dropout = dropout
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02
                if name.endswith(("o_proj.weight", "down_proj.weight")) and "kv_" not in name:
                    scale /= math.sqrt(2 * config.num_layers)
                nn.init.normal_(parameter, std=scale)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(..., hidden) to (..., vocabulary)."""
        return F.linear(self.norm(hidden), self.embedding.weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens (batch, length) to logits (batch, length, vocabulary)."""
        drop = self.dropout if self.training else 0.0
        by = rotation(torch.arange(tokens.shape[1], device=tokens.device), self.config)
        hidden = F.dropout(self.embedding(tokens), drop)
        for layer in self.layers:
            attended = layer.attention(layer.attention_norm(hidden), by, drop)
            hidden = hidden + F.dropout(attended, drop)
            hidden = hidden + F.dropout(layer.feed_forward(layer.feed_forward_norm(hidden)), drop)
        return self.logits(hidden)

    def save(self, path: Path) -> None:
        """Weights in bfloat16, the configuration in the file's metadata."""
        weights = {
            name: value.detach().to("cpu", torch.bfloat16).contiguous()
            for name, value in self.state_dict().items()
        }
        save_file(weights, str(path), metadata={"config": json.dumps(asdict(self.config))})

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> LanguageModel:
        """The model of a file of `save`, for inference."""
        with safe_open(str(path), framework="pt") as file:
            config = Config(**json.loads(file.metadata()["config"]))
        model = cls(config)
        model.load_state_dict(load_file(str(path)))
        return model.to(device, dtype).eval().requires_grad_(False)


class PlainModel:
    """Generation in plain PyTorch: keys and values of every head in a contiguous cache."""

    def __init__(self, model: LanguageModel):
        self.model = model
        self.keys: list[torch.Tensor] = []  # a layer: (tokens, heads, qk_head_dim)
        self.values: list[torch.Tensor] = []  # a layer: (tokens, heads, v_head_dim)

    def append(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes the next tokens (count) and returns the logits after the last (vocabulary)."""
        model, c = self.model, self.model.config
        start = self.keys[0].shape[0] if self.keys else 0
        cached = torch.arange(start + len(tokens), device=tokens.device)
        positions = cached[start:]
        by = rotation(positions, c)
        visible = positions[:, None] >= cached[None, :]
        hidden = model.embedding(tokens)
        for index, layer in enumerate(model.layers):
            attention = layer.attention
            x = layer.attention_norm(hidden)
            q = torch.cat(attention.query(x, by), dim=-1)
            keys, values = attention.keys_and_values(attention.latent(x, by))
            if start == 0:
                self.keys.append(keys)
                self.values.append(values)
            else:
                self.keys[index] = torch.cat((self.keys[index], keys))
                self.values[index] = torch.cat((self.values[index], values))
            scores = torch.einsum("thd,jhd->htj", q, self.keys[index]) * c.softmax_scale
            weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
            attended = torch.einsum("htj,jhd->thd", weights, self.values[index])
            hidden = hidden + attention.o_proj(attended.flatten(1))
            hidden = hidden + layer.feed_forward(layer.feed_forward_norm(hidden))
        return model.logits(hidden[-1])


class PagedCache:
    """The paged cache of one sequence, a pool for each layer under one block table.

    Blocks are handed out in a shuffled order, and slots that hold no token hold NaN, as a serving
    engine's pool might.
    """

    def __init__(
        self,
        config: Config,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ):
        self.page_size = page_size
        num_blocks = -(-config.context_length // page_size)
        shape = (config.num_layers, num_blocks, page_size, 1, config.cached_dim)
        self.pools = torch.full(shape, math.nan, dtype=dtype, device=device)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self.free = order.tolist()
        self.block_table = torch.full((1, num_blocks), -1, dtype=torch.int32, device=device)
        self.length = 0

    @property
    def pages(self) -> int:
        """Blocks in use."""
        return self.block_table.shape[1] - len(self.free)

    def grow(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Makes room for `count` tokens: their positions, and slots numbered over the whole pool.

        Raises:
            ValueError: the pool has too few free blocks; nothing changes.
        """
        room = self.block_table.shape[1] * self.page_size - self.length
        if count > room:
            raise ValueError(f"{count} tokens do not fit: the cache has room for {room} more")
        positions = torch.arange(self.length, self.length + count, device=self.block_table.device)
        self.length += count
        while self.pages * self.page_size < self.length:
            page = self.pages
            self.block_table[0, page] = self.free.pop()
        blocks = self.block_table[0, positions // self.page_size].long()
        return positions, blocks * self.page_size + positions % self.page_size

    def write(self, layer: int, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Puts vectors (count, cached_dim) into the slots (count) that `grow` gave."""
        self.pools[layer].view(-1, vectors.shape[-1])[slots] = vectors


class PagedModel:
    """Generation with absorbed weights: attention over the paged cache by the function given.

    `attention` and `plan` are called as `flashmla.flash_mla_with_kvcache` and
    `flashmla.get_mla_metadata`; one plan serves all layers of a step.
    """

    def __init__(
        self,
        model: LanguageModel,
        attention: Attention,
        plan: Planner,
        page_size: int = 64,
    ):
        self.model = model
        self.attention = attention
        self.plan = plan
        weight = model.embedding.weight
        self.cache = PagedCache(model.config, page_size, weight.dtype, weight.device)
        self.absorbed = [layer.attention.absorbed_weights() for layer in model.layers]

    def append(self, tokens: torch.Tensor) -> torch.Tensor:
        """Takes the next tokens (count) and returns the logits after the last (vocabulary)."""
        model, c, cache = self.model, self.model.config, self.cache
        positions, slots = cache.grow(len(tokens))
        by = rotation(positions, c)
        lengths = torch.tensor([cache.length], dtype=torch.int32, device=tokens.device)
        plan = self.plan(lengths, len(tokens) * c.num_heads, 1)
        hidden = model.embedding(tokens)
        for index, layer in enumerate(model.layers):
            attention, (w_uk, w_uv) = layer.attention, self.absorbed[index]
            x = layer.attention_norm(hidden)
            nope, rope = attention.query(x, by)
            cache.write(index, slots, attention.latent(x, by))
            # The query moves to the latent space: (tokens, heads, rank) from a product a head.
            q = torch.cat(((nope.transpose(0, 1) @ w_uk).transpose(0, 1), rope), dim=-1)
            attended, _ = self.attention(
                q[None],
                cache.pools[index],
                cache.block_table,
                lengths,
                c.kv_lora_rank,
                *plan,
                softmax_scale=c.softmax_scale,
                causal=True,
            )
            values = (attended[0].transpose(0, 1) @ w_uv).transpose(0, 1)
            hidden = hidden + attention.o_proj(values.flatten(1))
            hidden = hidden + layer.feed_forward(layer.feed_forward_norm(hidden))
        return model.logits(hidden[-1])
