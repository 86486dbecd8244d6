// What is particular to the AMX kernel: its two loops, the raised reference, tiles that cannot be
// read in place, hidden tokens that are not finite, and bits that do not depend on neighbours.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "support/compare.hpp"
#include "support/decode_case.hpp"
#include "support/executors.hpp"
#include "support/kernels.hpp"
#include "support/oracle.hpp"

namespace flashmla::testing {
namespace {

const std::string kKernel = "cpu_amx_bf16";

struct Dims {
  std::int64_t head_dim;
  std::int64_t head_dim_v;
};
constexpr Dims kAllDims[] = {{576, 512}, {512, 512}, {320, 256}, {288, 256},
                             {192, 128}, {128, 128}, {96, 64},   {64, 64}};

class Amx : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::vector<Kernel> kernels = usable_kernels();
    const bool usable = std::any_of(kernels.begin(), kernels.end(),
                                    [](const Kernel& kernel) { return kernel.name == kKernel; });
    if (!usable) GTEST_SKIP() << "this machine has no AMX tiles for bf16";
  }

  static void expect_right(DecodeCase& decode_case) {
    const Expected expected = evaluate(decode_case);
    // One thread takes all query rows in one task; four share them out.
    for (const std::int32_t num_threads : {1, 4}) {
      TestExecutor executor = backward_executor(num_threads);
      const DecodeCase::Outcome outcome = decode_case.run(kKernel, executor.get());
      ASSERT_EQ(outcome.status, FLASHMLA_OK) << outcome.message;
      EXPECT_TRUE(result_close(decode_case, expected)) << num_threads << " threads";
    }
  }
};

TEST_F(Amx, EveryPairOfDimsInBothLoops) {
  for (const Dims dims : kAllDims) {
    for (const std::int64_t heads : {16, 128}) {
      SCOPED_TRACE(std::to_string(dims.head_dim) + ", " + std::to_string(heads) + " heads");
      DecodeShape shape;
      shape.lengths = {300};
      shape.num_heads_q = heads;
      shape.head_dim = dims.head_dim;
      shape.head_dim_v = dims.head_dim_v;
      DecodeCase decode_case(shape, random_values(1), random_values(2));
      expect_right(decode_case);
    }
  }
}

// Both loops hold whole tiles of 16 rows; the other loop takes them in pairs.
TEST_F(Amx, EveryNumberOfRowTiles) {
  for (const std::int64_t heads :
       {1, 3, 8, 15, 16, 17, 20, 32, 33, 48, 63, 80, 112, 127, 129, 200, 256, 257}) {
    SCOPED_TRACE(heads);
    DecodeShape shape;
    shape.lengths = {70, 131};
    shape.num_heads_q = heads;
    shape.head_dim = 192;
    shape.head_dim_v = 128;
    DecodeCase decode_case(shape, random_values(3), random_values(4));
    expect_right(decode_case);
  }
}

// Of one head and few tokens one weight may be most of the sum: nothing averages its rounding.
TEST_F(Amx, OneHeadOfFewTokens) {
  for (const Dims dims : {Dims{576, 512}, Dims{64, 64}}) {
    for (const std::int32_t length : {30, 70}) {
      for (std::uint64_t seed = 0; seed < 400; ++seed) {
        SCOPED_TRACE(std::to_string(dims.head_dim) + ", " + std::to_string(length) + " tokens, " +
                     std::to_string(seed));
        DecodeShape shape;
        shape.lengths = {length};
        shape.num_heads_q = 1;
        shape.head_dim = dims.head_dim;
        shape.head_dim_v = dims.head_dim_v;
        DecodeCase decode_case(shape, random_values(2 * seed), random_values(2 * seed + 1));
        ASSERT_EQ(decode_case.run(kKernel).status, FLASHMLA_OK);
        ASSERT_TRUE(result_close(decode_case, evaluate(decode_case)));
      }
    }
  }
}

