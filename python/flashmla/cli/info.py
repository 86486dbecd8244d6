"""`flashmla info`: what this machine has, what was built, and what would be chosen."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table

import flashmla
from flashmla import _library
from flashmla._checks import check_int64
from flashmla.cli.console import Failure, console, kernels, print_json, require_support


def _print_version(asked: bool) -> None:
    if asked:
        print(flashmla.__version__)
        raise typer.Exit


def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and end.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Those of `flashmla` itself, before a command."""


def processor_name() -> str:
    """The processor as the operating system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def _devices() -> list[dict[str, str]]:
    """Name, what it has, and whether attention runs on it, of each device."""
    found = [
        {
            "device": "cpu",
            "name": processor_name(),
            "has": f"{torch.get_num_threads()} threads, {_library.cpu_features()}",
            "verdict": "supported",
        }
    ]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        _, reason = flashmla.is_flashmla_supported(f"cuda:{index}")
        found.append(
            {
                "device": f"cuda:{index}",
                "name": properties.name,
                "has": f"compute capability {properties.major}.{properties.minor}, "
                f"{properties.multi_processor_count} SMs",
                "verdict": reason or "supported",
            }
        )
    if len(found) == 1:
        _, reason = flashmla.is_flashmla_supported("cuda:0")
        found.append({"device": "cuda", "name": "", "has": "none", "verdict": reason or ""})
    return found


def _verdicts(call: tuple) -> dict[str, str]:
    """Of each kernel: that it is chosen for the call, or why it is not."""
    try:
        chosen, _ = _library.explain_selection(*call)
    except RuntimeError as error:
        raise Failure(str(error)) from None
    verdicts = {}
    for kernel in kernels():
        try:
            _library.explain_selection(*call, kernel=kernel.name)
            verdicts[kernel.name] = f"fits; {chosen} comes first"
        except RuntimeError as error:
            verdicts[kernel.name] = str(error).removeprefix(f"kernel {kernel.name} ")
    verdicts[chosen] = "chosen"
    return verdicts


def run(
    device: Annotated[
        str, typer.Option(help="Where the problem's tensors are: cpu or cuda.")
    ] = "cpu",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 1,
    seq_len_q: Annotated[int, typer.Option(min=1, help="Query tokens of a row.")] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key/value heads.")] = 1,
    head_dim: Annotated[int, typer.Option(min=1, help="Components of a key.")] = 576,
    head_dim_v: Annotated[int, typer.Option(min=1, help="Components of a value.")] = 512,
    page: Annotated[int, typer.Option(min=1, help="Slots of a cache page.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show devices, instruction sets, kernels, and why each is or is not chosen for a problem."""
    if device not in ("cpu", "cuda"):
        raise Failure(f"--device is {device}; it must be cpu or cuda")
    require_support(device)
    dtypes = {str(k.dtype).removeprefix("torch."): k.dtype for k in kernels()}
    if dtype not in dtypes:
        raise Failure(f"--dtype is {dtype}; it must be one of {', '.join(sorted(dtypes))}")
    problem = (
        f"batch {batch}, {seq_len_q} x {heads} queries, {kv_heads} kv heads, "
        f"{head_dim}/{head_dim_v}, page {page}, {dtype}, on {device}"
    )

    # Block 0 in every table, one token a row; expanded, so that no size of a problem takes memory.
    def ints(value: int, *shape: int) -> torch.Tensor:
        return torch.full((1,), value, dtype=torch.int32, device=device).expand(shape)

    sizes = {
        "batch": batch,
        "seq_len_q": seq_len_q,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "page": page,
    }
    try:
        for name, size in sizes.items():
            check_int64(name, size)
        vector = torch.zeros(head_dim, dtype=dtypes[dtype], device=device)
        call = (
            vector.expand(batch, seq_len_q, heads, head_dim),
            vector.expand(1, page, kv_heads, head_dim),
            ints(0, batch, 1),
            ints(1, batch),
            head_dim_v,
        )
    except RuntimeError as error:  # more memory than there is, or elements than 64 bits count
        raise Failure(f"{problem}: {error}") from None
    verdicts = _verdicts(call)
    facts = {
        "version": _library.version(),
        "torch": torch.__version__,
        "library": str(_library.LIBRARY_PATH),
        "FLASHMLA_ISA": os.environ.get("FLASHMLA_ISA"),
        "registered as torch.ops._flashmla_C": flashmla._vllm_names_registered,
        "devices": _devices(),
        "problem": problem,
        "kernels": [
            {
                "name": kernel.name,
                "instruction_set": kernel.instruction_set,
                "dtype": str(kernel.dtype).removeprefix("torch."),
                "usable": kernel.usable,
                "verdict": verdicts[kernel.name],
            }
            for kernel in kernels()
        ],
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _print(facts: dict) -> None:
    for name, value in facts.items():
        if name not in ("devices", "problem", "kernels") and value is not None:
            console.print(escape(f"{name}: {value}"), soft_wrap=True)
    table = Table("device", "name", "has", "attention", box=None)
    for device in facts["devices"]:
        table.add_row(*(escape(text) for text in device.values()))
    console.print(table)
    console.print(f"\nkernels, best first; for {facts['problem']}:")
    table = Table("kernel", "instruction set", "dtype", "verdict", box=None)
    for kernel in facts["kernels"]:
        verdict = escape(kernel["verdict"])
        table.add_row(
            kernel["name"],
            kernel["instruction_set"],
            kernel["dtype"],
            f"[green]{verdict}[/]" if verdict == "chosen" else f"[dim]{verdict}[/]",
        )
    console.print(table)
