// Every check of a public call: the message names the argument, what it was and what is accepted,
// and nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/calls.hpp"
#include "support/decode_case.hpp"
#include "support/executors.hpp"

namespace flashmla::testing {
namespace {

using Words = std::vector<std::string>;

void expect_words(const std::string& message, const Words& words) {
  for (const std::string& word : words) {
    EXPECT_NE(message.find(word), std::string::npos)
        << "\"" << word << "\" is not in the message: " << message;
  }
}

template <class Args>
struct Bad {
  const char* name;
  std::function<void(Args&)> spoil;
  Words words;
  flashmla_status status = FLASHMLA_INVALID_ARGUMENT;

  friend void PrintTo(const Bad& bad, std::ostream* out) { *out << bad.name; }
};
constexpr auto kBadName = [](const auto& info) { return std::string(info.param.name); };

// What a call told that was refused with `status`, the check of its arguments tells too, unless it
// is about contents.
template <class Args>
void expect_same_check(flashmla_status (*check)(const Args*), const Args& args,
                       flashmla_status status) {
  const std::string message = flashmla_last_error();
  for (const char* contents : {"block_table[", "cache_seqlens[", "visible_lens["}) {
    if (message.rfind(contents, 0) != 0) continue;
    EXPECT_EQ(check(&args), FLASHMLA_OK) << flashmla_last_error();
    return;
  }
  EXPECT_EQ(check(&args), status);
  EXPECT_EQ(flashmla_last_error(), message);
}

// An address for each tensor that nobody may touch.
template <class Args>
Args without_memory(Args args, std::initializer_list<flashmla_tensor Args::*> tensors) {
  std::uintptr_t number = 0;
  for (flashmla_tensor Args::*tensor : tensors) {
    (args.*tensor).data = reinterpret_cast<void*>(++number << 56);
  }
  return args;
}

// --- Attention -----------------------------------------------------------------------------------

DecodeShape valid_shape() {
  DecodeShape shape;
  shape.lengths = {130, 0, 65};
  shape.seq_len_q = 2;
  shape.num_heads_q = 6;
  shape.num_heads_k = 2;
  shape.head_dim = 64;
  shape.head_dim_v = 64;
  return shape;
}

using BadDecode = Bad<flashmla_decode_args>;
class DecodeMessage : public ::testing::TestWithParam<BadDecode> {};

// Contents of int32 tensors that a test spoils live as long as the program.
std::int32_t bad_lengths[] = {130, -1, 65};
std::int32_t long_lengths[] = {130, 0, 1000};
std::int32_t bad_table[] = {3, 4, 5, -1, -1, 0, 0, 0, 0, 0, 1, 99, 0, 0, 0};
std::int32_t negative_id_table[] = {3, -7, 5, -1, -1, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0};
std::int32_t good_visible[] = {129, 130, 0, 0, 64, 65};
std::int32_t long_visible[] = {129, 130, 0, 1, 64, 65};
std::int32_t falling_visible[] = {129, 130, 0, 0, 64, 63};
std::int32_t negative_visible[] = {-2, 130, 0, 0, 64, 65};

flashmla_tensor int32_tensor(std::int32_t* data, std::vector<std::int64_t> shape) {
  flashmla_tensor tensor{};
  tensor.data = data;
  tensor.dtype = FLASHMLA_INT32;
  tensor.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    tensor.shape[i] = shape[i];
    tensor.strides[i] = stride;
    stride *= shape[i];
  }
  return tensor;
}

const BadDecode kBadDecodes[] = {
    {"device_type",
     [](auto& a) { a.device_type = 7; },
     {"device type is 7", "0 (CPU)", "1 (CUDA)"}},
    {"device_index",
     [](auto& a) { a.device_index = -2; },
     {"device index is -2", "not be negative"}},
    {"q_missing",
     [](auto& a) {
       a.q = {};
       a.q.dtype = a.k_cache.dtype;
     },
     {"q is missing", "(batch, seq_len_q, num_heads_q, head_dim)"}},
    {"q_zero", [](auto& a) { a.q = {}; }, {"q is missing"}},
    {"k_cache_zero", [](auto& a) { a.k_cache = {}; }, {"k_cache is missing"}},
    {"block_table_zero", [](auto& a) { a.block_table = {}; }, {"block_table is missing"}},
    {"out_zero", [](auto& a) { a.out = {}; }, {"out is missing"}},
    {"softmax_lse_zero", [](auto& a) { a.softmax_lse = {}; }, {"softmax_lse is missing"}},
    {"q_dtype",
     [](auto& a) { a.q.dtype = FLASHMLA_INT32; },
     {"q has dtype int32", "bfloat16, float16 or float32"}},
    {"q_unknown_dtype", [](auto& a) { a.q.dtype = 99; }, {"q has dtype 99; it must be bfloat16"}},
    {"k_cache_unknown_dtype",
     [](auto& a) { a.k_cache.dtype = -7; },
     {"k_cache has dtype -7; it must be that of q"}},
    {"q_rank",
     [](auto& a) { a.q.rank = 3; },
     {"q has 3 dimensions", "4: (batch, seq_len_q, num_heads_q, head_dim)"}},
    {"q_negative_rank", [](auto& a) { a.q.rank = -1; }, {"q has -1 dimensions"}},
    {"q_huge_rank", [](auto& a) { a.q.rank = 1000000; }, {"q has 1000000 dimensions"}},
    {"q_null",
     [](auto& a) { a.q.data = nullptr; },
     {"q has shape (3, 2, 6, 64)", "data pointer is null"}},
    {"q_negative_size",
     [](auto& a) { a.q.shape[1] = -2; },
     {"q has shape (3, -2, 6, 64)", "must not be negative"}},
    {"q_negative_stride",
     [](auto& a) { a.q.strides[0] = -768; },
     {"q has strides (-768, 384, 64, 1)", "must not be negative"}},
    {"q_misaligned",
     [](auto& a) {
       a.q.data = static_cast<char*>(a.q.data) + 1;
       a.q.size_bytes = 0;
     },
     {"q is not aligned", "2 bytes"}},
    {"q_too_small",
     [](auto& a) { a.q.size_bytes -= 1; },
     {"q with shape (3, 2, 6, 64)", "4608 bytes", "4607"}},
    {"q_64_bits", [](auto& a) { a.q.strides[0] = INT64_MAX; }, {"q with shape", "64 bits"}},
    {"q_last_stride",
     [](auto& a) {
       a.q.strides[3] = 2;
       a.q.size_bytes = 0;
     },
     {"q has strides (768, 384, 64, 2)", "last dimension must be contiguous"}},
    {"q_no_tokens", [](auto& a) { a.q.shape[1] = 0; }, {"seq_len_q", "is 0", "between 1 and"}},
    {"q_no_heads", [](auto& a) { a.q.shape[2] = 0; }, {"num_heads_q", "is 0", "between 1 and"}},
    {"q_batch_too_large",
     [](auto& a) {
       a.q.shape[0] = 5000000000;
       a.q.strides[0] = 0;
     },
     {"batch (q.shape[0]) is 5000000000", "2147483647"}},
    {"heads_do_not_divide",
     [](auto& a) { a.q.shape[2] = 5; },
     {"q has 5 heads", "multiple of the 2 heads of k_cache"}},
    {"k_cache_missing",
     [](auto& a) {
       a.k_cache = {};
       a.k_cache.dtype = a.q.dtype;
     },
     {"k_cache is missing", "(num_blocks, page_block_size, num_heads_k, head_dim)"}},
    {"k_cache_dtype",
     [](auto& a) { a.k_cache.dtype = FLASHMLA_FLOAT16; },
     {"k_cache has dtype float16", "that of q, bfloat16"}},
    {"k_cache_rank", [](auto& a) { a.k_cache.rank = 5; }, {"k_cache has 5 dimensions", "4:"}},
    {"k_cache_head_dim",
     [](auto& a) { a.k_cache.shape[3] = 63; },
     {"k_cache has shape", "63)", "(any, any, any, 64)"}},
    {"k_cache_page_zero",
     [](auto& a) { a.k_cache.shape[1] = 0; },
     {"page_block_size (k_cache.shape[1]) is 0", "between 1 and"}},
    {"k_cache_no_heads", [](auto& a) { a.k_cache.shape[2] = 0; }, {"num_heads_k", "is 0"}},
    {"k_cache_last_stride",
     [](auto& a) { a.k_cache.strides[3] = 0; },
     {"k_cache has strides", "last dimension must be contiguous"}},
    {"k_cache_too_small",
     [](auto& a) { a.k_cache.size_bytes = 100; },
     {"k_cache with shape", "its memory holds 100"}},
    {"head_dim_v",
     [](auto& a) { a.head_dim_v = 63; },
     {"(head_dim, head_dim_v) is (64, 63)", "(576, 512)", "(512, 512)", "(320, 256)", "(288, 256)",
      "(192, 128)", "(128, 128)", "(96, 64)", "(64, 64)"}},
    {"block_table_missing",
     [](auto& a) {
       a.block_table = {};
       a.block_table.dtype = FLASHMLA_INT32;
     },
     {"block_table is missing", "(batch, max_num_blocks_per_seq)"}},
    {"block_table_dtype",
     [](auto& a) { a.block_table.dtype = FLASHMLA_FLOAT32; },
     {"block_table has dtype float32", "must be int32"}},
    {"block_table_batch",
     [](auto& a) { a.block_table.shape[0] = 2; },
     {"block_table has shape (2, 5)", "(3, any)"}},
    {"block_table_id",
     [](auto& a) {
       a.block_table = int32_tensor(bad_table, {3, 5});
     },
     {"block_table[2, 1] is 99", "blocks 0 to"}},
    {"k_cache_without_blocks",
     [](auto& a) { a.k_cache.shape[0] = 0; },
     {"block_table[0, 0] is", "k_cache has no blocks"}},
    {"block_table_negative_id",
     [](auto& a) {
       a.block_table = int32_tensor(negative_id_table, {3, 5});
     },
     {"block_table[0, 1] is -7", "blocks 0 to"}},
    {"cache_seqlens_missing",
     [](auto& a) {
       a.cache_seqlens = {};
       a.cache_seqlens.dtype = FLASHMLA_INT32;
     },
     {"cache_seqlens is missing", "(batch)"}},
    {"cache_seqlens_dtype",
     [](auto& a) { a.cache_seqlens.dtype = FLASHMLA_BFLOAT16; },
     {"cache_seqlens has dtype bfloat16", "int32"}},
    {"cache_seqlens_batch",
     [](auto& a) { a.cache_seqlens.shape[0] = 2; },
     {"cache_seqlens has shape (2)", "(batch of q) = (3)"}},
    {"cache_seqlens_negative",
     [](auto& a) { a.cache_seqlens = int32_tensor(bad_lengths, {3}); },
     {"cache_seqlens[1] is -1", "between 0 and 320"}},
    {"cache_seqlens_beyond_table",
     [](auto& a) { a.cache_seqlens = int32_tensor(long_lengths, {3}); },
     {"cache_seqlens[2] is 1000", "320 (max_num_blocks_per_seq * page_block_size)"}},
    {"visible_lens_dtype",
     [](auto& a) {
       a.visible_lens = int32_tensor(good_visible, {3, 2});
       a.visible_lens.dtype = 3;
     },
     {"visible_lens has dtype float32", "int32"}},
    {"visible_lens_rank",
     [](auto& a) { a.visible_lens = int32_tensor(good_visible, {6}); },
     {"visible_lens has 1 dimensions", "2: (batch, seq_len_q)"}},
    {"visible_lens_shape",
     [](auto& a) {
       a.visible_lens = int32_tensor(good_visible, {2, 3});
     },
     {"visible_lens has shape (2, 3)", "= (3, 2)"}},
    {"visible_lens_and_causal",
     [](auto& a) {
       a.visible_lens = int32_tensor(good_visible, {3, 2});
       a.causal = 1;
     },
     {"causal", "visible_lens", "one of the two"}},
    {"visible_lens_too_long",
     [](auto& a) {
       a.visible_lens = int32_tensor(long_visible, {3, 2});
     },
     {"visible_lens[1, 1] is 1", "between 0", "and 0"}},
    {"visible_lens_falling",
     [](auto& a) {
       a.visible_lens = int32_tensor(falling_visible, {3, 2});
     },
     {"visible_lens[2, 1] is 63", "between 64", "65"}},
    {"visible_lens_negative",
     [](auto& a) {
       a.visible_lens = int32_tensor(negative_visible, {3, 2});
     },
     {"visible_lens[0, 0] is -2", "between 0 and 130"}},
    {"metadata_missing",
     [](auto& a) {
       a.tile_scheduler_metadata = {};
       a.tile_scheduler_metadata.dtype = 4;
     },
     {"tile_scheduler_metadata is missing", "(num_sm_parts, 8)"}},
    {"metadata_dtype",
     [](auto& a) { a.tile_scheduler_metadata.dtype = 1; },
     {"tile_scheduler_metadata has dtype bfloat16", "int32"}},
    {"metadata_fields",
     [](auto& a) { a.tile_scheduler_metadata.shape[1] = 7; },
     {"tile_scheduler_metadata has shape (1, 7)", "(num_sm_parts, 8)"}},
    {"metadata_empty",
     [](auto& a) { a.tile_scheduler_metadata.shape[0] = 0; },
     {"num_sm_parts (tile_scheduler_metadata.shape[0]) is 0", "between 1 and"}},
    {"metadata_last_stride",
     [](auto& a) {
       a.tile_scheduler_metadata.strides[1] = 2;
       a.tile_scheduler_metadata.size_bytes = 0;
     },
     {"tile_scheduler_metadata has strides", "last dimension must be contiguous"}},
    {"num_splits_missing",
     [](auto& a) {
       a.num_splits = {};
       a.num_splits.dtype = 4;
     },
     {"num_splits is missing", "(batch + 1)"}},
    {"num_splits_dtype",
     [](auto& a) { a.num_splits.dtype = 2; },
     {"num_splits has dtype float16", "int32"}},
    {"num_splits_shape",
     [](auto& a) { a.num_splits.shape[0] = 3; },
     {"num_splits has shape (3)", "(batch of q + 1) = (4)"}},
    {"out_missing",
     [](auto& a) {
       a.out = {};
       a.out.dtype = a.q.dtype;
     },
     {"out is missing", "(batch, seq_len_q, num_heads_q, head_dim_v)"}},
    {"out_dtype",
     [](auto& a) { a.out.dtype = FLASHMLA_FLOAT32; },
     {"out has dtype float32", "that of q, bfloat16"}},
    {"out_shape",
     [](auto& a) { a.out.shape[2] = 5; },
     {"out has shape (3, 2, 5, 64)", "= (3, 2, 6, 64)"}},
    {"out_last_stride",
     [](auto& a) {
       a.out.strides[3] = 2;
       a.out.size_bytes = 0;
     },
     {"out has strides", "last dimension must be contiguous"}},
    {"out_overlap",
     [](auto& a) { a.out.strides[2] = 32; },
     {"out has shape", "strides (768, 384, 32, 1)", "must not share memory"}},
    {"out_broadcast", [](auto& a) { a.out.strides[0] = 0; }, {"out has", "must not share memory"}},
    {"out_too_small",
     [](auto& a) { a.out.size_bytes -= 2; },
     {"out with shape", "its memory holds"}},
    {"softmax_lse_missing",
     [](auto& a) {
       a.softmax_lse = {};
       a.softmax_lse.dtype = 3;
     },
     {"softmax_lse is missing", "(batch, num_heads_q, seq_len_q)"}},
    {"softmax_lse_dtype",
     [](auto& a) { a.softmax_lse.dtype = FLASHMLA_BFLOAT16; },
     {"softmax_lse has dtype bfloat16", "float32"}},
    {"softmax_lse_shape",
     [](auto& a) {
       std::swap(a.softmax_lse.shape[1], a.softmax_lse.shape[2]);
       a.softmax_lse.size_bytes = 0;
     },
     {"softmax_lse has shape (3, 2, 6)", "= (3, 6, 2)"}},
    {"softmax_lse_overlap",
     [](auto& a) { a.softmax_lse.strides[1] = 1; },
     {"softmax_lse has", "must not share memory"}},
    {"out_is_q",
     [](auto& a) {
       a.out.data = a.q.data;
       a.out.size_bytes = 0;
     },
     {"out shares memory with q", "must lie apart"}},
    {"softmax_lse_in_k_cache",
     [](auto& a) {
       a.softmax_lse.data = static_cast<char*>(a.k_cache.data) + 64;
       a.softmax_lse.size_bytes = 0;
     },
     {"softmax_lse shares memory with k_cache"}},
    {"softmax_lse_in_out",
     [](auto& a) {
       a.softmax_lse.data = a.out.data;
       a.softmax_lse.size_bytes = 0;
     },
     {"out shares memory with softmax_lse"}},
    {"softmax_scale_nan",
     [](auto& a) {
       a.has_softmax_scale = 1;
       a.softmax_scale = NAN;
     },
     {"softmax_scale is nan", "finite"}},
    {"softmax_scale_beyond_float",
     [](auto& a) {
       a.has_softmax_scale = 1;
       a.softmax_scale = 1e300;
     },
     {"softmax_scale is 1e+300;", "finite float32"}},
    {"unknown_kernel",
     [](auto& a) { a.kernel = "fastest"; },
     {"kernel is \"fastest\"", "cpu_reference_bf16"}},
    {"kernel_of_other_dtype",
     [](auto& a) { a.kernel = "cpu_portable_fp16"; },
     {"kernel cpu_portable_fp16 computes float16, q is bfloat16"},
     FLASHMLA_UNSUPPORTED},
    {"struct_size",
     [](auto& a) { a.struct_size = 3; },
     {"args.struct_size is 3", "sizeof(struct)"}},
    {"struct_size_never_set",
     [](auto& a) { a.struct_size = SIZE_MAX / 2; },
     {"args.struct_size is 9223372036854775807", "sizeof(struct)"}},
};
INSTANTIATE_TEST_SUITE_P(Checks, DecodeMessage, ::testing::ValuesIn(kBadDecodes), kBadName);

TEST_P(DecodeMessage, NamesTheArgumentAndWritesNothing) {
  DecodeCase call(valid_shape());
  ASSERT_EQ(call.run().status, FLASHMLA_OK);  // before it is spoilt
  call.out.refill(kUnwritten);
  call.lse.refill(kUnwritten);
  flashmla_decode_args args = call.args();
  GetParam().spoil(args);
  alignas(64) static std::byte workspace[1 << 20];
  EXPECT_EQ(flashmla_decode(&args, workspace, sizeof(workspace), nullptr), GetParam().status);
  expect_words(flashmla_last_error(), GetParam().words);
  EXPECT_TRUE(call.out.unwritten());
  EXPECT_TRUE(call.lse.unwritten());
  std::size_t bytes = 12345;
  EXPECT_EQ(flashmla_decode_workspace_size(&args, 1, &bytes), GetParam().status);
  expect_words(flashmla_last_error(), GetParam().words);
  EXPECT_EQ(bytes, 12345u);
  const char* kernel = nullptr;
  const char* report = nullptr;
  EXPECT_EQ(flashmla_explain_selection(&args, &kernel, &report), GetParam().status);
  expect_same_check(flashmla_check_decode, args, GetParam().status);
}

TEST(DecodeCallMessage, TheCheckOfArgumentsTouchesNoMemory) {
  DecodeCase call(valid_shape());
  using Args = flashmla_decode_args;
  Args args = without_memory(call.args(), {&Args::q, &Args::k_cache, &Args::block_table,
                                           &Args::cache_seqlens, &Args::tile_scheduler_metadata,
                                           &Args::num_splits, &Args::out, &Args::softmax_lse});
  EXPECT_EQ(flashmla_check_decode(&args), FLASHMLA_OK) << flashmla_last_error();
  args.out.data = args.q.data;
  EXPECT_EQ(flashmla_check_decode(&args), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"out shares memory with q"});
}

