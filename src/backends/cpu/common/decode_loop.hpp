// The decode loop of the vector instruction sets, written once over a vocabulary (avx512/vector.hpp
// and its siblings). Everything is computed in float.
//
// A block is up to 64 tokens. For each block:
//   load        the addresses of the next block's tokens
//   scores      S[row][token] = dot(q[row], k[token])                      lanes along head_dim
//   softmax     raise the row's reference m to the largest scaled score;
//               P = 2^-kWeightShift * exp(scale * S - m)
//   accumulate  O[row] = exp(m_before - m) * O[row] + P[row] * V           lanes along head_dim_v
// where more tokens follow kChainTokens of them:
//   end_chain   what O holds joins the sum of the chains before it, and O begins at 0 again
// and after the last one:
//   finish      out = O / total, lse = m + log(2^kWeightShift * total)
// Every tile of scores and values first prefetches its share of the next block, so that requests to
// memory are spread evenly over the computation.
//
// Cached vectors of 16-bit elements are widened in registers, or, when enough rows share them to
// pay for it, once into a stage in the first-level cache: a few keys, or the panel of values of one
// tile's columns.
//
// Order of components: a vocabulary widens 2 * kLanes elements at once into two registers, in the
// order that is cheapest for the storage type (bf16: even elements, then odd ones). q, the stage
// and O are kept in that order; finish undoes it.
//
// No finite input gives an infinity or a NaN. Queries are taken times a power of two that leaves
// room for head_dim products with the largest value there is, which the scale of their scores takes
// back; a score past the largest float becomes that; and weights are small enough for the sums of
// 2^kWeightShift of the largest values. Powers of two change no bit unless something underflows.
//
// A row's arithmetic never depends on the tile or the task that it shares: each score and each
// element of O is a chain of its own, in the same order in every tile shape.
//
// Included by one source for each instruction set, compiled with that set's flags: all of it is a
// template over the vocabulary, so no two sources share a symbol.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "backends/cpu/common/exponential.hpp"
#include "backends/cpu/common/merge_loop.hpp"
#include "backends/cpu/kernel.hpp"
#include "backends/cpu/query_row.hpp"
#include "kv/scalar.hpp"
#include "problem/problem.hpp"

namespace flashmla::cpu {

// body(0), body(1), ... body(kCount - 1) with constant arguments: what they index can live in
// registers.
template <int kCount, class Body>
[[gnu::always_inline]] inline void unroll(const Body& body) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) {
    (body(std::integral_constant<int, kIndex>{}), ...);
  }
  (std::make_integer_sequence<int, kCount>{});
}

// A vocabulary V provides
//   Float, kLanes                    a register of floats
//   kScoreRows, kScoreTokens         a tile of scores
//   kValueRows, kValuePairs          a tile of values: rows, pairs of registers of columns
//   kStageRows                       rows from which widening into the stage pays
//   load, store, broadcast, add, sub, mul, fma(a, b, c) = a * b + c
//   maximum(a, b), minimum(a, b)     b where either is NaN, or NaN
//   power_of_two<kBias>(x)           2^(n + kBias - 127) for x = 1.5 * 2^23 + n, n >= -kBias; 0 for
//                                    n = -kBias
//   reduce_add, reduce_maximum
//   Pair{first, second}; load_pair<Element>(const Element*), store_pair<Element>(Element*, Pair)
//   unpack_pair<Element>(Pair, float* natural_order)
//   reduce_tile(registers, sums)     kScoreRows * kScoreTokens registers to as many floats
//   kDotsElements<Element>           whether scores are dot(sum, a, b) of load_elements
template <class V, class Element>
class DecodeLoop {
 public:
  static constexpr std::int32_t kMaxQueryRows = 128;
  static_assert(kMaxQueryRows % kMostTileRows == 0);

  static std::int32_t row_tile(const Problem&) { return 1; }

  static std::size_t scratch_bytes(const Problem& problem) {
    return Scratch(problem, nullptr).end * sizeof(float) + 2 * kBlockTokens * sizeof(Element*);
  }

