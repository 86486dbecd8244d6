// Warp-wide loads and stores of 8 x 8 matrices of 2-byte elements, and wgmma's ordering.
#pragma once

#include <cstdint>

namespace flashmla::cuda::ptx {

// Four matrices; lanes 8i to 8i + 7 give the addresses of the rows of matrix i.
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], std::uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_address)
               : "memory");
}

__device__ __forceinline__ void store_matrices(std::uint32_t row_address, std::uint32_t r0,
                                               std::uint32_t r1, std::uint32_t r2,
                                               std::uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

// Each matrix is stored transposed: a lane's address takes a column of the fragment.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t row_address,
                                                          std::uint32_t r0, std::uint32_t r1,
                                                          std::uint32_t r2, std::uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Ties registers to this place in the program, so that the compiler reads accumulators only after
// the wait that stands before it and writes them only before the product that stands after it.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Says that what the registers hold is not needed, where a product is about to overwrite them: else
// the compiler would keep it alive up to there.
template <int kCount>
__device__ __forceinline__ void discard_registers(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(registers[i])::"memory");
}

// Hides where a value comes from. Descriptors derived from it are then computed where they are
// used; else the compiler computes all of them before a loop and keeps them, in local memory.
__device__ __forceinline__ std::uint32_t opaque(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// A value that all lanes share, as the compiler can see it: descriptors derived from it are
// computed in uniform registers, where wgmma reads them. It also keeps them from being computed
// before a loop and kept, in local memory.
__device__ __forceinline__ std::uint32_t uniform(std::uint32_t value) {
  return __shfl_sync(~0u, value, 0);
}

}  // namespace flashmla::cuda::ptx