// A plan that cannot be followed. The rows have 3, 0 and 2 blocks.
struct BadPlan {
  const char* name;
  std::vector<std::vector<std::int32_t>> rows;
  Words words;

  friend void PrintTo(const BadPlan& bad, std::ostream* out) { *out << bad.name; }
};
class PlanMessage : public ::testing::TestWithParam<BadPlan> {};

constexpr std::int32_t kMost = 2147483647;
constexpr std::int32_t kLeast = -2147483647 - 1;
const BadPlan kBadPlans[] = {
    {"gap_at_begin", {{0, 1, 2, 2}}, {"leaves out blocks 0 to 0 of row 0"}},
    {"gap_at_end", {{0, 0, 0, 2}, {1, 0, 2, 2}}, {"leaves out blocks 2 to 2 of row 0"}},
    {"gap_inside", {{0, 0, 0, 1}, {0, 2, 2, 2}}, {"leaves out blocks 1 to 1 of row 0"}},
    {"gap_in_last_row", {{0, 0, 2, 1}}, {"leaves out blocks 1 to 1 of row 2"}},
    {"overlap",
     {{0, 0, 0, 2}, {0, 1, 2, 2}},
     {"tile_scheduler_metadata[1]", "row 0", "exactly once"}},
    {"same_row_twice", {{0, 0, 0, 3}, {0, 0, 2, 2}}, {"tile_scheduler_metadata[1]", "row 0"}},
    {"whole_and_fragment", {{0, 0, 2, 2}, {2, 1, 2, 2}}, {"tile_scheduler_metadata[1]", "row 2"}},
    {"fragment_then_whole", {{2, 0, 2, 1}, {0, 0, 2, 2}}, {"tile_scheduler_metadata", "row 2"}},
    {"end_row_before_begin", {{2, 0, 0, 1}}, {"tile_scheduler_metadata[0]", "(row 2, block 0)"}},
    {"end_block_before_begin", {{0, 2, 0, 1}}, {"(row 0, block 2) to (row 0, block 1)"}},
    {"negative_begin_block", {{0, -1, 2, 2}}, {"tile_scheduler_metadata[0]", "block -1"}},
    {"negative_end_block", {{0, 0, 2, -5}}, {"tile_scheduler_metadata[0]", "block -5"}},
    {"least_begin_block", {{0, kLeast, 2, 2}}, {"tile_scheduler_metadata[0]", "-2147483648"}},
    {"least_end_row", {{0, 0, kLeast, kLeast}}, {"tile_scheduler_metadata[0]"}},
    {"second_part_hostile", {{0, 0, 1, 0}, {2, kMost, 2, kLeast}}, {"tile_scheduler_metadata[1]"}},
};
INSTANTIATE_TEST_SUITE_P(Plans, PlanMessage, ::testing::ValuesIn(kBadPlans), kBadName);

