// The checked mode of a GPU: the CPU's checks on copies, with a copy function that tests can watch.
#include "problem/contents.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "schedule/resolve.hpp"

namespace flashmla::testing {
namespace {

// Two rows of 100 and 65 tokens in pages of 64, with gaps between the tensors' rows, "on a GPU".
class Contents : public ::testing::Test {
 protected:
  Contents() {
    problem_.device = {DeviceType::kCuda, 0};
    problem_.batch = 2;
    problem_.seq_len_q = 2;
    problem_.num_blocks = 8;
    problem_.page_size = 64;
    problem_.max_pages_per_row = 3;
    problem_.cache_seqlens = lengths_.data();
    problem_.cache_seqlens_stride = 2;
    problem_.block_table = table_.data();
    problem_.block_table_batch_stride = 5;
    problem_.block_table_page_stride = 1;
    problem_.plan_rows = plan_.data();
    problem_.plan_row_stride = 9;
    problem_.num_parts = 2;
  }

  // The verdict of the checked mode.
  std::string verdict() {
    const auto host = copy_contents(problem_, [&](auto* to, const auto* from, std::int64_t count) {
      std::copy_n(from, count, to);
      return Status();
    });
    EXPECT_TRUE(host.ok());
    const Problem& copy = host.value().problem;
    EXPECT_NE(copy.cache_seqlens, problem_.cache_seqlens);
    EXPECT_NE(copy.block_table, problem_.block_table);
    EXPECT_NE(copy.plan_rows, problem_.plan_rows);
    if (Status status = check_contents(copy); !status.ok()) return status.message();
    return schedule::check_plan(copy).message();
  }

  Problem problem_;
  std::vector<std::int32_t> lengths_ = {100, -77, 65};
  std::vector<std::int32_t> table_ = {7, 0, -1, -77, -77, 3, 5, 2147480000};
  std::vector<std::int32_t> visible_ = {99, 100, 0, 65};
  std::vector<std::int32_t> plan_ = {0, 0, 1, 1, 0, 0, 0, 0, -77, 1, 1, 1, 2, 1, 0, 0, 0};
};

TEST_F(Contents, GoodOnes) {
  EXPECT_EQ(verdict(), "");
  problem_.visible_lens = visible_.data();
  problem_.visible_lens_batch_stride = 2;
  problem_.visible_lens_token_stride = 1;
  EXPECT_EQ(verdict(), "");
}

TEST_F(Contents, ARowIsLongerThanAnyIsComputed) {
  problem_.page_size = INT32_MAX;
  lengths_[2] = kMaxRowTokens + 1;
  EXPECT_EQ(verdict(), "cache_seqlens[1] is 2147482625; it must be between 0 and 2147482624");
}

TEST_F(Contents, BlockIdsInUse) {
  table_[6] = 8;
  EXPECT_EQ(verdict(), "block_table[1, 1] is 8; k_cache has blocks 0 to 7");
  table_[6] = -1;
  EXPECT_EQ(verdict(), "block_table[1, 1] is -1; k_cache has blocks 0 to 7");
}

TEST_F(Contents, Lengths) {
  lengths_[2] = 193;
  EXPECT_EQ(verdict(),
            "cache_seqlens[1] is 193; it must be between 0 and 192 (max_num_blocks_per_seq * "
            "page_block_size)");
  lengths_[2] = -1;
  EXPECT_NE(verdict().find("cache_seqlens[1] is -1"), std::string::npos);
}

TEST_F(Contents, VisibleLens) {
  problem_.visible_lens = visible_.data();
  problem_.visible_lens_batch_stride = 2;
  problem_.visible_lens_token_stride = 1;
  visible_[3] = 66;
  EXPECT_EQ(
      verdict(),
      "visible_lens[1, 1] is 66; it must be between 0 (the value before it) and 65 (the row's "
      "cache_seqlens)");
}

TEST_F(Contents, Plans) {
  plan_[10] = 0;
  EXPECT_NE(verdict().find("tile_scheduler_metadata[0] walks blocks of row 1 that another part"),
            std::string::npos)
      << verdict();
  plan_[10] = 1;
  plan_[12] = 1;
  EXPECT_NE(verdict().find("tile_scheduler_metadata leaves out blocks 1 to 1 of row 1"),
            std::string::npos)
      << verdict();
}

TEST_F(Contents, PlanningCalls) {
  PlanProblem plan;
  plan.device = {DeviceType::kCuda, 0};
  plan.batch = 2;
  plan.cache_seqlens = lengths_.data();
  plan.cache_seqlens_stride = 2;
  lengths_[2] = -3;
  const auto host = copy_contents(plan, [](auto* to, const auto* from, std::int64_t count) {
    EXPECT_EQ(count, 3);
    std::copy_n(from, count, to);
    return Status();
  });
  ASSERT_TRUE(host.ok());
  EXPECT_NE(check_contents(host.value().problem).message().find("cache_seqlens[1] is -3"),
            std::string::npos);
}

TEST_F(Contents, AFailingCopyIsTheVerdict) {
  const auto host = copy_contents(problem_, [](auto*, const auto*, std::int64_t) {
    return Status::unsupported("the stream is being captured");
  });
  EXPECT_EQ(host.status().message(), "the stream is being captured");
}

TEST_F(Contents, NothingIsCopiedOfAnEmptyBatch) {
  problem_.batch = 0;
  problem_.num_parts = 0;
  const auto host = copy_contents(problem_, [](auto*, const auto*, std::int64_t) {
    return Status::unsupported("nothing to copy");
  });
  EXPECT_TRUE(host.ok());
}

TEST(ContentsMode, Words) {
  const auto mode = [](const char* word) {
    if (word == nullptr) {
      ::unsetenv("FLASHMLA_CHECK");
    } else {
      ::setenv("FLASHMLA_CHECK", word, 1);
    }
    return contents_are_checked();
  };
  EXPECT_FALSE(mode(nullptr).value());
  EXPECT_FALSE(mode("").value());
  EXPECT_FALSE(mode("0").value());
  EXPECT_TRUE(mode("1").value());
  EXPECT_EQ(mode("yes").status().message(), "FLASHMLA_CHECK is \"yes\"; it must be 0 or 1");
  ::unsetenv("FLASHMLA_CHECK");
}

}  // namespace
}  // namespace flashmla::testing
