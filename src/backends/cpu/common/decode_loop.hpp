// The decode loop of the vector instruction sets, written once over a vocabulary (avx512/vector.hpp
// and its siblings). Everything is in float; cached vectors are read in place and widened in
// registers.
//
// A block is up to 64 tokens. For each block:
//   load        the addresses of its tokens
//   scores      S[row][token] = softmax_scale * dot(q[row], k[token])      lanes along head_dim
//   softmax     raise the row's reference m to the largest score; P = exp(S - m)
//   accumulate  O[row] = exp(m_before - m) * O[row] + P[row] * V           lanes along head_dim_v
// and after the last one:
//   finish      out = O / sum, lse = m + log(sum)
//
// Order of components: a vocabulary widens 2 * kLanes elements at once into two registers, in the
// order that is cheapest for the storage type (bf16: even elements, then odd ones). q and O are
// kept in that order; finish undoes it.
//
// A row's arithmetic never depends on the tile or the task that it shares: each score and each
// element of O is a chain of its own, in the same order in every tile shape.
//
// Included by one source for each instruction set, compiled with that set's flags: all of it is a
// template over the vocabulary, so no two sources share a symbol.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "backends/cpu/kernel.hpp"
#include "backends/cpu/query_row.hpp"
#include "kv/scalar.hpp"
#include "problem/problem.hpp"

namespace flashmla::cpu {

// A vocabulary V provides
//   Float, kLanes                    a register of floats
//   kScoreTokens                     tokens in a tile of scores (times kTileRows rows)
//   kValuePairs                      pairs of registers of columns in a tile of values
//   load, store, broadcast, add, sub, mul, fma(a, b, c) = a * b + c
//   maximum(a, b)                    b where either is NaN
//   power_of_two(x)                  2^n for x = 1.5 * 2^23 + n
//   reduce_add, reduce_maximum
//   Pair{first, second}; load_pair<Element>(const Element*), store_pair<Element>(Element*, Pair)
//   unpack_pair<Element>(Pair, float* natural_order)
//   reduce_tile(accumulators, sums)  kTileRows x kScoreTokens registers to as many floats
template <class V, class Element>
class DecodeLoop {
 public:
  static constexpr std::int32_t kMaxQueryRows = 64;

  static std::size_t scratch_bytes(const Problem& problem) {
    return Scratch(problem, nullptr).end * sizeof(float) + kBlockTokens * sizeof(const Element*);
  }

  static void decode(const Problem& problem, const Task& task, std::byte* memory) {
    DecodeLoop loop(problem, task, memory);
    loop.load_queries();
    for (std::int32_t begin = task.token_begin; begin < task.token_end; begin += kBlockTokens) {
      loop.block(begin, std::min(kBlockTokens, task.token_end - begin));
    }
    loop.finish();
  }

 private:
  using Float = typename V::Float;
  using Pair = typename V::Pair;
  static constexpr std::int32_t kLanes = V::kLanes;
  static constexpr std::int32_t kPairElements = 2 * kLanes;
  static constexpr std::int32_t kTileRows = 4;
  static constexpr std::int32_t kScoreTokens = V::kScoreTokens;
  static constexpr std::int32_t kValuePairs = V::kValuePairs;
  // Rows whose queries stay in the first-level cache while a block of tokens passes.
  static constexpr std::int32_t kRowsAtOnce = 8;

  // The areas of a task's scratch, in floats from its start; each a multiple of 16 floats long.
  struct Scratch {
    Scratch(const Problem& problem, std::byte* memory) : base(reinterpret_cast<float*>(memory)) {
      queries = take(kMaxQueryRows * problem.head_dim);
      sums = take(kMaxQueryRows * problem.head_dim_v);
      scores = take(kMaxQueryRows * kBlockTokens);
      lane_totals = take(kMaxQueryRows * kLanes);
      references = take(kMaxQueryRows);
      rescales = take(kMaxQueryRows);
      tokens = end;
    }
    std::size_t take(std::int32_t floats) {
      const std::size_t begin = end;
      end += static_cast<std::size_t>(floats + 15) / 16 * 16;
      return begin;
    }
    float* base;
    std::size_t end = 0;
    std::size_t queries;      // (row, head_dim)
    std::size_t sums;         // O: (row, head_dim_v)
    std::size_t scores;       // S, then P: (row, kBlockTokens)
    std::size_t lane_totals;  // sum of P, a partial sum a lane: (row, kLanes)
    std::size_t references;   // m: (row)
    std::size_t rescales;     // exp(m_before - m) of this block: (row)
    std::size_t tokens;       // addresses of the block's tokens: (kBlockTokens) pointers
  };

