// The calls that cuda_check holds to float64.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cuda/support.cuh"

namespace flashmla::cuda_test {

inline std::vector<std::int32_t> random_lengths(int count, std::int32_t most, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> lengths(count);
  for (std::int32_t& length : lengths) length = 1 + static_cast<std::int32_t>(random() % most);
  return lengths;
}

inline std::string type_name(DType dtype) {
  return dtype == DType::kFloat32 ? "fp32" : dtype == DType::kBFloat16 ? "bf16" : "fp16";
}

inline std::string name_of(const Case& spec) {
  std::string name = spec.label.empty() ? "" : spec.label + ": ";
  name += type_name(spec.dtype) + " d" + std::to_string(spec.head_dim) + " b" +
          std::to_string(spec.lengths.size()) + "/" + std::to_string(element_count(spec.lengths)) +
          " s" + std::to_string(spec.seq_len_q) + " h" + std::to_string(spec.num_heads_q) + "/" +
          std::to_string(spec.num_heads_k) + " page" + std::to_string(spec.page_size) + " " +
          spec.plan;
  if (spec.num_parts > 0) name += " parts" + std::to_string(spec.num_parts);
  if (spec.causal) name += " causal";
  if (spec.visible_lens) name += " visible";
  if (spec.gap > 0) name += " gap" + std::to_string(spec.gap);
  if (spec.out_gap > 0) name += " out-gap" + std::to_string(spec.out_gap);
  if (spec.out_shift > 0) name += " out-shift" + std::to_string(spec.out_shift);
  if (spec.permuted) name += " permuted";
  if (spec.spread) name += " spread";
  if (spec.expanded) name += " expanded";
  if (spec.loose) name += " loose";
  if (spec.no_pages) name += " no-pages";
  if (spec.tight) name += " tight";
  if (spec.q_scale != 1.0f) name += " q*" + std::to_string(static_cast<int>(spec.q_scale));
  if (spec.softmax_scale < 0.0f) name += " negative-scale";
  if (spec.apart) name += " apart";
  if (spec.largest) name += " largest";
  if (spec.large != Large::kNothing) {
    constexpr const char* kNames[] = {"", "queries", "keys", "both", "some-tokens", "values"};
    name += std::string(" large-") + kNames[static_cast<int>(spec.large)];
  }
  if (!spec.kernel.empty()) name += " " + spec.kernel;
  return name;
}

inline std::int32_t multiprocessors() {
  int count = 0;
  FLASHMLA_CUDA_REQUIRE(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  return count;
}

using Cases = std::vector<Case>;

inline void add(Cases& list, Case spec) {
  spec.name = name_of(spec);
  list.push_back(std::move(spec));
}

// Both element types, each with the head_dim that the other has not.
inline constexpr struct {
  DType dtype;
  std::int32_t head_dim;
} kTypes[] = {{DType::kBFloat16, 576}, {DType::kFloat16, 512}};

// Lengths around the edges of blocks.
inline const std::vector<std::int32_t> kMixed = {1, 63, 64, 65, 0, 700, 128, 1500, 2};

// Head counts, and the query rows of a key/value head that they make.
struct Heads {
  std::int32_t q, kv, tokens;
};

// How out lies in memory.
struct OutLayout {
  bool permuted;
  std::int32_t gap, shift;
};

// Few and short, for the tools that watch every access.
inline void add_small(Cases& list) {
  for (const int heads : {16, 32, 128}) {
    Case c;
    c.lengths = {65, 0, 200};
    c.num_heads_q = heads;
    c.num_parts = 3;
    add(list, c);
    c.page_size = 16;
    c.causal = true;
    c.seq_len_q = 2;
    c.head_dim = 512;
    c.dtype = DType::kFloat16;
    add(list, c);
    c.plan = "stale";
    add(list, c);
  }
  for (const int page : {16, 64}) {
    Case c;  // the table ends with the page that holds the last token
    c.lengths = {page + 1};
    c.page_size = page;
    c.num_heads_q = 4;
    c.tight = true;
    add(list, c);
  }
  for (const int tokens : {1, 2}) {
    Case c;
    c.lengths = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    c.num_heads_q = 8;
    c.seq_len_q = tokens;
    c.causal = tokens > 1;
    add(list, c);
  }
  // Results by the copy engine and by loops: wide, then of both narrow kernels.
  for (const Heads heads : {Heads{64, 1, 2}, {96, 2, 1}, {40, 1, 2}, {16, 1, 1}, {32, 2, 2}}) {
    Case c;
    c.label = "out";
    c.lengths = {130, 0, 65};
    c.num_heads_q = heads.q;
    c.num_heads_k = heads.kv;
    c.seq_len_q = heads.tokens;
    c.plan = "random";
    c.num_parts = 4;
    c.permuted = true;
    c.gap = c.out_gap = 8;
    add(list, c);
    c.permuted = false;
    c.out_gap = 0;
    c.out_shift = 1;
    add(list, c);
  }
  {
    Case c;  // the table keeps one row short
    c.lengths = {200};
    c.causal = true;
    c.seq_len_q = 2;
    c.num_heads_q = 24;
    add(list, c);
    c.lengths = {130, 65, 300};
    c.plan = "random";
    c.num_parts = 13;
    c.kernel = "sm90a_divided_bf16_576";
    add(list, c);
  }
  // As many shared query rows as teams of warps merge, and more.
  for (const int heads : {32, 128}) {
    for (const int more : {0, 1, 5}) {
      Case c;
      c.label = "merge";
      c.lengths.assign(std::max(1, multiprocessors() / heads) + more, 130);
      c.num_heads_q = heads;
      c.num_parts = 2 * static_cast<int>(c.lengths.size());
      c.plan = "shares";
      add(list, c);
    }
  }
  for (const int heads : {4, 8, 32}) {
    Case c;
    c.label = "tensors";
    c.lengths = {130, 65, 0};
    c.num_heads_q = heads;
    c.seq_len_q = 4;
    c.visible_lens = true;
    c.spread = true;
    c.plan = "shrunk";
    c.num_parts = 5;
    add(list, c);
    c = Case{};
    c.label = "tensors";
    c.lengths = {130};
    c.num_heads_q = 4 * heads;
    c.plan = "random";
    c.num_parts = 2;
    c.loose = true;
    add(list, c);
    c.lengths = {0, 0};
    c.loose = false;
    c.no_pages = true;
    add(list, c);
  }
  Case c;
  c.label = "parts";
  c.lengths = {200, 100};
  c.num_heads_q = 1;
  c.plan = "random";
  c.num_parts = 300;
  add(list, c);
}

// Head counts, query tokens, pages, lengths, logits.
inline void add_shapes(Cases& list) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int head_dim : {576, 512}) {
      for (const int heads : {1, 3, 16, 20, 32, 63, 64, 128}) {
        Case c;
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.lengths = kMixed;
        c.num_heads_q = heads;
        add(list, c);
        c.causal = true;
        c.seq_len_q = 3;
        c.page_size = heads % 2 == 0 ? 784 : 1;
        c.plan = "random";
        c.num_parts = 7;
        add(list, c);
      }
    }
  }
  for (const int page : {1, 2, 16, 32, 48, 64, 100, 128, 192, 784}) {
    for (const int heads : {16, 32, 128}) {
      Case c;
      c.label = "pages";
      c.lengths = random_lengths(5, 1000, page);
      c.page_size = page;
      c.num_heads_q = heads;
      c.gap = page % 32 == 0 ? 8 : 0;
      add(list, c);
      c.dtype = DType::kFloat16;
      c.head_dim = 512;
      c.permuted = true;
      c.plan = "random";
      c.num_parts = 9;
      add(list, c);
      c.num_heads_k = 2;
      c.num_heads_q = 2 * heads;
      add(list, c);
    }
  }
  for (const int kv_heads : {2, 3, 8}) {
    for (const int per_head : {4, 16, 32, 64}) {
      for (const auto& [dtype, head_dim] : kTypes) {
        Case c;
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.lengths = {500, 3, 77};
        c.num_heads_k = kv_heads;
        c.num_heads_q = kv_heads * per_head;
        c.seq_len_q = 2;
        c.causal = true;
        add(list, c);
      }
    }
  }
  for (const int heads : {16, 32, 128}) {
    Case c;
    c.lengths = {1500, 130};
    c.num_heads_q = heads;
    c.apart = true;
    add(list, c);
    c.apart = false;
    c.plan = "stale";
    add(list, c);
  }
  for (const float scale : {4.0f, 40.0f}) {
    for (const int heads : {16, 32, 128}) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        Case c;
        c.lengths = {777, 3000};
        c.dtype = dtype;
        c.num_heads_q = heads;
        c.q_scale = scale;
        add(list, c);
      }
    }
  }
  for (const int heads : {16, 32, 128}) {
    Case c;
    c.lengths = {4641, 9000, 1730, 1696};
    c.num_heads_q = heads;
    add(list, c);
    c.seq_len_q = 4;
    add(list, c);
    c.seq_len_q = 1;
    c.softmax_scale = -0.05f;
    add(list, c);
    c.softmax_scale = 0.0f;
    c.lengths = random_lengths(130, 300, 9);
    add(list, c);
    c.lengths = {20000};
    add(list, c);
    c.kernel = "sm90a_wide_bf16_576";
    add(list, c);
  }
}

