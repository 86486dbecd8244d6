"""The calls of the open-source `flash_mla` package, computed by flashmla.

For programs that import that name; new ones should import `flashmla`. Do not install this beside
the original: both provide the module `flash_mla`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import overload

import torch

import flashmla

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]


@dataclass(eq=False)  # an object of a step, which equals itself alone; tensors have no one ==
class FlashMLASchedMeta:
    """A plan that the first call makes from its lengths; later calls of the step reuse it."""

    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None
    shape: tuple[int, int, int, int] | None = None  # batch, seq_len_q, num_heads_q, num_heads_k

    def plan_for(
        self, shape: tuple[int, int, int, int], cache_seqlens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tile_scheduler_metadata and num_splits of a call: those kept, or new ones, not kept yet.

        Args:
            shape: batch, seq_len_q, num_heads_q and num_heads_k of the call.
            cache_seqlens: (batch) int32, what a new plan is made for.

        Raises:
            RuntimeError: the plan that is kept was made for another shape.
        """
        if self.shape is None:
            _, seq_len_q, num_heads_q, num_heads_k = shape
            # At least 1: a call without heads is refused by name when it gets there.
            heads = max(1, seq_len_q * num_heads_q // max(1, num_heads_k))
            return flashmla.get_mla_metadata(cache_seqlens, heads, max(1, num_heads_k))
        if self.shape != shape:
            raise RuntimeError(
                f"tile_scheduler_metadata was planned for (batch, seq_len_q, num_heads_q, "
                f"num_heads_k) = {self.shape}, this call has {shape}; get a new one for each "
                "decoding step"
            )
        return self.tile_scheduler_metadata, self.num_splits


def _shape_of(q: torch.Tensor, k_cache: torch.Tensor) -> tuple[int, int, int, int]:
    """batch, seq_len_q, num_heads_q, num_heads_k."""
    for name, tensor in (("q", q), ("k_cache", k_cache)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is of type {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.dim() != 4:
            raise RuntimeError(f"{name} has {tensor.dim()} dimensions; it must have 4")
    return q.shape[0], q.shape[1], q.shape[2], k_cache.shape[2]


@overload
def get_mla_metadata() -> tuple[FlashMLASchedMeta, None]: ...
@overload
def get_mla_metadata(
    cache_seqlens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def get_mla_metadata(
    cache_seqlens: torch.Tensor,
    *,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def get_mla_metadata(
    cache_seqlens=None,
    num_heads_per_head_k=None,
    num_heads_k=None,
    num_heads_q=None,
    is_fp8_kvcache=False,
    topk=None,
    *,
    num_q_tokens_per_head_k=None,
):
    """A plan to be made at the first attention call.

    Without arguments returns `(FlashMLASchedMeta(), None)`. With the arguments of
    `flashmla.get_mla_metadata` returns that function's two tensors, as older releases did. Releases
    in between called the second num_q_tokens_per_head_k and had the last three; num_heads_q is of
    use with topk alone.

    Raises:
        NotImplementedError: is_fp8_kvcache or topk is given: formats that flashmla does not compute
            yet.
        TypeError, RuntimeError: what `flashmla.get_mla_metadata` raises.
    """
    _refuse_later_formats({"is_fp8_kvcache": is_fp8_kvcache or None, "topk": topk})
    if num_heads_per_head_k is None:
        num_heads_per_head_k = num_q_tokens_per_head_k
    if cache_seqlens is None and num_heads_per_head_k is None and num_heads_k is None:
        return FlashMLASchedMeta(), None
    return flashmla.get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k)


def _refuse_later_formats(given: dict[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported by flashmla yet; leave it out")


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashmla.flash_mla_with_kvcache` with the newer package's arguments.

    Shapes, dtypes and results are documented there.

    Raises:
        NotImplementedError: an argument of a format that flashmla does not compute yet, by name.
        RuntimeError: a plan that was made for another batch, query length or number of heads, or
            what `flashmla.flash_mla_with_kvcache` raises.
    """
    _refuse_later_formats(
        {
            "is_fp8_kvcache": is_fp8_kvcache or None,
            "indices": indices,
            "attn_sink": attn_sink,
            "extra_k_cache": extra_k_cache,
            "extra_indices_in_kvcache": extra_indices_in_kvcache,
            "topk_length": topk_length,
            "extra_topk_length": extra_topk_length,
        }
    )
    for name, value in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if value is None:
            raise RuntimeError(f"{name} is None; attention over a dense cache needs it")
    meta = tile_scheduler_metadata
    if not isinstance(meta, FlashMLASchedMeta):
        return flashmla.flash_mla_with_kvcache(
            q,
            k_cache,
            block_table,
            cache_seqlens,
            head_dim_v,
            meta,
            num_splits,
            softmax_scale,
            causal,
        )
    if num_splits is not None:
        raise RuntimeError(
            "num_splits is given beside a FlashMLASchedMeta, which holds its own; leave it out, or "
            "give the two tensors of get_mla_metadata(cache_seqlens, ...)"
        )
    shape = _shape_of(q, k_cache)
    plan = meta.plan_for(shape, cache_seqlens)
    results = flashmla.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, *plan, softmax_scale, causal
    )
    # Only now: a call that was refused may be made again with other lengths.
    meta.tile_scheduler_metadata, meta.num_splits = plan
    meta.shape = shape
    return results
