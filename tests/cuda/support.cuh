// What the GPU tests and benchmarks share: device memory, random paged problems with poison in
// everything that must not be read, plans, and a float64 reference.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "backends/cuda/backend.hpp"
#include "problem/problem.hpp"
#include "schedule/planner.hpp"
#include "select/select.hpp"

namespace flashmla::cuda_test {

#define FLASHMLA_CUDA_REQUIRE(call)                                               \
  do {                                                                            \
    const cudaError_t error_ = (call);                                            \
    if (error_ != cudaSuccess) {                                                  \
      std::printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error_)); \
      std::exit(2);                                                               \
    }                                                                             \
  } while (false)

inline void require(const Status& status) {
  if (!status.ok()) {
    std::printf("%s\n", status.message().c_str());
    std::exit(2);
  }
}

// Device memory of `size` elements, owned.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t size = 0) : size_(size) {
    if (size > 0) FLASHMLA_CUDA_REQUIRE(cudaMalloc(&data_, size * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) { upload(host); }
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
    other.size_ = 0;
  }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  T* data() const { return data_; }
  std::size_t size() const { return size_; }
  void upload(const std::vector<T>& host) {
    FLASHMLA_CUDA_REQUIRE(
        cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> download() const {
    std::vector<T> host(size_);
    FLASHMLA_CUDA_REQUIRE(
        cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }
  void fill(int byte) const {
    if (size_ > 0) FLASHMLA_CUDA_REQUIRE(cudaMemset(data_, byte, size_ * sizeof(T)));
  }

 private:
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

__device__ inline std::uint32_t mix(std::uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return static_cast<std::uint32_t>(x);
}

__device__ inline float standard_normal(std::uint64_t seed, std::uint64_t index) {
  const float u = (mix(seed * 0x9e3779b97f4a7c15ull + 2 * index) + 1.0f) * 2.3283064e-10f;
  const float v = mix(seed * 0x9e3779b97f4a7c15ull + 2 * index + 1) * 2.3283064e-10f;
  return sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v);
}

template <class Element>
__global__ void fill_normal(Element* data, std::size_t size, std::uint64_t seed, float scale) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < size;
       i += std::size_t{gridDim.x} * blockDim.x) {
    data[i] = static_cast<Element>(scale * standard_normal(seed, i));
  }
}

// Tokens of the cache that some row uses; the rest keeps its poison. largest: 0, or of what they
// then hold the largest number.
template <class Element>
__global__ void fill_used_tokens(Problem p, std::uint64_t seed, float largest) {
  const std::int32_t row = blockIdx.y;
  Element* cache = static_cast<Element*>(const_cast<void*>(p.k_cache));
  const std::int32_t length = p.cache_seqlens[row * p.cache_seqlens_stride];
  for (std::int32_t token = blockIdx.x; token < length; token += gridDim.x) {
    const std::int64_t page = p.block_table[row * p.block_table_batch_stride +
                                            token / p.page_size * p.block_table_page_stride];
    for (int i = threadIdx.x; i < p.num_heads_k * p.head_dim; i += blockDim.x) {
      const std::int64_t place = page * p.k_block_stride + token % p.page_size * p.k_token_stride +
                                 i / p.head_dim * p.k_head_stride + i % p.head_dim;
      const float number = standard_normal(seed, place);
      cache[place] = static_cast<Element>(
          largest > 0.0f ? largest * fminf(0.5f + 0.25f * fabsf(number), 1.0f) : number);
    }
  }
}

// Makes every other query row attend to every other token alone, by the columns that are no values,
// and these tokens' values smaller by 2^40.
template <class Element>
__global__ void set_apart(Problem p) {
  const std::int32_t row = blockIdx.y;
  const std::int32_t length = p.cache_seqlens[row * p.cache_seqlens_stride];
  const auto sign = [](std::int32_t i) { return i % 2 == 0 ? 1.0f : -1.0f; };
  for (std::int32_t i = blockIdx.x; i < p.seq_len_q * p.num_heads_q; i += gridDim.x) {
    Element* q = static_cast<Element*>(const_cast<void*>(p.q)) + row * p.q_batch_stride +
                 i / p.num_heads_q * p.q_token_stride + i % p.num_heads_q * p.q_head_stride;
    for (int c = p.head_dim_v + threadIdx.x; c < p.head_dim; c += blockDim.x) {
      q[c] = static_cast<Element>(16.0f * sign(i));
    }
  }
  for (std::int32_t token = blockIdx.x; token < length; token += gridDim.x) {
    const std::int64_t page = p.block_table[row * p.block_table_batch_stride +
                                            token / p.page_size * p.block_table_page_stride];
    for (int i = threadIdx.x; i < p.num_heads_k * p.head_dim; i += blockDim.x) {
      Element& element = static_cast<Element*>(const_cast<void*>(
          p.k_cache))[page * p.k_block_stride + token % p.page_size * p.k_token_stride +
                      i / p.head_dim * p.k_head_stride + i % p.head_dim];
      if (i % p.head_dim >= p.head_dim_v) {
        element = static_cast<Element>(sign(token));
      } else if (token % 2 == 1) {
        element = static_cast<Element>(static_cast<float>(element) * 0x1p-40f);
      }
    }
  }
}

