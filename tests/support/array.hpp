// Strided arrays whose memory ends at a page that faults, so that a read or write past the end
// stops the test at the instruction that did it.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include "flashmla/flashmla.h"
#include "support/elements.hpp"

namespace flashmla::testing {

using Sizes = std::vector<std::int64_t>;

// What no test value looks like: NaN in every float type, -1 as int32.
inline constexpr std::byte kPoison{0xff};
// What outputs hold before a call: an ordinary number in every type, and not what any test expects.
inline constexpr std::byte kUnwritten{0xab};

// `bytes` of memory followed by a page without access. Untouched pages cost no memory.
class GuardedMemory {
 public:
  explicit GuardedMemory(std::size_t bytes) : bytes_(bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    accessible_ = (bytes + page - 1) / page * page;
    mapped_ = accessible_ + page;
    void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) std::abort();
    base_ = static_cast<std::byte*>(base);
    if (mprotect(base_ + accessible_, page, PROT_NONE) != 0) std::abort();
  }
  GuardedMemory(GuardedMemory&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        bytes_(other.bytes_),
        accessible_(other.accessible_),
        mapped_(other.mapped_) {}
  GuardedMemory& operator=(GuardedMemory&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    std::swap(accessible_, other.accessible_);
    std::swap(mapped_, other.mapped_);
    return *this;
  }
  ~GuardedMemory() {
    if (base_ != nullptr) munmap(base_, mapped_);
  }

  std::byte* data() const { return base_ + accessible_ - bytes_; }
  std::size_t size() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t accessible_ = 0;
  std::size_t mapped_ = 0;
};

inline Sizes contiguous_strides(const Sizes& shape) {
  Sizes strides(shape.size(), 1);
  for (std::size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

class Array {
 public:
  // Every byte holds `fill`.
  Array(DType dtype, Sizes shape, std::byte fill = kPoison)
      : Array(dtype, shape, contiguous_strides(shape), fill) {}
  Array(DType dtype, Sizes shape, Sizes strides, std::byte fill = kPoison)
      : Array(Untouched{}, dtype, std::move(shape), std::move(strides)) {
    std::memset(memory_.data(), static_cast<int>(fill), memory_.size());
  }
  // Zero pages that are not touched until written: for caches larger than the machine's memory.
  static Array untouched(DType dtype, Sizes shape) {
    const Sizes strides = contiguous_strides(shape);
    return Array(Untouched{}, dtype, std::move(shape), strides);
  }

  DType dtype() const { return dtype_; }
  const Sizes& shape() const { return shape_; }
  const Sizes& strides() const { return strides_; }
  std::byte* bytes() const { return memory_.data(); }
  std::size_t size_bytes() const { return memory_.size(); }

  template <class... Index>
  std::byte* address(Index... index) const {
    std::size_t dimension = 0;
    std::int64_t offset = 0;
    ((offset += static_cast<std::int64_t>(index) * strides_[dimension++]), ...);
    return memory_.data() + offset * element_size(dtype_);
  }
  template <class... Index>
  double at(Index... index) const {
    return load_element(dtype_, address(index...));
  }
  template <class... Index>
  void set(double value, Index... index) {
    store_element(dtype_, address(index...), value);
  }

  flashmla_tensor tensor() const {
    flashmla_tensor result{};
    result.data = memory_.data();
    result.dtype = static_cast<std::int32_t>(dtype_);
    result.rank = static_cast<std::int32_t>(shape_.size());
    for (std::size_t i = 0; i < shape_.size(); ++i) {
      result.shape[i] = shape_[i];
      result.strides[i] = strides_[i];
    }
    result.size_bytes = memory_.size();
    return result;
  }

  // Calls visit(offset in bytes) for each element.
  void for_each_offset(const std::function<void(std::int64_t)>& visit) const {
    visit_from(0, 0, visit);
  }

  // All elements, in row-major order.
  std::vector<double> values() const {
    std::vector<double> result;
    for_each_offset([&](std::int64_t offset) {
      result.push_back(load_element(dtype_, memory_.data() + offset));
    });
    return result;
  }

  // Bytes between the elements of a strided array, and bytes of elements where `elements_too`, all
  // still hold `fill`.
  bool holds(std::byte fill, bool elements_too) const {
    std::vector<bool> covered(memory_.size(), false);
    if (!elements_too) {
      for_each_offset([&](std::int64_t offset) {
        for (std::int64_t i = 0; i < element_size(dtype_); ++i) covered[offset + i] = true;
      });
    }
    for (std::size_t i = 0; i < memory_.size(); ++i) {
      if (!covered[i] && memory_.data()[i] != fill) return false;
    }
    return true;
  }
  bool unwritten() const { return holds(kUnwritten, true); }
  bool gaps_unwritten() const { return holds(kUnwritten, false); }

  std::vector<std::byte> copy_bytes() const {
    return {memory_.data(), memory_.data() + memory_.size()};
  }
  void refill(std::byte fill) {
    std::memset(memory_.data(), static_cast<int>(fill), memory_.size());
  }

 private:
  struct Untouched {};
  Array(Untouched, DType dtype, Sizes shape, Sizes strides)
      : dtype_(dtype),
        shape_(std::move(shape)),
        strides_(std::move(strides)),
        memory_(extent_bytes()) {}

  std::size_t extent_bytes() const {
    std::int64_t extent = 1;
    for (std::size_t i = 0; i < shape_.size(); ++i) {
      if (shape_[i] == 0) return 0;
      extent += (shape_[i] - 1) * strides_[i];
    }
    return static_cast<std::size_t>(extent * element_size(dtype_));
  }
  void visit_from(std::size_t dimension, std::int64_t offset,
                  const std::function<void(std::int64_t)>& visit) const {
    if (dimension == shape_.size()) {
      visit(offset * element_size(dtype_));
      return;
    }
    for (std::int64_t i = 0; i < shape_[dimension]; ++i) {
      visit_from(dimension + 1, offset + i * strides_[dimension], visit);
    }
  }

  DType dtype_;
  Sizes shape_;
  Sizes strides_;
  GuardedMemory memory_;
};

inline Array int32_array(const Sizes& shape, const std::vector<std::int32_t>& values) {
  Array array(DType::kInt32, shape);
  // memcpy may not be given the null pointer of an empty vector.
  if (!values.empty()) {
    std::memcpy(array.bytes(), values.data(), values.size() * sizeof(std::int32_t));
  }
  return array;
}

}  // namespace flashmla::testing