// Where results go, whole rows and merged ones: strides that the copy engine can store by, and
// those that it can not.
inline void add_out(Cases& list) {
  constexpr Heads kHeads[] = {
      {128, 1, 2}, {128, 2, 2}, {96, 2, 1}, {96, 2, 2}, {64, 2, 3},   // wide, heads by 16
      {40, 1, 2},  {66, 2, 3},                                        // wide, others
      {16, 1, 1},  {8, 2, 2},   {32, 1, 1}, {32, 2, 2}, {64, 2, 1}};  // narrow
  constexpr OutLayout kLayouts[] = {{false, 8, 0}, {true, 8, 0},  {true, 3, 0},
                                    {false, 0, 1}, {false, 0, 4}, {true, 0, 8}};
  for (const auto& [dtype, head_dim] : kTypes) {
    for (const Heads& heads : kHeads) {
      for (const OutLayout& layout : kLayouts) {
        Case c;
        c.label = "out";
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.lengths = {200, 0, 65, 130};
        c.num_heads_q = heads.q;
        c.num_heads_k = heads.kv;
        c.seq_len_q = heads.tokens;
        c.permuted = layout.permuted;
        c.out_gap = layout.gap;
        c.out_shift = layout.shift;
        c.gap = 8;
        c.plan = "one";
        add(list, c);
        c.plan = "shares";
        c.num_parts = 8;
        add(list, c);
      }
    }
  }
}

