"""What the operators accept and return, for torch.compile, torch.export and fake tensors.

They are judged by what judges them when a call runs, contents apart. A symbolic size is taken as
what the example inputs have, which guards nothing: other sizes are judged when the program runs.
"""

from __future__ import annotations

import ctypes
import math

import torch

from flashmla import _library
from flashmla._checks import ATTENTION_TENSORS, check_devices, check_given

# What the dimensions of a tensor count. Equal words are equal sizes.
_DIMENSIONS = {
    "q": ("batch", "seq_len_q", "num_heads_q", "head_dim"),
    "k_cache": ("num_blocks", "page_block_size", "num_heads_k", "head_dim"),
    "block_table": ("batch", "max_num_blocks_per_seq"),
    "cache_seqlens": ("batch",),
    "tile_scheduler_metadata": ("num_sm_parts", "fields"),
    "num_splits": ("batch + 1",),
    "visible_lens": ("batch", "seq_len_q"),
    "out": ("batch", "seq_len_q", "num_heads_q", "head_dim_v"),
    "softmax_lse": ("batch", "num_heads_q", "seq_len_q"),
    "outs": ("parts", "batch", "seq_len_q", "num_heads_q", "head_dim_v"),
    "lses": ("parts", "batch", "num_heads_q", "seq_len_q"),
    "lse": ("batch", "num_heads_q", "seq_len_q"),
}
_FIELDS = 8  # of a row of tile_scheduler_metadata
_STORAGE_BITS = 56  # each storage of a call is taken to lie at a multiple of 2 to this


def _known(value):
    """A number; of a symbolic one that of the example inputs, None where they do not tell it."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        hint = value.node.hint
        return hint if isinstance(hint, (int, float)) else None
    return value


def _fill(tensors: dict[str, torch.Tensor], **sizes: int) -> dict[str, int]:
    """A size for each word: what some tensor of the call or `sizes` tells, else one that fits."""
    for name, tensor in tensors.items():
        # A tensor of another rank is refused for that.
        for word, size in zip(_DIMENSIONS[name], tensor.shape, strict=False):
            if _known(size) is not None:
                sizes.setdefault(word, _known(size))
    sizes.setdefault("batch", sizes.get("batch + 1", 2) - 1)
    sizes.setdefault("batch + 1", sizes["batch"] + 1)
    sizes.setdefault("num_heads_q", sizes.get("num_heads_k", 1))
    return sizes


def _views(tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> dict[str, _library.Tensor]:
    """The tensors as the library is shown them, with torch's numbers of dtypes."""
    storages: list[int | str] = []
    views = {}
    for name, tensor in tensors.items():
        words = (*_DIMENSIONS[name], *[""] * tensor.dim())
        shape = [
            sizes.get(word, 1) if _known(size) is None else _known(size)
            for word, size in zip(words, tensor.shape, strict=False)
        ]
        placing = [_known(step) for step in (*tensor.stride(), tensor.storage_offset())]
        storage = tensor.untyped_storage()._cdata
        if None in placing:  # then without gaps and apart from the others, as it may be
            placing = [*(math.prod(shape[dim + 1 :]) for dim in range(len(shape))), 0]
            storage = name
        if storage not in storages:
            storages.append(storage)
        *strides, offset = placing
        begin = (1 + storages.index(storage)) << _STORAGE_BITS
        address = begin + offset * tensor.dtype.itemsize
        dtype = _library.torch_dtype_number(tensor.dtype)
        views[name] = _library.Tensor.at(address, dtype, shape, strides)
    return views


def _device_of(tensor: torch.Tensor) -> torch.device:
    """Where to judge a call: the meta device has no processor to ask, and answers as the CPU."""
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device


def _refuse(tensors: dict[str, torch.Tensor], sizes: dict[str, int], args, judge, *more) -> None:
    """Raises what the operator would that is asked about the tensors and other fields of `args`."""
    first = next(iter(tensors.values()))
    args.struct_size = ctypes.sizeof(args)
    args.device_type, args.device_index = _library.device_numbers(_device_of(first))
    for name, view in _views(tensors, sizes).items():
        setattr(args, name, view)
    refusal = judge(ctypes.byref(args), *more)
    if refusal is not None:
        raise RuntimeError(refusal.decode())


