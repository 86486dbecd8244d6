#include "backends/cpu/neon/vector.hpp"
#include "backends/cpu/vector_probe_of.hpp"

namespace flashmla::testing {

const VectorProbe kNeonVector = probe_of<cpu::neon::Vector>();

}  // namespace flashmla::testing