TEST_P(PlanMessage, NamesRowAndPartAndWritesNothing) {
  DecodeCase call(valid_shape());
  call.plan_by_hand(GetParam().rows);
  const DecodeCase::Outcome outcome = call.run();
  EXPECT_EQ(outcome.status, FLASHMLA_INVALID_ARGUMENT);
  expect_words(outcome.message, GetParam().words);
  EXPECT_TRUE(call.out.unwritten());
  EXPECT_TRUE(call.lse.unwritten());
}

TEST(DecodeCallMessage, NullStructs) {
  std::size_t bytes = 0;
  EXPECT_EQ(flashmla_decode(nullptr, nullptr, 0, nullptr), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"args is null"});
  EXPECT_EQ(flashmla_decode_workspace_size(nullptr, 1, &bytes), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_EQ(flashmla_plan(nullptr), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_EQ(flashmla_merge(nullptr, nullptr), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_EQ(flashmla_check_plan(nullptr), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_EQ(flashmla_check_decode(nullptr), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_EQ(flashmla_check_merge(nullptr), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_EQ(flashmla_kernel_at(0, nullptr), FLASHMLA_INVALID_ARGUMENT);
  DecodeCase call(valid_shape());
  const flashmla_decode_args args = call.args();
  EXPECT_EQ(flashmla_decode_workspace_size(&args, 1, nullptr), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"workspace_bytes is null"});
  const char* text = nullptr;
  EXPECT_EQ(flashmla_explain_selection(&args, nullptr, &text), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_EQ(flashmla_explain_selection(&args, &text, nullptr), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_EQ(flashmla_plan_num_parts(FLASHMLA_CPU, 0, 1, 1, 1, nullptr), FLASHMLA_INVALID_ARGUMENT);
}

TEST(DecodeCallMessage, Workspace) {
  DecodeCase call(valid_shape());
  call.plan(4);  // splits rows, so that partial results are needed
  const flashmla_decode_args args = call.args();
  std::size_t bytes = 0;
  ASSERT_EQ(flashmla_decode_workspace_size(&args, 0, &bytes), FLASHMLA_OK);
  ASSERT_GT(bytes, 0u);
  const GuardedMemory memory((bytes + 127) / 64 * 64);
  EXPECT_EQ(flashmla_decode(&args, memory.data(), bytes - 1, nullptr), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"workspace holds " + std::to_string(bytes - 1) + " bytes",
                                       "needs " + std::to_string(bytes)});
  EXPECT_EQ(flashmla_decode(&args, nullptr, bytes, nullptr), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"workspace holds 0 bytes"});
  EXPECT_EQ(flashmla_decode(&args, memory.data() + 32, bytes, nullptr), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"workspace is not aligned to 64 bytes"});
  EXPECT_TRUE(call.out.unwritten());
  EXPECT_TRUE(call.lse.unwritten());
}

TEST(DecodeCallMessage, WorkspaceSharesNoMemory) {
  DecodeCase call(valid_shape());
  call.plan(4);
  ASSERT_EQ(call.run().status, FLASHMLA_OK);
  const std::vector<std::byte> out = call.out.copy_bytes();
  flashmla_decode_args args = call.args();
  std::size_t bytes = 0;
  ASSERT_EQ(flashmla_decode_workspace_size(&args, 0, &bytes), FLASHMLA_OK);
  const GuardedMemory memory((bytes + 64 + out.size() + 63) / 64 * 64);
  std::memset(memory.data(), static_cast<int>(kUnwritten), memory.size());
  args.out.data = memory.data() + bytes - 64;
  EXPECT_EQ(flashmla_decode(&args, memory.data(), bytes, nullptr), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"workspace shares memory with out", "must lie apart"});
  EXPECT_EQ(memory.data()[bytes - 64], kUnwritten);
  // Past the bytes that are needed, though not past those that are there.
  args.out.data = memory.data() + bytes;
  ASSERT_EQ(flashmla_decode(&args, memory.data(), memory.size(), nullptr), FLASHMLA_OK)
      << flashmla_last_error();
  EXPECT_EQ(std::memcmp(args.out.data, out.data(), out.size()), 0);

  args = call.args();
  args.q.data = memory.data() + 64;
  EXPECT_EQ(flashmla_decode(&args, memory.data(), bytes, nullptr), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"workspace shares memory with q"});
}

// What gives a call its workspace, and how it was asked.
struct Allocator {
  void* memory = nullptr;
  int calls = 0;
  std::size_t bytes = 0;

  void give_to(flashmla_decode_args& args) {
    args.allocate_context = this;
    args.allocate = [](void* context, std::size_t bytes) {
      auto& allocator = *static_cast<Allocator*>(context);
      ++allocator.calls;
      allocator.bytes = bytes;
      return allocator.memory;
    };
  }
};

TEST(DecodeCallMessage, AllocatedWorkspace) {
  DecodeCase call(valid_shape());
  call.plan(4);
  ASSERT_EQ(call.run().status, FLASHMLA_OK);
  const std::vector<double> expected_out = call.out.values(), expected_lse = call.lse.values();
  call.out.refill(kUnwritten);
  call.lse.refill(kUnwritten);
  flashmla_decode_args args = call.args();
  std::size_t bytes = 0;
  ASSERT_EQ(flashmla_decode_workspace_size(&args, 0, &bytes), FLASHMLA_OK);
  const GuardedMemory memory((bytes + 127) / 64 * 64);
  Allocator allocator;
  allocator.give_to(args);

  EXPECT_EQ(flashmla_decode(&args, nullptr, 0, nullptr), FLASHMLA_OUT_OF_MEMORY);
  expect_words(flashmla_last_error(), {"out of memory", std::to_string(bytes) + " bytes"});
  EXPECT_EQ(allocator.calls, 1);
  allocator.memory = memory.data() + 32;
  EXPECT_EQ(flashmla_decode(&args, nullptr, 0, nullptr), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"workspace is not aligned to 64 bytes"});
  EXPECT_TRUE(call.out.unwritten());
  EXPECT_TRUE(call.lse.unwritten());

  allocator = {memory.data()};
  ASSERT_EQ(flashmla_decode(&args, nullptr, 0, nullptr), FLASHMLA_OK) << flashmla_last_error();
  EXPECT_EQ(allocator.calls, 1);
  EXPECT_EQ(allocator.bytes, bytes);
  EXPECT_EQ(call.out.values(), expected_out);
  EXPECT_EQ(call.lse.values(), expected_lse);

  // Neither asked beside a workspace that is given, nor before everything else has been checked.
  EXPECT_EQ(flashmla_decode(&args, memory.data(), bytes, nullptr), FLASHMLA_OK);
  EXPECT_EQ(flashmla_decode(&args, memory.data(), bytes - 1, nullptr), FLASHMLA_INVALID_ARGUMENT);
  args.head_dim_v = 65;
  EXPECT_EQ(flashmla_decode(&args, nullptr, 0, nullptr), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_EQ(allocator.calls, 1);

  // Fields past the end of an older caller's struct are not there.
  args = call.args();
  args.struct_size = offsetof(flashmla_decode_args, allocate);
  allocator.give_to(args);
  EXPECT_EQ(flashmla_decode(&args, nullptr, 0, nullptr), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"workspace holds 0 bytes"});
  EXPECT_EQ(allocator.calls, 1);
}

