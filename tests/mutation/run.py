"""Proves that the C++ tests can fail: plants each fault of mutations.py and expects failing tests.

Usage: run.py FOLDER [WORD]

FOLDER receives a clone of the last commit and its build, and is reused. With WORD, only mutations
whose file or text contains it are planted. Takes about ten seconds a mutation. Exits with 1 when
one survives; one whose text is not found or that does not compile is a mistake and ends the run.
Faults in a kernel that this machine cannot run are left out, and counted.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from check_texts import mistakes
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
TARGETS = ["flashmla_unit_tests", "flashmla_api_tests"]


def output(*command: str | Path, may_fail: bool = False) -> tuple[int, str]:
    """Exit status and output of a command; one that fails ends the run unless it may."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0 and not may_fail:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}")
    return done.returncode, done.stdout


def prepare(source: Path, build: Path) -> None:
    """Lays out the last commit, whose unchanged files keep their times, and configures it."""
    if not source.exists():
        output("git", "clone", "-q", "--shared", ROOT, source)
    output("git", "-C", source, "fetch", "-q", ROOT, "HEAD")
    output("git", "-C", source, "checkout", "-q", "--force", "--detach", "FETCH_HEAD")
    options = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DFLASHMLA_CUDA=OFF"]
    options += ["-DFLASHMLA_BUILD_TESTS=ON", "-DFLASHMLA_INSTALL=OFF"]
    output("cmake", "-G", "Ninja", "-S", source, "-B", build, *options)


def compile_tests(build: Path) -> None:
    """Brings the test programs up to date."""
    output("cmake", "--build", build, "-j", "1", "--target", *TARGETS)


def run_tests(build: Path, pattern: str) -> tuple[bool, bool]:
    """Whether every test that matches passes, up to the first that does not; and if any ran."""
    command = ["ctest", "--test-dir", build, "-R", pattern, "--stop-on-failure"]
    status, text = output(*command, may_fail=True)
    results = re.findall(r"^ *\d+/\d+ Test .*$", text, re.MULTILINE)
    if not results:
        raise SystemExit(f"no test matches {pattern}")
    return status == 0, any("***Skipped" not in result for result in results)


def plant(mutation: Mutation, source: Path) -> None:
    """Changes the text."""
    path = source / "src" / mutation.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")


def main(folder: str, word: str = "") -> int:
    """Plants and runs; 1 when a mutation survives."""
    source, build = Path(folder) / "source", Path(folder) / "build"
    chosen = [m for m in MUTATIONS if word in m.file or word in m.old]
    prepare(source, build)
    if found := mistakes(source, MUTATIONS):
        raise SystemExit("\n".join(found))
    compile_tests(build)
    skipped = set()
    for pattern in sorted({mutation.tests for mutation in chosen}):
        passed, ran = run_tests(build, pattern)
        if not passed:
            raise SystemExit(f"tests that match {pattern} fail without a mutation")
        if not ran:
            skipped.add(pattern)
    left_out = len(chosen)
    chosen = [mutation for mutation in chosen if mutation.tests not in skipped]
    left_out -= len(chosen)
    survivors = 0
    for mutation in chosen:
        begin = time.monotonic()
        plant(mutation, source)
        compile_tests(build)
        survived, _ = run_tests(build, mutation.tests)
        output("git", "-C", source, "checkout", "-q", "--", f"src/{mutation.file}")
        survivors += survived
        verdict = "SURVIVED" if survived else "killed"
        seconds = time.monotonic() - begin
        print(f"{verdict:8} {seconds:4.0f} s  {mutation.file}: {mutation.old}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations killed, {left_out} left out")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
