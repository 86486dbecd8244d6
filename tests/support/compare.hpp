// How close is close enough, and the comparison that looks at infinities and NaN before values.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "support/array.hpp"
#include "support/oracle.hpp"

namespace flashmla::testing {

struct Tolerance {
  double out_relative;  // norm of the difference / norm of the reference, over the whole tensor
  double lse_absolute;
  // One element of out, as a share of the largest value that may stand there. The norm does not
  // see a single wrong element among many; this does.
  double out_element;
};

// The accuracy that the library promises, by dtype.
constexpr Tolerance tolerance_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return {3e-3, 2e-5, 1e-2};
    case DType::kFloat16:
      return {5e-4, 2e-5, 1.5e-3};
    default:
      return {2e-6, 2e-6, 1e-5};
  }
}

// Same NaN, same infinities with the same sign, at the same places.
::testing::AssertionResult same_special_values(const std::vector<double>& values,
                                               const std::vector<double>& expected);

::testing::AssertionResult out_close(const Array& out, const std::vector<double>& expected,
                                     const Tolerance& tolerance);

// The absolute bound is for an lse of ordinary size: float32 itself is coarser for large ones.
::testing::AssertionResult lse_close(const Array& lse, const std::vector<double>& expected,
                                     const Tolerance& tolerance);

// Both, and nothing written between the elements.
::testing::AssertionResult result_close(const DecodeCase& decode_case, const Expected& expected);

}  // namespace flashmla::testing