// How a merge divides its work: up to as many shared query rows as it has blocks a team of warps
// has 64 columns of one, above a warp has all of one; with more of them than warps, of several.
inline void add_merges(Cases& list) {
  const std::int32_t blocks = multiprocessors();
  for (const auto& [dtype, head_dim] : kTypes) {
    Case c;
    c.label = "merge";
    c.dtype = dtype;
    c.head_dim = head_dim;
    c.plan = "shares";
    const auto add_rows = [&](std::int32_t rows) {
      c.lengths.assign(rows, 200);
      c.num_parts = 3 * rows;
      add(list, c);
    };
    // Teams of 8, 4 and 2; a warp for several query rows.
    c.num_heads_q = 16;
    for (const std::int32_t rows : {1, blocks / 64, blocks / 32, blocks / 2, blocks / 2 + 1}) {
      add_rows(rows);
    }
    // Teams of 1, for one item each, for one or two; a warp for each query row.
    for (const Heads heads : {Heads{16, 1, 1}, {32, 2, 1}, {32, 1, 1}, {64, 2, 1}, {32, 2, 2}}) {
      c.num_heads_q = heads.q;
      c.num_heads_k = heads.kv;
      c.seq_len_q = heads.tokens;
      for (const OutLayout layout : {OutLayout{false, 0, 0}, {true, 3, 0}, {false, 0, 1}}) {
        c.permuted = layout.permuted;
        c.out_gap = layout.gap;
        c.out_shift = layout.shift;
        const std::int32_t most_rows = blocks / (heads.q * heads.tokens);
        for (const std::int32_t rows :
             {most_rows, most_rows + 1, 2 * most_rows, 2 * most_rows + 1}) {
          add_rows(rows);
        }
      }
    }
    // After the wide kernel there are as many blocks, or twice that where all rows, were they
    // shared, want more; where they want more still, other rows are walked whole.
    c = Case{};
    c.label = "merge";
    c.dtype = dtype;
    c.head_dim = head_dim;
    c.plan = "shares";
    c.num_heads_q = blocks / 2 * 2;
    for (const int kv_heads : {1, 2}) {
      for (const int shift : {0, 1}) {
        for (const std::vector<std::int32_t>& lengths : {std::vector<std::int32_t>{200},
                                                         {200, 200},
                                                         {200, 200, 200},
                                                         {200, 1, 1, 1},
                                                         {200, 200, 1, 1},
                                                         {200, 200, 200, 1}}) {
          c.num_heads_k = kv_heads;
          c.out_shift = shift;
          c.lengths = lengths;
          c.num_parts = 2 * static_cast<int>(lengths.size());
          add(list, c);
        }
      }
    }
  }
}

