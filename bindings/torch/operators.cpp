// The PyTorch operators: tensors to the C ABI and back, schemas, registration. No logic of
// attention.
//
// The C ABI takes the device from the tensors, so the same functions are registered for CPU and for
// CUDA.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
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
#include <type_traits>
#include <utility>

#include "flashmla/flashmla.h"

namespace {

[[noreturn]] void fail(const std::string& message) {
  throw std::runtime_error(message);
}

void check(flashmla_status status) {
  if (status != FLASHMLA_OK) fail(flashmla_last_error());
}

// --- Tensors -------------------------------------------------------------------------------------

struct DeleteTensor {
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
// A reference to a tensor, ours to give back. torch::stable::Tensor is the same behind a shared
// pointer, an allocation for each argument of a call.
using Tensor = std::unique_ptr<AtenTensorOpaque, DeleteTensor>;

int64_t rank_of(const Tensor& tensor) {
  int64_t rank = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor.get(), &rank));
  return rank;
}

// Rank and size checks come from the library; this only keeps the binding from reading past a
// shape.
int64_t size_or_zero(const Tensor& tensor, int64_t dim) {
  if (dim >= rank_of(tensor)) return 0;
  int64_t* sizes = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
  return sizes[dim];
}

int32_t torch_dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// torch's numbers of the dtypes that a call may have, which only torch knows.
struct TorchDtypes {
  const int32_t bfloat16 = aoti_torch_dtype_bfloat16();
  const int32_t float16 = aoti_torch_dtype_float16();
  const int32_t float32 = aoti_torch_dtype_float32();
  const int32_t int32 = aoti_torch_dtype_int32();
};
const TorchDtypes& torch_dtypes() {
  static const TorchDtypes dtypes;
  return dtypes;
}

// What tensors of each kind may hold, for messages about dtypes that the library has no number for.
constexpr const char* kValues = "bfloat16, float16 or float32";
constexpr const char* kInts = "int32";  // lengths, block ids and plans
constexpr const char* kLogSums = "float32";

// Of a tensor that must be of q's dtype. No text is put together here: most calls need none.
const char* values_like_q(const flashmla_tensor& q) {
  switch (q.dtype) {
    case FLASHMLA_BFLOAT16:
      return "that of q, bfloat16";
    case FLASHMLA_FLOAT16:
      return "that of q, float16";
    case FLASHMLA_FLOAT32:
      return "that of q, float32";
    default:
      return kValues;  // q is refused as well
  }
}

std::string describe_dtype(int32_t torch_dtype) {
  using torch::headeronly::ScalarType;
  try {
    const auto type =
        torch::stable::detail::to<ScalarType>(torch::stable::detail::from(torch_dtype));
    return std::string("dtype ") + torch::headeronly::toString(type);
  } catch (const std::exception&) {  // one of few bits, or quantized
    return "a dtype that torch's C interface has no name for";
  }
}

int32_t dtype_of(const char* name, int32_t torch_dtype, const char* accepted) {
  const TorchDtypes& known = torch_dtypes();
  if (torch_dtype == known.bfloat16) return FLASHMLA_BFLOAT16;
  if (torch_dtype == known.float16) return FLASHMLA_FLOAT16;
  if (torch_dtype == known.float32) return FLASHMLA_FLOAT32;
  if (torch_dtype == known.int32) return FLASHMLA_INT32;
  fail(std::string(name) + " has " + describe_dtype(torch_dtype) + "; it must be " + accepted);
}

// torch's number of a dtype becomes the library's. A tensor that is not given has none.
void to_dtype(const char* name, flashmla_tensor& tensor, const char* accepted) {
  if (tensor.data == nullptr && tensor.rank == 0) return;
  tensor.dtype = dtype_of(name, tensor.dtype, accepted);
}

void to_dtypes(flashmla_plan_args& args) {
  to_dtype("cache_seqlens", args.cache_seqlens, kInts);
  to_dtype("tile_scheduler_metadata", args.tile_scheduler_metadata, kInts);
  to_dtype("num_splits", args.num_splits, kInts);
}