TEST(DecodeCallMessage, Executor) {
  DecodeCase call(valid_shape());
  const flashmla_decode_args args = call.args();
  alignas(64) static std::byte workspace[1 << 20];
  flashmla_executor executor{};
  executor.struct_size = sizeof(executor);
  executor.parallel_for = [](void*, std::int64_t, void (*)(void*, std::int64_t), void*) {};
  EXPECT_EQ(flashmla_decode(&args, workspace, sizeof(workspace), &executor),
            FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"executor.num_threads is 0", "at least 1"});
  executor.num_threads = 1;
  executor.parallel_for = nullptr;
  EXPECT_EQ(flashmla_decode(&args, workspace, sizeof(workspace), &executor),
            FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"executor.parallel_for is null"});
  executor.struct_size = 0;
  EXPECT_EQ(flashmla_decode(&args, workspace, sizeof(workspace), &executor),
            FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"executor.struct_size is 0"});
  EXPECT_TRUE(call.out.unwritten());
}

TEST(DecodeCallMessage, ExceptionsOfAnExecutor) {
  DecodeCase call(valid_shape());
  call.plan(4);
  TestExecutor standard(3, [](std::int64_t, const auto&) { throw std::runtime_error("no pool"); });
  DecodeCase::Outcome outcome = call.run({}, standard.get());
  EXPECT_EQ(outcome.status, FLASHMLA_INTERNAL);
  EXPECT_EQ(outcome.message, "no pool");
  TestExecutor other(3, [](std::int64_t, const auto&) { throw 7; });
  outcome = call.run({}, other.get());
  EXPECT_EQ(outcome.status, FLASHMLA_INTERNAL);
  expect_words(outcome.message, {"thrown", "std::exception"});
}

