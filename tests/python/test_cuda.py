"""What only a GPU has: graphs, streams, the checked mode, hostile contents, races."""

from __future__ import annotations

import math

import pytest
import torch
from inputs import attend, attend_into, call, formula_inputs, library_plan, same_bits

import flashmla
from flashmla import _library, cases, reference
from flashmla.cli.check import limits

CASES = cases.load("dense") + cases.load("edge")
KERNELS = [k for k in _library.kernels() if k.device_type == "cuda"]


def equal(found, expected) -> bool:
    return all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_kernel_is_within_the_bounds_on_every_case(gpu, case):
    expected = {}
    for kernel in KERNELS:
        inputs = cases.make_inputs(case, kernel.dtype)
        moved = inputs.to(gpu)
        for plan in (library_plan(moved), *(cases.plan_of(inputs, n) for n in case.parts)):
            try:
                found = attend(moved, tuple(tensor.to(gpu) for tensor in plan), kernel)
            except RuntimeError as error:
                if str(error).startswith(f"kernel {kernel.name} "):
                    break  # it declines
                raise
            if kernel.dtype not in expected:
                expected[kernel.dtype] = inputs.expected()
            out, lse = (tensor.cpu() for tensor in found)
            out_error, lse_error = reference.errors(out, lse, *expected[kernel.dtype])
            bound = limits(case, kernel.dtype)
            assert out_error <= bound.out_relative, kernel.name
            assert lse_error <= bound.lse_absolute, kernel.name
            worst = reference.worst_query_error(out, expected[kernel.dtype][0])
            assert worst <= 3 * bound.out_relative, kernel.name


# --- Graphs --------------------------------------------------------------------------------------


