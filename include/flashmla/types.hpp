// The value types that every room shares: element type, device, strided tensor view.
#pragma once

#include <cstdint>

namespace flashmla {

// Values are pinned: they are the dtypes of the C ABI.
enum class DType : std::int32_t {
  kBFloat16 = 1,
  kFloat16 = 2,
  kFloat32 = 3,
  kInt32 = 4,
};

enum class DeviceType : std::int32_t {
  kCpu = 0,
  kCuda = 1,
};

struct Device {
  DeviceType type = DeviceType::kCpu;
  std::int32_t index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

inline constexpr int kMaxRank = 5;

// Borrowed memory seen as a strided array. Strides are in elements. A null `data` with rank 0 means
// "not given". `size_bytes` is how many bytes may be touched from `data` on; 0 means unknown, and
// then only the caller vouches for the extent.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kBFloat16;
  std::int32_t rank = 0;
  std::int64_t shape[kMaxRank] = {};
  std::int64_t strides[kMaxRank] = {};
  std::uint64_t size_bytes = 0;

  bool given() const { return rank != 0 || data != nullptr; }
};

constexpr std::int64_t element_size(DType dtype) {
  return dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 2 : 4;
}

constexpr const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat32:
      return "float32";
    case DType::kInt32:
      return "int32";
  }
  return "unknown dtype";
}

}  // namespace flashmla
