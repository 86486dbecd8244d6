"""`flashmla decode`: the operator on tensors in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import flashmla
from flashmla.cli.console import Failure, console, require_support

REQUIRED = ("q", "k_cache", "block_table", "cache_seqlens")
OPTIONAL = ("tile_scheduler_metadata", "num_splits", "visible_lens")


def run(
    tensors: Annotated[Path, typer.Argument(help="Input, safetensors.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Result, safetensors.")],
    head_dim_v: Annotated[int, typer.Option(help="Components of a value.")] = 512,
    softmax_scale: Annotated[float | None, typer.Option(help="Default: head_dim ** -0.5.")] = None,
    causal: Annotated[bool, typer.Option(help="Causal mask, aligned to the end.")] = False,
) -> None:
    """Compute attention of tensors in a safetensors file.

    The file holds q, k_cache, block_table and cache_seqlens, and may hold visible_lens and a plan
    (tile_scheduler_metadata and num_splits), named, shaped and typed as in the Python call. The
    result holds out and softmax_lse.
    """
    require_support("cpu")
    try:
        given = load_file(str(tensors))
    except (OSError, SafetensorError) as error:
        raise Failure(f"cannot read {tensors}: {error}") from None
    missing = [name for name in REQUIRED if name not in given]
    unknown = [name for name in given if name not in REQUIRED + OPTIONAL]
    if missing or unknown:
        text = f"{tensors} has tensors {', '.join(sorted(given)) or 'none'}"
        if missing:
            text += f"; missing: {', '.join(missing)}"
        if unknown:
            text += f"; not known: {', '.join(unknown)}"
        raise Failure(text)
    plan = [given.get("tile_scheduler_metadata"), given.get("num_splits")]
    if (plan[0] is None) != (plan[1] is None):
        raise Failure(f"{tensors} has half of a plan; give both of its tensors or neither")
    q, k_cache = given["q"], given["k_cache"]
    try:
        if plan[0] is None:
            if q.dim() != 4 or k_cache.dim() != 4 or k_cache.shape[2] == 0:
                raise Failure(
                    f"q has shape {tuple(q.shape)} and k_cache {tuple(k_cache.shape)}; both must "
                    "have 4 dimensions and k_cache at least one head"
                )
            heads = q.shape[1] * q.shape[2] // k_cache.shape[2]
            plan = flashmla.get_mla_metadata(given["cache_seqlens"], heads, k_cache.shape[2])
        with torch.inference_mode():
            out, softmax_lse = flashmla.flash_mla_with_kvcache(
                q,
                k_cache,
                given["block_table"],
                given["cache_seqlens"],
                head_dim_v,
                *plan,
                softmax_scale,
                causal,
                visible_lens=given.get("visible_lens"),
            )
    except RuntimeError as error:
        raise Failure(str(error)) from None
    try:
        save_file({"out": out, "softmax_lse": softmax_lse}, str(output))
    except (OSError, SafetensorError) as error:
        raise Failure(f"cannot write {output}: {error}") from None
    console.print(f"{output}: out {tuple(out.shape)}, softmax_lse {tuple(softmax_lse.shape)}")
