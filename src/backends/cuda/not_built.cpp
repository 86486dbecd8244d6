// Stands in for the backend in a build without a fitting nvcc: the same calls, none of which
// computes.
#include "backends/cuda/backend.hpp"

namespace flashmla::cuda {
namespace {

Status not_built() {
  return Status::unsupported(
      "the device is a CUDA GPU; this build of flashmla computes on the CPU only, since it was "
      "built without a fitting nvcc or with FLASHMLA_CUDA=OFF");
}

}  // namespace

Result<std::int32_t> compute_capability(std::int32_t) {
  return not_built();
}
Result<std::int32_t> num_parts(std::int32_t, std::int64_t, std::int64_t) {
  return not_built();
}
std::size_t workspace_bytes(const Problem&) {
  return 0;
}
Status plan(const PlanProblem&, void*) {
  return not_built();
}
Status decode(const Problem&, const select::KernelRow&, void*, void*) {
  return not_built();
}
Status merge(const MergeProblem&, void*) {
  return not_built();
}
Status read_back(std::int32_t*, const std::int32_t*, std::int64_t, std::int32_t, void*) {
  return not_built();
}

}  // namespace flashmla::cuda
