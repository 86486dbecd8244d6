"""The module `flash_mla`: the newer package's calls."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from inputs import attend, formula_inputs, library_plan, same_bits

import flash_mla


@pytest.fixture
def inputs():
    return formula_inputs([130, 97], 8, 2, causal=True)


def call(inputs, plan, num_splits=None, **later):
    return flash_mla.flash_mla_with_kvcache(
        inputs.q,
        inputs.k_cache,
        inputs.block_table,
        inputs.cache_seqlens,
        512,
        plan,
        num_splits,
        0.25,
        True,
        **later,
    )


def test_the_first_call_plans_and_later_calls_reuse_it(inputs):
    plan, nothing = flash_mla.get_mla_metadata()
    assert nothing is None
    assert plan.tile_scheduler_metadata is None
    expected = attend(inputs)
    for _ in range(3):
        found = call(inputs, plan)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
        first = plan.tile_scheduler_metadata
    assert plan.tile_scheduler_metadata is first


def test_the_older_calls_still_work(inputs):
    plan = flash_mla.get_mla_metadata(inputs.cache_seqlens, 16, 1)
    assert all(same_bits(a, b) for a, b in zip(plan, library_plan(inputs), strict=True))
    found = call(inputs, *plan)
    assert all(same_bits(a, b) for a, b in zip(found, attend(inputs), strict=True))


def test_a_plan_takes_the_arguments_of_releases_in_between(inputs):
    expected = library_plan(inputs)
    for more in ((8,), (8, False), (8, False, None)):
        plan = flash_mla.get_mla_metadata(inputs.cache_seqlens, 16, 1, *more)
        assert all(same_bits(a, b) for a, b in zip(plan, expected, strict=True))
    by_name = flash_mla.get_mla_metadata(
        cache_seqlens=inputs.cache_seqlens,
        num_q_tokens_per_head_k=16,
        num_heads_k=1,
        num_heads_q=8,
        is_fp8_kvcache=False,
    )
    assert all(same_bits(a, b) for a, b in zip(by_name, expected, strict=True))
    with pytest.raises((TypeError, RuntimeError), match="num_heads_per_head_k"):
        flash_mla.get_mla_metadata(inputs.cache_seqlens, num_heads_k=1)
    for name, value in (("is_fp8_kvcache", True), ("topk", 64)):
        with pytest.raises(NotImplementedError, match=name):
            flash_mla.get_mla_metadata(inputs.cache_seqlens, 16, 1, num_heads_q=8, **{name: value})


def test_layers_of_one_step_share_a_plan(inputs):
    plan, _ = flash_mla.get_mla_metadata()
    for layer in range(3):
        inputs.q = inputs.q.roll(layer, dims=-1)
        inputs.k_cache = inputs.k_cache.roll(layer, dims=-1)
        found = call(inputs, plan)
        assert all(same_bits(a, b) for a, b in zip(found, attend(inputs), strict=True))


def test_each_object_has_its_own_plan(inputs):
    first, second = flash_mla.get_mla_metadata()[0], flash_mla.get_mla_metadata()[0]
    call(inputs, first)
    inputs.q, inputs.block_table = inputs.q[:1], inputs.block_table[:1]
    inputs.cache_seqlens = inputs.cache_seqlens[:1]
    found = call(inputs, second)
    assert all(same_bits(a, b) for a, b in zip(found, attend(inputs), strict=True))


def test_a_plan_may_be_copied_pickled_compared_and_be_a_key(inputs):
    plan, _ = flash_mla.get_mla_metadata()
    expected = call(inputs, plan)
    for again in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert all(same_bits(a, b) for a, b in zip(call(inputs, again), expected, strict=True))
        assert again != plan
        assert [again, plan].index(plan) == 1
        assert {plan: "step"}.get(again) is None
    assert plan == plan
    assert {plan: "step"}[plan] == "step"


def test_arguments_have_the_names_and_the_order_of_the_newer_package():
    names = list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters)
    assert names[:9] == [
        "q",
        "k_cache",
        "block_table",
        "cache_seqlens",
        "head_dim_v",
        "tile_scheduler_metadata",
        "num_splits",
        "softmax_scale",
        "causal",
    ]
    assert names[9:16] == [
        "is_fp8_kvcache",
        "indices",
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
    ]


def test_num_splits_and_all_that_follows_may_be_left_out(inputs):
    plan, _ = flash_mla.get_mla_metadata()
    inputs.softmax_scale, inputs.causal = None, False
    found = flash_mla.flash_mla_with_kvcache(
        inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512, plan
    )
    assert all(same_bits(a, b) for a, b in zip(found, attend(inputs), strict=True))


@pytest.mark.parametrize("what", ["batch", "seq_len_q", "heads"])
def test_another_shape_with_the_same_plan_is_an_error(inputs, what):
    plan, _ = flash_mla.get_mla_metadata()
    call(inputs, plan)
    if what == "batch":
        inputs.q, inputs.block_table = inputs.q[:1], inputs.block_table[:1]
        inputs.cache_seqlens = inputs.cache_seqlens[:1]
    elif what == "seq_len_q":
        inputs.q = inputs.q[:, :1]
    else:
        inputs.q = inputs.q[:, :, :4]
    with pytest.raises(RuntimeError, match=r"was planned for .* = \(2, 2, 8, 1\), this"):
        call(inputs, plan)


@pytest.mark.parametrize(
    "name",
    [
        "is_fp8_kvcache",
        "indices",
        "attn_sink",
        "extra_k_cache",
        "extra_indices_in_kvcache",
        "topk_length",
        "extra_topk_length",
    ],
)
def test_arguments_of_later_formats_are_named(inputs, name):
    plan, _ = flash_mla.get_mla_metadata()
    value = True if name == "is_fp8_kvcache" else torch.zeros(1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=name):
        call(inputs, plan, **{name: value})


def test_splits_beside_a_plan_that_holds_its_own_are_refused(inputs):
    plan, _ = flash_mla.get_mla_metadata()
    with pytest.raises(RuntimeError, match="num_splits is given beside a FlashMLASchedMeta"):
        call(inputs, plan, torch.zeros(3, dtype=torch.int32))
    assert plan.shape is None


def test_a_missing_table_is_named(inputs):
    plan, _ = flash_mla.get_mla_metadata()
    inputs.block_table = None
    with pytest.raises(RuntimeError, match="block_table is None"):
        call(inputs, plan)


def test_a_first_call_that_is_refused_leaves_the_plan_to_the_next(inputs):
    plan, _ = flash_mla.get_mla_metadata()
    lengths, inputs.cache_seqlens = inputs.cache_seqlens, inputs.cache_seqlens + 10000
    with pytest.raises(RuntimeError, match=r"cache_seqlens\[0\] is 10130"):
        call(inputs, plan)
    inputs.cache_seqlens = lengths
    found = call(inputs, plan)
    assert all(same_bits(a, b) for a, b in zip(found, attend(inputs), strict=True))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("q", None, TypeError, "q is of type NoneType; it must be a torch.Tensor"),
        ("q", torch.zeros(2, 8, 576).bfloat16(), RuntimeError, "q has 3 dimensions; it must"),
        ("k_cache", torch.zeros(2, 2).bfloat16(), RuntimeError, "k_cache has 2 dimensions"),
        ("k_cache", torch.zeros(5, 64, 0, 576).bfloat16(), RuntimeError, "num_heads_k .* is 0"),
        ("q", torch.zeros(2, 2, 0, 576).bfloat16(), RuntimeError, "num_heads_q .* is 0"),
    ],
)
def test_what_no_plan_can_be_made_for_is_named(inputs, name, value, error, message):
    plan, _ = flash_mla.get_mla_metadata()
    setattr(inputs, name, value)
    with pytest.raises(error, match=message):
        call(inputs, plan)