// What is so large that float32 does not hold the scores; or that a mean of it, rounded up, is not
// finite.
enum class Large { kNothing, kQueries, kKeys, kBoth, kSomeTokens, kValues };

// Makes it so, keeping the signs, up to `largest`. kValues: all value columns hold it, the others
// decide alone.
template <class Element>
__global__ void set_large(Problem p, Large what, float largest) {
  const std::int32_t row = blockIdx.y;
  const std::int32_t length = p.cache_seqlens[row * p.cache_seqlens_stride];
  const auto enlarged = [&](Element element) {
    const float number = static_cast<float>(element);
    return static_cast<Element>(
        copysignf(largest * fminf(0.5f + 0.25f * fabsf(number), 1.0f), number));
  };
  const bool has_queries = what == Large::kQueries || what == Large::kBoth;
  for (std::int32_t i = blockIdx.x; i < p.seq_len_q * p.num_heads_q; i += gridDim.x) {
    Element* q = static_cast<Element*>(const_cast<void*>(p.q)) + row * p.q_batch_stride +
                 i / p.num_heads_q * p.q_token_stride + i % p.num_heads_q * p.q_head_stride;
    for (int c = threadIdx.x; c < p.head_dim; c += blockDim.x) {
      if (has_queries) q[c] = enlarged(q[c]);
      if (what == Large::kValues && c < p.head_dim_v) q[c] = static_cast<Element>(0.0f);
    }
  }
  if (what == Large::kQueries) return;
  for (std::int32_t token = blockIdx.x; token < length; token += gridDim.x) {
    if (what == Large::kSomeTokens && token % 97 != 5) continue;
    const std::int64_t page = p.block_table[row * p.block_table_batch_stride +
                                            token / p.page_size * p.block_table_page_stride];
    for (int i = threadIdx.x; i < p.num_heads_k * p.head_dim; i += blockDim.x) {
      Element& element = static_cast<Element*>(const_cast<void*>(
          p.k_cache))[page * p.k_block_stride + token % p.page_size * p.k_token_stride +
                      i / p.head_dim * p.k_head_stride + i % p.head_dim];
      if (what != Large::kValues) {
        element = enlarged(element);
      } else if (i % p.head_dim < p.head_dim_v) {
        element = static_cast<Element>(largest);
      }
    }
  }
}

// An lse past this counts as this.
constexpr double kLargestFloat = std::numeric_limits<float>::max();