void to_dtypes(flashmla_decode_args& args) {
  to_dtype("q", args.q, kValues);
  to_dtype("k_cache", args.k_cache, values_like_q(args.q));
  to_dtype("block_table", args.block_table, kInts);
  to_dtype("cache_seqlens", args.cache_seqlens, kInts);
  to_dtype("visible_lens", args.visible_lens, kInts);
  to_dtype("tile_scheduler_metadata", args.tile_scheduler_metadata, kInts);
  to_dtype("num_splits", args.num_splits, kInts);
  to_dtype("out", args.out, values_like_q(args.q));
  to_dtype("softmax_lse", args.softmax_lse, kLogSums);
}

void to_dtypes(flashmla_merge_args& args) {
  to_dtype("outs", args.outs, kValues);
  to_dtype("lses", args.lses, kLogSums);
  to_dtype("out", args.out, kValues);
  to_dtype("lse", args.lse, kLogSums);
}

// What Python's None is where an operator takes a tensor.
void check_given(const char* name, const Tensor& tensor) {
  bool defined = false;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(tensor.get(), &defined));
  if (!defined) fail(std::string(name) + " is None; it must be a tensor");
}

// One device for all tensors of a call: that of the first.
class Device {
 public:
  Device(const char* name, const Tensor& tensor) {
    check_given(name, tensor);
    read(tensor, &torch_type_, &torch_index_);
  }

  int32_t type() const { return is_cuda() ? FLASHMLA_CUDA : FLASHMLA_CPU; }
  int32_t index() const { return is_cuda() ? torch_index_ : 0; }

  // With torch's number of the dtype, not yet the library's.
  flashmla_tensor view(const char* name, const Tensor& tensor) const {
    check_given(name, tensor);
    int32_t type = 0, index = 0;
    read(tensor, &type, &index);
    if (type != torch_type_ || index != torch_index_) {
      fail(std::string(name) +
           " is on another device than the first argument; all tensors of a "
           "call must be on one device");
    }
    flashmla_tensor view{};
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(tensor.get(), &view.data));
    view.dtype = torch_dtype_of(tensor);
    const int64_t rank = rank_of(tensor);
    view.rank = static_cast<int32_t>(rank);
    int64_t *sizes = nullptr, *strides = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor.get(), &sizes));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor.get(), &strides));
    // The library refuses a wrong rank before it reads a shape.
    const auto dims = std::min<int64_t>(rank, FLASHMLA_MAX_RANK);
    std::copy_n(sizes, dims, view.shape);
    std::copy_n(strides, dims, view.strides);
    return view;
  }

  // A new tensor of the device, contiguous. Neither the dispatcher nor its cost is met on the CPU.
  template <size_t kRank>
  Tensor empty(const int64_t (&shape)[kRank], int32_t torch_dtype) const {
    int64_t strides[kRank];
    int64_t count = 1;
    for (size_t i = kRank; i-- > 0;) {
      strides[i] = count;
      // What overflows is refused when it is allocated.
      if (__builtin_mul_overflow(count, std::max<int64_t>(1, shape[i]), &count)) count = INT64_MAX;
    }
    AtenTensorHandle made = nullptr;
    if (aoti_torch_empty_strided(kRank, shape, strides, torch_dtype, torch_type_, torch_index_,
                                 &made) != AOTI_TORCH_SUCCESS) {
      // Want of memory, or an error of the device that came to light here.
      std::string sizes;
      for (const int64_t size : shape) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
      fail("out of memory: a tensor of shape (" + sizes + ") could not be allocated");
    }
    return Tensor(made);
  }

 private:
  static void read(const Tensor& tensor, int32_t* type, int32_t* index) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), index));
  }
  bool is_cuda() const { return torch_type_ == aoti_torch_device_type_cuda(); }

  int32_t torch_type_ = 0;
  int32_t torch_index_ = 0;
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

// Memory of torch's allocator, once the library says how much a call needs.
struct Workspace {
  const Device& device;
  Tensor memory;

  // What flashmla_decode_args asks for. torch aligns to 64 bytes on the CPU and to 512 on a GPU.
  static void* allocate(void* context, size_t bytes) noexcept {
    auto& workspace = *static_cast<Workspace*>(context);
    try {
      workspace.memory =
          workspace.device.empty({static_cast<int64_t>(bytes)}, aoti_torch_dtype_uint8());
      void* data = nullptr;
      aoti_torch_get_data_ptr(workspace.memory.get(), &data);
      return data;
    } catch (const std::exception&) {
      return nullptr;  // the library's message says how much it asked for
    }
  }
};

