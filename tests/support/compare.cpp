#include "support/compare.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashmla::testing {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

AssertionResult same_special_values(const std::vector<double>& values,
                                    const std::vector<double>& expected) {
  if (values.size() != expected.size()) {
    return AssertionFailure() << values.size() << " values, expected " << expected.size();
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool same = std::isnan(expected[i])   ? std::isnan(values[i])
                      : std::isinf(expected[i]) ? values[i] == expected[i]
                                                : std::isfinite(values[i]);
    if (!same) {
      return AssertionFailure() << "element " << i << " is " << values[i] << ", expected "
                                << expected[i];
    }
  }
  return AssertionSuccess();
}

AssertionResult out_close(const Array& out, const std::vector<double>& expected,
                          const Tolerance& tolerance) {
  const std::vector<double> values = out.values();
  if (AssertionResult special = same_special_values(values, expected); !special) {
    return AssertionFailure() << "out: " << special.message();
  }
  double difference = 0.0, reference = 0.0, largest = 0.0, worst = 0.0;
  std::size_t worst_at = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(expected[i])) continue;
    const double error = std::fabs(values[i] - expected[i]);
    difference += error * error;
    reference += expected[i] * expected[i];
    largest = std::max(largest, std::fabs(expected[i]));
    if (error > worst) {
      worst = error;
      worst_at = i;
    }
  }
  if (std::sqrt(difference) > tolerance.out_relative * std::sqrt(reference)) {
    return AssertionFailure() << "out differs by " << std::sqrt(difference / reference)
                              << " in norm, allowed " << tolerance.out_relative
                              << "; worst at element " << worst_at << ": " << values[worst_at]
                              << ", expected " << expected[worst_at];
  }
  if (worst > tolerance.out_element * largest) {
    return AssertionFailure() << "out element " << worst_at << " is " << values[worst_at]
                              << ", expected " << expected[worst_at] << "; allowed "
                              << tolerance.out_element * largest;
  }
  return AssertionSuccess();
}

AssertionResult lse_close(const Array& lse, const std::vector<double>& expected,
                          const Tolerance& tolerance) {
  const std::vector<double> values = lse.values();
  if (AssertionResult special = same_special_values(values, expected); !special) {
    return AssertionFailure() << "lse: " << special.message();
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(expected[i])) continue;
    const double allowed = std::max(
        tolerance.lse_absolute, 4 * std::numeric_limits<float>::epsilon() * std::fabs(expected[i]));
    if (!(std::fabs(values[i] - expected[i]) <= allowed)) {
      return AssertionFailure() << "lse element " << i << " is " << values[i] << ", expected "
                                << expected[i] << "; allowed " << allowed;
    }
  }
  return AssertionSuccess();
}

AssertionResult result_close(const DecodeCase& call, const Expected& expected) {
  const Tolerance tolerance = tolerance_of(call.shape.dtype);
  if (AssertionResult result = lse_close(call.lse, expected.lse, tolerance); !result) return result;
  if (AssertionResult result = out_close(call.out, expected.out, tolerance); !result) return result;
  if (!call.out.gaps_unwritten())
    return AssertionFailure() << "out: bytes between elements written";
  if (!call.lse.gaps_unwritten())
    return AssertionFailure() << "lse: bytes between elements written";
  return AssertionSuccess();
}

}  // namespace flashmla::testing
