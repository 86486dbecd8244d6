// Declares every kernel of kernels.inc.
#pragma once

#include <cstdint>

#include "backends/cpu/kernel.hpp"

namespace flashmla::cpu {

#define FLASHMLA_CPU_KERNEL(identifier, name, instruction_set, required, preferred_with, dtype) \
  extern const DecodeKernel identifier;
#include "backends/cpu/kernels.inc"
#undef FLASHMLA_CPU_KERNEL

// The kernel in line `index` of kernels.inc (KernelRow::index).
const DecodeKernel& decode_kernel(std::int32_t index);

}  // namespace flashmla::cpu
