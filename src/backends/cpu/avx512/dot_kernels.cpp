// AVX-512 with scores by bf16 dot products. Worth it only where the processor runs vdpbf16ps at the
// rate of an fp32 multiply-add: it does two products, so Intel's half rate gains nothing.
#include "backends/cpu/avx512/vector.hpp"
#include "backends/cpu/common/decode_loop.hpp"
#include "backends/cpu/kernels.hpp"

namespace flashmla::cpu {
namespace avx512 {

struct DotVector : Vector {
  template <class Element>
  static constexpr bool kDotsElements = true;

  static __m512bh load_elements(const BFloat16* address) {
    return reinterpret_cast<__m512bh>(_mm512_loadu_si512(address));
  }
  static Float dot(Float sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }
};

}  // namespace avx512

const DecodeKernel kAvx512Bf16Dot = decode_loop_kernel<avx512::DotVector, BFloat16>();

}  // namespace flashmla::cpu