  DecodeLoop(const Problem& problem, const Task& task, std::byte* memory)
      : problem_(problem), task_(task), rows_(task.query_row_end - task.query_row_begin) {
    const Scratch scratch(problem, memory);
    queries_ = scratch.base + scratch.queries;
    sums_ = scratch.base + scratch.sums;
    scores_ = scratch.base + scratch.scores;
    lane_totals_ = scratch.base + scratch.lane_totals;
    references_ = scratch.base + scratch.references;
    rescales_ = scratch.base + scratch.rescales;
    tokens_ = reinterpret_cast<const Element**>(scratch.base + scratch.tokens);
  }

  QueryRow query(std::int32_t row) const {
    return query_row(problem_, task_.kv_head, task_.query_row_begin + row);
  }
  float* query_vector(std::int32_t row) const { return queries_ + row * problem_.head_dim; }
  float* sum_vector(std::int32_t row) const { return sums_ + row * problem_.head_dim_v; }
  float* score_vector(std::int32_t row) const { return scores_ + row * kBlockTokens; }
  float* lane_total(std::int32_t row) const { return lane_totals_ + row * kLanes; }

  void load_queries() {
    for (std::int32_t row = 0; row < rows_; ++row) {
      const Element* q = q_of<Element>(problem_, task_.row, query(row));
      float* vector = query_vector(row);
      if constexpr (V::template kDotsElements<Element>) {
        // The dot product instruction takes both operands as they are stored.
        Element* copy = reinterpret_cast<Element*>(vector);
        for (std::int32_t c = 0; c < problem_.head_dim; ++c) copy[c] = q[c];
      } else {
        for (std::int32_t c = 0; c < problem_.head_dim; c += kPairElements) {
          const Pair pair = V::template load_pair<Element>(q + c);
          V::store(vector + c, pair.first);
          V::store(vector + c + kLanes, pair.second);
        }
      }
      for (std::int32_t c = 0; c < problem_.head_dim_v; c += kLanes) {
        V::store(sum_vector(row) + c, V::broadcast(0.0f));
      }
      V::store(lane_total(row), V::broadcast(0.0f));
      references_[row] = -std::numeric_limits<float>::infinity();
    }
  }

  // Tokens [begin, begin + count) of the row. Where query tokens see different prefixes, each group
  // of rows with one query token takes the block alone, so that no row meets what it does not see.
  void block(std::int32_t begin, std::int32_t count) {
    load_tokens(begin, count);
    if (visible(begin, count, 0) == count) {
      // Visible counts do not decrease, so the first row sees the least.
      pass(0, rows_, count);
      return;
    }
    for (std::int32_t row = 0; row < rows_;) {
      const std::int32_t token = query(row).token;
      std::int32_t end = row + 1;
      while (end < rows_ && query(end).token == token) ++end;
      if (const std::int32_t seen = visible(begin, count, row); seen > 0) pass(row, end, seen);
      row = end;
    }
  }

  std::int32_t visible(std::int32_t begin, std::int32_t count, std::int32_t row) const {
    return std::clamp(problem_.visible_tokens(task_.row, query(row).token) - begin, 0, count);
  }

  void load_tokens(std::int32_t begin, std::int32_t count) {
    for (std::int32_t i = 0; i < count;) {
      const Element* token = cached_token<Element>(problem_, task_.row, task_.kv_head, begin + i);
      const std::int32_t left_in_page = problem_.page_size - (begin + i) % problem_.page_size;
      const std::int32_t end = std::min(count, i + left_in_page);
      for (; i < end; ++i, token += problem_.k_token_stride) tokens_[i] = token;
    }
    // A tile of scores may run past the last token: it reads that token again.
    for (std::int32_t i = count; i < kBlockTokens; ++i) tokens_[i] = tokens_[count - 1];
    next_begin_ = begin + count;
  }

  // One block for rows [row_begin, row_end), all of which see its first `count` tokens.
  void pass(std::int32_t row_begin, std::int32_t row_end, std::int32_t count) {
    for (std::int32_t row = row_begin; row < row_end; row += kRowsAtOnce) {
      const std::int32_t end = std::min(row_end, row + kRowsAtOnce);
      for (std::int32_t token = 0; token < count; token += kScoreTokens) {
        if (row == row_begin) prefetch(token);
        score_tiles(row, end, token);
      }
    }
    for (std::int32_t row = row_begin; row < row_end; ++row) softmax(row, count);
    for (std::int32_t column = 0; column < problem_.head_dim_v;
         column += kValuePairs * kPairElements) {
      value_tiles(row_begin, row_end, column, count);
    }
  }

