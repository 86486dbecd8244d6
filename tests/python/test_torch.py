"""The operators inside torch: compile, export, opcheck, fake tensors, names."""

from __future__ import annotations

import pytest
import torch
from inputs import attend, formula_inputs, library_plan, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import flashmla


def shared_arguments(inputs):
    return (
        inputs.q,
        inputs.k_cache,
        512,
        inputs.cache_seqlens,
        inputs.block_table,
        0.25,
        True,
        *library_plan(inputs),
    )


@pytest.fixture
def inputs():
    return formula_inputs([130, 97, 0], 8, 2, causal=True)


def step(q, k_cache, block_table, cache_seqlens):
    metadata, num_splits = flashmla.get_mla_metadata(cache_seqlens, q.shape[1] * q.shape[2], 1)
    return flashmla.flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, 512, metadata, num_splits, 0.25, True
    )


def test_operators_pass_opcheck(inputs):
    shared = shared_arguments(inputs)
    visible = torch.tensor([[1, 2], [3, 97], [0, 0]], dtype=torch.int32)
    unmasked = (*shared[:6], False, *shared[7:])
    out = torch.empty(3, 2, 8, 512, dtype=torch.bfloat16)
    lse = torch.empty(3, 8, 2)
    ops = torch.ops.flashmla
    torch.library.opcheck(ops.fwd_kvcache_mla.default, shared)
    torch.library.opcheck(ops.get_mla_metadata.default, (inputs.cache_seqlens, 16, 1))
    torch.library.opcheck(ops.decode.default, (*unmasked, visible))
    torch.library.opcheck(ops.decode_out.default, (*shared, None, -1, out, lse))
    outs, lses = torch.randn(3, 2, 1, 4, 8), torch.randn(3, 2, 4, 1)
    torch.library.opcheck(ops.merge_attention_states.default, (outs, lses))


def test_full_graph_with_a_dynamic_batch(inputs):
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for batch in (3, 2, 1):
        arguments = (
            inputs.q[:batch],
            inputs.k_cache,
            inputs.block_table[:batch],
            inputs.cache_seqlens[:batch],
        )
        found, expected = compiled(*arguments), step(*arguments)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_full_graph_with_preallocated_results(inputs):
    plan = library_plan(inputs)

    def call(q, out, lse):
        flashmla.flash_mla_with_kvcache(
            q,
            inputs.k_cache,
            inputs.block_table,
            inputs.cache_seqlens,
            512,
            *plan,
            0.25,
            True,
            out=out,
            softmax_lse=lse,
        )
        return out * 2

    out = torch.zeros(3, 2, 8, 512, dtype=torch.bfloat16)
    lse = torch.zeros(3, 8, 2)
    doubled = torch.compile(call, fullgraph=True)(inputs.q, out, lse)
    expected = attend(inputs, plan)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])
    assert same_bits(doubled, expected[0] * 2)


class Step(torch.nn.Module):
    def forward(self, q, k_cache, block_table, cache_seqlens):
        return step(q, k_cache, block_table, cache_seqlens)


