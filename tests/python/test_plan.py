"""The plan: what get_mla_metadata promises, and that attention follows any valid one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import attend, attend_into, formula_inputs, library_plan, same_bits

import flashmla
from flashmla import cases, reference

LENGTHS = st.one_of(st.integers(0, 300), st.integers(0, 100_000), st.sampled_from([0, 1, 64, 65]))


def blocks_of(length: int) -> int:
    return -(-length // 64)


def walk(metadata: torch.Tensor, lens: list[int]) -> dict[int, list[tuple[int, int, int, int]]]:
    """Row to [(first block, end block, part, split)], in the order of the parts."""
    walked: dict[int, list[tuple[int, int, int, int]]] = {}
    for part, fields in enumerate(metadata.tolist()):
        begin_row, begin_block, end_row, end_block, begin_split, *rest = fields
        assert rest == [0, 0, 0]
        if begin_row == -1:
            continue
        for row in range(begin_row, end_row + 1):
            first = begin_block if row == begin_row else 0
            end = end_block if row == end_row else blocks_of(lens[row])
            split = begin_split if row == begin_row else 0
            walked.setdefault(row, []).append((first, end, part, split))
    return walked


def check_plan(
    metadata: torch.Tensor, num_splits: torch.Tensor, lens: list[int], device: str = "cpu"
) -> None:
    assert metadata.dtype == num_splits.dtype == torch.int32
    assert metadata.shape[1:] == (8,)
    assert num_splits.shape == (len(lens) + 1,)
    walked = walk(metadata, lens)
    splits = num_splits.tolist()
    assert splits[0] == 0
    for row, length in enumerate(lens):
        shares = walked[row]
        assert shares[0][0] == 0
        assert shares[-1][1] == blocks_of(length)
        for before, after in pairwise(shares):
            assert before[1] == after[0]
        if length > 0:
            assert all(first < end for first, end, _, _ in shares)
        assert [split for _, _, _, split in shares] == list(range(len(shares)))
        assert splits[row + 1] - splits[row] == len(shares)
    # Balance, in eighths of a block, of which each row costs one more wherever it begins. What it
    # costs on a GPU, a block at most, is the library's affair: there the blocks alone are judged.
    # And a GPU's plan may leave parts without work, so as not to cut rows: the mean is of the rest.
    start = 1 if device == "cpu" else 8
    blocks = [0] * metadata.shape[0]
    starts = [0] * metadata.shape[0]
    for shares in walked.values():
        for first, end, part, split in shares:
            blocks[part] += 8 * (end - first)
            starts[part] += start * (split == 0)
    parts = len(blocks) if device == "cpu" else max(1, int((metadata[:, 0] >= 0).sum()))
    mean = -(-(sum(blocks) + sum(starts)) // (8 * parts))  # blocks, rounded up
    costs = map(sum, zip(blocks, starts, strict=True)) if device == "cpu" else blocks
    assert max(costs) <= 8 * (mean + 1) + start


@given(lens=st.lists(LENGTHS, max_size=60), threads=st.integers(1, 40))
def test_every_block_is_walked_once_in_order_and_evenly(lens, threads):
    torch.set_num_threads(threads)
    tensor = torch.tensor(lens, dtype=torch.int32)
    check_plan(*flashmla.get_mla_metadata(tensor, 16, 1), lens)


@pytest.mark.parametrize("batch", [0, 1, 9, 128, 1024, 8192, 65536, 100_000])
@pytest.mark.parametrize("kind", ["zeros", "ones", "mixed"])
def test_any_batch_is_planned_evenly(device, batch, kind):
    generator = torch.Generator().manual_seed(batch)
    lens = {
        "zeros": torch.zeros(batch, dtype=torch.int32),
        "ones": torch.ones(batch, dtype=torch.int32),
        "mixed": torch.randint(0, 5000, (batch,), dtype=torch.int32, generator=generator),
    }[kind]
    if kind == "mixed" and batch > 2:
        lens[0], lens[batch // 2], lens[-1] = 1_000_000, 0, 1
    torch.set_num_threads(16)
    metadata, num_splits = flashmla.get_mla_metadata(lens.to(device), 128, 1)
    check_plan(metadata.cpu(), num_splits.cpu(), lens.tolist(), device)


@given(
    lens=st.lists(LENGTHS, max_size=20),
    heads=st.sampled_from([1, 16, 128, 2048]),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
)
def test_any_number_of_heads(lens, heads, kv_heads):
    torch.set_num_threads(8)
    tensor = torch.tensor(lens, dtype=torch.int32)
    plan = flashmla.get_mla_metadata(tensor, heads, kv_heads)
    check_plan(*plan, lens)
    again = flashmla.get_mla_metadata(tensor, heads, kv_heads)
    assert all(same_bits(a, b) for a, b in zip(plan, again, strict=True))


def test_strided_lengths():
    lens = torch.arange(40, dtype=torch.int32) * 17
    for a, b in zip(
        flashmla.get_mla_metadata(lens[::3], 4, 1),
        flashmla.get_mla_metadata(lens[::3].contiguous(), 4, 1),
        strict=True,
    ):
        assert same_bits(a, b)


def within_bounds(inputs: cases.Inputs, found: tuple[torch.Tensor, torch.Tensor]) -> bool:
    expected = inputs.expected()
    out_error, lse_error = reference.errors(*found, *expected)
    return out_error <= 4e-6 and lse_error <= 4e-6


@given(data=st.data(), lens=st.lists(st.integers(0, 400), min_size=1, max_size=6))
def test_attention_follows_any_valid_plan(data, lens):
    inputs = formula_inputs(lens, 3, dims=(64, 64), dtype=torch.float32, causal=True, queries=2)
    # Random cuts of the line of blocks, an empty row counting one place.
    places = [(r, b) for r, n in enumerate(lens) for b in range(max(1, blocks_of(n)))]
    cuts = data.draw(st.lists(st.integers(0, len(places)), max_size=6))
    edges = sorted({0, len(places), *cuts})
    splits = [0] * len(lens)
    rows = []
    for begin, end in pairwise(edges):
        (row, block), (last_row, last_block) = places[begin], places[end - 1]
        stop = min(last_block + 1, blocks_of(lens[last_row]))
        if last_row == len(lens) - 1 and last_block + 1 >= blocks_of(lens[-1]):
            # The end of the batch may be written past it.
            last_row, stop = data.draw(
                st.sampled_from([(last_row, stop), (last_row, 2**31 - 1), (len(lens) + 3, 0)])
            )
        rows.append([row, block, last_row, stop, splits[row], 0, 0, 0])
        for touched in range(row, min(last_row, len(lens) - 1) + 1):
            splits[touched] += 1
    idle = data.draw(st.sampled_from([-1, len(lens), 2**31 - 1]))
    rows += [[idle, 0, 0, 0, 0, 0, 0, 0]] * data.draw(st.integers(0, 3))
    rows = data.draw(st.permutations(rows))
    num_splits = torch.tensor([0, *splits]).cumsum(0).int()
    assert within_bounds(
        inputs, attend(inputs, (torch.tensor(rows, dtype=torch.int32), num_splits))
    )


def one_part(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    metadata = torch.tensor([[0, 0, batch - 1, 2**31 - 1, 0, 0, 0, 0]], dtype=torch.int32)
    return metadata, torch.zeros(batch + 1, dtype=torch.int32)


def test_one_part_with_zero_num_splits_writes_every_row():
    lens = [300, 0, 65, 1]
    inputs = formula_inputs(lens, 4, dims=(96, 64), dtype=torch.float32)
    found = attend(inputs, one_part(4))
    assert within_bounds(inputs, found)


@pytest.mark.parametrize("lens", [[300, 20, 65], [300, 0, 65], [0, 0, 65], [300, 0, 0], [0, 0, 0]])
def test_parts_may_end_where_the_next_begins_though_the_row_is_empty(lens):
    # One part a row, each up to block 0 of the next row: an engine that dealt out rows before it
    # knew their lengths.
    inputs = formula_inputs(lens, 4, dims=(96, 64), dtype=torch.float32)
    rows = [[row, 0, row + 1, 0, 0, 0, 0, 0] for row in range(3)]
    plan = torch.tensor(rows, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    found = attend(inputs, plan)
    assert within_bounds(inputs, found)
    assert all(same_bits(a, b) for a, b in zip(found, attend(inputs, one_part(3)), strict=True))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_an_empty_row_may_be_named_inside_the_walk_of_another_part(order):
    inputs = formula_inputs([65, 0, 0, 130], 4, dims=(96, 64), dtype=torch.float32)
    # The second names an empty row alone; the third begins where row 0 ends, before the empty rows.
    rows = [[0, 0, 3, 1, 0, 0, 0, 0], [2, 0, 2, 0, 0, 0, 0, 0], [0, 2, 1, 0, 0, 0, 0, 0]]
    rows = [rows[part] for part in order] + [[3, 1, 3, 3, 1, 0, 0, 0]]
    plan = torch.tensor(rows, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    assert within_bounds(inputs, attend(inputs, plan))


def test_rows_that_no_part_walks_are_left_alone():
    inputs = formula_inputs([97, 130, 0, 0], 4, dims=(96, 64))
    metadata, num_splits = flashmla.get_mla_metadata(inputs.cache_seqlens[:2], 4, 1)
    padded = torch.cat([num_splits, num_splits[-1:].expand(2)])
    out = torch.full((4, 1, 4, 64), 5.0, dtype=torch.bfloat16)
    lse = torch.full((4, 4, 1), 5.0)
    flashmla.flash_mla_with_kvcache(
        inputs.q,
        inputs.k_cache,
        inputs.block_table,
        inputs.cache_seqlens,
        64,
        metadata,
        padded,
        0.25,
        out=out,
        softmax_lse=lse,
    )
    assert (out[2:] == 5.0).all()
    assert (lse[2:] == 5.0).all()
    expected = attend(inputs, (metadata, padded))
    assert same_bits(out[:2], expected[0][:2])


def test_a_plan_for_longer_rows_serves_shorter_ones():
    inputs = formula_inputs([700, 300], 4, dims=(96, 64), dtype=torch.float32)
    plan = cases.plan_of(inputs, 5)
    inputs.cache_seqlens = torch.tensor([100, 64], dtype=torch.int32)
    assert within_bounds(inputs, attend(inputs, plan))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 0, 0, 1, 0, 0, 0, 0]], "leaves out blocks 1 to 2 of row 0"),
        ([[0, 0, 0, 1, 0, 0, 0, 0], [0, 2, 0, 3, 1, 0, 0, 0]], "leaves out blocks 1 to 1"),
        ([[0, 0, 0, 2, 0, 0, 0, 0], [0, 1, 0, 3, 1, 0, 0, 0]], "row 0 that another part walks"),
        ([[0, 0, 1, 1, 0, 0, 0, 0], [0, 0, 0, 3, 0, 0, 0, 0]], "row 0 that another part walks"),
        ([[1, 0, 0, 3, 0, 0, 0, 0]], "must not end before it begins"),
        ([[0, -1, 0, 3, 0, 0, 0, 0]], "blocks count from 0"),
        ([[0, 2, 0, 1, 0, 0, 0, 0]], "must not end before it begins"),
    ],
)
def test_a_plan_that_does_not_cover_a_row_once_is_refused(rows, message):
    inputs = formula_inputs([150, 20], 4, dims=(96, 64))
    out = torch.full((2, 1, 4, 64), 5.0, dtype=torch.bfloat16)
    lse = torch.full((2, 4, 1), 5.0)
    with pytest.raises(RuntimeError, match=message):
        flashmla.flash_mla_with_kvcache(
            inputs.q,
            inputs.k_cache,
            inputs.block_table,
            inputs.cache_seqlens,
            64,
            torch.tensor(rows, dtype=torch.int32),
            torch.zeros(3, dtype=torch.int32),
            out=out,
            softmax_lse=lse,
        )
    assert (out == 5.0).all()
    assert (lse == 5.0).all()


def test_a_row_that_has_grown_by_a_block_is_refused():
    inputs = formula_inputs([150, 64], 4, dims=(96, 64))
    plan = library_plan(inputs)
    inputs.cache_seqlens = torch.tensor([150, 65], dtype=torch.int32)
    inputs.block_table = torch.cat([inputs.block_table, inputs.block_table[:, :1]], dim=1)
    inputs.block_table[1, 1] = 0
    with pytest.raises(RuntimeError, match="leaves out blocks 1 to 1 of row 1"):
        attend(inputs, plan)


def test_an_empty_row_that_has_grown_is_left_alone():
    inputs = formula_inputs([150, 1], 4, dims=(96, 64))
    metadata = torch.tensor([[0, 0, 1, 0, 0, 0, 0, 0]], dtype=torch.int32)  # for [150, 0]
    out, lse = torch.full((2, 1, 4, 64), 5.0, dtype=torch.bfloat16), torch.full((2, 4, 1), 5.0)
    plan = (metadata, torch.zeros(3, dtype=torch.int32))
    attend_into(inputs, plan, "cpu", out, lse)
    assert (out[1] == 5.0).all()
    assert (lse[1] == 5.0).all()
    assert same_bits(out[0], attend(inputs, one_part(2))[0][0])