TEST_F(Amx, EveryLengthAroundABlock) {
  for (const std::int64_t heads : {4, 40}) {
    for (const std::int32_t length : {0,   1,   15,  16,  17,  31,  32,  33,  63,  64,  65,
                                      127, 128, 129, 143, 255, 256, 257, 287, 511, 512, 530}) {
      SCOPED_TRACE(std::to_string(heads) + " heads, length " + std::to_string(length));
      DecodeShape shape;
      shape.lengths = {length};
      shape.num_heads_q = heads;
      shape.head_dim = 96;
      shape.head_dim_v = 64;
      DecodeCase decode_case(shape, random_values(5), random_values(6));
      expect_right(decode_case);
    }
  }
}

TEST_F(Amx, TilesAcrossPages) {
  for (const std::int64_t heads : {8, 64}) {
    for (const std::int64_t page_size : {1, 2, 7, 16, 24, 100, 784}) {
      SCOPED_TRACE(std::to_string(heads) + " heads, pages of " + std::to_string(page_size));
      DecodeShape shape;
      shape.lengths = {333, 90};
      shape.num_heads_q = heads;
      shape.page_size = page_size;
      DecodeCase decode_case(shape, random_values(7), random_values(8));
      expect_right(decode_case);
    }
  }
}

TEST_F(Amx, StridesAndSplits) {
  for (const std::int64_t heads : {6, 38, 96}) {
    SCOPED_TRACE(heads);
    DecodeShape shape;
    shape.lengths = {700, 0, 65, 401};
    shape.seq_len_q = 2;
    shape.num_heads_q = heads;
    shape.num_heads_k = 2;
    shape.causal = true;
    shape.q_gap = 3;
    shape.cache_gap = 5;
    shape.out_gap = 7;
    shape.lse_gap = 1;
    DecodeCase decode_case(shape, random_values(9), random_values(10));
    decode_case.plan(5);
    expect_right(decode_case);
  }
}

// Logits that grow along the sequence raise the reference again and again: in the middle of a
// block, at its begin, in some rows and not in others, up to 1e4.
TEST_F(Amx, GrowingLogits) {
  for (const std::int64_t heads : {16, 32, 64}) {
    for (const double largest : {60.0, 1000.0, 1e4}) {
      for (const double sign : {1.0, -1.0}) {
        SCOPED_TRACE(std::to_string(heads) + " heads, up to " + std::to_string(largest));
        constexpr std::int32_t kLength = 600;
        DecodeShape shape;
        shape.lengths = {kLength};
        shape.num_heads_q = heads;
        shape.head_dim = 128;
        shape.head_dim_v = 128;
        shape.softmax_scale = sign;
        const QueryValue noise = random_values(11, 0.5);
        // Only channel 0 of q is large, and only for two heads of three.
        const auto query = [=](std::int64_t i, std::int64_t t, std::int64_t h, std::int64_t c) {
          if (c != 0) return noise(i, t, h, c) / 8;
          return h % 3 == 0 ? 0.0 : sign * (h % 3 == 1 ? 1.0 : 0.25);
        };
        const TokenValue values = random_values(12);
        const auto token = [=](std::int64_t i, std::int64_t j, std::int64_t g, std::int64_t c) {
          if (c != 0) return values(i, j, g, c);
          return std::floor(largest * static_cast<double>(j + 1) / kLength);
        };
        DecodeCase decode_case(shape, query, token);
        expect_right(decode_case);
      }
    }
  }
}