// --- Planning ------------------------------------------------------------------------------------

using BadPlanCall = Bad<flashmla_plan_args>;
class PlanCallMessage : public ::testing::TestWithParam<BadPlanCall> {};

const BadPlanCall kBadPlanCalls[] = {
    {"device_type", [](auto& a) { a.device_type = 2; }, {"device type is 2"}},
    {"cache_seqlens_missing",
     [](auto& a) {
       a.cache_seqlens = {};
       a.cache_seqlens.dtype = FLASHMLA_INT32;
     },
     {"cache_seqlens is missing", "(batch)"}},
    {"cache_seqlens_dtype",
     [](auto& a) { a.cache_seqlens.dtype = 3; },
     {"cache_seqlens has dtype float32", "int32"}},
    {"cache_seqlens_rank",
     [](auto& a) { a.cache_seqlens.rank = 2; },
     {"cache_seqlens has 2 dimensions", "1: (batch)"}},
    {"cache_seqlens_null",
     [](auto& a) { a.cache_seqlens.data = nullptr; },
     {"cache_seqlens has shape (3)", "null"}},
    {"cache_seqlens_negative",
     [](auto& a) {
       a.cache_seqlens.data = bad_lengths;
       a.cache_seqlens.size_bytes = 0;
     },
     {"cache_seqlens[1] is -1", "between 0 and 2147483647"}},
    {"num_heads_per_head_k",
     [](auto& a) { a.num_heads_per_head_k = 0; },
     {"num_heads_per_head_k is 0", "between 1 and"}},
    {"num_heads_k", [](auto& a) { a.num_heads_k = -1; }, {"num_heads_k is -1", "between 1 and"}},
    {"metadata_missing",
     [](auto& a) {
       a.tile_scheduler_metadata = {};
       a.tile_scheduler_metadata.dtype = 4;
     },
     {"tile_scheduler_metadata is missing"}},
    {"metadata_dtype",
     [](auto& a) { a.tile_scheduler_metadata.dtype = 3; },
     {"tile_scheduler_metadata has dtype float32"}},
    {"metadata_fields",
     [](auto& a) { a.tile_scheduler_metadata.shape[1] = 5; },
     {"tile_scheduler_metadata has shape (4, 5)", "(num_sm_parts, 8)"}},
    {"metadata_no_parts",
     [](auto& a) { a.tile_scheduler_metadata.shape[0] = 0; },
     {"num_sm_parts", "is 0", "between 1 and"}},
    {"metadata_strided",
     [](auto& a) {
       a.tile_scheduler_metadata.strides[0] = 9;
       a.tile_scheduler_metadata.size_bytes = 0;
     },
     {"tile_scheduler_metadata has strides (9, 1)", "contiguous"}},
    {"num_splits_missing",
     [](auto& a) {
       a.num_splits = {};
       a.num_splits.dtype = 4;
     },
     {"num_splits is missing"}},
    {"num_splits_dtype",
     [](auto& a) { a.num_splits.dtype = 1; },
     {"num_splits has dtype bfloat16"}},
    {"num_splits_shape",
     [](auto& a) { a.num_splits.shape[0] = 3; },
     {"num_splits has shape (3)", "(batch + 1) = (4)"}},
    {"num_splits_strided",
     [](auto& a) {
       a.num_splits.strides[0] = 2;
       a.num_splits.size_bytes = 0;
     },
     {"num_splits has strides (2)", "contiguous"}},
    {"num_splits_in_cache_seqlens",
     [](auto& a) {
       a.num_splits.data = a.cache_seqlens.data;
       a.num_splits.size_bytes = 0;
     },
     {"num_splits shares memory with cache_seqlens", "must lie apart"}},
    {"struct_size", [](auto& a) { a.struct_size = 0; }, {"args.struct_size is 0"}},
};
INSTANTIATE_TEST_SUITE_P(Checks, PlanCallMessage, ::testing::ValuesIn(kBadPlanCalls), kBadName);

