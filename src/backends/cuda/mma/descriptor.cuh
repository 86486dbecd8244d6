// Shared-memory operand descriptors of wgmma.
//
// Tiles of this backend are stacks of slices: a slice is rows x 64 elements of 2 bytes, 128 bytes a
// row, the eight 16-byte chunks of a row permuted by chunk ^= row % 8 (the 128-byte swizzle), and
// starts at a multiple of 1024 bytes.
#pragma once

#include <cstdint>

namespace flashmla::cuda::mma {

inline constexpr int kSliceElements = 64;  // columns of a slice
inline constexpr int kRowBytes = 128;      // of a slice
inline constexpr int kAtomBytes = 1024;    // eight rows of a slice

enum class Swizzle : std::uint64_t { kNone = 0, k128Bytes = 1 };

// leading_bytes and stride_bytes mean, for a swizzled operand contiguous along k: unused, and from
// one group of 8 rows to the next; contiguous along its rows (transposed): from one slice to the
// next, and from one group of 8 k to the next. For an operand that is not swizzled: from one 8 x 8
// core matrix to the next along k, and along the rows.
__device__ __forceinline__ std::uint64_t make_descriptor(std::uint32_t address,
                                                         std::uint32_t leading_bytes,
                                                         std::uint32_t stride_bytes,
                                                         Swizzle swizzle) {
  return static_cast<std::uint64_t>((address & 0x3FFFF) >> 4) |
         static_cast<std::uint64_t>(leading_bytes >> 4) << 16 |
         static_cast<std::uint64_t>(stride_bytes >> 4) << 32 |
         static_cast<std::uint64_t>(swizzle) << 62;
}

// The same operand `bytes` further.
__device__ __forceinline__ std::uint64_t advance(std::uint64_t descriptor, std::uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Rows of a slice, contiguous along k. One k-step of 16 elements is 32 bytes further.
__device__ __forceinline__ std::uint64_t rows_descriptor(std::uint32_t slice_address) {
  return make_descriptor(slice_address, 0, kAtomBytes, Swizzle::k128Bytes);
}

// Columns of a slice (its rows are k). One k-step of 16 rows is 2048 bytes further; the next 64
// columns lie in the next slice, slice_bytes on.
__device__ __forceinline__ std::uint64_t columns_descriptor(std::uint32_t slice_address,
                                                            std::uint32_t slice_bytes) {
  return make_descriptor(slice_address, slice_bytes, kAtomBytes, Swizzle::k128Bytes);
}

// Byte offset of 16-byte chunk `chunk` (0 to 7) of row `row` inside a slice.
__device__ __forceinline__ std::uint32_t chunk_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kRowBytes + ((chunk ^ (row & 7)) << 4));
}

}  // namespace flashmla::cuda::mma
