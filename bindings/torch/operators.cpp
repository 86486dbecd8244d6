// The PyTorch operators: tensors to the C ABI and back, schemas, registration. No logic of
// attention.
//
// A kernel here is registered for CPU; the C ABI takes the device from the tensors, so a GPU
// backend registers the same functions under its own key.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "flashmla/flashmla.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] void fail(const std::string& message) {
  throw std::runtime_error(message);
}

void check(flashmla_status status) {
  if (status != FLASHMLA_OK) fail(flashmla_last_error());
}

int32_t to_dtype(const char* name, ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return FLASHMLA_BFLOAT16;
    case ScalarType::Half:
      return FLASHMLA_FLOAT16;
    case ScalarType::Float:
      return FLASHMLA_FLOAT32;
    case ScalarType::Int:
      return FLASHMLA_INT32;
    default:
      fail(
          std::string(name) + " has dtype " + torch::headeronly::toString(type) +
          "; tensors of values must be bfloat16, float16 or float32, tensors of lengths, block ids "
          "and plans int32");
  }
}

// What Python's None is where an operator takes a tensor.
void check_given(const char* name, const Tensor& tensor) {
  if (!tensor.defined()) fail(std::string(name) + " is None; it must be a tensor");
}

// One device for all tensors of a call: that of the first.
class Device {
 public:
  Device(const char* name, const Tensor& tensor)
      : device_((check_given(name, tensor), tensor.device())) {}

  int32_t type() const { return device_.is_cuda() ? FLASHMLA_CUDA : FLASHMLA_CPU; }
  int32_t index() const { return device_.is_cuda() ? device_.index() : 0; }
  const torch::stable::Device& torch_device() const { return device_; }

  flashmla_tensor view(const char* name, const Tensor& tensor) const {
    check_given(name, tensor);
    if (tensor.device() != device_) {
      fail(std::string(name) +
           " is on another device than the first argument; all tensors of a "
           "call must be on one device");
    }
    flashmla_tensor view{};
    view.data = tensor.data_ptr();
    view.dtype = to_dtype(name, tensor.scalar_type());
    view.rank = static_cast<int32_t>(tensor.dim());
    // The library refuses a wrong rank before it reads a shape.
    const auto dims = std::min<int64_t>(tensor.dim(), FLASHMLA_MAX_RANK);
    const auto sizes = tensor.sizes();
    const auto strides = tensor.strides();
    for (int64_t i = 0; i < dims; ++i) {
      view.shape[i] = sizes[static_cast<size_t>(i)];
      view.strides[i] = strides[static_cast<size_t>(i)];
    }
    return view;
  }

 private:
  torch::stable::Device device_;
};

// The stream that torch works on for a GPU; null elsewhere. torch's CUDA library is loaded already
// wherever there is a CUDA tensor, so it is asked for by name and needs no linking.
void* current_stream(const Device& device) {
  if (device.type() != FLASHMLA_CUDA) return nullptr;
  using GetStream = int32_t (*)(int32_t device_index, void** stream);
  static const auto get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library == nullptr
               ? nullptr
               : reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (get_stream == nullptr || get_stream(device.index(), &stream) != 0) {
    fail("torch's CUDA library does not tell its current stream");
  }
  return stream;
}

// torch's own pool, so that a process has one set of threads.
flashmla_executor torch_executor() {
  flashmla_executor executor{};
  executor.struct_size = sizeof(executor);
  executor.num_threads = static_cast<int32_t>(torch::stable::get_num_threads());
  executor.parallel_for = [](void*, int64_t count, void (*body)(void*, int64_t), void* body_data) {
    torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t index = begin; index < end; ++index) body(body_data, index);
    });
  };
  return executor;
}

int64_t element_bytes(ScalarType type) {
  if (type == ScalarType::Byte) return 1;
  return type == ScalarType::BFloat16 || type == ScalarType::Half ? 2 : 4;
}

// The stable ABI tells neither why an allocation failed nor its size; nothing but want of memory
// can make one of these fail.
Tensor empty(const Device& device, std::initializer_list<int64_t> shape, ScalarType type) {
  try {
    return torch::stable::empty({shape.begin(), shape.size()}, type, std::nullopt,
                                device.torch_device());
  } catch (const std::exception&) {
    int64_t bytes = element_bytes(type);
    for (const int64_t size : shape) bytes *= size;
    fail("out of memory: " + std::to_string(bytes) + " bytes could not be allocated");
  }
}

// Rank and size checks come from the library; this only keeps the binding from reading past a
// shape.
int64_t size_or_zero(const Tensor& tensor, int64_t dim) {
  return dim < tensor.dim() ? tensor.size(dim) : 0;
}

struct DecodeArguments {
  const Tensor& q;
  const Tensor& k_cache;
  int64_t head_dim_v;
  const Tensor& cache_seqlens;
  const Tensor& block_table;
  std::optional<double> softmax_scale;
  bool causal;
  const Tensor& tile_scheduler_metadata;
  const Tensor& num_splits;
  const std::optional<Tensor>& visible_lens;
  int64_t kernel;  // line of flashmla_kernel_at to force; -1: the library chooses
};