  // The tokens of the next block that stand where this block's tile stands.
  void prefetch(std::int32_t token) const {
    constexpr std::int32_t kLineBytes = 64;
    const std::int32_t end = std::min(next_begin_ + token + kScoreTokens, task_.token_end);
    for (std::int32_t next = next_begin_ + token; next < end; ++next) {
      const char* address = reinterpret_cast<const char*>(
          cached_token<Element>(problem_, task_.row, task_.kv_head, next));
      const std::int32_t bytes = problem_.head_dim * static_cast<std::int32_t>(sizeof(Element));
      for (std::int32_t offset = 0; offset < bytes; offset += kLineBytes) {
        __builtin_prefetch(address + offset, 0, 2);
      }
    }
  }

  void score_tiles(std::int32_t row_begin, std::int32_t row_end, std::int32_t token) {
    std::int32_t row = row_begin;
    for (; row + 1 < row_end; row += kTileRows) score_tile<kTileRows>(row, row_end, token);
    if (row < row_end) score_tile<1>(row, row_end, token);
  }

  // S of kRows rows and kScoreTokens tokens. Rows past the end repeat the last one.
  template <std::int32_t kRows>
  void score_tile(std::int32_t row, std::int32_t row_end, std::int32_t token) {
    const float* q[kRows];
    for (std::int32_t r = 0; r < kRows; ++r) q[r] = query_vector(std::min(row + r, row_end - 1));
    const Element* const* k = tokens_ + token;
    Float accumulators[kTileRows * kScoreTokens];
    for (Float& accumulator : accumulators) accumulator = V::broadcast(0.0f);
    for (std::int32_t c = 0; c < problem_.head_dim; c += kPairElements) {
      if constexpr (V::template kDotsElements<Element>) {
        for (std::int32_t t = 0; t < kScoreTokens; ++t) {
          const auto key = V::load_elements(k[t] + c);
          for (std::int32_t r = 0; r < kRows; ++r) {
            Float& sum = accumulators[r * kScoreTokens + t];
            sum = V::dot(sum, V::load_elements(reinterpret_cast<const Element*>(q[r]) + c), key);
          }
        }
      } else {
        for (std::int32_t t = 0; t < kScoreTokens; ++t) {
          const Pair key = V::template load_pair<Element>(k[t] + c);
          for (std::int32_t r = 0; r < kRows; ++r) {
            Float& sum = accumulators[r * kScoreTokens + t];
            sum = V::fma(V::load(q[r] + c), key.first, sum);
            sum = V::fma(V::load(q[r] + c + kLanes), key.second, sum);
          }
        }
      }
    }
    alignas(64) float dots[kTileRows * kScoreTokens];
    V::reduce_tile(accumulators, dots);
    for (std::int32_t r = 0; r < kRows && row + r < row_end; ++r) {
      for (std::int32_t t = 0; t < kScoreTokens; ++t) {
        score_vector(row + r)[token + t] = dots[r * kScoreTokens + t] * problem_.softmax_scale;
      }
    }
  }

  // exp(x) for x <= 0 to about an ulp; what would be below 2^-126 becomes exp(-87).
  static Float exponential(Float x) {
    constexpr float kLog2E = 1.44269504f;
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    constexpr float kLn2High = 0.693145752f, kLn2Low = 1.42860677e-6f;
    x = V::maximum(V::broadcast(-87.0f), x);  // keeps NaN
    const Float rounded = V::fma(x, V::broadcast(kLog2E), V::broadcast(kRound));
    const Float n = V::sub(rounded, V::broadcast(kRound));
    Float r = V::fma(n, V::broadcast(-kLn2High), x);
    r = V::fma(n, V::broadcast(-kLn2Low), r);
    // exp(r) on [-ln2/2, ln2/2]: Taylor terms to r^7, remainder below 2^-27.
    Float p = V::broadcast(1.0f / 5040.0f);
    p = V::fma(p, r, V::broadcast(1.0f / 720.0f));
    p = V::fma(p, r, V::broadcast(1.0f / 120.0f));
    p = V::fma(p, r, V::broadcast(1.0f / 24.0f));
    p = V::fma(p, r, V::broadcast(1.0f / 6.0f));
    p = V::fma(p, r, V::broadcast(0.5f));
    p = V::fma(p, r, V::broadcast(1.0f));
    p = V::fma(p, r, V::broadcast(1.0f));
    return V::mul(p, V::power_of_two(rounded));
  }

