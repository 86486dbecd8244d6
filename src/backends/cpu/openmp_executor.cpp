#include "backends/cpu/executor.hpp"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace flashmla::cpu {
namespace {

void run_with_openmp(void*, std::int64_t count, void (*body)(void*, std::int64_t),
                     void* body_data) {
#if defined(_OPENMP)
#pragma omp parallel for schedule(static, 1)
#endif
  for (std::int64_t index = 0; index < count; ++index) body(body_data, index);
}

}  // namespace

Executor openmp_executor() {
#if defined(_OPENMP)
  return {nullptr, omp_get_max_threads(), run_with_openmp};
#else
  return {nullptr, 1, run_with_openmp};
#endif
}

}  // namespace flashmla::cpu
