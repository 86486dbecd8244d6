// How a grid is launched that may begin while the one before it ends.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <type_traits>

namespace flashmla::cuda {

// The grid waits for the end of the one before (ptx::wait_for_previous_grid) before it reads or
// writes anything that a result comes of.
template <class... Parameters>
cudaError_t launch_overlapping(void (*kernel)(Parameters...), dim3 grid, int threads,
                               std::size_t shared_bytes, cudaStream_t stream,
                               const std::type_identity_t<Parameters>&... arguments) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace flashmla::cuda