def _decode(
    q,
    k_cache,
    head_dim_v,
    cache_seqlens,
    block_table,
    softmax_scale,
    causal,
    tile_scheduler_metadata,
    num_splits,
    visible_lens=None,
    kernel_index=-1,
    results=None,
) -> tuple[torch.Tensor, torch.Tensor]:
    required = (q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits)
    tensors = dict(zip(ATTENTION_TENSORS, required, strict=True))
    check_given(tensors)
    if visible_lens is not None:
        tensors["visible_lens"] = visible_lens
    if results is None:
        # A wrong rank or head_dim_v is refused below; a tensor must be made all the same.
        batch, seq_len_q, num_heads_q, head_dim = (*q.shape, 0, 0, 0, 0)[:4]
        known = _known(head_dim)
        dim_v = head_dim_v if known is None else min(max(0, head_dim_v), known)
        out = q.new_empty((batch, seq_len_q, num_heads_q, dim_v))
        softmax_lse = q.new_empty((batch, num_heads_q, seq_len_q), dtype=torch.float32)
        results = out, softmax_lse
    tensors |= zip(("out", "softmax_lse"), results, strict=True)
    check_given(tensors)
    check_devices(tensors)
    sizes = _fill(tensors, head_dim_v=head_dim_v, fields=_FIELDS)
    if "head_dim" in sizes:  # else no pair of head dims is known to be right or wrong
        scale = _known(softmax_scale)
        args = _library.DecodeArgs(
            head_dim_v=head_dim_v,
            softmax_scale=0.0 if scale is None else scale,
            has_softmax_scale=scale is not None,
            causal=causal,
        )
        judge = _library.library().flashmla_torch_decode_refusal
        _refuse(tensors, sizes, args, judge, kernel_index)
    return results


def _decode_out(*arguments) -> None:
    *shared, out, softmax_lse = arguments
    _decode(*shared, (out, softmax_lse))


def _get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k):
    check_given({"cache_seqlens": cache_seqlens})
    device = _device_of(cache_seqlens)
    if device.type == "cpu":  # where any number of query rows has the same parts
        known = _known(num_heads_per_head_k)
        num_heads_per_head_k = 1 if known is None else known
    num_parts = _library.plan_num_parts(device, int(num_heads_per_head_k), int(num_heads_k))
    metadata = cache_seqlens.new_empty((num_parts, _FIELDS), dtype=torch.int32)
    batch = cache_seqlens.shape[0] if cache_seqlens.dim() > 0 else 0
    num_splits = cache_seqlens.new_empty((batch + 1,), dtype=torch.int32)
    tensors = {
        "cache_seqlens": cache_seqlens,
        "tile_scheduler_metadata": metadata,
        "num_splits": num_splits,
    }
    args = _library.PlanArgs(
        num_heads_per_head_k=int(num_heads_per_head_k), num_heads_k=int(num_heads_k)
    )
    _refuse(tensors, _fill(tensors), args, _library.library().flashmla_torch_plan_refusal)
    return metadata, num_splits


def _merge_attention_states(outs, lses):
    check_given({"outs": outs, "lses": lses})
    _, batch, seq_len_q, num_heads_q, head_dim_v = (*outs.shape, 0, 0, 0, 0, 0)[:5]
    out = outs.new_empty((batch, seq_len_q, num_heads_q, head_dim_v))
    lse = outs.new_empty((batch, num_heads_q, seq_len_q), dtype=torch.float32)
    tensors = {"outs": outs, "lses": lses, "out": out, "lse": lse}
    check_devices(tensors)
    judge = _library.library().flashmla_torch_merge_refusal
    _refuse(tensors, _fill(tensors), _library.MergeArgs(), judge)
    return out, lse


def register(library_name: str) -> None:
    """Registers the fakes of the operators that `library_name` defines, or registers them anew."""
    fakes = {"fwd_kvcache_mla": _decode, "get_mla_metadata": _get_mla_metadata}
    if library_name == "flashmla":
        fakes |= {
            "decode": _decode,
            "decode_out": _decode_out,
            "merge_attention_states": _merge_attention_states,
        }
    for name, fake in fakes.items():
        torch.library.register_fake(f"{library_name}::{name}", fake, allow_override=True)