// Float64 attention of one (head, token, row) a block; scores (blocks, max_length) is scratch.
template <class Element>
__global__ void reference_kernel(Problem p, double* scores, std::int32_t max_length, double* out,
                                 double* lse) {
  const std::int32_t head = blockIdx.x, token = blockIdx.y, row = blockIdx.z;
  const std::int64_t block =
      (static_cast<std::int64_t>(row) * p.seq_len_q + token) * p.num_heads_q + head;
  const std::int32_t kv_head = head / (p.num_heads_q / p.num_heads_k);
  const std::int32_t length = p.cache_seqlens[row * p.cache_seqlens_stride];
  std::int32_t visible = length;
  if (p.visible_lens != nullptr) {
    visible =
        p.visible_lens[row * p.visible_lens_batch_stride + token * p.visible_lens_token_stride];
  } else if (p.causal) {
    visible = max(0, length - p.seq_len_q + token + 1);
  }
  const Element* q = static_cast<const Element*>(p.q) + row * p.q_batch_stride +
                     token * p.q_token_stride + head * p.q_head_stride;
  const auto key = [&](std::int32_t j) {
    return static_cast<const Element*>(p.k_cache) +
           static_cast<std::int64_t>(p.block_table[row * p.block_table_batch_stride +
                                                   j / p.page_size * p.block_table_page_stride]) *
               p.k_block_stride +
           j % p.page_size * p.k_token_stride + kv_head * p.k_head_stride;
  };
  double* mine = scores + block * max_length;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (std::int32_t j = warp; j < visible; j += warps) {
    double sum = 0.0;
    for (int i = lane; i < p.head_dim; i += 32) {
      sum += static_cast<double>(static_cast<float>(q[i])) *
             static_cast<double>(static_cast<float>(key(j)[i]));
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (lane == 0) mine[j] = sum * static_cast<double>(p.softmax_scale);
  }
  __syncthreads();
  double largest = -INFINITY, total = 0.0;
  for (std::int32_t j = 0; j < visible; ++j) largest = fmax(largest, mine[j]);
  for (std::int32_t j = 0; j < visible; ++j) total += exp(mine[j] - largest);
  for (int c = threadIdx.x; c < p.head_dim_v; c += blockDim.x) {
    double sum = 0.0;
    for (std::int32_t j = 0; j < visible; ++j) {
      sum += exp(mine[j] - largest) * static_cast<double>(static_cast<float>(key(j)[c]));
    }
    out[block * p.head_dim_v + c] = visible > 0 ? sum / total : 0.0;
  }
  if (threadIdx.x == 0) {
    lse[(static_cast<std::int64_t>(row) * p.num_heads_q + head) * p.seq_len_q + token] =
        visible > 0 ? fmin(fmax(largest + log(total), -kLargestFloat), kLargestFloat) : INFINITY;
  }
}

// Leaves NaN in every multiprocessor's shared memory.
__global__ void poison_shared_memory() {
  extern __shared__ std::uint32_t words[];
  for (int i = threadIdx.x; i < 200 * 256; i += blockDim.x) words[i] = 0xffffffffu;
  __syncthreads();
  if (words[threadIdx.x] == 0) __trap();
}

struct Case {
  std::string label;  // first word of the name: what the case is there for
  std::string name;
  DType dtype = DType::kBFloat16;
  std::int32_t head_dim = 576;
  std::vector<std::int32_t> lengths;
  std::int32_t seq_len_q = 1, num_heads_q = 128, num_heads_k = 1, page_size = 64;
  bool causal = false;
  bool visible_lens = false;   // random ones, among them nothing, all, and ends of blocks
  std::int32_t gap = 0;        // elements before q and k_cache and after each step: 8 or 0
  std::int32_t out_gap = 0;    // the same of out, any number
  std::int32_t out_shift = 0;  // elements from a multiple of 256 bytes to out
  bool permuted = false;       // q, k_cache, out and lse: their dimensions in another order
  bool spread = false;         // the same of the int32 tensors, and gaps there and in lse
  bool expanded = false;       // rows have one query and one length, key/value heads one cache
  bool loose = false;          // strides that are never stepped along are odd and huge
  bool no_pages = false;       // a cache without pages, for rows without tokens
  bool tight = false;          // no column of the table that no row uses
  bool apart = false;          // see set_apart(); bf16
  bool largest = false;        // q is 0 and the cache holds numbers up to the largest of its type
  Large large = Large::kNothing;
  float q_scale = 1.0f;        // standard deviation of q: larger is peakier
  float softmax_scale = 0.0f;  // 0: head_dim ** -0.5
  std::int32_t num_parts = 0;  // 0: as many as suit the device
  std::string plan = "own";    // own, or one that Instance::make_plan() writes by hand
  std::string kernel;
};

// Elements before and after results, which nobody may write; whole units of 256 bytes.
inline constexpr std::int64_t kMargin = 128;

// What stands in int32 tensors between their elements.
inline constexpr std::int32_t kBetween = 2147480000;

struct Dimension {
  std::int64_t extent;
  std::int64_t* stride;
};

// Strides, for dimensions of which the innermost comes first and steps over `row` elements, with
// `gap` elements after each step. Permuted: the second is the innermost, the first the outermost.
// Returns how many elements all of them span.
template <std::size_t kRank>
std::int64_t lay_out(std::int64_t row, std::int64_t gap, std::array<Dimension, kRank> dimensions,
                     bool permuted) {
  if (permuted) std::rotate(dimensions.begin(), dimensions.begin() + 1, dimensions.end());
  std::int64_t span = row + gap;
  for (const Dimension& dimension : dimensions) {
    *dimension.stride = span;
    span = span * dimension.extent + gap;
  }
  return span;
}

inline const select::KernelRow& select_kernel(const Problem& problem, std::string_view forced) {
  const Result<std::int32_t> capability = cuda::compute_capability(problem.device.index);
  require(capability.status());
  select::DeviceFacts facts;
  facts.compute_capability = capability.value();
  const Result<const select::KernelRow*> row = select::select_kernel(problem, facts, forced);
  require(row.status());
  return *row.value();
}

// The planning of a problem, to `rows` and `num_splits`, which are contiguous.
inline PlanProblem plan_problem(const Problem& problem, std::int32_t* rows,
                                std::int32_t* num_splits) {
  PlanProblem plan{};
  plan.device = problem.device;
  plan.batch = problem.batch;
  plan.num_heads_per_head_k = problem.query_rows();
  plan.cache_seqlens = problem.cache_seqlens;
  plan.cache_seqlens_stride = problem.cache_seqlens_stride;
  plan.plan_rows = rows;
  plan.num_parts = problem.num_parts;
  plan.num_splits = num_splits;
  return plan;
}

// A problem in device memory, with everything that it owns.
struct Instance {
  Case spec;
  Problem problem;
  std::int64_t out_begin = 0;   // of the results within `out`; lse begins at kMargin
  std::int64_t plan_pitch = 0;  // int32 from one row of the plan to the next
  DeviceArray<std::uint16_t> q, cache, out;
  DeviceArray<float> lse;
  DeviceArray<std::int32_t> table, lengths, visible, plan_rows, num_splits;
  DeviceArray<std::uint8_t> workspace;

  // Writes the plan that the case asks for:
  //   own       the library's
  //   one       one part, which ends past the batch
  //   stale     one part, made when the last row had a block less, which is thus left alone
  //   padded    made for one row fewer, which is thus left alone; other parts have no work
  //   random    cuts anywhere between blocks
  //   reversed  the same, the last part first
  //   shrunk    the same, made when every row had three blocks more
  //   shares    every row in as many shares as there are parts for it
  void make_plan(std::mt19937& random);
  Status enqueue(cudaStream_t stream = nullptr) const {
    return cuda::decode(problem, select_kernel(problem, spec.kernel), workspace.data(), stream);
  }
  void launch(cudaStream_t stream = nullptr) const { require(enqueue(stream)); }

 private:
  friend Instance make_instance(const Case& spec, std::uint32_t seed, bool hostile);

  std::int64_t int_gap() const { return spec.spread ? 1 : 0; }
  std::int32_t pages_of_row(std::int32_t row) const;
  void set_sizes();  // and how many pages there are
  // Tensors that are laid out as the case says, with what they hold.
  void make_table(std::mt19937& random, bool hostile);
  void make_lengths();
  void make_visible_lens(std::mt19937& random);
  void allocate_tensors();  // q, the cache and the results, all of them poison
  template <class Element>
  void fill_tensors(std::uint32_t seed, bool hostile, float largest);  // q and tokens in use
  void allocate_plan();
  void loosen_strides();
  void remove_pages();
  void make_own_plan();
  // Writes field f of part p to fields_of(p)[f].
  template <class FieldsOf>
  void cut_anywhere(std::mt19937& random, const FieldsOf& fields_of) const;
};

inline void Instance::make_own_plan() {
  DeviceArray<std::int32_t> rows(static_cast<std::size_t>(problem.num_parts) * kPlanRowFields);
  const PlanProblem plan = plan_problem(problem, rows.data(), num_splits.data());
  require(cuda::plan(plan, nullptr));
  constexpr std::size_t kBytes = kPlanRowFields * sizeof(std::int32_t);
  FLASHMLA_CUDA_REQUIRE(cudaMemcpy2D(plan_rows.data(), plan_pitch * sizeof(std::int32_t),
                                     rows.data(), kBytes, kBytes, problem.num_parts,
                                     cudaMemcpyDeviceToDevice));
}

template <class FieldsOf>
void Instance::cut_anywhere(std::mt19937& random, const FieldsOf& fields_of) const {
  struct Place {
    std::int32_t row, block;
  };
  const bool shrunk = spec.plan == "shrunk";
  const auto blocks_of = [&](std::int32_t row) {
    return schedule::blocks_of_length(spec.lengths[row]);
  };
  std::vector<Place> blocks;
  for (std::int32_t row = 0; row < problem.batch; ++row) {
    const std::int32_t count = blocks_of(row) + (shrunk ? 3 : 0);
    for (std::int32_t b = 0; b < std::max(count, 1); ++b) blocks.push_back({row, b});
  }
  std::vector<std::size_t> cuts{0, blocks.size()};
  for (std::int32_t part = 1; part < problem.num_parts; ++part) {
    cuts.push_back(random() % (blocks.size() + 1));
  }
  std::sort(cuts.begin(), cuts.end());
  for (std::int32_t part = 0; part < problem.num_parts; ++part) {
    std::int32_t* fields = fields_of(spec.plan == "reversed" ? problem.num_parts - 1 - part : part);
    if (cuts[part] == cuts[part + 1]) {
      fields[0] = -1;
      continue;
    }
    const Place begin = blocks[cuts[part]], last = blocks[cuts[part + 1] - 1];
    fields[0] = begin.row;
    fields[1] = begin.block;
    fields[2] = last.row;
    fields[3] = last.block + 1;
    if (shrunk) continue;
    // The same places as others may put them: the start of a row as the end of the one before, its
    // end as a block past it or as the start of the one after.
    if (begin.block == 0 && begin.row > 0 && random() % 2 == 0) {
      fields[0] = begin.row - 1;
      fields[1] = blocks_of(begin.row - 1);
    }
    const std::int32_t end = std::min(fields[3], blocks_of(last.row));
    fields[3] = end;
    const std::uint32_t choice = random() % 3;
    if (end == blocks_of(last.row) && choice == 1) fields[3] = INT32_MAX;
    if (end == blocks_of(last.row) && choice == 2) {
      fields[2] = last.row + 1;
      fields[3] = 0;
    }
  }
}

inline void Instance::make_plan(std::mt19937& random) {
  if (spec.plan == "own") {
    make_own_plan();
    return;
  }
  const std::int32_t batch = problem.batch, parts = problem.num_parts;
  std::vector<std::int32_t> rows(plan_rows.size(), kBetween);
  const auto fields_of = [&](std::int32_t part) { return rows.data() + part * plan_pitch; };
  for (std::int32_t part = 0; part < parts; ++part) {
    std::fill_n(fields_of(part), kPlanRowFields, 0);
  }
  if (spec.plan == "one") {
    fields_of(0)[2] = batch + 3;
    fields_of(0)[3] = 7;
  } else if (spec.plan == "stale") {
    fields_of(0)[2] = batch - 1;
    fields_of(0)[3] = schedule::blocks_of_length(spec.lengths.back()) - 1;
  } else if (spec.plan == "padded") {
    fields_of(0)[2] = batch - 2;
    fields_of(0)[3] = 1 << 20;
    for (std::int32_t part = 1; part < parts; ++part) {
      fields_of(part)[0] = part % 2 == 0 ? -1 : batch + part;
      fields_of(part)[2] = part % 4 == 1 ? batch + part + 1 : 0;
      fields_of(part)[3] = part % 4 == 1 ? 5 : 0;
    }
  } else if (spec.plan == "shares") {
    const std::int32_t shares = parts / batch;
    for (std::int32_t part = 0; part < parts; ++part) {
      const std::int32_t row = part / shares, share = part % shares;
      std::int32_t* fields = fields_of(part);
      fields[0] = row < batch ? row : -1;
      if (row >= batch) continue;
      const std::int32_t blocks = schedule::blocks_of_length(spec.lengths[row]);
      fields[1] = blocks * share / shares;
      fields[2] = row;
      fields[3] = share + 1 == shares ? INT32_MAX : blocks * (share + 1) / shares;
    }
  } else {
    cut_anywhere(random, fields_of);
  }
  plan_rows.upload(rows);
  num_splits.fill(0);
}

inline std::int64_t element_count(const std::vector<std::int32_t>& lengths) {
  std::int64_t total = 0;
  for (const std::int32_t length : lengths) total += length;
  return total;
}

inline std::int32_t Instance::pages_of_row(std::int32_t row) const {
  return (spec.lengths[row] + problem.page_size - 1) / problem.page_size;
}

inline void Instance::set_sizes() {
  problem.device = {DeviceType::kCuda, 0};
  problem.dtype = spec.dtype;
  problem.batch = static_cast<std::int32_t>(spec.lengths.size());
  problem.seq_len_q = spec.seq_len_q;
  problem.num_heads_q = spec.num_heads_q;
  problem.num_heads_k = spec.num_heads_k;
  problem.head_dim = spec.head_dim;
  problem.head_dim_v = 512;
  problem.page_size = spec.page_size;
  problem.softmax_scale = spec.softmax_scale != 0.0f
                              ? spec.softmax_scale
                              : 1.0f / std::sqrt(static_cast<float>(problem.head_dim));
  problem.causal = spec.causal;
  problem.max_pages_per_row = 1;
  problem.num_blocks = 3;  // some that nobody uses
  for (std::int32_t row = 0; row < problem.batch; ++row) {
    const std::int32_t pages = pages_of_row(row);
    problem.max_pages_per_row = std::max(problem.max_pages_per_row, spec.tight ? pages : pages + 1);
    problem.num_blocks += pages;
  }
}

inline void Instance::make_table(std::mt19937& random, bool hostile) {
  std::vector<std::int32_t> ids(problem.num_blocks);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), random);
  const std::int32_t garbage[] = {-1, 2147480000, static_cast<std::int32_t>(ids.size()),
                                  -2147483648};
  std::vector<std::int32_t> entries(
      lay_out(1, int_gap(),
              std::array{Dimension{problem.max_pages_per_row, &problem.block_table_page_stride},
                         Dimension{problem.batch, &problem.block_table_batch_stride}},
              spec.spread),
      kBetween);
  std::size_t next = 0;
  for (std::int32_t row = 0; row < problem.batch; ++row) {
    const std::int32_t pages = pages_of_row(row);
    for (std::int32_t i = 0; i < problem.max_pages_per_row; ++i) {
      const bool good = i < pages && !(hostile && random() % 2 == 0);
      entries[row * problem.block_table_batch_stride + i * problem.block_table_page_stride] =
          good ? ids[next++ % ids.size()] : garbage[random() % 4];
    }
  }
  table = DeviceArray<std::int32_t>(entries);
  problem.block_table = table.data();
}

