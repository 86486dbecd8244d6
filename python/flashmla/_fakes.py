"""What the operators accept and return, for torch.compile, torch.export and fake tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flashmla import _library
from flashmla._checks import ATTENTION_TENSORS, check_devices

# What the dimensions of a tensor count, or how many there must be. Equal words are equal sizes.
_DIMENSIONS = {
    "q": ("batch", "seq_len_q", "num_heads_q", "head_dim"),
    "k_cache": ("num_blocks", "page_block_size", "num_heads_k", "head_dim"),
    "block_table": ("batch", "max_num_blocks_per_seq"),
    "cache_seqlens": ("batch",),
    "tile_scheduler_metadata": ("num_sm_parts", 8),
    "num_splits": ("batch + 1",),
    "visible_lens": ("batch", "seq_len_q"),
    "out": ("batch", "seq_len_q", "num_heads_q", "head_dim_v"),
    "softmax_lse": ("batch", "num_heads_q", "seq_len_q"),
    "outs": ("parts", "batch", "seq_len_q", "num_heads_q", "head_dim_v"),
    "lses": ("parts", "batch", "num_heads_q", "seq_len_q"),
}
# Of which a call needs at least one.
_POSITIVE = ("seq_len_q", "num_heads_q", "num_heads_k", "page_block_size")
_VALUES = ("q", "k_cache", "out", "outs")
_VALUE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG_SUMS = ("softmax_lse", "lses")


def _check_dtype(name: str, tensor: torch.Tensor, accepted: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in accepted:
        names = " or ".join(str(dtype) for dtype in accepted)
        raise RuntimeError(f"{name} has dtype {tensor.dtype}; it must be {names}")


def _listed(items: Iterable[object]) -> str:
    return "(" + ", ".join(str(item) for item in items) + ")"


def _check(tensors: dict[str, torch.Tensor | None], **sizes) -> None:
    """Devices, dtypes, ranks, and sizes where they are known: a call checks them all when it runs.

    `sizes` are those that are given as numbers. What is symbolic is compared with nothing, lest a
    graph be specialised for it.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    check_devices(given)
    value_dtypes = _VALUE_DTYPES
    for name, tensor in given.items():
        if name in _VALUES:
            _check_dtype(name, tensor, value_dtypes)
            value_dtypes = (tensor.dtype,)
        else:
            _check_dtype(name, tensor, (torch.float32 if name in _LOG_SUMS else torch.int32,))
        words = _DIMENSIONS[name]
        text = _listed(words)
        if tensor.dim() != len(words):
            raise RuntimeError(
                f"{name} has {tensor.dim()} dimensions; it must have {len(words)}: {text}"
            )
        wanted = [word if isinstance(word, int) else sizes.get(word, "any") for word in words]
        for size, expected in zip(tensor.shape, wanted, strict=True):
            if isinstance(size, int) and isinstance(expected, int) and size != expected:
                raise RuntimeError(
                    f"{name} has shape {_listed(tensor.shape)}; it must be {text} = "
                    f"{_listed(wanted)}"
                )
        for word, size in zip(words, tensor.shape, strict=True):
            if not isinstance(sizes.get(word), int):
                sizes[word] = size
        sizes.setdefault("batch + 1", sizes["batch"] + 1)


def _check_decode(head_dim_v: int, required: tuple[torch.Tensor, ...], **optional) -> None:
    tensors = dict(zip(ATTENTION_TENSORS, required, strict=True)) | optional
    _check(tensors, head_dim_v=head_dim_v)
    for name in ("q", "k_cache"):
        shape = tensors[name].shape
        for word, size in zip(_DIMENSIONS[name], shape, strict=True):
            if word in _POSITIVE and isinstance(size, int) and size < 1:
                raise RuntimeError(f"{name} has shape {_listed(shape)}; {word} must be at least 1")
    heads, kv_heads = tensors["q"].shape[2], tensors["k_cache"].shape[2]
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads != 0:
        raise RuntimeError(
            f"q has {heads} heads; they must be a multiple of the {kv_heads} heads of k_cache"
        )


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
    _check_decode(head_dim_v, required)
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
    _check_decode(head_dim_v, required, visible_lens=visible_lens)
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
    _check_decode(head_dim_v, required, visible_lens=visible_lens, out=out, softmax_lse=softmax_lse)


def _get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    _check({"cache_seqlens": cache_seqlens})
    # The meta device has no processor to ask; it answers as the CPU does.
    device = cache_seqlens.device
    where = torch.device("cpu") if device.type == "meta" else device
    if where.type == "cpu" and isinstance(num_heads_per_head_k, torch.SymInt):
        num_heads_per_head_k = 1  # any number of query rows has the same parts there
    num_parts = _library.plan_num_parts(where, int(num_heads_per_head_k), int(num_heads_k))
    metadata = cache_seqlens.new_empty((num_parts, 8))
    num_splits = cache_seqlens.new_empty((cache_seqlens.shape[0] + 1,))
    return metadata, num_splits


def _merge_attention_states(outs, lses):
    _check({"outs": outs, "lses": lses})
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def register(library_name: str) -> None:
    """Registers the fakes of the operators that `library_name` defines."""
    torch.library.register_fake(f"{library_name}::fwd_kvcache_mla", _fwd_kvcache_mla)
    torch.library.register_fake(f"{library_name}::get_mla_metadata", _get_mla_metadata)
    if library_name == "flashmla":
        torch.library.register_fake("flashmla::decode", _decode_with_additions)
        torch.library.register_fake("flashmla::decode_out", _decode_out)
        torch.library.register_fake("flashmla::merge_attention_states", _merge_attention_states)
