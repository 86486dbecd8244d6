// Times the CUDA backend. One call is every kernel of a decode step; the plan is a workload of its
// own. CUDA graphs; several copies of the cache in turn, so that L2 is cold.
//
// Usage: cuda_bench [filter [kernel]], the filter a part of a workload's name, or the whole name of
// one that is not listed, such as "12x4096 h16 s1": rows x tokens of each, heads, query tokens.
// Prints CSV on standard output:
//     workload,mode,us,tflops,gbs,percent_of_ceiling,relative_error
// Modes: burst (about 4 ms of work after an idle pause), sustained (after 0.4 s of load), and
// apart_burst and apart_sustained (a one-element kernel between calls, whose own time is
// subtracted). relative_error: of out, against float64.
// The ceiling is the larger of the times that the bytes need at the measured read bandwidth and the
// operations at the measured wgmma rate of the same mode.
#include <chrono>
#include <functional>
#include <thread>

#include "backends/cuda/mma/descriptor.cuh"
#include "backends/cuda/mma/warpgroup_mma.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/matrix.cuh"
#include "cuda/support.cuh"

namespace flashmla::cuda_test {
namespace {

constexpr int kCallsInGraph = 16;

__global__ void one_element(float* data) {
  data[0] += 1.0f;
}

// Sums 16 bytes a thread and step; what is read comes from memory once.
__global__ void __launch_bounds__(512)
    read_all(const uint4* data, std::size_t count, unsigned* sink) {
  unsigned sum = 0;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  for (; i + 7 * stride < count; i += 8 * stride) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345) *sink = sum;
}

// The operator's mix of wgmma and nothing else: a score warpgroup (n64) and two of values (n256).
__global__ void __launch_bounds__(384, 1)
    multiply_only(int tiles, std::uint64_t seed, float* sink) {
  extern __shared__ __align__(1024) std::uint8_t bytes[];
  __nv_bfloat16* elements = reinterpret_cast<__nv_bfloat16*>(bytes);
  for (int i = threadIdx.x; i < 9 * 4096 * 2; i += 384) {
    elements[i] = __float2bfloat16(standard_normal(seed, i));
  }
  cuda::ptx::fence_async_proxy();
  __syncthreads();
  const std::uint32_t base = cuda::ptx::shared_address(bytes);
  const std::uint64_t a = cuda::mma::rows_descriptor(base + 9 * 8192);
  float total = 0.0f;
  if (threadIdx.x < 128) {
    float d[32] = {};
    for (int tile = 0; tile < tiles; ++tile) {
      cuda::ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 36; ++step) {
        cuda::mma::WarpgroupMma<__nv_bfloat16, false, false, 32>::multiply(
            d, cuda::mma::advance(a, step / 4 * 8192 + step % 4 * 32),
            cuda::mma::advance(cuda::mma::rows_descriptor(base), step / 4 * 8192 + step % 4 * 32),
            1);
      }
      cuda::ptx::wgmma_commit();
      cuda::ptx::wgmma_wait<0>();
      cuda::ptx::pin_registers(d);
    }
    for (const float value : d) total += value;
  } else {
    float d[128] = {};
    for (int tile = 0; tile < tiles; ++tile) {
      cuda::ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        cuda::mma::WarpgroupMma<__nv_bfloat16, false, true, 128>::multiply(
            d, cuda::mma::advance(a, step * 32),
            cuda::mma::advance(cuda::mma::columns_descriptor(base, 8192), step * 2048), 1);
      }
      cuda::ptx::wgmma_commit();
      cuda::ptx::wgmma_wait<0>();
      cuda::ptx::pin_registers(d);
    }
    for (const float value : d) total += value;
  }
  if (total == 0.123f) *sink = total;
}

class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void(int)>& call, int calls) : stream_(stream) {
    cudaGraph_t graph;
    FLASHMLA_CUDA_REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) call(i);
    FLASHMLA_CUDA_REQUIRE(cudaStreamEndCapture(stream, &graph));
    FLASHMLA_CUDA_REQUIRE(cudaGraphInstantiate(&executable_, graph, 0));
    FLASHMLA_CUDA_REQUIRE(cudaGraphDestroy(graph));
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch() const { FLASHMLA_CUDA_REQUIRE(cudaGraphLaunch(executable_, stream_)); }

 private:
  cudaStream_t stream_;
  cudaGraphExec_t executable_;
};

