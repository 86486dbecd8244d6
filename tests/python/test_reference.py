"""The oracle and its comparison: what they must tell from a right result."""

from __future__ import annotations

import math

import pytest
import torch

from flashmla import reference


def results() -> tuple[torch.Tensor, torch.Tensor]:
    """out (2, 3, 4, 8) and lse (2, 4, 3), of which row 1, token 0 sees nothing."""
    generator = torch.Generator().manual_seed(1)
    out = torch.randn(2, 3, 4, 8, generator=generator, dtype=torch.float64)
    lse = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    out[1, 0], lse[1, :, 0] = 0.0, math.inf
    return out, lse


def test_a_right_result_has_no_error():
    out, lse = results()
    assert reference.errors(out, lse, out, lse) == (0.0, 0.0)
    assert reference.worst_query_error(out, out) == 0.0


def test_errors_are_of_the_whole_norm_and_of_the_worst_lse():
    expected, expected_lse = results()
    out, lse = expected * 1.25, expected_lse.clone()
    lse[0, 2, 1] += 0.5
    lse[1, 3, 2] -= 0.125
    assert reference.errors(out, lse, expected, expected_lse) == pytest.approx((0.25, 0.5))


def test_one_wrong_query_does_not_hide_among_right_ones():
    expected, _ = results()
    out = expected.clone()
    out[0, 1, 2] *= 3
    assert reference.worst_query_error(out, expected) == pytest.approx(2.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0, 0, 0), (1, 0, 3, 7)], ids=["seen", "nothing seen"])
def test_an_out_that_is_not_finite_is_no_small_error(value, place):
    expected, lse = results()
    out = expected.clone()
    out[place] = value
    assert reference.errors(out, lse, expected, lse) == (math.inf, math.inf)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0, 0, 0), math.nan),
        ((0, 0, 0), math.inf),
        ((1, 0, 0), -math.inf),
        ((1, 0, 0), math.nan),
        ((1, 0, 0), 3.0),
    ],
)
def test_an_lse_that_is_infinite_elsewhere_is_no_small_error(place, value):
    out, expected_lse = results()
    lse = expected_lse.clone()
    lse[place] = value
    assert reference.errors(out, lse, out, expected_lse) == (math.inf, math.inf)


def test_an_out_of_a_query_that_sees_nothing_must_be_zero():
    expected, lse = results()
    out = expected.clone()
    out[1, 0, 2, 5] = 1e-30
    assert reference.errors(out, lse, expected, lse) == (math.inf, math.inf)


def test_another_shape_is_no_small_error():
    out, lse = results()
    assert reference.errors(out[:1], lse, out, lse) == (math.inf, math.inf)
    assert reference.errors(out, lse.transpose(1, 2), out, lse) == (math.inf, math.inf)


def test_attention_of_two_tokens_by_hand():
    # Scores 1 and 2; the third component is no value's.
    q = torch.tensor([2.0, 0.0, 4.0]).view(1, 1, 1, 3)
    cache = torch.tensor([[1.0, 10.0, 0.0], [0.0, 20.0, 1.0]]).view(2, 1, 1, 3)
    table, lens = torch.tensor([[1, 0]]), torch.tensor([2])
    total = math.exp(1) + math.exp(2)
    for blocks in (table, table.flip(1)):  # the order of the tokens decides nothing here
        out, lse = reference.attend(q, cache, blocks, lens, 2, 0.5)
        assert float(lse) == pytest.approx(math.log(total))
        assert float(out[0, 0, 0, 0]) == pytest.approx(math.exp(1) / total)
        expected = (10 * math.exp(1) + 20 * math.exp(2)) / total
        assert float(out[0, 0, 0, 1]) == pytest.approx(expected)
    out, lse = reference.attend(
        q, cache, table, lens, 2, 0.5, visible_lens=torch.tensor([[1]], dtype=torch.int32)
    )
    assert float(lse) == 2.0
    assert out.flatten().tolist() == [0.0, 20.0]


def test_the_causal_mask_is_aligned_to_the_end():
    assert reference.visible_counts(5, 3, True, None) == [3, 4, 5]
    assert reference.visible_counts(2, 4, True, None) == [0, 0, 1, 2]
    assert reference.visible_counts(5, 3, False, None) == [5, 5, 5]


def test_a_merge_of_two_parts_by_hand():
    outs = torch.tensor([8.0, 4.0, math.nan]).view(3, 1, 1, 1, 1)
    lses = torch.tensor([0.0, math.log(3), math.inf]).view(3, 1, 1, 1)
    out, lse = reference.merge(outs, lses)
    assert float(out) == pytest.approx(5.0)
    assert float(lse) == pytest.approx(math.log(4))
    out, lse = reference.merge(outs[2:], lses[2:])
    assert (float(out), float(lse)) == (0.0, math.inf)
