#include "backends/cpu/kernels.hpp"
#include "backends/cpu/avx2/vector.hpp"
#include "backends/cpu/common/decode_loop.hpp"

namespace flashmla::cpu {

const DecodeKernel kAvx2Bf16 = decode_loop_kernel<avx2::Vector, BFloat16>();
const DecodeKernel kAvx2Fp16 = decode_loop_kernel<avx2::Vector, Float16>();
const DecodeKernel kAvx2Fp32 = decode_loop_kernel<avx2::Vector, float>();

}  // namespace flashmla::cpu
