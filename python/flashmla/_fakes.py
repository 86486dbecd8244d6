"""Shapes and dtypes of the operators' results, for torch.compile, torch.export and fake tensors."""

from __future__ import annotations

import torch

from flashmla import _library
from flashmla._checks import ATTENTION_TENSORS, check_devices


def _check_devices(required: tuple, **optional) -> None:
    tensors = dict(zip(ATTENTION_TENSORS, required, strict=True)) | optional
    check_devices({name: tensor for name, tensor in tensors.items() if tensor is not None})


def _decode(q: torch.Tensor, head_dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, seq_len_q, num_heads_q, _ = q.shape
    out = q.new_empty((batch, seq_len_q, num_heads_q, head_dim_v))
    softmax_lse = q.new_empty((batch, num_heads_q, seq_len_q), dtype=torch.float32)
    return out, softmax_lse


def _fwd_kvcache_mla(
    q,
    k_cache,
    head_dim_v,
    cache_seqlens,
    block_table,
    softmax_scale,
    causal,
    tile_scheduler_metadata,
    num_splits,
):
    required = (q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits)
    _check_devices(required)
    return _decode(q, head_dim_v)


def _decode_with_additions(
    q,
    k_cache,
    head_dim_v,
    cache_seqlens,
    block_table,
    softmax_scale,
    causal,
    tile_scheduler_metadata,
    num_splits,
    visible_lens,
    kernel_index=-1,
):
    required = (q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits)
    _check_devices(required, visible_lens=visible_lens)
    return _decode(q, head_dim_v)


def _decode_out(
    q,
    k_cache,
    head_dim_v,
    cache_seqlens,
    block_table,
    softmax_scale,
    causal,
    tile_scheduler_metadata,
    num_splits,
    visible_lens,
    kernel_index,
    out,
    softmax_lse,
):
    required = (q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits)
    _check_devices(required, visible_lens=visible_lens, out=out, softmax_lse=softmax_lse)


def _get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    # The meta device has no processor to ask; it answers as the CPU does.
    device = cache_seqlens.device
    where = torch.device("cpu") if device.type == "meta" else device
    num_parts = _library.plan_num_parts(where, int(num_heads_per_head_k), int(num_heads_k))
    metadata = cache_seqlens.new_empty((num_parts, 8))
    num_splits = cache_seqlens.new_empty((cache_seqlens.shape[0] + 1,))
    return metadata, num_splits


def _merge_attention_states(outs, lses):
    check_devices({"outs": outs, "lses": lses})
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def register(library_name: str) -> None:
    """Registers the fakes of the operators that `library_name` defines."""
    torch.library.register_fake(f"{library_name}::fwd_kvcache_mla", _fwd_kvcache_mla)
    torch.library.register_fake(f"{library_name}::get_mla_metadata", _get_mla_metadata)
    if library_name == "flashmla":
        torch.library.register_fake("flashmla::decode", _decode_with_additions)
        torch.library.register_fake("flashmla::decode_out", _decode_out)
        torch.library.register_fake("flashmla::merge_attention_states", _merge_attention_states)