// A reference far above all later scores, and one raised at the very last token.
TEST_F(Amx, OneTokenOutweighsAll) {
  for (const std::int64_t heads : {16, 32, 64}) {
    for (const std::int64_t place : {0, 40, 127, 128, 300, 519}) {
      SCOPED_TRACE(std::to_string(heads) + " heads, token " + std::to_string(place));
      DecodeShape shape;
      shape.lengths = {520};
      shape.num_heads_q = heads;
      shape.head_dim = 64;
      shape.head_dim_v = 64;
      const TokenValue values = random_values(14);
      const auto token = [=](std::int64_t i, std::int64_t j, std::int64_t g, std::int64_t c) {
        return values(i, j, g, c) + (j == place ? 20.0 : 0.0);
      };
      const QueryValue query_values = random_values(13, 0.25);
      const auto query = [=](std::int64_t i, std::int64_t t, std::int64_t h, std::int64_t c) {
        return query_values(i, t, h, c) + 1.0;
      };
      DecodeCase decode_case(shape, query, token);
      expect_right(decode_case);
    }
  }
}

// Two halves of a cancellation: what the first blocks add must be shifted as the reference rises.
TEST_F(Amx, SmallScoresStillCountAfterARaise) {
  DecodeShape shape;
  shape.lengths = {512};
  shape.num_heads_q = 32;
  shape.head_dim = 64;
  shape.head_dim_v = 64;
  shape.softmax_scale = 1.0;
  const TokenValue values = random_values(15);
  // Scores 0 for 511 tokens, then ln(2^31) + a little for the last: just past the raise, so that
  // the first 511 weigh 2^-31 * 511, which lse shows but out hardly does.
  const auto token = [=](std::int64_t i, std::int64_t j, std::int64_t g, std::int64_t c) {
    if (c == 0) return j == 511 ? 21.5 : 0.0;
    return values(i, j, g, c);
  };
  const auto query = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t c) {
    return c == 0 ? 1.0 : 0.0;
  };
  DecodeCase decode_case(shape, query, token);
  expect_right(decode_case);
}

// A reference that rises a little above weights of the same block, which are most of the sum: with
// eight rows at most no weight is rounded to bf16 alone, and none is then.
TEST_F(Amx, ARaiseRoundsNoWeightsAnew) {
  for (int step = 0; step < 64; ++step) {
    SCOPED_TRACE(step);
    DecodeShape shape;
    shape.lengths = {64};
    shape.num_heads_q = 4;
    shape.head_dim = 64;
    shape.head_dim_v = 64;
    shape.softmax_scale = std::log(2.0);  // scores are powers of two
    const auto token = [=](std::int64_t, std::int64_t j, std::int64_t, std::int64_t c) {
      if (c == 0) return j < 16 ? 0.0 : j < 48 ? 25.0 : j == 48 ? 30.0 : 0.0;
      if (c == 1) return j == 48 ? step / 64.0 : 0.0;
      return j < 48 ? 1.0 + static_cast<double>(c) / 64 : 0.0;
    };
    const auto query = [](std::int64_t, std::int64_t, std::int64_t, std::int64_t c) {
      return c < 2 ? 1.0 : 0.0;
    };
    DecodeCase decode_case(shape, query, token);
    ASSERT_EQ(decode_case.run(kKernel).status, FLASHMLA_OK);
    const Expected expected = evaluate(decode_case);
    for (std::int64_t c = 2; c < shape.head_dim_v; ++c) {
      const double half_ulp = std::ldexp(1.0, std::ilogb(expected.out[c]) - 8);
      EXPECT_NEAR(decode_case.out.at(0, 0, 0, c), expected.out[c], 1.05 * half_ulp) << c;
    }
  }
}