  static void decode(const Problem& problem, const Task& task, std::byte* memory) {
    DecodeLoop loop(problem, task, memory);
    loop.load_queries();
    loop.load_next_block(task.token_begin);
    for (std::int32_t begin = task.token_begin; begin < task.token_end; begin += kBlockTokens) {
      const std::int32_t done = begin - task.token_begin;
      if (done > 0 && done % kChainTokens == 0) loop.end_chain();
      loop.block(begin, std::min(kBlockTokens, task.token_end - begin));
    }
    loop.finish();
  }

 private:
  using Float = typename V::Float;
  using Pair = typename V::Pair;
  static constexpr std::int32_t kLanes = V::kLanes;
  static constexpr std::int32_t kPairElements = 2 * kLanes;
  static constexpr std::int32_t kScoreRows = V::kScoreRows;
  static constexpr std::int32_t kScoreTokens = V::kScoreTokens;
  static constexpr std::int32_t kValueRows = V::kValueRows;
  static constexpr std::int32_t kValuePairs = V::kValuePairs;
  // Columns of a tile of values.
  static constexpr std::int32_t kPanel = kValuePairs * kPairElements;
  // Rows whose queries stay in the first-level cache while a block of tokens passes.
  static constexpr std::int32_t kRowsAtOnce = 8;
  // Keys that stay widened in the first-level cache, 18 KiB at head_dim 576, while all rows pass.
  static constexpr std::int32_t kStageTokens = 8;
  static constexpr bool kWidens = sizeof(Element) < sizeof(float);
  static constexpr bool kDots = V::template kDotsElements<Element>;
  // Queries are taken below 2^(1 - kQueryMargin): head_dim products with values below 2^128 then
  // sum to less than 2^127.
  static constexpr std::int32_t kQueryMargin = 12;
  // Components of a float32 dot product that are summed up before they join the others: a chain of
  // all would round more than the bound for an lse leaves room for.
  static constexpr std::int32_t kChain = 128;
  // Tokens whose values are summed up before they join the others: the sum of a long row would
  // outgrow what is added to it, and lose ever more of that.
  static constexpr std::int32_t kChainTokens = 128 * kBlockTokens;
  // Tokens of a row that may all hold the largest value, as a power of two.
  static constexpr std::int32_t kWeightShift = 24;
  static constexpr double kWeightUnits = std::int64_t{1} << kWeightShift;
  static constexpr std::int32_t kElementBytes = sizeof(Element);
  static constexpr std::int32_t kLineBytes = 64;
  // Tokens are counted in int32, past the last block too.
  static_assert(kMaxRowTokens <= std::numeric_limits<std::int32_t>::max() - kBlockTokens);
  static_assert(kBlockTokens % kStageTokens == 0 && kStageTokens % kScoreTokens == 0);
  static_assert(kChain % kPairElements == 0);

  // The areas of a task's scratch, in floats from its start; each a multiple of 16 floats long.
  struct Scratch {
    Scratch(const Problem& problem, std::byte* memory) : base(reinterpret_cast<float*>(memory)) {
      queries = take(kMaxQueryRows * problem.head_dim);
      sums = take(kMaxQueryRows * problem.head_dim_v);
      scores = take(kMaxQueryRows * kBlockTokens);
      stage = take(std::max(kStageTokens * problem.head_dim, kBlockTokens * kPanel));
      scales = take(4 * kMaxQueryRows);
      references = take(kMaxQueryRows);
      rescales = take(kMaxQueryRows);
      totals = take(2 * kMaxQueryRows);
      const std::int64_t most_tokens = std::int64_t{problem.max_pages_per_row} * problem.page_size;
      const bool may_chain = most_tokens > kChainTokens;
      chain_sums = take(may_chain ? kMaxQueryRows * problem.head_dim_v : 0);
      chain_references = take(may_chain ? kMaxQueryRows : 0);
      tokens = end;
    }
    std::size_t take(std::int32_t floats) {
      const std::size_t begin = end;
      end += static_cast<std::size_t>(floats + 15) / 16 * 16;
      return begin;
    }
    float* base;
    std::size_t end = 0;
    std::size_t queries;  // (row, head_dim)
    std::size_t sums;     // O: (row, head_dim_v)
    std::size_t scores;   // S, then P: (row, kBlockTokens)
    std::size_t stage;    // widened keys (kStageTokens, head_dim) or values (kBlockTokens, kPanel)
    std::size_t scales;   // what a row's scores are multiplied by, see RowScale: (row, 4)
    std::size_t references;        // m: (row)
    std::size_t rescales;          // exp(m_before - m) of this block: (row)
    std::size_t totals;            // sum of P so far, double: (row)
    std::size_t chain_sums;        // O of the chains that have ended: (row, head_dim_v)
    std::size_t chain_references;  // m when the last of them ended: (row)
    std::size_t tokens;            // addresses of this block's and the next block's tokens:
                                   // (2, kBlockTokens) pointers
  };

