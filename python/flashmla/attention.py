"""The public functions: plan, attention, merge."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from flashmla import _library
from flashmla._checks import (
    ATTENTION_TENSORS,
    check_int64,
    check_no_gradients,
    check_tensors,
    require_tensor,
)


def is_flashmla_supported(
    device: torch.device | str | int | None = None,
) -> tuple[bool, str | None]:
    """Whether attention runs on a device.

    Args:
        device: a torch device; by default the current CUDA device where there is one, else the CPU.

    Returns:
        `(True, None)`, or `(False, reason)`: the reason names what was found and what is needed.
        Starts no CUDA context.

    Raises:
        RuntimeError: torch knows no such device.
    """
    unavailable = _library.why_unavailable()
    if unavailable is not None:
        return False, unavailable
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if where.type == "cuda" and where.index is None and torch.cuda.is_initialized():
        where = torch.device("cuda", torch.cuda.current_device())
    reason = _library.device_error(where)
    return reason is None, reason


def get_mla_metadata(
    cache_seqlens: torch.Tensor,
    num_heads_per_head_k: int,
    num_heads_k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divides the cached tokens of a batch over the device's workers.

    Call it once a decoding step; every layer of the step uses the result.

    Args:
        cache_seqlens: (batch) int32, cached tokens of each row, 0 allowed.
        num_heads_per_head_k: seq_len_q * num_heads_q // num_heads_k.
        num_heads_k: key/value heads.

    Returns:
        tile_scheduler_metadata: (num_sm_parts, 8) int32.
        num_splits: (batch + 1) int32. docs/scheduling.md describes both, and plans by hand.

    Raises:
        TypeError: cache_seqlens is no tensor.
        RuntimeError: a wrong dtype, shape or value, or no support on the device.
    """
    _library.library()
    check_tensors({"cache_seqlens": cache_seqlens})
    check_int64("num_heads_per_head_k", num_heads_per_head_k)
    check_int64("num_heads_k", num_heads_k)
    return torch.ops.flashmla.get_mla_metadata(cache_seqlens, num_heads_per_head_k, num_heads_k)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    visible_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    softmax_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-head latent attention of a decoding step over a paged cache, in absorbed form.

    Each cached vector is key (all of it) and value (its first `head_dim_v` components), as in the
    DeepSeek-V2 report (arXiv:2405.04434). Query head h reads the key/value head
    h // (num_heads_q // num_heads_k); for query token t and head h of batch row i:

        score_j = softmax_scale * dot(q[i, t, h], k_j)     for the row's cached tokens j
        lse     = log(sum over visible j of exp(score_j))  natural logarithm
        out     = sum over visible j of exp(score_j - lse) * k_j[:head_dim_v]

    Args:
        q: (batch, seq_len_q, num_heads_q, head_dim), bfloat16 or float16; float32 on the CPU.
        k_cache: (num_blocks, page_block_size, num_heads_k, head_dim), dtype of q. Token j of row i
            is `k_cache[block_table[i, j // page_block_size], j % page_block_size]`, a vector for
            each key/value head.
        block_table: (batch, max_num_blocks_per_seq) int32. Entries past a row's last page may hold
            anything.
        cache_seqlens: (batch) int32, cached tokens of each row.
        head_dim_v: components of a value. (head_dim, head_dim_v) is one of (576, 512), (512, 512),
            (320, 256), (288, 256), (192, 128), (128, 128), (96, 64), (64, 64); on a GPU one of the
            first two.
        tile_scheduler_metadata: (num_sm_parts, 8) int32, from `get_mla_metadata`.
        num_splits: (batch + 1) int32, from `get_mla_metadata`.
        softmax_scale: default head_dim ** -0.5 (576: 0.0416667). A model's own scale is usually
            another: DeepSeek-V3 with YaRN factor 40 uses 192 ** -0.5 * 1.873854 = 0.135233779.
        causal: query t sees the tokens j <= cache_seqlens[i] - seq_len_q + t.
        visible_lens: optional (batch, seq_len_q) int32, in place of `causal`: how many leading
            cached tokens each query sees. Non-decreasing along seq_len_q, at most the row's length.
        out: optional preallocated result, any strides but the last.
        softmax_lse: optional preallocated result, any strides. Neither shares memory with another
            tensor of the call. Unless all of these are made in torch.inference_mode(), autograd is
            told that the results change, which takes some ten microseconds.

        q, k_cache and block_table may be strided (the last dimension of q and k_cache contiguous;
        on a GPU the addresses and other strides of these two are multiples of 16 bytes).

    Returns:
        out: (batch, seq_len_q, num_heads_q, head_dim_v), dtype of q.
        softmax_lse: (batch, num_heads_q, seq_len_q) float32. A query that sees no token has out 0
        and lse +inf. A row that no part of the plan walks keeps what its outputs held.

    Raises:
        TypeError: an argument that must be a tensor is none; the message names it.
        RuntimeError: a wrong shape, dtype, device, stride or value; the message names the argument,
            what it was and what is accepted, and nothing is written. On a GPU values are checked
            only with `FLASHMLA_CHECK=1` in the environment, which waits for the GPU at each call;
            without it a wrong one is harmless and its result unspecified. Also where gradients,
            or derivatives of forward mode, are asked for: this is inference only.
    """
    _library.library()
    required = (q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits)
    shared = (
        q,
        k_cache,
        head_dim_v,
        cache_seqlens,
        block_table,
        softmax_scale,
        causal,
        tile_scheduler_metadata,
        num_splits,
    )
    if visible_lens is None and out is None and softmax_lse is None:
        # The operator refuses all that the checks below do, derivatives apart.
        try:
            if forward_ad._current_level < 0 and not (q.requires_grad or k_cache.requires_grad):
                return torch.ops.flashmla.fwd_kvcache_mla(*shared)
        except Exception:
            _check_arguments(required, {}, head_dim_v)  # for an error that names the argument
            raise
    optional = {"visible_lens": visible_lens, "out": out, "softmax_lse": softmax_lse}
    _check_arguments(required, optional, head_dim_v)
    if out is None and softmax_lse is None:
        return torch.ops.flashmla.decode(*shared, visible_lens)
    if out is None:
        out = q.new_empty(result_shapes(q, head_dim_v)[0])
    elif softmax_lse is None:
        softmax_lse = q.new_empty(result_shapes(q, head_dim_v)[1], dtype=torch.float32)
    torch.ops.flashmla.decode_out(*shared, visible_lens, -1, out, softmax_lse)
    return out, softmax_lse


def merge_attention_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over disjoint sets of tokens into attention over their union.

        lse = log(sum over parts p of exp(lses[p]))
        out = sum over parts p of exp(lses[p] - lse) * outs[p]

    which is what one softmax over the union would give.

    Args:
        outs: (parts, batch, seq_len_q, num_heads_q, head_dim_v) bfloat16, float16 or float32, or a
            sequence of `parts` tensors without the first dimension.
        lses: (parts, batch, num_heads_q, seq_len_q) float32, natural logarithms, or a sequence. A
            part whose lse is +inf or -inf is empty, whatever its out holds.

    Returns:
        out: (batch, seq_len_q, num_heads_q, head_dim_v), dtype of outs.
        lse: (batch, num_heads_q, seq_len_q) float32. All parts empty: out 0 and lse +inf.

    Raises:
        TypeError: outs or lses is neither a tensor nor a sequence of tensors.
        RuntimeError: a wrong shape, dtype or device, or no parts. Also where gradients are asked
            for: this is inference only.
    """
    _library.library()
    stacked = {"outs": _stack("outs", outs), "lses": _stack("lses", lses)}
    check_tensors(stacked)
    check_no_gradients("merge_attention_states", stacked)
    return torch.ops.flashmla.merge_attention_states(stacked["outs"], stacked["lses"])


