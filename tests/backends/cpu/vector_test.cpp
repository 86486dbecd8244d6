// The vocabularies of the decode loop, operation by operation, against scalar code.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/vector_probe.hpp"
#include "kv/scalar.hpp"
#include "select/cpu_features.hpp"

namespace flashmla::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Vocabulary {
  const char* name;
  CpuFeatures required;
  const VectorProbe* probe;
};

constexpr Vocabulary kVocabularies[] = {
    {"portable", 0, &kPortableVector},
#if defined(FLASHMLA_CPU_X86)
    {"avx2", cpu_feature::kAvx2, &kAvx2Vector},
    {"avx512", cpu_feature::kAvx512, &kAvx512Vector},
#endif
#if defined(FLASHMLA_CPU_ARM)
    {"neon", cpu_feature::kNeon, &kNeonVector},
#endif
};

class VectorTest : public ::testing::TestWithParam<Vocabulary> {
 protected:
  void SetUp() override {
    if ((GetParam().required & ~detect_cpu_features()) != 0) {
      GTEST_SKIP() << "this processor has no " << GetParam().name;
    }
  }
  const VectorProbe& probe() const { return *GetParam().probe; }
  std::int32_t lanes() const { return probe().lanes; }

  std::vector<float> random_floats(std::int32_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal_(generator_);
    return values;
  }
  std::uint32_t random_bits() { return bits_(generator_); }

  // Any bit pattern, each exponent as likely as the others.
  void check_narrow(auto element_probe, auto element) {
    using Element = decltype(element);
    std::vector<float> pair(2 * static_cast<std::size_t>(lanes())), natural(pair.size());
    std::vector<Element> narrow(pair.size());
    for (int round = 0; round < 20000; ++round) {
      for (float& value : pair) value = std::bit_cast<float>(random_bits());
      // Halfway between two neighbours: where rounding to even shows.
      for (std::size_t i = 0; i < pair.size(); i += 3) {
        const std::uint32_t tie = std::is_same_v<Element, BFloat16> ? 0x8000u : 0x1000u;
        pair[i] = std::bit_cast<float>((random_bits() & ~(2 * tie - 1)) | tie);
      }
      element_probe.narrow(pair.data(), narrow.data(), natural.data());
      std::vector<float> from = pair, to = natural;
      const auto by_bits = [](float a, float b) {
        return std::bit_cast<std::uint32_t>(a) < std::bit_cast<std::uint32_t>(b);
      };
      std::sort(from.begin(), from.end(), by_bits);
      std::sort(to.begin(), to.end(), by_bits);
      for (std::size_t i = 0; i < pair.size(); ++i) {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(from[i]), std::bit_cast<std::uint32_t>(to[i]));
        const float expected = to_float(from_float<Element>(natural[i]));
        const float actual = to_float(narrow[i]);
        if (std::isnan(natural[i])) {
          ASSERT_TRUE(std::isnan(actual)) << "element " << i;
        } else {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(actual), std::bit_cast<std::uint32_t>(expected))
              << "element " << i << " of " << natural[i];
        }
      }
    }
  }

  void check_widen(auto element_probe, auto element) {
    using Element = decltype(element);
    const std::int32_t count = 2 * lanes();
    std::vector<Element> elements(static_cast<std::size_t>(count));
    std::vector<float> natural(elements.size());
    for (std::int32_t first = 0; first < 0x10000; first += count) {
      for (std::int32_t i = 0; i < count; ++i) {
        elements[static_cast<std::size_t>(i)].bits = static_cast<std::uint16_t>(first + i);
      }
      element_probe.widen(elements.data(), natural.data());
      for (std::size_t i = 0; i < natural.size(); ++i) {
        const float expected = to_float(elements[i]);
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(natural[i])) << elements[i].bits;
        } else {
          ASSERT_EQ(std::bit_cast<std::uint32_t>(natural[i]),
                    std::bit_cast<std::uint32_t>(expected))
              << elements[i].bits;
        }
      }
    }
  }

 private:
  std::mt19937 generator_{20};
  std::normal_distribution<float> normal_;
  std::uniform_int_distribution<std::uint32_t> bits_;
};

TEST_P(VectorTest, WidensEveryBFloat16) {
  check_widen(probe().bf16, BFloat16{});
}

TEST_P(VectorTest, WidensEveryFloat16) {
  check_widen(probe().fp16, Float16{});
}

TEST_P(VectorTest, NarrowsToBFloat16AsTheScalarCode) {
  check_narrow(probe().bf16, BFloat16{});
}

TEST_P(VectorTest, NarrowsToFloat16AsTheScalarCode) {
  check_narrow(probe().fp16, Float16{});
}

TEST_P(VectorTest, CopiesFloats) {
  const std::vector<float> in = random_floats(2 * lanes());
  std::vector<float> natural(in.size()), stored(in.size());
  probe().fp32.widen(in.data(), natural.data());
  EXPECT_EQ(natural, in);
  probe().fp32.narrow(in.data(), stored.data(), natural.data());
  EXPECT_EQ(stored, in);
  EXPECT_EQ(natural, in);
}

