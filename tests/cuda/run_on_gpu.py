#!/usr/bin/env python3
"""Run every test that needs a GPU, and the benchmark, in one call; write a report.

Usage: run_on_gpu.py --report FILE [--csv FILE] [options]

Builds nothing: `./dev gpu` does, or see the defaults below for what is to be there. Needs Python's
standard library, and for the steps that are Python themselves torch, the installed package and
pytest; what is missing is said in the report. Exit status: 0 when all that ran passed and nothing
was left out.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BIGGEST_TEXT = 6000  # characters of one failure's output in the report
SANITIZER_ERROR = 9


@dataclass
class Outcome:
    """What one step did."""

    verdict: str  # passed, FAILED, or why it did not run
    counts: str = ""
    seconds: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)  # name, text


@dataclass
class Step:
    """A command with its limit; `judge` reads its status and output."""

    name: str
    command: list[str]
    limit: float  # seconds
    judge: Callable[[int, str], Outcome]
    missing: str = ""  # not empty: why it cannot run


def ending(text: str) -> str:
    return text if len(text) <= BIGGEST_TEXT else "...\n" + text[-BIGGEST_TEXT:]


def run(step: Step, deadline: float) -> Outcome:
    """Runs a step; at its limit, all its processes end."""
    if step.missing:
        return Outcome(f"NOT RUN: {step.missing}")
    limit = min(step.limit, deadline - time.monotonic())
    if limit < 5:
        return Outcome("NOT RUN: no time was left")
    begin = time.monotonic()
    print(f"{step.name}: {' '.join(step.command)}", flush=True)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            step.command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    if status is None:
        outcome = Outcome("FAILED", f"did not end within {limit:.0f} s")
        outcome.failures.append((step.name, ending(text)))
    else:
        outcome = step.judge(status, text)
    outcome.seconds = time.monotonic() - begin
    print(f"{step.name}: {outcome.verdict} {outcome.counts} ({outcome.seconds:.0f} s)", flush=True)
    return outcome


# --- Judges --------------------------------------------------------------------------------------


def by_lines(status: int, text: str) -> Outcome:
    """cuda_check: one line a check, which begins with ok or FAIL."""
    good = len(re.findall(r"^ok ", text, re.MULTILINE))
    bad = re.findall(r"^FAIL .*$", text, re.MULTILINE)
    outcome = Outcome("passed", f"{good} passed, {len(bad)} failed")
    if status != 0 or bad or good == 0:
        outcome.verdict = "FAILED"
        outcome.failures = [("cuda_check", "\n".join(bad) or ending(text))]
    return outcome


def by_sanitizer(status: int, text: str) -> Outcome:
    """compute-sanitizer: its summary, and the program's own verdict."""
    summary = re.search(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", text, re.MULTILINE)
    outcome = Outcome("passed", summary[1] if summary else "no summary")
    if status != 0 or not summary or not re.search(r"SUMMARY: 0 ", text):
        outcome.verdict = "FAILED"
        outcome.failures = [("compute-sanitizer", ending(text))]
    return outcome


def by_junit(path: Path) -> Callable[[int, str], Outcome]:
    """pytest, by the file that --junit-xml wrote."""

    def judge(status: int, text: str) -> Outcome:
        if not path.exists():
            return Outcome("FAILED", "no result", failures=[("pytest", ending(text))])
        cases = list(xml.parse(path).iter("testcase"))
        outcome = Outcome("passed")
        skipped = 0
        for case in cases:
            skipped += case.find("skipped") is not None
            for kind in ("failure", "error"):
                found = case.find(kind)
                if found is not None:
                    name = f"{case.get('classname')}::{case.get('name')}"
                    outcome.failures.append((name, ending(found.text or "")[-1500:]))
        passed = len(cases) - skipped - len(outcome.failures)
        outcome.counts = f"{passed} passed, {len(outcome.failures)} failed, {skipped} skipped"
        if status != 0 or outcome.failures or passed == 0:
            outcome.verdict = "FAILED"
            outcome.failures = outcome.failures or [("pytest", ending(text))]
        return outcome

    return judge


def by_status(status: int, text: str) -> Outcome:
    if status == 0:
        return Outcome("passed")
    return Outcome("FAILED", f"status {status}", failures=[("output", ending(text))])


# --- Steps ---------------------------------------------------------------------------------------


def find_sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    if found is None:
        candidates = sorted(Path("/usr/local").glob("cuda*/**/compute-sanitizer"))
        found = next((str(path) for path in candidates if path.is_file()), None)
    return found


def has_module(name: str) -> bool:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], capture_output=True, check=False
    )
    return done.returncode == 0