def _check_arguments(
    required: tuple[torch.Tensor, ...],
    optional: dict[str, torch.Tensor | None],
    head_dim_v: int,
) -> None:
    tensors = dict(zip(ATTENTION_TENSORS, required, strict=True))
    tensors |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    check_tensors(tensors)
    check_int64("head_dim_v", head_dim_v)
    check_no_gradients("flash_mla_with_kvcache", tensors)
    if not torch.compiler.is_compiling():
        for name in ("out", "softmax_lse"):
            if name in tensors and tensors[name].is_neg():
                raise RuntimeError(
                    f"{name} is a view of negated values; it must be a plain tensor, to be written"
                ) from None


def result_shapes(q: torch.Tensor, head_dim_v: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of out and softmax_lse; (0,) where q or head_dim_v is wrong, which the operator names."""
    if not isinstance(head_dim_v, (int, torch.SymInt)):
        try:
            head_dim_v = operator.index(head_dim_v)  # the operator takes NumPy's integers too
        except TypeError:
            return (0,), (0,)
    if not (q.dim() == 4 and 0 <= head_dim_v <= q.shape[3]):
        return (0,), (0,)
    batch, seq_len_q, num_heads_q, _ = q.shape
    return (batch, seq_len_q, num_heads_q, head_dim_v), (batch, num_heads_q, seq_len_q)


def _stack(name: str, given: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts in one tensor."""
    if isinstance(given, torch.Tensor):
        return given
    if not isinstance(given, Sequence) or isinstance(given, str):
        require_tensor(name, given, "a torch.Tensor or a sequence of them")
    if len(given) == 0:
        raise RuntimeError(f"{name} is an empty sequence; at least one part is needed")
    for index, part in enumerate(given):
        require_tensor(f"{name}[{index}]", part)
        if (part.shape, part.dtype, part.device) != (
            given[0].shape,
            given[0].dtype,
            given[0].device,
        ):
            raise RuntimeError(
                f"{name}[{index}] is {_describe(part)}; all parts must be as the first, "
                f"{_describe(given[0])}"
            )
    return torch.stack(list(given))


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
