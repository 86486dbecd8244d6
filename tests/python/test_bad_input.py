"""Each check of the attention call: the message names the argument and what it was, and nothing is
written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import KERNELS
from inputs import formula_inputs, library_plan, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

import flashmla


def arguments() -> dict[str, object]:
    inputs = formula_inputs([150, 20], 4, 2, causal=True)
    metadata, num_splits = library_plan(inputs)
    return {
        "q": inputs.q,
        "k_cache": inputs.k_cache,
        "block_table": inputs.block_table,
        "cache_seqlens": inputs.cache_seqlens,
        "head_dim_v": 512,
        "tile_scheduler_metadata": metadata,
        "num_splits": num_splits,
        "softmax_scale": 0.25,
        "causal": True,
        "visible_lens": None,
        "out": torch.full((2, 2, 4, 512), 5.0, dtype=torch.bfloat16),
        "softmax_lse": torch.full((2, 4, 2), 5.0),
    }


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table_with(row: int, column: int, value: int):
    def change(given):
        table = given["block_table"].clone()
        table[row, column] = value
        return {"block_table": table}

    return change


def last_stride_two(name: str):
    def change(given):
        tensor = given[name]
        return {name: torch.stack([tensor, tensor], dim=-1)[..., 0]}

    return change


def with_visible(*counts: list[int]):
    return {"visible_lens": torch.tensor(counts, dtype=torch.int32), "causal": False}


# What no contents are needed for to refuse it.
BAD_SHAPES = [
    ({"q": torch.zeros(2, 4, 576).bfloat16()}, r"q has 3 dimensions; it must have 4"),
    ({"q": torch.zeros(2, 2, 4, 576)}, "k_cache has dtype bfloat16; it must be that of q, float32"),
    (
        {"q": torch.zeros(2, 2, 4, 576).double()},
        "q has dtype Double; it must be bfloat16, float16 or float32",
    ),
    (
        {"q": torch.zeros(2, 2, 4, 100).bfloat16()},
        r"is \(100, 512\); it must be one of",
    ),
    ({"q": torch.zeros(2, 0, 4, 576).bfloat16()}, r"seq_len_q .* is 0"),
    ({"head_dim_v": 511}, r"\(576, 511\); it must be one of .*\(64, 64\)"),
    ({"head_dim_v": -1}, r"\(576, -1\)"),
    ({"k_cache": torch.zeros(5, 64, 1, 512).bfloat16()}, r"k_cache has shape \(5, 64, 1, 512\)"),
    ({"k_cache": torch.zeros(5, 64, 576).bfloat16()}, "k_cache has 3 dimensions"),
    ({"k_cache": torch.zeros(5, 64, 3, 576).bfloat16()}, "q has 4 heads; they must be a multiple"),
    ({"k_cache": torch.zeros(5, 0, 1, 576).bfloat16()}, r"page_block_size .* is 0"),
    ({"k_cache": torch.zeros(5, 64, 0, 576).bfloat16()}, r"num_heads_k .* is 0"),
    (
        {"block_table": torch.zeros(2, 3, dtype=torch.int64)},
        "block_table has dtype Long; it must be int32",
    ),
    ({"block_table": torch.zeros(3, 3, dtype=torch.int32)}, r"block_table has shape \(3, 3\)"),
    ({"block_table": torch.zeros(2, dtype=torch.int32)}, "block_table has 1 dimensions"),
    ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens has dtype float32; it must be int32"),
    ({"cache_seqlens": ints(150)}, r"cache_seqlens has shape \(1\)"),
    ({"tile_scheduler_metadata": torch.zeros(2, 7, dtype=torch.int32)}, r"has shape \(2, 7\)"),
    ({"tile_scheduler_metadata": torch.zeros(0, 8, dtype=torch.int32)}, r"num_sm_parts .* is 0"),
    ({"tile_scheduler_metadata": torch.zeros(2, 8)}, "tile_scheduler_metadata has dtype"),
    ({"num_splits": torch.zeros(2, dtype=torch.int32)}, r"num_splits has shape \(2\)"),
    ({"num_splits": torch.zeros(3)}, "num_splits has dtype float32"),
    ({"softmax_scale": float("nan")}, "softmax_scale is nan; it must be a finite"),
    ({"softmax_scale": 1e300}, r"softmax_scale is 1e\+300; it must be a finite"),
    (last_stride_two("q"), "q has strides .*; the last dimension must be contiguous"),
    (last_stride_two("k_cache"), "k_cache has strides .*; the last dimension must be contiguous"),
    (last_stride_two("out"), "out has strides .*; the last dimension must be contiguous"),
    (with_visible([1, 2]), r"visible_lens has shape \(1, 2\)"),
    ({**with_visible([1, 2], [1, 2]), "causal": True}, "causal is True and visible_lens is given"),
    ({"out": torch.full((2, 2, 4, 64), 5.0).bfloat16()}, r"out has shape \(2, 2, 4, 64\)"),
    ({"out": torch.full((2, 2, 4, 512), 5.0)}, "out has dtype float32; it must be that of q"),
    (
        {"out": torch.full((1, 1, 1, 512), 5.0).bfloat16().expand(2, 2, 4, 512)},
        "out has .*; it is written, so its elements must not share memory",
    ),
    ({"softmax_lse": torch.full((2, 2, 4), 5.0)}, r"softmax_lse has shape \(2, 2, 4\)"),
    ({"softmax_lse": torch.full((2, 4, 2), 5.0).half()}, "softmax_lse has dtype float16"),
    (
        {"softmax_lse": torch.full((2, 4, 2), 5.0).double()},
        "softmax_lse has dtype Double; it must be float32$",
    ),
    (
        {"softmax_lse": torch.full((1, 1, 1), 5.0).expand(2, 4, 2)},
        "softmax_lse has .*must not share memory",
    ),
    ({"q": torch.zeros(2, 2, 4, 576).bfloat16().requires_grad_()}, "q requires gradients"),
    (
        {"k_cache": torch.zeros(5, 64, 1, 576).bfloat16().requires_grad_()},
        "k_cache requires gradients",
    ),
    ({"k_cache": torch.zeros(5, 64, 1, 576).half()}, "k_cache has dtype float16; .*bfloat16"),
    (
        {"k_cache": torch.zeros(5, 64, 1, 576).double()},
        "k_cache has dtype Double; it must be that of q, bfloat16$",
    ),
    (
        {
            "q": torch.zeros(2, 2, 4, 576).half(),
            "k_cache": torch.zeros(5, 64, 1, 576, dtype=torch.uint8),
        },
        "k_cache has dtype Byte; it must be that of q, float16$",
    ),
    (
        {"q": torch.zeros(2, 2, 4, 576), "k_cache": torch.zeros(5, 64, 1, 576).double()},
        "k_cache has dtype Double; it must be that of q, float32$",
    ),
    (
        {"out": torch.full((2, 2, 4, 512), 5.0).double()},
        "out has dtype Double; it must be that of q, bfloat16$",
    ),
    ({"cache_seqlens": torch.tensor([150, 20])}, "cache_seqlens has dtype Long; it must be int32"),
    (
        # Made late: it cannot be printed.
        lambda given: {"k_cache": torch.empty(5, 64, 1, 576, dtype=torch.bits8)},
        "k_cache has a dtype that torch's C interface has no name for; it must be that of q",
    ),
    (
        {"visible_lens": torch.ones(2, 2, dtype=torch.int64), "causal": False},
        "visible_lens has dtype Long; it must be int32",
    ),
    ({"softmax_scale": float("inf")}, "softmax_scale is inf; it must be a finite"),
    (lambda given: {"out": torch._neg_view(-given["out"])}, "out is a view of negated values"),
    (
        lambda given: {"softmax_lse": torch._neg_view(-given["softmax_lse"])},
        "softmax_lse is a view of negated values",
    ),
    (lambda given: {"out": given["out"].requires_grad_()}, "out requires gradients"),
]
SHARING = [
    (lambda given: {"out": given["q"][..., 64:]}, "out shares memory with q"),
    (
        lambda given: {"softmax_lse": given["out"].view(torch.float32).view(-1)[:16].view(2, 4, 2)},
        "out shares memory with softmax_lse",
    ),
    (
        lambda given: {"out": given["k_cache"].view(-1)[:8192].view(2, 2, 4, 512)},
        "out shares memory with k_cache",
    ),
]
BAD_CONTENTS = [
    (table_with(0, 2, -1), r"block_table\[0, 2\] is -1; k_cache has blocks 0 to"),
    (table_with(1, 0, 2147480000), r"block_table\[1, 0\] is 2147480000"),
    ({"cache_seqlens": ints(150, -1)}, r"cache_seqlens\[1\] is -1; it must be between 0 and 192"),
    ({"cache_seqlens": ints(193, 20)}, r"cache_seqlens\[0\] is 193; it must be between 0 and 192"),
    (with_visible([3, 2], [1, 1]), r"visible_lens\[0, 1\] is 2; it must be between 3"),
    (with_visible([3, 4], [1, 21]), r"visible_lens\[1, 1\] is 21; .* and 20"),
    (with_visible([-1, 4], [1, 1]), r"visible_lens\[0, 0\] is -1"),
    (
        {"block_table": torch.zeros(2, 3, dtype=torch.int32, device="meta")},
        "block_table is on meta",
    ),
    ({"out": torch.empty(2, 2, 4, 512, dtype=torch.bfloat16, device="meta")}, "out is on meta"),
]


def id_of(value):
    """The same in every process: a function's text holds its address."""
    return "made" if callable(value) else str(value)[:40]


