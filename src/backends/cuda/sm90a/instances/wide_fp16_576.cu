#include "backends/cuda/kernels.hpp"
#include "backends/cuda/sm90a/launch.cuh"
#include "backends/cuda/sm90a/wide_kernel.cuh"

namespace flashmla::cuda {

cudaError_t launch_wide_fp16_576(const DecodeParams& params, cudaStream_t stream) {
  using Traits = sm90a::WideTraits<__half, 576>;
  return sm90a::launch<sm90a::wide_kernel<Traits>>(params, Traits::kTileRows,
                                                   params.shape.num_parts, Traits::kThreads,
                                                   sizeof(sm90a::WideShared<Traits>), stream);
}

}  // namespace flashmla::cuda