// As many like tokens as one sum in float32 would not count: 2^25, all of the same page.
TEST_F(Amx, MillionsOfLikeTokens) {
  constexpr std::int32_t kPages = 8192, kPageSize = 4096;
  for (const std::int64_t heads : {16, 32}) {
    SCOPED_TRACE(heads);
    DecodeShape shape;
    shape.lengths = {kPageSize};
    shape.page_size = kPageSize;
    shape.num_heads_q = heads;
    shape.head_dim = 64;
    shape.head_dim_v = 64;
    DecodeCase decode_case(shape, zero_q,
                           [](std::int64_t, std::int64_t, std::int64_t, std::int64_t c) {
                             return 1.0 + static_cast<double>(c % 7) / 8;
                           });
    const Expected expected = evaluate(decode_case);
    const auto page = static_cast<std::int32_t>(decode_case.block_of(0, 0));
    decode_case.block_table = int32_array({1, kPages}, std::vector(kPages, page));
    decode_case.cache_seqlens = int32_array({1}, {kPages * kPageSize});
    decode_case.plan_by_hand({{0, 0, 0, kPages * kPageSize / 64}});
    ASSERT_EQ(decode_case.run(kKernel).status, FLASHMLA_OK);
    EXPECT_TRUE(out_close(decode_case.out, expected.out, tolerance_of(DType::kBFloat16)));
    EXPECT_NEAR(decode_case.lse.at(0, 0, 0), 25 * std::log(2.0), 2e-5);
  }
}

// Rows of more than one chain of 65,536 tokens: with as many tokens as a chain has, with references
// that rise in the next chain, and with queries that see nothing of it.
TEST_F(Amx, RowsOfAboutAChain) {
  for (const std::int64_t heads : {3, 7, 10}) {
    for (const std::int32_t length : {65536, 65600}) {
      SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(length) + " tokens");
      DecodeShape shape;
      shape.lengths = {length};
      shape.seq_len_q = 2;
      shape.num_heads_q = heads;
      shape.head_dim = 64;
      shape.head_dim_v = 64;
      shape.softmax_scale = 1.0;
      shape.visible_lens = {65530, length};
      // What is hidden under the last token shows in its columns of zeros.
      const auto token = [=](std::int64_t, std::int64_t j, std::int64_t, std::int64_t c) {
        const bool last = j == length - 1;
        if (c == 0) return last ? 22.0 : 0.0;
        if (c % 2 == 0) return last ? 0.0 : 0x1p15 * static_cast<double>(1 + (j + c) % 3);
        return static_cast<double>((j + 3 * c) % 5);
      };
      const auto query = [](std::int64_t, std::int64_t, std::int64_t h, std::int64_t c) {
        return c == 0 ? static_cast<double>(h % 3) / 2 : 0.0;
      };
      DecodeCase decode_case(shape, query, token);
      decode_case.plan_by_hand({{0, 0, 0, 2000}});
      expect_right(decode_case);
    }
  }
}

// Sums of the values overflow unless they are guarded, and the scores are ordinary ones.
TEST_F(Amx, OverflowingSumsInBothLoops) {
  const QueryValue queries = random_values(24);
  const TokenValue values = random_values(25);
  for (const std::int64_t heads : {3, 20, 70, 128}) {
    SCOPED_TRACE(heads);
    DecodeShape shape;
    shape.lengths = {600};
    shape.seq_len_q = 2;
    shape.num_heads_q = heads;
    shape.head_dim = 192;
    shape.head_dim_v = 128;
    shape.causal = true;
    shape.softmax_scale = 0x1p-19;
    DecodeCase decode_case(
        shape, [&](auto... place) { return 0x1p-110 * queries(place...); },
        [&](auto... place) { return 0x1p125 * std::min(std::abs(values(place...)), 7.0); });
    expect_right(decode_case);
    decode_case.plan(5);
    expect_right(decode_case);
  }
}

