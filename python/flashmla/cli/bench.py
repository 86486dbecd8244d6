"""`flashmla bench`: time, rates and shares of measured ceilings, beside torch's own attention."""

from __future__ import annotations

import csv
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import Progress, track
from rich.table import Table

import flashmla
from flashmla import cases, reference
from flashmla.cli import bench_cuda
from flashmla.cli.ceilings import Ceilings
from flashmla.cli.console import Failure, console, errors, print_json, require_support
from flashmla.cli.info import processor_name

# The same instruction set for the peer: oneDNN's name for each cap.
ONEDNN_ISA = {
    "portable": "SSE41",
    "avx2": "AVX2",
    "avx512": "AVX512_CORE_BF16",
    "amx": "AVX512_CORE_AMX",
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
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
    ceiling: str  # which: "read" or a multiply-add unit
    read_gbs: float
    unit_gflops: float
    torch_form: str  # the fastest of torch's forms, which is the one compared with
    torch_us: float
    times_torch: float
    relative_error: float
    commit: str
    date: str


def _microseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _make_pool(dtype: torch.dtype, head_dim: int) -> torch.Tensor:
    """Vectors (count, head_dim) for all workloads: random ones, repeated every 64 MiB or so."""
    chunk = torch.randn(1 << 25).to(dtype)
    count = POOL_BYTES // dtype.itemsize
    return chunk.repeat(-(-count // len(chunk)))[: count // head_dim * head_dim].view(-1, head_dim)


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()


def _fastest_peer(
    cache: Callable[[int], torch.Tensor], q: torch.Tensor, head_dim_v: int
) -> tuple[str, Callable[[int], torch.Tensor]]:
    """Name and call of torch's fastest form of absorbed attention for these shapes.

    The forms compute the same, but torch's batched product of one long row can take ten times the
    time of its plain product: comparing with one fixed form says more of torch than of attention.

    Args:
        cache: gives copy i of the cached vectors, (batch, tokens, head_dim), contiguous.
        q: (batch, query rows, head_dim).
    """
    scale = q.shape[-1] ** -0.5

    def batched(k: torch.Tensor) -> torch.Tensor:
        weights = (torch.matmul(q, k.transpose(1, 2)) * scale).softmax(dim=-1)
        return torch.matmul(weights, k[..., :head_dim_v])

    def batched_transposed(k: torch.Tensor) -> torch.Tensor:
        weights = (torch.matmul(k, q.transpose(1, 2)) * scale).softmax(dim=1)
        return torch.matmul(weights.transpose(1, 2), k[..., :head_dim_v])

    def by_row(k: torch.Tensor) -> torch.Tensor:
        rows = zip(q, k, strict=True)
        weights = [(torch.mm(row, keys.t()) * scale).softmax(dim=-1) for row, keys in rows]
        pairs = zip(weights, k, strict=True)
        return torch.stack([torch.mm(w, keys[:, :head_dim_v]) for w, keys in pairs])

    def by_row_transposed(k: torch.Tensor) -> torch.Tensor:
        rows = zip(q, k, strict=True)
        weights = [(torch.mm(keys, row.t()) * scale).softmax(dim=0).t() for row, keys in rows]
        pairs = zip(weights, k, strict=True)
        return torch.stack([torch.mm(w, keys[:, :head_dim_v]) for w, keys in pairs])

    forms = (batched, batched_transposed, by_row, by_row_transposed)
    for form in forms:
        form(cache(0))
    # In turn, on a copy of its own each time; the least of five is the least disturbed.
    times = {form: [] for form in forms}
    for index in range(5 * len(forms)):
        form = forms[index % len(forms)]
        times[form].append(_microseconds(lambda form=form, i=index: form(cache(i + 1))))
    best = min(forms, key=lambda form: min(times[form]))
    return best.__name__, lambda copy: best(cache(copy))


def _measure(
    case: cases.Case, pool: torch.Tensor, ceilings: Ceilings, isa: str, seconds: float, commit: str
) -> Row:
    batch, length = len(case.lens), case.lens[0]
    pages = batch * -(-length // case.page)
    vectors = pages * case.page
    copies = len(pool) // vectors
    if copies < 3:
        raise Failure(
            f"workload {case.name} does not fit the pool of {pool.nbytes >> 20} MiB thrice"
        )
    contiguous = pool[: copies * vectors].view(copies, batch, length, case.head_dim)
    paged = pool[: copies * vectors].view(-1, case.page, case.kv_heads, case.head_dim)
    # Each copy's pages lie scattered over its own share of the pool.
    order = torch.stack([copy * pages + torch.randperm(pages) for copy in range(copies)])
    tables = order.to(torch.int32).view(copies, batch, -1)
    q = torch.randn(batch, case.seq_len_q, case.heads, case.head_dim).to(pool.dtype)
    lengths = torch.tensor(case.lens, dtype=torch.int32)
    heads = case.seq_len_q * case.heads // case.kv_heads
    plan = flashmla.get_mla_metadata(lengths, heads, case.kv_heads)

    def ours(copy: int) -> tuple[torch.Tensor, torch.Tensor]:
        return flashmla.flash_mla_with_kvcache(
            q, paged, tables[copy], lengths, case.head_dim_v, *plan
        )

    folded = q.reshape(batch, -1, case.head_dim)
    third = copies // 3
    form, attend = _fastest_peer(
        lambda copy: contiguous[third + copy % third], folded, case.head_dim_v
    )

    # In turn, so that all meet the same machine; each on its own third of the copies.
    times: dict[str, list[float]] = {"ours": [], "torch": [], "read": [], "unit": []}
    ours(0)
    begin = time.perf_counter()
    while len(times["ours"]) < 5 or time.perf_counter() - begin < seconds:
        turn = (len(times["ours"]) + 1) % third if third > 1 else 0
        times["unit"].append(ceilings.compute_gflops())
        times["ours"].append(_microseconds(lambda turn=turn: ours(turn)))
        times["torch"].append(_microseconds(lambda turn=turn: attend(turn)))
        times["read"].append(ceilings.read_gbs(contiguous[2 * third + turn]))
    us, torch_us, read, unit = (statistics.median(values) for values in times.values())

    gflops, gbs = case.flops / us / 1e3, case.cache_bytes(pool.dtype) / us / 1e3
    share, ceiling = max((gflops / unit, ceilings.unit), (gbs / read, "read"))
    # One row of the batch is enough to tell a right result from a fast one.
    out, lse = ours(0)
    expected = reference.attend(
        q[:1], paged, tables[0][:1], lengths[:1], case.head_dim_v, causal=False
    )
    error, _ = reference.errors(out[:1], lse[:1], *expected)
    return Row(
        workload=case.name,
        isa=isa,
        threads=ceilings.threads,
        us=round(us, 1),
        gflops=round(gflops, 1),
        gbs=round(gbs, 2),
        percent_of_ceiling=round(100 * share, 1),
        ceiling=ceiling,
        read_gbs=round(read, 2),
        unit_gflops=round(unit, 1),
        torch_form=form,
        torch_us=round(torch_us, 1),
        times_torch=round(torch_us / us, 2),
        relative_error=float(f"{error:.2e}"),
        commit=commit,
        date=datetime.date.today().isoformat(),
    )


def _resident_kib(name: str) -> int:
    """VmRSS, the memory in use, or VmHWM, its peak."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if match is None:
        raise Failure("this system does not say how much memory a process uses")
    return int(match[1])


def _memory(gigabytes: float) -> None:
    """What a call needs beside a large cache: the peak during the call over the use before it."""
    page, head_dim = 64, 576
    block_bytes = page * head_dim * 2
    most = (2**31 - 1) // page * block_bytes / 1e9  # what one row can be of
    blocks = int(gigabytes * 1e9) // block_bytes if 0 <= gigabytes <= most else 0
    if blocks < 1:
        raise Failure(f"--memory is {gigabytes}; a cache needs 0.0001 to {most:.0f} GB")
    try:
        cache = torch.empty(blocks, page, 1, head_dim, dtype=torch.bfloat16)
    except RuntimeError as error:
        raise Failure(str(error).splitlines()[0]) from None
    step = 1024
    values = torch.randn(step, page, 1, head_dim).bfloat16()
    for begin in track(range(0, blocks, step), "filling", console=errors, transient=True):
        part = cache[begin : begin + step]
        part.copy_(values[: len(part)])
    q = torch.randn(1, 1, 16, head_dim).bfloat16()
    lengths = torch.tensor([blocks * page], dtype=torch.int32)
    table = torch.randperm(blocks, dtype=torch.int32)[None]
    plan = flashmla.get_mla_metadata(lengths, 16, 1)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _resident_kib("VmRSS")
    flashmla.flash_mla_with_kvcache(q, cache, table, lengths, 512, *plan)
    peak = _resident_kib("VmHWM")
    console.print(
        f"cache {cache.nbytes / 1e9:.2f} GB, one row of {int(lengths[0])} tokens: "
        f"{before / 1e6:.2f} GB in use before the call, at most {(peak - before) / 1e3:.1f} MB "
        "more during it"
    )


def _write_csv(rows: list[Row], path: Path) -> None:
    if path.is_dir():
        path = path / (re.sub(r"[^a-z0-9]+", "-", processor_name().lower()).strip("-") + ".csv")
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error}") from None


def _other_process(isa: str, options: list[str]) -> list[Row]:
    """The rows of one instruction set, measured in a process of its own."""
    command = [sys.executable, "-m", "flashmla", "bench", "--json", "--isa", isa, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise Failure(f"the measurement of {isa} ended with status {done.returncode}")
    return [Row(**row) for row in json.loads(done.stdout)]


def _plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.5 + 0.45 * len(rows)))
    labels = [f"{row.workload}, {row.isa}, {row.threads} threads" for row in rows]
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


def _measure_all(
    todo: list[cases.Case],
    counts: list[int],
    dtype: torch.dtype,
    isa: str,
    seconds: float,
    commit: str,
) -> list[Row]:
    rows = []
    with Progress(console=errors, transient=True) as progress:
        task = progress.add_task("filling memory", total=len(todo) * len(counts))
        pool = _make_pool(dtype, todo[0].head_dim)
        for count in counts:
            torch.set_num_threads(count)
            ceilings = Ceilings(dtype, count)
            for case in todo:
                progress.update(task, description=f"{case.name}, {count} threads")
                rows.append(_measure(case, pool, ceilings, isa, seconds, commit))
                progress.advance(task)
            ceilings.close()
    return rows


def _show(rows: list[Row]) -> None:
    table = Table(box=None)
    left = ("workload", "isa", "of ceiling")
    for name in (*left[:2], "threads", "us", "GFLOP/s", "GB/s", left[2], "torch us", "faster"):
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.workload,
            row.isa,
            str(row.threads),
            f"{row.us:.0f}",
            f"{row.gflops:.0f}",
            f"{row.gbs:.1f}",
            f"{row.percent_of_ceiling:.0f}% of {row.ceiling}",
            f"{row.torch_us:.0f}",
            f"{row.times_torch:.1f}x",
        )
    console.print(table)


def _check_options(dtype: str, isa: list[str] | None, threads: list[int] | None) -> None:
    """Those of the CPU that may hold a wrong word or number."""
    if dtype not in DTYPES:
        raise Failure(f"--dtype is {dtype}; it must be one of {', '.join(DTYPES)}")
    if unknown := [word for word in isa or [] if word not in ONEDNN_ISA]:
        raise Failure(f"--isa is {unknown[0]}; it must be one of {', '.join(ONEDNN_ISA)}")
    processors = os.cpu_count() or 1
    if wrong := [count for count in threads or [] if not 1 <= count <= processors]:
        raise Failure(
            f"--threads is {wrong[0]}; it must be between 1 and {processors}, the processors here"
        )


def _cap_both_sides(isa: list[str] | None) -> str | None:
    """Holds the library and torch to the one instruction set that is asked for, and names it.

    A cap of the environment counts where no option is given. torch reads its own at its first
    computation, which must be still to come.
    """
    cap = isa[0] if isa and len(isa) == 1 else None if isa else os.environ.get("FLASHMLA_ISA")
    if cap in ONEDNN_ISA:
        os.environ["FLASHMLA_ISA"] = cap
        os.environ["ONEDNN_MAX_CPU_ISA"] = ONEDNN_ISA[cap]
    return cap


def run(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    isa: Annotated[
        list[str] | None,
        typer.Option(help="Cap both sides: portable, avx2, avx512 or amx; may be repeated."),
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
    csv_path: Annotated[
        Path | None, typer.Option("--csv", help="Write a CSV file; in a folder, <device>.csv.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a chart (PNG or SVG).")] = None,
    kernel: Annotated[str | None, typer.Option(help="On cuda: a kernel to force.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="What is measured; default: git's HEAD.")
    ] = None,
) -> None:
    """Time attention on this machine, cold cache, beside torch and the measured ceilings.

    On the CPU the peer is matmul, softmax, matmul on a contiguous cache, without lse, held to the
    same instruction set, in the fastest of four forms that torch has for the shape. Ceilings are
    measured in turn with both: "read" by plain loads, the units by multiply-adds in registers (for
    tiles, from the first-level cache). Times are medians.

    On a GPU times are of CUDA graphs: burst after an idle pause, sustained after 0.4 s of load,
    apart with a foreign kernel between calls. Ceilings are the rates of reading memory and of
    wgmma alone in the same mode.
    """
    if device not in ("cpu", "cuda"):
        raise Failure(f"--device is {device}; it must be cpu or cuda")
    require_support(device)
    commit = _commit() if commit is None else commit
    if device == "cuda":
        for name, given in (("--isa", isa), ("--threads", threads), ("--memory", memory)):
            if given:
                raise Failure(f"{name} is given; on cuda it has no meaning")
        if dtype != "bfloat16" or quick or plot is not None:
            raise Failure("--dtype, --quick and --plot are for the CPU; on cuda dtype is bfloat16")
        bench_cuda.run(only, kernel, commit, as_json, csv_path)
        return
    if kernel is not None:
        raise Failure("--kernel is given; on the CPU --isa decides")
    _check_options(dtype, isa, threads)
    cap = _cap_both_sides(isa)
    if memory is not None:
        _memory(memory)
        return
    todo = [case for case in cases.load("perf") if only is None or only in case.name]
    if not todo:
        raise Failure(
            f"no workload contains {only!r}; there are "
            + ", ".join(case.name for case in cases.load("perf"))
        )
    if isa and len(isa) > 1:
        options = ["--dtype", dtype, "--commit", commit]
        options += [word for count in threads or [] for word in ("--threads", str(count))]
        options += ["--only", only] if only else []
        options += ["--quick"] if quick else []
        rows = [row for word in isa for row in _other_process(word, options)]
    else:
        counts = threads or sorted({1, torch.get_num_threads()})
        seconds = 0.2 if quick else 1.0
        rows = _measure_all(todo, counts, DTYPES[dtype], cap or "all", seconds, commit)
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        _show(rows)
    if csv_path is not None:
        _write_csv(rows, csv_path)
    if plot is not None:
        try:
            _plot(rows, plot)
        except ModuleNotFoundError as error:
            raise Failure(f"{error}; --plot needs it: pip install 'flashmla[plot]'") from None
        except (OSError, ValueError) as error:
            raise Failure(f"cannot write {plot}: {error}") from None