class Step:
    """A captured decoding step in fixed buffers, for 8 rows of up to 100,000 tokens."""

    MOST = 100_000

    def __init__(self, gpu: torch.device, heads: int, plans: bool):
        generator = torch.Generator(gpu).manual_seed(3)
        pages = -(-self.MOST // 64) + 8
        self.inputs = cases.Inputs(
            q=torch.randn(8, 2, heads, 576, generator=generator, device=gpu).bfloat16(),
            k_cache=torch.randn(pages, 64, 1, 576, generator=generator, device=gpu).bfloat16(),
            # Every row reads the same pages, in an order of its own.
            block_table=torch.stack(
                [torch.randperm(pages, generator=generator, device=gpu) for _ in range(8)]
            ).int(),
            cache_seqlens=torch.ones(8, dtype=torch.int32, device=gpu),
            head_dim_v=512,
            softmax_scale=0.1,
            causal=True,
            visible_lens=None,
        )
        self.plans = plans  # whether the step makes its plan too
        self.plan = library_plan(self.inputs)
        self.out = torch.zeros(8, 2, heads, 512, dtype=torch.bfloat16, device=gpu)
        self.lse = torch.zeros(8, heads, 2, device=gpu)
        self.run()  # whatever is loaded at the first call must not be captured
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def run(self) -> None:
        plan = library_plan(self.inputs) if self.plans else self.plan
        call(self.inputs, plan, out=self.out, softmax_lse=self.lse)

    def replay(self, lens: list[int], rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
        """Lengths go into the captured buffers, and a plan of the first `rows` rows, padded."""
        lengths = torch.tensor(lens, dtype=torch.int32, device=self.out.device)
        self.inputs.cache_seqlens.copy_(lengths)
        metadata, num_splits = flashmla.get_mla_metadata(lengths[:rows], *self.inputs.plan_heads())
        if not self.plans:
            self.plan[0].copy_(metadata)
            self.plan[1][: rows + 1].copy_(num_splits)
            self.plan[1][rows + 1 :].copy_(num_splits[-1:])
        self.out.fill_(5.0)
        self.lse.fill_(5.0)
        self.graph.replay()
        return self.out.clone(), self.lse.clone()

    def eager(self, lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        fresh = cases.Inputs(**vars(self.inputs))
        fresh.cache_seqlens = torch.tensor(lens, dtype=torch.int32, device=self.out.device)
        return call(fresh, library_plan(fresh))


MIXED = [130, 97, 1, 64, 65, 4097, 2, 63]
LONG = [100_000, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("plans", [True, False], ids=["plan_inside", "plan_copied"])
def test_replays_with_other_lengths_equal_eager_calls(gpu, heads, plans):
    step = Step(gpu, heads, plans)
    for lens in (MIXED, LONG, MIXED, [1] * 8, [0] * 8):
        assert equal(step.replay(lens), step.eager(lens))
    expected = {tuple(lens): step.eager(lens) for lens in (MIXED, LONG)}
    for turn in range(100):
        lens = LONG if turn % 2 else MIXED
        assert equal(step.replay(lens), expected[tuple(lens)])


@pytest.mark.parametrize("heads", [8, 64])
def test_a_padded_plan_leaves_the_other_rows_alone(gpu, heads):
    step = Step(gpu, heads, plans=False)
    lens = [130, 97, 1, 64, 4097, 0, 0, 0]
    out, lse = step.replay(lens, rows=5)
    fresh = cases.Inputs(**vars(step.inputs))
    for name in ("q", "block_table"):
        setattr(fresh, name, getattr(fresh, name)[:5])
    fresh.cache_seqlens = torch.tensor(lens[:5], dtype=torch.int32, device=gpu)
    assert equal((out[:5], lse[:5]), call(fresh, library_plan(fresh)))
    assert (out[5:] == 5.0).all()
    assert (lse[5:] == 5.0).all()
    assert equal(step.replay(MIXED), step.eager(MIXED))


def test_nine_rows_in_a_graph(gpu):
    lens = torch.arange(1, 10, dtype=torch.int32)
    inputs = formula_inputs([9] * 9, 8, uniform=True).to(gpu)
    inputs.cache_seqlens = lens.to(gpu)
    call(inputs, library_plan(inputs))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = call(inputs, library_plan(inputs))
    for order in (lens, lens.flip(0)):
        inputs.cache_seqlens.copy_(order)
        graph.replay()
        assert (lse.cpu() - order.log()[:, None, None]).abs().max() <= 2e-5


# --- Streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [16, 128])
def test_works_on_the_current_stream(gpu, heads):
    inputs = formula_inputs([130, 700], heads).to(gpu)
    expected = call(inputs, library_plan(inputs))
    late = cases.Inputs(**vars(inputs))
    late.q, late.cache_seqlens = torch.zeros_like(inputs.q), torch.zeros_like(inputs.cache_seqlens)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s in which another stream would read too early
        late.q.copy_(inputs.q)
        late.cache_seqlens.copy_(inputs.cache_seqlens)
        found = call(late, library_plan(late))
    stream.synchronize()
    assert equal(found, expected)


@pytest.mark.parametrize("heads", [16, 32, 128])
def test_two_streams_share_a_plan(gpu, heads):
    inputs = formula_inputs([4641, 300, 1730, 0], heads).to(gpu)
    plan = library_plan(inputs)
    expected = call(inputs, plan)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found = []
    for turn in range(100):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(call(inputs, plan))
    torch.cuda.synchronize()
    assert all(equal(results, expected) for results in found)


def test_the_device_of_the_tensors_is_used_and_the_current_one_kept(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    inputs = formula_inputs([130, 97], 16, 2, causal=True)
    expected = attend(inputs, kernel="cuda")
    other = inputs.to("cuda:1")
    found = call(other, library_plan(other))
    assert torch.cuda.current_device() == 0
    assert found[0].device == torch.device("cuda:1")
    assert equal([tensor.cpu() for tensor in found], expected)


def test_calls_keep_no_memory(gpu):
    inputs = formula_inputs([130, 700], 128).to(gpu)
    plan = library_plan(inputs)
    call(inputs, plan)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        call(inputs, library_plan(inputs))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


# --- Contents ------------------------------------------------------------------------------------


def spoilt(gpu: torch.device, name: str, index: tuple[int, ...], value: int):
    """Arguments of which one number is wrong: inputs, plan."""
    inputs = formula_inputs([150, 20], 16, 2).to(gpu)
    inputs.visible_lens = torch.tensor([[100, 150], [20, 20]], dtype=torch.int32, device=gpu)
    plan = tuple(tensor.to(gpu) for tensor in cases.plan_of(inputs, 2))
    tensors = vars(inputs) | {"tile_scheduler_metadata": plan[0]}
    tensors[name][index] = value
    return inputs, plan


BAD_CONTENTS = [
    ("block_table", (0, 2), -1, r"block_table\[0, 2\] is -1; k_cache has blocks 0 to"),
    ("block_table", (1, 0), 2147480000, r"block_table\[1, 0\] is 2147480000"),
    ("cache_seqlens", (1,), -1, r"cache_seqlens\[1\] is -1; it must be between 0 and 192"),
    ("cache_seqlens", (0,), 193, r"cache_seqlens\[0\] is 193; it must be between 0 and 192"),
    ("visible_lens", (1, 1), 21, r"visible_lens\[1, 1\] is 21; .* and 20"),
    ("visible_lens", (0, 1), 99, r"visible_lens\[0, 1\] is 99; it must be between 100"),
    ("tile_scheduler_metadata", (1, 1), 0, "that another part walks too"),
    ("tile_scheduler_metadata", (0, 3), 1, "leaves out blocks 1 to 1 of row 0"),
]


@pytest.mark.parametrize(("name", "index", "value", "message"), BAD_CONTENTS)
def test_the_checked_mode_names_what_is_wrong_and_writes_nothing(
    gpu, monkeypatch, name, index, value, message
):
    monkeypatch.setenv("FLASHMLA_CHECK", "1")
    inputs, plan = spoilt(gpu, name, index, value)
    out = torch.full((2, 2, 16, 512), 5.0, dtype=torch.bfloat16, device=gpu)
    lse = torch.full((2, 16, 2), 5.0, device=gpu)
    with pytest.raises(RuntimeError, match=message):
        call(inputs, plan, out=out, softmax_lse=lse)
    with pytest.raises(RuntimeError, match=message):
        call(inputs, plan)
    assert (out == 5.0).all()
    assert (lse == 5.0).all()


def test_the_checked_mode_passes_what_is_right(gpu, monkeypatch):
    inputs = formula_inputs([150, 0, 20], 16, 2, causal=True).to(gpu)
    plan = library_plan(inputs)
    expected = call(inputs, plan)
    monkeypatch.setenv("FLASHMLA_CHECK", "1")
    assert equal(library_plan(inputs), plan)
    assert equal(call(inputs, plan), expected)


def test_the_checked_mode_reads_what_the_stream_has_yet_to_write(gpu, monkeypatch):
    monkeypatch.setenv("FLASHMLA_CHECK", "1")
    inputs = formula_inputs([150, 20], 16).to(gpu)
    plan = library_plan(inputs)
    good = inputs.block_table.clone()
    inputs.block_table.fill_(-1)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        inputs.block_table.copy_(good)
        call(inputs, plan)
    torch.cuda.synchronize()


def test_the_checked_mode_checks_lengths_of_a_plan(gpu, monkeypatch):
    lens = torch.tensor([1, -5], dtype=torch.int32, device=gpu)
    flashmla.get_mla_metadata(lens, 16, 1)  # without it, harmless
    monkeypatch.setenv("FLASHMLA_CHECK", "1")
    with pytest.raises(RuntimeError, match=r"cache_seqlens\[1\] is -5"):
        flashmla.get_mla_metadata(lens, 16, 1)
    monkeypatch.setenv("FLASHMLA_CHECK", "on")
    with pytest.raises(RuntimeError, match='FLASHMLA_CHECK is "on"; it must be 0 or 1'):
        flashmla.get_mla_metadata(lens, 16, 1)


def test_the_checked_mode_refuses_a_capture_in_words(gpu, monkeypatch):
    inputs = formula_inputs([150, 20], 16).to(gpu)
    plan = library_plan(inputs)
    call(inputs, plan)
    monkeypatch.setenv("FLASHMLA_CHECK", "1")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        inputs.q.mul_(1)  # a graph of nothing at all is warned of
        with pytest.raises(RuntimeError, match="capture without FLASHMLA_CHECK"):
            call(inputs, plan)
    monkeypatch.delenv("FLASHMLA_CHECK")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(inputs, plan)
    graph.replay()
    assert equal(found, call(inputs, plan))


@pytest.mark.parametrize(("name", "index", "value", "message"), BAD_CONTENTS)
def test_bad_contents_are_harmless_without_it(gpu, name, index, value, message):
    inputs, plan = spoilt(gpu, name, index, value)
    call(inputs, plan)
    torch.cuda.synchronize()
    good = formula_inputs([130, 97], 16, 2, causal=True)
    out, lse = attend(good, kernel="cuda")
    assert reference.errors(out, lse, *good.expected())[0] <= 3e-3


# --- Refusals ------------------------------------------------------------------------------------


def test_what_the_gpu_does_not_take_is_refused_in_words(gpu):
    inputs = formula_inputs([97, 130], 16).to(gpu)
    plan = library_plan(inputs)
    for name, message in (
        ("q", "needs an address that is a multiple of 16 bytes, that of q is not"),
        ("k_cache", "strides that are multiples of 8 elements, k_cache has one of 577"),
    ):
        bad = cases.Inputs(**vars(inputs))
        tensor = getattr(inputs, name)
        spread = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + 1))
        first = 1 if name == "q" else 0
        setattr(bad, name, spread[..., first : first + tensor.shape[-1]])
        with pytest.raises(RuntimeError, match=message):
            call(bad, plan)
    wide = cases.Inputs(**vars(inputs))
    wide.q, wide.k_cache = inputs.q.float(), inputs.k_cache.float()
    with pytest.raises(RuntimeError, match="q has dtype float32; it must be bfloat16 or float16"):
        call(wide, plan)
    small = formula_inputs([97], 16, dims=(96, 64)).to(gpu)
    with pytest.raises(RuntimeError, match=r"computes head dims \(576, 512\).*has \(96, 64\)"):
        call(small, library_plan(small))


@pytest.mark.parametrize("heads", [16, 32, 128])
def test_the_kernel_that_is_explained_is_the_one_that_computes(gpu, heads):
    inputs = formula_inputs([97, 130], heads).to(gpu)
    tensors = (inputs.q, inputs.k_cache, inputs.block_table, inputs.cache_seqlens, 512)
    chosen, reasons = _library.explain_selection(*tensors)
    (kernel,) = (k for k in KERNELS if k.name == chosen)
    assert kernel.dtype == torch.bfloat16
    assert all(reasons.values())
    plan = library_plan(inputs)
    assert equal(attend(inputs, plan, kernel), call(inputs, plan))
    last = KERNELS[-1]  # of float16
    with pytest.raises(RuntimeError, match=f"kernel {last.name} computes float16, q is bfloat16"):
        attend(inputs, plan, last)


@pytest.mark.parametrize("name", ["k_cache", "block_table", "cache_seqlens"])
def test_a_tensor_left_on_the_cpu_is_named(gpu, name):
    inputs = formula_inputs([97, 130], 16)
    moved = inputs.to(gpu)
    plan = library_plan(moved)
    setattr(moved, name, getattr(inputs, name))
    with pytest.raises(RuntimeError, match=f"{name} is on cpu"):
        call(moved, plan)


# --- Torch ---------------------------------------------------------------------------------------


def test_operators_pass_opcheck(gpu):
    inputs = formula_inputs([130, 97, 0], 8, 2, causal=True).to(gpu)
    shared = (
        inputs.q,
        inputs.k_cache,
        512,
        inputs.cache_seqlens,
        inputs.block_table,
        0.25,
        True,
        *library_plan(inputs),
    )
    torch.library.opcheck(torch.ops.flashmla.fwd_kvcache_mla.default, shared)
    torch.library.opcheck(
        torch.ops.flashmla.get_mla_metadata.default, (inputs.cache_seqlens, 16, 1)
    )


def test_full_graph_with_a_dynamic_batch(gpu):
    def step(q, k_cache, block_table, cache_seqlens):
        plan = flashmla.get_mla_metadata(cache_seqlens, q.shape[1] * q.shape[2], 1)
        return flashmla.flash_mla_with_kvcache(
            q, k_cache, block_table, cache_seqlens, 512, *plan, 0.25, True
        )

    inputs = formula_inputs([130, 97, 0], 8, 2, causal=True).to(gpu)
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 2):
        given = (
            inputs.q[:rows],
            inputs.k_cache,
            inputs.block_table[:rows],
            inputs.cache_seqlens[:rows],
        )
        assert equal(compiled(*given), step(*given))


# --- Races ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 16, 32, 48, 128])
@pytest.mark.parametrize("queries", [1, 2])
def test_calls_beside_other_work_give_the_same_bits(gpu, heads, queries):
    """The same bits 50 times for every number of parts, beside work that shifts the timing."""
    inputs = formula_inputs([129, 1000, 64, 0, 700], heads, queries, causal=True)
    expected = inputs.expected()
    moved = inputs.to(gpu)
    beside = torch.cuda.Stream()
    matrix = torch.randn(2048, 2048, device=gpu, dtype=torch.bfloat16)
    out = torch.empty(5, queries, heads, 512, dtype=torch.bfloat16, device=gpu)
    lse = torch.empty(5, heads, queries, device=gpu)
    for parts in (1, 2, 3, 4, 5, 7, 11, 16, 31, 66, 132):
        plan = tuple(tensor.to(gpu) for tensor in cases.plan_of(inputs, parts))
        first = None
        same = torch.ones((), dtype=torch.bool, device=gpu)
        for run in range(50):
            # What the next workspace is made of.
            torch.full((1 << 22,), math.nan, device=gpu)
            out.fill_(math.nan)
            lse.fill_(math.nan)
            with torch.cuda.stream(beside):
                for _ in range(run % 3):
                    matrix @ matrix
            attend_into(moved, plan, "cuda", out, lse)
            if first is None:
                first = out.clone(), lse.clone()
                out_error, lse_error = reference.errors(out.cpu(), lse.cpu(), *expected)
                assert out_error <= 3e-3
                assert lse_error <= 1e-4
            same &= (out.view(torch.int16) == first[0].view(torch.int16)).all()
            same &= (lse.view(torch.int32) == first[1].view(torch.int32)).all()
        assert bool(same), f"{parts} parts"
