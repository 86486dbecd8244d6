// flashmla: multi-head latent attention (MLA) over a paged key/value cache, C++20 interface.
//
// A header over the C ABI of flashmla.h, whose conventions hold here too, with one difference:
// calls that fail throw flashmla::Error. Nothing was written to the caller's tensors then.
//
//     flashmla::Plan plan = flashmla::plan(cache_seqlens, heads, num_heads_k);   // once a step
//     flashmla::DecodeArguments arguments;
//     arguments.q = flashmla::view(q, {batch, seq_len_q, num_heads_q, head_dim});
//     ...
//     arguments.use(plan);
//     flashmla::Workspace workspace;                                             // kept for reuse
//     flashmla::decode(arguments, workspace);                                    // once a layer
#pragma once

#if __cplusplus < 202002L
#error "flashmla.hpp needs C++20 (-std=c++20); flashmla.h serves C and older C++"
#endif
#if !defined(__cpp_exceptions)
#error "flashmla.hpp throws, so it needs exceptions; flashmla.h needs none"
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <ranges>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "flashmla/flashmla.h"
#include "flashmla/status.hpp"
#include "flashmla/types.hpp"

namespace flashmla {

// What a failing call throws. what() names the argument, what it was and what is accepted.
class Error : public std::runtime_error {
 public:
  Error(StatusCode code, const std::string& message) : std::runtime_error(message), code_(code) {}

  StatusCode code() const noexcept { return code_; }

 private:
  StatusCode code_;
};

// --- Views of the caller's memory ----------------------------------------------------------------

using Shape = std::initializer_list<std::int64_t>;

// `size_bytes` of memory (0: unknown) as an array of the given dtype and shape. strides are in
// elements; without them the array is contiguous, row-major. Throws when the shape has more than
// kMaxRank dimensions, or another number of them than strides.
inline TensorView view(const void* data, DType dtype, Shape shape, Shape strides = {},
                       std::uint64_t size_bytes = 0) {
  if (shape.size() > static_cast<std::size_t>(kMaxRank)) {
    throw Error(StatusCode::kInvalidArgument,
                "the shape of a view has " + std::to_string(shape.size()) +
                    " dimensions; it may have at most " + std::to_string(kMaxRank));
  }
  if (strides.size() != 0 && strides.size() != shape.size()) {
    throw Error(StatusCode::kInvalidArgument,
                "a view has " + std::to_string(shape.size()) + " dimensions and " +
                    std::to_string(strides.size()) + " strides; there must be a stride for each");
  }
  TensorView result;
  // Whether a tensor is read or written is said by its argument, as in the C ABI.
  result.data = const_cast<void*>(data);
  result.dtype = dtype;
  result.rank = static_cast<std::int32_t>(shape.size());
  result.size_bytes = size_bytes;
  std::ranges::copy(shape, result.shape);
  if (strides.size() != 0) {
    std::ranges::copy(strides, result.strides);
    return result;
  }
  std::int64_t stride = 1;
  for (std::int32_t i = result.rank; i-- > 0;) {
    result.strides[i] = stride;
    if (__builtin_mul_overflow(stride, result.shape[i], &stride)) {
      throw Error(StatusCode::kInvalidArgument,
                  "the shape of a view has more elements than 64 bits count");
    }
  }
  return result;
}

// Elements side by side that stay where they are: a span, or a vector or array that is no
// temporary.
template <class Values>
concept Borrowed = std::ranges::contiguous_range<Values> && std::ranges::sized_range<Values> &&
    std::ranges::borrowed_range<Values>;
template <class Values>
concept BorrowedNumbers = Borrowed<Values> &&
    (std::is_same_v<std::ranges::range_value_t<Values>, float> ||
     std::is_same_v<std::ranges::range_value_t<Values>, std::int32_t>);

// A vector, array or span as a tensor. float and int32_t say their dtype; 16-bit elements need it:
// view(values, DType::kBFloat16, shape). The library refuses a call that would leave the memory of
// `values`, which must outlive the calls that use the view.
template <Borrowed Values>
TensorView view(Values&& values, DType dtype, Shape shape, Shape strides = {}) {
  const std::size_t size_bytes =
      std::ranges::size(values) * sizeof(std::ranges::range_value_t<Values>);
  const TensorView result = view(std::ranges::data(values), dtype, shape, strides, size_bytes);
  // No memory at all would read as memory of unknown size.
  if (size_bytes == 0 && std::find(shape.begin(), shape.end(), 0) == shape.end()) {
    throw Error(StatusCode::kInvalidArgument, "a view with elements is made of no values");
  }
  return result;
}

template <BorrowedNumbers Values>
TensorView view(Values&& values, Shape shape, Shape strides = {}) {
  constexpr bool kIsFloat = std::is_same_v<std::ranges::range_value_t<Values>, float>;
  return view(values, kIsFloat ? DType::kFloat32 : DType::kInt32, shape, strides);
}

// --- Threads -------------------------------------------------------------------------------------

// An executor over a callable (std::int64_t count, body), which must call body(i) once for each i
// in [0, count), at most num_threads at a time, and return when all have; body throws nothing. What
// the callable throws ends the call as flashmla_executor says. It must outlive the executor.
template <class ParallelFor>
flashmla_executor make_executor(const ParallelFor& parallel_for, std::int32_t num_threads) {
  flashmla_executor executor{};
  executor.struct_size = sizeof(executor);
  executor.context = const_cast<void*>(static_cast<const void*>(&parallel_for));
  executor.num_threads = num_threads;
  executor.parallel_for = [](void* context, std::int64_t count, void (*body)(void*, std::int64_t),
                             void* body_data) {
    (*static_cast<const ParallelFor*>(context))(
        count, [body, body_data](std::int64_t index) { body(body_data, index); });
  };
  return executor;
}
// A temporary would be gone before the executor is used.
template <class ParallelFor>
flashmla_executor make_executor(const ParallelFor&& parallel_for,
                                std::int32_t num_threads) = delete;

namespace detail {

inline void check(flashmla_status status) {
  if (status != FLASHMLA_OK) throw Error(static_cast<StatusCode>(status), flashmla_last_error());
}

inline flashmla_tensor to_c(const TensorView& view) {
  flashmla_tensor tensor{};
  tensor.data = view.data;
  tensor.dtype = static_cast<std::int32_t>(view.dtype);
  tensor.rank = view.rank;
  std::copy_n(view.shape, kMaxRank, tensor.shape);
  std::copy_n(view.strides, kMaxRank, tensor.strides);
  tensor.size_bytes = view.size_bytes;
  return tensor;
}

}  // namespace detail

// --- The plan ------------------------------------------------------------------------------------

// How the cached tokens of a batch are divided over the parts of a device; plain numbers in host
// memory (docs/scheduling.md), that may be read, copied and changed.
class Plan {
 public:
  // num_parts rows and batch + 1 numbers of splits, all zero: for plans made by hand. Throws when
  // one of the two is negative or batch is no int32.
  Plan(std::int32_t num_parts, std::int64_t batch)
      : rows_(size("num_parts", num_parts) * kFields), num_splits_(size("batch", batch) + 1) {}

