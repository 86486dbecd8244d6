// The C ABI: structs to requests, statuses to codes. No logic of its own.
#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <string>

#include "backends/cpu/executor.hpp"
#include "decode.hpp"
#include "flashmla/flashmla.h"
#include "problem/problem.hpp"
#include "select/cpu_features.hpp"
#include "select/select.hpp"

namespace {

using namespace flashmla;

static_assert(FLASHMLA_MAX_RANK == kMaxRank);

thread_local std::string last_error;
thread_local std::string last_text;  // other texts handed out

flashmla_status report(const Status& status) {
  last_error = status.message();
  return static_cast<flashmla_status>(status.code());
}

// What was thrown past the library's own statuses.
flashmla_status report_thrown(const char* what) noexcept {
  try {
    return report({StatusCode::kInternal, what});
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";  // short enough to need none
    return FLASHMLA_OUT_OF_MEMORY;
  }
}

// Runs a call that returns a Status; nothing may be thrown through the C boundary.
template <class Call>
flashmla_status guarded(const Call& call) noexcept {
  try {
    return report(call());
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
    return FLASHMLA_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    return report_thrown(error.what());
  } catch (...) {
    return report_thrown("something was thrown that is no std::exception");
  }
}

// More than any version's struct will have: what is larger was never set.
constexpr std::size_t kMostStructBytes = std::size_t{1} << 16;

// A caller's struct in this library's size: a shorter one (an older caller) is copied and the rest
// is zero, a longer one (a newer caller) must not use what this library does not know.
template <class Struct>
class ReadStruct {
 public:
  ReadStruct(const Struct* given, const char* name) : status_(read(given, name)) {}
  ReadStruct(const ReadStruct&) = delete;
  ReadStruct& operator=(const ReadStruct&) = delete;

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  const Struct& value() const { return *fields_; }  // only when ok()

 private:
  Status read(const Struct* given, const char* name);

  const Struct* fields_ = nullptr;
  std::optional<Struct> copy_;
  Status status_;
};

template <class Struct>
Status ReadStruct<Struct>::read(const Struct* given, const char* name) {
  if (given == nullptr) return Status::invalid_argument(std::string(name) + " is null");
  const std::size_t size = given->struct_size;
  if (size < sizeof(given->struct_size) || size > kMostStructBytes) {
    return Status::invalid_argument(std::string(name) + ".struct_size is " + std::to_string(size) +
                                    "; set it to sizeof(struct), " +
                                    std::to_string(sizeof(Struct)));
  }
  fields_ = given;
  if (size < sizeof(Struct)) {
    std::memcpy(&copy_.emplace(), given, size);
    fields_ = &*copy_;
  }
  const char* bytes = reinterpret_cast<const char*>(given);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      return Status::unsupported(std::string(name) +
                                 " uses fields that this version of flashmla does not know");
    }
  }
  return {};
}

TensorView to_view(const flashmla_tensor& tensor) {
  TensorView view;
  view.data = tensor.data;
  view.dtype = static_cast<DType>(tensor.dtype);
  view.rank = tensor.rank;
  std::copy_n(tensor.shape, kMaxRank, view.shape);
  std::copy_n(tensor.strides, kMaxRank, view.strides);
  view.size_bytes = tensor.size_bytes;
  return view;
}

Device to_device(std::int32_t type, std::int32_t index) {
  return {static_cast<DeviceType>(type), index};
}

DecodeRequest to_request(const flashmla_decode_args& args) {
  DecodeRequest request;
  request.device = to_device(args.device_type, args.device_index);
  request.q = to_view(args.q);
  request.k_cache = to_view(args.k_cache);
  request.block_table = to_view(args.block_table);
  request.cache_seqlens = to_view(args.cache_seqlens);
  request.visible_lens = to_view(args.visible_lens);
  request.tile_scheduler_metadata = to_view(args.tile_scheduler_metadata);
  request.num_splits = to_view(args.num_splits);
  request.out = to_view(args.out);
  request.softmax_lse = to_view(args.softmax_lse);
  request.head_dim_v = args.head_dim_v;
  request.has_softmax_scale = args.has_softmax_scale != 0;
  request.softmax_scale = args.softmax_scale;
  request.causal = args.causal != 0;
  if (args.kernel != nullptr) request.kernel = args.kernel;
  return request;
}