inline void Instance::make_lengths() {
  std::vector<std::int32_t> entries(
      lay_out(1, int_gap(), std::array{Dimension{problem.batch, &problem.cache_seqlens_stride}},
              false),
      kBetween);
  for (std::int32_t row = 0; row < problem.batch; ++row) {
    entries[row * problem.cache_seqlens_stride] = spec.lengths[row];
  }
  lengths = DeviceArray<std::int32_t>(entries);
  problem.cache_seqlens = lengths.data();
}

inline void Instance::make_visible_lens(std::mt19937& random) {
  std::vector<std::int32_t> entries(
      lay_out(1, int_gap(),
              std::array{Dimension{problem.seq_len_q, &problem.visible_lens_token_stride},
                         Dimension{problem.batch, &problem.visible_lens_batch_stride}},
              spec.spread),
      kBetween);
  for (std::int32_t row = 0; row < problem.batch; ++row) {
    const std::int32_t length = spec.lengths[row];
    std::vector<std::int32_t> of_row(problem.seq_len_q);
    for (std::int32_t& v : of_row) {
      const std::int32_t any = static_cast<std::int32_t>(random() % (length + 1));
      const std::int32_t edges[] = {0, length, any / kBlockTokens * kBlockTokens};
      const std::uint32_t choice = random() % 8;
      v = choice < 3 ? edges[choice] : any;
    }
    std::sort(of_row.begin(), of_row.end());
    for (std::int32_t t = 0; t < problem.seq_len_q; ++t) {
      entries[row * problem.visible_lens_batch_stride + t * problem.visible_lens_token_stride] =
          of_row[t];
    }
  }
  visible = DeviceArray<std::int32_t>(entries);
  problem.visible_lens = visible.data();
}