// Median microseconds of one graph launch in each mode.
struct Times {
  double burst, sustained;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Times time_graph(const Graph& graph, cudaStream_t stream) {
  cudaEvent_t begin, end;
  FLASHMLA_CUDA_REQUIRE(cudaEventCreate(&begin));
  FLASHMLA_CUDA_REQUIRE(cudaEventCreate(&end));
  const auto timed = [&](int launches) {
    FLASHMLA_CUDA_REQUIRE(cudaEventRecord(begin, stream));
    for (int i = 0; i < launches; ++i) graph.launch();
    FLASHMLA_CUDA_REQUIRE(cudaEventRecord(end, stream));
    FLASHMLA_CUDA_REQUIRE(cudaEventSynchronize(end));
    float ms = 0.0f;
    FLASHMLA_CUDA_REQUIRE(cudaEventElapsedTime(&ms, begin, end));
    return ms * 1000.0 / launches;
  };
  timed(2);
  const double estimate = timed(2);
  const int burst = std::max(1, static_cast<int>(4000.0 / estimate));
  std::vector<double> bursts, sustained;
  for (int i = 0; i < 7; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    graph.launch();  // wakes the clock
    bursts.push_back(timed(burst));
  }
  timed(std::max(1, static_cast<int>(400000.0 / estimate)));
  for (int i = 0; i < 5; ++i) {
    sustained.push_back(timed(std::max(1, static_cast<int>(20000.0 / estimate))));
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return {median(bursts), median(sustained)};
}

struct Workload {
  std::string name;
  std::vector<std::int32_t> lengths;
  int heads, tokens;
};

// The workload that a name describes; no rows: none.
Workload workload_of(const std::string& name) {
  int batch = 0, length = 0, heads = 0, tokens = 0, read = 0;
  const int fields =
      std::sscanf(name.c_str(), "%dx%d h%d s%d%n", &batch, &length, &heads, &tokens, &read);
  const bool is_whole = fields == 4 && read == static_cast<int>(name.size());
  if (!is_whole || std::min({batch, length, heads, tokens}) < 1) return {name, {}, 0, 0};
  return {name, std::vector<std::int32_t>(batch, length), heads, tokens};
}

void bench(const Workload& workload, cudaStream_t stream, const Times& gbs, const Times& tflops,
           const std::string& kernel) {
  Case spec;
  spec.lengths = workload.lengths;
  spec.num_heads_q = workload.heads;
  spec.seq_len_q = workload.tokens;
  spec.kernel = kernel;
  const double bytes = 1152.0 * element_count(workload.lengths);
  // Enough copies that a copy has left L2 (60 MB) when its turn comes again.
  const int copies = std::min(kCallsInGraph, 1 + static_cast<int>(300e6 / bytes));
  std::vector<Instance> instances;
  for (int i = 0; i < copies; ++i) instances.push_back(make_instance(spec, 40 + i));
  instances[0].launch(stream);
  FLASHMLA_CUDA_REQUIRE(cudaStreamSynchronize(stream));
  // Eight rows of a large batch tell a right result from a fast one.
  const std::int32_t batch = instances[0].problem.batch;
  const double error = compare_with_reference(instances[0], batch, (batch + 7) / 8).out;
  DeviceArray<float> element(1);
  const int calls = bytes > 2e8 ? std::max(2, copies) : kCallsInGraph;
  const Graph plain(
      stream, [&](int i) { instances[i % copies].launch(stream); }, calls);
  const Graph apart(
      stream,
      [&](int i) {
        one_element<<<1, 1, 0, stream>>>(element.data());
        instances[i % copies].launch(stream);
      },
      calls);
  const Graph alone(
      stream, [&](int) { one_element<<<1, 1, 0, stream>>>(element.data()); }, calls);
  const double flop =
      2.0 * (576 + 512) * workload.heads * workload.tokens * element_count(workload.lengths);
  const auto print = [&](const char* mode, double us, double ceiling_gbs, double ceiling_tflops) {
    const double floor = std::max(bytes / ceiling_gbs * 1e-3, flop / ceiling_tflops * 1e-6);
    std::printf("%s,%s,%.2f,%.1f,%.0f,%.1f,%.2e\n", workload.name.c_str(), mode, us,
                flop / us * 1e-6, bytes / us * 1e-3, 100.0 * floor / us, error);
    std::fflush(stdout);
  };
  Times times = time_graph(plain, stream);
  print("burst", times.burst / calls, gbs.burst, tflops.burst);
  print("sustained", times.sustained / calls, gbs.sustained, tflops.sustained);
  const Times between = time_graph(apart, stream), foreign = time_graph(alone, stream);
  print("apart_burst", (between.burst - foreign.burst) / calls, gbs.burst, tflops.burst);
  print("apart_sustained", (between.sustained - foreign.sustained) / calls, gbs.sustained,
        tflops.sustained);
}

void bench_plan(int batch, cudaStream_t stream) {
  std::mt19937 random(1);
  std::vector<std::int32_t> lengths(batch);
  for (std::int32_t& length : lengths) length = 1 + static_cast<std::int32_t>(random() % 8192);
  DeviceArray<std::int32_t> device(lengths), rows(132 * kPlanRowFields), splits(batch + 1);
  PlanProblem plan{};
  plan.batch = batch;
  plan.cache_seqlens = device.data();
  plan.cache_seqlens_stride = 1;
  plan.plan_rows = rows.data();
  plan.num_parts = 132;
  plan.num_splits = splits.data();
  const Graph graph(
      stream, [&](int) { require(cuda::plan(plan, stream)); }, kCallsInGraph);
  const Times times = time_graph(graph, stream);
  std::printf("plan b%d,burst,%.2f,,,,\nplan b%d,sustained,%.2f,,,,\n", batch,
              times.burst / kCallsInGraph, batch, times.sustained / kCallsInGraph);
}

Times measure_bandwidth(cudaStream_t stream) {
  const std::size_t bytes = std::size_t{4} << 30;
  DeviceArray<std::uint8_t> data(bytes);
  data.fill(1);
  DeviceArray<unsigned> sink(1);
  const Graph graph(
      stream,
      [&](int) {
        read_all<<<132 * 4, 512, 0, stream>>>(reinterpret_cast<const uint4*>(data.data()),
                                              bytes / 16, sink.data());
      },
      1);
  const Times times = time_graph(graph, stream);
  return {bytes / times.burst * 1e-3, bytes / times.sustained * 1e-3};
}

Times measure_products(cudaStream_t stream) {
  const int tiles = 512, shared = 2 * 9 * 8192;
  DeviceArray<float> sink(1);
  FLASHMLA_CUDA_REQUIRE(
      cudaFuncSetAttribute(multiply_only, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  const Graph graph(
      stream, [&](int) { multiply_only<<<132, 384, shared, stream>>>(tiles, 3, sink.data()); }, 1);
  const Times times = time_graph(graph, stream);
  const double flop = 132.0 * tiles * 64 * 64 * 2 * (576 + 512);
  return {flop / times.burst * 1e-6, flop / times.sustained * 1e-6};
}

}  // namespace
}  // namespace flashmla::cuda_test

int main(int argc, char** argv) {
  using namespace flashmla::cuda_test;
  const std::string filter = argc > 1 ? argv[1] : "";
  const std::string kernel = argc > 2 ? argv[2] : "";
  cudaStream_t stream;
  FLASHMLA_CUDA_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const auto same = [](int batch, int length) { return std::vector<std::int32_t>(batch, length); };
  const std::vector<std::int32_t> uneven = {4641, 45118, 1730, 1696};
  // As a server has them: 64 rows of up to 8192 tokens.
  std::mt19937 random(7);
  std::vector<std::int32_t> mixed(64);
  for (std::int32_t& length : mixed) length = 1 + static_cast<std::int32_t>(random() % 8192);
  const Workload workloads[] = {
      {"128x8192 h128 s1", same(128, 8192), 128, 1},
      {"128x4096 h128 s1", same(128, 4096), 128, 1},
      {"128x8192 h128 s2", same(128, 8192), 128, 2},
      {"16x4096 h128 s1", same(16, 4096), 128, 1},
      {"8x4096 h128 s1", same(8, 4096), 128, 1},
      {"1x4096 h128 s1", same(1, 4096), 128, 1},
      {"256x1024 h128 s1", same(256, 1024), 128, 1},
      {"64x1024 h128 s1", same(64, 1024), 128, 1},
      {"128x8192 h64 s1", same(128, 8192), 64, 1},
      {"128x8192 h16 s1", same(128, 8192), 16, 1},
      {"64x4096 h16 s1", same(64, 4096), 16, 1},
      {"8x4096 h16 s1", same(8, 4096), 16, 1},
      {"1x8192 h16 s1", same(1, 8192), 16, 1},
      {"1x32768 h16 s1", same(1, 32768), 16, 1},
      {"1x131072 h16 s1", same(1, 131072), 16, 1},
      {"lens h16 s1", uneven, 16, 1},
      {"lens h16 s4", uneven, 16, 4},
      {"1x1 h128 s1", same(1, 1), 128, 1},
      {"1x1024 h128 s1", same(1, 1024), 128, 1},
      {"mixed h128 s1", mixed, 128, 1},
  };
  const Times gbs = measure_bandwidth(stream), tflops = measure_products(stream);
  std::printf("workload,mode,us,tflops,gbs,percent_of_ceiling,relative_error\n");
  std::printf("ceiling read,burst,,,%.0f,,\nceiling read,sustained,,,%.0f,,\n", gbs.burst,
              gbs.sustained);
  std::printf("ceiling wgmma,burst,,%.1f,,,\nceiling wgmma,sustained,,%.1f,,,\n", tflops.burst,
              tflops.sustained);
  bool is_listed = false;
  for (const Workload& workload : workloads) {
    if (workload.name.find(filter) == std::string::npos) continue;
    is_listed = true;
    bench(workload, stream, gbs, tflops, kernel);
  }
  if (const Workload other = workload_of(filter); !is_listed && !other.lengths.empty()) {
    bench(other, stream, gbs, tflops, kernel);
  }
  for (const int batch : {1, 128, 1024, 8192}) {
    if (("plan b" + std::to_string(batch)).find(filter) != std::string::npos) {
      bench_plan(batch, stream);
    }
  }
  return 0;
}
