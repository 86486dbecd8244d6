// The checks that every request shares. Whole requests are spoilt in capi/.
#include "problem/check.hpp"

#include <gtest/gtest.h>

#include <cstdint>

#include "problem/problem.hpp"

namespace flashmla::testing {
namespace {

TensorView view(std::initializer_list<std::int64_t> shape,
                std::initializer_list<std::int64_t> strides) {
  static float memory[1];
  TensorView tensor;
  tensor.data = memory;
  tensor.dtype = DType::kFloat32;
  tensor.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape);
  std::copy(strides.begin(), strides.end(), tensor.strides);
  return tensor;
}

bool overlaps(const TensorView& tensor) {
  return !problem::check_no_overlap({"out", tensor}).ok();
}

TEST(Check, Overlap) {
  EXPECT_FALSE(overlaps(view({2, 3, 4}, {12, 4, 1})));
  EXPECT_FALSE(overlaps(view({2, 3, 4}, {4, 8, 1})));  // any order of dimensions
  EXPECT_FALSE(overlaps(view({2, 1, 4}, {4, 0, 1})));  // stride of a single element
  EXPECT_FALSE(overlaps(view({2, 0, 4}, {0, 0, 0})));  // nothing to share
  EXPECT_TRUE(overlaps(view({2, 3, 4}, {0, 4, 1})));
  EXPECT_TRUE(overlaps(view({2, 3, 4}, {12, 3, 1})));
  EXPECT_TRUE(overlaps(view({2, 3, 4}, {11, 4, 1})));
}

// Whether two tensors of one memory, the second `offset` elements behind, share some of it.
bool share(TensorView a, TensorView b, std::int64_t offset) {
  static float memory[1000];
  a.data = memory;
  b.data = memory + offset;
  const bool found = !problem::check_apart({{"a", a}}, {{"b", b}}).ok();
  EXPECT_EQ(found, !problem::check_apart({{"b", b}}, {{"a", a}}).ok());
  EXPECT_EQ(found, !problem::check_apart({{"a", a}, {"b", b}}, {}).ok());
  return found;
}

TEST(Check, TensorsThatShareMemory) {
  const TensorView dense = view({3, 4, 5}, {20, 5, 1});
  EXPECT_TRUE(share(dense, dense, 0));
  EXPECT_TRUE(share(dense, dense, 1));
  EXPECT_TRUE(share(dense, dense, 59));
  EXPECT_FALSE(share(dense, dense, 60));
  EXPECT_FALSE(share(dense, view({2, 0, 4}, {8, 4, 1}), 3));  // no elements
  EXPECT_FALSE(share(dense, TensorView{}, 3));                // missing
  // Columns of one array: 0 to 4, and from 5 on.
  const TensorView columns = view({3, 4, 5}, {80, 20, 1});
  EXPECT_FALSE(share(columns, columns, 5));
  EXPECT_FALSE(share(columns, columns, 15));
  EXPECT_TRUE(share(columns, columns, 4));
  EXPECT_TRUE(share(columns, columns, 16));
  EXPECT_FALSE(share(columns, view({3, 4, 15}, {80, 20, 1}), 5));
  EXPECT_TRUE(share(columns, view({3, 4, 16}, {80, 20, 1}), 5));
  // Layers of one array, of other shapes each.
  const TensorView layer = view({3, 4, 5}, {60, 5, 1});
  EXPECT_FALSE(share(layer, layer, 20));
  EXPECT_FALSE(share(layer, view({3, 8, 5}, {60, 5, 1}), 20));
  EXPECT_TRUE(share(layer, view({3, 9, 5}, {60, 5, 1}), 20));
  // The stride of a single element says nothing, however large.
  EXPECT_TRUE(share(dense, view({1, 4, 5}, {INT64_MAX, 5, 1}), 20));
}

TEST(Check, ExtentIsExact) {
  TensorView tensor = view({2, 3}, {10, 1});
  tensor.size_bytes = 13 * 4;
  EXPECT_TRUE(problem::check_tensor({"x", tensor}, 2, "(a, b)").ok());
  tensor.size_bytes -= 1;
  EXPECT_FALSE(problem::check_tensor({"x", tensor}, 2, "(a, b)").ok());
  tensor.shape[0] = 0;
  tensor.data = nullptr;
  EXPECT_TRUE(problem::check_tensor({"x", tensor}, 2, "(a, b)").ok());
}

TEST(Check, ExtentBeyond64Bits) {
  for (const std::int64_t stride : {INT64_MAX, INT64_MAX / 2, INT64_MAX / 4}) {
    EXPECT_FALSE(problem::check_tensor({"x", view({4, 3}, {stride, 1})}, 2, "(a, b)").ok());
  }
  const Status status =
      problem::check_tensor({"x", view({INT64_MAX, INT64_MAX}, {INT64_MAX, 1})}, 2, "(a, b)");
  EXPECT_NE(status.message().find("64 bits"), std::string::npos);
}

TEST(Check, Contiguous) {
  EXPECT_TRUE(problem::check_contiguous({"x", view({2, 8}, {8, 1})}).ok());
  EXPECT_TRUE(problem::check_contiguous({"x", view({1, 8}, {99, 1})}).ok());
  EXPECT_FALSE(problem::check_contiguous({"x", view({2, 8}, {9, 1})}).ok());
  EXPECT_FALSE(problem::check_contiguous({"x", view({2, 8}, {8, 2})}).ok());
}

TEST(Check, Int32Range) {
  EXPECT_TRUE(problem::check_int32("n", 2147483647, 0).ok());
  EXPECT_FALSE(problem::check_int32("n", 2147483648, 0).ok());
  EXPECT_FALSE(problem::check_int32("n", 0, 1).ok());
}

TEST(Check, HeadDimsAreThoseOfTheDocumentation) {
  const auto dims = supported_head_dims();
  ASSERT_EQ(dims.size(), 8u);
  for (const HeadDims& pair : dims) {
    EXPECT_EQ(pair.head_dim % 32, 0);
    EXPECT_EQ(pair.head_dim_v % 32, 0);
    EXPECT_LE(pair.head_dim_v, pair.head_dim);
  }
}

}  // namespace
}  // namespace flashmla::testing