// --- Calls ---------------------------------------------------------------------------------------

// What the structs of all calls have in common.
template <class Args>
Args args_on(const Device& device) {
  Args args{};
  args.struct_size = sizeof(args);
  args.device_type = device.type();
  args.device_index = device.index();
  args.stream = current_stream(device);
  return args;
}

// The kernel to force by its line of flashmla_kernel_at; null for -1: the library chooses.
const char* kernel_name(int64_t index) {
  if (index == -1) return nullptr;
  const int32_t kernels = flashmla_num_kernels();
  if (index < 0 || index >= kernels) {
    fail("kernel_index is " + std::to_string(index) +
         "; it must be -1, for the library's choice, or between 0 and " +
         std::to_string(kernels - 1));
  }
  flashmla_kernel_info info{};
  info.struct_size = sizeof(info);
  check(flashmla_kernel_at(static_cast<int32_t>(index), &info));
  return info.name;
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
  int64_t kernel;  // as kernel_name takes it
};

void decode_into(const DecodeArguments& given, const Tensor& out, const Tensor& softmax_lse) {
  const Device device("q", given.q);
  Workspace workspace{device, nullptr};
  auto args = args_on<flashmla_decode_args>(device);
  args.q = device.view("q", given.q);
  args.k_cache = device.view("k_cache", given.k_cache);
  args.block_table = device.view("block_table", given.block_table);
  args.cache_seqlens = device.view("cache_seqlens", given.cache_seqlens);
  if (given.visible_lens) {
    args.visible_lens = device.view("visible_lens", *given.visible_lens);
  }
  args.tile_scheduler_metadata =
      device.view("tile_scheduler_metadata", given.tile_scheduler_metadata);
  args.num_splits = device.view("num_splits", given.num_splits);
  args.out = device.view("out", out);
  args.softmax_lse = device.view("softmax_lse", softmax_lse);
  to_dtypes(args);
  args.head_dim_v = given.head_dim_v;
  args.has_softmax_scale = given.softmax_scale.has_value();
  args.softmax_scale = given.softmax_scale.value_or(0.0);
  args.causal = given.causal;
  args.kernel = kernel_name(given.kernel);
  args.allocate = Workspace::allocate;
  args.allocate_context = &workspace;

  const flashmla_executor executor = torch_executor();
  check(flashmla_decode(&args, nullptr, 0, &executor));
}

std::tuple<Tensor, Tensor> decode_new(const DecodeArguments& given) {
  const Device device("q", given.q);
  // A head_dim_v below 0 is refused by the library, but a tensor of that size cannot be made.
  const int64_t head_dim_v = std::clamp<int64_t>(given.head_dim_v, 0, size_or_zero(given.q, 3));
  const int64_t batch = size_or_zero(given.q, 0), tokens = size_or_zero(given.q, 1),
                heads = size_or_zero(given.q, 2);
  Tensor out = device.empty({batch, tokens, heads, head_dim_v}, torch_dtype_of(given.q));
  Tensor softmax_lse = device.empty({batch, heads, tokens}, torch_dtypes().float32);
  decode_into(given, out, softmax_lse);
  return {std::move(out), std::move(softmax_lse)};
}

// --- Operators -----------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> fwd_kvcache_mla(const Tensor& q, const Tensor& k_cache,
                                           int64_t head_dim_v, const Tensor& cache_seqlens,
                                           const Tensor& block_table,
                                           const std::optional<double>& softmax_scale, bool causal,
                                           const Tensor& tile_scheduler_metadata,
                                           const Tensor& num_splits) {
  return decode_new({q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal,
                     tile_scheduler_metadata, num_splits, std::nullopt, -1});
}

std::tuple<Tensor, Tensor> decode(const Tensor& q, const Tensor& k_cache, int64_t head_dim_v,
                                  const Tensor& cache_seqlens, const Tensor& block_table,
                                  const std::optional<double>& softmax_scale, bool causal,
                                  const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                                  const std::optional<Tensor>& visible_lens, int64_t kernel) {
  return decode_new({q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal,
                     tile_scheduler_metadata, num_splits, visible_lens, kernel});
}