PlanRequest to_request(const flashmla_plan_args& args) {
  PlanRequest request;
  request.device = to_device(args.device_type, args.device_index);
  request.cache_seqlens = to_view(args.cache_seqlens);
  request.num_heads_per_head_k = args.num_heads_per_head_k;
  request.num_heads_k = args.num_heads_k;
  request.tile_scheduler_metadata = to_view(args.tile_scheduler_metadata);
  request.num_splits = to_view(args.num_splits);
  return request;
}

MergeRequest to_request(const flashmla_merge_args& args) {
  MergeRequest request;
  request.device = to_device(args.device_type, args.device_index);
  request.outs = to_view(args.outs);
  request.lses = to_view(args.lses);
  request.out = to_view(args.out);
  request.lse = to_view(args.lse);
  return request;
}

// The calls that judge and do no more.
template <class Args>
flashmla_status checked(const Args* given) {
  return guarded([&]() -> Status {
    const ReadStruct<Args> args(given, "args");
    return args.ok() ? check(to_request(args.value())) : args.status();
  });
}

Result<Execution> to_execution(const flashmla_executor* given, void* stream) {
  if (given == nullptr) return Execution{cpu::openmp_executor(), stream};
  const ReadStruct<flashmla_executor> executor(given, "executor");
  if (!executor.ok()) return executor.status();
  const flashmla_executor& fields = executor.value();
  if (fields.num_threads < 1) {
    return Status::invalid_argument("executor.num_threads is " +
                                    std::to_string(fields.num_threads) + "; it must be at least 1");
  }
  if (fields.parallel_for == nullptr) {
    return Status::invalid_argument("executor.parallel_for is null; it must be a function");
  }
  return Execution{{fields.context, fields.num_threads, fields.parallel_for}, stream};
}

std::int32_t threads_or_default(std::int32_t num_threads) {
  return num_threads > 0 ? num_threads : cpu::openmp_executor().num_threads;
}

}  // namespace

