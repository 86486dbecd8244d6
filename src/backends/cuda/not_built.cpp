// Stands in for the backend in a build without nvcc: the same calls, none of which computes.
#include "backends/cuda/backend.hpp"

namespace flashmla::cuda {
namespace {

Status not_built() {
  return Status::unsupported(
      "the device is a CUDA GPU; this build of flashmla computes on the CPU only, since it was "
      "built "
      "without nvcc or with FLASHMLA_CUDA=OFF");
}

}  // namespace

Status device_supported(std::int32_t) {
  return not_built();
}
Result<std::int32_t> num_parts(std::int32_t, std::int64_t, std::int64_t) {
  return not_built();
}
Status supported(const Problem&, std::string_view) {
  return not_built();
}
std::string_view selected_kernel(const Problem&, std::string_view) {
  return {};
}
std::size_t workspace_bytes(const Problem&) {
  return 0;
}
Status plan(const PlanProblem&, void*) {
  return not_built();
}
Status decode(const Problem&, std::string_view, void*, void*) {
  return not_built();
}
Status merge(const MergeProblem&, void*) {
  return not_built();
}

}  // namespace flashmla::cuda