// Tokens that some rows see and others do not, with NaN and infinities in what is hidden from all
// but the last query token: rows that see them are NaN, the others must be right.
TEST_F(Amx, HiddenTokensThatAreNotFinite) {
  for (const std::int64_t heads : {2, 5, 16, 40, 80}) {
    for (const double special :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(special));
      DecodeShape shape;
      shape.lengths = {390};
      shape.seq_len_q = 3;
      shape.num_heads_q = heads;
      shape.head_dim = 96;
      shape.head_dim_v = 64;
      shape.visible_lens = {100, 300, 390};
      const TokenValue values = random_values(17);
      const auto token = [=](std::int64_t i, std::int64_t j, std::int64_t g, std::int64_t c) {
        return j == 301 || (j == 388 && c == 3) ? special : values(i, j, g, c);
      };
      DecodeCase decode_case(shape, random_values(16), token);
      const DecodeCase::Outcome outcome = decode_case.run(kKernel);
      ASSERT_EQ(outcome.status, FLASHMLA_OK) << outcome.message;
      const Expected expected = evaluate(decode_case);
      const std::int64_t finite_rows = 2 * heads;
      std::vector<double> got = decode_case.out.values();
      for (std::int64_t row = 0; row < finite_rows; ++row) {
        double difference = 0, reference = 0;
        for (std::int64_t c = 0; c < shape.head_dim_v; ++c) {
          const std::int64_t at = row * shape.head_dim_v + c;
          difference += std::pow(got[at] - expected.out[at], 2);
          reference += std::pow(expected.out[at], 2);
        }
        EXPECT_LE(std::sqrt(difference / reference), 5e-3) << "row " << row;
      }
      for (std::int64_t row = finite_rows; row < 3 * heads; ++row) {
        EXPECT_FALSE(std::isfinite(got[row * shape.head_dim_v + 3])) << "row " << row;
      }
    }
  }
}

// The same call with a hidden token that is finite, infinite or NaN gives a row that does not see
// it the same bits: the block is computed in two different ways.
TEST_F(Amx, HiddenTokensChangeNoBit) {
  for (const std::int64_t heads : {4, 40, 60}) {
    std::vector<std::vector<double>> outs, lses;
    for (const double hidden :
         {1.0, std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
      DecodeShape shape;
      shape.lengths = {400};
      shape.seq_len_q = 4;
      shape.num_heads_q = heads;
      shape.head_dim = 128;
      shape.head_dim_v = 128;
      shape.causal = true;
      const TokenValue values = random_values(19);
      const auto token = [=](std::int64_t i, std::int64_t j, std::int64_t g, std::int64_t c) {
        return j == 399 ? hidden : values(i, j, g, c);
      };
      DecodeCase decode_case(shape, random_values(18), token);
      const DecodeCase::Outcome outcome = decode_case.run(kKernel);
      ASSERT_EQ(outcome.status, FLASHMLA_OK) << outcome.message;
      outs.push_back(decode_case.out.values());
      outs.back().resize(3 * heads * shape.head_dim_v);
      std::vector<double> lse;
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t t = 0; t < 3; ++t) lse.push_back(decode_case.lse.at(0, h, t));
      }
      lses.push_back(lse);
    }
    EXPECT_EQ(outs[0], outs[1]);
    EXPECT_EQ(outs[0], outs[2]);
    EXPECT_EQ(lses[0], lses[1]);
    EXPECT_EQ(lses[0], lses[2]);
  }
}

// A row's bits come from its own query and range: other rows of the task may hold anything, whether
// its result is written or merged.
TEST_F(Amx, RowsDoNotDependOnTheirNeighbours) {
  for (const auto& [heads, parts] : {std::pair{4, 1}, {44, 1}, {84, 1}, {4, 3}, {44, 3}, {84, 3}}) {
    SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(parts) + " parts");
    DecodeShape shape;
    shape.lengths = {290};
    shape.seq_len_q = 3;
    shape.num_heads_q = heads;
    shape.head_dim = 128;
    shape.head_dim_v = 128;
    shape.visible_lens = {17, 130, 290};
    const QueryValue ordinary = random_values(20);
    DecodeCase one(shape, ordinary, random_values(21));
    one.plan(parts);
    ASSERT_EQ(one.run(kKernel).status, FLASHMLA_OK);
    shape.visible_lens = {0, 130, 131};
    // All rows but those of t = 1 differ: enough to raise their references often, or to overflow.
    for (const double factor : {50.0, 1e37}) {
      const auto other = [=](std::int64_t i, std::int64_t t, std::int64_t h, std::int64_t c) {
        return t == 1 ? ordinary(i, t, h, c) : factor * ordinary(i + 1, t, h, c);
      };
      DecodeCase two(shape, other, random_values(21));
      two.plan(parts);
      ASSERT_EQ(two.run(kKernel).status, FLASHMLA_OK);
      for (std::int64_t h = 0; h < heads; ++h) {
        EXPECT_EQ(one.lse.at(0, h, 1), two.lse.at(0, h, 1)) << "head " << h;
        for (std::int64_t c = 0; c < shape.head_dim_v; ++c) {
          ASSERT_EQ(one.out.at(0, 1, h, c), two.out.at(0, 1, h, c)) << "head " << h << ", " << c;
        }
      }
    }
  }
}

