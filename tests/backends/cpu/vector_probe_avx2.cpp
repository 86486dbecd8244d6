#include "backends/cpu/avx2/vector.hpp"
#include "backends/cpu/vector_probe_of.hpp"

namespace flashmla::testing {

const VectorProbe kAvx2Vector = probe_of<cpu::avx2::Vector>();

}  // namespace flashmla::testing
