// Which instruction sets this process may use: what the processor has, capped by FLASHMLA_ISA.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "flashmla/status.hpp"

namespace flashmla {

// A set of features: what kernels ask for, and of the flags beside those what tells processors
// apart in `flashmla info`. Not every CPUID flag.
using CpuFeatures = std::uint32_t;

namespace cpu_feature {
inline constexpr CpuFeatures kAvx2 = 1u << 0;        // AVX2, FMA, F16C
inline constexpr CpuFeatures kAvx512 = 1u << 1;      // F, BW, DQ, VL
inline constexpr CpuFeatures kAvx512Bf16 = 1u << 2;  // vdpbf16ps
inline constexpr CpuFeatures kAvx512Fp16 = 1u << 3;
inline constexpr CpuFeatures kAmxBf16 = 1u << 4;  // AMX-TILE, AMX-BF16, and the kernel's permission
inline constexpr CpuFeatures kAmxFp16 = 1u << 5;
inline constexpr CpuFeatures kNeon = 1u << 6;      // Armv8-A baseline
inline constexpr CpuFeatures kNeonBf16 = 1u << 7;  // bfdot, bfmmla
// vdpbf16ps, which does two products a lane, at the rate of an fp32 multiply-add or above. No flag
// of CPUID says so: it is true of AMD's processors, while Intel's run it at half that rate or less.
inline constexpr CpuFeatures kFastBf16Dot = 1u << 8;
}  // namespace cpu_feature

// What the processor and the operating system offer. Asks for the AMX tile permission on first use.
CpuFeatures detect_cpu_features();

// detect_cpu_features() limited to `cap`: "portable", "neon", "avx2", "avx512" or "amx"; an empty
// cap limits nothing. Any other word is an error that lists the accepted ones.
Result<CpuFeatures> cap_cpu_features(CpuFeatures features, std::string_view cap);

// The two together, with the cap read from the environment variable FLASHMLA_ISA at each call.
Result<CpuFeatures> usable_cpu_features();

// "AVX2 AVX512 ...", in the order of the bits; "none" for the empty set.
std::string describe_cpu_features(CpuFeatures features);

}  // namespace flashmla