  std::int32_t num_parts() const { return static_cast<std::int32_t>(rows_.size() / kFields); }
  std::int64_t batch() const { return static_cast<std::int64_t>(num_splits_.size()) - 1; }

  // The 8 fields of part `index`, which is in [0, num_parts()): begin_row, begin_block, end_row
  // (inclusive), end_block (exclusive), begin_split, 0, 0, 0.
  std::span<std::int32_t, 8> part(std::int32_t index) {
    return std::span<std::int32_t, 8>(rows_.data() + static_cast<std::size_t>(index) * kFields, 8);
  }
  std::span<const std::int32_t, 8> part(std::int32_t index) const {
    return std::span<const std::int32_t, 8>(
        rows_.data() + static_cast<std::size_t>(index) * kFields, 8);
  }
  std::span<std::int32_t> num_splits() { return num_splits_; }
  std::span<const std::int32_t> num_splits() const { return num_splits_; }

  // (num_parts, 8) int32 and (batch + 1) int32, borrowed from this plan.
  TensorView tile_scheduler_metadata_view() const {
    return view(rows_, {num_parts(), std::int64_t{kFields}});
  }
  TensorView num_splits_view() const { return view(num_splits_, {batch() + 1}); }

 private:
  static std::size_t size(const char* name, std::int64_t value) {
    if (value >= 0 && value <= INT32_MAX) return static_cast<std::size_t>(value);
    throw Error(StatusCode::kInvalidArgument, std::string(name) + " of a plan is " +
                                                  std::to_string(value) +
                                                  "; it must be between 0 and 2147483647");
  }