// Threads that share the query rows of a part must not decide which of them are rescaled before the
// values of the block before are in the sums, and which after.
TEST_F(Amx, RaisedReferencesGiveTheSameBitsWithAnyThreads) {
  for (const std::int64_t heads : {17, 40, 48, 128, 256}) {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
      SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(seed));
      DecodeShape shape;
      shape.lengths = {600};
      shape.num_heads_q = heads;
      shape.head_dim = 128;
      shape.head_dim_v = 128;
      shape.softmax_scale = 1.0;
      // Scores grow by 0.25 a token, more than 21 in a block of a row in four: what was there
      // before a raise still counts.
      const QueryValue noise = random_values(2 * seed + 100, 0.125);
      const auto query = [=](std::int64_t i, std::int64_t t, std::int64_t h, std::int64_t c) {
        return c != 0 ? noise(i, t, h, c) : h % 4 == 0 ? 1.5 : 0.25 * static_cast<double>(h % 4);
      };
      const TokenValue values = random_values(2 * seed + 101);
      const auto token = [=](std::int64_t i, std::int64_t j, std::int64_t g, std::int64_t c) {
        return c != 0 ? values(i, j, g, c) : 0.25 * static_cast<double>(j);
      };
      DecodeCase decode_case(shape, query, token);
      decode_case.plan_by_hand({{0, 0, 0, 1000}});
      TestExecutor serial = serial_executor();
      ASSERT_EQ(decode_case.run(kKernel, serial.get()).status, FLASHMLA_OK);
      const std::vector<std::byte> out = decode_case.out.copy_bytes();
      const std::vector<std::byte> lse = decode_case.lse.copy_bytes();
      for (const std::int32_t num_threads : {2, 3, 4}) {
        TestExecutor threads = backward_executor(num_threads);
        ASSERT_EQ(decode_case.run(kKernel, threads.get()).status, FLASHMLA_OK);
        EXPECT_EQ(decode_case.out.copy_bytes(), out) << num_threads << " threads";
        EXPECT_EQ(decode_case.lse.copy_bytes(), lse) << num_threads << " threads";
      }
    }
  }
}

// Every thread asks for the tiles on its own and gives them back.
TEST_F(Amx, ManyThreads) {
  for (const std::int64_t heads : {64, 200}) {
    SCOPED_TRACE(heads);
    DecodeShape shape;
    shape.lengths = {600, 64, 1, 200};
    shape.num_heads_q = heads;
    shape.head_dim = 192;
    shape.head_dim_v = 128;
    DecodeCase decode_case(shape, random_values(22), random_values(23));
    decode_case.plan(6);
    ASSERT_EQ(decode_case.run(kKernel).status, FLASHMLA_OK);
    const std::vector<std::byte> bits = decode_case.out.copy_bytes();
    TestExecutor threads = thread_executor(4);
    ASSERT_EQ(decode_case.run(kKernel, threads.get()).status, FLASHMLA_OK);
    EXPECT_EQ(decode_case.out.copy_bytes(), bits);
    EXPECT_TRUE(result_close(decode_case, evaluate(decode_case)));
  }
}

