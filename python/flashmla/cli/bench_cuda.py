"""The GPU's side of `flashmla bench`. The package's program cuda_bench measures; this reads it."""

from __future__ import annotations

import csv
import datetime
import io
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.table import Table

from flashmla import _library
from flashmla.cli.console import Failure, console, errors, print_json

PROGRAM = Path(_library.LIBRARY_PATH).with_name("cuda_bench")
MEASURED = ("workload", "mode", "us", "tflops", "gbs", "percent_of_ceiling", "relative_error")
COLUMNS = (*MEASURED, "commit", "date")
CEILING = "ceiling "  # how the rows of ceilings begin


def _lines(command: list[str]) -> Iterator[str]:
    """The program's lines as it prints them."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield from process.stdout
    if process.returncode != 0:
        raise Failure(f"{command[0]} ended with status {process.returncode}")


def measure(only: str | None, kernel: str | None, commit: str) -> list[dict[str, str]]:
    """The rows of one run, as text: an empty field has no meaning for its workload.

    Args:
        only: workloads whose name contains this.
        kernel: one to force.
        commit: what is measured; the column of that name.
    """
    if not PROGRAM.exists():
        raise Failure(
            f"{PROGRAM.name} is not in {PROGRAM.parent}: the package was built without nvcc"
        )
    rows = []
    today = datetime.date.today().isoformat()
    with errors.status("measuring the ceilings"):
        lines = _lines([str(PROGRAM), only or "", kernel or ""])
        header = next(lines, "").strip()
        if header != ",".join(MEASURED):
            raise Failure(f"{PROGRAM} printed {header!r} where its columns were expected")
        for line in lines:
            (values,) = csv.reader(io.StringIO(line))
            if len(values) != len(MEASURED):
                raise Failure(f"{PROGRAM} printed {line.strip()!r}, not {len(MEASURED)} columns")
            row = dict(zip(MEASURED, values, strict=True))
            rows.append(row | {"commit": commit, "date": today})
            errors.print(f"[dim]{row['workload']}, {row['mode']}: {row['us'] or '-'} us[/]")
    if all(row["workload"].startswith(CEILING) for row in rows):
        raise Failure(f"no workload contains {only!r}")
    return rows


def as_numbers(row: dict[str, str]) -> dict[str, str | float | None]:
    """The row with numbers for its measured columns, None for what is empty."""
    words = ("workload", "mode", "commit", "date")
    return {
        name: value if name in words else float(value) if value else None
        for name, value in row.items()
    }


def file_in(path: Path) -> Path:
    """In a folder, a file named for the GPU: h200.csv."""
    if not path.is_dir():
        return path
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    return path / f"{name.removeprefix('nvidia-')}.csv"


def write_csv(rows: list[dict[str, str]], path: Path) -> None:
    try:
        with file_in(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error}") from None


def show(rows: list[dict[str, str]]) -> None:
    table = Table(box=None)
    titles = ("workload", "mode", "us", "TFLOPS", "GB/s", "% of ceiling", "error")
    for title in titles:
        table.add_column(title, justify="left" if title in titles[:2] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in MEASURED))
    console.print(table)


def run(
    only: str | None, kernel: str | None, commit: str, as_json: bool, csv_path: Path | None
) -> None:
    """Measures, prints, and writes the file if one is asked for."""
    rows = measure(only, kernel, commit)
    if as_json:
        print_json([as_numbers(row) for row in rows])
    else:
        show(rows)
    if csv_path is not None:
        write_csv(rows, csv_path)
