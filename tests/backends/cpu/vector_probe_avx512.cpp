#include "backends/cpu/avx512/vector.hpp"
#include "backends/cpu/vector_probe_of.hpp"

namespace flashmla::testing {

const VectorProbe kAvx512Vector = probe_of<cpu::avx512::Vector>();

}  // namespace flashmla::testing
