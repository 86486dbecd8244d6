// The kernels that this machine can run, as test parameters.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "flashmla/flashmla.h"
#include "flashmla/types.hpp"

namespace flashmla::testing {

struct Kernel {
  std::string name;
  DType dtype;

  friend std::ostream& operator<<(std::ostream& out, const Kernel& kernel) {
    return out << kernel.name;
  }
};

// CPU kernels compiled in that this machine can run.
inline std::vector<Kernel> usable_kernels() {
  std::vector<Kernel> kernels;
  for (std::int32_t i = 0; i < flashmla_num_kernels(); ++i) {
    flashmla_kernel_info info{};
    info.struct_size = sizeof(info);
    if (flashmla_kernel_at(i, &info) == FLASHMLA_OK && info.usable != 0 &&
        info.device_type == FLASHMLA_CPU) {
      kernels.push_back({info.name, static_cast<DType>(info.dtype)});
    }
  }
  return kernels;
}

inline std::string kernel_test_name(const ::testing::TestParamInfo<Kernel>& info) {
  return info.param.name;
}

}  // namespace flashmla::testing
