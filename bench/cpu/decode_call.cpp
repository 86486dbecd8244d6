#include "decode_call.hpp"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>

#include <omp.h>

namespace flashmla::bench {
namespace {

// Several times what a last-level cache keeps between two visits of a page.
constexpr std::size_t kPoolBytes = std::size_t{3} << 29;
constexpr double kBurstMicroseconds = 50;

flashmla_tensor tensor(void* data, std::int32_t dtype, std::vector<std::int64_t> shape) {
  flashmla_tensor result{};
  result.data = data;
  result.dtype = dtype;
  result.rank = static_cast<std::int32_t>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0; stride *= shape[i]) {
    result.shape[i] = shape[i];
    result.strides[i] = stride;
  }
  return result;
}

void check(flashmla_status status) {
  if (status == FLASHMLA_OK) return;
  std::fprintf(stderr, "%s\n", flashmla_last_error());
  std::exit(1);
}

// "1,4096,16,1": BATCH,LENGTH,HEADS,SEQ_LEN_Q, each at least 1.
std::optional<Shape> parse_shape(const char* word) {
  Shape shape{};
  if (std::sscanf(word, "%d,%d,%d,%d", &shape.batch, &shape.length, &shape.heads,
                  &shape.seq_len_q) != 4 ||
      std::min({shape.batch, shape.length, shape.heads, shape.seq_len_q}) < 1) {
    return std::nullopt;
  }
  return shape;
}

// "1,2" and the like, each at least 1; empty where it is something else.
std::vector<int> parse_counts(const char* word) {
  std::vector<int> counts;
  for (char* end = nullptr;; word = end + 1) {
    const long count = std::strtol(word, &end, 10);
    if (end == word || count < 1 || count > 4096) return {};
    counts.push_back(static_cast<int>(count));
    if (*end == '\0') return counts;
    if (*end != ',') return {};
  }
}

}  // namespace

int parse_count(const char* word) {
  const std::vector<int> counts = parse_counts(word);
  return counts.size() == 1 ? counts[0] : 0;
}

