"""The operator against float64: the case list on every kernel, and what the definition implies."""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import KERNELS
from hypothesis import given
from hypothesis import strategies as st
from inputs import (
    attend,
    attend_into,
    call,
    device_of,
    formula_inputs,
    formula_k,
    library_plan,
    same_bits,
)

import flashmla
from flashmla import cases, reference
from flashmla.cli.check import limits

CASES = cases.load("dense") + cases.load("edge")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kernel_is_within_the_bounds_on_every_case(case, dtype):
    inputs = cases.make_inputs(case, dtype)
    expected = inputs.expected()
    bound = limits(case, dtype)
    for kernel in KERNELS:
        if kernel.dtype != dtype or kernel.instruction_set == "reference":
            continue
        for plan in (library_plan(inputs), *(cases.plan_of(inputs, n) for n in case.parts)):
            out, lse = attend(inputs, plan, kernel)
            assert (out.dtype, lse.dtype) == (dtype, torch.float32)
            out_error, lse_error = reference.errors(out, lse, *expected)
            assert out_error <= bound.out_relative, kernel.name
            assert lse_error <= bound.lse_absolute, kernel.name
            # One query is fewer numbers than the bound speaks of, and so scatters more.
            assert reference.worst_query_error(out, expected[0]) <= 3 * bound.out_relative


