"""What calls read and write, keep and ask for: guards around arguments, leaks, exhaustion."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from inputs import attend, formula_inputs

import flashmla
from flashmla import cases

HERE = Path(__file__).parent


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=HERE
    )


def test_no_kernel_reads_or_writes_past_its_arguments():
    done = program("guarded_calls.py")
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-2000:]
    assert done.stdout.endswith("done\n")


def peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_memory_does_not_grow_over_many_calls():
    inputs = formula_inputs([130, 64], 16)
    plan = cases.plan_of(inputs, 3)

    def calls(count: int) -> None:
        for _ in range(count):
            out, lse = attend(inputs, plan)
            flashmla.merge_attention_states([out, out], [lse, lse])
            flashmla.get_mla_metadata(inputs.cache_seqlens, 16, 1)

    calls(200)
    before = peak_kib()
    calls(2000)
    assert peak_kib() - before < 4096


def test_memory_does_not_grow_over_refused_calls():
    inputs = formula_inputs([130, 64], 16)
    plan = cases.plan_of(inputs, 3)
    inputs.block_table[0, 2] = -1

    def calls(count: int) -> None:
        for _ in range(count):
            try:
                attend(inputs, plan)
            except RuntimeError:
                continue
            raise AssertionError("not refused")

    calls(200)
    before = peak_kib()
    calls(2000)
    assert peak_kib() - before < 4096


LITTLE_MEMORY = """
import re, resource, torch, flashmla
parts = 20_000
q = torch.randn(1, 1, 128, 576).bfloat16()
cache = torch.randn(1, 64, 1, 576).bfloat16()
table = torch.zeros(1, parts, dtype=torch.int32)
lens = torch.tensor([parts * 64], dtype=torch.int32)
rows = [[0, part, 0, part + 1, part, 0, 0, 0] for part in range(parts)]
plan = torch.tensor(rows, dtype=torch.int32), torch.tensor([0, parts], dtype=torch.int32)
out, lse = torch.full((1, 1, 128, 512), 5.0).bfloat16(), torch.full((1, 128, 1), 5.0)
flashmla.flash_mla_with_kvcache(
    q, cache, table[:, :1], lens * 0 + 64, 512, plan[0][:1], plan[1], out=out, softmax_lse=lse
)
out.fill_(5.0), lse.fill_(5.0)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), used + (1 << 30)))
try:
    # Partial results of 20,000 parts, 128 heads: 5 GB.
    flashmla.flash_mla_with_kvcache(
        q, cache, table, lens, 512, *plan, out=out, softmax_lse=lse
    )
except (RuntimeError, MemoryError) as error:
    assert re.search(r"\\d{10}", str(error)), error
    assert (out == 5.0).all() and (lse == 5.0).all()
    print("refused")
"""


def test_out_of_memory_says_how_much_was_asked_for():
    done = program("-c", LITTLE_MEMORY)
    assert done.stdout == "refused\n", done.stdout + done.stderr
