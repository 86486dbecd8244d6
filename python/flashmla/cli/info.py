"""`flashmla info`: what this machine has, what was built, and what would be chosen."""

from __future__ import annotations

import os
import platform
from typing import Annotated

import torch
import typer
from rich.table import Table

import flashmla
from flashmla import _library
from flashmla.cli.console import Failure, console, require_support


def run(
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
) -> None:
    """Show devices, instruction sets, kernels, and why each is or is not chosen."""
    require_support("cpu")
    wanted = {str(k.dtype).removeprefix("torch."): k.dtype for k in _library.kernels()}
    if dtype not in wanted:
        raise Failure(f"--dtype is {dtype}; it must be one of {', '.join(sorted(wanted))}")
    console.print(f"flashmla {_library.version()}, torch {torch.__version__}")
    console.print(f"library  {_library.LIBRARY_PATH}")
    cap = os.environ.get("FLASHMLA_ISA")
    capped = f" (capped by FLASHMLA_ISA={cap})" if cap else ""
    console.print(
        f"CPU      {platform.machine()}, {torch.get_num_threads()} threads, "
        f"{_library.cpu_features()}{capped}"
    )
    supported, reason = flashmla.is_flashmla_supported("cuda:0")
    console.print(f"CUDA     {'supported' if supported else reason}")
    console.print(
        f"torch.ops._flashmla_C  "
        f"{'registered' if hasattr(torch.ops._flashmla_C, 'fwd_kvcache_mla') else 'not registered'}"
    )
    chosen, reasons = _library.explain_selection(
        torch.zeros(1, 1, 1, 576, dtype=wanted[dtype]),
        torch.zeros(1, 64, 1, 576, dtype=wanted[dtype]),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        512,
    )
    table = Table("kernel", "instruction set", "dtype", f"for {dtype}", box=None)
    for kernel in _library.kernels():
        if kernel.name == chosen:
            verdict = "[green]chosen[/]"
        elif kernel.name in reasons:
            verdict = f"[dim]{reasons[kernel.name]}[/]"
        elif kernel.dtype != wanted[dtype]:
            verdict = f"[dim]computes {str(kernel.dtype).removeprefix('torch.')}[/]"
        else:
            verdict = "usable; another comes first"
        name = str(kernel.dtype).removeprefix("torch.")
        table.add_row(kernel.name, kernel.instruction_set, name, verdict)
    console.print(table)
