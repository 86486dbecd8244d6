"""`flashmla bench`: time, rates and shares of measured ceilings, beside torch's own attention."""

from __future__ import annotations

import csv
import datetime
import json
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress
from rich.table import Table

import flashmla
from flashmla import cases, reference
from flashmla.cli.console import Failure, console, errors, require_support

# The same instruction set for the peer: oneDNN's name for each cap.
ONEDNN_ISA = {
    "portable": "SSE41",
    "avx2": "AVX2",
    "avx512": "AVX512_CORE_BF16",
    "amx": "AVX512_CORE_AMX",
}
POOL_BYTES = 1 << 30  # caches are rotated through a pool of this size, so that each call reads DRAM


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    workload: str
    isa: str
    threads: int
    us: float
    gflops: float
    gbs: float
    percent_of_ceiling: float  # the larger of the shares of the two ceilings
    ceiling: str  # which: "read" or "matmul"
    torch_us: float
    times_torch: float
    relative_error: float
    commit: str
    date: str


def _median_us(call: Callable[[int], object], seconds: float) -> float:
    """Median time of call(i) for i = 0, 1, ...; at least 5 calls, about `seconds` in all."""
    call(0)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < seconds and len(times) < 1000):
        start = time.perf_counter()
        call(len(times) + 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _ceilings(dtype: torch.dtype, seconds: float) -> tuple[float, float]:
    """GB/s of reading memory, GFLOP/s of matrix products in the better of dtype and float32."""
    memory = torch.randn(1 << 27)  # 512 MiB
    read = memory.nbytes / _median_us(lambda _: memory.sum(), seconds) / 1e3
    size, matmul = 1024, 0.0
    for kind in {dtype, torch.float32}:  # float32 is the faster one where bfloat16 has no unit
        a, b = torch.randn(size, size).to(kind), torch.randn(size, size).to(kind)
        us = _median_us(lambda _, a=a, b=b: a @ b, seconds)
        matmul = max(matmul, 2 * size**3 / us / 1e3)
    return read, matmul


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def _measure(case: cases.Case, dtype: torch.dtype, isa: str, seconds: float) -> Row:
    batch, length = len(case.lens), case.lens[0]
    pages = batch * -(-length // case.page)
    copies = max(2, POOL_BYTES // (pages * case.page * case.head_dim * dtype.itemsize))
    shape = (copies * pages, case.page, case.kv_heads, case.head_dim)
    pool = torch.randn(shape, dtype=torch.float32).to(dtype)
    order = torch.randperm(copies * pages, dtype=torch.int32).view(copies, batch, -1)
    tables = list(order.contiguous())
    q = torch.randn(batch, case.seq_len_q, case.heads, case.head_dim).to(dtype)
    lengths = torch.tensor(case.lens, dtype=torch.int32)
    heads = case.seq_len_q * case.heads // case.kv_heads
    plan = flashmla.get_mla_metadata(lengths, heads, case.kv_heads)

    def ours(index: int, causal: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return flashmla.flash_mla_with_kvcache(
            q, pool, tables[index % copies], lengths, case.head_dim_v, *plan, causal=causal
        )

    contiguous = pool.view(copies, batch, length, case.head_dim)
    folded = q.reshape(batch, -1, case.head_dim)
    scale = case.head_dim**-0.5

    def peer(index: int) -> torch.Tensor:
        cached = contiguous[index % copies]
        weights = (torch.matmul(folded, cached.transpose(1, 2)) * scale).softmax(dim=-1)
        return torch.matmul(weights, cached[..., : case.head_dim_v])

    us = _median_us(ours, seconds)
    torch_us = _median_us(peer, seconds)
    read, matmul = _ceilings(dtype, seconds / 4)
    gflops, gbs = case.flops / us / 1e3, case.cache_bytes(dtype) / us / 1e3
    share, ceiling = max((gflops / matmul, "matmul"), (gbs / read, "read"))
    # One row of the batch is enough to tell a right result from a fast one.
    out, lse = ours(0)
    expected = reference.attend(
        q[:1], pool, tables[0][:1], lengths[:1], case.head_dim_v, causal=False
    )
    error, _ = reference.errors(out[:1], lse[:1], *expected)
    return Row(
        case.name,
        isa,
        torch.get_num_threads(),
        round(us, 1),
        round(gflops, 1),
        round(gbs, 2),
        round(100 * share, 1),
        ceiling,
        round(torch_us, 1),
        round(torch_us / us, 2),
        float(f"{error:.2e}"),
        _commit(),
        datetime.date.today().isoformat(),
    )


def _memory(gigabytes: float) -> None:
    """What a call needs beside a large cache: the growth of the process's peak while it runs."""
    page, head_dim = 64, 576
    blocks = int(gigabytes * 1e9) // (page * head_dim * 2)
    cache = torch.empty(blocks, page, 1, head_dim, dtype=torch.bfloat16)
    for begin in range(0, blocks, 4096):
        cache[begin : begin + 4096].normal_()
    q = torch.randn(1, 1, 16, head_dim).bfloat16()
    lengths = torch.tensor([blocks * page], dtype=torch.int32)
    table = torch.randperm(blocks, dtype=torch.int32)[None]
    plan = flashmla.get_mla_metadata(lengths, 16, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flashmla.flash_mla_with_kvcache(q, cache, table, lengths, 512, *plan)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    console.print(
        f"cache {cache.nbytes / 1e9:.2f} GB, one row of {int(lengths[0])} tokens: peak memory "
        f"{before / 1e6:.2f} GB before the call, {(after - before) / 1e3:.1f} MB more after it"
    )


def _plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 + 0.45 * len(rows)))
    labels = [f"{row.workload}, {row.threads} threads" for row in rows]
    places = range(len(rows))
    axes.barh([p + 0.2 for p in places], [r.torch_us for r in rows], 0.4, label="torch, contiguous")
    axes.barh([p - 0.2 for p in places], [r.us for r in rows], 0.4, label="flashmla, paged")
    axes.set_yticks(list(places), labels)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("microseconds a call (shorter is better)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def run(
    isa: Annotated[
        str | None,
        typer.Option(help="Cap flashmla and torch: portable, avx2, avx512 or amx."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    threads: Annotated[
        list[int] | None, typer.Option(help="Numbers of threads; default 1 and all.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Only workloads that contain this.")] = None,
    quick: Annotated[bool, typer.Option(help="A fifth of the time a workload.")] = False,
    memory: Annotated[
        float | None, typer.Option(help="Instead: peak memory beside a cache of this many GB.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="Write a CSV file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a chart (PNG or SVG).")] = None,
) -> None:
    """Time attention on this machine, cold cache, beside torch and the measured ceilings.

    The peer is matmul, softmax, matmul on a contiguous cache, without lse, held to the same
    instruction set. "read" is the rate at which torch sums a large tensor, "matmul" its rate on a
    product of 1024 x 1024 matrices, both measured beside each line.
    """
    require_support("cpu")
    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in dtypes:
        raise Failure(f"--dtype is {dtype}; it must be one of {', '.join(dtypes)}")
    if isa is not None:
        if isa not in ONEDNN_ISA:
            raise Failure(f"--isa is {isa}; it must be one of {', '.join(ONEDNN_ISA)}")
        # Read by both libraries at their first call, which is still to come.
        os.environ["FLASHMLA_ISA"] = isa
        os.environ["ONEDNN_MAX_CPU_ISA"] = ONEDNN_ISA[isa]
    if memory is not None:
        _memory(memory)
        return
    todo = [case for case in cases.load("perf") if only is None or only in case.name]
    if not todo:
        raise Failure(
            f"no workload contains {only!r}; there are "
            + ", ".join(case.name for case in cases.load("perf"))
        )
    counts = threads or sorted({1, torch.get_num_threads()})
    seconds = 0.2 if quick else 1.0
    rows = []
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("timing", total=len(todo) * len(counts))
        for count in counts:
            torch.set_num_threads(count)
            for case in todo:
                progress.update(task, description=f"{case.name}, {count} threads")
                rows.append(_measure(case, dtypes[dtype], isa or "all", seconds))
                progress.advance(task)
    if as_json:
        console.print_json(json.dumps([asdict(row) for row in rows]))
    else:
        table = Table(box=None)
        for name in ("workload", "threads", "us", "GFLOP/s", "GB/s", "of ceiling"):
            table.add_column(name, justify="left" if name == "workload" else "right")
        for name in ("torch us", "times torch", "error"):
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(
                row.workload,
                str(row.threads),
                f"{row.us:.0f}",
                f"{row.gflops:.0f}",
                f"{row.gbs:.1f}",
                f"{row.percent_of_ceiling:.0f}% of {row.ceiling}",
                f"{row.torch_us:.0f}",
                f"{row.times_torch:.1f}",
                f"{row.relative_error:.1e}",
            )
        console.print(table)
    if csv_path is not None:
        with csv_path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    if plot is not None:
        _plot(rows, plot)
