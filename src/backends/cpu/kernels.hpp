// Declares every kernel of kernels.inc and lists them in order of preference.
#pragma once

#include <span>

#include "backends/cpu/kernel.hpp"

namespace flashmla::cpu {

#define FLASHMLA_CPU_KERNEL(identifier, name, instruction_set, required, dtype) \
  extern const DecodeKernel identifier;
#include "backends/cpu/kernels.inc"
#undef FLASHMLA_CPU_KERNEL

// Kernels compiled into this library, best first.
std::span<const DecodeKernel* const> decode_kernels();

}  // namespace flashmla::cpu
