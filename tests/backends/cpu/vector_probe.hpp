// A vocabulary (src/backends/cpu/*/vector.hpp) behind plain functions over arrays. Each
// vector_probe_<set>.cpp is compiled with that set's flags and nothing of GoogleTest, so that the
// test program starts on any processor.
#pragma once

#include <cstdint>

#include "kv/scalar.hpp"

namespace flashmla::testing {

template <class Element>
struct ElementProbe {
  // 2 * lanes elements to floats in natural order.
  void (*widen)(const Element* elements, float* natural);
  // A pair of registers to 2 * lanes elements, and to the floats that they stand for.
  void (*narrow)(const float* pair, Element* elements, float* natural);
};

struct VectorProbe {
  std::int32_t lanes;
  std::int32_t tile_sums;  // registers that reduce_tile takes
  ElementProbe<BFloat16> bf16;
  ElementProbe<Float16> fp16;
  ElementProbe<float> fp32;
  void (*exponential)(const float* in, float* out);             // (lanes)
  void (*shifted_exponential)(const float* in, float* out);     // (lanes), times 2^-24
  void (*maximum)(const float* a, const float* b, float* out);  // (lanes)
  void (*minimum)(const float* a, const float* b, float* out);  // (lanes)
  float (*reduce_add)(const float* in);                         // (lanes)
  float (*reduce_maximum)(const float* in);                     // (lanes)
  void (*reduce_tile)(const float* in, float* sums);            // (tile_sums, lanes) to (tile_sums)
};

extern const VectorProbe kPortableVector;
#if defined(FLASHMLA_CPU_X86)
extern const VectorProbe kAvx2Vector;
extern const VectorProbe kAvx512Vector;
#endif
#if defined(FLASHMLA_CPU_ARM)
extern const VectorProbe kNeonVector;
#endif

}  // namespace flashmla::testing
