#include "select/cpu_features.hpp"

#include <array>
#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace flashmla {
namespace {

using namespace cpu_feature;

struct NamedFeature {
  CpuFeatures feature;
  const char* name;
};
constexpr std::array kNames = {
    NamedFeature{kAvx2, "AVX2"},
    NamedFeature{kAvx512, "AVX512"},
    NamedFeature{kAvx512Bf16, "AVX512_BF16"},
    NamedFeature{kAvx512Fp16, "AVX512_FP16"},
    NamedFeature{kAmxBf16, "AMX_BF16"},
    NamedFeature{kAmxFp16, "AMX_FP16"},
    NamedFeature{kNeon, "NEON"},
    NamedFeature{kNeonBf16, "NEON_BF16"},
    NamedFeature{kFastBf16Dot, "FAST_BF16_DOT"},
};

// Caps nest within one architecture: each allows what the ones before it do.
struct Cap {
  std::string_view word;
  CpuFeatures allowed;
};
constexpr CpuFeatures kUpToAvx512 = kAvx2 | kAvx512 | kAvx512Bf16 | kAvx512Fp16 | kFastBf16Dot;
constexpr std::array kCaps = {
    Cap{"portable", 0},
    Cap{"neon", kNeon | kNeonBf16},
    Cap{"avx2", kAvx2},
    Cap{"avx512", kUpToAvx512},
    Cap{"amx", kUpToAvx512 | kAmxBf16 | kAmxFp16},
};

#if defined(__x86_64__)

struct CpuidLeaf {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf cpuid(unsigned leaf, unsigned subleaf) {
  CpuidLeaf result;
  __get_cpuid_count(leaf, subleaf, &result.eax, &result.ebx, &result.ecx, &result.edx);
  return result;
}

bool bit(unsigned word, int index) {
  return (word >> index & 1u) != 0;
}

bool is_amd() {
  const CpuidLeaf vendor = cpuid(0, 0);
  return vendor.ebx == signature_AMD_ebx && vendor.ecx == signature_AMD_ecx &&
         vendor.edx == signature_AMD_edx;
}

// Which register files the operating system saves (XCR0).
unsigned enabled_state() {
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// Linux hands out the 8 KiB of tile state only to processes that ask. The permission holds for
// every thread of the process.
bool request_amx_permission() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

CpuFeatures detect() {
  const CpuidLeaf basic = cpuid(1, 0);
  if (!bit(basic.ecx, 27)) return 0;  // OSXSAVE
  const unsigned state = enabled_state();
  const CpuidLeaf extended = cpuid(7, 0);
  const CpuidLeaf extended_1 = cpuid(7, 1);

  CpuFeatures features = 0;
  const bool avx_state = (state & 0x6u) == 0x6u;
  const bool fma = bit(basic.ecx, 12), f16c = bit(basic.ecx, 29);
  if (avx_state && fma && f16c && bit(extended.ebx, 5)) features |= kAvx2;

  const bool avx512_state = (state & 0xe6u) == 0xe6u;
  const bool f = bit(extended.ebx, 16), dq = bit(extended.ebx, 17), bw = bit(extended.ebx, 30),
             vl = bit(extended.ebx, 31);
  if (avx512_state && (features & kAvx2) != 0 && f && dq && bw && vl) {
    features |= kAvx512;
    if (bit(extended_1.eax, 5)) {
      features |= kAvx512Bf16;
      if (is_amd()) features |= kFastBf16Dot;
    }
    if (bit(extended.edx, 23)) features |= kAvx512Fp16;
  }

  const bool tile_state = (state & 0x60000u) == 0x60000u;
  if (tile_state && (features & kAvx512Bf16) != 0 && bit(extended.edx, 24) &&
      bit(extended.edx, 22) && request_amx_permission()) {
    features |= kAmxBf16;
    if (bit(extended_1.eax, 21)) features |= kAmxFp16;
  }
  return features;
}

#elif defined(__aarch64__)

CpuFeatures detect() {
  CpuFeatures features = kNeon;
#if defined(__linux__) && defined(HWCAP2_BF16)
  if ((getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0) features |= kNeonBf16;
#endif
  return features;
}

#else

CpuFeatures detect() {
  return 0;
}

#endif

}  // namespace

CpuFeatures detect_cpu_features() {
  static const CpuFeatures features = detect();
  return features;
}

Result<CpuFeatures> cap_cpu_features(CpuFeatures features, std::string_view cap) {
  if (cap.empty()) return features;
  for (const Cap& known : kCaps) {
    if (known.word == cap) return features & known.allowed;
  }
  std::string text = "FLASHMLA_ISA is \"" + std::string(cap) + "\"; it must be one of";
  const char* separator = " ";
  for (const Cap& known : kCaps) {
    text += separator;
    text += known.word;
    separator = ", ";
  }
  return Status::invalid_argument(text);
}

Result<CpuFeatures> usable_cpu_features() {
  const char* cap = std::getenv("FLASHMLA_ISA");
  return cap_cpu_features(detect_cpu_features(), cap == nullptr ? "" : cap);
}

std::string describe_cpu_features(CpuFeatures features) {
  std::string text;
  for (const NamedFeature& named : kNames) {
    if ((features & named.feature) == 0) continue;
    if (!text.empty()) text += ' ';
    text += named.name;
  }
  return text.empty() ? "none" : text;
}

}  // namespace flashmla