extern "C" {

flashmla_status flashmla_plan_num_parts(int32_t device_type, int32_t device_index,
                                        int64_t num_heads_per_head_k, int64_t num_heads_k,
                                        int32_t num_threads, int32_t* num_parts) {
  return guarded([&]() -> Status {
    if (num_parts == nullptr) return Status::invalid_argument("num_parts is null");
    const Result<std::int32_t> result =
        plan_num_parts(to_device(device_type, device_index), num_heads_per_head_k, num_heads_k,
                       threads_or_default(num_threads));
    if (!result.ok()) return result.status();
    *num_parts = result.value();
    return {};
  });
}

flashmla_status flashmla_plan(const flashmla_plan_args* given) {
  return guarded([&]() -> Status {
    const ReadStruct<flashmla_plan_args> args(given, "args");
    if (!args.ok()) return args.status();
    return plan(to_request(args.value()), Execution{{}, args.value().stream});
  });
}

flashmla_status flashmla_decode_workspace_size(const flashmla_decode_args* given,
                                               int32_t num_threads, size_t* workspace_bytes) {
  return guarded([&]() -> Status {
    if (workspace_bytes == nullptr) return Status::invalid_argument("workspace_bytes is null");
    const ReadStruct<flashmla_decode_args> args(given, "args");
    if (!args.ok()) return args.status();
    const Result<std::size_t> bytes =
        decode_workspace_size(to_request(args.value()), threads_or_default(num_threads));
    if (!bytes.ok()) return bytes.status();
    *workspace_bytes = bytes.value();
    return {};
  });
}

flashmla_status flashmla_decode(const flashmla_decode_args* given, void* workspace,
                                size_t workspace_bytes, const flashmla_executor* executor) {
  return guarded([&]() -> Status {
    const ReadStruct<flashmla_decode_args> args(given, "args");
    if (!args.ok()) return args.status();
    const Result<Execution> execution = to_execution(executor, args.value().stream);
    if (!execution.ok()) return execution.status();
    const WorkspaceSource source{static_cast<std::byte*>(workspace), workspace_bytes,
                                 args.value().allocate, args.value().allocate_context};
    return decode(to_request(args.value()), source, execution.value());
  });
}

flashmla_status flashmla_merge(const flashmla_merge_args* given,
                               const flashmla_executor* executor) {
  return guarded([&]() -> Status {
    const ReadStruct<flashmla_merge_args> args(given, "args");
    if (!args.ok()) return args.status();
    const Result<Execution> execution = to_execution(executor, args.value().stream);
    if (!execution.ok()) return execution.status();
    return merge(to_request(args.value()), execution.value());
  });
}

flashmla_status flashmla_check_plan(const flashmla_plan_args* args) {
  return checked(args);
}

flashmla_status flashmla_check_decode(const flashmla_decode_args* args) {
  return checked(args);
}

flashmla_status flashmla_check_merge(const flashmla_merge_args* args) {
  return checked(args);
}

const char* flashmla_last_error(void) {
  return last_error.c_str();
}

const char* flashmla_version(void) {
  return FLASHMLA_VERSION_STRING;
}

flashmla_status flashmla_device_supported(int32_t device_type, int32_t device_index) {
  return guarded([&] { return device_supported(to_device(device_type, device_index)); });
}

const char* flashmla_cpu_features(void) {
  try {
    const Result<CpuFeatures> features = usable_cpu_features();
    last_text =
        features.ok() ? describe_cpu_features(features.value()) : features.status().message();
    return last_text.c_str();
  } catch (const std::bad_alloc&) {
    return "";
  }
}

int32_t flashmla_num_kernels(void) {
  return static_cast<int32_t>(select::kernel_rows().size());
}

flashmla_status flashmla_kernel_at(int32_t index, flashmla_kernel_info* info) {
  return guarded([&]() -> Status {
    const auto rows = select::kernel_rows();
    if (index < 0 || static_cast<std::size_t>(index) >= rows.size()) {
      return Status::invalid_argument("index is " + std::to_string(index) +
                                      "; it must be between 0 and " +
                                      std::to_string(rows.size() - 1));
    }
    const ReadStruct<flashmla_kernel_info> given(info, "info");
    if (!given.ok()) return given.status();
    const Result<select::DeviceFacts> facts = facts_of({DeviceType::kCuda, 0});
    if (!facts.ok()) return facts.status();
    const select::KernelRow& row = rows[static_cast<std::size_t>(index)];
    flashmla_kernel_info filled = given.value();
    filled.name = row.name.data();
    filled.instruction_set = row.instruction_set;
    filled.device_type = static_cast<int32_t>(row.device);
    filled.dtype = static_cast<int32_t>(row.dtype);
    filled.usable = select::is_usable(row, facts.value());
    std::memcpy(info, &filled, std::min(info->struct_size, sizeof(filled)));
    return {};
  });
}

flashmla_status flashmla_explain_selection(const flashmla_decode_args* given, const char** kernel,
                                           const char** report_text) {
  return guarded([&]() -> Status {
    if (kernel == nullptr) return Status::invalid_argument("kernel is null");
    if (report_text == nullptr) return Status::invalid_argument("report is null");
    const ReadStruct<flashmla_decode_args> args(given, "args");
    if (!args.ok()) return args.status();
    const DecodeRequest request = to_request(args.value());
    const Result<Problem> problem = validate(request);
    if (!problem.ok()) return problem.status();
    const Result<select::DeviceFacts> facts = facts_of(request.device);
    if (!facts.ok()) return facts.status();
    const Result<const select::KernelRow*> row =
        select::select_kernel(problem.value(), facts.value(), request.kernel);
    if (!row.ok()) return row.status();
    last_text = select::explain(problem.value(), facts.value(), row.value());
    *kernel = row.value()->name.data();
    *report_text = last_text.c_str();
    return {};
  });
}

}  // extern "C"
