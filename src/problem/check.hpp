// The checks that every request shares, as functions that return the first error.
#pragma once

#include <initializer_list>
#include <string>

#include "flashmla/status.hpp"
#include "flashmla/types.hpp"

namespace flashmla::problem {

// "(2, 1, 128, 576)".
std::string describe_shape(const TensorView& tensor);

// A named tensor of a request, for messages.
struct Argument {
  const char* name;
  const TensorView& tensor;
};

// Rank as wanted, sizes >= 0 and strides >= 0 with an extent that 64 bits can hold, data present
// unless empty, aligned to its element, and within size_bytes when that is given. `wanted` names
// the dimensions, such as "(batch, seq_len_q, num_heads_q, head_dim)".
Status check_tensor(const Argument& argument, std::int32_t rank, const char* wanted);

// The two checks of a dtype pass over an argument that is missing, whose dtype says nothing:
// check_tensor, which must follow, refuses that.
Status check_dtype(const Argument& argument, std::initializer_list<DType> accepted);
Status check_same_dtype(const Argument& argument, const Argument& model);

// Exact sizes; a negative entry accepts any size.
Status check_shape(const Argument& argument, std::initializer_list<std::int64_t> wanted,
                   const char* meaning);

// The last dimension has stride 1 (or at most one element).
Status check_last_stride(const Argument& argument);

// No gaps at all, row-major.
Status check_contiguous(const Argument& argument);

// No two elements of a tensor that is written share memory.
Status check_no_overlap(const Argument& argument);

// No tensor that is written shares memory with another of the call: not with `read`, of which some
// may be missing, and not with each other. Tensors that lie in one another's gaps, as slices of a
// larger one do, are apart.
Status check_apart(std::initializer_list<Argument> written, std::initializer_list<Argument> read);

// Sizes that the kernels keep in int32.
Status check_int32(const char* name, std::int64_t value, std::int64_t least);

}  // namespace flashmla::problem
