#include "backends/cpu/portable/vector.hpp"
#include "backends/cpu/vector_probe_of.hpp"

namespace flashmla::testing {

const VectorProbe kPortableVector = probe_of<cpu::portable::Vector>();

}  // namespace flashmla::testing
