"""`flashmla decode`: the operator on tensors in a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.markup import escape
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

import flashmla
from flashmla._checks import check_int64
from flashmla.attention import result_shapes
from flashmla.cli.console import Failure, console, kernel_named, require_support

Value = TypeVar("Value", bool, int, float)

REQUIRED = ("q", "k_cache", "block_table", "cache_seqlens")
OPTIONAL = ("tile_scheduler_metadata", "num_splits", "visible_lens")
BOOLS = {"true": True, "1": True, "false": False, "0": False}


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            names = list(file.keys())
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise Failure(f"cannot read {path}: {error}") from None


def _check_names(path: Path, given: dict[str, torch.Tensor]) -> None:
    """The file holds what a call needs, all of a plan or nothing of it, and nothing else."""
    missing = [name for name in REQUIRED if name not in given]
    unknown = [name for name in given if name not in REQUIRED + OPTIONAL]
    if missing or unknown:
        text = f"{path} has tensors {', '.join(sorted(given)) or 'none'}"
        if missing:
            text += f"; missing: {', '.join(missing)}"
        if unknown:
            text += f"; not known: {', '.join(unknown)}"
        raise Failure(text)
    if ("tile_scheduler_metadata" in given) != ("num_splits" in given):
        raise Failure(f"{path} has half of a plan; give both of its tensors or neither")


def _scalar(
    name: str, option: Value | None, metadata: dict[str, str], kind: type[Value]
) -> Value | None:
    """The option, else what the file's metadata says, else None."""
    if option is not None or name not in metadata:
        return option
    text = metadata[name]
    try:
        return BOOLS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        accepted = "one of " + ", ".join(BOOLS) if kind is bool else f"of type {kind.__name__}"
        raise Failure(f"the file's metadata has {name} = {text!r}; it must be {accepted}") from None


def _attend(
    given: dict[str, torch.Tensor],
    head_dim_v: int,
    softmax_scale: float | None,
    causal: bool,
    kernel_index: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and softmax_lse, by the plan given or the library's; NaN where no part walks.

    Raises:
        RuntimeError: what the operators refuse.
    """
    check_int64("head_dim_v", head_dim_v)
    q, k_cache = given["q"], given["k_cache"]
    if "num_splits" in given:
        plan = given["tile_scheduler_metadata"], given["num_splits"]
    else:
        # At least 1: too few heads are refused with the call, in its own terms.
        heads = max(1, q.shape[1] * q.shape[2] // k_cache.shape[2])
        plan = flashmla.get_mla_metadata(given["cache_seqlens"], heads, k_cache.shape[2])
    # Rows that no part walks are left alone: what memory held before must not get into a file.
    out_shape, lse_shape = result_shapes(q, head_dim_v)
    out = torch.full(out_shape, math.nan, dtype=q.dtype if q.is_floating_point() else None)
    softmax_lse = torch.full(lse_shape, math.nan)
    torch.ops.flashmla.decode_out(
        q,
        k_cache,
        head_dim_v,
        given["cache_seqlens"],
        given["block_table"],
        softmax_scale,
        causal,
        *plan,
        given.get("visible_lens"),
        kernel_index,
        out,
        softmax_lse,
    )
    return out, softmax_lse


def run(
    tensors: Annotated[Path, typer.Argument(help="Input, safetensors.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Result, safetensors.")],
    head_dim_v: Annotated[int | None, typer.Option(help="Components of a value.")] = None,
    softmax_scale: Annotated[float | None, typer.Option(help="Default: head_dim ** -0.5.")] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--no-causal", help="Causal mask, aligned to the end.")
    ] = None,
    kernel: Annotated[str | None, typer.Option(help="Force a kernel of `flashmla info`.")] = None,
) -> None:
    """Compute attention of tensors in a safetensors file.

    The file holds q, k_cache, block_table and cache_seqlens, and may hold visible_lens and a plan
    (tile_scheduler_metadata and num_splits), named, shaped and typed as in the Python call.
    head_dim_v, softmax_scale and causal come from the options, else from the file's metadata. The
    result holds out and softmax_lse (natural logarithm), NaN in rows that no part of a plan walks.
    """
    require_support("cpu")
    forced = -1 if kernel is None else kernel_named(kernel).index
    given, metadata = _read(tensors)
    _check_names(tensors, given)
    head_dim_v = _scalar("head_dim_v", head_dim_v, metadata, int)
    if head_dim_v is None:
        raise Failure(f"head_dim_v is neither in the metadata of {tensors} nor given: --head-dim-v")
    softmax_scale = _scalar("softmax_scale", softmax_scale, metadata, float)
    causal = bool(_scalar("causal", causal, metadata, bool))
    for name in ("q", "k_cache"):
        if given[name].dim() != 4 or 0 in given[name].shape[1:]:
            raise Failure(
                f"{name} has shape {tuple(given[name].shape)}; it must have 4 dimensions, and none "
                "but the first may be empty"
            )
    try:
        out, softmax_lse = _attend(given, head_dim_v, softmax_scale, causal, forced)
    except RuntimeError as error:
        raise Failure(str(error)) from None
    try:
        # Not safetensors' save_file: it puts a new file, of mode 0600, in the place of whatever is
        # there, which may be a link or a device.
        output.write_bytes(save({"out": out, "softmax_lse": softmax_lse}))
    except OSError as error:
        raise Failure(f"cannot write {output}: {error}") from None
    shapes = f"out {tuple(out.shape)} {out.dtype}, softmax_lse {tuple(softmax_lse.shape)}"
    console.print(escape(f"{output}: {shapes}"), soft_wrap=True)
