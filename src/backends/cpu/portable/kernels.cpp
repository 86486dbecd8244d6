#include "backends/cpu/kernels.hpp"
#include "backends/cpu/common/decode_loop.hpp"
#include "backends/cpu/portable/vector.hpp"

namespace flashmla::cpu {

const DecodeKernel kPortableBf16 = decode_loop_kernel<portable::Vector, BFloat16>();
const DecodeKernel kPortableFp16 = decode_loop_kernel<portable::Vector, Float16>();
const DecodeKernel kPortableFp32 = decode_loop_kernel<portable::Vector, float>();

}  // namespace flashmla::cpu