  static constexpr std::size_t kFields = 8;
  std::vector<std::int32_t> rows_;
  std::vector<std::int32_t> num_splits_;
};

// Plans a batch for the CPU. cache_seqlens: (batch) lengths in tokens, at least 0.
// num_heads_per_head_k is seq_len_q * num_heads_q / num_heads_k. num_threads is the number that
// will run the attention calls; 0: the OpenMP runtime's number. Throws Error.
inline Plan plan(std::span<const std::int32_t> cache_seqlens, std::int64_t num_heads_per_head_k,
                 std::int64_t num_heads_k, std::int32_t num_threads = 0) {
  std::int32_t num_parts = 0;
  detail::check(flashmla_plan_num_parts(FLASHMLA_CPU, 0, num_heads_per_head_k, num_heads_k,
                                        num_threads, &num_parts));
  const auto batch = static_cast<std::int64_t>(cache_seqlens.size());
  Plan result(num_parts, batch);
  flashmla_plan_args args{};
  args.struct_size = sizeof(args);
  args.cache_seqlens = detail::to_c(view(cache_seqlens, {batch}));
  args.num_heads_per_head_k = num_heads_per_head_k;
  args.num_heads_k = num_heads_k;
  args.tile_scheduler_metadata = detail::to_c(result.tile_scheduler_metadata_view());
  args.num_splits = detail::to_c(result.num_splits_view());
  detail::check(flashmla_plan(&args));
  return result;
}

// --- Attention -----------------------------------------------------------------------------------

// Of one attention call; flashmla_decode_args says what is computed of them.
struct DecodeArguments {
  Device device;
  TensorView q;              // (batch, seq_len_q, num_heads_q, head_dim) bf16, fp16; fp32: CPU
  TensorView k_cache;        // (num_blocks, page_block_size, num_heads_k, head_dim), as q
  TensorView block_table;    // (batch, max_num_blocks_per_seq) int32
  TensorView cache_seqlens;  // (batch) int32, in tokens
  TensorView visible_lens;   // optional (batch, seq_len_q) int32, in place of causal
  TensorView tile_scheduler_metadata;  // (num_sm_parts, 8) int32
  TensorView num_splits;               // (batch + 1) int32
  TensorView out;                      // written: (batch, seq_len_q, num_heads_q, head_dim_v), as q
  TensorView softmax_lse;  // written: (batch, num_heads_q, seq_len_q) float32, natural logarithm
  std::int64_t head_dim_v = 0;
  std::optional<double> softmax_scale;  // none: head_dim ** -0.5
  bool causal = false;                  // query t sees tokens j <= length - seq_len_q + t
  std::string kernel;                   // empty: the library chooses; else a name of kernels()
  void* stream = nullptr;               // CUDA stream; ignored on the CPU

  // Borrows a plan, which must outlive the call.
  void use(const Plan& plan) {
    tile_scheduler_metadata = plan.tile_scheduler_metadata_view();
    num_splits = plan.num_splits_view();
  }
  void use(const Plan&&) = delete;  // a temporary would be gone before the call
};

namespace detail {

// Borrows the name of the kernel.
inline flashmla_decode_args to_c(const DecodeArguments& arguments) {
  flashmla_decode_args args{};
  args.struct_size = sizeof(args);
  args.device_type = static_cast<std::int32_t>(arguments.device.type);
  args.device_index = arguments.device.index;
  args.q = to_c(arguments.q);
  args.k_cache = to_c(arguments.k_cache);
  args.block_table = to_c(arguments.block_table);
  args.cache_seqlens = to_c(arguments.cache_seqlens);
  args.visible_lens = to_c(arguments.visible_lens);
  // An absent tensor is all zero in C; a view that was not set still has a dtype.
  if (!arguments.visible_lens.given()) args.visible_lens = {};
  args.tile_scheduler_metadata = to_c(arguments.tile_scheduler_metadata);
  args.num_splits = to_c(arguments.num_splits);
  args.out = to_c(arguments.out);
  args.softmax_lse = to_c(arguments.softmax_lse);
  args.head_dim_v = arguments.head_dim_v;
  args.softmax_scale = arguments.softmax_scale.value_or(0.0);
  args.has_softmax_scale = arguments.softmax_scale.has_value() ? 1 : 0;
  args.causal = arguments.causal ? 1 : 0;
  args.kernel = arguments.kernel.empty() ? nullptr : arguments.kernel.c_str();
  args.stream = arguments.stream;
  return args;
}

}  // namespace detail

// Scratch memory of CPU calls: grows to what the largest call needed, and is freed at the end. One
// call at a time may use it.
class Workspace {
 public:
  static constexpr std::size_t kAlignment = 64;

  Workspace() = default;
  // What is moved from is empty, and may be used again.
  Workspace(Workspace&& other) noexcept
      : memory_(std::move(other.memory_)), bytes_(std::exchange(other.bytes_, 0)) {}
  Workspace& operator=(Workspace&& other) noexcept {
    memory_ = std::move(other.memory_);
    bytes_ = std::exchange(other.bytes_, 0);
    return *this;
  }

  // At least `bytes` of memory, aligned; what it held before is lost. Throws Error when there is no
  // memory.
  void* reserve(std::size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0;
      memory_.reset(static_cast<std::byte*>(
          ::operator new (bytes, std::align_val_t{kAlignment}, std::nothrow)));
      if (memory_ == nullptr) {
        throw Error(StatusCode::kOutOfMemory,
                    "out of memory: the workspace asked for " + std::to_string(bytes) + " bytes");
      }
      bytes_ = bytes;
    }
    return memory_.get();
  }
  std::size_t size_bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const {
      ::operator delete (memory, std::align_val_t{kAlignment});
    }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t bytes_ = 0;
};

