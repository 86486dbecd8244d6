// The planner: what a decoding step pays before its first layer, on one thread.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <vector>

#include "flashmla/flashmla.h"

namespace {

flashmla_tensor tensor(std::vector<std::int32_t>& values,
                       std::initializer_list<std::int64_t> shape) {
  flashmla_tensor result{};
  result.data = values.data();
  result.dtype = FLASHMLA_INT32;
  std::int64_t stride = 1;
  for (const std::int64_t size : shape) result.shape[result.rank++] = size;
  for (std::int32_t i = result.rank; i-- > 0; stride *= result.shape[i]) result.strides[i] = stride;
  return result;
}

// Random lengths, as many parts as a large processor has threads.
void plan(benchmark::State& state) {
  constexpr std::int32_t kParts = 64;
  const std::int64_t batch = state.range(0);
  std::mt19937 random(1);
  std::uniform_int_distribution<std::int32_t> length(0, 8192);
  std::vector<std::int32_t> lengths(static_cast<std::size_t>(batch)), metadata(kParts * 8),
      num_splits(lengths.size() + 1);
  for (std::int32_t& value : lengths) value = length(random);
  flashmla_plan_args args{};
  args.struct_size = sizeof(args);
  args.cache_seqlens = tensor(lengths, {batch});
  args.num_heads_per_head_k = 16;
  args.num_heads_k = 1;
  args.tile_scheduler_metadata = tensor(metadata, {kParts, 8});
  args.num_splits = tensor(num_splits, {batch + 1});
  for ([[maybe_unused]] auto _ : state) {
    if (flashmla_plan(&args) != FLASHMLA_OK) return state.SkipWithError(flashmla_last_error());
  }
  state.SetItemsProcessed(state.iterations() * batch);
}

}  // namespace

BENCHMARK(plan)->Arg(1)->Arg(128)->Arg(1024)->Arg(8192)->Arg(65536)->Unit(benchmark::kMicrosecond);

BENCHMARK_MAIN();
