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

// One box of a rank-5 tensor map out of shared memory, which fence_async_proxy() must have handed
// over; what lies outside the tensor is left out. One thread, which then waits until the copy
// engine has read the box.
__device__ __forceinline__ void store_box(const CUtensorMap& map, std::uint32_t source, int x0,
                                          int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
      "\n"
      "cp.async.bulk.commit_group;\n"
      "cp.async.bulk.wait_group.read 0;\n" ::"l"(reinterpret_cast<std::uint64_t>(&map)),
      "r"(source), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

// What this thread had the copy engine store is written.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// The line of an address into L2. Not a read: what it brings may be overwritten.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// A box into L2, as copy_box_once() would read it.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int x0, int x1, int x2, int x3,
                                             int x4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(
                   reinterpret_cast<std::uint64_t>(&map)),
               "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
               : "memory");
}

// Reads what another grid may be writing: past L1, so that no later read finds a stale line there.
__device__ __forceinline__ std::int32_t load_early(const std::int32_t* address) {
  std::int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// 16 bytes between blocks that run at the same time: a reader finds all of a store or nothing.
__device__ __forceinline__ uint4 load_whole_16(const void* address) {
  std::uint64_t low, high;
  asm volatile(
      "{\n"
      ".reg .b128 all;\n"
      "ld.relaxed.gpu.global.b128 all, [%2];\n"
      "mov.b128 {%0, %1}, all;\n"
      "}\n"
      : "=l"(low), "=l"(high)
      : "l"(address)
      : "memory");
  return {static_cast<std::uint32_t>(low), static_cast<std::uint32_t>(low >> 32),
          static_cast<std::uint32_t>(high), static_cast<std::uint32_t>(high >> 32)};
}
__device__ __forceinline__ void store_whole_16(void* address, uint4 v) {
  asm volatile(
      "{\n"
      ".reg .b128 all;\n"
      "mov.b128 all, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], all;\n"
      "}\n" ::"l"(address),
      "l"(v.x | static_cast<std::uint64_t>(v.y) << 32),
      "l"(v.z | static_cast<std::uint64_t>(v.w) << 32)
      : "memory");
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
