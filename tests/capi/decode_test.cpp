// Attention through the C ABI, for every kernel that this machine can run, against the definition
// in double precision. Numbers in the tests are evaluations of the definition too.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <tuple>

#include "support/compare.hpp"
#include "support/decode_case.hpp"
#include "support/executors.hpp"
#include "support/kernels.hpp"
#include "support/oracle.hpp"

namespace flashmla::testing {
namespace {

class Decode : public ::testing::TestWithParam<Kernel> {
 protected:
  // 16 heads, scale 0.25, in the kernel's dtype.
  DecodeShape shape_of(std::vector<std::int32_t> lengths) const {
    DecodeShape shape;
    shape.dtype = GetParam().dtype;
    shape.lengths = std::move(lengths);
    shape.softmax_scale = 0.25;
    return shape;
  }
  void run(DecodeCase& call) const {
    const DecodeCase::Outcome outcome = call.run(GetParam().name);
    ASSERT_EQ(outcome.status, FLASHMLA_OK) << outcome.message;
  }
  void run_and_compare(DecodeCase& call) const {
    ASSERT_NO_FATAL_FAILURE(run(call));
    EXPECT_TRUE(result_close(call, evaluate(call)));
  }
  double out_tolerance() const { return 2 * tolerance_of(GetParam().dtype).out_relative; }
  double lse_tolerance() const { return tolerance_of(GetParam().dtype).lse_absolute; }
};

INSTANTIATE_TEST_SUITE_P(Kernels, Decode, ::testing::ValuesIn(usable_kernels()), kernel_test_name);

// --- Lengths and tails ---------------------------------------------------------------------------

TEST_P(Decode, EmptyRowsAmongOthers) {
  DecodeShape shape = shape_of({0, 1, 64, 0});
  shape.num_heads_q = 128;
  DecodeCase call(shape);
  for (const std::int32_t parts : {1, 3, 8}) {
    call.plan(parts);
    run_and_compare(call);
  }
  double sum_out = 0.0, sum_lse = 0.0;
  int infinite = 0;
  for (const double value : call.out.values()) sum_out += std::fabs(value);
  for (const double value : call.lse.values()) {
    if (std::isinf(value)) {
      EXPECT_GT(value, 0);
      ++infinite;
    } else {
      sum_lse += value;
    }
  }
  EXPECT_EQ(infinite, 256);
  EXPECT_NEAR(sum_lse, 568.614653, 256 * lse_tolerance());
  EXPECT_NEAR(sum_out, 40971.9137, 40971.9137 * out_tolerance());
  for (std::int64_t h = 0; h < 128; ++h) {
    for (std::int64_t c = 0; c < 512; ++c) {
      ASSERT_EQ(call.out.at(0, 0, h, c), 0.0);
      ASSERT_EQ(call.out.at(1, 0, h, c), call.token_value(1, 0, 0, c));  // one token: its value
    }
  }
}

TEST_P(Decode, TailOfPageIsNeverRead) {
  for (const std::int64_t page : {std::int64_t{4}, std::int64_t{64}}) {
    for (const double garbage : {std::nan(""), HUGE_VAL, 3e38}) {
      DecodeShape shape = shape_of({13});
      shape.page_size = page;
      DecodeCase call(shape);
      for (std::int64_t slot = 13 % page; slot < page; ++slot) {
        for (std::int64_t c = 0; c < 576; ++c) {
          call.k_cache.set(garbage, call.block_of(0, 12), slot, 0, c);
        }
      }
      run_and_compare(call);
      EXPECT_NEAR(call.out.at(0, 0, 0, 0), 0.061532551, out_tolerance());
      EXPECT_NEAR(call.out.at(0, 0, 15, 511), 0.185125567, out_tolerance());
      EXPECT_NEAR(call.lse.at(0, 0, 0), 3.071629679, lse_tolerance());
      EXPECT_NEAR(call.lse.at(0, 15, 0), 3.089057015, lse_tolerance());
    }
  }
}

// Long rows are summed up in chains, for which the workspace has room where a row may be that long.
TEST_P(Decode, RowsOfAboutAChain) {
  for (const std::int32_t length : {8191, 8192, 8193, 16385}) {
    DecodeShape shape = shape_of({length});
    shape.head_dim = shape.head_dim_v = 64;
    shape.num_heads_q = 3;
    shape.seq_len_q = 2;
    shape.visible_lens = {0, length};
    shape.page_size = 1;
    shape.max_pages = length;
    DecodeCase call(shape);
    for (const std::int32_t parts : {1, 3}) {
      call.plan(parts);
      run_and_compare(call);
    }
  }
}

TEST_P(Decode, UniformScoresCountTheTokens) {
  std::vector<std::int32_t> lengths;
  for (std::int32_t length = 1; length <= 200; ++length) lengths.push_back(length);
  lengths.push_back(257);
  DecodeShape shape = shape_of(lengths);
  shape.num_heads_q = 1;
  shape.head_dim = 64;
  shape.head_dim_v = 64;
  shape.cache_fill = std::byte{0x44};  // finite and large: a NaN would be found, this adds up
  DecodeCase call(shape, zero_q);
  call.plan(7);
  ASSERT_NO_FATAL_FAILURE(run(call));
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    ASSERT_NEAR(call.lse.at(row, 0, 0), std::log(lengths[row]), lse_tolerance()) << lengths[row];
  }
  EXPECT_TRUE(result_close(call, evaluate(call)));
}

TEST_P(Decode, QueriesBeyondTheLengthSeeNothing) {
  DecodeShape shape = shape_of({2});
  shape.seq_len_q = 4;
  shape.causal = true;
  DecodeCase call(shape);
  run_and_compare(call);
  EXPECT_NEAR(call.lse.at(0, 15, 3), 0.125817595, lse_tolerance());
  EXPECT_NEAR(call.out.at(0, 3, 15, 511), 0.000779202, out_tolerance());
  EXPECT_EQ(call.lse.at(0, 0, 0), HUGE_VAL);
  EXPECT_EQ(call.lse.at(0, 0, 1), HUGE_VAL);

  shape.lengths = {2, 0, 4, 130};
  DecodeCase mixed(shape);
  for (const std::int32_t parts : {1, 2, 5}) {
    mixed.plan(parts);
    run_and_compare(mixed);
  }
}

TEST_P(Decode, EmptyBatch) {
  DecodeCase call(shape_of({}));
  run(call);
  // Of whatever sizes: work is counted by the rows that there are.
  call.plan(1000);
  flashmla_decode_args args = call.args();
  args.q.shape[1] = args.out.shape[1] = args.softmax_lse.shape[2] = INT32_MAX;
  args.q.shape[2] = args.out.shape[2] = args.softmax_lse.shape[1] = INT32_MAX;
  args.k_cache.shape[0] = 0;
  args.k_cache.shape[2] = INT32_MAX;
  std::size_t bytes = 0;
  ASSERT_EQ(flashmla_decode_workspace_size(&args, 2, &bytes), FLASHMLA_OK) << flashmla_last_error();
  EXPECT_LT(bytes, 1000u * 64);
  EXPECT_EQ(DecodeCase::decode(args, nullptr).status, FLASHMLA_OK) << flashmla_last_error();
}

// --- Tables, pages, heads, strides ---------------------------------------------------------------

TEST_P(Decode, TableEndsWithItsLastPage) {
  for (const std::int64_t page : {std::int64_t{16}, std::int64_t{64}}) {
    DecodeShape shape = shape_of({static_cast<std::int32_t>(page + 1)});
    shape.page_size = page;
    shape.max_pages = 2;
    shape.spare_blocks = 998;
    shape.head_dim = 64;
    shape.head_dim_v = 64;
    DecodeCase call(shape);
    // The two pages move to the ends of the cache.
    for (const auto& [index, id] : {std::pair{0, 999}, std::pair{1, 0}}) {
      for (std::int64_t slot = 0; slot < page; ++slot) {
        for (std::int64_t c = 0; c < 64; ++c) {
          if (index == 0 || slot == 0) {
            call.k_cache.set(fixed_k(0, index * page + slot, 0, c), id, slot, 0, c);
          }
        }
      }
      call.block_table.set(id, 0, index);
    }
    run_and_compare(call);
  }
}

TEST_P(Decode, TableWiderThanTheCacheAndPadded) {
  DecodeShape shape = shape_of({130, 97});
  shape.head_dim = 64;
  shape.head_dim_v = 64;
  shape.max_pages = 4096;
  shape.table_gap = 5;
  shape.unused_table_entry = 2147480000;
  DecodeCase call(shape);
  run_and_compare(call);
}

TEST_P(Decode, PageSizesGiveTheSameBits) {
  std::vector<std::byte> out, lse;
  for (const std::int64_t page : {1, 2, 16, 32, 64, 128, 784}) {
    DecodeShape shape = shape_of({450, 65});
    shape.num_heads_q = 4;
    shape.page_size = page;
    DecodeCase call(shape);
    call.plan(3);
    ASSERT_NO_FATAL_FAILURE(run(call));
    if (out.empty()) {
      EXPECT_TRUE(result_close(call, evaluate(call)));
      out = call.out.copy_bytes();
      lse = call.lse.copy_bytes();
    }
    EXPECT_EQ(call.out.copy_bytes(), out) << "page " << page;
    EXPECT_EQ(call.lse.copy_bytes(), lse) << "page " << page;
  }
}

TEST_P(Decode, HeadCounts) {
  for (const std::int64_t heads : {1, 2, 4, 5, 8, 16, 20, 63, 64, 128}) {
    DecodeShape shape = shape_of({65, 200});
    shape.num_heads_q = heads;
    shape.seq_len_q = 2;
    shape.causal = true;
    DecodeCase call(shape);
    call.plan(2);
    if (heads <= 20) {
      run_and_compare(call);
    } else {
      ASSERT_NO_FATAL_FAILURE(run(call));
    }
    EXPECT_NEAR(call.lse.at(0, 0, 0), 4.343651037, lse_tolerance()) << heads;
    if (heads == 1) {
      EXPECT_NEAR(call.out.at(1, 1, 0, 511), -0.242167418, out_tolerance());
    }
    if (heads == 5) {
      EXPECT_NEAR(call.out.at(1, 1, 4, 511), 0.125568429, out_tolerance());
    }
    if (heads == 20) {
      EXPECT_NEAR(call.lse.at(1, 19, 1), 5.530518064, lse_tolerance());
      EXPECT_NEAR(call.out.at(1, 1, 19, 511), -0.077898378, out_tolerance());
    }
  }
}

// Rows are cut into groups of what a kernel takes at once, the last one smaller.
TEST_P(Decode, MoreQueryRowsThanAKernelTakesAtOnce) {
  for (const std::int64_t seq_len_q : {3, 5}) {
    DecodeShape shape = shape_of({100, 30});
    shape.num_heads_q = 63;
    shape.seq_len_q = seq_len_q;
    shape.head_dim = 64;
    shape.head_dim_v = 64;
    shape.causal = true;
    DecodeCase call(shape);
    call.plan(2);  // as many parts as threads: none of them asks for smaller groups
    run_and_compare(call);
  }
}

TEST_P(Decode, SeveralKeyValueHeads) {
  DecodeShape shape = shape_of({256});
  shape.seq_len_q = 4;
  shape.num_heads_k = 8;
  shape.causal = true;
  DecodeCase call(shape);
  run_and_compare(call);
  EXPECT_NEAR(call.out.at(0, 0, 0, 0), 0.057784971, out_tolerance());
  EXPECT_NEAR(call.out.at(0, 3, 15, 511), 0.200826188, out_tolerance());
  EXPECT_NEAR(call.lse.at(0, 0, 0), 5.691674347, lse_tolerance());
  EXPECT_NEAR(call.lse.at(0, 15, 3), 5.763806244, lse_tolerance());
}

TEST_P(Decode, SeveralQueryTokens) {
  struct Row {
    std::int64_t seq_len_q;
    double first_out, last_out, first_lse, last_lse;
  };
  for (const Row& row : {Row{2, 0.067479667, 0.235524882, 5.033318953, 4.830914709},
                         Row{3, 0.057652954, 0.192633087, 5.018519331, 4.816669863},
                         Row{4, 0.050875686, 0.261108877, 5.000834536, 4.855206298},
                         Row{7, 0.054057024, 0.002237235, 4.977146455, 4.801249217}}) {
    DecodeShape shape = shape_of({130, 97});
    shape.seq_len_q = row.seq_len_q;
    shape.causal = true;
    DecodeCase call(shape);
    call.plan(3);
    ASSERT_NO_FATAL_FAILURE(run(call));
    const std::int64_t last = row.seq_len_q - 1;
    EXPECT_NEAR(call.out.at(0, 0, 0, 0), row.first_out, out_tolerance());
    EXPECT_NEAR(call.out.at(1, last, 15, 511), row.last_out, out_tolerance());
    EXPECT_NEAR(call.lse.at(0, 0, 0), row.first_lse, lse_tolerance());
    EXPECT_NEAR(call.lse.at(1, 15, last), row.last_lse, lse_tolerance());
  }
}

TEST_P(Decode, StridedCacheEqualsContiguous) {
  DecodeShape shape = shape_of({130, 97});
  shape.seq_len_q = 2;
  shape.causal = true;
  DecodeCase plain(shape);
  ASSERT_NO_FATAL_FAILURE(run(plain));
  shape.q_gap = 3;
  shape.cache_gap = 64;
  shape.table_gap = 1;
  shape.out_gap = 7;
  shape.lse_gap = 5;
  DecodeCase strided(shape);
  ASSERT_NO_FATAL_FAILURE(run(strided));
  EXPECT_EQ(strided.out.values(), plain.out.values());
  EXPECT_EQ(strided.lse.values(), plain.lse.values());
  EXPECT_TRUE(strided.out.gaps_unwritten());
  EXPECT_TRUE(strided.lse.gaps_unwritten());

  // A layer of a cache that holds three: (num_blocks, 3, page, 1, head_dim).
  const std::int64_t blocks = plain.k_cache.shape()[0];
  for (std::int64_t layer = 0; layer < 3; ++layer) {
    Array pool(shape.dtype, {blocks, 3, 64, 1, 576});
    for (std::int64_t block = 0; block < blocks; ++block) {
      std::copy_n(plain.k_cache.address(block, 0, 0, 0), 64 * 576 * element_size(shape.dtype),
                  pool.address(block, layer, 0, 0, 0));
    }
    flashmla_decode_args args = plain.args();
    args.kernel = GetParam().name.c_str();
    args.k_cache.data = pool.address(0, layer, 0, 0, 0);
    args.k_cache.strides[0] = 3 * 64 * 576;
    args.k_cache.size_bytes = pool.size_bytes() - layer * 64 * 576 * element_size(shape.dtype);
    plain.out.refill(kUnwritten);
    plain.lse.refill(kUnwritten);
    TestExecutor serial = serial_executor();
    const DecodeCase::Outcome outcome = DecodeCase::decode(args, serial.get());
    ASSERT_EQ(outcome.status, FLASHMLA_OK) << outcome.message;
    EXPECT_EQ(plain.out.values(), strided.out.values()) << "layer " << layer;
    EXPECT_EQ(plain.lse.values(), strided.lse.values()) << "layer " << layer;
  }
}

TEST_P(Decode, TensorsMayLieAtAnyOfTheirElements) {
  DecodeShape shape = shape_of({130, 65});
  shape.seq_len_q = 2;
  shape.visible_lens = {129, 130, 64, 65};
  DecodeCase call(shape);
  call.plan(4);
  ASSERT_NO_FATAL_FAILURE(run(call));
  for (const std::int64_t shift : {1, 2, 3, 5, 8, 16, 31}) {
    flashmla_decode_args args = call.args();
    args.kernel = GetParam().name.c_str();
    std::vector<Array> moved;
    for (flashmla_tensor* tensor :
         {&args.q, &args.k_cache, &args.block_table, &args.cache_seqlens, &args.visible_lens,
          &args.tile_scheduler_metadata, &args.num_splits, &args.out, &args.softmax_lse}) {
      const auto dtype = static_cast<DType>(tensor->dtype);
      const auto bytes = static_cast<std::int64_t>(tensor->size_bytes);
      const Array& memory =
          moved.emplace_back(dtype, Sizes{bytes / element_size(dtype) + shift}, kUnwritten);
      std::memcpy(memory.bytes(), tensor->data, tensor->size_bytes);
      tensor->data = memory.bytes();
    }
    const std::vector<std::byte> out = call.out.copy_bytes(), lse = call.lse.copy_bytes();
    std::memset(args.out.data, 0xff, out.size());
    std::memset(args.softmax_lse.data, 0xff, lse.size());
    TestExecutor serial = serial_executor();
    const DecodeCase::Outcome outcome = DecodeCase::decode(args, serial.get());
    ASSERT_EQ(outcome.status, FLASHMLA_OK) << outcome.message;
    EXPECT_EQ(std::memcmp(args.out.data, out.data(), out.size()), 0) << shift;
    EXPECT_EQ(std::memcmp(args.softmax_lse.data, lse.data(), lse.size()), 0) << shift;
  }
}

TEST_P(Decode, TransposedOutputs) {
  DecodeShape shape = shape_of({70, 3});
  shape.seq_len_q = 3;
  shape.causal = true;
  shape.num_heads_q = 5;
  shape.head_dim = 96;
  shape.head_dim_v = 64;
  DecodeCase call(shape);
  // (batch, num_heads_q, seq_len_q, head_dim_v) and (batch, seq_len_q, num_heads_q) in memory.
  call.out = Array(shape.dtype, {2, 3, 5, 64}, {3 * 5 * 64, 64, 3 * 64, 1}, kUnwritten);
  call.lse = Array(DType::kFloat32, {2, 5, 3}, {15, 1, 5}, kUnwritten);
  run_and_compare(call);
}

TEST_P(Decode, CacheOfMoreThanTwoToTheThirtyOneElements) {
  DecodeShape shape = shape_of({257});
  DecodeCase small(shape);
  ASSERT_NO_FATAL_FAILURE(run(small));
  DecodeCase large(shape);
  // 70,000 blocks; element 2^31 lies in block 58254. Pages that nobody writes take no memory.
  large.k_cache = Array::untouched(shape.dtype, {70000, 64, 1, 576});
  const std::int64_t ids[] = {58253, 58254, 58255, 69999, 0};
  for (std::int64_t index = 0; index < 5; ++index) large.block_table.set(ids[index], 0, index);
  for (std::int64_t j = 0; j < 257; ++j) {
    for (std::int64_t c = 0; c < 576; ++c) {
      large.k_cache.set(fixed_k(0, j, 0, c), ids[j / 64], j % 64, 0, c);
    }
  }
  ASSERT_NO_FATAL_FAILURE(run(large));
  EXPECT_EQ(large.out.copy_bytes(), small.out.copy_bytes());
  EXPECT_EQ(large.lse.copy_bytes(), small.lse.copy_bytes());
  EXPECT_NEAR(large.out.at(0, 0, 0, 0), 0.054726351, out_tolerance());
  EXPECT_NEAR(large.lse.at(0, 0, 0), 5.717565281, lse_tolerance());
  EXPECT_NEAR(large.lse.at(0, 15, 0), 5.785065765, lse_tolerance());
}

// --- Numbers -------------------------------------------------------------------------------------

TEST_P(Decode, AccuracyOnStandardNormalInputs) {
  DecodeShape shape = shape_of({700, 333});
  shape.softmax_scale.reset();
  shape.seq_len_q = 2;
  shape.causal = true;
  shape.num_heads_q = 8;
  DecodeCase call(shape, random_values(1), random_values(2));
  for (const std::int32_t parts : {1, 5}) {
    call.plan(parts);
    run_and_compare(call);
  }
}

TEST_P(Decode, EveryPairOfHeadDimensions) {
  constexpr std::pair<std::int64_t, std::int64_t> kPairs[] = {
      {576, 512}, {512, 512}, {320, 256}, {288, 256}, {192, 128}, {128, 128}, {96, 64}, {64, 64}};
  for (const auto& [head_dim, head_dim_v] : kPairs) {
    DecodeShape shape = shape_of({129});
    shape.head_dim = head_dim;
    shape.head_dim_v = head_dim_v;
    shape.seq_len_q = 2;
    shape.causal = true;
    DecodeCase call(shape);
    run_and_compare(call);
    if (head_dim == 320) {
      EXPECT_NEAR(call.out.at(0, 0, 0, 0), -0.057295854, out_tolerance());
      EXPECT_NEAR(call.out.at(0, 1, 15, 255), -0.048021606, out_tolerance());
      EXPECT_NEAR(call.lse.at(0, 15, 1), 5.360001213, lse_tolerance());
    }
  }
}

TEST_P(Decode, PeakySoftmax) {
  DecodeShape shape = shape_of({777});
  shape.softmax_scale = 4.0;
  DecodeCase call(shape);
  call.plan(4);
  ASSERT_NO_FATAL_FAILURE(run(call));
  EXPECT_NEAR(call.out.at(0, 0, 0, 0), -0.008826970, 2 * out_tolerance());
  EXPECT_NEAR(call.out.at(0, 0, 15, 511), 0.361337963, 2 * out_tolerance());
  EXPECT_NEAR(call.lse.at(0, 0, 0), 25.052010, 1e-4);
  EXPECT_NEAR(call.lse.at(0, 15, 0), 30.760799, 1e-4);
}

TEST_P(Decode, LogitsOfTenThousandDoNotOverflow) {
  for (const double sign : {1.0, -1.0}) {
    DecodeShape shape = shape_of({200});
    shape.num_heads_q = 3;
    // One token in seven points along q with a score near 1e4 in magnitude; the others score 0.
    const auto query = [](auto...) { return 1.0; };
    const auto token = [&](std::int64_t, std::int64_t j, std::int64_t, std::int64_t c) {
      if (j % 7 == 3) return sign * 69.0;
      return c % 2 == 0 ? 0.5 : -0.5;
    };
    DecodeCase call(shape, query, token);
    for (const std::int32_t parts : {1, 4}) {
      call.plan(parts);
      ASSERT_NO_FATAL_FAILURE(run(call));
      const Expected expected = evaluate(call);
      EXPECT_TRUE(lse_close(call.lse, expected.lse, {0, 2e-3, 0}));
      EXPECT_TRUE(out_close(call.out, expected.out, tolerance_of(shape.dtype)));
    }
  }
}

TEST_P(Decode, LargestInputsGiveFiniteResults) {
  const double largest = GetParam().dtype == DType::kFloat16 ? 6e4 : 3e38;
  const auto token = [&](auto... place) { return largest * fixed_k(place...); };
  for (const double factor : {0.0, 1e-30, 1.0, largest}) {
    const auto query = [&](auto... place) { return factor * fixed_q(place...); };
    for (const double scale : {0.25, -1e-30, 1e30, 0.0}) {
      DecodeShape shape = shape_of({700, 1});
      shape.num_heads_q = 3;
      shape.softmax_scale = scale;
      DecodeCase call(shape, query, token);
      for (const std::int32_t parts : {1, 3}) {
        call.plan(parts);
        ASSERT_NO_FATAL_FAILURE(run(call));
        for (const double value : call.out.values()) ASSERT_TRUE(std::isfinite(value)) << factor;
        for (const double value : call.lse.values()) ASSERT_TRUE(std::isfinite(value)) << factor;
        if (factor == 0.0 || scale == 0.0) {
          EXPECT_TRUE(result_close(call, evaluate(call)));
        }
      }
    }
  }
}

// All of one sign, so that the sums of weighted values are the largest that there are.
TEST_P(Decode, MeanOfTheLargestValues) {
  const double largest = GetParam().dtype == DType::kFloat16   ? 65504.0
                         : GetParam().dtype == DType::kFloat32 ? 0x1.fffffep127
                                                               : 0x1.fep127;
  for (const double others : {0.75, 1.0}) {
    DecodeShape shape = shape_of({1000, 63, 3});
    shape.num_heads_q = 3;
    DecodeCase call(shape, zero_q, [&](std::int64_t, std::int64_t j, std::int64_t, std::int64_t c) {
      return (c % 2 == 0 ? largest : -largest) * (j % 4 == 0 ? others : 1.0);
    });
    for (const std::int32_t parts : {1, 4, 7}) {
      call.plan(parts);
      run_and_compare(call);
    }
  }
}

// Scores so far apart that only one counts, and so large that float32 holds them to hundreds.
TEST_P(Decode, OfEnormousScoresTheLargestTakesAll) {
  for (const double scale : {1e8, -2e8, 1e36}) {
    SCOPED_TRACE(scale);
    DecodeShape shape = shape_of({40, 130});
    shape.num_heads_q = 40;
    shape.head_dim = shape.head_dim_v = 64;
    shape.softmax_scale = scale;
    DecodeCase call(shape, random_values(21), random_values(22));
    for (const std::int32_t parts : {1, 3}) {
      call.plan(parts);
      ASSERT_NO_FATAL_FAILURE(run(call));
      const Expected expected = evaluate(call);
      EXPECT_TRUE(out_close(call.out, expected.out, tolerance_of(shape.dtype)));
      const std::vector<double> lse = call.lse.values();
      for (std::size_t i = 0; i < lse.size(); ++i) {
        EXPECT_NEAR(lse[i], expected.lse[i], std::fabs(expected.lse[i]) * 0x1p-20);
      }
    }
  }
}

// The partial results of a row that is split at each of its blocks, all of the same page.
TEST_P(Decode, ThousandsOfParts) {
  constexpr std::int32_t kPages = 800, kPageSize = 512, kBlocks = kPages * kPageSize / 64;
  DecodeShape shape = shape_of({kPageSize});
  shape.page_size = kPageSize;
  shape.num_heads_q = 2;
  shape.head_dim = shape.head_dim_v = 64;
  const TokenValue values = random_values(20, 0.25);
  DecodeCase call(shape, zero_q, [&](auto... place) { return 1.0 + values(place...); });
  const Expected expected = evaluate(call);
  const auto page = static_cast<std::int32_t>(call.block_of(0, 0));
  call.block_table = int32_array({1, kPages}, std::vector(kPages, page));
  call.cache_seqlens = int32_array({1}, {kPages * kPageSize});
  std::vector<std::vector<std::int32_t>> parts;
  for (std::int32_t block = 0; block < kBlocks; ++block) parts.push_back({0, block, 0, block + 1});
  call.plan_by_hand(parts);
  ASSERT_NO_FATAL_FAILURE(run(call));
  EXPECT_TRUE(out_close(call.out, expected.out, tolerance_of(shape.dtype)));
  for (const double lse : call.lse.values()) {
    EXPECT_NEAR(lse, std::log(kPages * kPageSize), lse_tolerance());
  }
}

// A scale that float32 does not hold, of scores that it does.
TEST_P(Decode, TinyScaleOfLargeInputs) {
  if (GetParam().dtype == DType::kFloat16) GTEST_SKIP() << "float16 has no such values";
  for (const double scale : {0x1p-202, -0x1p-148, 0x1p-127}) {
    SCOPED_TRACE(scale);
    DecodeShape shape = shape_of({300});
    shape.num_heads_q = 20;
    shape.softmax_scale = scale;
    const double factor = std::sqrt(0.25 / std::abs(scale));
    DecodeCase call(
        shape, [&](auto... place) { return factor * fixed_q(place...); },
        [&](auto... place) { return factor * fixed_k(place...); });
    call.plan(2);
    run_and_compare(call);
  }
}

// Values of any size, with queries of the inverse: the scores are those of the formula.
TEST_P(Decode, LargeValuesAndSmallQueries) {
  if (GetParam().dtype == DType::kFloat16) GTEST_SKIP() << "float16 has no such values";
  for (const double factor : {0x1p120, 0x1p64, 0x1p-64, 0x1p-100}) {
    DecodeShape shape = shape_of({300});
    shape.num_heads_q = 3;
    DecodeCase call(
        shape, [&](auto... place) { return fixed_q(place...) / factor; },
        [&](auto... place) { return fixed_k(place...) * factor; });
    call.plan(2);
    run_and_compare(call);
  }
}

TEST_P(Decode, ScaleZeroIsTheMean) {
  DecodeShape shape = shape_of({257});
  shape.softmax_scale = 0.0;
  DecodeCase call(shape);
  run_and_compare(call);
  EXPECT_NEAR(call.lse.at(0, 7, 0), std::log(257), lse_tolerance());
  const double mean[] = {-0.00501581, -0.00300948, -0.00100316, 0.00100316};
  for (std::int64_t c = 0; c < 4; ++c) EXPECT_NEAR(call.out.at(0, 0, 7, c), mean[c], 1e-4);
}

TEST_P(Decode, NegativeScale) {
  DecodeShape shape = shape_of({100});
  shape.softmax_scale = -0.125;
  DecodeCase call(shape);
  run_and_compare(call);
}

TEST_P(Decode, NanStaysWithTheQueriesThatSeeIt) {
  DecodeShape shape = shape_of({70, 70});
  shape.seq_len_q = 3;
  shape.causal = true;
  shape.num_heads_q = 3;
  shape.head_dim = 64;
  shape.head_dim_v = 64;
  DecodeCase call(shape);
  // Token 68 of row 0 is seen by queries 1 and 2.
  call.k_cache.set(std::nan(""), call.block_of(0, 68), 68 % 64, 0, 5);
  ASSERT_NO_FATAL_FAILURE(run(call));
  for (std::int64_t i = 0; i < 2; ++i) {
    for (std::int64_t t = 0; t < 3; ++t) {
      for (std::int64_t h = 0; h < 3; ++h) {
        const bool sees = i == 0 && t >= 1;
        EXPECT_EQ(std::isnan(call.lse.at(i, h, t)), sees) << i << " " << t;
        for (std::int64_t c = 0; c < 64; ++c) {
          ASSERT_EQ(std::isnan(call.out.at(i, t, h, c)), sees) << i << " " << t << " " << c;
        }
      }
    }
  }
}

TEST_P(Decode, NanInAQueryStaysInIt) {
  for (const std::int64_t heads : {3, 40}) {
    DecodeShape shape = shape_of({70, 200});
    shape.seq_len_q = 2;
    shape.causal = true;
    shape.num_heads_q = heads;
    shape.head_dim = 64;
    shape.head_dim_v = 64;
    DecodeCase call(shape);
    for (const std::int32_t parts : {1, 3}) {
      call.plan(parts);
      ASSERT_NO_FATAL_FAILURE(run(call));
      const std::vector<double> out = call.out.values(), lse = call.lse.values();
      const double before = call.q.at(1, 0, 2, 5);
      call.q.set(std::nan(""), 1, 0, 2, 5);
      ASSERT_NO_FATAL_FAILURE(run(call));
      call.q.set(before, 1, 0, 2, 5);
      for (std::int64_t i = 0; i < 2; ++i) {
        for (std::int64_t t = 0; t < 2; ++t) {
          for (std::int64_t h = 0; h < heads; ++h) {
            SCOPED_TRACE(std::to_string(i) + " " + std::to_string(t) + " " + std::to_string(h));
            const bool has_nan = i == 1 && t == 0 && h == 2;
            const double now = call.lse.at(i, h, t);
            ASSERT_TRUE(has_nan ? std::isnan(now) : now == lse[(i * heads + h) * 2 + t]);
            for (std::int64_t c = 0; c < 64; ++c) {
              const double element = call.out.at(i, t, h, c);
              ASSERT_TRUE(has_nan ? std::isnan(element)
                                  : element == out[((i * 2 + t) * heads + h) * 64 + c]);
            }
          }
        }
      }
    }
  }
}

// --- visible_lens --------------------------------------------------------------------------------

TEST_P(Decode, VisibleLensOfRaggedQueries) {
  DecodeShape shape = shape_of({130, 64, 3, 200});
  shape.seq_len_q = 3;
  shape.num_heads_q = 4;
  shape.visible_lens = {0, 1, 130, 63, 64, 64, 0, 0, 0, 65, 127, 129};
  DecodeCase call(shape);
  for (const std::int32_t parts : {1, 2, 6}) {
    call.plan(parts);
    run_and_compare(call);
  }
}

TEST_P(Decode, CausalEqualsItsVisibleLens) {
  DecodeShape shape = shape_of({130, 2});
  shape.seq_len_q = 3;
  shape.causal = true;
  DecodeCase causal(shape);
  ASSERT_NO_FATAL_FAILURE(run(causal));
  shape.causal = false;
  shape.visible_lens = {128, 129, 130, 0, 1, 2};
  DecodeCase visible(shape);
  ASSERT_NO_FATAL_FAILURE(run(visible));
  EXPECT_EQ(visible.out.copy_bytes(), causal.out.copy_bytes());
  EXPECT_EQ(visible.lse.copy_bytes(), causal.lse.copy_bytes());
}

// --- Bits ----------------------------------------------------------------------------------------

TEST_P(Decode, SameBitsWithAnyThreadsAndEveryRun) {
  DecodeShape shape = shape_of({777, 65, 0, 130});
  shape.num_heads_q = 20;
  shape.seq_len_q = 2;
  shape.causal = true;
  DecodeCase call(shape, random_values(3), random_values(4));
  for (const std::int32_t parts : {1, 2, 7, 17}) {
    call.plan(parts);
    TestExecutor serial = serial_executor();
    ASSERT_EQ(call.run(GetParam().name, serial.get()).status, FLASHMLA_OK);
    const auto out = call.out.copy_bytes(), lse = call.lse.copy_bytes();
    const auto expect_same = [&](TestExecutor executor) {
      ASSERT_EQ(call.run(GetParam().name, executor.get()).status, FLASHMLA_OK);
      EXPECT_EQ(call.out.copy_bytes(), out) << executor.num_threads() << " threads";
      EXPECT_EQ(call.lse.copy_bytes(), lse) << executor.num_threads() << " threads";
    };
    expect_same(thread_executor(2));
    expect_same(thread_executor(5));
    expect_same(thread_executor(64));
    expect_same(backward_executor(5));
    for (int run = 0; run < 3; ++run) {
      ASSERT_EQ(call.run(GetParam().name).status, FLASHMLA_OK);  // the library's own threads
      EXPECT_EQ(call.out.copy_bytes(), out);
      EXPECT_EQ(call.lse.copy_bytes(), lse);
    }
  }
}

TEST_P(Decode, RowsOfOnePartAreDealtOutToTheThreads) {
  DecodeShape shape = shape_of({70, 200, 1, 65, 130});
  shape.num_heads_q = 5;
  DecodeCase call(shape);
  call.plan_by_hand({{0, 0, 4, 1000000}});
  std::vector<std::int64_t> counts;
  TestExecutor executor(4, [&](std::int64_t count, const auto& body) {
    counts.push_back(count);
    for (std::int64_t i = count; i-- > 0;) body(i);
  });
  ASSERT_EQ(call.run(GetParam().name, executor.get()).status, FLASHMLA_OK);
  EXPECT_EQ(counts, (std::vector<std::int64_t>{4}));
  const auto out = call.out.copy_bytes(), lse = call.lse.copy_bytes();
  ASSERT_NO_FATAL_FAILURE(run(call));
  EXPECT_EQ(call.out.copy_bytes(), out);
  EXPECT_EQ(call.lse.copy_bytes(), lse);
}

TEST_P(Decode, APartThatSeesNothingOfARowChangesNoBitOfIt) {
  DecodeShape shape = shape_of({200});
  shape.num_heads_q = 20;
  shape.seq_len_q = 2;
  shape.visible_lens = {64, 64};
  DecodeCase call(shape, random_values(5), random_values(6));
  call.plan_by_hand({{0, 0, 0, 4}});
  ASSERT_NO_FATAL_FAILURE(run(call));
  const auto out = call.out.copy_bytes(), lse = call.lse.copy_bytes();
  call.plan_by_hand({{0, 0, 0, 1}, {0, 1, 0, 2}, {0, 2, 0, 4}});
  ASSERT_NO_FATAL_FAILURE(run(call));
  EXPECT_EQ(call.out.copy_bytes(), out);
  EXPECT_EQ(call.lse.copy_bytes(), lse);
}

TEST_P(Decode, RowWalkedWholeHasItsBitsAlone) {
  DecodeShape shape = shape_of({450, 65, 64, 1, 300});
  shape.num_heads_q = 5;
  DecodeCase batch(shape);
  batch.plan_by_hand({{0, 0, 4, 1000000}});
  ASSERT_NO_FATAL_FAILURE(run(batch));
  for (std::size_t row = 0; row < shape.lengths.size(); ++row) {
    DecodeShape alone_shape = shape;
    alone_shape.lengths = {shape.lengths[row]};
    const auto i = static_cast<std::int64_t>(row);
    DecodeCase alone(
        alone_shape, [&](auto, auto t, auto h, auto c) { return fixed_q(i, t, h, c); },
        [&](auto, auto j, auto g, auto c) { return fixed_k(i, j, g, c); });
    alone.plan_by_hand({{0, 0, 0, 1000000}});
    ASSERT_NO_FATAL_FAILURE(run(alone));
    for (std::int64_t h = 0; h < 5; ++h) {
      EXPECT_EQ(alone.lse.at(0, h, 0), batch.lse.at(i, h, 0));
      for (std::int64_t c = 0; c < 512; ++c) {
        ASSERT_EQ(alone.out.at(0, 0, h, c), batch.out.at(i, 0, h, c));
      }
    }
  }
}

// --- Plans by hand -------------------------------------------------------------------------------

TEST_P(Decode, FollowsPlansByHand) {
  DecodeShape shape = shape_of({200, 0, 65, 129});  // 4, 0, 2, 3 blocks
  shape.num_heads_q = 3;
  shape.head_dim = 128;
  shape.head_dim_v = 128;
  DecodeCase call(shape);
  const std::vector<std::vector<std::vector<std::int32_t>>> plans = {
      {{0, 0, 3, 3}},
      {{0, 0, 3, 2147483647}},                     // end_block clamped
      {{0, 0, 2147483647, 1}},                     // end_row clamped
      {{2, 1, 3, 3}, {0, 2, 2, 1}, {0, 0, 0, 2}},  // last part first
      {{-1, 0, 0, 0}, {0, 0, 1, 0}, {4, 0, 4, 9}, {2, 0, 3, 3}, {-1, 7, -5, 7}},  // padded
      {{0, 3, 0, 4}, {0, 1, 0, 2}, {0, 0, 0, 1}, {0, 2, 0, 3}, {1, 0, 3, 3}},     // block by block
      {{0, 0, 0, 2}, {3, 1, 3, 3}, {0, 2, 3, 1}},
      {{0, 0, 0, 1, 77}, {0, 1, 3, 3, -4}},  // begin_split says nothing about the walk
  };
  const Expected expected = evaluate(call);
  for (std::size_t i = 0; i < plans.size(); ++i) {
    call.plan_by_hand(plans[i]);
    ASSERT_NO_FATAL_FAILURE(run(call));
    EXPECT_TRUE(result_close(call, expected)) << "plan " << i;
  }
}

TEST_P(Decode, LeavesRowsAloneThatNoPartWalks) {
  DecodeShape shape = shape_of({200, 50, 129});
  shape.num_heads_q = 2;
  shape.head_dim = 64;
  shape.head_dim_v = 64;
  DecodeCase call(shape);
  const Expected expected = evaluate(call);
  const std::vector<std::vector<std::vector<std::int32_t>>> plans = {
      {{2, 0, 2, 3}, {-1}, {0, 0, 0, 1}, {0, 1, 0, 4}},
      {{2, 0, 2, 3}, {0, 0, 1, 0}},  // the part ends before row 1 begins
  };
  for (const auto& plan : plans) {
    call.plan_by_hand(plan);
    ASSERT_NO_FATAL_FAILURE(run(call));
    const Array untouched_out(shape.dtype, {64}, kUnwritten);
    const Array untouched_lse(DType::kFloat32, {1}, kUnwritten);
    for (std::int64_t h = 0; h < 2; ++h) {
      EXPECT_EQ(call.lse.at(1, h, 0), untouched_lse.at(0));
      EXPECT_NEAR(call.lse.at(0, h, 0), expected.lse[h], lse_tolerance());
      EXPECT_NEAR(call.lse.at(2, h, 0), expected.lse[4 + h], lse_tolerance());
      for (std::int64_t c = 0; c < 64; ++c) {
        ASSERT_EQ(call.out.at(1, 0, h, c), untouched_out.at(c));
        ASSERT_NEAR(call.out.at(2, 0, h, c), expected.out[(4 + h) * 64 + c], out_tolerance());
      }
    }
  }
}

// Cuts the blocks of all rows at random places into parts, in random order.
std::vector<std::vector<std::int32_t>> random_plan(const std::vector<std::int32_t>& lengths,
                                                   std::mt19937& random) {
  struct Place {
    std::int32_t row, block;
  };
  std::vector<Place> places;
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    const std::int32_t blocks = (lengths[row] + 63) / 64;
    for (std::int32_t block = 0; block < std::max(blocks, 1); ++block) {
      places.push_back({static_cast<std::int32_t>(row), block});
    }
  }
  std::vector<std::vector<std::int32_t>> parts;
  for (std::size_t begin = 0; begin < places.size();) {
    const std::size_t end = begin + 1 + random() % std::min<std::size_t>(places.size() - begin, 9);
    const Place last = places[end - 1];
    const std::int32_t end_block = lengths[last.row] == 0 ? 0 : last.block + 1;
    parts.push_back({places[begin].row, places[begin].block, last.row, end_block});
    begin = end;
  }
  for (std::uint32_t i = random() % 3; i > 0; --i) parts.push_back({-1, 0, 0, 0});
  std::shuffle(parts.begin(), parts.end(), random);
  return parts;
}

