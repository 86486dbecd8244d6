"""Faults that users of such systems reported in public, as inputs with float64 results.

Tolerances for bfloat16: 2^-7 on out, 1e-4 * max(1, |lse|) on lse.
"""

from __future__ import annotations

import math

import pytest
import torch
from inputs import (
    attend,
    attend_into,
    device_of,
    formula_inputs,
    formula_k,
    formula_q,
    library_plan,
    paged,
    same_bits,
    small_dims,
)

import flashmla
from flashmla import cases, reference

OUT = 2**-7


def close_lse(found, expected: float) -> bool:
    return abs(float(found) - expected) <= 1e-4 * max(1.0, abs(expected))


def close_out(found, expected: float) -> bool:
    return abs(float(found) - expected) <= OUT


def agrees_with_float64(inputs: cases.Inputs, out: torch.Tensor, lse: torch.Tensor) -> bool:
    expected_out, expected_lse = inputs.expected()
    out_error, lse_error = reference.errors(out, lse, expected_out, expected_lse)
    worst = float((out.double() - expected_out).abs().max())
    magnitude = expected_lse[expected_lse.isfinite()].abs()
    return (
        worst <= OUT
        and lse_error <= 1e-4 * max(1.0, float(magnitude.min()))
        and out_error <= reference.TOLERANCES[inputs.q.dtype].out_relative
    )


def test_rows_of_length_zero_are_zero_and_leave_the_others_alone(kernel):
    inputs = formula_inputs([0, 1, 64, 0], 128)
    out, lse = attend(inputs, kernel=kernel)
    assert (out[[0, 3]] == 0).all()
    assert (lse[[0, 3]] == math.inf).all()
    assert int((lse == math.inf).sum()) == 256
    values = formula_k(1, 1)[0, 0, :512].bfloat16()
    assert (out[1, 0] == values).all()
    assert float(out.double().abs().sum()) == pytest.approx(40971.9137, rel=1e-3)
    assert float(lse[lse.isfinite()].double().sum()) == pytest.approx(568.614653, abs=1e-2)


def test_nine_rows_of_eight_heads(kernel):
    for lens in (list(range(1, 10)), list(range(9, 0, -1))):
        _, lse = attend(formula_inputs(lens, 8, uniform=True), kernel=kernel)
        assert (lse - torch.tensor(lens).log()[:, None, None]).abs().max() <= 2e-5
        inputs = formula_inputs(lens, 8, 2, causal=True)
        assert agrees_with_float64(inputs, *attend(inputs, kernel=kernel))


