"""Inputs by fixed formulas, and calls with them.

K and Q are exact in bfloat16 and float16, so that only a kernel's own arithmetic is judged. Pages
are placed by a permutation, slots that no sequence owns hold NaN, unused table entries -1.
"""

from __future__ import annotations

import math

import pytest
import torch

import flashmla
from flashmla import _library, cases

# Dimensions that the GPU's kernels compute; attend() skips a test at others until some do.
GPU_DIMS = ((576, 512), (512, 512))


def formula_k(sequence: int, length: int, heads: int = 1, dim: int = 576) -> torch.Tensor:
    """K(i, L): (length, heads, dim) float32."""
    t = torch.arange(length)[:, None, None]
    g = torch.arange(heads)[None, :, None]
    c = torch.arange(dim)[None, None, :]
    numbers = (37 * t + 5 * (t // 251) + 59 * sequence + 17 * g + 11 * c) % 251 - 125
    return numbers.float() / 128


def formula_q(sequence: int, queries: int, heads: int, dim: int = 576) -> torch.Tensor:
    """Q of a sequence: (queries, heads, dim) float32."""
    s = torch.arange(queries)[:, None, None]
    h = torch.arange(heads)[None, :, None]
    c = torch.arange(dim)[None, None, :]
    return ((5 * sequence + 7 * s + 13 * h + 3 * c) % 127 - 63).float() / 64


def paged(
    sequences: list[torch.Tensor],
    page: int,
    dtype: torch.dtype,
    unused: float = math.nan,
    width: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache and block table that hold the sequences, each (length, heads, dim)."""
    pages = [-(-len(sequence) // page) for sequence in sequences]
    width = max(1, *pages) if width is None else width
    num_blocks = len(sequences) * width
    while num_blocks % 7 == 0 or num_blocks < sum(pages):
        num_blocks += 1
    heads, dim = sequences[0].shape[1:]
    cache = torch.full((num_blocks, page, heads, dim), unused)
    table = torch.full((len(sequences), width), -1, dtype=torch.int32)
    for i, sequence in enumerate(sequences):
        for j in range(pages[i]):
            block = (7 * (i * width + j) + 3) % num_blocks
            table[i, j] = block
            tokens = sequence[j * page : (j + 1) * page]
            cache[block, : len(tokens)] = tokens
    return cache.to(dtype), table


def formula_inputs(
    lens: list[int],
    heads: int,
    queries: int = 1,
    page: int = 64,
    causal: bool = False,
    scale: float | None = 0.25,
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (576, 512),
    kv_heads: int = 1,
    uniform: bool = False,
    **placing,
) -> cases.Inputs:
    """Inputs of K and Q; `uniform` makes q zero, so that out is the mean of the visible values."""
    sequences = [formula_k(i, length, kv_heads, dims[0]) for i, length in enumerate(lens)]
    cache, table = paged(sequences, page, dtype, **placing)
    q = torch.stack([formula_q(i, queries, heads, dims[0]) for i in range(len(lens))])
    return cases.Inputs(
        q=(torch.zeros_like(q) if uniform else q).to(dtype),
        k_cache=cache,
        block_table=table,
        cache_seqlens=torch.tensor(lens, dtype=torch.int32),
        head_dim_v=dims[1],
        softmax_scale=scale,
        causal=causal,
        visible_lens=None,
    )


def library_plan(inputs: cases.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return flashmla.get_mla_metadata(inputs.cache_seqlens, *inputs.plan_heads())


def call(inputs: cases.Inputs, plan, **results) -> tuple[torch.Tensor, torch.Tensor]:
    """The public call on tensors where they are."""
    return flashmla.flash_mla_with_kvcache(
        inputs.q,
        inputs.k_cache,
        inputs.block_table,
        inputs.cache_seqlens,
        inputs.head_dim_v,
        *plan,
        inputs.softmax_scale,
        inputs.causal,
        visible_lens=inputs.visible_lens,
        **results,
    )


def attend(
    inputs: cases.Inputs,
    plan: tuple[torch.Tensor, torch.Tensor] | None = None,
    kernel: _library.Kernel | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator on the inputs, by the library's plan and choice unless given.

    `kernel` is one to force, or a device: then the call is made there and its results come back.
    """
    if kernel == "cuda":
        plan = None if plan is None else tuple(tensor.cuda() for tensor in plan)
        dims = (inputs.q.shape[-1], inputs.head_dim_v)
        try:
            out, lse = attend(inputs.to("cuda"), plan)
        except RuntimeError as error:
            if dims not in GPU_DIMS and "no CUDA kernel computes this call" in str(error):
                pytest.skip(f"no kernel of the GPU computes {dims} yet")
            raise
        return out.cpu(), lse.cpu()
    plan = library_plan(inputs) if plan is None else plan
    if kernel in (None, "cpu"):
        return call(inputs, plan)
    return torch.ops.flashmla.decode(
        inputs.q,
        inputs.k_cache,
        inputs.head_dim_v,
        inputs.cache_seqlens,
        inputs.block_table,
        inputs.softmax_scale,
        inputs.causal,
        *plan,
        inputs.visible_lens,
        kernel.index,
    )


def attend_into(
    inputs: cases.Inputs,
    plan: tuple[torch.Tensor, torch.Tensor],
    kernel: _library.Kernel | str,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """`attend` into results whose strides and surroundings are the caller's, on their device."""
    moved = inputs.to(out.device)
    torch.ops.flashmla.decode_out(
        moved.q,
        moved.k_cache,
        moved.head_dim_v,
        moved.cache_seqlens,
        moved.block_table,
        moved.softmax_scale,
        moved.causal,
        *(tensor.to(out.device) for tensor in plan),
        moved.visible_lens,
        -1 if isinstance(kernel, str) else kernel.index,
        out,
        lse,
    )


def device_of(kernel: _library.Kernel | str) -> str:
    """Where tensors for `attend(..., kernel)` are wanted."""
    return "cuda" if kernel == "cuda" else "cpu"


def small_dims(kernel: _library.Kernel | str, dims: tuple[int, int]) -> tuple[int, int]:
    """`dims`, chosen for speed alone, or on the GPU ones that it computes."""
    return GPU_DIMS[0] if kernel == "cuda" else dims


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, NaN included."""
    return a.shape == b.shape and bool(
        (a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all()
    )