std::tuple<> decode_out(const Tensor& q, const Tensor& k_cache, int64_t head_dim_v,
                        const Tensor& cache_seqlens, const Tensor& block_table,
                        const std::optional<double>& softmax_scale, bool causal,
                        const Tensor& tile_scheduler_metadata, const Tensor& num_splits,
                        const std::optional<Tensor>& visible_lens, int64_t kernel,
                        const Tensor& out, const Tensor& softmax_lse) {
  decode_into({q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal,
               tile_scheduler_metadata, num_splits, visible_lens, kernel},
              out, softmax_lse);
  return {};
}

std::tuple<Tensor, Tensor> get_mla_metadata(const Tensor& cache_seqlens,
                                            int64_t num_heads_per_head_k, int64_t num_heads_k) {
  const Device device("cache_seqlens", cache_seqlens);
  int32_t num_parts = 0;
  check(flashmla_plan_num_parts(device.type(), device.index(), num_heads_per_head_k, num_heads_k,
                                static_cast<int32_t>(torch::stable::get_num_threads()),
                                &num_parts));
  Tensor metadata = device.empty({num_parts, 8}, torch_dtypes().int32);
  Tensor num_splits = device.empty({size_or_zero(cache_seqlens, 0) + 1}, torch_dtypes().int32);
  auto args = args_on<flashmla_plan_args>(device);
  args.cache_seqlens = device.view("cache_seqlens", cache_seqlens);
  args.num_heads_per_head_k = num_heads_per_head_k;
  args.num_heads_k = num_heads_k;
  args.tile_scheduler_metadata = device.view("tile_scheduler_metadata", metadata);
  args.num_splits = device.view("num_splits", num_splits);
  to_dtypes(args);
  check(flashmla_plan(&args));
  return {std::move(metadata), std::move(num_splits)};
}

std::tuple<Tensor, Tensor> merge_attention_states(const Tensor& outs, const Tensor& lses) {
  const Device device("outs", outs);
  const int64_t batch = size_or_zero(outs, 1), tokens = size_or_zero(outs, 2),
                heads = size_or_zero(outs, 3), head_dim_v = size_or_zero(outs, 4);
  Tensor out = device.empty({batch, tokens, heads, head_dim_v}, torch_dtype_of(outs));
  Tensor lse = device.empty({batch, heads, tokens}, torch_dtypes().float32);
  auto args = args_on<flashmla_merge_args>(device);
  args.outs = device.view("outs", outs);
  args.lses = device.view("lses", lses);
  args.out = device.view("out", out);
  args.lse = device.view("lse", lse);
  to_dtypes(args);
  const flashmla_executor executor = torch_executor();
  check(flashmla_merge(&args, &executor));
  return {std::move(out), std::move(lse)};
}

// --- Boxing --------------------------------------------------------------------------------------

// An argument off the dispatcher's stack, which hands over what it refers to.
template <class T>
struct Unbox {
  static T from(StableIValue value) { return torch::stable::detail::to<T>(value); }
};
template <>
struct Unbox<Tensor> {
  static Tensor from(StableIValue value) {
    return Tensor(torch::stable::detail::to<AtenTensorHandle>(value));
  }
};
template <>
struct Unbox<std::optional<Tensor>> {
  static std::optional<Tensor> from(StableIValue value) {
    const auto handle = torch::stable::detail::to<std::optional<AtenTensorHandle>>(value);
    return handle ? std::optional<Tensor>(*handle) : std::nullopt;
  }
};

template <auto kFunction>
struct Boxed;
// An operator as the dispatcher calls it: arguments from the stack, results, all tensors, to it.
template <class... Results, class... Parameters, std::tuple<Results...> (*kFunction)(Parameters...)>
struct Boxed<kFunction> {
  static void call(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
    if (num_arguments != sizeof...(Parameters) || num_results != sizeof...(Results)) {
      fail("an operator of flashmla is registered with a schema of another length");
    }
    call(stack, std::index_sequence_for<Parameters...>(), std::index_sequence_for<Results...>());
  }