TEST_P(VectorTest, ExponentialIsWithinTwoUlp) {
  const auto count = static_cast<std::size_t>(lanes());
  std::vector<float> in(count), out(count);
  double worst = 0.0;
  for (int step = 0; step < 20000; ++step) {
    for (std::size_t i = 0; i < count; ++i) {
      // [-87, 0] evenly; the last lane stays near 0, where most weight is.
      const float share = static_cast<float>(random_bits()) * 0x1p-32f;
      in[i] = share * (i + 1 == count ? -1e-3f : -87.0f);
    }
    probe().exponential(in.data(), out.data());
    for (std::size_t i = 0; i < count; ++i) {
      const double expected = std::exp(static_cast<double>(in[i]));
      const float rounded = static_cast<float>(expected);
      const double ulp = static_cast<double>(std::nextafter(rounded, kInfinity)) - rounded;
      worst = std::max(worst, std::abs(out[i] - expected) / ulp);
    }
  }
  EXPECT_LE(worst, 2.0);
  RecordProperty("worst_ulp", std::to_string(worst));
}

TEST_P(VectorTest, ExponentialOfLimits) {
  const auto count = static_cast<std::size_t>(lanes());
  const auto of = [&](float x) {
    const std::vector<float> in(count, x);
    std::vector<float> out(count);
    probe().exponential(in.data(), out.data());
    for (float value : out) {
      EXPECT_EQ(std::bit_cast<std::uint32_t>(value), std::bit_cast<std::uint32_t>(out[0]));
    }
    return out[0];
  };
  EXPECT_EQ(of(0.0f), 1.0f);
  EXPECT_EQ(of(-0.0f), 1.0f);
  EXPECT_EQ(of(-88.0f), 0.0f);
  EXPECT_EQ(of(-2e4f), 0.0f);
  EXPECT_EQ(of(-std::numeric_limits<float>::max()), 0.0f);
  EXPECT_EQ(of(-kInfinity), 0.0f);
  EXPECT_TRUE(std::isnan(of(kNan)));
}

TEST_P(VectorTest, ShiftedExponentialHasTheSameBits) {
  const auto count = static_cast<std::size_t>(lanes());
  std::vector<float> in(count), out(count), shifted(count);
  for (int step = 0; step < 2000; ++step) {
    for (float& x : in) x = static_cast<float>(random_bits()) * 0x1p-32f * -90.0f;
    probe().exponential(in.data(), out.data());
    probe().shifted_exponential(in.data(), shifted.data());
    for (std::size_t i = 0; i < count; ++i) {
      const float expected = out[i] * 0x1p-24f;
      if (expected >= 0x1p-126f) {
        EXPECT_EQ(shifted[i], expected) << in[i];
      } else {
        // Down to where the exponent field is 0, never a subnormal number.
        EXPECT_TRUE(shifted[i] == 0.0f || shifted[i] >= 0x1p-127f) << in[i];
      }
    }
  }
  in.assign(count, -kInfinity);
  probe().shifted_exponential(in.data(), shifted.data());
  EXPECT_EQ(shifted, std::vector<float>(count, 0.0f));
  in.assign(count, kNan);
  probe().shifted_exponential(in.data(), shifted.data());
  EXPECT_TRUE(std::isnan(shifted[0]));
}

TEST_P(VectorTest, MaximumKeepsANanInItsSecondOperand) {
  const auto count = static_cast<std::size_t>(lanes());
  const std::vector<float> nan(count, kNan), one(count, 1.0f), two(count, 2.0f);
  std::vector<float> out(count);
  probe().maximum(one.data(), two.data(), out.data());
  EXPECT_EQ(out, two);
  probe().maximum(two.data(), one.data(), out.data());
  EXPECT_EQ(out, two);
  // What the loop relies on: a NaN in the second operand stays.
  probe().maximum(one.data(), nan.data(), out.data());
  for (float value : out) EXPECT_TRUE(std::isnan(value));
}

TEST_P(VectorTest, MinimumKeepsANanInItsSecondOperand) {
  const auto count = static_cast<std::size_t>(lanes());
  const std::vector<float> nan(count, kNan), one(count, 1.0f), two(count, 2.0f);
  std::vector<float> out(count);
  probe().minimum(one.data(), two.data(), out.data());
  EXPECT_EQ(out, one);
  probe().minimum(two.data(), one.data(), out.data());
  EXPECT_EQ(out, one);
  probe().minimum(one.data(), nan.data(), out.data());
  for (float value : out) EXPECT_TRUE(std::isnan(value));
}

TEST_P(VectorTest, ReducesEveryLane) {
  for (std::int32_t lane = 0; lane < lanes(); ++lane) {
    std::vector<float> in(static_cast<std::size_t>(lanes()), 1.0f);
    in[static_cast<std::size_t>(lane)] = 1024.0f;
    EXPECT_EQ(probe().reduce_add(in.data()), 1023.0f + static_cast<float>(lanes()));
    EXPECT_EQ(probe().reduce_maximum(in.data()), 1024.0f);
  }
}

TEST_P(VectorTest, ReducesATileInOrder) {
  const std::int32_t sums = probe().tile_sums;
  // Small integers: every order of addition gives the same sum, and each place has its own weight.
  std::vector<float> in, expected(static_cast<std::size_t>(sums), 0.0f), actual(expected);
  for (std::int32_t i = 0; i < sums; ++i) {
    for (std::int32_t lane = 0; lane < lanes(); ++lane) {
      const auto value = static_cast<float>(random_bits() % 4096);
      in.push_back(value);
      expected[static_cast<std::size_t>(i)] += value;
    }
  }
  probe().reduce_tile(in.data(), actual.data());
  EXPECT_EQ(actual, expected);
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, VectorTest, ::testing::ValuesIn(kVocabularies),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace flashmla::testing