TEST_P(PlanCallMessage, NamesTheArgumentAndWritesNothing) {
  const Array lengths = int32_array({3}, {130, 0, 65});
  const Array rows(DType::kInt32, {4, 8}, kUnwritten), splits(DType::kInt32, {4}, kUnwritten);
  flashmla_plan_args args = plan_args(lengths, rows, splits);
  GetParam().spoil(args);
  EXPECT_EQ(flashmla_plan(&args), GetParam().status);
  expect_words(flashmla_last_error(), GetParam().words);
  EXPECT_TRUE(rows.unwritten());
  EXPECT_TRUE(splits.unwritten());
  expect_same_check(flashmla_check_plan, args, GetParam().status);
}

TEST(PlanningMessage, TheCheckOfArgumentsTouchesNoMemory) {
  const Array lengths = int32_array({3}, {130, 0, 65});
  const Array rows(DType::kInt32, {4, 8}, kUnwritten), splits(DType::kInt32, {4}, kUnwritten);
  using Args = flashmla_plan_args;
  const Args args =
      without_memory(plan_args(lengths, rows, splits),
                     {&Args::cache_seqlens, &Args::tile_scheduler_metadata, &Args::num_splits});
  EXPECT_EQ(flashmla_check_plan(&args), FLASHMLA_OK) << flashmla_last_error();
}