  DecodeLoop(const Problem& problem, const Task& task, std::byte* memory)
      : problem_(problem), task_(task), rows_(task.query_row_end - task.query_row_begin) {
    const Scratch scratch(problem, memory);
    queries_ = scratch.base + scratch.queries;
    sums_ = scratch.base + scratch.sums;
    scores_ = scratch.base + scratch.scores;
    stage_ = scratch.base + scratch.stage;
    scales_ = reinterpret_cast<RowScale*>(scratch.base + scratch.scales);
    references_ = scratch.base + scratch.references;
    rescales_ = scratch.base + scratch.rescales;
    totals_ = reinterpret_cast<double*>(scratch.base + scratch.totals);
    chain_sums_ = scratch.base + scratch.chain_sums;
    chain_references_ = scratch.base + scratch.chain_references;
    tokens_ = reinterpret_cast<const Element**>(scratch.base + scratch.tokens);
    next_tokens_ = tokens_ + kBlockTokens;
  }

  QueryRow query(std::int32_t row) const {
    return query_row(problem_, task_.kv_head, task_.query_row_begin + row);
  }
  float* query_vector(std::int32_t row) const { return queries_ + row * problem_.head_dim; }
  float* sum_vector(std::int32_t row) const { return sums_ + row * problem_.head_dim_v; }
  float* chain_vector(std::int32_t row) const { return chain_sums_ + row * problem_.head_dim_v; }
  float* score_vector(std::int32_t row) const { return scores_ + row * kBlockTokens; }

  void load_queries() {
    for (std::int32_t row = 0; row < rows_; ++row) {
      const Element* q = q_of<Element>(problem_, task_.row, query(row));
      float* vector = query_vector(row);
      const std::int32_t exponent = exponent_of_largest(q) + kQueryMargin;
      // Two factors: one alone may be no float, and so below.
      const Float first = V::broadcast(exp2_of(-exponent / 2));
      const Float second = V::broadcast(exp2_of(-exponent - -exponent / 2));
      for (std::int32_t c = 0; c < problem_.head_dim; c += kPairElements) {
        Pair pair = V::template load_pair<Element>(q + c);
        pair.first = V::mul(V::mul(pair.first, first), second);
        pair.second = V::mul(V::mul(pair.second, first), second);
        if constexpr (kDots) {
          // The dot product instruction takes both operands as they are stored.
          V::template store_pair<Element>(reinterpret_cast<Element*>(vector) + c, pair);
        } else {
          V::store(vector + c, pair.first);
          V::store(vector + c + kLanes, pair.second);
        }
      }
      scales_[row] = row_scale(exponent);
      for (std::int32_t c = 0; c < problem_.head_dim_v; c += kLanes) {
        V::store(sum_vector(row) + c, V::broadcast(0.0f));
      }
      references_[row] = -std::numeric_limits<float>::infinity();
      totals_[row] = 0.0;
    }
  }