inline void Instance::allocate_tensors() {
  const std::int64_t q_size =
      lay_out(problem.head_dim, spec.gap,
              std::array{Dimension{problem.num_heads_q, &problem.q_head_stride},
                         Dimension{problem.seq_len_q, &problem.q_token_stride},
                         Dimension{problem.batch, &problem.q_batch_stride}},
              spec.permuted);
  const std::int64_t cache_size =
      lay_out(problem.head_dim, spec.gap,
              std::array{Dimension{problem.num_heads_k, &problem.k_head_stride},
                         Dimension{problem.page_size, &problem.k_token_stride},
                         Dimension{problem.num_blocks, &problem.k_block_stride}},
              spec.permuted);
  const std::int64_t out_size =
      lay_out(problem.head_dim_v, spec.out_gap,
              std::array{Dimension{problem.num_heads_q, &problem.out_head_stride},
                         Dimension{problem.seq_len_q, &problem.out_token_stride},
                         Dimension{problem.batch, &problem.out_batch_stride}},
              spec.permuted);
  const std::int64_t lse_size =
      lay_out(1, int_gap(),
              std::array{Dimension{problem.seq_len_q, &problem.lse_token_stride},
                         Dimension{problem.num_heads_q, &problem.lse_head_stride},
                         Dimension{problem.batch, &problem.lse_batch_stride}},
              spec.permuted);
  out_begin = kMargin + spec.out_shift;
  q = DeviceArray<std::uint16_t>(spec.gap + q_size);
  cache = DeviceArray<std::uint16_t>(spec.gap + cache_size);
  out = DeviceArray<std::uint16_t>(out_begin + out_size + kMargin);
  lse = DeviceArray<float>(kMargin + lse_size + kMargin);
  problem.q = q.data() + spec.gap;
  problem.k_cache = cache.data() + spec.gap;
  problem.out = out.data() + out_begin;
  problem.lse = lse.data() + kMargin;
  cache.fill(0xff);  // NaN
  q.fill(0xff);
  out.fill(0xff);
  lse.fill(0xff);
  if (spec.expanded) {
    problem.q_batch_stride = problem.k_head_stride = problem.cache_seqlens_stride =
        problem.block_table_batch_stride = 0;
  }
}

