"""merge_attention_states against one softmax over the union."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inputs import paged, same_bits

import flashmla
from flashmla import reference


def random_parts(
    parts: int, shape: tuple[int, int, int, int], dtype, seed: int = 0, device: str = "cpu"
):
    batch, queries, heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(parts, batch, queries, heads, dim, generator=generator).to(dtype)
    lses = torch.randn(parts, batch, heads, queries, generator=generator) * 5
    return outs.to(device), lses.to(device)


@given(
    parts=st.integers(1, 9),
    shape=st.tuples(
        st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 7, 64, 700])
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    empty=st.integers(0, 2**20),
    seed=st.integers(0, 1000),
)
def test_equals_one_softmax_over_the_union(parts, shape, dtype, empty, seed):
    outs, lses = random_parts(parts, shape, dtype, seed)
    # Some (part, query) pairs are empty, and then out may hold anything.
    generator = torch.Generator().manual_seed(empty)
    holes = torch.rand(lses.shape, generator=generator) < 0.3
    signs = torch.where(torch.rand(lses.shape, generator=generator) < 0.5, math.inf, -math.inf)
    lses = torch.where(holes, signs, lses)
    outs = outs.masked_fill(holes.transpose(-1, -2)[..., None], math.nan)
    out, lse = flashmla.merge_attention_states(outs, lses)
    expected_out, expected_lse = reference.merge(outs, lses)
    assert out.dtype == dtype
    assert (lse.isinf() == expected_lse.isinf()).all()
    assert (lse[lse.isinf()] > 0).all()
    finite = expected_lse.isfinite()
    assert torch.allclose(lse[finite].double(), expected_lse[finite], rtol=0, atol=2e-6)
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 4e-6}[dtype]
    assert torch.allclose(out.double(), expected_out, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("first", [True, False])
def test_an_empty_side_passes_the_other_through_bit_for_bit(device, dtype, sign, first):
    outs, lses = random_parts(1, (2, 3, 4, 64), dtype, device=device)
    outs[0, 0, 0, 0, :2] = torch.tensor([0.0, -0.0], dtype=dtype)
    nothing = torch.full_like(lses, sign * math.inf)
    pair = [(outs, lses), (torch.full_like(outs, math.nan), nothing)]
    pair = pair if first else pair[::-1]
    out, lse = flashmla.merge_attention_states(
        torch.cat([o for o, _ in pair]), torch.cat([part for _, part in pair])
    )
    assert same_bits(out, outs[0])
    assert same_bits(lse, lses[0])


def test_nothing_with_nothing_is_nothing(device):
    outs = torch.full((2, 1, 1, 3, 8), math.nan, device=device)
    lses = torch.tensor([math.inf, -math.inf], device=device)[:, None, None, None]
    lses = lses.expand(2, 1, 3, 1)
    out, lse = flashmla.merge_attention_states(outs, lses)
    assert (out == 0).all()
    assert (lse == math.inf).all()


def test_where_half_of_the_heads_are_empty_the_others_are_merged(device):
    outs, lses = random_parts(2, (1, 2, 4, 16), torch.float32, device=device)
    lses[1, :, :2] = math.inf
    out, lse = flashmla.merge_attention_states(outs, lses)
    assert same_bits(out[:, :, :2], outs[0, :, :, :2])
    assert same_bits(lse[:, :2], lses[0, :, :2])
    assert not same_bits(lse[:, 2:], lses[0, :, 2:])


def test_where_half_of_the_query_tokens_are_empty_the_others_are_merged(device):
    outs, lses = random_parts(2, (2, 4, 3, 16), torch.bfloat16, device=device)
    lses[0, :, :, ::2] = -math.inf
    out, lse = flashmla.merge_attention_states(outs, lses)
    assert same_bits(out[:, ::2], outs[1, :, ::2])
    assert same_bits(lse[..., ::2], lses[1, ..., ::2])
    assert out.isfinite().all()


@given(
    length=st.integers(1, 300),
    num_parts=st.integers(1, 6),
    queries=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_any_partition_of_a_row_merges_to_the_row(length, num_parts, queries, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, queries, 5, 64, generator=generator)
    keys = torch.randn(length, 1, 64, generator=generator)
    owner = torch.randint(0, num_parts, (length,), generator=generator)
    # Query t does not see the last queries - 1 - t tokens of the whole row, whoever holds them.
    seen = [length - queries + 1 + t for t in range(queries)]
    results = []
    for part in [torch.arange(length), *((owner == p).nonzero()[:, 0] for p in range(num_parts))]:
        lens = torch.tensor([len(part)], dtype=torch.int32)
        visible = torch.tensor([[int((part < n).sum()) for n in seen]], dtype=torch.int32)
        cache, table = paged([keys[part]], 16, torch.float32)
        plan = flashmla.get_mla_metadata(lens, 5 * queries, 1)
        results.append(
            flashmla.flash_mla_with_kvcache(q, cache, table, lens, 64, *plan, visible_lens=visible)
        )
    whole_out, whole_lse = results[0]
    out, lse = flashmla.merge_attention_states(
        [part_out for part_out, _ in results[1:]], [part_lse for _, part_lse in results[1:]]
    )
    assert torch.allclose(out, whole_out, rtol=0, atol=4e-6)
    assert torch.allclose(lse, whole_lse, rtol=0, atol=4e-6)


def test_lists_and_strided_tensors(device):
    outs, lses = random_parts(3, (2, 2, 4, 32), torch.float32, device=device)
    expected = flashmla.merge_attention_states(outs, lses)
    from_lists = flashmla.merge_attention_states(list(outs), list(lses))
    strided = flashmla.merge_attention_states(
        outs.permute(1, 0, 3, 2, 4).contiguous().permute(1, 0, 3, 2, 4),
        lses.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    )
    for found in (from_lists, strided):
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_large_logarithms_do_not_overflow(device):
    outs, lses = random_parts(2, (1, 1, 2, 8), torch.float32, device=device)
    for offset in (1e4, -1e4):
        out, lse = flashmla.merge_attention_states(outs, lses + offset)
        assert out.isfinite().all()
        assert lse.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_mean_of_the_largest_numbers_is_finite(dtype):
    outs, lses = random_parts(7, (4, 3, 5, 600), dtype)
    largest = torch.finfo(dtype).max
    outs = outs.sign() * largest
    assert flashmla.merge_attention_states(outs, lses)[0].isfinite().all()
    outs[:] = outs[0]
    out, _ = flashmla.merge_attention_states(outs, lses)
    assert torch.allclose(out.float() / largest, outs[0].float() / largest)
    # An infinity is no rounding.
    outs[3, 0, 0, 0, 0] = math.inf
    assert flashmla.merge_attention_states(outs, lses)[0][0, 0, 0, 0] == math.inf


def test_empty_batch():
    out, lse = flashmla.merge_attention_states(torch.zeros(2, 0, 1, 4, 8), torch.zeros(2, 0, 4, 1))
    assert out.shape == (0, 1, 4, 8)
    assert lse.shape == (0, 4, 1)


@pytest.mark.parametrize(
    ("outs", "lses", "message"),
    [
        (torch.zeros(0, 1, 1, 1, 8), torch.zeros(0, 1, 1, 1), "parts .* is 0"),
        (torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 1), "outs has 4 dimensions"),
        (torch.zeros(1, 2, 1, 4, 8), torch.zeros(1, 2, 1, 4), r"lses has shape \(1, 2, 1, 4\)"),
        (
            torch.zeros(1, 1, 1, 1, 8),
            torch.zeros(1, 1, 1, 1).double(),
            "lses has dtype Double; it must be float32$",
        ),
        (torch.zeros(1, 1, 1, 1, 8).bfloat16(), torch.zeros(1, 1, 1, 1).half(), "lses has dtype"),
        ([], [], "outs is an empty sequence"),
    ],
)
def test_bad_input_is_named(outs, lses, message):
    with pytest.raises(RuntimeError, match=message):
        flashmla.merge_attention_states(outs, lses)


def parts(*dtypes: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(1, 1, 1, 8, dtype=dtype) for dtype in dtypes]


@pytest.mark.parametrize(
    ("outs", "error", "message"),
    [
        (None, TypeError, "outs is None; it must be a torch.Tensor or a sequence of them"),
        ("ab", TypeError, "outs is of type str; it must be a torch.Tensor or a sequence"),
        ([*parts(torch.float32), None], TypeError, r"outs\[1\] is None; it must be a torch.Tensor"),
        (
            parts(torch.float32, torch.float16),
            RuntimeError,
            r"outs\[1\] is torch.float16 of shape .*; all parts must be as the first",
        ),
        (
            [*parts(torch.float32), torch.zeros(2, 1, 1, 8)],
            RuntimeError,
            r"outs\[1\] is torch.float32 of shape \(2, 1, 1, 8\)",
        ),
    ],
)
def test_what_is_no_sequence_of_like_tensors_is_named(outs, error, message):
    with pytest.raises(error, match=message):
        flashmla.merge_attention_states(outs, torch.zeros(2, 1, 1, 1))


def test_gradients_are_refused_rather_than_lost():
    outs, lses = random_parts(2, (1, 1, 2, 8), torch.float32)
    outs.requires_grad_()
    with pytest.raises(RuntimeError, match="outs requires gradients; merge_attention_states"):
        flashmla.merge_attention_states(outs, lses)
    with torch.no_grad():
        out, _ = flashmla.merge_attention_states(outs, lses)
    assert not out.requires_grad


# What torch itself uses for forward mode.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_forward_mode_derivatives_are_refused_rather_than_lost():
    outs, lses = random_parts(2, (1, 1, 2, 8), torch.float32)
    with pytest.raises(RuntimeError, match="outs has a tangent of forward-mode differentiation"):
        torch.func.jvp(
            lambda given: flashmla.merge_attention_states(given, lses)[0], (outs,), (outs,)
        )