// The bytes that a plan of a row a block at a time adds to those of the row in two halves.
std::size_t bytes_of_more_parts(DecodeCase& decode_case, const std::string& kernel) {
  const std::int32_t blocks = decode_case.shape.lengths[0] / 64;
  const auto bytes_of_plan = [&](std::int32_t num_parts) {
    std::vector<std::vector<std::int32_t>> parts;
    for (std::int32_t part = 0; part < num_parts; ++part) {
      parts.push_back({0, blocks * part / num_parts, 0, blocks * (part + 1) / num_parts});
    }
    decode_case.plan_by_hand(parts);
    flashmla_decode_args args = decode_case.args();
    args.kernel = kernel.c_str();
    std::size_t bytes = 0;
    EXPECT_EQ(flashmla_decode_workspace_size(&args, 1, &bytes), FLASHMLA_OK);
    return bytes;
  };
  return bytes_of_plan(blocks) - bytes_of_plan(2);
}

TEST_F(Amx, PartialResultsOfFewRowsTakeNoMoreRoomThanElsewhere) {
  for (const std::int64_t rows : {1, 3, 8, 9, 16}) {
    DecodeShape shape;
    shape.lengths = {32 * 64};
    shape.num_heads_k = 8;
    shape.num_heads_q = 8 * rows;
    shape.head_dim = 192;
    shape.head_dim_v = 128;
    DecodeCase decode_case(shape, zero_q);
    const std::size_t bytes = bytes_of_more_parts(decode_case, kKernel);
    for (const Kernel& kernel : usable_kernels()) {
      if (kernel.dtype != DType::kBFloat16) continue;
      EXPECT_LE(bytes, bytes_of_more_parts(decode_case, kernel.name))
          << rows << " query rows, " << kernel.name;
    }
  }
}

TEST_F(Amx, RandomCalls) {
  std::mt19937 random(24);
  const auto pick = [&](auto... choices) {
    const std::int64_t options[] = {choices...};
    return options[random() % std::size(options)];
  };
  for (int round = 0; round < 60; ++round) {
    const Dims dims = kAllDims[random() % std::size(kAllDims)];
    DecodeShape shape;
    shape.head_dim = dims.head_dim;
    shape.head_dim_v = dims.head_dim_v;
    shape.num_heads_k = pick(1, 1, 2, 3);
    shape.num_heads_q = shape.num_heads_k * pick(1, 2, 5, 8, 16, 24, 40);
    shape.seq_len_q = pick(1, 1, 2, 4, 7);
    shape.page_size = pick(1, 5, 16, 64, 64, 128);
    shape.causal = random() % 2 == 0;
    shape.cache_gap = pick(0, 0, 8, 1);
    shape.q_gap = pick(0, 1);
    shape.lengths.clear();
    for (std::int64_t i = pick(1, 2, 3); i-- > 0;) {
      shape.lengths.push_back(static_cast<std::int32_t>(random() % 420));
    }
    if (random() % 3 == 0) {
      for (const std::int32_t length : shape.lengths) {
        std::vector<std::int32_t> visible;
        for (std::int64_t t = 0; t < shape.seq_len_q; ++t) {
          visible.push_back(static_cast<std::int32_t>(random() % (length + 1)));
        }
        std::sort(visible.begin(), visible.end());
        shape.visible_lens.insert(shape.visible_lens.end(), visible.begin(), visible.end());
      }
      shape.causal = false;
    }
    SCOPED_TRACE("round " + std::to_string(round));
    DecodeCase decode_case(shape, random_values(random()), random_values(random()));
    decode_case.plan(static_cast<std::int32_t>(pick(1, 1, 3, 8)));
    expect_right(decode_case);
  }
}

}  // namespace
}  // namespace flashmla::testing