// Plans by hand; many parts, and many rows.
inline void add_plans(Cases& list) {
  for (const char* plan : {"one", "random", "reversed", "padded", "shrunk"}) {
    for (const int heads : {16, 32, 128}) {
      for (const int parts : {2, 13, 200}) {
        Case c;
        c.lengths = kMixed;
        c.num_heads_q = heads;
        c.plan = plan;
        c.num_parts = parts;
        add(list, c);
        c.visible_lens = true;
        c.seq_len_q = 4;
        add(list, c);
      }
    }
  }
  for (const int heads : {2, 16, 32, 128}) {
    Case c;
    c.label = "parts";
    c.num_heads_q = heads;
    // Not a multiple of the rows, of which some have fewer blocks than parts.
    c.lengths = kMixed;
    c.plan = "shares";
    c.num_parts = 38;
    add(list, c);
    // More parts than the merge reads at once; of one row, and of many.
    c.lengths = {20000};
    c.num_parts = 300;
    add(list, c);
    c.plan = "random";
    c.lengths = random_lengths(40, 1000, 6);
    c.num_parts = 257;
    add(list, c);
    // More rows than the merge has the lengths of.
    c.lengths = random_lengths(270, 200, 7);
    c.num_heads_q = std::min(heads, 64);
    c.num_parts = 300;
    add(list, c);
    c.plan = "own";
    c.num_parts = 0;
    add(list, c);
  }
  // More of each row than a warp without a team reads at once.
  for (const int heads : {16, 32}) {
    Case c;
    c.label = "parts";
    c.num_heads_q = heads;
    c.lengths.assign(multiprocessors() / heads, 1700);
    c.plan = "shares";
    c.num_parts = 25 * static_cast<int>(c.lengths.size());
    add(list, c);
  }
  // As many parts as there may be; merged by teams, and by warps.
  for (const int heads : {1, 2}) {
    Case c;
    c.label = "parts";
    c.lengths = random_lengths(multiprocessors() - 2, 300, 8);
    c.num_heads_q = heads;
    c.plan = "random";
    c.num_parts = select::kCudaMaxParts;
    add(list, c);
  }
}

// Tensors in every order, with gaps, without elements, and what tells tokens apart.
inline void add_tensors(Cases& list) {
  // 16, 32 and more query rows of a key/value head.
  for (const Heads heads :
       {Heads{4, 1, 4}, {8, 1, 4}, {16, 1, 2}, {5, 1, 6}, {20, 1, 4}, {32, 2, 4}}) {
    for (const char* plan : {"own", "random", "shrunk"}) {
      Case c;
      c.label = "tensors";
      c.lengths = kMixed;
      c.num_heads_q = heads.q;
      c.num_heads_k = heads.kv;
      c.seq_len_q = heads.tokens;
      c.visible_lens = true;
      c.plan = plan;
      c.num_parts = plan == std::string("own") ? 0 : 13;
      add(list, c);
      c.spread = true;
      c.permuted = true;
      c.page_size = 16;
      c.dtype = DType::kFloat16;
      c.head_dim = 512;
      add(list, c);
      c.visible_lens = false;
      c.causal = true;
      add(list, c);
    }
  }
  for (const int heads : {1, 16, 32, 128}) {
    for (const int page : {1, 64}) {
      Case c;
      c.label = "tensors";
      c.num_heads_q = heads;
      c.page_size = page;
      c.lengths = {300};
      c.loose = true;
      add(list, c);
      c.plan = "one";
      add(list, c);
      c.loose = false;
      c.plan = "own";
      c.lengths = {300, 300, 300};
      c.expanded = true;
      add(list, c);
      c.num_heads_q = 2 * heads;
      c.num_heads_k = 2;
      add(list, c);
    }
    Case c;
    c.label = "tensors";
    c.num_heads_q = heads;
    c.lengths = {0, 0, 0};
    add(list, c);
    c.plan = "random";
    c.num_parts = 3;
    add(list, c);
    c.no_pages = true;
    add(list, c);
  }
}