  // S to P for the first `count` tokens of a row; the tokens past them get a weight that is not
  // used.
  void softmax(std::int32_t row, std::int32_t count) {
    float* scores = score_vector(row);
    const std::int32_t end = (count + kLanes - 1) / kLanes * kLanes;
    for (std::int32_t t = count; t < end; ++t) {
      scores[t] = -std::numeric_limits<float>::infinity();
    }
    Float largest = V::broadcast(references_[row]);
    for (std::int32_t t = 0; t < end; t += kLanes) {
      largest = V::maximum(largest, V::load(scores + t));
    }
    const float reference = V::reduce_maximum(largest);
    const Float rescale =
        exponential(V::sub(V::broadcast(references_[row]), V::broadcast(reference)));
    Float total = V::mul(V::load(lane_total(row)), rescale);
    for (std::int32_t t = 0; t < end; t += kLanes) {
      const Float p = exponential(V::sub(V::load(scores + t), V::broadcast(reference)));
      V::store(scores + t, p);
      total = V::add(total, p);
    }
    V::store(lane_total(row), total);
    alignas(64) float lanes[kLanes];
    V::store(lanes, rescale);
    rescales_[row] = lanes[0];
    references_[row] = reference;
  }

  void value_tiles(std::int32_t row_begin, std::int32_t row_end, std::int32_t column,
                   std::int32_t count) {
    std::int32_t row = row_begin;
    for (; row + 1 < row_end; row += kTileRows) {
      value_tile<kTileRows>(row, row_end, column, count);
    }
    if (row < row_end) value_tile<1>(row, row_end, column, count);
  }

  // O of kRows rows and kValuePairs pairs of columns. Rows past the end repeat the last one and are
  // not stored.
  template <std::int32_t kRows>
  void value_tile(std::int32_t row, std::int32_t row_end, std::int32_t column, std::int32_t count) {
    const float* p[kRows];
    for (std::int32_t r = 0; r < kRows; ++r) p[r] = score_vector(std::min(row + r, row_end - 1));
    Pair accumulators[kRows][kValuePairs];
    for (auto& of_row : accumulators) {
      for (Pair& pair : of_row) pair = {V::broadcast(0.0f), V::broadcast(0.0f)};
    }
    for (std::int32_t t = 0; t < count; ++t) {
      Pair value[kValuePairs];
      for (std::int32_t i = 0; i < kValuePairs; ++i) {
        value[i] = V::template load_pair<Element>(tokens_[t] + column + i * kPairElements);
      }
      for (std::int32_t r = 0; r < kRows; ++r) {
        const Float weight = V::broadcast(p[r][t]);
        for (std::int32_t i = 0; i < kValuePairs; ++i) {
          Pair& sum = accumulators[r][i];
          sum.first = V::fma(weight, value[i].first, sum.first);
          sum.second = V::fma(weight, value[i].second, sum.second);
        }
      }
    }
    for (std::int32_t r = 0; r < kRows && row + r < row_end; ++r) {
      float* sums = sum_vector(row + r) + column;
      const Float rescale = V::broadcast(rescales_[row + r]);
      for (std::int32_t i = 0; i < kValuePairs; ++i) {
        float* pair = sums + i * kPairElements;
        V::store(pair, V::fma(V::load(pair), rescale, accumulators[r][i].first));
        V::store(pair + kLanes, V::fma(V::load(pair + kLanes), rescale, accumulators[r][i].second));
      }
    }
  }

  void finish() {
    for (std::int32_t row = 0; row < rows_; ++row) {
      const float total = V::reduce_add(V::load(lane_total(row)));
      // A row that saw a token has a total of at least 1, its largest term, or NaN.
      const bool empty = total == 0.0f;
      const float lse = empty ? std::numeric_limits<float>::infinity()
                              : static_cast<float>(static_cast<double>(references_[row]) +
                                                   std::log(static_cast<double>(total)));
      const Float inverse = V::broadcast(empty ? 0.0f : 1.0f / total);
      const float* sums = sum_vector(row);
      const QueryRow where = query(row);
      const auto for_each_pair = [&](const auto& write) {
        for (std::int32_t c = 0; c < problem_.head_dim_v; c += kPairElements) {
          write(c, Pair{V::mul(V::load(sums + c), inverse),
                        V::mul(V::load(sums + c + kLanes), inverse)});
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
  std::int32_t next_begin_ = 0;
  float* queries_;
  float* sums_;
  float* scores_;
  float* lane_totals_;
  float* references_;
  float* rescales_;
  const Element** tokens_;
};

template <class V, class Element>
constexpr DecodeKernel decode_loop_kernel() {
  using Loop = DecodeLoop<V, Element>;
  return {Loop::kMaxQueryRows, Loop::scratch_bytes, Loop::decode};
}

}  // namespace flashmla::cpu
