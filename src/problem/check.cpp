#include "problem/check.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string_view>

namespace flashmla::problem {
namespace {

std::string describe(const std::int64_t* values, std::int32_t count) {
  std::string text = "(";
  for (std::int32_t i = 0; i < count; ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + ")";
}

std::string describe_strides(const TensorView& tensor) {
  return describe(tensor.strides, tensor.rank);
}

// The name of a dtype; of a number that is none, the number.
std::string describe_dtype(DType dtype) {
  const std::string_view name = dtype_name(dtype);
  return name == dtype_name(DType{}) ? std::to_string(static_cast<std::int32_t>(dtype))
                                     : std::string(name);
}

bool is_empty(const TensorView& tensor) {
  return std::any_of(tensor.shape, tensor.shape + tensor.rank,
                     [](std::int64_t size) { return size == 0; });
}

// Memory from the first byte to one past the last.
struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;

  bool meets(const Range& other) const { return begin < other.end && other.begin < end; }
};

// The bytes that a tensor spans, without the dimensions whose steps are multiples of `modulus`.
std::uintptr_t span_of(const TensorView& tensor, std::int64_t modulus) {
  std::int64_t span = 1;
  for (std::int32_t i = 0; i < tensor.rank; ++i) {
    if (tensor.shape[i] == 1) continue;
    if (modulus != 0 && tensor.strides[i] * element_size(tensor.dtype) % modulus == 0) continue;
    span += (tensor.shape[i] - 1) * tensor.strides[i];
  }
  return static_cast<std::uintptr_t>(span * element_size(tensor.dtype));
}

// Nothing for a tensor that is empty or missing.
Range range_of(const TensorView& tensor) {
  if (tensor.rank == 0 || is_empty(tensor)) return {};
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.data);
  return {begin, begin + span_of(tensor, 0)};
}

// Whether two tensors use different bytes of every `modulus`: each stays within as many of them as
// it spans without the steps that are multiples.
bool are_apart_modulo(const TensorView& a, const TensorView& b, std::int64_t modulus) {
  const auto period = static_cast<std::uintptr_t>(modulus);
  const std::uintptr_t a_begin = reinterpret_cast<std::uintptr_t>(a.data) % period;
  const std::uintptr_t b_begin = reinterpret_cast<std::uintptr_t>(b.data) % period;
  const std::uintptr_t distance = (b_begin + period - a_begin) % period;
  return span_of(a, modulus) <= distance && span_of(b, modulus) <= period - distance;
}

// Whether some stride of either tells the two apart, though their ranges meet.
bool lie_in_gaps(const TensorView& a, const TensorView& b) {
  for (const TensorView* tensor : {&a, &b}) {
    for (std::int32_t i = 0; i < tensor->rank; ++i) {
      // Strides that are never stepped along may be any number.
      if (tensor->shape[i] <= 1) continue;
      const std::int64_t stride = tensor->strides[i] * element_size(tensor->dtype);
      if (stride > 0 && are_apart_modulo(a, b, stride)) return true;
    }
  }
  return false;
}

}  // namespace

std::string describe_shape(const TensorView& tensor) {
  return describe(tensor.shape, tensor.rank);
}

Status check_tensor(const Argument& argument, std::int32_t rank, const char* wanted) {
  const auto& [name, tensor] = argument;
  const auto refuse = [&](const std::string& what) {
    return Status::invalid_argument(std::string(argument.name) + what);
  };
  if (!tensor.given()) return refuse(std::string(" is missing; it must be ") + wanted);
  if (tensor.rank != rank) {
    return refuse(" has " + std::to_string(tensor.rank) + " dimensions; it must have " +
                  std::to_string(rank) + ": " + wanted);
  }
  for (std::int32_t i = 0; i < rank; ++i) {
    if (tensor.shape[i] < 0) {
      return refuse(" has shape " + describe_shape(tensor) + "; sizes must not be negative");
    }
    if (tensor.strides[i] < 0) {
      return refuse(" has strides " + describe_strides(tensor) + "; strides must not be negative");
    }
  }
  if (is_empty(tensor)) return {};
  // Elements from the first to one past the last.
  std::int64_t extent = 1;
  for (std::int32_t i = 0; i < rank; ++i) {
    std::int64_t step = 0;
    if (__builtin_mul_overflow(tensor.shape[i] - 1, tensor.strides[i], &step) ||
        __builtin_add_overflow(extent, step, &extent)) {
      return refuse(" with shape " + describe_shape(tensor) + " and strides " +
                    describe_strides(tensor) + " spans more memory than 64 bits address");
    }
  }
  std::int64_t bytes = 0;
  if (__builtin_mul_overflow(extent, element_size(tensor.dtype), &bytes)) {
    return refuse(" with shape " + describe_shape(tensor) + " and strides " +
                  describe_strides(tensor) + " spans more memory than 64 bits address");
  }
  if (tensor.data == nullptr) {
    return refuse(" has shape " + describe_shape(tensor) + " but its data pointer is null");
  }
  if (reinterpret_cast<std::uintptr_t>(tensor.data) %
          static_cast<std::uintptr_t>(element_size(tensor.dtype)) !=
      0) {
    return refuse(" is not aligned to its elements of " +
                  std::to_string(element_size(tensor.dtype)) + " bytes");
  }
  if (tensor.size_bytes != 0 && static_cast<std::uint64_t>(bytes) > tensor.size_bytes) {
    return refuse(" with shape " + describe_shape(tensor) + " and strides " +
                  describe_strides(tensor) + " spans " + std::to_string(bytes) +
                  " bytes; its memory holds " + std::to_string(tensor.size_bytes));
  }
  return {};
}