// Sums of the largest finite numbers, whose means are finite; and the largest scores that tokens
// have in common.
inline void add_largest(Cases& list) {
  for (const int heads : {16, 32, 128}) {
    for (const char* plan : {"one", "shares"}) {
      Case c;
      c.label = "largest";
      c.lengths = {700};
      c.num_heads_q = heads;
      c.plan = plan;
      c.num_parts = 4;
      c.apart = true;
      c.q_scale = 0.0f;
      c.softmax_scale = 0x1p22f;  // scores of 2^32
      add(list, c);
    }
  }
  for (const auto& [dtype, head_dim] : kTypes) {
    for (const int heads : {16, 32, 128}) {
      for (const char* plan : {"one", "shares"}) {
        Case c;
        c.label = "largest";
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.lengths = {1, 300, 1700};
        c.num_heads_q = heads;
        c.plan = plan;
        c.num_parts = 30;
        c.largest = true;
        add(list, c);
        c.largest = false;
        for (const Large large :
             {Large::kQueries, Large::kKeys, Large::kBoth, Large::kSomeTokens, Large::kValues}) {
          // Nothing but values decides where there are no other columns; and scores of fp16 do not
          // overflow, but between the largest of them float32 tells no small differences.
          if (dtype == DType::kFloat16 && large != Large::kBoth) continue;
          c.large = large;
          for (const int tokens : {1, 3}) {
            c.seq_len_q = tokens;
            c.causal = tokens > 1;
            c.page_size = tokens > 1 ? 16 : 64;
            add(list, c);
          }
        }
      }
    }
  }
  // Merged by warps that have whole query rows, and by warps that have two items.
  for (const int heads : {16, 32, 128}) {
    for (const int rows : {multiprocessors() / heads + 1, 3 * multiprocessors() / heads + 1}) {
      Case c;
      c.label = "largest";
      c.lengths.assign(rows, 200);
      c.num_heads_q = heads;
      c.plan = "shares";
      c.num_parts = 3 * rows;
      c.large = Large::kSomeTokens;
      add(list, c);
    }
  }
}

// A sample of what is listed, for the kernel that divides query rows among blocks: it takes every
// call, and is chosen for few.
inline void add_divided(Cases& list) {
  constexpr std::size_t kEvery = 3;
  const std::size_t count = list.size();
  for (std::size_t i = 0; i < count; i += kEvery) {
    Case c = list[i];
    if (!c.kernel.empty()) continue;
    c.kernel = "sm90a_divided_" + type_name(c.dtype) + "_" + std::to_string(c.head_dim);
    add(list, c);
  }
  // One short row, up to where 128 heads are not divided any more.
  for (const auto& [dtype, head_dim] : kTypes) {
    for (const Heads heads : {Heads{128, 1, 1}, {20, 1, 1}, {63, 1, 2}, {128, 2, 1}, {16, 1, 3}}) {
      for (const std::int32_t length : {0, 1, 63, 64, 129, 1024, 2048, 2112}) {
        Case c;
        c.label = "one row";
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.num_heads_q = heads.q;
        c.num_heads_k = heads.kv;
        c.seq_len_q = heads.tokens;
        c.lengths = {length};
        c.causal = heads.tokens > 1;
        c.tight = true;
        add(list, c);
      }
    }
  }
}

inline Cases cases(bool small) {
  Cases list;
  if (small) {
    add_small(list);
    return list;
  }
  add_shapes(list);
  add_out(list);
  add_merges(list);
  add_plans(list);
  add_tensors(list);
  add_largest(list);
  add_divided(list);
  return list;
}

}  // namespace flashmla::cuda_test