Options parse_options(int count, char** words, const char* usage, const OtherOption& other) {
  Options options;
  for (int i = 1; i < count;) {
    const std::string word = words[i];
    const char* value = i + 1 < count ? words[i + 1] : nullptr;
    int taken = 2;
    if (word == "--threads" && value != nullptr) {
      options.num_threads = parse_counts(value);
      if (options.num_threads.empty()) taken = 0;
    } else if (word == "--calls" && value != nullptr) {
      options.calls = parse_count(value);
      if (options.calls == 0) taken = 0;
    } else if (const std::optional<Shape> shape = parse_shape(words[i])) {
      options.shapes.push_back(*shape);
      taken = 1;
    } else {
      taken = other(word, value);
    }
    if (taken == 0) {
      std::fprintf(stderr, "%s: expected %s\n", words[i], usage);
      std::exit(2);
    }
    i += taken;
  }
  return options;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

void use_threads(int num_threads) {
  // Threads inherit the binding of the one that starts them.
  static const cpu_set_t allowed = [] {
    cpu_set_t set;
    CPU_ZERO(&set);
    sched_getaffinity(0, sizeof(set), &set);
    return set;
  }();
  omp_set_num_threads(num_threads);
  if (num_threads > CPU_COUNT(&allowed)) return;
#pragma omp parallel num_threads(num_threads)
  {
    int processor = 0;
    for (int left = omp_get_thread_num(); !CPU_ISSET(processor, &allowed) || left-- > 0;) {
      ++processor;
    }
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(processor, &own);
    sched_setaffinity(0, sizeof(own), &own);
  }
}

double burst(int num_threads) {
  return has_amx_bf16() ? amx_bf16_rate(num_threads, kBurstMicroseconds)
         : has_avx512() ? avx512_fma_rate(num_threads, kBurstMicroseconds)
                        : avx2_fma_rate(num_threads, kBurstMicroseconds);
}

PagePool::PagePool() : order_(kPoolBytes / kPageBytes) {
  void* base =
      mmap(nullptr, kPoolBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) std::abort();
  madvise(base, kPoolBytes, MADV_HUGEPAGE);
  base_ = static_cast<std::byte*>(base);
  // bf16 values in (-2, -1] and [1, 2): the exponent fixed, sign and fraction random.
  auto* words = reinterpret_cast<std::uint64_t*>(base_);
  std::uint64_t state = 1;
  for (std::size_t i = 0; i < kPoolBytes / sizeof(std::uint64_t); ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    words[i] = (state & 0x807f807f807f807fu) | 0x3f803f803f803f80u;
  }
  std::iota(order_.begin(), order_.end(), 0);
  std::shuffle(order_.begin(), order_.end(), std::mt19937(1));
}

PagePool::~PagePool() {
  munmap(base_, kPoolBytes);
}

std::int32_t PagePool::next() {
  if (next_ == order_.size()) next_ = 0;
  return order_[next_++];
}

Call::Call(const Shape& shape, PagePool& pool, int num_threads, int num_parts,
           const std::string& kernel)
    : shape_(shape),
      pool_(pool),
      num_threads_(num_threads),
      q_(std::size_t(shape.batch) * shape.seq_len_q * shape.heads * kHeadDim),
      out_(std::size_t(shape.batch) * shape.seq_len_q * shape.heads * kHeadDimV),
      lse_(std::size_t(shape.batch) * shape.seq_len_q * shape.heads),
      table_(static_cast<std::size_t>(shape.pages())),
      lengths_(static_cast<std::size_t>(shape.batch), shape.length),
      num_splits_(static_cast<std::size_t>(shape.batch) + 1) {
  if (num_parts == 0) {
    check(flashmla_plan_num_parts(FLASHMLA_CPU, 0, std::int64_t{shape.seq_len_q} * shape.heads, 1,
                                  num_threads, &num_parts));
  }
  plan_rows_.resize(static_cast<std::size_t>(num_parts) * 8);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (std::uint16_t& element : q_) {
    const float value = normal(random);
    std::uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    element = static_cast<std::uint16_t>(bits >> 16);
  }
  args_.struct_size = sizeof(args_);
  args_.q =
      tensor(q_.data(), FLASHMLA_BFLOAT16, {shape.batch, shape.seq_len_q, shape.heads, kHeadDim});
  args_.k_cache = tensor(pool.base(), FLASHMLA_BFLOAT16, {pool.size(), kPageSize, 1, kHeadDim});
  args_.block_table =
      tensor(table_.data(), FLASHMLA_INT32, {shape.batch, shape.pages() / shape.batch});
  args_.cache_seqlens = tensor(lengths_.data(), FLASHMLA_INT32, {shape.batch});
  args_.tile_scheduler_metadata = tensor(plan_rows_.data(), FLASHMLA_INT32, {num_parts, 8});
  args_.num_splits = tensor(num_splits_.data(), FLASHMLA_INT32, {shape.batch + 1});
  args_.out = tensor(out_.data(), FLASHMLA_BFLOAT16,
                     {shape.batch, shape.seq_len_q, shape.heads, kHeadDimV});
  args_.softmax_lse =
      tensor(lse_.data(), FLASHMLA_FLOAT32, {shape.batch, shape.heads, shape.seq_len_q});
  args_.head_dim_v = kHeadDimV;
  if (!kernel.empty()) args_.kernel = kernel.c_str();

  flashmla_plan_args plan{};
  plan.struct_size = sizeof(plan);
  plan.cache_seqlens = args_.cache_seqlens;
  plan.num_heads_per_head_k = std::int64_t{shape.seq_len_q} * shape.heads;
  plan.num_heads_k = 1;
  plan.tile_scheduler_metadata = args_.tile_scheduler_metadata;
  plan.num_splits = args_.num_splits;
  check(flashmla_plan(&plan));
  take_pages();
  check(flashmla_decode_workspace_size(&args_, num_threads, &workspace_bytes_));
  workspace_.reset(
      static_cast<std::byte*>(std::aligned_alloc(64, (workspace_bytes_ + 63) / 64 * 64)));
  std::memset(workspace_.get(), 0, workspace_bytes_);
}

void Call::take_pages() {
  for (std::int32_t& id : table_) id = pool_.next();
}

double Call::time(const flashmla_executor* executor) {
  const double begin = now_seconds();
  check(flashmla_decode(&args_, workspace_.get(), workspace_bytes_, executor));
  return now_seconds() - begin;
}

double Call::read_rate_of_other_pages() {
  std::vector<const std::byte*> runs;
  for (std::int64_t i = 0; i < shape_.pages(); ++i) runs.push_back(pool_.page(pool_.next()));
  return read_rate(num_threads_, runs, kPageBytes);
}

}  // namespace flashmla::bench