TEST(PlanNumPartsMessage, Heads) {
  std::int32_t parts = 42;
  EXPECT_EQ(flashmla_plan_num_parts(FLASHMLA_CPU, 0, 0, 1, 1, &parts), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(),
               {"(num_heads_per_head_k, num_heads_k) is (0, 1)", "between 1 and 2147483647"});
  EXPECT_EQ(flashmla_plan_num_parts(FLASHMLA_CPU, 0, 1, -3, 1, &parts), FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"is (1, -3)"});
  // Their product would be 0 in 64 bits, by which a GPU's multiprocessors would be divided.
  EXPECT_EQ(flashmla_plan_num_parts(FLASHMLA_CPU, 0, std::int64_t{1} << 38, std::int64_t{1} << 32,
                                    1, &parts),
            FLASHMLA_INVALID_ARGUMENT);
  expect_words(flashmla_last_error(), {"is (274877906944, 4294967296)"});
  EXPECT_EQ(parts, 42);
}

// --- Merge ---------------------------------------------------------------------------------------

using BadMerge = Bad<flashmla_merge_args>;
class MergeMessage : public ::testing::TestWithParam<BadMerge> {};

const BadMerge kBadMerges[] = {
    {"device_index", [](auto& a) { a.device_index = -1; }, {"device index is -1"}},
    {"outs_missing",
     [](auto& a) {
       a.outs = {};
       a.outs.dtype = 1;
     },
     {"outs is missing", "(parts, batch, seq_len_q, num_heads_q, head_dim_v)"}},
    {"outs_dtype",
     [](auto& a) { a.outs.dtype = FLASHMLA_INT32; },
     {"outs has dtype int32", "bfloat16, float16 or float32"}},
    {"outs_rank", [](auto& a) { a.outs.rank = 4; }, {"outs has 4 dimensions", "5:"}},
    {"outs_no_parts", [](auto& a) { a.outs.shape[0] = 0; }, {"parts (outs.shape[0]) is 0"}},
    {"outs_last_stride",
     [](auto& a) { a.outs.strides[4] = 0; },
     {"outs has strides", "last dimension must be contiguous"}},
    {"outs_too_small", [](auto& a) { a.outs.size_bytes = 16; }, {"outs with shape", "holds 16"}},
    {"lses_missing",
     [](auto& a) {
       a.lses = {};
       a.lses.dtype = 3;
     },
     {"lses is missing", "(parts, batch, num_heads_q, seq_len_q)"}},
    {"lses_dtype", [](auto& a) { a.lses.dtype = 1; }, {"lses has dtype bfloat16", "float32"}},
    {"lses_shape",
     [](auto& a) {
       std::swap(a.lses.shape[2], a.lses.shape[3]);
       a.lses.size_bytes = 0;
     },
     {"lses has shape (2, 3, 4, 5)", "= (2, 3, 5, 4)"}},
    {"out_missing",
     [](auto& a) {
       a.out = {};
       a.out.dtype = a.outs.dtype;
     },
     {"out is missing"}},
    {"out_dtype", [](auto& a) { a.out.dtype = 3; }, {"out has dtype float32", "of outs, bfloat16"}},
    {"out_shape", [](auto& a) { a.out.shape[0] = 2; }, {"out has shape (2, 4, 5, 64)"}},
    {"out_last_stride",
     [](auto& a) {
       a.out.strides[3] = 3;
       a.out.size_bytes = 0;
     },
     {"out has strides", "contiguous"}},
    {"out_overlap", [](auto& a) { a.out.strides[0] = 64; }, {"out has", "must not share memory"}},
    {"lse_missing",
     [](auto& a) {
       a.lse = {};
       a.lse.dtype = 3;
     },
     {"lse is missing"}},
    {"lse_dtype", [](auto& a) { a.lse.dtype = 2; }, {"lse has dtype float16", "float32"}},
    {"lse_shape", [](auto& a) { a.lse.shape[1] = 4; }, {"lse has shape (3, 4, 4)", "= (3, 5, 4)"}},
    {"lse_overlap", [](auto& a) { a.lse.strides[2] = 0; }, {"lse has", "must not share memory"}},
    {"out_in_outs",
     [](auto& a) {
       a.out.data = a.outs.data;
       a.out.size_bytes = 0;
     },
     {"out shares memory with outs", "must lie apart"}},
    {"lse_in_lses",
     [](auto& a) {
       a.lse.data = a.lses.data;
       a.lse.size_bytes = 0;
     },
     {"lse shares memory with lses"}},
    {"struct_size", [](auto& a) { a.struct_size = 1; }, {"args.struct_size is 1"}},
};
INSTANTIATE_TEST_SUITE_P(Checks, MergeMessage, ::testing::ValuesIn(kBadMerges), kBadName);