 private:
  template <size_t... kArgument, size_t... kResult>
  static void call(StableIValue* stack, std::index_sequence<kArgument...>,
                   std::index_sequence<kResult...>) {
    const std::tuple<std::remove_cvref_t<Parameters>...> arguments{
        Unbox<std::remove_cvref_t<Parameters>>::from(stack[kArgument])...};
    [[maybe_unused]] auto results = std::apply(kFunction, arguments);
    ((stack[kResult] = torch::stable::detail::from(std::get<kResult>(results).release())), ...);
  }
};

// --- Registration --------------------------------------------------------------------------------

constexpr const char* kDecodeSchema =
    "fwd_kvcache_mla(Tensor q, Tensor k_cache, int head_dim_v, Tensor cache_seqlens, "
    "Tensor block_table, float? softmax_scale, bool causal, Tensor tile_scheduler_metadata, "
    "Tensor num_splits) -> (Tensor, Tensor)";
// SymInt: the number of query tokens may be dynamic in an exported program.
constexpr const char* kPlanSchema =
    "get_mla_metadata(Tensor cache_seqlens, SymInt num_heads_per_head_k, int num_heads_k) "
    "-> (Tensor, Tensor)";

using torch::stable::detail::StableLibrary;

StableLibrary& kernels(StableLibrary& library) {
  return library.impl("fwd_kvcache_mla", Boxed<fwd_kvcache_mla>::call)
      .impl("get_mla_metadata", Boxed<get_mla_metadata>::call);
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
      .impl("decode", Boxed<decode>::call)
      .impl("decode_out", Boxed<decode_out>::call)
      .impl("merge_attention_states", Boxed<merge_attention_states>::call);
}

STABLE_TORCH_LIBRARY_IMPL(flashmla, CPU, library) {
  all_kernels(library);
}
STABLE_TORCH_LIBRARY_IMPL(flashmla, CUDA, library) {
  all_kernels(library);
}

static std::array<std::unique_ptr<StableLibrary>, 3>& vllm_libraries() {
  static std::array<std::unique_ptr<StableLibrary>, 3> libraries;
  return libraries;
}

// Whether the names below are registered: a package that is imported again asks.
extern "C" FLASHMLA_API int32_t flashmla_torch_has_vllm_names() {
  return vllm_libraries()[0] != nullptr;
}

// Registers the two original operators under the library name that vLLM uses, for the life of the
// process. The caller has defined that library: a definition that fails from here is written to
// standard error by some releases of torch, from Python it is an exception.
extern "C" FLASHMLA_API void flashmla_torch_register_vllm_names() {
  constexpr const char* kName = "_flashmla_C";
  using Kind = StableLibrary::Kind;
  auto& libraries = vllm_libraries();
  libraries[0] =
      std::make_unique<StableLibrary>(Kind::FRAGMENT, kName, nullptr, __FILE__, __LINE__);
  libraries[0]->def(kDecodeSchema).def(kPlanSchema);
  libraries[1] = std::make_unique<StableLibrary>(Kind::IMPL, kName, "CPU", __FILE__, __LINE__);
  kernels(*libraries[1]);
  libraries[2] = std::make_unique<StableLibrary>(Kind::IMPL, kName, "CUDA", __FILE__, __LINE__);
  kernels(*libraries[2]);
}

// --- Tensors without memory ----------------------------------------------------------------------

// What an operator would refuse of tensors that have no contents, in its own words; null: nothing.
// The dtypes of the tensors are torch's numbers. The text is valid until this thread's next call.
template <class Args>
static const char* refusal(const Args& given, flashmla_status (*judge)(const Args*),
                           int64_t kernel = -1) {
  static thread_local std::string message;
  try {
    if (given.struct_size != sizeof(Args)) fail("the package and its library differ in version");
    Args args = given;
    to_dtypes(args);
    if constexpr (std::is_same_v<Args, flashmla_decode_args>) args.kernel = kernel_name(kernel);
    check(judge(&args));
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

extern "C" FLASHMLA_API const char* flashmla_torch_plan_refusal(const flashmla_plan_args* args) {
  return refusal(*args, flashmla_check_plan);
}
extern "C" FLASHMLA_API const char* flashmla_torch_decode_refusal(const flashmla_decode_args* args,
                                                                  int64_t kernel) {
  return refusal(*args, flashmla_check_decode, kernel);
}
extern "C" FLASHMLA_API const char* flashmla_torch_merge_refusal(const flashmla_merge_args* args) {
  return refusal(*args, flashmla_check_merge);
}
