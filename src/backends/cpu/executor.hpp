// Who runs the CPU's work: the caller's parallel_for, or OpenMP.
#pragma once

#include <cstdint>

namespace flashmla::cpu {

// parallel_for calls body(body_data, i) once for each i in [0, count), at most num_threads at once,
// and returns when all have returned.
struct Executor {
  void* context = nullptr;
  std::int32_t num_threads = 1;
  void (*parallel_for)(void* context, std::int64_t count,
                       void (*body)(void* body_data, std::int64_t index),
                       void* body_data) = nullptr;

  template <class Body>
  void run(std::int64_t count, const Body& body) const {
    if (count == 1) {
      body(std::int64_t{0});
      return;
    }
    if (count <= 0) return;
    parallel_for(
        context, count,
        [](void* data, std::int64_t index) { (*static_cast<const Body*>(data))(index); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
};

// The OpenMP runtime's threads; one thread in a build without OpenMP.
Executor openmp_executor();

}  // namespace flashmla::cpu