Status check_dtype(const Argument& argument, std::initializer_list<DType> accepted) {
  const auto& [name, tensor] = argument;
  if (!tensor.given()) return {};
  if (std::find(accepted.begin(), accepted.end(), tensor.dtype) != accepted.end()) return {};
  std::string text =
      std::string(name) + " has dtype " + describe_dtype(tensor.dtype) + "; it must be ";
  std::size_t index = 0;
  for (const DType dtype : accepted) {
    if (index > 0) text += index + 1 == accepted.size() ? " or " : ", ";
    text += dtype_name(dtype);
    ++index;
  }
  return Status::invalid_argument(text);
}

Status check_same_dtype(const Argument& argument, const Argument& model) {
  const auto& [name, tensor] = argument;
  if (!tensor.given() || tensor.dtype == model.tensor.dtype) return {};
  return Status::invalid_argument(std::string(name) + " has dtype " + describe_dtype(tensor.dtype) +
                                  "; it must be that of " + model.name + ", " +
                                  dtype_name(model.tensor.dtype));
}

Status check_shape(const Argument& argument, std::initializer_list<std::int64_t> wanted,
                   const char* meaning) {
  const auto& [name, tensor] = argument;
  std::int32_t index = 0;
  bool same = static_cast<std::int32_t>(wanted.size()) == tensor.rank;
  for (const std::int64_t size : wanted) {
    same = same && (size < 0 || tensor.shape[index] == size);
    ++index;
  }
  if (same) return {};
  std::string sizes = "(";
  index = 0;
  for (const std::int64_t size : wanted) {
    if (index++ > 0) sizes += ", ";
    sizes += size < 0 ? "any" : std::to_string(size);
  }
  return Status::invalid_argument(std::string(name) + " has shape " + describe_shape(tensor) +
                                  "; it must be " + meaning + " = " + sizes + ")");
}

Status check_last_stride(const Argument& argument) {
  const auto& [name, tensor] = argument;
  const std::int32_t last = tensor.rank - 1;
  if (tensor.shape[last] <= 1 || tensor.strides[last] == 1 || is_empty(tensor)) return {};
  return Status::invalid_argument(std::string(name) + " has strides " + describe_strides(tensor) +
                                  "; the last dimension must be contiguous (stride 1), the other "
                                  "strides are free");
}

Status check_contiguous(const Argument& argument) {
  const auto& [name, tensor] = argument;
  if (is_empty(tensor)) return {};
  std::int64_t stride = 1;
  for (std::int32_t i = tensor.rank - 1; i >= 0; --i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != stride) {
      return Status::invalid_argument(std::string(name) + " has strides " +
                                      describe_strides(tensor) + "; it must be contiguous");
    }
    stride *= tensor.shape[i];
  }
  return {};
}

Status check_no_overlap(const Argument& argument) {
  const auto& [name, tensor] = argument;
  if (is_empty(tensor)) return {};
  // From the smallest stride up, each dimension must step over all that the ones before it span.
  std::array<bool, kMaxRank> done{};
  std::int64_t span = 1;
  for (std::int32_t round = 0; round < tensor.rank; ++round) {
    std::int32_t next = -1;
    for (std::int32_t i = 0; i < tensor.rank; ++i) {
      if (!done[i] && (next < 0 || tensor.strides[i] < tensor.strides[next])) next = i;
    }
    done[next] = true;
    if (tensor.shape[next] == 1) continue;
    if (tensor.strides[next] < span) {
      return Status::invalid_argument(std::string(name) + " has shape " + describe_shape(tensor) +
                                      " and strides " + describe_strides(tensor) +
                                      "; it is written, so its elements must not share memory");
    }
    span += (tensor.shape[next] - 1) * tensor.strides[next];
  }
  return {};
}

Status check_apart(std::initializer_list<Argument> written, std::initializer_list<Argument> read) {
  const auto refuse = [](const Argument& a, const Argument& b) {
    return Status::invalid_argument(std::string(a.name) + " shares memory with " + b.name +
                                    "; what is written must lie apart from all else of the call");
  };
  for (auto a = written.begin(); a != written.end(); ++a) {
    const Range range = range_of(a->tensor);
    for (auto b = a + 1; b != written.end(); ++b) {
      if (range.meets(range_of(b->tensor)) && !lie_in_gaps(a->tensor, b->tensor)) {
        return refuse(*a, *b);
      }
    }
    for (const Argument& b : read) {
      if (range.meets(range_of(b.tensor)) && !lie_in_gaps(a->tensor, b.tensor)) {
        return refuse(*a, b);
      }
    }
  }
  return {};
}

Status check_int32(const char* name, std::int64_t value, std::int64_t least) {
  if (value >= least && value <= std::numeric_limits<std::int32_t>::max()) return {};
  return Status::invalid_argument(std::string(name) + " is " + std::to_string(value) +
                                  "; it must be between " + std::to_string(least) + " and " +
                                  std::to_string(std::numeric_limits<std::int32_t>::max()));
}

}  // namespace flashmla::problem
