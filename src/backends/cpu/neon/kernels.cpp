#include "backends/cpu/kernels.hpp"
#include "backends/cpu/common/decode_loop.hpp"
#include "backends/cpu/neon/vector.hpp"

namespace flashmla::cpu {

const DecodeKernel kNeonBf16 = decode_loop_kernel<neon::Vector, BFloat16>();
const DecodeKernel kNeonFp16 = decode_loop_kernel<neon::Vector, Float16>();
const DecodeKernel kNeonFp32 = decode_loop_kernel<neon::Vector, float>();

}  // namespace flashmla::cpu