@pytest.mark.parametrize("unused", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize("page", [4, 64])
def test_slots_past_the_length_never_matter(kernel, page, unused):
    out, lse = attend(formula_inputs([13], 16, page=page, unused=unused), kernel=kernel)
    assert close_out(out[0, 0, 0, 0], 0.061532551)
    assert close_out(out[0, 0, 15, 511], 0.185125567)
    assert close_lse(lse[0, 0, 0], 3.071629679)
    assert close_lse(lse[0, 15, 0], 3.089057015)
    assert out.isfinite().all()


def test_large_numbers_past_the_length_weigh_nothing(kernel):
    inputs = formula_inputs([257], 16, uniform=True, unused=1000.0)
    out, lse = attend(inputs, kernel=kernel)
    assert close_lse(lse.max(), 5.549076085)
    expected = torch.tensor([-0.00501581, -0.00300948, -0.00100316, 0.00100316])
    assert (out[0, 0, :, :4].float() - expected).abs().max() < 1e-4


def test_every_length_from_1_to_200_counts_its_tokens(kernel):
    lens = list(range(1, 201))
    dims = small_dims(kernel, (96, 64))
    inputs = formula_inputs(lens, 1, uniform=True, unused=1000.0, dims=dims)
    _, lse = attend(inputs, kernel=kernel)
    assert torch.allclose(lse[:, 0, 0].double(), torch.tensor(lens).double().log(), atol=2e-5)


@pytest.mark.parametrize(("page", "length"), [(16, 17), (64, 65)])
def test_table_of_two_entries_and_ids_at_both_ends_of_the_cache(device, page, length):
    inputs = formula_inputs([length], 4)
    small = attend(inputs, kernel=device)
    cache = torch.full((1000, page, 1, 576), math.nan, dtype=torch.bfloat16)
    tokens = formula_k(0, length).bfloat16()
    cache[999] = tokens[:page]
    cache[0, : length - page] = tokens[page:]
    inputs.k_cache = cache
    inputs.block_table = torch.tensor([[999, 0]], dtype=torch.int32)
    found = attend(inputs, kernel=device)
    assert all(same_bits(a, b) for a, b in zip(found, small, strict=True))


def test_wide_table_and_table_with_a_larger_row_stride(device):
    inputs = formula_inputs([65, 130], 4)
    expected = attend(inputs, kernel=device)
    wide = torch.full((2, 4096), 2147480000, dtype=torch.int32)
    wide[:, :3] = inputs.block_table
    for columns in (4096, 3, 7):
        # Moved before it is cut, since a cut that is moved is a table of its own.
        inputs.block_table = wide.to(device)[:, :columns]
        found = attend(inputs, kernel=device)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("queries", "first", "last", "first_lse", "last_lse", "total"),
    [
        (2, 0.067479667, 0.235524882, 5.033318953, 4.830914709, 4505.5380),
        (3, 0.057652954, 0.192633087, 5.018519331, 4.816669863, 6752.9123),
        (4, 0.050875686, 0.261108877, 5.000834536, 4.855206298, 8991.9261),
        (7, 0.054057024, 0.002237235, 4.977146455, 4.801249217, 15372.9644),
    ],
)
def test_several_query_tokens(kernel, queries, first, last, first_lse, last_lse, total):
    inputs = formula_inputs([130, 97], 16, queries, causal=True)
    out, lse = attend(inputs, kernel=kernel)
    assert close_out(out[0, 0, 0, 0], first)
    assert close_out(out[-1, -1, -1, -1], last)
    assert close_lse(lse[0, 0, 0], first_lse)
    assert close_lse(lse[-1, -1, -1], last_lse)
    assert float(out.double().abs().sum()) == pytest.approx(total, rel=2e-3)


def test_each_query_token_sees_its_own_prefix(kernel):
    lens = [64 + i for i in range(256)]
    dims = small_dims(kernel, (64, 64))
    inputs = formula_inputs(lens, 8, 3, causal=True, uniform=True, dims=dims)
    _, lse = attend(inputs, kernel=kernel)
    seen = torch.tensor(lens)[:, None] - 2 + torch.arange(3)
    assert torch.allclose(lse, seen.double().log()[:, None].float().expand_as(lse), atol=2e-5)
    assert (lse[:, :, 0] < lse[:, :, 1]).all()
    assert (lse[:, :, 1] < lse[:, :, 2]).all()


@pytest.mark.parametrize("heads", [16, 128])
def test_offsets_past_31_bits(device, heads):
    small = formula_inputs([257], heads)
    expected = attend(small, kernel=device)
    # 4.8 GB of address space, of which five pages are touched.
    cache = torch.empty(70000, 64, 1, 576, dtype=torch.bfloat16, device=device)
    table = torch.tensor([[58253, 58254, 58255, 69999, 0]], dtype=torch.int32)
    cache[table[0].long().to(device)] = small.k_cache[small.block_table[0].long()].to(device)
    small.k_cache, small.block_table = cache, table
    out, lse = attend(small, kernel=device)
    assert close_out(out[0, 0, 0, 0], 0.054726351)
    assert close_lse(lse[0, 0, 0], 5.717565281)
    assert close_lse(lse[0, 15, 0], 5.785065765)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


@pytest.mark.parametrize("page", [1, 2, 16, 32, 64, 128, 256])
def test_any_page_size(kernel, page):
    out, lse = attend(formula_inputs([4097], 4, page=page), kernel=kernel)
    assert close_out(out[0, 0, 0, 0], 0.061717118)
    assert close_out(out[0, 0, 3, 511], -0.090015498)
    assert close_lse(lse[0, 0, 0], 8.479257452)
    assert close_lse(lse[0, 3, 0], 8.642523323)