template <class Element>
void Instance::fill_tensors(std::uint32_t seed, bool hostile, float largest) {
  const dim3 grid(256, std::max(problem.batch, 1));
  auto* elements = reinterpret_cast<Element*>(q.data());
  fill_normal<<<512, 256>>>(elements, q.size(), seed + 1, spec.largest ? 0.0f : spec.q_scale);
  if (!hostile && problem.batch > 0) {
    fill_used_tokens<Element><<<grid, 256>>>(problem, seed + 2, spec.largest ? largest : 0.0f);
  }
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    if (spec.apart) set_apart<Element><<<grid, 256>>>(problem);
  }
  if (spec.large != Large::kNothing) {
    set_large<Element><<<grid, 256>>>(problem, spec.large, largest);
  }
}

inline void Instance::allocate_plan() {
  if (spec.num_parts > 0) {
    problem.num_parts = spec.num_parts;
  } else {
    const Result<std::int32_t> parts =
        cuda::num_parts(0, problem.query_rows(), problem.num_heads_k);
    require(parts.status());
    problem.num_parts = parts.value();
  }
  if (spec.plan == "one" || spec.plan == "stale") problem.num_parts = 1;
  plan_rows = DeviceArray<std::int32_t>(lay_out(
      kPlanRowFields, 3 * int_gap(), std::array{Dimension{problem.num_parts, &plan_pitch}}, false));
  num_splits = DeviceArray<std::int32_t>(problem.batch + 1);
  problem.plan_rows = plan_rows.data();
  problem.plan_row_stride = plan_pitch;
}

