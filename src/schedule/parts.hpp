// How many parts a plan has on a device.
#pragma once

#include <algorithm>
#include <cstdint>

namespace flashmla::schedule {

// CPU: a part for each thread, the key/value heads of a part being separate work already.
inline std::int32_t cpu_num_parts(std::int64_t num_heads_k, std::int32_t num_threads) {
  return static_cast<std::int32_t>(std::max<std::int64_t>(1, num_threads / num_heads_k));
}

}  // namespace flashmla::schedule
