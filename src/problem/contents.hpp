// What the int32 tensors of a call may hold, and copies of them for the host to read.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "flashmla/status.hpp"
#include "problem/problem.hpp"

namespace flashmla {

// Lengths, visible_lens, and the block ids in use; of a planning call the lengths. They read the
// tensors, which must be the host's. The plan is judged by schedule/resolve.hpp.
Status check_contents(const Problem& problem);
Status check_contents(const PlanProblem& problem);

// Whether calls on a GPU check contents too, at the price of waiting for it: FLASHMLA_CHECK is 1.
// Fails on another word than 0 or 1.
Result<bool> contents_are_checked();

// Copies `count` elements of a device's memory to the host's; they are there when it returns.
using ReadInts =
    std::function<Status(std::int32_t* to, const std::int32_t* from, std::int64_t count)>;

// A problem whose int32 tensors are copies on the host, with the strides of the originals.
template <class AnyProblem>
struct OnHost {
  AnyProblem problem;
  std::vector<std::vector<std::int32_t>> copies;
};
Result<OnHost<Problem>> copy_contents(const Problem& problem, const ReadInts& read);
Result<OnHost<PlanProblem>> copy_contents(const PlanProblem& problem, const ReadInts& read);

}  // namespace flashmla