def test_an_exported_program_equals_the_call(inputs):
    arguments = (inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens)
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = ({0: batch}, None, {0: batch}, {0: batch})
    program = torch.export.export(Step(), arguments, dynamic_shapes=shapes)
    fewer = tuple(a if a is inputs.k_cache else a[:2] for a in arguments)
    for given in (arguments, fewer):
        found, expected = program.module()(*given), step(*given)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_a_program_is_exported_for_any_number_of_query_tokens(inputs):
    arguments = (inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens)
    tokens = torch.export.Dim("tokens", min=1, max=16)
    program = torch.export.export(Step(), arguments, dynamic_shapes=({1: tokens}, None, None, None))
    for count in (1, 2, 5):
        given = (formula_inputs([130, 97, 0], 8, count).q, *arguments[1:])
        found, expected = program.module()(*given), step(*given)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_fake_tensors_give_shapes_and_dtypes(inputs):
    with FakeTensorMode() as mode:
        fake = [
            mode.from_tensor(t)
            for t in (inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens)
        ]
        metadata, num_splits = flashmla.get_mla_metadata(fake[3], 16, 1)
        out, lse = flashmla.flash_mla_with_kvcache(*fake, 512, metadata, num_splits)
    real = library_plan(inputs)
    assert metadata.shape == real[0].shape
    assert num_splits.shape == real[1].shape
    assert metadata.dtype == num_splits.dtype == torch.int32
    assert (out.shape, out.dtype) == ((3, 2, 8, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((3, 8, 2), torch.float32)


def test_meta_tensors(inputs):
    moved = {name: t.to("meta") for name, t in vars(inputs).items() if isinstance(t, torch.Tensor)}
    metadata, num_splits = flashmla.get_mla_metadata(moved["cache_seqlens"], 16, 1)
    out, lse = flashmla.flash_mla_with_kvcache(
        moved["q"],
        moved["k_cache"],
        moved["block_table"],
        moved["cache_seqlens"],
        512,
        metadata,
        num_splits,
    )
    assert out.is_meta
    assert lse.is_meta
    assert out.shape == (3, 2, 8, 512)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_under_grad_modes(inputs, mode):
    expected = attend(inputs)
    with mode():
        found = attend(inputs)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_the_names_that_vllm_uses_are_the_same_operators(inputs):
    shared = shared_arguments(inputs)
    expected = torch.ops.flashmla.fwd_kvcache_mla(*shared)
    found = torch.ops._flashmla_C.fwd_kvcache_mla(*shared)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    torch.library.opcheck(torch.ops._flashmla_C.fwd_kvcache_mla.default, shared)
    torch.library.opcheck(
        torch.ops._flashmla_C.get_mla_metadata.default, (inputs.cache_seqlens, 16, 1)
    )
    plan = torch.ops._flashmla_C.get_mla_metadata(inputs.cache_seqlens, 16, 1)
    assert all(same_bits(a, b) for a, b in zip(plan, library_plan(inputs), strict=True))


def test_schemas_have_the_names_and_the_order_of_the_definition():
    for library in (torch.ops.flashmla, torch.ops._flashmla_C):
        attention = library.fwd_kvcache_mla.default._schema
        assert [argument.name for argument in attention.arguments] == [
            "q",
            "k_cache",
            "head_dim_v",
            "cache_seqlens",
            "block_table",
            "softmax_scale",
            "causal",
            "tile_scheduler_metadata",
            "num_splits",
        ]
        plan = library.get_mla_metadata.default._schema
        assert [argument.name for argument in plan.arguments] == [
            "cache_seqlens",
            "num_heads_per_head_k",
            "num_heads_k",
        ]


def test_full_graph_merge():
    outs, lses = torch.randn(3, 2, 1, 4, 8), torch.randn(3, 2, 4, 1)
    expected = flashmla.merge_attention_states(outs, lses)
    compiled = torch.compile(flashmla.merge_attention_states, fullgraph=True)
    for given in ((outs, lses), (list(outs), list(lses))):
        assert all(same_bits(a, b) for a, b in zip(compiled(*given), expected, strict=True))


def test_full_graph_with_visible_lens(inputs):
    plan = library_plan(inputs)
    visible = torch.tensor([[5, 130], [0, 97], [0, 0]], dtype=torch.int32)

    def call(q, visible_lens):
        return flashmla.flash_mla_with_kvcache(
            q,
            inputs.k_cache,
            inputs.block_table,
            inputs.cache_seqlens,
            512,
            *plan,
            visible_lens=visible_lens,
        )

    found = torch.compile(call, fullgraph=True)(inputs.q, visible)
    expected = call(inputs.q, visible)
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


def test_support_is_told_by_device():
    assert flashmla.is_flashmla_supported("cpu") == (True, None)
    supported, reason = flashmla.is_flashmla_supported("meta")
    assert not supported
    assert "meta" in reason
    assert flashmla.is_flashmla_supported(0) == flashmla.is_flashmla_supported("cuda:0")
    with pytest.raises(RuntimeError, match="abacus"):
        flashmla.is_flashmla_supported("abacus")
