// The shared library as a plugin is used: loaded, called and unloaded by threads that come and go.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "flashmla/flashmla.h"

namespace flashmla::testing {
namespace {

// One row of 60 tokens with 64 heads: enough for two threads.
struct Call {
  std::vector<float> q = std::vector<float>(64 * 64), k_cache = q, out = q;
  std::vector<float> lse = std::vector<float>(64);
  std::int32_t block_table = 0, length = 60, plan[8] = {0, 0, 0, 1}, num_splits[2] = {0, 1};
  flashmla_decode_args args{};

  Call() {
    args.struct_size = sizeof(args);
    args.q = tensor(q.data(), FLASHMLA_FLOAT32, {1, 1, 64, 64});
    args.k_cache = tensor(k_cache.data(), FLASHMLA_FLOAT32, {1, 64, 1, 64});
    args.block_table = tensor(&block_table, FLASHMLA_INT32, {1, 1});
    args.cache_seqlens = tensor(&length, FLASHMLA_INT32, {1});
    args.tile_scheduler_metadata = tensor(plan, FLASHMLA_INT32, {1, 8});
    args.num_splits = tensor(num_splits, FLASHMLA_INT32, {2});
    args.out = tensor(out.data(), FLASHMLA_FLOAT32, {1, 1, 64, 64});
    args.softmax_lse = tensor(lse.data(), FLASHMLA_FLOAT32, {1, 64, 1});
    args.head_dim_v = 64;
  }

  static flashmla_tensor tensor(void* data, std::int32_t dtype,
                                const std::vector<std::int64_t>& shape) {
    flashmla_tensor result{};
    result.data = data;
    result.dtype = dtype;
    result.rank = static_cast<std::int32_t>(shape.size());
    std::int64_t stride = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      result.shape[i] = shape[i];
      result.strides[i] = stride;
      stride *= shape[i];
    }
    return result;
  }
};

// Loads the library for a call that is right and one that is not.
void use_library() {
  void* library = dlopen(FLASHMLA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(library, nullptr) << dlerror();
  auto* const decode =
      reinterpret_cast<decltype(&flashmla_decode)>(dlsym(library, "flashmla_decode"));
  auto* const last_error =
      reinterpret_cast<decltype(&flashmla_last_error)>(dlsym(library, "flashmla_last_error"));
  ASSERT_TRUE(decode != nullptr && last_error != nullptr);
  Call call;
  alignas(64) static std::byte workspace[1 << 20];
  EXPECT_EQ(decode(&call.args, workspace, sizeof(workspace), nullptr), FLASHMLA_OK) << last_error();
  EXPECT_NEAR(call.lse[63], std::log(60.0), 1e-6);
  call.args.head_dim_v = 63;
  EXPECT_EQ(decode(&call.args, workspace, sizeof(workspace), nullptr), FLASHMLA_INVALID_ARGUMENT);
  EXPECT_NE(last_error()[0], '\0');
  EXPECT_EQ(dlclose(library), 0);
}

std::ptrdiff_t count_threads() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/task"), {});
}
std::ptrdiff_t count_mappings() {
  std::ifstream maps("/proc/self/maps");
  return std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
}

TEST(Reload, LeavesNeitherThreadsNorMemoryBehind) {
  std::ptrdiff_t threads = 0, mappings = 0;
  for (int cycle = 0; cycle < 20; ++cycle) {
    std::thread(use_library).join();
    if (cycle == 5) threads = count_threads(), mappings = count_mappings();
  }
  // A thread is listed for a moment after others see its end.
  for (int i = 0; i < 5000 && count_threads() > threads; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_LE(count_threads(), threads);
  // The allocator may map another piece of its own.
  EXPECT_LE(count_mappings(), mappings + 4);
}

}  // namespace
}  // namespace flashmla::testing