inline void Instance::loosen_strides() {
  for (const Dimension& dimension :
       {Dimension{problem.batch, &problem.q_batch_stride},
        Dimension{problem.seq_len_q, &problem.q_token_stride},
        Dimension{problem.num_heads_q, &problem.q_head_stride},
        Dimension{problem.num_blocks, &problem.k_block_stride},
        Dimension{problem.page_size, &problem.k_token_stride},
        Dimension{problem.num_heads_k, &problem.k_head_stride},
        Dimension{problem.batch, &problem.out_batch_stride},
        Dimension{problem.seq_len_q, &problem.out_token_stride},
        Dimension{problem.num_heads_q, &problem.out_head_stride},
        Dimension{problem.batch, &problem.lse_batch_stride},
        Dimension{problem.num_heads_q, &problem.lse_head_stride},
        Dimension{problem.seq_len_q, &problem.lse_token_stride},
        Dimension{problem.batch, &problem.block_table_batch_stride},
        Dimension{problem.max_pages_per_row, &problem.block_table_page_stride},
        Dimension{problem.batch, &problem.cache_seqlens_stride},
        Dimension{problem.num_parts, &problem.plan_row_stride}}) {
    if (dimension.extent == 1) *dimension.stride = (std::int64_t{1} << 41) + 1;
  }
}

inline void Instance::remove_pages() {
  problem.k_cache = nullptr;
  problem.block_table = nullptr;
  problem.num_blocks = problem.max_pages_per_row = 0;
}