  // The softmax scale times 2^exponent, which undoes what the query was taken times: a mantissa in
  // two floats, since one would round the scale, and a power of two in two factors. The mantissa is
  // below 1, so that no product with it overflows, but for what the two factors can not hold: that
  // makes every score but the smallest overflow anyway.
  struct RowScale {
    float mantissa, rest;
    float power, other_power;
  };
  static_assert(sizeof(RowScale) == 4 * sizeof(float));  // as Scratch counts them
  RowScale row_scale(std::int32_t exponent) const {
    int scale_exponent = 0;
    const double mantissa = std::frexp(problem_.softmax_scale, &scale_exponent);
    exponent += scale_exponent;
    constexpr std::int32_t kMostOfFactors = 2 * 127;
    const std::int32_t excess = std::max(0, exponent - kMostOfFactors);
    exponent -= excess;
    const double most = std::ldexp(mantissa, excess);
    const auto high = static_cast<float>(most);
    return {high, static_cast<float>(most - static_cast<double>(high)), exp2_of(exponent / 2),
            exp2_of(exponent - exponent / 2)};
  }

  // The exponent of a float, -127 for 0 and subnormal numbers, 128 for infinities and NaN.
  static std::int32_t exponent_of(float value) {
    return static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(value) >> 23 & 0xffu) - 127;
  }

  // 2^n, or the power of two nearest to it that is a normal number.
  static float exp2_of(std::int32_t n) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(std::clamp(n, -126, 127) + 127) << 23);
  }

  // The exponent of the component of a query that is largest in magnitude.
  std::int32_t exponent_of_largest(const Element* q) const {
    Float largest = V::broadcast(0.0f), least = V::broadcast(0.0f);
    for (std::int32_t c = 0; c < problem_.head_dim; c += kPairElements) {
      const Pair pair = V::template load_pair<Element>(q + c);
      largest = V::maximum(V::maximum(pair.first, pair.second), largest);
      least = V::minimum(V::minimum(pair.first, pair.second), least);
    }
    largest = V::maximum(V::sub(V::broadcast(0.0f), least), largest);
    return exponent_of(V::reduce_maximum(largest));
  }

  // Tokens [begin, begin + count) of the row. Where query tokens see different prefixes, each group
  // of rows that see the same one takes the block alone, so that no row meets what it does not see.
  void block(std::int32_t begin, std::int32_t count) {
    std::swap(tokens_, next_tokens_);
    load_next_block(begin + count);
    // Visible counts do not decrease, so equal ones are neighbours and the first row sees the
    // least.
    for (std::int32_t row = 0; row < rows_;) {
      const std::int32_t seen = visible(begin, count, row);
      std::int32_t end = seen == count ? rows_ : row + 1;
      while (end < rows_ && visible(begin, count, end) == seen) ++end;
      if (seen > 0) pass(row, end, seen);
      row = end;
    }
  }

  std::int32_t visible(std::int32_t begin, std::int32_t count, std::int32_t row) const {
    return std::clamp(problem_.visible_tokens(task_.row, query(row).token) - begin, 0, count);
  }

  // The addresses of the block that starts at `begin`; none when the task ends there.
  void load_next_block(std::int32_t begin) {
    next_count_ = std::min(kBlockTokens, task_.token_end - begin);
    prefetched_tokens_ = prefetched_bytes_ = 0;
    for (std::int32_t i = 0; i < next_count_;) {
      const Element* token = cached_token<Element>(problem_, task_.row, task_.kv_head, begin + i);
      const std::int32_t left_in_page = problem_.page_size - (begin + i) % problem_.page_size;
      const std::int32_t end = std::min(next_count_, i + left_in_page);
      for (; i < end; ++i, token += problem_.k_token_stride) next_tokens_[i] = token;
    }
    // A tile may run past the last token: it reads that token again.
    for (std::int32_t i = next_count_; i > 0 && i < kBlockTokens; ++i) {
      next_tokens_[i] = next_tokens_[next_count_ - 1];
    }
  }

  // One block for rows [row_begin, row_end), all of which see its first `count` tokens.
  void pass(std::int32_t row_begin, std::int32_t row_end, std::int32_t count) {
    pace_prefetches(row_end - row_begin, count);
    const bool staged = kWidens && row_end - row_begin >= V::kStageRows;
    scores(row_begin, row_end, count, staged);
    for (std::int32_t row = row_begin; row < row_end; ++row) softmax(row, count);
    for (std::int32_t column = 0; column < problem_.head_dim_v; column += kPanel) {
      if (staged) {
        for (std::int32_t t = 0; t < count; ++t) {
          widen(tokens_[t] + column, kPanel, stage_ + t * kPanel);
        }
        value_tiles<true>(row_begin, row_end, column, count);
      } else {
        value_tiles<false>(row_begin, row_end, column, count);
      }
    }
  }

  void pace_prefetches(std::int32_t rows, std::int32_t count) {
    const auto parts = [](std::int32_t all, std::int32_t part) { return (all + part - 1) / part; };
    const std::int32_t tiles = parts(rows, kScoreRows) * parts(count, kScoreTokens) +
                               parts(rows, kValueRows) * (problem_.head_dim_v / kPanel);
    const std::int32_t lines = next_count_ * parts(problem_.head_dim * kElementBytes, kLineBytes);
    lines_per_tile_ = parts(lines, tiles);
  }

  void prefetch() {
    for (std::int32_t i = 0; i < lines_per_tile_ && prefetched_tokens_ < next_count_; ++i) {
      const char* token = reinterpret_cast<const char*>(next_tokens_[prefetched_tokens_]);
      __builtin_prefetch(token + prefetched_bytes_, 0, 2);
      prefetched_bytes_ += kLineBytes;
      if (prefetched_bytes_ >= problem_.head_dim * kElementBytes) {
        prefetched_bytes_ = 0;
        ++prefetched_tokens_;
      }
    }
  }

  // `count` elements, a multiple of kPairElements.
  static void widen(const Element* from, std::int32_t count, float* to) {
    for (std::int32_t c = 0; c < count; c += kPairElements) {
      const Pair pair = V::template load_pair<Element>(from + c);
      V::store(to + c, pair.first);
      V::store(to + c + kLanes, pair.second);
    }
  }

  // A pair of vectors of what stands in the cache, or of what widen() made of it.
  template <class T>
  static Pair load_widened(const T* address) {
    if constexpr (std::is_same_v<T, float>) {
      return {V::load(address), V::load(address + kLanes)};
    } else {
      return V::template load_pair<T>(address);
    }
  }

  void scores(std::int32_t row_begin, std::int32_t row_end, std::int32_t count, bool staged) {
    if constexpr (kWidens && !kDots) {
      if (staged) return staged_scores(row_begin, row_end, count);
    }
    for (std::int32_t row = row_begin; row < row_end; row += kRowsAtOnce) {
      const std::int32_t end = std::min(row_end, row + kRowsAtOnce);
      for (std::int32_t token = 0; token < count; token += kScoreTokens) {
        score_tiles(row, end, token, tokens_ + token);
      }
    }
  }

  void staged_scores(std::int32_t row_begin, std::int32_t row_end, std::int32_t count) {
    const float* keys[kStageTokens];
    for (std::int32_t t = 0; t < kStageTokens; ++t) keys[t] = stage_ + t * problem_.head_dim;
    for (std::int32_t begin = 0; begin < count; begin += kStageTokens) {
      for (std::int32_t t = 0; t < kStageTokens; ++t) {
        widen(tokens_[begin + t], problem_.head_dim, stage_ + t * problem_.head_dim);
      }
      const std::int32_t end = std::min(kStageTokens, count - begin);
      for (std::int32_t row = row_begin; row < row_end; row += kScoreRows) {
        for (std::int32_t t = 0; t < end; t += kScoreTokens) {
          score_tiles(row, std::min(row_end, row + kScoreRows), begin + t, keys + t);
        }
      }
    }
  }

  template <class Key>
  void score_tiles(std::int32_t row_begin, std::int32_t row_end, std::int32_t token,
                   const Key* const* keys) {
    std::int32_t row = row_begin;
    for (; row + 1 < row_end; row += kScoreRows) score_tile<kScoreRows>(row, row_end, token, keys);
    if (row < row_end) score_tile<1>(row, row_end, token, keys);
  }

  // S of kRows rows and kScoreTokens tokens. Rows past the end repeat the last one.
  template <std::int32_t kRows, class Key>
  void score_tile(std::int32_t row, std::int32_t row_end, std::int32_t token,
                  const Key* const* keys) {
    prefetch();
    const float* q[kRows];
    unroll<kRows>([&](auto r) { q[r] = query_vector(std::min(row + r, row_end - 1)); });
    const Key* k[kScoreTokens];
    unroll<kScoreTokens>([&](auto t) { k[t] = keys[t]; });
    Float sums[kScoreRows * kScoreTokens];
    unroll<kScoreRows * kScoreTokens>([&](auto i) { sums[i] = V::broadcast(0.0f); });
    if constexpr (kWidens) {
      add_products<kRows>(q, k, 0, problem_.head_dim, sums);
    } else {
      for (std::int32_t begin = 0; begin < problem_.head_dim; begin += kChain) {
        Float chain[kScoreRows * kScoreTokens];
        unroll<kRows * kScoreTokens>([&](auto i) { chain[i] = V::broadcast(0.0f); });
        add_products<kRows>(q, k, begin, std::min(problem_.head_dim, begin + kChain), chain);
        unroll<kRows * kScoreTokens>([&](auto i) { sums[i] = V::add(sums[i], chain[i]); });
      }
    }
    alignas(64) float dots[kScoreRows * kScoreTokens];
    V::reduce_tile(sums, dots);
    unroll<kRows>([&](auto r) {
      if (row + r < row_end) {
        float* scores = score_vector(row + r) + token;
        unroll<kScoreTokens>([&](auto t) { scores[t] = dots[r * kScoreTokens + t]; });
      }
    });
  }

  // Adds the products of components [begin, end) to the sums of a tile.
  template <std::int32_t kRows, class Key>
  [[gnu::always_inline]] static void add_products(const float* const (&q)[kRows],
                                                  const Key* const (&k)[kScoreTokens],
                                                  std::int32_t begin, std::int32_t end,
                                                  Float (&sums)[kScoreRows * kScoreTokens]) {
    for (std::int32_t c = begin; c < end; c += kPairElements) {
      if constexpr (kDots) {
        decltype(V::load_elements(k[0])) key[kScoreTokens];
        unroll<kScoreTokens>([&](auto t) { key[t] = V::load_elements(k[t] + c); });
        unroll<kRows>([&](auto r) {
          const auto query = V::load_elements(reinterpret_cast<const Element*>(q[r]) + c);
          unroll<kScoreTokens>([&](auto t) {
            Float& sum = sums[r * kScoreTokens + t];
            sum = V::dot(sum, query, key[t]);
          });
        });
      } else {
        Pair key[kScoreTokens];
        unroll<kScoreTokens>([&](auto t) { key[t] = load_widened(k[t] + c); });
        unroll<kRows>([&](auto r) {
          const Float first = V::load(q[r] + c), second = V::load(q[r] + c + kLanes);
          unroll<kScoreTokens>([&](auto t) {
            Float& sum = sums[r * kScoreTokens + t];
            sum = V::fma(first, key[t].first, sum);
          });
          unroll<kScoreTokens>([&](auto t) {
            Float& sum = sums[r * kScoreTokens + t];
            sum = V::fma(second, key[t].second, sum);
          });
        });
      }
    }
  }

  // The nearest number for an infinity; NaN stays NaN.
  static Float bounded(Float x) {
    constexpr float kLargest = std::numeric_limits<float>::max();
    return V::maximum(V::broadcast(-kLargest), V::minimum(V::broadcast(kLargest), x));
  }

  // S to P for the first `count` tokens of a row, whose weights join its total. Tokens past them
  // have no weight that is used.
  void softmax(std::int32_t row, std::int32_t count) {
    float* scores = score_vector(row);
    const std::int32_t end = (count + kLanes - 1) / kLanes * kLanes;
    const RowScale& scale = scales_[row];
    const Float mantissa = V::broadcast(scale.mantissa), rest = V::broadcast(scale.rest);
    const Float power = V::broadcast(scale.power), other_power = V::broadcast(scale.other_power);
    for (std::int32_t t = 0; t < end; t += kLanes) {
      const Float dot = V::load(scores + t);
      // Infinities are bounded where they would meet others of their own.
      Float score = V::fma(dot, mantissa, V::mul(bounded(dot), rest));
      score = V::mul(V::mul(score, power), other_power);
      V::store(scores + t, bounded(score));
    }
    for (std::int32_t t = count; t < end; ++t) {
      scores[t] = -std::numeric_limits<float>::infinity();
    }
    Float largest = V::broadcast(references_[row]);
    for (std::int32_t t = 0; t < end; t += kLanes) {
      largest = V::maximum(largest, V::load(scores + t));
    }
    const float reference = V::reduce_maximum(largest);
    Float total = V::broadcast(0.0f);
    for (std::int32_t t = 0; t < end; t += kLanes) {
      const Float p =
          exponential<V, kWeightShift>(V::sub(V::load(scores + t), V::broadcast(reference)));
      V::store(scores + t, p);
      total = V::add(total, p);
    }
    alignas(64) float rescale[kLanes];
    V::store(rescale,
             exponential<V>(V::sub(V::broadcast(references_[row]), V::broadcast(reference))));
    rescales_[row] = rescale[0];
    references_[row] = reference;
    // In double: a long row adds thousands of blocks.
    totals_[row] =
        totals_[row] * static_cast<double>(rescale[0]) + static_cast<double>(V::reduce_add(total));
  }

  template <bool kStaged>
  void value_tiles(std::int32_t row_begin, std::int32_t row_end, std::int32_t column,
                   std::int32_t count) {
    std::int32_t row = row_begin;
    for (; row + 1 < row_end; row += kValueRows) {
      value_tile<kValueRows, kStaged>(row, row_end, column, count);
    }
    if (row < row_end) value_tile<1, kStaged>(row, row_end, column, count);
  }

  // O of kRows rows and kValuePairs pairs of columns. Rows past the end repeat the last one and are
  // not stored.
  template <std::int32_t kRows, bool kStaged>
  void value_tile(std::int32_t row, std::int32_t row_end, std::int32_t column, std::int32_t count) {
    prefetch();
    const float* p[kRows];
    unroll<kRows>([&](auto r) { p[r] = score_vector(std::min(row + r, row_end - 1)); });
    Pair sums[kRows * kValuePairs];
    unroll<kRows * kValuePairs>([&](auto i) {
      sums[i] = {V::broadcast(0.0f), V::broadcast(0.0f)};
    });
    for (std::int32_t t = 0; t < count; ++t) {
      Pair value[kValuePairs];
      unroll<kValuePairs>([&](auto i) {
        if constexpr (kStaged) {
          value[i] = load_widened(stage_ + t * kPanel + i * kPairElements);
        } else {
          value[i] = load_widened(tokens_[t] + column + i * kPairElements);
        }
      });
      unroll<kRows>([&](auto r) {
        const Float weight = V::broadcast(p[r][t]);
        unroll<kValuePairs>([&](auto i) {
          Pair& sum = sums[r * kValuePairs + i];
          sum.first = V::fma(weight, value[i].first, sum.first);
          sum.second = V::fma(weight, value[i].second, sum.second);
        });
      });
    }
    unroll<kRows>([&](auto r) {
      if (row + r < row_end) {
        float* before = sum_vector(row + r) + column;
        const Float rescale = V::broadcast(rescales_[row + r]);
        unroll<kValuePairs>([&](auto i) {
          float* pair = before + i * kPairElements;
          const Pair& sum = sums[r * kValuePairs + i];
          V::store(pair, V::fma(V::load(pair), rescale, sum.first));
          V::store(pair + kLanes, V::fma(V::load(pair + kLanes), rescale, sum.second));
        });
      }
    });
  }

  void end_chain() {
    for (std::int32_t row = 0; row < rows_; ++row) {
      alignas(64) float lanes[kLanes];
      const float reference = references_[row];
      if (!has_chains_) {
        lanes[0] = 0.0f;
      } else if (chain_references_[row] == reference) {
        lanes[0] = 1.0f;  // also of a row that has seen nothing, whose references are infinite
      } else {
        V::store(lanes, exponential<V>(
                            V::sub(V::broadcast(chain_references_[row]), V::broadcast(reference))));
      }
      const Float rescale = V::broadcast(lanes[0]);
      float* chains = chain_vector(row);
      float* sums = sum_vector(row);
      for (std::int32_t c = 0; c < problem_.head_dim_v; c += kLanes) {
        // What was never written is not read: it may be no number.
        const Float before = has_chains_ ? V::load(chains + c) : V::broadcast(0.0f);
        V::store(chains + c, V::fma(before, rescale, V::load(sums + c)));
        V::store(sums + c, V::broadcast(0.0f));
      }
      chain_references_[row] = reference;
    }
    has_chains_ = true;
  }

  // sum * inverse, which rounding must not carry past the largest float where the sum is finite.
  static Float mean(Float sum, Float inverse) {
    const Float quotient = V::mul(sum, inverse);
    // 16-bit elements round what lies this little past their largest number to that.
    if constexpr (kWidens) return quotient;
    constexpr float kLargest = std::numeric_limits<float>::max();
    const Float bounded = V::minimum(V::maximum(V::broadcast(kLargest), sum), quotient);
    return V::maximum(V::minimum(V::broadcast(-kLargest), sum), bounded);
  }

  void finish() {
    if (has_chains_) end_chain();
    for (std::int32_t row = 0; row < rows_; ++row) {
      const double total = totals_[row];
      // A row that saw a token has a total of at least its largest term, 2^-kWeightShift, or NaN.
      const bool empty = total == 0.0;
      const float lse = empty ? std::numeric_limits<float>::infinity()
                              : static_cast<float>(static_cast<double>(references_[row]) +
                                                   std::log(total * kWeightUnits));
      const Float inverse = V::broadcast(empty ? 0.0f : static_cast<float>(1.0 / total));
      const float* sums = has_chains_ ? chain_vector(row) : sum_vector(row);
      const QueryRow where = query(row);
      const auto for_each_pair = [&](const auto& write) {
        for (std::int32_t c = 0; c < problem_.head_dim_v; c += kPairElements) {
          write(c,
                Pair{mean(V::load(sums + c), inverse), mean(V::load(sums + c + kLanes), inverse)});
        }
      };
      if (task_.partial_out != nullptr) {
        float* out = task_.partial_out + std::int64_t{row} * problem_.head_dim_v;
        for_each_pair(
            [&](std::int32_t c, Pair pair) { V::template unpack_pair<Element>(pair, out + c); });
        task_.partial_lse[row] = lse;
      } else {
        Element* out = out_of<Element>(problem_, task_.row, where);
        for_each_pair(
            [&](std::int32_t c, Pair pair) { V::template store_pair<Element>(out + c, pair); });
        lse_of(problem_, task_.row, where) = lse;
      }
    }
  }

  const Problem& problem_;
  const Task& task_;
  std::int32_t rows_;
  std::int32_t next_count_ = 0;         // tokens in the next block
  std::int32_t prefetched_tokens_ = 0;  // how far into it prefetch() has come:
  std::int32_t prefetched_bytes_ = 0;   // whole tokens, and bytes of the one after them
  std::int32_t lines_per_tile_ = 0;
  bool has_chains_ = false;
  float* queries_;
  float* sums_;
  float* scores_;
  float* stage_;
  RowScale* scales_;
  float* references_;
  float* rescales_;
  double* totals_;
  float* chain_sums_;
  float* chain_references_;
  const Element** tokens_;
  const Element** next_tokens_;
};

template <class V, class Element>
constexpr DecodeKernel decode_loop_kernel() {
  using Loop = DecodeLoop<V, Element>;
  return {Loop::kMaxQueryRows, Loop::row_tile, Loop::scratch_bytes, Loop::decode,
          merge_partials<V, Element>};
}

}  // namespace flashmla::cpu
