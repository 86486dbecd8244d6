"""Changes of one line that each must make a test fail: who guards what.

A mutation is (file under src/, text that stands in it once, its replacement, the tests that must
fail, as a regular expression for ctest). run.py builds and runs them; check_texts.py only looks for
the texts.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """One planted fault."""

    file: str
    old: str
    new: str
    tests: str


PLANNER = r"^Planner\."
HAND_PLANS = r"/Decode\.(FollowsPlansByHand|RandomCalls).*cpu_portable_bf16"
AMX = r"^Amx\."

MUTATIONS = [
    # --- problem: the only place that rejects input
    Mutation(
        "problem/problem.cpp",
        "if (num_heads_q % num_heads_k != 0) {",
        "if (num_heads_q < num_heads_k) {",
        r"/DecodeMessage\.",
    ),
    Mutation(
        "problem/problem.cpp",
        ": 1.0 / std::sqrt(static_cast<double>(problem.head_dim));",
        ": 1.0 / std::sqrt(static_cast<double>(problem.head_dim_v));",
        r"/Decode\.Accuracy.*cpu_portable_bf16",
    ),
    Mutation(
        "problem/check.cpp",
        "if (tensor.strides[next] < span) {",
        "if (tensor.strides[next] + 1 < span) {",
        r"^Check\.",
    ),
    Mutation(
        "problem/check.cpp",
        "static_cast<std::uint64_t>(bytes) > tensor.size_bytes",
        "static_cast<std::uint64_t>(bytes) > tensor.size_bytes + 1",
        r"^Check\.|Message\.",
    ),
    Mutation(
        "problem/check.cpp",
        "return begin < other.end && other.begin < end;",
        "return begin < other.end && other.begin + 4 < end;",
        r"^Check\.",
    ),
    Mutation(
        "problem/check.cpp",
        "return span_of(a, modulus) <= distance && span_of(b, modulus) <= period - distance;",
        "return span_of(a, modulus) <= distance;",
        r"^Check\.",
    ),
    Mutation(
        "problem/contents.cpp",
        "if (visible < previous || visible > length) {",
        "if (visible < 0 || visible > length) {",
        r"^Contents\.|Message\.",
    ),
    Mutation(
        "problem/contents.cpp",
        "if (id < 0 || id >= problem.num_blocks) {",
        "if (id < 0 || id > problem.num_blocks) {",
        r"^Contents\.|Message\.",
    ),
    Mutation(
        "problem/contents.cpp",
        "if (length < 0 || length > limit) {",
        "if (length < 0 || length > limit + 1) {",
        r"^Contents\.|Message\.",
    ),
    # --- select: the first kernel that does not decline
    Mutation(
        "select/select.cpp",
        "return (row.required & ~facts.cpu_features) == 0;",
        "return row.required == 0 || (row.required & facts.cpu_features) != 0;",
        r"^Select\.",
    ),
    Mutation(
        "select/select.cpp",
        ": row.name != forced) continue;",
        ": row.name < forced) continue;",
        r"^Select\.|^Abi\.",
    ),
    Mutation(
        "select/select.cpp",
        "forced.empty() ? !is_preferred(row, problem, facts) :",
        "forced.empty() ? false :",
        r"^Select\.",
    ),
    Mutation(
        "select/select.cpp",
        "if (&row == chosen) break;",
        "if (&row == chosen) continue;",
        r"^Select\.|^Abi\.",
    ),
    Mutation(
        "select/cpu_features.cpp",
        'Cap{"avx2", kAvx2},',
        'Cap{"avx2", kUpToAvx512},',
        r"^Select\.",
    ),
    # --- schedule: the planner
    Mutation(
        "schedule/planner.hpp",
        "(tokens + kBlockTokens - 1) / kBlockTokens",
        "tokens / kBlockTokens",
        PLANNER,
    ),
    Mutation(
        "schedule/planner.hpp",
        "return share > least ? share : least;",
        "return share > least ? share : least - 8;",
        PLANNER,
    ),
    Mutation(
        "schedule/planner.hpp",
        "(inside - row_start_units + kUnitsPerBlock - 1) /",
        "(inside - row_start_units) /",
        PLANNER,
    ),
    Mutation(
        "schedule/planner.hpp",
        "return quotient(offset + row_start_units, payload) + 1;",
        "return quotient(offset + row_start_units + 1, payload) + 1;",
        PLANNER,
    ),
    Mutation(
        "schedule/planner.hpp",
        "(blocks > 1 ? blocks - 1 : 0)",
        "(blocks > 1 ? blocks : 0)",
        PLANNER,
    ),
    Mutation(
        "schedule/planner.cpp",
        "end.blocks_before = row > 0 ? blocks_of(row - 1) : 0;",
        "end.blocks_before = row > 0 ? blocks : 0;",
        PLANNER,
    ),
    Mutation("schedule/planner.cpp", "if (block >= blocks) {", "if (block > blocks) {", PLANNER),
    Mutation(
        "schedule/planner.hpp",
        "const std::int32_t worthwhile = plan.least_blocks.quotient(blocks);",
        "const std::int32_t worthwhile = plan.least_blocks.quotient(blocks) + 1;",
        PLANNER,
    ),
    Mutation(
        "schedule/planner.hpp",
        "most <= payload + even_slack(payload) &&",
        "most <= 2 * payload + even_slack(payload) &&",
        PLANNER,
    ),
    Mutation(
        "schedule/planner.hpp",
        "quotient(Units{blocks} * (share + 1), Units{shares}));",
        "quotient(Units{blocks} * share, Units{shares}) + 1);",
        PLANNER,
    ),
    Mutation(
        "schedule/planner.cpp",
        "(part + 1) * payload <= row_end; ++part",
        "(part + 1) * payload < row_end; ++part",
        PLANNER,
    ),
    # --- schedule: reading any plan
    Mutation(
        "schedule/resolve.cpp",
        "walk.begin_row >= problem.batch) {",
        "walk.begin_row > problem.batch) {",
        r"^Resolve\.|/Decode\.(FollowsPlans|RandomCalls|Leaves).*cpu_portable_bf16|/PlanMessage\.",
    ),
    Mutation(
        "schedule/resolve.cpp",
        "walk.end_block = std::min(walk.end_block, row_blocks(problem, walk.end_row));",
        "walk.end_block = std::max(walk.end_block, row_blocks(problem, walk.end_row));",
        r"^Resolve\.|" + HAND_PLANS,
    ),
    Mutation(
        "schedule/resolve.cpp",
        "(fields[2] == fields[0] && fields[3] < fields[1]);",
        "(fields[2] == fields[0] && fields[3] <= fields[1]);",
        r"^Resolve\.|^Plan\.|" + HAND_PLANS,
    ),
    Mutation(
        "schedule/resolve.cpp",
        "} else if (row_blocks(problem, row) > 0) {",
        "} else if (row_blocks(problem, row) > 99) {",
        r"^Resolve\.|/PlanMessage\.",
    ),
    Mutation(
        "schedule/resolve.cpp",
        "if (owners[row] != kNoOwner || fragment.block_begin < covered) {",
        "if ((owners[row] != kNoOwner && covered > 0) || fragment.block_begin < covered) {",
        r"^Resolve\.|/PlanMessage\.",
    ),
    Mutation(
        "schedule/resolve.cpp",
        "if (fragment.block_begin > covered) return",
        "if (fragment.block_begin > covered + 1) return",
        r"^Resolve\.|/PlanMessage\.",
    ),
    Mutation(
        "schedule/resolve.cpp",
        "if (covered < blocks) return",
        "if (covered + 1 < blocks) return",
        r"^Resolve\.|/PlanMessage\.",
    ),
    Mutation(
        "schedule/resolve.cpp",
        "a.row < b.row : a.block_begin < b.block_begin;",
        "a.row < b.row : a.part < b.part;",
        r"^Resolve\.|" + HAND_PLANS,
    ),
    # --- combine: the merge
    Mutation(
        "combine/merge.hpp",
        "return std::isinf(lse);",
        "return lse > 1e38f;",
        r"^MergeRow\.|/Merge\.",
    ),
    Mutation(
        "combine/merge.hpp",
        "if (!is_empty_part(lse)) scale.sum += static_cast<double>(std::exp(lse - scale.largest));",
        "if (lse <= scale.largest) scale.sum += std::exp(lse - scale.largest);",
        r"^MergeRow\.",
    ),
    Mutation("combine/merge.hpp", "? 0.0f : -0.0f);", "? 0.0f : 0.0f);", r"^MergeRow\.|/Merge\."),
    Mutation(
        "combine/merge.hpp",
        "if (sum == 0.0) return std::numeric_limits<float>::infinity();",
        "if (sum == 0.0) return -std::numeric_limits<float>::infinity();",
        r"^MergeRow\.|/Merge\.",
    ),
    Mutation(
        "combine/merge.hpp",
        "sums[c] = std::max(std::min(sums[c], largest[c]), least[c]);",
        "sums[c] = std::max(sums[c], least[c]);",
        r"^MergeRow\.",
    ),
    Mutation(
        "combine/merge.hpp",
        "const In* part = out_of(i) + begin;",
        "const In* part = out_of(i);",
        r"^MergeRow\.",
    ),
    # --- kv: cache formats
    Mutation(
        "kv/dense.hpp",
        "return element_size(dtype) * head_dim;",
        "return (element_size(dtype) + 2) / 2 * head_dim;",
        r"^Dense\.",
    ),
    # --- backends/cpu/decode.cpp: the walk of a plan
    Mutation(
        "backends/cpu/decode.cpp",
        "(rows - 1) / most_rows + 1,",
        "rows / most_rows,",
        r"/Decode\.MoreQueryRows.*cpu_portable_bf16",
    ),
    Mutation(
        "backends/cpu/decode.cpp",
        "if (schedule_.owners[static_cast<std::size_t>(row)] != part) return;",
        "if (schedule_.owners[static_cast<std::size_t>(row)] == part) return;",
        HAND_PLANS,
    ),
    Mutation(
        "backends/cpu/decode.cpp",
        "std::min<std::int64_t>(length, std::int64_t{share.block_end} * kBlockTokens));",
        "std::int64_t{share.block_end} * kBlockTokens);",
        HAND_PLANS,
    ),
    Mutation(
        "backends/cpu/decode.cpp",
        "(std::int64_t{fragment} * problem_.num_heads_k + task.kv_head) *",
        "(std::int64_t{fragment} * problem_.num_heads_k) *",
        r"/Decode\.(SeveralKeyValueHeads|RandomCalls).*cpu_portable_bf16",
    ),
    Mutation(
        "backends/cpu/decode.cpp",
        "float* weights = lses + base;",
        "float* weights = lses + base - begin % 2;",
        HAND_PLANS,
    ),
    Mutation(
        "backends/cpu/decode.cpp",
        "row * ls[1] + head * ls[2] + t * ls[3];",
        "row * ls[1] + head * ls[3] + t * ls[2];",
        r"/Merge\.",
    ),
    Mutation(
        "backends/cpu/decode.cpp",
        "static_cast<std::size_t>(worker) * layout.scratch_stride;",
        "static_cast<std::size_t>(worker) * 0;",
        r"/Decode\.SameBits.*cpu_portable_bf16|^Threads\.",
    ),
    # --- backends/cuda/plan_cut.hpp: what the device planner makes of groups of rows
    Mutation(
        "backends/cuda/plan_cut.hpp",
        "static_cast<std::int32_t>(end < batch ? end : batch)};",
        "static_cast<std::int32_t>(end)};",
        r"^PlanCut\.",
    ),
    Mutation(
        "backends/cuda/plan_cut.hpp",
        "group : num_groups] < at && group < num_groups;",
        "group : num_groups] <= at && group < num_groups;",
        r"^PlanCut\.",
    ),
    Mutation(
        "backends/cuda/plan_cut.hpp",
        "while (offset + cost < at) {",
        "while (offset + cost <= at) {",
        r"^PlanCut\.",
    ),
    # --- backends/cpu/amx: masks, raised references, tails, pages, merges
    Mutation(
        "backends/cpu/amx/softmax.hpp",
        "return _mm512_cmpgt_epi32_mask(visible, _mm512_set1_epi32(index));",
        "return _mm512_cmpge_epi32_mask(visible, _mm512_set1_epi32(index));",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/softmax.hpp",
        "scratch_.totals[row_tile_ * kTileRows + row] *= static_cast<double>(factor);",
        "scratch_.totals[row_tile_ * kTileRows + row] *= factor > 0.0f ? 1.0 : 0.0;",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/softmax.hpp",
        "rescale_weights(weights(0), weights(unit_), row, _mm512_set1_ps(factor));",
        "rescale_weights(weights(0), weights(0), row, _mm512_set1_ps(factor));",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/softmax.hpp",
        "return _mm512_mask_add_ps(exponent, counts, before, rise);",
        "return exponent;",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/softmax.hpp",
        "if (begin_ == 0) return;",
        "if (begin_ >= 0) return;",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/softmax.hpp",
        "_mm512_mask_sub_ps(p[0], 0xff00, p[0],",
        "_mm512_mask_sub_ps(p[0], 0xfe00, p[0],",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/kernels.cpp",
        "_mm512_set1_ps(factors[i % kTileRows]), sum);",
        "_mm512_set1_ps(1.0f), sum);",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/kernels.cpp",
        "_mm512_store_ps(output, _mm512_setzero_ps());",
        "_mm512_store_ps(output, sum);",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/kernels.cpp",
        "<= problem_.page_size && first + kTileRows <= end_) {",
        "<= problem_.page_size && first < end_) {",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/kernels.cpp",
        "if (token % problem_.page_size + kTileRows <= problem_.page_size &&",
        "if (token % problem_.page_size < problem_.page_size &&",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/kernels.cpp",
        "if (!empty && !(is_finite && is_exact)) overflown_.add(row);",
        "if (!empty && !(is_finite || is_exact)) overflown_.add(row);",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/kernels.cpp",
        "const float weight = weights[i * partials.weight_stride];",
        "const float weight = weights[i];",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/layout.hpp",
        "Shape::kInterleavedValues ? kTileRows : 1;",
        "kTileRows;",
        AMX,
    ),
    Mutation(
        "backends/cpu/amx/interleave.hpp",
        "column_bytes_ + piece % 2 * (2 * kPairs) * stride;",
        "column_bytes_ + piece % 2 * kPairs * stride;",
        AMX,
    ),
]