// `hostile`: block ids in use are garbage as well. Everything follows from the case and the seed:
// the order of the steps is that of their random numbers.
inline Instance make_instance(const Case& spec, std::uint32_t seed, bool hostile = false) {
  std::mt19937 random(seed);
  Instance instance;
  instance.spec = spec;
  instance.set_sizes();
  instance.make_table(random, hostile);
  instance.make_lengths();
  if (spec.visible_lens) instance.make_visible_lens(random);
  instance.allocate_tensors();
  if (spec.dtype == DType::kBFloat16) {
    instance.fill_tensors<__nv_bfloat16>(seed, hostile, 0x1.fep127f);
  } else {
    instance.fill_tensors<__half>(seed, hostile, 65504.0f);
  }
  instance.allocate_plan();
  instance.make_plan(random);
  if (spec.loose) instance.loosen_strides();
  if (spec.no_pages) instance.remove_pages();
  instance.workspace = DeviceArray<std::uint8_t>(cuda::workspace_bytes(instance.problem));
  FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
  return instance;
}

// Relative error of out over all rows in `walked` and of the worst query row, and the largest
// absolute error of lse.
struct Errors {
  double out = 0.0, worst_query_row = 0.0, lse = 0.0;
  bool has_bad_values =
      false;  // NaN or inf in out, or an lse that is infinite where it must not be
};

inline float to_float(std::uint16_t bits, DType dtype) {
  if (dtype == DType::kBFloat16) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  __half value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}

// Judges the rows 0, step, 2 * step, ... below `rows`.
inline Errors compare_with_reference(const Instance& instance, std::int32_t rows,
                                     std::int32_t step = 1) {
  Problem p = instance.problem;
  p.batch = (rows + step - 1) / step;
  for (std::int64_t* stride :
       {&p.q_batch_stride, &p.block_table_batch_stride, &p.cache_seqlens_stride,
        &p.visible_lens_batch_stride, &p.out_batch_stride, &p.lse_batch_stride}) {
    *stride *= step;
  }
  const std::int32_t longest =
      std::max(1, *std::max_element(instance.spec.lengths.begin(), instance.spec.lengths.end()));
  const std::int64_t queries = static_cast<std::int64_t>(p.batch) * p.seq_len_q * p.num_heads_q;
  DeviceArray<double> scores(queries * longest), out(queries * p.head_dim_v), lse(queries);
  const dim3 grid(p.num_heads_q, p.seq_len_q, p.batch);
  if (p.dtype == DType::kBFloat16) {
    reference_kernel<__nv_bfloat16>
        <<<grid, 256>>>(p, scores.data(), longest, out.data(), lse.data());
  } else {
    reference_kernel<__half><<<grid, 256>>>(p, scores.data(), longest, out.data(), lse.data());
  }
  FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
  const std::vector<double> want_out = out.download(), want_lse = lse.download();
  const std::vector<std::uint16_t> got_out = instance.out.download();
  const std::vector<float> got_lse = instance.lse.download();
  Errors errors;
  double difference = 0.0, norm = 0.0;
  for (std::int64_t row = 0; row < p.batch; ++row) {
    for (std::int64_t t = 0; t < p.seq_len_q; ++t) {
      for (std::int64_t h = 0; h < p.num_heads_q; ++h) {
        const std::int64_t query = (row * p.seq_len_q + t) * p.num_heads_q + h;
        double of_query_row[2] = {};
        for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
          const double got = to_float(got_out[instance.out_begin + row * p.out_batch_stride +
                                              t * p.out_token_stride + h * p.out_head_stride + c],
                                      p.dtype);
          const double want = want_out[query * p.head_dim_v + c];
          if (!std::isfinite(got)) errors.has_bad_values = true;
          of_query_row[0] += (got - want) * (got - want);
          of_query_row[1] += want * want;
        }
        difference += of_query_row[0];
        norm += of_query_row[1];
        if (of_query_row[1] > 0.0) {
          errors.worst_query_row =
              std::max(errors.worst_query_row, std::sqrt(of_query_row[0] / of_query_row[1]));
        }
        const std::int64_t place =
            kMargin + row * p.lse_batch_stride + h * p.lse_head_stride + t * p.lse_token_stride;
        const double want = want_lse[(row * p.num_heads_q + h) * p.seq_len_q + t];
        if (std::isinf(want) || !std::isfinite(got_lse[place])) {
          if (static_cast<double>(got_lse[place]) != want) errors.has_bad_values = true;
        } else {
          // Past 84 in magnitude float32 holds no such bound.
          const double unit = std::max(1.0, std::abs(want) * 0x1p-22 / 2e-5);
          errors.lse = std::max(errors.lse, std::abs(got_lse[place] - want) / unit);
        }
      }
    }
  }
  errors.out = norm > 0.0 ? std::sqrt(difference / norm) : std::sqrt(difference);
  return errors;
}

}  // namespace flashmla::cuda_test