@given(
    lens=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    dims=st.sampled_from([(64, 64), (96, 64), (128, 128), (576, 512)]),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.integers(1, 20),
    queries=st.integers(1, 4),
    page=st.sampled_from([1, 3, 16, 64, 100]),
    causal=st.booleans(),
    parts=st.integers(1, 7),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_any_shape_is_within_the_bounds(
    lens, dims, kv_heads, group, queries, page, causal, parts, dtype
):
    case = cases.Case(
        name=f"{lens}{dims}{kv_heads}{group}{queries}",
        lens=tuple(lens),
        head_dim=dims[0],
        head_dim_v=dims[1],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        seq_len_q=queries,
        page=page,
        causal=causal,
    )
    inputs = cases.make_inputs(case, dtype)
    found = attend(inputs, cases.plan_of(inputs, parts))
    out_error, lse_error = reference.errors(*found, *inputs.expected())
    bound = reference.TOLERANCES[dtype]
    # On so few numbers the norm is not yet an average; the bound doubles.
    assert out_error <= 2 * bound.out_relative
    assert lse_error <= bound.lse_absolute


@given(data=st.data(), queries=st.integers(1, 5), length=st.integers(0, 200))
def test_visible_lens_is_any_non_decreasing_bound(data, queries, length):
    bounds = sorted(data.draw(st.integers(0, length)) for _ in range(queries))
    case = cases.Case("visible", (length,), 96, 64, 3, seq_len_q=queries, visible=(tuple(bounds),))
    for kernel in KERNELS:
        inputs = cases.make_inputs(case, kernel.dtype)
        found = attend(inputs, cases.plan_of(inputs, 2), kernel)
        out_error, lse_error = reference.errors(*found, *inputs.expected())
        bound = reference.TOLERANCES[kernel.dtype]
        assert out_error <= 2 * bound.out_relative, kernel.name
        assert lse_error <= bound.lse_absolute, kernel.name


def test_causal_is_a_special_case_of_visible_lens(kernel):
    inputs = formula_inputs([130, 2, 0], 16, 4, causal=True)
    expected = attend(inputs, kernel=kernel)
    steps = torch.arange(4, dtype=torch.int32)
    inputs.visible_lens = (inputs.cache_seqlens[:, None] - 4 + steps + 1).clamp_min(0)
    inputs.causal = False
    found = attend(inputs, kernel=kernel)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_token_that_a_query_does_not_see_never_touches_it(kernel, poison):
    inputs = formula_inputs([130], 20, 3, causal=True)
    expected = attend(inputs, kernel=kernel)
    last = inputs.block_table[0, 2].long()
    inputs.k_cache[last, 1] = poison  # token 129, which only the last query sees
    out, lse = attend(inputs, kernel=kernel)
    if kernel != "cuda":  # where the queries of a row share products: docs/numerics.md
        assert same_bits(out[:, :2], expected[0][:, :2])
    assert same_bits(lse[:, :, :2], expected[1][:, :, :2])
    assert out[:, 2].isnan().any()


def test_nan_in_one_query_stays_there(kernel):
    inputs = formula_inputs([130, 70], 20, 2)
    expected = attend(inputs, kernel=kernel)
    inputs.q[0, 1, 7, 3] = math.nan
    out, lse = attend(inputs, kernel=kernel)
    assert out[0, 1, 7].isnan().all()
    assert lse[0, 7, 1].isnan()
    out[0, 1, 7], lse[0, 7, 1] = expected[0][0, 1, 7], expected[1][0, 7, 1]
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


@pytest.mark.parametrize("direction", [1, -1])
@pytest.mark.parametrize("reach", [50.0, 1e4])
def test_scores_that_grow_or_fall_along_the_row_do_not_overflow(kernel, direction, reach):
    length, heads = 700, 20
    ramp = torch.linspace(0, 1, length)[:: direction if direction == 1 else 1]
    ramp = ramp.flip(0) if direction == -1 else ramp
    inputs = formula_inputs([length], heads, scale=1.0)
    keys = torch.randn(length, 576, generator=torch.Generator().manual_seed(0))
    keys[:, 512] = ramp
    flat = keys.bfloat16()[:, None]
    for page in range(-(-length // 64)):
        tokens = flat[page * 64 : (page + 1) * 64]
        inputs.k_cache[inputs.block_table[0, page].long(), : len(tokens)] = tokens
    inputs.q.zero_()
    inputs.q[..., 512] = reach
    out, lse = attend(inputs, kernel=kernel)
    expected_out, expected_lse = inputs.expected()
    assert out.isfinite().all()
    assert float((out.double() - expected_out).norm() / expected_out.norm()) < 5e-3
    assert float((lse.double() - expected_lse).abs().max()) <= 2e-5 + reach * 2.0**-20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scores_of_ten_thousand_in_any_order_do_not_overflow(dtype):
    case = cases.Case("large", (400, 65), 192, 128, 20, scale=1.0, q_amplitude=200.0)
    inputs = cases.make_inputs(case, dtype)
    expected_out, expected_lse = inputs.expected()
    assert expected_lse.abs().max() > 5e3
    for kernel in KERNELS:
        if kernel.dtype == dtype:
            out, lse = attend(inputs, cases.plan_of(inputs, 3), kernel)
            out_error, lse_error = reference.errors(out, lse, expected_out, expected_lse)
            # A score of 1e4 carries three digits after the point in float32.
            assert lse_error <= 1e4 * 2.0**-21, kernel.name
            assert out_error <= 1e-2, kernel.name


@pytest.mark.parametrize("scale", [1e8, -2e8, 1e36])
def test_of_enormous_scores_the_largest_takes_all(scale):
    case = cases.Case("enormous", (40, 130), 64, 64, 40, scale=scale)
    for kernel in KERNELS:
        inputs = cases.make_inputs(case, kernel.dtype)
        expected_out, expected_lse = inputs.expected()
        for parts in (1, 3):
            out, lse = attend(inputs, cases.plan_of(inputs, parts), kernel)
            assert torch.allclose(out.double(), expected_out, rtol=2.0**-7), kernel.name
            assert torch.allclose(lse.double(), expected_lse, rtol=2.0**-20), kernel.name


@pytest.mark.parametrize("scale", [2.0**-149, 3 * 2.0**-149, 2.0**-130])
def test_a_subnormal_scale_is_taken_as_it_is(scale):
    case = cases.Case("subnormal", (70,), 64, 64, 3, scale=scale)
    for kernel in KERNELS:
        if kernel.dtype == torch.float16:
            continue  # whose largest products such a scale takes to nothing
        inputs = cases.make_inputs(case, kernel.dtype)
        inputs.q *= 2.0**100
        inputs.k_cache *= 1 / (scale * 2.0**100)
        found = attend(inputs, cases.plan_of(inputs, 2), kernel)
        out_error, lse_error = reference.errors(*found, *inputs.expected())
        bound = reference.TOLERANCES[kernel.dtype]
        assert out_error <= 2 * bound.out_relative, kernel.name
        assert lse_error <= 2 * bound.lse_absolute, kernel.name


def test_a_scale_that_no_float32_is_near_is_not_rounded():
    scale = 1e-45
    case = cases.Case("between", (70, 3), 64, 64, 3, scale=scale)
    for kernel in KERNELS:
        if kernel.dtype == torch.float16 or kernel.instruction_set == "amx":
            continue  # AMX keeps the scale in float32
        inputs = cases.make_inputs(case, kernel.dtype)
        inputs.q *= 2.0**100
        inputs.k_cache *= 2.0**49
        found = attend(inputs, cases.plan_of(inputs, 2), kernel)
        out_error, lse_error = reference.errors(*found, *inputs.expected())
        bound = reference.TOLERANCES[kernel.dtype]
        assert out_error <= 2 * bound.out_relative, kernel.name
        assert lse_error <= 2 * bound.lse_absolute, kernel.name


@pytest.mark.parametrize("key", [2.0**-60, 2.0**-114])
def test_scales_past_the_range_of_float32_give_its_largest_number(key):
    largest = torch.finfo(torch.float32).max
    for kernel in KERNELS:
        if kernel.dtype == torch.float16:
            continue  # whose largest numbers are too small
        inputs = cases.make_inputs(
            cases.Case("past", (5,), 64, 64, 2, scale=1.5 * 2.0**127), kernel.dtype
        )
        inputs.q.zero_()
        inputs.q[..., 0] = 2.0**127
        inputs.k_cache.fill_(2.0**-60)
        inputs.k_cache[..., 0] = key
        out, lse = attend(inputs, cases.plan_of(inputs, 1), kernel)
        # AMX keeps scores in units of log 2.
        rtol = 0.32 if kernel.instruction_set == "amx" else 1e-6
        assert torch.allclose(lse, torch.tensor(largest), rtol=rtol), kernel.name
        assert (out[..., 1:] == 2.0**-60).all(), kernel.name


@pytest.mark.parametrize("scale", [0.25, 0.1, 1e-38])
def test_a_key_may_mask_its_token_by_an_infinity(scale):
    for kernel in KERNELS:
        inputs = cases.make_inputs(cases.Case("mask", (70,), 96, 64, 3, scale=scale), kernel.dtype)
        inputs.q[..., 95] = 1.0
        plan = cases.plan_of(inputs, 1)
        blocks, page = inputs.block_table[0].long(), inputs.k_cache.shape[1]
        for token in (0, 37, 69):
            inputs.k_cache[blocks[token // page], token % page, :, 95] = -math.inf
        out_error, lse_error = reference.errors(*attend(inputs, plan, kernel), *inputs.expected())
        bound = reference.TOLERANCES[kernel.dtype]
        assert out_error <= 2 * bound.out_relative, kernel.name
        assert lse_error <= 2 * bound.lse_absolute, kernel.name


@pytest.mark.parametrize("scale", [None, 192**-0.5, 0.135233779])
def test_float32_keeps_its_bound_with_the_scales_of_models(scale):
    case = cases.Case("model", (300,), 576, 512, 128, seq_len_q=4, scale=scale)
    inputs = cases.make_inputs(case, torch.float32)
    expected = inputs.expected()
    for kernel in KERNELS:
        if kernel.dtype == torch.float32:
            _, lse_error = reference.errors(
                *attend(inputs, cases.plan_of(inputs, 1), kernel), *expected
            )
            assert lse_error <= reference.TOLERANCES[torch.float32].lse_absolute, kernel.name


# With a scale of 1e7 one token has all of the weight, which a kernel may have rounded.
@pytest.mark.parametrize("scale", [None, 1e7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_mean_of_the_largest_numbers_is_finite(dtype, scale):
    largest = torch.finfo(dtype).max
    lens = (127, 2, 63, 300)
    case = cases.Case("largest", lens, 96, 64, 40, seq_len_q=2, causal=True, scale=scale)
    inputs = cases.make_inputs(case, dtype)
    # The weights come from the components that are no value's.
    inputs.q[..., :64] = 0
    signs = torch.ones(64).to(dtype)
    signs[1::2] = -1
    values = inputs.k_cache[..., :64]
    values[...] = torch.where(values.isnan(), math.nan, largest * signs)
    for kernel in KERNELS:
        if kernel.dtype == dtype:
            for parts in (1, 3, 5):
                out, _ = attend(inputs, cases.plan_of(inputs, parts), kernel)
                assert out.isfinite().all(), kernel.name
                assert torch.allclose(out.float() / largest, signs.float()), kernel.name


@pytest.mark.parametrize("heads", [1, 5])
def test_a_long_row_of_like_tokens_keeps_its_precision(heads):
    """Sums that grow along a row must not lose what is added to them."""
    length, queries, dim = 1 << 18, 4, 64
    generator = torch.Generator().manual_seed(1)
    keys = torch.rand(2, dim, generator=generator) + 0.5
    q = torch.randn(1, queries, heads, dim, generator=generator)
    q += 3 * (keys[1] - keys[0])  # the scores of the second half are larger
    # Every page is one of two tokens, 64 times.
    pages = length // 64
    table = torch.arange(pages, dtype=torch.int32)[None] // (pages // 2)
    lengths = torch.tensor([length], dtype=torch.int32)
    visible = torch.tensor([[0, 100, length // 2 + 1, length]], dtype=torch.int32)
    plan = torch.tensor([[0, 0, 0, pages, 0, 0, 0, 0]], dtype=torch.int32), lengths.new_zeros(2)
    counts = torch.stack([visible[0].clamp(max=length // 2), (visible[0] - length // 2).relu()])
    scores = (q[0].double() @ keys.double().T) * dim**-0.5
    weights = scores.exp() * counts.T[:, None].double()
    expected = (weights / weights.sum(-1, keepdim=True)) @ keys.double()
    for kernel in KERNELS:
        if kernel.dtype != torch.float32 or kernel.instruction_set == "reference":
            continue
        cache = keys[:, None, None].expand(2, 64, 1, dim)
        inputs = cases.Inputs(q, cache, table, lengths, dim, None, False, visible)
        out, lse = attend(inputs, plan, kernel)
        assert (out[0, 0] == 0).all()
        assert (lse[0, :, 0] == math.inf).all()
        error = (out[0].double() - expected)[1:].abs() / expected[1:]
        assert error.max() <= 5e-6, kernel.name
        logs = weights[1:].sum(-1).log()
        assert (lse[0].T[1:].double() - logs).abs().max() <= 2e-6, kernel.name


def test_strided_arguments_and_results_change_no_bit(kernel):
    inputs = formula_inputs([97, 300, 0], 16, 2, causal=True)
    device = device_of(kernel)
    plan = library_plan(inputs)
    expected = attend(inputs, plan, kernel)
    # Moved first: a view that is moved keeps neither its strides nor its place in memory.
    inputs = inputs.to(device)
    spread = torch.full((3, 2, 2, 16, 608), math.nan, dtype=torch.bfloat16, device=device)
    spread[:, 1, :, :, 16:592] = inputs.q
    inputs.q = spread[:, 1, :, :, 16:592]
    lens = torch.full((3, 5), 7, dtype=torch.int32, device=device)
    lens[:, 2] = inputs.cache_seqlens
    inputs.cache_seqlens = lens[:, 2]
    inputs.block_table = inputs.block_table.t().contiguous().t()
    found = attend(inputs, plan, kernel)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))

    around = torch.full((16, 3, 2, 700), 9.0, dtype=torch.bfloat16, device=device)
    out = around.permute(1, 2, 0, 3)[..., :512]
    lse = torch.full((2, 3, 16), 9.0, device=device).permute(1, 2, 0)
    attend_into(inputs, plan, kernel, out, lse)
    assert same_bits(out.cpu(), expected[0])
    assert same_bits(lse.cpu(), expected[1])
    assert (around[..., 512:] == 9.0).all()


def test_preallocated_results_are_what_is_returned():
    inputs = formula_inputs([97, 300, 0], 16, 2, causal=True)
    plan = library_plan(inputs)
    expected = attend(inputs, plan)
    out, lse = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    returned = call(inputs, plan, out=out, softmax_lse=lse)
    assert returned[0] is out
    assert returned[1] is lse
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


def test_results_may_lie_in_the_gaps_of_an_argument():
    inputs = formula_inputs([97, 300, 0], 16, 2, causal=True)
    plan = library_plan(inputs)
    expected = attend(inputs, plan)
    fused = torch.zeros(3, 2, 16, 576 + 512, dtype=torch.bfloat16)
    fused[..., :576] = inputs.q
    inputs.q, out = fused[..., :576], fused[..., 576:]
    lse = torch.empty_like(expected[1])
    attend_into(inputs, plan, "cpu", out, lse)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose rows begin at odd elements: one further than any alignment."""
    spread = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 1), math.nan, dtype=tensor.dtype)
    spread[..., 1:] = tensor
    return spread[..., 1:]


def test_no_alignment_is_asked_for_and_none_changes_a_bit(kernel):
    if kernel == "cuda":
        pytest.skip("the copy engine of the GPU asks for multiples of 16 bytes: test_cuda.py")
    inputs = formula_inputs([97, 130], 20, 2, causal=True, dims=(320, 256))
    expected = attend(inputs, kernel=kernel)
    inputs.q, inputs.k_cache = misaligned(inputs.q), misaligned(inputs.k_cache)
    found = attend(inputs, kernel=kernel)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@given(
    lens=st.lists(st.integers(0, 400), min_size=1, max_size=5),
    heads=st.integers(1, 40),
    queries=st.integers(1, 6),
    page=st.sampled_from([1, 5, 16, 64, 97]),
    causal=st.booleans(),
    parts=st.integers(1, 5),
)
def test_uniform_weights_count_the_visible_tokens(lens, heads, queries, page, causal, parts):
    inputs = formula_inputs(
        lens, heads, queries, page, causal, dims=(64, 64), uniform=True, unused=1000.0
    )
    expected = torch.tensor(lens).view(-1, 1, 1).expand(-1, heads, queries).double()
    if causal:
        expected = (expected - queries + 1 + torch.arange(queries)).clamp_min(0)
    expected = expected.log().abs()  # no token: -inf, which is told as +inf
    for kernel in KERNELS:
        if kernel.dtype == torch.bfloat16:
            _, lse = attend(inputs, cases.plan_of(inputs, parts), kernel)
            assert torch.allclose(lse.double(), expected, rtol=0, atol=2e-5), kernel.name


def test_scores_come_from_all_components_and_values_from_the_first(kernel):
    inputs = formula_inputs([300], 16)
    inputs.q.zero_()
    inputs.q[..., 575] = 8.0  # a component that no value holds
    out, lse = attend(inputs, kernel=kernel)
    keys = formula_k(0, 300)[:, 0].double()
    weights = (0.25 * 8.0 * keys[:, 575]).softmax(0)
    assert (out[0, 0].double() - weights @ keys[:, :512]).abs().max() <= 2**-7
    assert (lse - (0.25 * 8.0 * keys[:, 575]).logsumexp(0)).abs().max() <= 1e-4


def test_large_values_do_not_overflow(kernel):
    inputs = formula_inputs([500], 16)
    inputs.k_cache *= 2.0**100
    inputs.q *= 2.0**-100
    plain = formula_inputs([500], 16)
    out, lse = attend(inputs, kernel=kernel)
    expected_out, expected_lse = attend(plain, kernel=kernel)
    assert (out.double() * 2.0**-100 - expected_out.double()).abs().max() <= 2**-7
    assert (lse - expected_lse).abs().max() <= 1e-4


def test_writes_nothing_but_its_results_and_changes_no_state():
    inputs = formula_inputs([97, 300, 0], 16, 2)
    plan = library_plan(inputs)
    given = [*(v for v in vars(inputs).values() if torch.is_tensor(v)), *plan]
    kept = [tensor.clone() for tensor in given]
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    attend(inputs, plan)
    workers = set(os.listdir("/proc/self/task"))
    for _ in range(5):
        attend(inputs, plan)
    assert all(same_bits(a, b) for a, b in zip(given, kept, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads
    assert set(os.listdir("/proc/self/task")) <= workers
    # Floating point still rounds to subnormal numbers, neither them nor results to zero.
    assert (torch.full((64,), 1e-39) * 0.5 > 0).all()


@pytest.mark.parametrize("kind", [np.int64, torch.tensor], ids=["numpy", "tensor"])
def test_any_integer_may_be_head_dim_v(kind):
    inputs = formula_inputs([97], 4)
    plan = library_plan(inputs)
    expected = attend(inputs, plan)
    arguments = (inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, kind(512))
    empty = {"out": torch.empty_like(expected[0]), "softmax_lse": torch.empty_like(expected[1])}
    for names in ([], ["out"], ["softmax_lse"], ["out", "softmax_lse"]):
        results = {name: empty[name] for name in names}
        found = flashmla.flash_mla_with_kvcache(*arguments, *plan, 0.25, **results)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["out", "softmax_lse"])
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("by", ["the function", "the operator", "the operator, without gradients"])
def test_a_result_that_a_backward_pass_needs_is_not_overwritten_in_silence(name, is_view, by):
    inputs = formula_inputs([97], 4)
    plan = library_plan(inputs)
    expected = dict(zip(("out", "softmax_lse"), attend(inputs, plan), strict=True))
    saved = torch.ones_like(expected[name])
    product = (saved * torch.ones_like(saved, requires_grad=True)).sum()
    given = saved[:] if is_view else saved
    if by == "the function":
        call(inputs, plan, **{name: given})
    else:
        with torch.set_grad_enabled("without" not in by):
            results = {key: torch.empty_like(value) for key, value in expected.items()}
            attend_into(inputs, plan, "cpu", *(results | {name: given}).values())
    assert same_bits(saved, expected[name])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_results_of_inference_mode_may_be_preallocated():
    inputs = formula_inputs([97], 4)
    plan = library_plan(inputs)
    expected = attend(inputs, plan)
    with torch.inference_mode():
        results = [torch.empty_like(tensor) for tensor in expected]
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        for tensor in results:
            tensor.data.zero_()
        with mode():
            attend_into(inputs, plan, "cpu", *results)
            call(inputs, plan, out=results[0], softmax_lse=results[1])
        assert all(map(same_bits, results, expected))


def test_half_of_the_results_may_be_preallocated():
    inputs = formula_inputs([97], 4)
    plan = library_plan(inputs)
    expected = attend(inputs, plan)
    arguments = (inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512, *plan)
    out = torch.empty_like(expected[0])
    found = flashmla.flash_mla_with_kvcache(*arguments, 0.25, out=out)
    assert found[0] is out
    assert same_bits(found[1], expected[1])
    lse = torch.empty_like(expected[1])
    found = flashmla.flash_mla_with_kvcache(*arguments, 0.25, softmax_lse=lse)
    assert found[1] is lse
    assert same_bits(found[0], expected[0])


def test_the_number_of_threads_changes_no_bit(kernel):
    inputs = formula_inputs([700, 3, 130, 0, 64], 40, 3, causal=True)
    plan = cases.plan_of(inputs, 6)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(attend(inputs, plan, kernel))
    assert all(same_bits(found[0][0], out) and same_bits(found[0][1], lse) for out, lse in found)


def test_calls_from_several_threads_equal_calls_in_turn():
    problems = [formula_inputs([60 + 37 * i, 5 * i], 8, 2, causal=True) for i in range(8)]
    expected = [attend(problem) for problem in problems]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            for found, wanted in zip(pool.map(attend, problems), expected, strict=True):
                assert all(same_bits(a, b) for a, b in zip(found, wanted, strict=True))
        # And all of them on one problem.
        one = [problems[7]] * 16
        for found in pool.map(attend, one):
            assert all(same_bits(a, b) for a, b in zip(found, expected[7], strict=True))


def test_batch_of_zero_rows():
    inputs = formula_inputs([10], 4)
    inputs.q, inputs.block_table = inputs.q[:0], inputs.block_table[:0]
    inputs.cache_seqlens = inputs.cache_seqlens[:0]
    out, lse = attend(inputs)
    assert out.shape == (0, 1, 4, 512)
    assert lse.shape == (0, 4, 1)
