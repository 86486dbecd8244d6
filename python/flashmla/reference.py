"""The operator in float64 torch: the independent oracle of tests and of `flashmla check`.

Written from the definition, one row at a time, without the library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Largest error against this oracle on standard-normal inputs."""

    out_relative: float  # norm of the difference / norm of the reference, over the whole tensor
    lse_absolute: float


TOLERANCES = {
    torch.bfloat16: Tolerance(3e-3, 2e-5),
    torch.float16: Tolerance(5e-4, 2e-5),
    torch.float32: Tolerance(2e-6, 2e-6),
}


def visible_counts(
    length: int, seq_len_q: int, causal: bool, visible_lens: torch.Tensor | None
) -> list[int]:
    """How many leading cached tokens each query token of a row sees; visible_lens (seq_len_q)."""
    if visible_lens is not None:
        return visible_lens.tolist()
    if not causal:
        return [length] * seq_len_q
    return [max(0, length - seq_len_q + t + 1) for t in range(seq_len_q)]


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    visible_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flash_mla_with_kvcache` without a plan; shapes as there, results in float64."""
    batch, seq_len_q, num_heads_q, head_dim = q.shape
    page_size, num_heads_k = k_cache.shape[1:3]
    group = num_heads_q // num_heads_k
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(batch, seq_len_q, num_heads_q, head_dim_v, dtype=torch.float64)
    lse = torch.full((batch, num_heads_q, seq_len_q), math.inf, dtype=torch.float64)
    for row in range(batch):
        length = int(cache_seqlens[row])
        counts = visible_counts(
            length, seq_len_q, causal, None if visible_lens is None else visible_lens[row]
        )
        tokens = torch.arange(length)
        blocks = block_table[row, tokens // page_size].long()
        cached = k_cache[blocks, tokens % page_size].double()  # (length, num_heads_k, head_dim)
        for t, count in enumerate(counts):
            if count == 0:
                continue
            keys = cached[:count]
            queries = q[row, t].double().view(num_heads_k, group, head_dim)
            scores = torch.einsum("ghd,jgd->ghj", queries, keys) * scale
            row_lse = torch.logsumexp(scores, dim=-1)
            weights = torch.exp(scores - row_lse[..., None])
            attended = torch.einsum("ghj,jgd->ghd", weights, keys[..., :head_dim_v])
            out[row, t] = attended.reshape(num_heads_q, head_dim_v)
            lse[row, :, t] = row_lse.reshape(num_heads_q)
    return out, lse


def merge(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_attention_states` in float64; shapes as there."""
    empty = lses.isinf()
    logs = lses.double().masked_fill(empty, -math.inf)
    total = torch.logsumexp(logs, dim=0)
    weights = torch.exp(logs - total).masked_fill(empty, 0.0)
    shares = weights.transpose(-1, -2)[..., None]
    parts = outs.double().masked_fill(empty.transpose(-1, -2)[..., None], 0.0)
    return (parts * shares).sum(dim=0), total.masked_fill(empty.all(dim=0), math.inf)


def errors(
    out: torch.Tensor, lse: torch.Tensor, expected_out: torch.Tensor, expected_lse: torch.Tensor
) -> tuple[float, float]:
    """Relative error of out and largest error of lse over all elements.

    inf where a shape differs, where an lse is infinite, NaN or of another sign than the expected
    one, where out is not finite, and where out of a query that sees nothing is not 0.
    """
    infinite = expected_lse.isinf()
    if out.shape != expected_out.shape or lse.shape != expected_lse.shape:
        return math.inf, math.inf
    if not lse[~infinite].isfinite().all() or not out.isfinite().all():
        return math.inf, math.inf
    if not (lse[infinite].double() == expected_lse[infinite]).all():
        return math.inf, math.inf
    if not (out.transpose(1, 2)[infinite] == 0).all():
        return math.inf, math.inf
    scale = float(expected_out.norm())
    difference = float((out.double() - expected_out).norm())
    finite = ~infinite
    lse_error = float((lse.double() - expected_lse)[finite].abs().max()) if finite.any() else 0.0
    return difference / scale if scale > 0 else difference, lse_error


def worst_query_error(out: torch.Tensor, expected_out: torch.Tensor) -> float:
    """Largest relative error of one (row, query token, head): a wrong one cannot hide in a norm."""
    norms = expected_out.norm(dim=-1)
    differences = (out.double() - expected_out).norm(dim=-1)
    seen = norms > 0
    return float((differences[seen] / norms[seen]).max()) if seen.any() else 0.0