TEST_P(MergeMessage, NamesTheArgumentAndWritesNothing) {
  const Array outs(DType::kBFloat16, {2, 3, 4, 5, 64}), lses(DType::kFloat32, {2, 3, 5, 4});
  const Array out(DType::kBFloat16, {3, 4, 5, 64}, kUnwritten);
  const Array lse(DType::kFloat32, {3, 5, 4}, kUnwritten);
  flashmla_merge_args args = merge_args(outs, lses, out, lse);
  GetParam().spoil(args);
  EXPECT_EQ(flashmla_merge(&args, nullptr), GetParam().status);
  expect_words(flashmla_last_error(), GetParam().words);
  EXPECT_TRUE(out.unwritten());
  EXPECT_TRUE(lse.unwritten());
  expect_same_check(flashmla_check_merge, args, GetParam().status);
}

TEST(MergingMessage, TheCheckOfArgumentsTouchesNoMemory) {
  const Array outs(DType::kBFloat16, {2, 3, 4, 5, 64}), lses(DType::kFloat32, {2, 3, 5, 4});
  const Array out(DType::kBFloat16, {3, 4, 5, 64}, kUnwritten);
  const Array lse(DType::kFloat32, {3, 5, 4}, kUnwritten);
  using Args = flashmla_merge_args;
  const Args args = without_memory(merge_args(outs, lses, out, lse),
                                   {&Args::outs, &Args::lses, &Args::out, &Args::lse});
  EXPECT_EQ(flashmla_check_merge(&args), FLASHMLA_OK) << flashmla_last_error();
}

}  // namespace
}  // namespace flashmla::testing