def steps(arguments: argparse.Namespace, scratch: Path) -> tuple[list[Step], list[Step]]:
    """The steps that may run beside one another, and those that want the GPU alone."""

    def program(path: Path) -> str:
        return "" if path.exists() else f"{path} is not built"

    package = "" if has_module("flashmla") else "the package flashmla is not installed"
    pytest = package or ("" if has_module("pytest") else "pytest is not installed")
    junit = scratch / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-o", "faulthandler_timeout=100"]  # a kernel that hangs shows where
    # Warnings of another torch than the one that the tests are written against are no failures.
    command += ["-W", "default", f"--junit-xml={junit}", "tests/python"]
    if has_module("xdist"):
        command += ["-n", "4"]
    # The longest first.
    together = [
        Step("Python tests", command, 300, by_junit(junit), pytest),
        Step("cuda_check", [str(arguments.check), "all"], 240, by_lines, program(arguments.check)),
    ]
    sanitizer = find_sanitizer()
    for tool in ("racecheck", "memcheck", "initcheck", "synccheck"):
        path = arguments.racecheck if tool == "racecheck" else arguments.check
        missing = program(path) if sanitizer else "compute-sanitizer was not found"
        command = [sanitizer or "", "--tool", tool, "--error-exitcode", str(SANITIZER_ERROR)]
        together.append(Step(tool, [*command, str(path), "small"], 240, by_sanitizer, missing))
    cli = package or (
        "" if has_module("typer") and has_module("rich") else "typer is not installed"
    )
    command = [sys.executable, "-m", "flashmla", "check", "--kernel", "sm90a"]
    together.append(Step("flashmla check", command, 240, by_status, cli))

    command = [sys.executable, "-m", "flashmla", "bench", "--device", "cuda"]
    command += ["--csv", str(arguments.csv), "--commit", arguments.commit]
    alone = [Step("flashmla bench", command, 240, by_status, cli)]
    chosen = arguments.only
    return (
        [step for step in together if not chosen or step.name in chosen],
        [step for step in alone if not chosen or step.name in chosen],
    )


# --- Report --------------------------------------------------------------------------------------


def first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def machine() -> str:
    """GPU, driver, torch, Python, hypothesis."""
    gpu = first_line(
        ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm", "--format=csv,noheader"]
    )
    torch = first_line([sys.executable, "-c", "import torch; print(torch.__version__)"])
    parts = [gpu or "no GPU was found", f"torch {torch or 'none'}", sys.version.split()[0]]
    if not has_module("hypothesis"):
        parts.append("no hypothesis: the tests of the files that use it were left out")
    return ", ".join(parts)


def times_table(path: Path) -> list[str]:
    """The benchmark's rows, one line a workload and mode."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = ("workload", "mode", "us", "tflops", "gbs", "percent_of_ceiling", "relative_error")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row.get(name) or "" for name in columns) + " |" for row in rows]
    return lines


def write_report(
    path: Path, arguments: argparse.Namespace, done: dict[str, Outcome], seconds: float
) -> None:
    lines = [
        "# The tests on a GPU",
        "",
        "Written by `tests/cuda/run_on_gpu.py`.",
        "",
        f"- commit: {arguments.commit or 'not given'}",
        f"- date: {datetime.date.today().isoformat()}",
        f"- machine: {machine()}",
        f"- time: {seconds:.0f} s",
        "",
        "| step | verdict | | seconds |",
        "|---|---|---|---|",
    ]
    lines += [f"| {n} | {o.verdict} | {o.counts} | {o.seconds:.0f} |" for n, o in done.items()]
    for step, outcome in done.items():
        for name, text in outcome.failures:
            lines += ["", f"## {step}: {name}", "", "```", text.rstrip("\n"), "```"]
    if arguments.csv.exists():
        lines += ["", "## Times", "", *times_table(arguments.csv)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Entry of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", type=Path, required=True, help="Markdown file to write")
    parser.add_argument("--csv", type=Path, help="benchmark's CSV file; default: beside the report")
    parser.add_argument("--check", type=Path, default=ROOT / "build/wheel/tests/cuda/cuda_check")
    parser.add_argument(
        "--racecheck",
        type=Path,
        default=ROOT / "build/cuda-racecheck/tests/cuda/cuda_check",
        help="cuda_check of a build with FLASHMLA_RACECHECK",
    )
    parser.add_argument("--commit", default="", help="what is tested; default: git's HEAD")
    parser.add_argument("--seconds", type=float, default=500, help="for all of it")
    parser.add_argument("--jobs", type=int, default=3, help="steps at a time, the benchmark apart")
    parser.add_argument("--only", action="append", help="a step by name; may be repeated")
    arguments = parser.parse_args()
    arguments.csv = (arguments.csv or arguments.report.with_suffix(".csv")).resolve()
    if not arguments.commit:
        arguments.commit = first_line(["git", "describe", "--always", "--dirty"])

    begin = time.monotonic()
    deadline = begin + arguments.seconds
    with tempfile.TemporaryDirectory() as scratch:
        together, alone = steps(arguments, Path(scratch))
        # The benchmark is worth more than the end of a test that hangs.
        reserve = 150 if alone else 0
        done: dict[str, Outcome] = {}
        with ThreadPoolExecutor(arguments.jobs) as pool:
            outcomes = pool.map(lambda step: run(step, deadline - reserve), together)
            done |= {step.name: outcome for step, outcome in zip(together, outcomes, strict=True)}
        done |= {step.name: run(step, deadline) for step in alone}
    write_report(arguments.report, arguments, done, time.monotonic() - begin)
    print(f"report: {arguments.report}")
    return 0 if all(outcome.verdict == "passed" for outcome in done.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
