#include "backends/cuda/kernels.hpp"
#include "backends/cuda/sm90a/launch.cuh"
#include "backends/cuda/sm90a/narrow_kernel.cuh"

namespace flashmla::cuda {

cudaError_t launch_narrow16_fp16_576(const DecodeParams& params, cudaStream_t stream) {
  using Traits = sm90a::NarrowTraits<__half, 576, 16>;
  return sm90a::launch<sm90a::narrow_kernel<Traits, sm90a::UndividedPlace>>(
      params, Traits::kQueryRows, params.shape.num_parts, Traits::kThreads,
      sizeof(sm90a::NarrowShared<Traits>), stream);
}

}  // namespace flashmla::cuda
