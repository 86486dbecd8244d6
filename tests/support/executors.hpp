// Executors that the library must work with, whatever they do within the rules.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "flashmla/flashmla.h"

namespace flashmla::testing {

using ParallelFor =
    std::function<void(std::int64_t count, const std::function<void(std::int64_t)>&)>;

class TestExecutor {
 public:
  TestExecutor(std::int32_t num_threads, ParallelFor parallel_for)
      : parallel_for_(std::move(parallel_for)) {
    fields_.struct_size = sizeof(fields_);
    fields_.num_threads = num_threads;
    fields_.parallel_for = [](void* context, std::int64_t count, void (*body)(void*, std::int64_t),
                              void* data) {
      (*static_cast<const ParallelFor*>(context))(count,
                                                  [=](std::int64_t index) { body(data, index); });
    };
  }
  const flashmla_executor* get() {
    fields_.context = &parallel_for_;
    return &fields_;
  }
  std::int32_t num_threads() const { return fields_.num_threads; }

 private:
  ParallelFor parallel_for_;
  flashmla_executor fields_{};
};

inline TestExecutor serial_executor() {
  return {1, [](std::int64_t count, const auto& body) {
            for (std::int64_t i = 0; i < count; ++i) body(i);
          }};
}

// Promises `num_threads` threads, and runs everything on one, last index first.
inline TestExecutor backward_executor(std::int32_t num_threads) {
  return {num_threads, [](std::int64_t count, const auto& body) {
            for (std::int64_t i = count; i-- > 0;) body(i);
          }};
}

// Starts num_threads threads each time, and deals the indices out to them.
inline TestExecutor thread_executor(std::int32_t num_threads) {
  return {num_threads, [num_threads](std::int64_t count, const auto& body) {
            std::vector<std::thread> threads;
            const auto used = std::min<std::int64_t>(count, num_threads);
            for (std::int64_t first = 0; first < used; ++first) {
              threads.emplace_back([&, first] {
                for (std::int64_t i = first; i < count; i += used) body(i);
              });
            }
            for (std::thread& thread : threads) thread.join();
          }};
}

}  // namespace flashmla::testing
