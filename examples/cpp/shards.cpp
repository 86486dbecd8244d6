// A sequence whose cache lies in two shards, as with context parallelism: attention over each
// shard, then the merge, which must equal attention over the whole.
//
//     c++ -std=c++20 shards.cpp $(pkg-config --cflags --libs flashmla) && ./a.out
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>

#include <flashmla/flashmla.hpp>

namespace {

constexpr std::int64_t kTokensOfQuery = 2, kHeads = 16, kHeadDim = 576, kHeadDimV = 512;
constexpr std::int64_t kPage = 64;
constexpr std::int32_t kLength = 1000;

float value_of(std::int64_t a, std::int64_t b) {
  return std::sin(static_cast<float>(a) * 0.7f + static_cast<float>(b) * 1.3f);
}

// The cached tokens of one shard, in pages that follow one another.
struct Shard {
  std::vector<float> k_cache;
  std::vector<std::int32_t> block_table;
  std::vector<std::int32_t> length;  // one row
  // For each query token, how many tokens of this shard it sees.
  std::vector<std::int32_t> visible;

  // Tokens first, first + step, ... of the sequence.
  Shard(std::int32_t first, std::int32_t step) {
    std::int32_t tokens = 0;
    for (std::int32_t j = first; j < kLength; j += step, ++tokens) {
      for (std::int64_t c = 0; c < kHeadDim; ++c) k_cache.push_back(value_of(j, c));
    }
    length = {tokens};
    const std::int64_t pages = (tokens + kPage - 1) / kPage;
    k_cache.resize(static_cast<std::size_t>(pages * kPage * kHeadDim));
    block_table.resize(static_cast<std::size_t>(pages));
    std::iota(block_table.begin(), block_table.end(), 0);
    // Query t stands at position kLength - kTokensOfQuery + t and sees what is not after it.
    for (std::int32_t t = 0; t < kTokensOfQuery; ++t) {
      const std::int32_t position = kLength - static_cast<std::int32_t>(kTokensOfQuery) + t;
      visible.push_back(position < first ? 0 : (position - first) / step + 1);
    }
  }
};

void attend(const std::vector<float>& q, const Shard& shard, float* out, float* lse) {
  const flashmla::Plan plan = flashmla::plan(shard.length, kTokensOfQuery * kHeads, 1);
  flashmla::DecodeArguments arguments;
  arguments.q = flashmla::view(q, {1, kTokensOfQuery, kHeads, kHeadDim});
  const auto pages = static_cast<std::int64_t>(shard.block_table.size());
  arguments.k_cache = flashmla::view(shard.k_cache, {pages, kPage, 1, kHeadDim});
  arguments.block_table = flashmla::view(shard.block_table, {1, pages});
  arguments.cache_seqlens = flashmla::view(shard.length, {1});
  arguments.visible_lens = flashmla::view(shard.visible, {1, kTokensOfQuery});
  arguments.use(plan);
  arguments.out =
      flashmla::view(out, flashmla::DType::kFloat32, {1, kTokensOfQuery, kHeads, kHeadDimV});
  arguments.softmax_lse =
      flashmla::view(lse, flashmla::DType::kFloat32, {1, kHeads, kTokensOfQuery});
  arguments.head_dim_v = kHeadDimV;
  flashmla::Workspace workspace;
  flashmla::decode(arguments, workspace);
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double largest = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    largest = std::max(largest, std::fabs(static_cast<double>(a[i]) - b[i]));
  }
  return largest;
}

}  // namespace

int main() try {
  constexpr std::size_t kOut = kTokensOfQuery * kHeads * kHeadDimV;
  constexpr std::size_t kLse = kHeads * kTokensOfQuery;
  std::vector<float> q(kTokensOfQuery * kHeads * kHeadDim);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = value_of(static_cast<std::int64_t>(i), 5);

  std::vector<float> whole_out(kOut), whole_lse(kLse);
  attend(q, Shard(0, 1), whole_out.data(), whole_lse.data());

  // Tokens dealt out in turn: the even ones, the odd ones.
  std::vector<float> outs(2 * kOut), lses(2 * kLse);
  for (std::int32_t rank = 0; rank < 2; ++rank) {
    attend(q, Shard(rank, 2), outs.data() + rank * kOut, lses.data() + rank * kLse);
  }
  std::vector<float> out(kOut), lse(kLse);
  flashmla::MergeArguments merge;
  merge.outs = flashmla::view(outs, {2, 1, kTokensOfQuery, kHeads, kHeadDimV});
  merge.lses = flashmla::view(lses, {2, 1, kHeads, kTokensOfQuery});
  merge.out = flashmla::view(out, {1, kTokensOfQuery, kHeads, kHeadDimV});
  merge.lse = flashmla::view(lse, {1, kHeads, kTokensOfQuery});
  flashmla::merge(merge);

  const double out_difference = largest_difference(out, whole_out);
  const double lse_difference = largest_difference(lse, whole_lse);
  std::printf("flashmla %s on a CPU with %s\n", flashmla::version().c_str(),
              flashmla::cpu_features().c_str());
  std::printf("lse of head 0: shards %.6f and %.6f, merged %.6f, whole %.6f\n", lses[0], lses[kLse],
              lse[0], whole_lse[0]);
  std::printf("largest difference of merged from whole: out %.1e, lse %.1e\n", out_difference,
              lse_difference);
  return out_difference < 1e-5 && lse_difference < 1e-5 ? 0 : 1;
} catch (const flashmla::Error& error) {
  std::fprintf(stderr, "flashmla: %s\n", error.what());
  return 1;
}