void decode_into(const DecodeArguments& given, const Tensor& out, const Tensor& softmax_lse) {
  const Device device("q", given.q);
  flashmla_decode_args args{};
  args.struct_size = sizeof(args);
  args.device_type = device.type();
  args.device_index = device.index();
  args.stream = current_stream(device);
  args.q = device.view("q", given.q);
  args.k_cache = device.view("k_cache", given.k_cache);
  args.block_table = device.view("block_table", given.block_table);
  args.cache_seqlens = device.view("cache_seqlens", given.cache_seqlens);
  if (given.visible_lens) args.visible_lens = device.view("visible_lens", *given.visible_lens);
  args.tile_scheduler_metadata =
      device.view("tile_scheduler_metadata", given.tile_scheduler_metadata);
  args.num_splits = device.view("num_splits", given.num_splits);
  args.out = device.view("out", out);
  args.softmax_lse = device.view("softmax_lse", softmax_lse);
  args.head_dim_v = given.head_dim_v;
  args.has_softmax_scale = given.softmax_scale.has_value();
  args.softmax_scale = given.softmax_scale.value_or(0.0);
  args.causal = given.causal;
  if (given.kernel >= 0) {
    flashmla_kernel_info info{};
    info.struct_size = sizeof(info);
    check(flashmla_kernel_at(static_cast<int32_t>(std::min<int64_t>(given.kernel, INT32_MAX)),
                             &info));
    args.kernel = info.name;
  }

  const flashmla_executor executor = torch_executor();
  size_t bytes = 0;
  check(flashmla_decode_workspace_size(&args, executor.num_threads, &bytes));
  // torch's CPU allocator aligns to 64 bytes, which is what the library asks for.
  const Tensor workspace = empty(device, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  check(flashmla_decode(&args, bytes == 0 ? nullptr : workspace.data_ptr(), bytes, &executor));
}

std::tuple<Tensor, Tensor> decode_new(const DecodeArguments& given) {
  const Device device("q", given.q);
  // A head_dim_v below 0 is refused by the library, but a tensor of that size cannot be made.
  const int64_t head_dim_v = std::clamp<int64_t>(given.head_dim_v, 0, size_or_zero(given.q, 3));
  const int64_t batch = size_or_zero(given.q, 0), tokens = size_or_zero(given.q, 1),
                heads = size_or_zero(given.q, 2);
  Tensor out = empty(device, {batch, tokens, heads, head_dim_v}, given.q.scalar_type());
  Tensor softmax_lse = empty(device, {batch, heads, tokens}, ScalarType::Float);
  decode_into(given, out, softmax_lse);
  return {out, softmax_lse};
}

// --- Operators -----------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> fwd_kvcache_mla(const Tensor& q, const Tensor& k_cache,
                                           int64_t head_dim_v, const Tensor& cache_seqlens,
                                           const Tensor& block_table,
                                           std::optional<double> softmax_scale, bool causal,
                                           const Tensor& tile_scheduler_metadata,
                                           const Tensor& num_splits) {
  return decode_new({q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal,
                     tile_scheduler_metadata, num_splits, std::nullopt, -1});
}

std::tuple<Tensor, Tensor> decode(const Tensor& q, const Tensor& k_cache, int64_t head_dim_v,
                                  const Tensor& cache_seqlens, const Tensor& block_table,
                                  std::optional<double> softmax_scale, bool causal,
                                  const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                                  std::optional<Tensor> visible_lens, int64_t kernel) {
  return decode_new({q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal,
                     tile_scheduler_metadata, num_splits, visible_lens, kernel});
}

void decode_out(const Tensor& q, const Tensor& k_cache, int64_t head_dim_v,
                const Tensor& cache_seqlens, const Tensor& block_table,
                std::optional<double> softmax_scale, bool causal,
                const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                std::optional<Tensor> visible_lens, int64_t kernel, const Tensor& out,
                const Tensor& softmax_lse) {
  decode_into({q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal,
               tile_scheduler_metadata, num_splits, visible_lens, kernel},
              out, softmax_lse);
}

std::tuple<Tensor, Tensor> get_mla_metadata(const Tensor& cache_seqlens,
                                            int64_t num_heads_per_head_k, int64_t num_heads_k) {
  const Device device("cache_seqlens", cache_seqlens);
  int32_t num_parts = 0;
  check(flashmla_plan_num_parts(device.type(), device.index(), num_heads_per_head_k, num_heads_k,
                                static_cast<int32_t>(torch::stable::get_num_threads()),
                                &num_parts));
  Tensor metadata = empty(device, {num_parts, 8}, ScalarType::Int);
  Tensor num_splits = empty(device, {size_or_zero(cache_seqlens, 0) + 1}, ScalarType::Int);
  flashmla_plan_args args{};
  args.struct_size = sizeof(args);
  args.device_type = device.type();
  args.device_index = device.index();
  args.stream = current_stream(device);
  args.cache_seqlens = device.view("cache_seqlens", cache_seqlens);
  args.num_heads_per_head_k = num_heads_per_head_k;
  args.num_heads_k = num_heads_k;
  args.tile_scheduler_metadata = device.view("tile_scheduler_metadata", metadata);
  args.num_splits = device.view("num_splits", num_splits);
  check(flashmla_plan(&args));
  return {metadata, num_splits};
}

