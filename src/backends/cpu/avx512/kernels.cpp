#include "backends/cpu/kernels.hpp"
#include "backends/cpu/avx512/vector.hpp"
#include "backends/cpu/common/decode_loop.hpp"

namespace flashmla::cpu {

const DecodeKernel kAvx512Bf16 = decode_loop_kernel<avx512::Vector, BFloat16>();
const DecodeKernel kAvx512Fp16 = decode_loop_kernel<avx512::Vector, Float16>();
const DecodeKernel kAvx512Fp32 = decode_loop_kernel<avx512::Vector, float>();

}  // namespace flashmla::cpu
