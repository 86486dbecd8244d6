"""Every kernel on arguments that end, and begin, at memory that must not be touched.

Run as a program by test_memory.py, since a touch ends the process: it prints each problem before it
computes it, and "done" at the end.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from conftest import KERNELS
from inputs import formula_inputs, library_plan, same_bits

from flashmla import cases

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
KEPT: list[mmap.mmap] = []  # a protected mapping must outlive every tensor on it


def guarded(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
    """A contiguous copy between two unreadable pages; its end, or its beginning, touches one."""
    tensor = tensor.contiguous()
    inner = -(-max(1, tensor.nbytes) // PAGE) * PAGE
    memory = mmap.mmap(-1, inner + 2 * PAGE)
    KEPT.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (address, address + PAGE + inner):
        if LIBC.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = PAGE + (inner - tensor.nbytes if at_end else 0)
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return flat.view(tensor.shape).copy_(tensor)


def tight(inputs: cases.Inputs) -> None:
    """Keeps only the blocks in use, the last of the table last in memory."""
    table = inputs.block_table
    used = table[table >= 0]
    inputs.k_cache = inputs.k_cache[used.long()]
    inputs.block_table = table.clone()
    inputs.block_table[table >= 0] = torch.arange(len(used), dtype=torch.int32)


def main() -> None:
    shapes = [  # lens, page, heads, queries, dims; the last page of the last row is full
        ([65], 1, 1, 1, (576, 512)),
        ([70, 65], 5, 3, 2, (576, 512)),
        ([13], 13, 16, 1, (512, 512)),
        ([1], 1, 20, 1, (64, 64)),
        ([128, 65], 1, 17, 1, (96, 64)),
        ([130], 10, 128, 1, (320, 256)),
        ([97], 97, 5, 3, (288, 256)),
    ]
    for kernel in KERNELS:
        for lens, page, heads, queries, dims in shapes:
            inputs = formula_inputs(
                lens, heads, queries, page, causal=True, dims=dims, dtype=kernel.dtype
            )
            tight(inputs)
            for plan in (library_plan(inputs), cases.plan_of(inputs, 2)):
                expected = None
                for at_end in (True, False):
                    print(kernel.name, lens, page, heads, queries, dims, at_end, flush=True)
                    given = [
                        guarded(tensor, at_end)
                        for tensor in (
                            inputs.q,
                            inputs.k_cache,
                            inputs.cache_seqlens,
                            inputs.block_table,
                            *plan,
                            torch.zeros(len(lens), queries, heads, dims[1], dtype=kernel.dtype),
                            torch.zeros(len(lens), heads, queries),
                        )
                    ]
                    q, k_cache, cache_seqlens, block_table, metadata, num_splits, out, lse = given
                    torch.ops.flashmla.decode_out(
                        q,
                        k_cache,
                        dims[1],
                        cache_seqlens,
                        block_table,
                        0.25,
                        True,
                        metadata,
                        num_splits,
                        None,
                        kernel.index,
                        out,
                        lse,
                    )
                    expected = out.clone() if expected is None else expected
                    assert same_bits(out, expected)
    for at_end in (True, False):
        for dim in (1, 7, 512):
            print("merge", dim, at_end, flush=True)
            outs = guarded(torch.randn(3, 1, 1, 5, dim).bfloat16(), at_end)
            lses = guarded(torch.randn(3, 1, 5, 1), at_end)
            torch.ops.flashmla.merge_attention_states(outs, lses)
    print("done")


if __name__ == "__main__":
    main()