// Bytes of workspace that decode needs. On the CPU it reads the plan; num_threads is that of the
// executor (0: the OpenMP runtime's number). Throws Error.
inline std::size_t decode_workspace_size(const DecodeArguments& arguments,
                                         std::int32_t num_threads = 0) {
  const flashmla_decode_args args = detail::to_c(arguments);
  std::size_t bytes = 0;
  detail::check(flashmla_decode_workspace_size(&args, num_threads, &bytes));
  return bytes;
}

// Computes attention into arguments.out and arguments.softmax_lse. executor null: OpenMP. Throws
// Error, and has written nothing then.
inline void decode(const DecodeArguments& arguments, void* workspace, std::size_t workspace_bytes,
                   const flashmla_executor* executor = nullptr) {
  const flashmla_decode_args args = detail::to_c(arguments);
  detail::check(flashmla_decode(&args, workspace, workspace_bytes, executor));
}

// The same with a workspace in host memory that grows as needed; for the CPU.
inline void decode(const DecodeArguments& arguments, Workspace& workspace,
                   const flashmla_executor* executor = nullptr) {
  if (arguments.device.type != DeviceType::kCpu) {
    throw Error(StatusCode::kInvalidArgument,
                "a Workspace is host memory; give a call on a GPU memory of its device");
  }
  flashmla_decode_args args = detail::to_c(arguments);
  args.allocate = [](void* memory, std::size_t bytes) -> void* {
    try {
      return static_cast<Workspace*>(memory)->reserve(bytes);
    } catch (const Error&) {
      return nullptr;  // the library says so, with the bytes
    }
  };
  args.allocate_context = &workspace;
  detail::check(flashmla_decode(&args, nullptr, 0, executor));
}

// --- Merge ---------------------------------------------------------------------------------------

// Of one merge; flashmla_merge says what is computed of them.
struct MergeArguments {
  Device device;
  TensorView outs;         // (parts, batch, seq_len_q, num_heads_q, head_dim_v) bf16, fp16 or fp32
  TensorView lses;         // (parts, batch, num_heads_q, seq_len_q) float32; +-inf: an empty part
  TensorView out;          // written: (batch, seq_len_q, num_heads_q, head_dim_v), as outs
  TensorView lse;          // written: (batch, num_heads_q, seq_len_q) float32
  void* stream = nullptr;  // CUDA stream; ignored on the CPU
};

// Merges attention over disjoint sets of tokens into attention over their union. Throws Error.
inline void merge(const MergeArguments& arguments, const flashmla_executor* executor = nullptr) {
  flashmla_merge_args args{};
  args.struct_size = sizeof(args);
  args.device_type = static_cast<std::int32_t>(arguments.device.type);
  args.device_index = arguments.device.index;
  args.outs = detail::to_c(arguments.outs);
  args.lses = detail::to_c(arguments.lses);
  args.out = detail::to_c(arguments.out);
  args.lse = detail::to_c(arguments.lse);
  args.stream = arguments.stream;
  detail::check(flashmla_merge(&args, executor));
}

// --- About the library ---------------------------------------------------------------------------

inline std::string version() {
  return flashmla_version();
}

// What this process may use on the CPU, such as "AVX2 AVX512 AVX512_BF16".
inline std::string cpu_features() {
  return flashmla_cpu_features();
}

struct KernelInfo {
  std::string name;
  std::string instruction_set;
  DeviceType device_type;
  DType dtype;  // of q and k_cache
  bool usable;  // on this machine
};

// Kernels compiled into the library, in order of preference.
inline std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> result;
  for (std::int32_t index = 0; index < flashmla_num_kernels(); ++index) {
    flashmla_kernel_info info{};
    info.struct_size = sizeof(info);
    detail::check(flashmla_kernel_at(index, &info));
    result.push_back({info.name, info.instruction_set, static_cast<DeviceType>(info.device_type),
                      static_cast<DType>(info.dtype), info.usable != 0});
  }
  return result;
}

struct Selection {
  std::string kernel;
  std::string report;  // "name: reason" lines for the kernels before it that decline
};

// The kernel that decode would use. Throws Error when there is none.
inline Selection explain_selection(const DecodeArguments& arguments) {
  const flashmla_decode_args args = detail::to_c(arguments);
  const char* kernel = nullptr;
  const char* report = nullptr;
  detail::check(flashmla_explain_selection(&args, &kernel, &report));
  return {kernel, report};
}

}  // namespace flashmla
