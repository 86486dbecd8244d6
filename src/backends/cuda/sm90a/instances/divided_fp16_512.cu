#include "backends/cuda/kernels.hpp"
#include "backends/cuda/sm90a/launch.cuh"
#include "backends/cuda/sm90a/narrow_kernel.cuh"
#include "tuning/divided.hpp"

namespace flashmla::cuda {

cudaError_t launch_divided_fp16_512(const DecodeParams& params, cudaStream_t stream) {
  using Traits = sm90a::NarrowTraits<__half, 512, tuning::kDividedRows>;
  return sm90a::launch<sm90a::narrow_kernel<Traits, sm90a::DividedPlace<Traits::kQueryRows>>>(
      params, Traits::kQueryRows,
      tuning::divided_parts(params.shape.num_parts, params.shape.query_rows), Traits::kThreads,
      sizeof(sm90a::NarrowShared<Traits>), stream);
}

}  // namespace flashmla::cuda
