// Copies from global memory by the copy engine, and plain accesses of fixed width.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flashmla::cuda::ptx {

// One box of a rank-5 tensor map into shared memory; the bytes are counted on `barrier`. What lies
// outside the tensor is filled with zeros and not read.
__device__ __forceinline__ void copy_box(std::uint32_t destination, const CUtensorMap& map,
                                         std::uint32_t barrier, int x0, int x1, int x2, int x3,
                                         int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3),
      "r"(x4)
      : "memory");
}

// The same for what this call reads once: L2 lets go of it first, and keeps the code, the plan and
// the partial results.
__device__ __forceinline__ void copy_box_once(std::uint32_t destination, const CUtensorMap& map,
                                              std::uint32_t barrier, int x0, int x1, int x2, int x3,
                                              int x4) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], policy;\n"
      "}\n" ::"r"(destination),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3),
      "r"(x4)
      : "memory");
}

// The line of an address into L2. Not a read: what it brings may be overwritten.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared_16(std::uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

}  // namespace flashmla::cuda::ptx
