// How much shared memory a kernel may have.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace flashmla::cuda {

// Raises the kernel's limit of shared memory, once a device, and asks for all of it: a kernel that
// wants another division between L1 and shared memory could not be resident beside this one.
template <auto kKernel>
cudaError_t allow_shared_memory(int bytes) {
  static std::atomic<std::uint64_t> done{0};
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::uint64_t bit = std::uint64_t{1} << (device % 64);
  if (device < 64 && (done.load(std::memory_order_acquire) & bit) != 0) return cudaSuccess;
  cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                 cudaSharedmemCarveoutMaxShared);
  }
  if (error == cudaSuccess) done.fetch_or(bit, std::memory_order_release);
  return error;
}

}  // namespace flashmla::cuda