// FLASHMLA_TEST_ROUNDS: more for a long hunt, fewer under emulation.
int rounds_of_random_calls() {
  const char* rounds = std::getenv("FLASHMLA_TEST_ROUNDS");
  return rounds != nullptr ? std::atoi(rounds) : 24;
}

TEST_P(Decode, RandomCallsWithRandomPlans) {
  constexpr std::pair<std::int64_t, std::int64_t> kPairs[] = {{576, 512}, {96, 64}, {64, 64}};
  constexpr std::int64_t kPages[] = {1, 3, 16, 64, 100};
  std::mt19937 random(12345);
  const auto pick = [&](std::int64_t least, std::int64_t most) {
    return least +
           static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(most - least + 1));
  };
  const int rounds = rounds_of_random_calls();
  for (int round = 0; round < rounds; ++round) {
    DecodeShape shape;
    shape.dtype = GetParam().dtype;
    std::tie(shape.head_dim, shape.head_dim_v) = kPairs[pick(0, 2)];
    shape.page_size = kPages[pick(0, 4)];
    shape.num_heads_k = pick(1, 3);
    shape.num_heads_q = shape.num_heads_k * pick(1, 7);
    shape.seq_len_q = pick(1, 4);
    shape.lengths.clear();
    for (std::int64_t row = pick(1, 4); row > 0; --row) {
      shape.lengths.push_back(
          static_cast<std::int32_t>(pick(0, 4) == 0 ? pick(0, 2) : pick(0, 330)));
    }
    if (pick(0, 2) == 0) {
      for (const std::int32_t length : shape.lengths) {
        std::int64_t visible = 0;
        for (std::int64_t t = 0; t < shape.seq_len_q; ++t) {
          visible = pick(visible, length);
          shape.visible_lens.push_back(static_cast<std::int32_t>(visible));
        }
      }
    } else {
      shape.causal = pick(0, 1) == 0;
    }
    shape.q_gap = pick(0, 3);
    shape.cache_gap = pick(0, 9);
    shape.out_gap = pick(0, 3);
    shape.unused_table_entry = 2147480000;
    DecodeCase call(shape, random_values(round), random_values(round + 1000));
    const Expected expected = evaluate(call);
    for (int variant = 0; variant < 2; ++variant) {
      if (variant == 0) {
        call.plan_by_hand(random_plan(shape.lengths, random));
      } else {
        call.plan(static_cast<std::int32_t>(pick(1, 12)));
      }
      ASSERT_NO_FATAL_FAILURE(run(call));
      ASSERT_TRUE(result_close(call, expected)) << "round " << round << " variant " << variant;
    }
  }
}

}  // namespace
}  // namespace flashmla::testing
