#include "backends/cpu/kernels.hpp"

#include <array>

namespace flashmla::cpu {
namespace {

constexpr std::array kKernels = {
#define FLASHMLA_CPU_KERNEL(identifier, name, instruction_set, required, preferred_with, dtype) \
  &identifier,
#include "backends/cpu/kernels.inc"
#undef FLASHMLA_CPU_KERNEL
};

}  // namespace

const DecodeKernel& decode_kernel(std::int32_t index) {
  return *kKernels[static_cast<std::size_t>(index)];
}

}  // namespace flashmla::cpu