def test_long_rows_in_pages_of_32(kernel):
    lens = [4096, 4097, 8197, 12000]
    _, lse = attend(formula_inputs(lens, 16, page=32, uniform=True), kernel=kernel)
    for row, length in enumerate(lens):
        assert (lse[row] - math.log(length)).abs().max() <= 2e-5


def test_the_page_size_changes_no_bit(kernel):
    found = [attend(formula_inputs([517], 4, page=p), kernel=kernel) for p in (1, 16, 64, 784)]
    assert all(same_bits(found[0][0], out) and same_bits(found[0][1], lse) for out, lse in found)


def test_eight_key_value_heads(kernel):
    inputs = formula_inputs([256], 16, 4, causal=True, kv_heads=8)
    out, lse = attend(inputs, kernel=kernel)
    assert close_out(out[0, 0, 0, 0], 0.057784971)
    assert close_out(out[0, 3, 15, 511], 0.200826188)
    assert close_lse(lse[0, 0, 0], 5.691674347)
    assert close_lse(lse[0, 15, 3], 5.763806244)
    assert agrees_with_float64(inputs, out, lse)


def test_a_thousand_query_tokens(device):
    lens = torch.tensor([256], dtype=torch.int32, device=device)
    metadata, _ = flashmla.get_mla_metadata(lens, 1024 * 16 // 8, 8)
    assert metadata.shape[0] >= 1
    dims = small_dims(device, (64, 64))
    inputs = formula_inputs([256], 16, 1024, causal=True, kv_heads=8, dims=dims)
    assert agrees_with_float64(inputs, *attend(inputs, kernel=device))


def test_a_plan_made_for_one_query_token_serves_two(device):
    inputs = formula_inputs([130, 97], 16, 2, causal=True)
    plan = flashmla.get_mla_metadata(inputs.cache_seqlens.to(device), 16, 1)
    out, lse = attend(inputs, plan, device)
    assert close_out(out[0, 0, 0, 0], 0.067479667)
    assert close_lse(lse[0, 0, 0], 5.033318953)


def test_one_plan_serves_61_layers_and_is_not_written(device):
    base = formula_inputs([97, 700, 0, 64], 16)
    plan = flashmla.get_mla_metadata(base.cache_seqlens.to(device), 16, 1)
    kept = [tensor.clone() for tensor in plan]
    generator = torch.Generator().manual_seed(0)
    for _ in range(61):
        base.q = torch.randn(base.q.shape, generator=generator).bfloat16()
        noise = torch.randn(base.k_cache.shape, generator=generator).bfloat16()
        base.k_cache = torch.where(base.k_cache.isnan(), base.k_cache, noise)
        fresh = flashmla.get_mla_metadata(base.cache_seqlens.to(device), 16, 1)
        found, expected = attend(base, plan, device), attend(base, fresh, device)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    assert all(same_bits(a, b) for a, b in zip(plan, kept, strict=True))


def attend_shard(
    q: torch.Tensor,
    tokens: torch.Tensor,
    device: str,
    scale: float | None = None,
    visible_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (1, tokens, heads, 576) over the tokens (length, 1, 576) of one shard."""
    cache, table = paged([tokens], 64, torch.bfloat16)
    lens = torch.tensor([len(tokens)], dtype=torch.int32)
    inputs = cases.Inputs(q, cache, table, lens, 512, scale, False, visible_lens)
    return attend(inputs, kernel=device)


def merge(
    parts: list[tuple[torch.Tensor, torch.Tensor]], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = flashmla.merge_attention_states(
        [out.to(device) for out, _ in parts], [lse.to(device) for _, lse in parts]
    )
    return out.cpu(), lse.cpu()


def test_lse_is_a_natural_logarithm(device):
    keys = formula_k(0, 10)
    q = torch.zeros(1, 1, 1, 576, dtype=torch.bfloat16)
    parts = [attend_shard(q, shard, device) for shard in (keys[:2], keys[2:])]
    assert close_lse(parts[0][1], 0.693147181)
    assert close_lse(parts[1][1], 2.079441542)
    out, lse = merge(parts, device)
    assert close_lse(lse, 2.302585093)
    assert close_out(out[0, 0, 0, 0], -0.2640625)


def test_a_row_cut_in_two_merges_to_the_whole(device):
    keys, queries = formula_k(0, 257), formula_q(0, 1, 16)[None].bfloat16()
    parts = [attend_shard(queries, shard, device, 0.25) for shard in (keys[:200], keys[200:])]
    assert close_lse(parts[0][1][0, 0, 0], 5.473693637)
    assert close_lse(parts[1][1][0, 0, 0], 4.186993045)
    assert close_out(parts[0][0][0, 0, 0, 0], 0.049653768)
    assert close_out(parts[1][0][0, 0, 0, 0], 0.073093265)
    out, lse = merge(parts, device)
    assert close_out(out[0, 0, 0, 0], 0.054726351)
    assert close_lse(lse[0, 0, 0], 5.717565281)


def test_split_and_unsplit_rows_agree_on_lse(kernel):
    lens = [1, 64, 65536, 63, 1]
    dims = small_dims(kernel, (64, 64))
    inputs = formula_inputs(lens, 16, uniform=True, dims=dims)
    _, lse = attend(inputs, cases.plan_of(inputs, 9), kernel)
    expected = [0.0, 4.158883083, 11.090354889, 4.143134726, 0.0]
    for row, value in enumerate(expected):
        assert close_lse(lse[row].min(), value)
        assert close_lse(lse[row].max(), value)
        alone = formula_inputs([lens[row]], 16, uniform=True, dims=dims)
        assert close_lse(attend(alone, kernel=kernel)[1].max(), value)


def test_lse_is_of_batch_heads_and_query_tokens(kernel):
    inputs = formula_inputs([65, 200], 20, 2, causal=True)
    out, lse = attend(inputs, kernel=kernel)
    assert lse.shape == (2, 20, 2)
    assert lse.is_contiguous()
    assert close_lse(lse[0, 0, 0], 4.343651037)
    assert close_lse(lse[1, 19, 1], 5.530518064)
    assert float(lse.double().sum()) == pytest.approx(399.965443, abs=5e-3)
    assert close_out(out[1, 1, 19, 511], -0.077898378)


def test_tokens_dealt_round_robin_over_two_ranks(device):
    keys = formula_k(0, 7)
    q = torch.zeros(1, 2, 1, 576, dtype=torch.bfloat16)
    # Query 0 sees the global tokens 0 to 5, query 1 also 6.
    parts = [
        attend_shard(
            q,
            keys[rank::2],
            device,
            visible_lens=torch.tensor([[3, 4 - rank]], dtype=torch.int32),
        )
        for rank in range(2)
    ]
    out, lse = merge(parts, device)
    assert close_lse(lse[0, 0, 0], 1.791759469)
    assert close_lse(lse[0, 0, 1], 1.945910149)
    for row, expected in enumerate(
        [[-0.25390625, -0.16796875, -0.08203125], [-0.109375, -0.0234375, 0.0625]]
    ):
        assert (out[0, row, 0, :3].float() - torch.tensor(expected)).abs().max() < 2e-3


def test_long_rows_with_two_query_tokens(device):
    one = formula_inputs([32768], 8, 2, causal=True, uniform=True)
    one.q = one.q.expand(128, -1, -1, -1)
    one.block_table = one.block_table.expand(128, -1)
    one.cache_seqlens = one.cache_seqlens.expand(128)
    out, lse = attend(one, kernel=device)
    assert out.isfinite().all()
    assert (lse[:, :, 0] - math.log(32767)).abs().max() < 2e-4
    assert (lse[:, :, 1] - math.log(32768)).abs().max() < 2e-4


def test_more_query_tokens_than_cached_ones(kernel):
    inputs = formula_inputs([2], 16, 4, causal=True)
    out, lse = attend(inputs, kernel=kernel)
    assert (out[0, :2] == 0).all()
    assert int((lse == math.inf).sum()) == 32
    assert close_lse(lse[0, 15, 3], 0.125817595)
    assert close_out(out[0, 3, 15, 511], 0.000779202)
    assert float(out.double().abs().sum()) == pytest.approx(7344.4847, rel=2e-3)


def test_more_query_tokens_than_cached_ones_among_other_lengths(kernel):
    inputs = formula_inputs([2, 0, 4, 130], 16, 4, causal=True)
    assert agrees_with_float64(inputs, *attend(inputs, kernel=kernel))


def test_ragged_queries_by_padding_equal_each_alone(kernel):
    lens, real = [130, 97, 64, 5], [4, 1, 3, 2]
    inputs = formula_inputs(lens, 8, 4, causal=True)
    out, lse = attend(inputs, kernel=kernel)
    for row, (length, count) in enumerate(zip(lens, real, strict=True)):
        alone = cases.Inputs(**vars(inputs))
        alone.q = inputs.q[row : row + 1, 4 - count :]
        alone.block_table = inputs.block_table[row : row + 1]
        alone.cache_seqlens = torch.tensor([length], dtype=torch.int32)
        expected_out, expected_lse = attend(alone, kernel=kernel)
        assert (out[row, 4 - count :].float() - expected_out[0].float()).abs().max() <= OUT
        assert (lse[row, :, 4 - count :] - expected_lse[0]).abs().max() <= 1e-4


@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 16, 32, 64, 128])
def test_any_number_of_heads(kernel, heads):
    inputs = formula_inputs([65, 200], heads, 2, causal=True)
    out, lse = attend(inputs, kernel=kernel)
    assert close_lse(lse[0, 0, 0], 4.343651037)
    expected = {1: (0, -0.242167418), 5: (4, 0.125568429)}
    if heads in expected:
        head, value = expected[heads]
        assert close_out(out[1, 1, head, 511], value)
    assert agrees_with_float64(inputs, out, lse)


@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8, 16, 32, 64, 128])
def test_nothing_is_written_around_the_results(kernel, heads):
    inputs = formula_inputs([65, 200], heads, 2, causal=True)
    around = torch.full((4, 2, heads, 512), 7.0, dtype=torch.bfloat16, device=device_of(kernel))
    around_lse = torch.full((4, heads, 2), 7.0, device=device_of(kernel))
    attend_into(inputs, cases.plan_of(inputs, 3), kernel, around[1:3], around_lse[1:3])
    assert agrees_with_float64(inputs, around[1:3].cpu(), around_lse[1:3].cpu())
    for guard in (around[0], around[3], around_lse[0], around_lse[3]):
        assert (guard == 7.0).all()


@pytest.mark.parametrize("dims", [(320, 256), (576, 512)])
def test_bitwise_repeatable_for_every_number_of_parts(kernel, dims):
    inputs = formula_inputs([129], 16, 2, causal=True, dims=dims)
    splits = [cases.plan_of(inputs, parts) for parts in (1, 2, 3)]
    for threads in (1, 3, 8):
        torch.set_num_threads(threads)
        splits.append(library_plan(inputs))
    torch.set_num_threads(2)
    for plan in splits:
        first = attend(inputs, plan, kernel)
        if dims == (320, 256):
            assert close_out(first[0][0, 0, 0, 0], -0.057295854)
            assert close_out(first[0][0, 1, 15, 255], -0.048021606)
            assert close_lse(first[1][0, 15, 1], 5.360001213)
        for _ in range(10):
            scratch = torch.full((1 << 20,), math.nan)  # what a later workspace may be made of
            del scratch
            again = attend(inputs, plan, kernel)
            assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))


def test_any_number_of_parts_is_bitwise_repeatable_and_right(kernel):
    inputs = formula_inputs([1000], 16, dims=small_dims(kernel, (192, 128)))
    for parts in range(1, 17):
        plan = cases.plan_of(inputs, parts)
        out, lse = attend(inputs, plan, kernel)
        assert agrees_with_float64(inputs, out, lse)
        for _ in range(20):
            again = attend(inputs, plan, kernel)
            assert same_bits(again[0], out)
            assert same_bits(again[1], lse)


def test_peaked_scores(kernel):
    out, lse = attend(formula_inputs([777], 16, scale=4.0), kernel=kernel)
    assert close_out(out[0, 0, 0, 0], -0.008826970)
    assert close_out(out[0, 0, 15, 511], 0.361337963)
    assert close_lse(lse[0, 0, 0], 25.052010)
    assert close_lse(lse[0, 15, 0], 30.760799)


def test_slices_of_a_larger_pool(kernel):
    # On the device from the start: a slice that is moved is a tensor of its own.
    inputs = formula_inputs([97, 300], 16).to(device_of(kernel))
    expected = attend(inputs, kernel=kernel)
    cache = inputs.k_cache
    layers = cache.new_full((cache.shape[0], 3, 64, 1, 576), math.nan)
    for layer in range(3):
        layers[:, layer] = cache
        inputs.k_cache = layers[:, layer]
        found = attend(inputs, kernel=kernel)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        layers[:, layer] = math.nan
    wide = cache.new_full((cache.shape[0], 64, 1, 640), math.nan)
    wide[..., :576] = cache
    inputs.k_cache = wide[..., :576]
    found = attend(inputs, kernel=kernel)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("others", [1, 7, 31, 127])
def test_a_row_of_one_part_has_the_bits_that_it_has_alone(device, others):
    lens = [300] + [(i * 37) % 211 for i in range(others)]
    inputs = formula_inputs(lens, 4, dims=small_dims(device, (192, 128)))
    batch = len(lens)
    last = 2**31 - 1
    metadata = torch.tensor([[0, 0, batch - 1, last, 0, 0, 0, 0]], dtype=torch.int32)
    one_part = (metadata, torch.zeros(batch + 1, dtype=torch.int32))
    out, lse = attend(inputs, one_part, device)
    alone = cases.Inputs(**vars(inputs))
    alone.q, alone.block_table = inputs.q[:1], inputs.block_table[:1]
    alone.cache_seqlens = inputs.cache_seqlens[:1]
    expected = attend(alone, cases.plan_of(alone, 1), device)
    assert same_bits(out[:1], expected[0])
    assert same_bits(lse[:1], expected[1])
    # By the library's own plan rows may be split, which rounds differently, but no more than that.
    found, _ = attend(inputs, kernel=device)
    assert (found[:1].float() - expected[0].float()).abs().max() <= OUT


@pytest.mark.parametrize(
    ("scale", "out_value", "lse_value"),
    [
        (None, 0.007170921, 5.554368429),
        (192**-0.5, 0.015538992, 5.563952814),
        (192**-0.5 * (0.1 * math.log(40) + 1) ** 2, None, None),
        (0.0, None, math.log(257)),
    ],
)
def test_any_softmax_scale_and_its_default(kernel, scale, out_value, lse_value):
    inputs = formula_inputs([257], 16, scale=scale)
    out, lse = attend(inputs, kernel=kernel)
    assert agrees_with_float64(inputs, out, lse)
    if out_value is not None:
        assert close_out(out[0, 0, 0, 0], out_value)
    if lse_value is not None:
        assert close_lse(lse[0, 0, 0], lse_value)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_fewer_and_more_than_the_rows(threads):
    torch.set_num_threads(threads)
    inputs = formula_inputs([0, 1, 64, 0], 128)
    assert agrees_with_float64(inputs, *attend(inputs))
    inputs = formula_inputs([2], 16, 4, causal=True)
    assert agrees_with_float64(inputs, *attend(inputs))


def test_nan_in_a_valid_row_stays_in_that_row(kernel):
    inputs = formula_inputs([100, 130, 64], 16)
    expected = attend(inputs, kernel=kernel)
    block = inputs.block_table[1, 1].long()
    inputs.k_cache[block, 5, 0, 17] = math.nan
    out, lse = attend(inputs, kernel=kernel)
    assert out[1].isnan().any()
    assert lse[1].isnan().all()
    for row in (0, 2):
        assert same_bits(out[row], expected[0][row])
        assert same_bits(lse[row], expected[1][row])