@pytest.mark.parametrize(("change", "message"), BAD_SHAPES + BAD_CONTENTS, ids=id_of)
def test_is_refused_with_a_message_that_names_it(change, message):
    given = arguments()
    kept = (given["out"], given["softmax_lse"])
    given.update(change(given) if callable(change) else change)
    with pytest.raises(RuntimeError, match=message):
        flashmla.flash_mla_with_kvcache(**given)
    assert all((tensor == 5.0).all() for tensor in kept)
    for name in ("out", "softmax_lse"):
        if given[name].device.type == "cpu":
            assert (given[name] == 5.0).all()


@pytest.mark.parametrize(
    "name",
    [
        "k_cache",
        "block_table",
        "cache_seqlens",
        "tile_scheduler_metadata",
        "num_splits",
        "visible_lens",
        "out",
        "softmax_lse",
    ],
)
def test_a_tensor_on_another_device_is_named(name):
    given = arguments()
    kept = [given["out"], given["softmax_lse"]]
    if name == "visible_lens":
        given |= with_visible([1, 2], [1, 2])
    given[name] = given[name].to("meta")
    with pytest.raises(RuntimeError, match=f"{name} is on meta"):
        flashmla.flash_mla_with_kvcache(**given)
    assert all((tensor == 5.0).all() for tensor in kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_longest_row_is_computed_and_a_longer_one_refused(dtype):
    longest = 2**31 - 1024
    # All tokens are one.
    token = torch.arange(64, dtype=dtype) / 64
    cache = token.expand(1, 2**31 - 1, 1, 64)
    given = (torch.ones(1, 1, 1, 64, dtype=dtype), cache, torch.zeros(1, 1, dtype=torch.int32))
    plan = flashmla.get_mla_metadata(ints(longest), 1, 1)
    out, _ = flashmla.flash_mla_with_kvcache(
        *given, ints(longest), 64, *plan, visible_lens=ints(3)[None]
    )
    assert torch.allclose(out[0, 0, 0], token)
    with pytest.raises(RuntimeError, match=r"\[0\] is 2147482625; .* between 0 and 2147482624$"):
        flashmla.flash_mla_with_kvcache(*given, ints(longest + 1), 64, *plan)


TENSORS = ["q", "k_cache", "block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits"]


@pytest.mark.parametrize("name", [*TENSORS, "visible_lens", "out", "softmax_lse"])
@pytest.mark.parametrize("value", [None, [1, 2]], ids=["none", "list"])
def test_what_is_no_tensor_is_named(name, value):
    if value is None and name not in TENSORS:
        pytest.skip("may be left out")
    given = arguments()
    given[name] = value
    what = "None" if value is None else "of type list"
    with pytest.raises(TypeError, match=f"{name} is {what}; it must be a torch.Tensor"):
        flashmla.flash_mla_with_kvcache(**given)


def operator_arguments(given: dict[str, object]) -> list[object]:
    """What all operators of attention begin with."""
    order = ("q", "k_cache", "head_dim_v", "cache_seqlens", "block_table", "softmax_scale")
    order += ("causal", "tile_scheduler_metadata", "num_splits")
    return [given[name] for name in order]


@pytest.mark.parametrize("on", ["cpu", "meta"])
@pytest.mark.parametrize("name", TENSORS)
def test_none_for_a_tensor_of_an_operator_is_named(name, on):
    given = {
        argument: value.to(on) if isinstance(value, torch.Tensor) else value
        for argument, value in arguments().items()
    }
    given[name] = None
    with pytest.raises(RuntimeError, match=f"{name} is None; it must be a tensor"):
        torch.ops.flashmla.fwd_kvcache_mla(*operator_arguments(given))


def test_a_sparse_tensor_is_named():
    given = arguments()
    given["block_table"] = given["block_table"].to_sparse()
    with pytest.raises(RuntimeError, match=r"block_table has layout torch\.sparse_coo; it must"):
        flashmla.flash_mla_with_kvcache(**given)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch would rather have neither
@pytest.mark.parametrize("kind", ["nested", "quantized"])
def test_a_tensor_of_many_lengths_or_of_codes_is_named(kind):
    given = arguments()
    if kind == "nested":
        given["q"] = torch.nested.nested_tensor(list(given["q"]))
    else:
        given["q"] = torch.quantize_per_tensor(given["q"].float(), 1.0, 0, torch.qint8)
    for left_out in ((), ("visible_lens", "out", "softmax_lse")):
        for name in left_out:
            del given[name]
        with pytest.raises(RuntimeError, match=f"q is a {kind} tensor; it must be a plain one"):
            flashmla.flash_mla_with_kvcache(**given)


def on_meta() -> Callable[[torch.Tensor], torch.Tensor]:
    """To a meta tensor of the same strides, which shares storage with those that it shared with."""
    storages = {}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = torch.empty(
                storage.nbytes(), dtype=torch.uint8, device="meta"
            ).untyped_storage()
        placing = tensor.storage_offset(), tensor.shape, tensor.stride()
        empty = torch.empty(0, dtype=tensor.dtype, device="meta")
        found = empty.set_(storages[storage._cdata], *placing).requires_grad_(tensor.requires_grad)
        return torch._neg_view(found) if tensor.is_neg() else found

    return moved


def all_sizes_dynamic(mode: FakeTensorMode) -> Callable[[torch.Tensor], torch.Tensor]:
    """To a fake tensor whose sizes are symbols, with the tensor's own as hints."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        sizes = [DimDynamic.DYNAMIC] * tensor.dim()
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(tensor, symbolic_context=context)

    return moved


def without_contents(kind: str, given: dict[str, object]) -> tuple[dict[str, object], list]:
    """The arguments with tensors that have no contents, and the guards that calls add to."""
    guards, moved = [], on_meta()
    if kind == "fake":
        moved = FakeTensorMode().from_tensor
    elif kind == "symbolic":
        environment = ShapeEnv()
        guards, moved = environment.guards, all_sizes_dynamic(FakeTensorMode(shape_env=environment))
    return {
        name: moved(value) if isinstance(value, torch.Tensor) else value
        for name, value in given.items()
    }, guards


WITHOUT_CONTENTS = pytest.mark.parametrize("kind", ["meta", "fake", "symbolic"])


@WITHOUT_CONTENTS
@pytest.mark.parametrize("preallocated", [True, False])
@pytest.mark.parametrize(("change", "message"), BAD_SHAPES + SHARING, ids=id_of)
def test_tensors_without_contents_are_refused_in_the_same_words(
    kind, change, message, preallocated
):
    given = arguments()
    given.update(change(given) if callable(change) else change)
    if not preallocated:
        del given["out"], given["softmax_lse"]
    try:
        flashmla.flash_mla_with_kvcache(**given)
    except RuntimeError as error:
        told = str(error)
    else:
        assert not preallocated
        assert message.startswith(("out", "softmax_lse"))
        return
    given, _ = without_contents(kind, given)
    with pytest.raises(RuntimeError) as refused:
        flashmla.flash_mla_with_kvcache(**given)
    assert str(refused.value) == told


@WITHOUT_CONTENTS
@pytest.mark.parametrize("preallocated", [True, False])
def test_tensors_without_contents_are_taken_for_every_size(kind, preallocated):
    given = arguments() | {"causal": False, "visible_lens": torch.ones(2, 2, dtype=torch.int32)}
    if not preallocated:
        del given["out"], given["softmax_lse"]
    given, guards = without_contents(kind, given)
    out, lse = flashmla.flash_mla_with_kvcache(**given)
    assert guards == []
    # Only now, since to compare is to guard.
    assert (out.shape, out.dtype) == ((2, 2, 4, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 2), torch.float32)


def test_sizes_that_only_the_run_tells_are_left_to_it():
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        batch, tokens, heads, pages, parts, blocks = (
            environment.create_unbacked_symint() for _ in range(6)
        )
        q = torch.empty(batch, tokens, heads, 576, dtype=torch.bfloat16)
        k_cache = torch.empty(blocks, 64, 1, 576, dtype=torch.bfloat16)
        table = torch.empty(batch, pages, dtype=torch.int32)
        lengths = torch.empty(batch, dtype=torch.int32)
        plan = (
            torch.empty(parts, 8, dtype=torch.int32),
            torch.empty(batch + 1, dtype=torch.int32),
        )
        known = len(environment.guards)
        call = torch.ops.flashmla.fwd_kvcache_mla
        out, lse = call(q, k_cache, 512, lengths, table, None, True, *plan)
        assert len(environment.guards) == known
        assert [str(size) for size in out.shape[:3]] == [str(n) for n in (batch, tokens, heads)]
        assert [str(size) for size in lse.shape] == [str(n) for n in (batch, heads, tokens)]
        # What is known is judged all the same.
        for wrong, message in (
            ((q, k_cache, 511, lengths, table), r"\(576, 511\); it must be one of"),
            ((q, k_cache[..., :512], 512, lengths, table), r"k_cache has shape .*, 576\)$"),
            ((q, k_cache, 512, lengths.long(), table), "cache_seqlens has dtype Long"),
            ((q, k_cache, 512, lengths, table[0]), "block_table has 1 dimensions"),
            ((q, k_cache.half(), 512, lengths, table), "k_cache has dtype float16; it must be"),
        ):
            with pytest.raises(RuntimeError, match=message):
                call(*wrong, None, True, *plan)
        # Of one batch that some tensor tells, the others may be.
        call(q, k_cache, 512, lengths, table, None, True, plan[0], plan[1].new_empty(4))


def test_pieces_of_one_buffer_that_begin_where_only_the_run_tells():
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        batch = environment.create_unbacked_symint()
        buffer = torch.empty(2**20)
        sizes = [batch * heads for heads in (4 * 576, 4 * 512, 4)]
        ends = [sizes[0], sizes[0] + sizes[1], sizes[0] + sizes[1] + sizes[2]]
        q = buffer[: ends[0]].view(batch, 1, 4, 576)
        out = buffer[ends[0] : ends[1]].view(batch, 1, 4, 512)
        lse = buffer[ends[1] : ends[2]].view(batch, 4, 1)
        k_cache = torch.empty(8, 64, 1, 576)
        table, lengths = (
            torch.empty(*shape, dtype=torch.int32) for shape in ((batch, 4), (batch,))
        )
        plan = torch.ops.flashmla.get_mla_metadata(lengths, 4, 1)
        shared = (q, k_cache, 512, lengths, table, None, True, *plan, None, -1)
        torch.ops.flashmla.decode_out(*shared, out, lse)
        # What is known to lie in one place is refused.
        with pytest.raises(RuntimeError, match="out shares memory with q"):
            torch.ops.flashmla.decode_out(*shared, q[..., :512], lse)


@WITHOUT_CONTENTS
@pytest.mark.parametrize(
    "given",
    [
        {"cache_seqlens": torch.zeros(2, 2, dtype=torch.int32)},
        {"cache_seqlens": torch.zeros((), dtype=torch.int32)},
        {"cache_seqlens": torch.zeros(2, dtype=torch.int64)},
        {"cache_seqlens": torch.zeros(2, dtype=torch.complex64)},
        {"num_heads_per_head_k": 0},
        {"num_heads_per_head_k": 2**31},
        {"num_heads_k": -1},
    ],
    ids=id_of,
)
def test_planning_calls_without_contents_are_refused_in_the_same_words(kind, given):
    given = {"cache_seqlens": ints(1, 2), "num_heads_per_head_k": 16, "num_heads_k": 1} | given
    with pytest.raises(RuntimeError) as real:
        flashmla.get_mla_metadata(**given)
    given, _ = without_contents(kind, given)
    with pytest.raises(RuntimeError) as refused:
        flashmla.get_mla_metadata(**given)
    assert str(refused.value) == str(real.value)


@WITHOUT_CONTENTS
@pytest.mark.parametrize(
    ("outs", "lses"),
    [
        (torch.zeros(3, 2, 1, 4, 64), torch.zeros(3, 2, 4, 2)),
        (torch.zeros(3, 2, 1, 4, 64), torch.zeros(3, 2, 4)),
        (torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 4, 1)),
        (torch.zeros(3, 2, 1, 4, 2, 2), torch.zeros(3, 2, 4, 1)),
        (torch.zeros(0, 2, 1, 4, 64), torch.zeros(0, 2, 4, 1)),
        (torch.zeros(3, 2, 1, 4, 64).int(), torch.zeros(3, 2, 4, 1)),
        (torch.zeros(3, 2, 1, 4, 64), torch.zeros(3, 2, 4, 1).double()),
        (torch.zeros(3, 2, 1, 4, 128)[..., ::2], torch.zeros(3, 2, 4, 1)),
    ],
)
def test_merges_without_contents_are_refused_in_the_same_words(kind, outs, lses):
    with pytest.raises(RuntimeError) as real:
        flashmla.merge_attention_states(outs, lses)
    given, _ = without_contents(kind, {"outs": outs, "lses": lses})
    with pytest.raises(RuntimeError) as refused:
        flashmla.merge_attention_states(**given)
    assert str(refused.value) == str(real.value)


@pytest.mark.parametrize("index", [99, -2])
def test_a_kernel_that_is_not_there_is_named_without_contents(index):
    given, _ = without_contents("meta", arguments())
    with pytest.raises(RuntimeError, match=f"kernel_index is {index}; it must be -1, for"):
        torch.ops.flashmla.decode(*operator_arguments(given), None, index)


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_a_kernel_of_another_dtype_is_named(on):
    given = {
        name: value.to(on) if isinstance(value, torch.Tensor) else value
        for name, value in arguments().items()
    }
    kernel = next(kernel for kernel in KERNELS if kernel.dtype == torch.float32)
    message = f"kernel {kernel.name} computes float32, q is bfloat16"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.flashmla.decode(*operator_arguments(given), None, kernel.index)


@pytest.mark.parametrize("kept", ["out", "softmax_lse"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 4, 576).bfloat16()}, "q has 3 dimensions"),
        ({"q": torch.zeros(()).bfloat16()}, "q has 0 dimensions"),
        ({"head_dim_v": -3}, r"\(576, -3\); it must be one of"),
        ({"head_dim_v": 2**40}, r"\(576, 1099511627776\); it must be one of"),
        ({"head_dim_v": None}, "argument 'head_dim_v'"),
        ({"head_dim_v": 64.0}, "argument 'head_dim_v'"),
    ],
)
def test_is_refused_with_the_same_message_when_one_result_is_given(kept, change, message):
    given = arguments()
    del given["softmax_lse" if kept == "out" else "out"]
    given.update(change)
    with pytest.raises(RuntimeError, match=message):
        flashmla.flash_mla_with_kvcache(**given)
    assert (given[kept] == 5.0).all()


@pytest.mark.parametrize(("change", "message"), SHARING, ids=id_of)
def test_results_that_share_memory_are_named(change, message):
    given = arguments()
    given.update(change(given))
    tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
    kept = [tensor.clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=f"{message}; what is written must lie apart"):
        flashmla.flash_mla_with_kvcache(**given)
    assert all(map(same_bits, tensors, kept))


@pytest.mark.parametrize("name", ["out", "softmax_lse"])
def test_results_that_require_gradients_are_named(name):
    given = arguments()
    given[name].requires_grad_()
    with pytest.raises(RuntimeError, match=f"{name} requires gradients"):
        flashmla.flash_mla_with_kvcache(**given)


def test_the_arguments_are_right_when_nothing_is_changed():
    given = arguments()
    flashmla.flash_mla_with_kvcache(**given)
    assert not (given["out"] == 5.0).all()


# What torch itself uses for forward mode.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("preallocated", [True, False])
@pytest.mark.parametrize("name", ["q", "k_cache"])
def test_forward_mode_derivatives_are_refused_rather_than_lost(name, preallocated):
    given = arguments()
    kept = [given["out"], given["softmax_lse"]]
    if not preallocated:
        del given["out"], given["softmax_lse"]

    def attend(value):
        return flashmla.flash_mla_with_kvcache(**{**given, name: value})[0]

    message = f"{name} has a tangent of forward-mode differentiation; flash_mla_with_kvcache"
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(attend, (given[name],), (torch.ones_like(given[name]),))
    with forward_ad.dual_level():
        with pytest.raises(RuntimeError, match=message):
            attend(forward_ad.make_dual(given[name], torch.ones_like(given[name])))
        assert all((tensor == 5.0).all() for tensor in kept)
        attend(given[name].clone())  # has none


@pytest.mark.parametrize("name", TENSORS[1:])
def test_an_operator_refuses_a_tensor_on_another_device(name):
    given = arguments()
    given[name] = given[name].to("meta")
    shared = operator_arguments(given)
    ops = torch.ops.flashmla
    for call in (
        lambda: ops.fwd_kvcache_mla(*shared),
        lambda: ops.decode(*shared, None),
        lambda: ops.decode_out(*shared, None, -1, given["out"], given["softmax_lse"]),
    ):
        with pytest.raises(RuntimeError, match=f"{name} is on meta"):
            call()
    assert (given["out"] == 5.0).all()


def test_gradients_are_not_asked_for_under_no_grad():
    given = arguments()
    given["q"].requires_grad_()
    with torch.no_grad():
        out, _ = flashmla.flash_mla_with_kvcache(**given)
    assert not out.requires_grad


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((ints(1, -5), 16, 1), r"cache_seqlens\[1\] is -5"),
        ((torch.zeros(2), 16, 1), "cache_seqlens has dtype float32"),
        ((torch.zeros(2, 2, dtype=torch.int32), 16, 1), "cache_seqlens has 2 dimensions"),
        ((ints(1), 0, 1), r"\(num_heads_per_head_k, num_heads_k\) is \(0, 1\)"),
        ((ints(1), 16, -1), r"is \(16, -1\)"),
    ],
)
def test_bad_planning_calls(given, message):
    with pytest.raises(RuntimeError, match=message):
        flashmla.get_mla_metadata(*given)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_numbers_of_more_than_64_bits_are_named(value):
    message = f"is {value}; it must be an integer of 64 bits"
    for left_out in ((), ("out", "softmax_lse"), ("out",)):
        given = arguments() | {"head_dim_v": value}
        for name in left_out:
            del given[name]
        with pytest.raises(RuntimeError, match=f"head_dim_v {message}"):
            flashmla.flash_mla_with_kvcache(**given)
    with pytest.raises(RuntimeError, match=f"num_heads_per_head_k {message}"):
        flashmla.get_mla_metadata(ints(1), value, 1)
    with pytest.raises(RuntimeError, match=f"num_heads_k {message}"):
        flashmla.get_mla_metadata(ints(1), 16, value)


@pytest.mark.parametrize("lengths", [None, [1, 2]])
def test_lengths_that_are_no_tensor_are_named(lengths):
    with pytest.raises(TypeError, match=r"cache_seqlens is .*; it must be a torch\.Tensor"):
        flashmla.get_mla_metadata(lengths, 16, 1)


@pytest.mark.parametrize("index", [99, 2**40, -2, -(2**40)])
def test_a_kernel_that_is_not_there_is_named(index):
    given = arguments()
    with pytest.raises(RuntimeError, match=f"kernel_index is {index}; it must be -1, for"):
        torch.ops.flashmla.decode(
            given["q"],
            given["k_cache"],
            512,
            given["cache_seqlens"],
            given["block_table"],
            None,
            False,
            given["tile_scheduler_metadata"],
            given["num_splits"],
            None,
            index,
        )