std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& outs, const Tensor& lses) {
  const Device device("outs", outs);
  const int64_t batch = size_or_zero(outs, 1), tokens = size_or_zero(outs, 2),
                heads = size_or_zero(outs, 3), head_dim_v = size_or_zero(outs, 4);
  Tensor out = empty(device, {batch, tokens, heads, head_dim_v}, outs.scalar_type());
  Tensor lse = empty(device, {batch, heads, tokens}, ScalarType::Float);
  flashmla_merge_args args{};
  args.struct_size = sizeof(args);
  args.device_type = device.type();
  args.device_index = device.index();
  args.stream = current_stream(device);
  args.outs = device.view("outs", outs);
  args.lses = device.view("lses", lses);
  args.out = device.view("out", out);
  args.lse = device.view("lse", lse);
  const flashmla_executor executor = torch_executor();
  check(flashmla_merge(&args, &executor));
  return {out, lse};
}

// --- Registration --------------------------------------------------------------------------------

constexpr const char* kDecodeSchema =
    "fwd_kvcache_mla(Tensor q, Tensor k_cache, int head_dim_v, Tensor cache_seqlens, "
    "Tensor block_table, float? softmax_scale, bool causal, Tensor tile_scheduler_metadata, "
    "Tensor num_splits) -> (Tensor, Tensor)";
constexpr const char* kPlanSchema =
    "get_mla_metadata(Tensor cache_seqlens, int num_heads_per_head_k, int num_heads_k) "
    "-> (Tensor, Tensor)";

using torch::stable::detail::StableLibrary;

StableLibrary& kernels(StableLibrary& library) {
  return library.impl("fwd_kvcache_mla", TORCH_BOX(&fwd_kvcache_mla))
      .impl("get_mla_metadata", TORCH_BOX(&get_mla_metadata));
}

}  // namespace

STABLE_TORCH_LIBRARY(flashmla, library) {
  // kernel_index, not kernel: torch's compiler passes defaults by name to a function that has its
  // own argument `kernel`.
  library.def(kDecodeSchema);
  library.def(kPlanSchema);
  library.def(
      "decode(Tensor q, Tensor k_cache, int head_dim_v, Tensor cache_seqlens, Tensor block_table, "
      "float? softmax_scale, bool causal, Tensor tile_scheduler_metadata, Tensor num_splits, "
      "Tensor? visible_lens, int kernel_index=-1) -> (Tensor, Tensor)");
  library.def(
      "decode_out(Tensor q, Tensor k_cache, int head_dim_v, Tensor cache_seqlens, "
      "Tensor block_table, float? softmax_scale, bool causal, Tensor tile_scheduler_metadata, "
      "Tensor num_splits, Tensor? visible_lens, int kernel_index, Tensor(a!) out, "
      "Tensor(b!) softmax_lse) -> ()");
  library.def("merge_attention_states(Tensor outs, Tensor lses) -> (Tensor, Tensor)");
}

static void all_kernels(StableLibrary& library) {
  kernels(library)
      .impl("decode", TORCH_BOX(&decode))
      .impl("decode_out", TORCH_BOX(&decode_out))
      .impl("merge_attention_states", TORCH_BOX(&merge_attention_states));
}

STABLE_TORCH_LIBRARY_IMPL(flashmla, CPU, library) {
  all_kernels(library);
}
STABLE_TORCH_LIBRARY_IMPL(flashmla, CUDA, library) {
  all_kernels(library);
}

// Registers the two original operators under the library name that vLLM uses, for the life of the
// process. The caller has defined that library: a definition that fails from here is written to
// standard error by some releases of torch, from Python it is an exception.
extern "C" FLASHMLA_API void flashmla_torch_register_vllm_names() {
  constexpr const char* kName = "_flashmla_C";
  using Kind = StableLibrary::Kind;
  static std::array<std::unique_ptr<StableLibrary>, 3> libraries;
  libraries[0] =
      std::make_unique<StableLibrary>(Kind::FRAGMENT, kName, nullptr, __FILE__, __LINE__);
  libraries[0]->def(kDecodeSchema).def(kPlanSchema);
  libraries[1] = std::make_unique<StableLibrary>(Kind::IMPL, kName, "CPU", __FILE__, __LINE__);
  kernels(*libraries[1]);
  libraries[2] = std::make_unique<StableLibrary>(Kind::IMPL, kName, "CUDA", __FILE__, __LINE__);
  kernels(*libraries[2]);
}
