// Checks the CUDA backend on a GPU against float64. Usage: cuda_check [all | small | NAME...]; NAME
// is a part of the name of a case, or of a check that main() lists.
// Exit status 0: there were checks, and every one passed.
#include <cinttypes>
#include <initializer_list>
#include <limits>

#include "backends/cuda/common/launch.cuh"
#include "backends/cuda/common/params.cuh"
#include "backends/cuda/ptx/launch.cuh"
#include "cuda/cases.cuh"
#include "cuda/support.cuh"
#include "tuning/plan.hpp"

namespace flashmla::cuda_test {
namespace {

int checks = 0, failures = 0;

void report(const std::string& name, bool ok, const std::string& detail) {
  ++checks;
  if (!ok) ++failures;
  std::printf("%-4s %-52s %s\n", ok ? "ok" : "FAIL", name.c_str(), detail.c_str());
  std::fflush(stdout);
}

std::string format(const char* pattern, double a, double b, double c) {
  char text[128];
  std::snprintf(text, sizeof text, pattern, a, b, c);
  return text;
}

void disturb() {
  FLASHMLA_CUDA_REQUIRE(cudaFuncSetAttribute(
      poison_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
  poison_shared_memory<<<132, 256, 200 * 1024>>>();
}

constexpr int kNaNs = 0xff;    // in every byte: NaN, and the mark of a place not yet written
constexpr int kNoMark = 0x3c;  // an ordinary number, which a merge would take for a result
constexpr int kGuardByte = 0x5a;
constexpr std::size_t kGuardBytes = 4096;  // after a workspace

// With `unwritten` the workspace stays so, for initcheck to see who reads it first; but not the
// numbers of the wide kernel, which the copy engine writes: initcheck does not see that.
void poison_workspace(const Instance& instance, int byte, bool unwritten) {
  if (!unwritten) {
    instance.workspace.fill(byte);
    return;
  }
  const Problem& p = instance.problem;
  if (select_kernel(p, instance.spec.kernel).form != select::Form::kWide) return;
  const std::size_t numbers =
      std::size_t{2} * p.num_parts * p.num_heads_k * p.query_rows() * p.head_dim_v;
  FLASHMLA_CUDA_REQUIRE(
      cudaMemset(instance.workspace.data(), byte, numbers * sizeof(std::uint16_t)));
}

// Whether all that is no result of the first `rows` rows has kept its bits, which were ones.
bool is_untouched(const Instance& instance, std::int32_t rows,
                  const std::vector<std::uint16_t>& out, const std::vector<float>& lse) {
  const Problem& p = instance.problem;
  std::vector<char> is_out(out.size()), is_lse(lse.size());
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t t = 0; t < p.seq_len_q; ++t) {
      for (std::int64_t h = 0; h < p.num_heads_q; ++h) {
        std::fill_n(is_out.begin() + instance.out_begin + row * p.out_batch_stride +
                        t * p.out_token_stride + h * p.out_head_stride,
                    p.head_dim_v, 1);
        is_lse[kMargin + row * p.lse_batch_stride + t * p.lse_token_stride +
               h * p.lse_head_stride] = 1;
      }
    }
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (is_out[i] == 0 && out[i] != 0xffff) return false;
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &lse[i], sizeof bits);
    if (is_lse[i] == 0 && bits != 0xffffffff) return false;
  }
  return true;
}

// Whether the bytes after the workspace are as they were.
bool is_guard_whole(const Instance& instance, std::size_t workspace_bytes) {
  std::vector<std::uint8_t> guard(instance.workspace.size() - workspace_bytes);
  FLASHMLA_CUDA_REQUIRE(cudaMemcpy(guard.data(), instance.workspace.data() + workspace_bytes,
                                   guard.size(), cudaMemcpyDeviceToHost));
  return std::all_of(guard.begin(), guard.end(),
                     [](std::uint8_t byte) { return byte == kGuardByte; });
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// Of ordinary bf16 inputs.
bool is_right(const Instance& instance) {
  const Errors errors = compare_with_reference(instance, instance.problem.batch);
  return errors.out <= 3e-3 && errors.lse <= 2e-5 && !errors.has_bad_values;
}

// Right, untouched wherever no result lies, the same bits on every run.
void check_case(const Case& spec, std::uint32_t seed, int runs, bool unwritten) {
  Instance instance = make_instance(spec, seed);
  const std::int32_t walked = spec.plan == "padded" || spec.plan == "stale"
                                  ? instance.problem.batch - 1
                                  : instance.problem.batch;
  // Without a guard a memory checker sees where the workspace ends.
  const std::size_t workspace_bytes = instance.workspace.size();
  if (!unwritten) instance.workspace = DeviceArray<std::uint8_t>(workspace_bytes + kGuardBytes);
  std::vector<std::uint16_t> first_out;
  std::vector<float> first_lse;
  bool repeats = true, untouched = true;
  for (int run = 0; run < runs; ++run) {
    instance.out.fill(0xff);
    instance.lse.fill(0xff);
    poison_workspace(instance, run % 2 == 0 ? kNoMark : kNaNs, unwritten);
    if (!unwritten) {
      FLASHMLA_CUDA_REQUIRE(
          cudaMemset(instance.workspace.data() + workspace_bytes, kGuardByte, kGuardBytes));
    }
    disturb();
    if (const Status status = instance.enqueue(); !status.ok()) {
      report(spec.name, false, status.message());
      return;
    }
    FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
    untouched = untouched && (unwritten || is_guard_whole(instance, workspace_bytes));
    std::vector<std::uint16_t> out = instance.out.download();
    std::vector<float> lse = instance.lse.download();
    if (run == 0) {
      first_out = std::move(out);
      first_lse = std::move(lse);
    } else {
      repeats = repeats && out == first_out && same_bits(lse, first_lse);
    }
  }
  untouched = untouched && is_untouched(instance, walked, first_out, first_lse);
  const Errors errors = compare_with_reference(instance, walked);
  const bool peaky = spec.q_scale > 1.0f;
  const double bound =
      spec.dtype == DType::kBFloat16 ? (peaky ? 6e-3 : 3e-3) : (peaky ? 1e-3 : 5e-4);
  // Scores of fp16 are sums in float32 of terms much larger than they.
  const double lse_bound = peaky ? 2e-5 * spec.q_scale
                           : spec.large != Large::kNothing && spec.dtype == DType::kFloat16 ? 5e-2
                                                                                            : 2e-5;
  const bool ok = errors.out <= bound && errors.lse <= lse_bound && !errors.has_bad_values &&
                  repeats && untouched && errors.worst_query_row <= (spec.apart ? 6e-3 : 3 * bound);
  report(spec.name, ok,
         format("out %.2e lse %.2e worst %.2e", errors.out, errors.lse, errors.worst_query_row) +
             (errors.has_bad_values ? " BAD VALUES" : "") + (repeats ? "" : " NOT REPEATABLE") +
             (untouched ? "" : " TOUCHED"));
}

// What a planner writes: all of it, and nothing around it.
class PlanWords {
 public:
  // With `unwritten` nothing is written here, and nothing lies around it, for tools that watch
  // both.
  PlanWords(std::size_t size, bool unwritten)
      : guard_(unwritten ? 0 : kGuard), words_(guard_ + size + guard_) {
    if (!unwritten) words_.fill(kGuardByte);
  }
  std::int32_t* data() const { return words_.data() + guard_; }

  bool are(const std::vector<std::int32_t>& want) const {
    std::int32_t untouched;
    std::memset(&untouched, kGuardByte, sizeof untouched);
    std::vector<std::int32_t> all(guard_, untouched);
    all.insert(all.end(), want.begin(), want.end());
    all.resize(all.size() + guard_, untouched);
    return words_.download() == all;
  }

 private:
  static constexpr std::size_t kGuard = 64;  // words; data() stays a multiple of 256 bytes
  std::size_t guard_;
  DeviceArray<std::int32_t> words_;
};

struct PlanLengths {
  std::string name;
  std::vector<std::int32_t> lengths;
};

// Lengths that a planner may take for random ones, for nearly alike, and for too many blocks.
std::vector<PlanLengths> plan_lengths(int batch, bool few, std::mt19937& random) {
  std::vector<PlanLengths> list;
  const auto add_all = [&](const std::string& name, const auto& length_of) {
    std::vector<std::int32_t> lengths(batch);
    for (int row = 0; row < batch; ++row) lengths[row] = length_of(row);
    list.push_back({name, std::move(lengths)});
  };
  const std::vector<std::int32_t> most =
      few ? std::vector<std::int32_t>{5000}
          : std::vector<std::int32_t>{0, 1, 100, 200000, 5000000, 2000000000};
  for (const std::int32_t length : most) {
    add_all("up to " + std::to_string(length),
            [&](int) { return static_cast<std::int32_t>(random() % (length + 1)); });
  }
  const std::vector<std::int32_t> alike =
      few ? std::vector<std::int32_t>{4096} : std::vector<std::int32_t>{4096, 8192};
  for (const std::int32_t length : alike) {
    add_all("about " + std::to_string(length),
            [&](int) { return length - static_cast<std::int32_t>(random() % 64); });
  }
  // So many blocks in the rows of a thread are planned in 32 bits, one more in 64: in a row whose
  // neighbours have none, and in two neighbours.
  constexpr std::int32_t kMostBlocks = 65535, kNeighbours = 16;
  const auto add_long = [&](const std::string& name, std::int32_t long_rows, std::int32_t tokens) {
    add_all(name, [&](int row) {
      const int place = row - batch / 2 / kNeighbours * kNeighbours;
      if (place >= 0 && place < kNeighbours) return place < long_rows ? tokens : 0;
      return static_cast<std::int32_t>(random() % 1000);
    });
  };
  add_long("a block too many", 1, kMostBlocks * kBlockTokens + 1);
  if (few) return list;
  add_long("as many blocks as fit", 1, kMostBlocks * kBlockTokens);
  add_long("a block too many in two rows", 2, (kMostBlocks + 1) / 2 * kBlockTokens);
  return list;
}

// The device planner's bytes against the host's. small: by every kernel of it and both its paths.
void check_plans(bool small) {
  std::mt19937 random(5);
  using Numbers = std::vector<std::int32_t>;
  const Numbers batches =
      small ? Numbers{1, 257, 1025, 8193}
            : Numbers{0, 1, 2, 7, 128, 256, 257, 1000, 1024, 1025, 8192, 8193, 65536, 100000};
  const Numbers all_parts =
      small ? Numbers{132}
            : Numbers{1, 66, 132, 1500, select::kCudaMaxParts, select::kCudaMaxParts + 1};
  int plans = 0, different = 0;
  for (const std::int32_t batch : batches) {
    for (const auto& [name, lengths] : plan_lengths(batch, small, random)) {
      // Where lengths lie on the device: the first, and the numbers from one to the next. The last
      // can be read by 16 bytes.
      constexpr std::pair<std::size_t, std::size_t> kLayouts[] = {{0, 2}, {1, 1}, {0, 1}};
      std::vector<DeviceArray<std::int32_t>> device_lengths;
      for (const auto& [first, stride] : kLayouts) {
        std::vector<std::int32_t> spread(first + stride * lengths.size(), kBetween);
        for (std::size_t row = 0; row < lengths.size(); ++row) {
          spread[first + stride * row] = lengths[row];
        }
        device_lengths.emplace_back(spread);
      }
      for (const std::int32_t parts : all_parts) {
        for (const std::int32_t query_rows : {16, 128}) {
          std::vector<std::int32_t> want_rows(parts * kPlanRowFields), want_splits(batch + 1);
          PlanProblem plan{};
          plan.batch = batch;
          plan.num_heads_per_head_k = query_rows;
          plan.cache_seqlens = lengths.data();
          plan.cache_seqlens_stride = 1;
          plan.plan_rows = want_rows.data();
          plan.num_parts = parts;
          plan.num_splits = want_splits.data();
          schedule::plan_on_host(plan, tuning::cuda_plan(query_rows));
          for (std::size_t i = 0; i < std::size(kLayouts); ++i) {
            const PlanWords rows(want_rows.size(), small), splits(want_splits.size(), small);
            plan.cache_seqlens = device_lengths[i].data() + kLayouts[i].first;
            plan.cache_seqlens_stride = kLayouts[i].second;
            plan.plan_rows = rows.data();
            plan.num_splits = splits.data();
            require(cuda::plan(plan, nullptr));
            FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
            ++plans;
            if (!rows.are(want_rows) || !splits.are(want_splits)) {
              ++different;
              report("plan b" + std::to_string(batch) + " parts" + std::to_string(parts) + " h" +
                         std::to_string(query_rows) + " " + name,
                     false, "differs from the host's, or touched more");
            }
          }
        }
      }
    }
  }
  report("plans equal the host's", different == 0, std::to_string(plans) + " plans");
}

// Replays of one graph (plan, attention, combine) while lengths change, and two streams at once on
// one plan, against plain calls.
void check_graph(int heads, int replays) {
  Case spec;
  spec.lengths = {1000, 5000, 64, 2000};
  spec.num_heads_q = heads;
  Instance instance = make_instance(spec, 77);
  std::mt19937 random(3);
  cudaStream_t stream, other;
  FLASHMLA_CUDA_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  FLASHMLA_CUDA_REQUIRE(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  const PlanProblem plan =
      plan_problem(instance.problem, instance.plan_rows.data(), instance.num_splits.data());
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  FLASHMLA_CUDA_REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  require(cuda::plan(plan, stream));
  instance.launch(stream);
  FLASHMLA_CUDA_REQUIRE(cudaStreamEndCapture(stream, &graph));
  FLASHMLA_CUDA_REQUIRE(cudaGraphInstantiate(&executable, graph, 0));
  bool ok = true;
  for (int round = 0; round < 4; ++round) {
    std::vector<std::int32_t> lengths = spec.lengths;
    for (std::int32_t& length : lengths) length = 1 + static_cast<std::int32_t>(random() % length);
    instance.lengths.upload(lengths);
    instance.spec.lengths = lengths;
    for (int i = 0; i < replays; ++i) {
      FLASHMLA_CUDA_REQUIRE(cudaGraphLaunch(executable, stream));
    }
    FLASHMLA_CUDA_REQUIRE(cudaStreamSynchronize(stream));
    ok = ok && is_right(instance);

    // The same plan on two streams, each with its own workspace and result.
    Problem second = instance.problem;
    DeviceArray<std::uint16_t> out(instance.out.size());
    DeviceArray<float> lse(instance.lse.size());
    DeviceArray<std::uint8_t> workspace(instance.workspace.size());
    out.fill(0xff);
    lse.fill(0xff);
    second.out = out.data() + instance.out_begin;
    second.lse = lse.data() + kMargin;
    for (int i = 0; i < replays / 10; ++i) {
      instance.launch(stream);
      require(cuda::decode(second, select_kernel(second, {}), workspace.data(), other));
    }
    FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
    ok = ok && out.download() == instance.out.download();
  }
  report("graph replays and two streams, h" + std::to_string(heads), ok, "");
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  cudaStreamDestroy(other);
}

// Garbage in use: any result, but no fault. Meant for a memory checker too.
void check_hostile(bool unwritten) {
  const auto is_harmless = [&](const std::string& what, Instance& instance) {
    poison_workspace(instance, kNoMark, unwritten);
    require(instance.enqueue());
    const cudaError_t error = cudaDeviceSynchronize();
    report("hostile " + what + " h" + std::to_string(instance.spec.num_heads_q) + " page" +
               std::to_string(instance.spec.page_size) + " " + instance.spec.kernel,
           error == cudaSuccess, cudaGetErrorString(error));
  };
  std::mt19937 random(12);
  const std::pair<int, const char*> kernels[] = {
      {16, ""}, {32, ""}, {128, ""}, {128, "sm90a_divided_bf16_576"}};
  for (const auto& [heads, kernel] : kernels) {
    for (const int page : {1, 16, 64}) {
      Case spec;
      spec.lengths = {300, 65};
      spec.num_heads_q = heads;
      spec.page_size = page;
      spec.kernel = kernel;
      Instance instance = make_instance(spec, 11, true);
      is_harmless("block ids", instance);

      // Lengths, plan and visible_lens too, four times.
      spec.seq_len_q = 2;
      spec.num_heads_q = heads / 2;
      spec.visible_lens = true;
      spec.plan = "random";
      spec.num_parts = 5;
      for (int round = 0; round < 4; ++round) {
        Instance wild = make_instance(spec, 13 + round, true);
        const auto spoil = [&](DeviceArray<std::int32_t>& numbers) {
          constexpr std::int32_t kWild[] = {INT32_MIN, -5, -1, 0, 1, 2, 3, 1 << 20, INT32_MAX};
          std::vector<std::int32_t> values(numbers.size());
          for (std::int32_t& value : values) value = kWild[random() % std::size(kWild)];
          numbers.upload(values);
        };
        spoil(wild.lengths);
        spoil(wild.visible);
        spoil(wild.plan_rows);
        is_harmless("lengths, visible_lens and plan", wild);
      }

      // Lengths of rows that a cache without pages can not hold.
      Instance empty = make_instance(spec, 17);
      empty.problem.k_cache = nullptr;
      empty.problem.block_table = nullptr;
      empty.problem.num_blocks = empty.problem.max_pages_per_row = 0;
      is_harmless("lengths without pages", empty);
    }
  }
}

// The cache's elements do not fit in 32 bits.
void check_large_cache() {
  Case spec;
  spec.lengths = {257};
  spec.num_heads_q = 16;
  for (const int heads : {16, 128}) {
    spec.num_heads_q = heads;
    Instance small = make_instance(spec, 21);
    small.launch();
    Instance large = make_instance(spec, 21);
    const std::int64_t blocks = 70000, block = small.problem.k_block_stride;
    large.cache = DeviceArray<std::uint16_t>(blocks * block);
    large.cache.fill(0xff);
    large.problem.k_cache = large.cache.data();
    large.problem.num_blocks = blocks;
    std::vector<std::int32_t> table = small.table.download();
    const std::int32_t ids[] = {58253, 58254, 58255, 69999, 0};
    for (int i = 0; i < 5; ++i) {
      FLASHMLA_CUDA_REQUIRE(cudaMemcpy(large.cache.data() + ids[i] * block,
                                       small.cache.data() + table[i] * block, block * 2,
                                       cudaMemcpyDeviceToDevice));
      table[i] = ids[i];
    }
    large.table.upload(table);
    large.launch();
    FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
    report("offsets past 2^31 elements, h" + std::to_string(heads),
           small.out.download() == large.out.download(), "");
  }
}

// Strides of which a few steps do not fit in 32 bits, of all that kernels step along themselves.
void check_large_strides() {
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;
  constexpr std::int64_t kFarPage = (std::int64_t{1} << 29) + 16;  // four steps
  const std::int64_t q_row = 128 * 576, out_row = 128 * 512, lse_row = 128, last_page = 4;
  DeviceArray<std::uint16_t> q(kFar + q_row), out(kFar + out_row);
  DeviceArray<float> lse(kFar + lse_row);
  DeviceArray<std::int32_t> lengths(kFar + 1), table(last_page * kFarPage + 2);
  for (const int heads : {16, 32, 128}) {
    for (const char* plan : {"one", "shares"}) {
      Case spec;
      spec.lengths = {257, 130};
      spec.num_heads_q = heads;
      spec.plan = plan;
      spec.num_parts = 4;
      spec.tight = true;
      Instance instance = make_instance(spec, 23);
      instance.launch();
      const Problem near = instance.problem;
      Problem far = near;
      far.q = q.data();
      far.out = out.data();
      far.lse = lse.data();
      far.cache_seqlens = lengths.data();
      far.block_table = table.data();
      far.q_batch_stride = far.out_batch_stride = far.lse_batch_stride = kFar;
      far.cache_seqlens_stride = kFar;
      far.block_table_page_stride = kFarPage;
      far.block_table_batch_stride = 1;
      const auto copy = [](auto* to, const auto* from, std::int64_t count) {
        FLASHMLA_CUDA_REQUIRE(cudaMemcpy(to, from, count * sizeof(*to), cudaMemcpyDeviceToDevice));
      };
      for (std::int64_t row = 0; row < 2; ++row) {
        copy(q.data() + row * kFar, instance.q.data() + row * near.q_batch_stride,
             near.q_batch_stride);
        copy(lengths.data() + row * kFar, instance.lengths.data() + row, 1);
        for (std::int64_t page = 0; page < near.max_pages_per_row; ++page) {
          copy(table.data() + page * kFarPage + row,
               instance.table.data() + row * near.block_table_batch_stride + page, 1);
        }
        FLASHMLA_CUDA_REQUIRE(cudaMemset(out.data() + row * kFar, 0xff, out_row * 2));
        FLASHMLA_CUDA_REQUIRE(cudaMemset(lse.data() + row * kFar, 0xff, lse_row * 4));
      }
      require(cuda::decode(far, select_kernel(far, {}), instance.workspace.data(), nullptr));
      FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
      // Where the compact results lie, for one comparison.
      DeviceArray<std::uint16_t> got_out(instance.out.size());
      DeviceArray<float> got_lse(instance.lse.size());
      got_out.fill(0xff);
      got_lse.fill(0xff);
      for (std::int64_t row = 0; row < 2; ++row) {
        copy(got_out.data() + instance.out_begin + row * near.out_batch_stride,
             out.data() + row * kFar, near.out_batch_stride);
        copy(got_lse.data() + kMargin + row * near.lse_batch_stride, lse.data() + row * kFar,
             near.lse_batch_stride);
      }
      report("strides past 2^31 elements, h" + std::to_string(heads) + " " + plan,
             got_out.download() == instance.out.download() &&
                 same_bits(got_lse.download(), instance.lse.download()),
             "");
    }
  }
}

// What write_late() writes.
struct LateWrites {
  static constexpr int kTensors = 6;
  struct {
    std::uint32_t* to;
    const std::uint32_t* from;
    std::size_t words;
  } tensors[kTensors];
};

// Lets the next grid begin at once, and writes what that one reads long after.
__global__ void write_late(const __grid_constant__ LateWrites writes) {
  constexpr long long kCycles = 500000;
  cuda::ptx::allow_next_grid();
  const long long begin = clock64();
  while (clock64() - begin < kCycles) {
  }
  for (const auto& tensor : writes.tensors) {
    for (std::size_t i = threadIdx.x; i < tensor.words; i += blockDim.x) {
      tensor.to[i] = tensor.from[i];
    }
  }
}

// Attention begins while the grid before it still writes all that it reads: nothing that it finds
// there too early may reach a result.
void check_late_writes() {
  cudaStream_t stream;
  FLASHMLA_CUDA_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const std::pair<int, const char*> kernels[] = {
      {8, ""}, {16, ""}, {64, ""}, {64, "sm90a_divided_bf16_576"}};
  for (const auto& [heads, kernel] : kernels) {
    Case spec;
    spec.lengths = {300, 65, 700, 0, 130};
    spec.num_heads_q = heads;
    spec.kernel = kernel;
    spec.seq_len_q = 2;
    spec.visible_lens = true;
    spec.plan = "random";
    spec.num_parts = 9;
    Instance instance = make_instance(spec, 31);
    instance.launch();
    FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
    const std::vector<std::uint16_t> want_out = instance.out.download();
    const std::vector<float> want_lse = instance.lse.download();
    Case other = spec;  // tensors as large, of other contents
    std::rotate(other.lengths.begin(), other.lengths.begin() + 2, other.lengths.end());
    const Instance before = make_instance(other, 32);

    LateWrites writes{};
    std::vector<DeviceArray<std::uint32_t>> right;
    int count = 0;
    const auto add_tensor = [&](const auto& tensor) {
      const std::size_t words = tensor.size() * sizeof(*tensor.data()) / sizeof(std::uint32_t);
      right.emplace_back(words);
      FLASHMLA_CUDA_REQUIRE(
          cudaMemcpy(right.back().data(), tensor.data(), 4 * words, cudaMemcpyDeviceToDevice));
      writes.tensors[count++] = {reinterpret_cast<std::uint32_t*>(tensor.data()),
                                 right.back().data(), words};
    };
    add_tensor(instance.plan_rows);
    add_tensor(instance.lengths);
    add_tensor(instance.table);
    add_tensor(instance.visible);
    add_tensor(instance.q);
    add_tensor(instance.cache);
    const void* const others[] = {before.plan_rows.data(), before.lengths.data(),
                                  before.table.data(),     before.visible.data(),
                                  before.q.data(),         before.cache.data()};

    // What is found too early: other tensors, all of them or one, or the same byte everywhere.
    bool ok = true;
    constexpr int kAll = (1 << LateWrites::kTensors) - 1;
    const auto check = [&](int spoilt, int byte) {
      for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < LateWrites::kTensors; ++i) {
          if ((spoilt >> i & 1) == 0) continue;
          auto& [to, from, words] = writes.tensors[i];
          FLASHMLA_CUDA_REQUIRE(
              byte >= 0 ? cudaMemset(to, byte, 4 * words)
                        : cudaMemcpy(to, others[i], 4 * words, cudaMemcpyDeviceToDevice));
        }
        instance.out.fill(0xff);
        instance.lse.fill(0xff);
        poison_workspace(instance, kNoMark, false);
        FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
        write_late<<<1, 512, 0, stream>>>(writes);
        instance.launch(stream);
        FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
        ok = ok && instance.out.download() == want_out &&
             same_bits(instance.lse.download(), want_lse);
      }
    };
    check(kAll, -1);
    for (int i = 0; i < LateWrites::kTensors; ++i) check(1 << i, -1);
    for (const int byte : {0x00, 0x7f, 0xff}) check(kAll, byte);
    report("inputs written late, h" + std::to_string(heads), ok, "");
  }
  cudaStreamDestroy(stream);
}

// Problems that the device plans anew, between them by each of its kernels and for each of the
// attention kernels.
constexpr struct {
  std::int32_t batch, heads, tokens;
} kPlanned[] = {{5, 8, 2},    {5, 16, 2},   {5, 64, 2},  {300, 16, 1},
                {1100, 8, 1}, {8200, 1, 1}, {1, 128, 1}, {1, 20, 1}};

// Every eighth row is longer than a block; which of them, and so the plan, depends on the seed.
std::vector<std::int32_t> uneven_lengths(std::int32_t batch, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> lengths(batch);
  for (std::int32_t row = 0; row < batch; ++row) {
    const bool is_long = row % 8 == static_cast<std::int32_t>(seed % 8);
    lengths[row] = static_cast<std::int32_t>(is_long ? 100 + random() % 200 : random() % 24);
  }
  return lengths;
}

Case planned_case(std::int32_t batch, std::int32_t heads, std::int32_t tokens, std::uint32_t seed) {
  Case spec;
  spec.lengths = uneven_lengths(batch, seed);
  spec.num_heads_q = heads;
  spec.seq_len_q = tokens;
  spec.page_size = 16;
  return spec;
}

std::string planned_name(std::int32_t batch, std::int32_t heads, std::int32_t tokens) {
  return "b" + std::to_string(batch) + " h" + std::to_string(heads) + " s" + std::to_string(tokens);
}

// The planner begins while the grid before it still writes the lengths, attention while the planner
// still writes the plan: neither may use what it finds there too early.
void check_late_lengths() {
  cudaStream_t stream;
  FLASHMLA_CUDA_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const auto& [batch, heads, tokens] : kPlanned) {
    const Instance instance = make_instance(planned_case(batch, heads, tokens, 1), 33);
    instance.launch();
    FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
    bool ok = is_right(instance);
    const std::vector<std::uint16_t> want_out = instance.out.download();
    const std::vector<float> want_lse = instance.lse.download();
    const std::vector<std::int32_t> want_rows = instance.plan_rows.download(),
                                    want_splits = instance.num_splits.download();
    const PlanProblem plan =
        plan_problem(instance.problem, instance.plan_rows.data(), instance.num_splits.data());
    const DeviceArray<std::int32_t> lengths(instance.lengths.download()),
        other_lengths(uneven_lengths(batch, 2));
    LateWrites writes{};
    writes.tensors[0] = {reinterpret_cast<std::uint32_t*>(instance.lengths.data()),
                         reinterpret_cast<const std::uint32_t*>(lengths.data()), lengths.size()};
    // What is found too early: other lengths and their plan, or the same byte everywhere.
    for (const int byte : {-1, 0x00, 0x7f, 0xff}) {
      for (int round = 0; round < 3; ++round) {
        if (byte < 0) {
          FLASHMLA_CUDA_REQUIRE(cudaMemcpy(instance.lengths.data(), other_lengths.data(),
                                           other_lengths.size() * sizeof(std::int32_t),
                                           cudaMemcpyDeviceToDevice));
          require(cuda::plan(plan, nullptr));
        } else {
          instance.lengths.fill(byte);
          instance.plan_rows.fill(byte);
          instance.num_splits.fill(byte);
        }
        instance.out.fill(0xff);
        instance.lse.fill(0xff);
        poison_workspace(instance, kNoMark, false);
        FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
        ok = ok && instance.plan_rows.download() != want_rows;
        write_late<<<1, 512, 0, stream>>>(writes);
        require(cuda::plan(plan, stream));
        instance.launch(stream);
        FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
        ok = ok && instance.plan_rows.download() == want_rows &&
             instance.num_splits.download() == want_splits && instance.out.download() == want_out &&
             same_bits(instance.lse.download(), want_lse);
      }
    }
    report("lengths written late, " + planned_name(batch, heads, tokens), ok, "");
  }
  cudaStreamDestroy(stream);
}

// Writes the lengths of the next call once all calls before are done with theirs.
__global__ void copy_lengths(const std::int32_t* from, std::int32_t* to, int count) {
  cuda::ptx::allow_next_grid();
  cuda::ptx::wait_for_previous_grid();
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// Calls that follow one another at once, each with other lengths, which are copied to where those
// of the call before were, and a plan in the place of its plan.
void check_replanning() {
  constexpr std::uint32_t kCalls = 3;
  cudaStream_t stream;
  FLASHMLA_CUDA_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const auto& [batch, heads, tokens] : kPlanned) {
    std::vector<Instance> instances;
    for (std::uint32_t seed = 0; seed < kCalls; ++seed) {
      instances.push_back(make_instance(planned_case(batch, heads, tokens, seed), 51 + seed));
    }
    const std::int32_t parts = instances[0].problem.num_parts;
    const DeviceArray<std::int32_t> lengths(batch), rows(instances[0].plan_rows.size()),
        splits(batch + 1);
    std::size_t workspace_bytes = 0;
    for (const Instance& instance : instances) {
      workspace_bytes = std::max(workspace_bytes, instance.workspace.size());
    }
    const DeviceArray<std::uint8_t> workspace(workspace_bytes);
    const auto call = [&](const Instance& instance, bool by_copy_engine) {
      Problem problem = instance.problem;
      problem.cache_seqlens = lengths.data();
      problem.plan_rows = rows.data();
      if (by_copy_engine) {
        FLASHMLA_CUDA_REQUIRE(cudaMemcpyAsync(lengths.data(), instance.lengths.data(),
                                              batch * sizeof(std::int32_t),
                                              cudaMemcpyDeviceToDevice, stream));
      } else {
        FLASHMLA_CUDA_REQUIRE(cuda::launch_overlapping(
            copy_lengths, 1, 512, 0, stream, instance.lengths.data(), lengths.data(), batch));
      }
      require(cuda::plan(plan_problem(problem, rows.data(), splits.data()), stream));
      require(cuda::decode(problem, select_kernel(problem, {}), workspace.data(), stream));
    };
    const auto poison = [&] {
      for (const Instance& instance : instances) {
        instance.out.fill(0xff);
        instance.lse.fill(0xff);
      }
      for (const DeviceArray<std::int32_t>* numbers : {&lengths, &rows, &splits}) {
        numbers->fill(0xff);
      }
      workspace.fill(kNoMark);
      FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
    };
    bool ok = true;
    std::vector<std::vector<std::uint16_t>> want_outs;
    std::vector<std::vector<float>> want_lses;
    poison();
    for (const Instance& instance : instances) {
      call(instance, true);
      FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
      ok = ok && is_right(instance);
      want_outs.push_back(instance.out.download());
      want_lses.push_back(instance.lse.download());
    }
    for (int round = 0; round < 20; ++round) {
      poison();
      for (int i = 0; i < 4; ++i) {
        for (const Instance& instance : instances) call(instance, round % 4 == 3);
      }
      FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
      for (std::size_t i = 0; i < instances.size(); ++i) {
        ok = ok && instances[i].out.download() == want_outs[i] &&
             same_bits(instances[i].lse.download(), want_lses[i]);
      }
    }
    report("planned anew in succession, " + planned_name(batch, heads, tokens), ok,
           std::to_string(parts) + " parts");
  }
  cudaStreamDestroy(stream);
}

// Calls that follow one another at once, in one workspace.
void check_succession() {
  constexpr struct {
    int first, second;
  } kHeads[] = {{16, 16}, {32, 32}, {128, 128}, {16, 128}, {128, 32}};
  cudaStream_t stream;
  FLASHMLA_CUDA_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const auto& [first, second] : kHeads) {
    Case spec;
    spec.lengths = {300, 65, 700, 0, 130};
    spec.num_heads_q = first;
    spec.plan = "random";
    spec.num_parts = 13;
    const Instance a = make_instance(spec, 41);
    spec.lengths = {1000, 0, 400};
    spec.num_heads_q = second;
    const Instance b = make_instance(spec, 42);
    a.launch();
    b.launch();
    FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
    const std::vector<std::uint16_t> want_a = a.out.download(), want_b = b.out.download();
    const std::vector<float> want_lse_a = a.lse.download(), want_lse_b = b.lse.download();
    const DeviceArray<std::uint8_t> workspace(std::max(a.workspace.size(), b.workspace.size()));
    bool ok = true;
    for (int round = 0; round < 20; ++round) {
      for (const Instance* instance : {&a, &b}) {
        instance->out.fill(0xff);
        instance->lse.fill(0xff);
      }
      workspace.fill(kNoMark);
      FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
      for (int i = 0; i < 4; ++i) {
        for (const Instance* instance : {&a, &b}) {
          require(cuda::decode(instance->problem, select_kernel(instance->problem, {}),
                               workspace.data(), stream));
        }
      }
      FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
      ok = ok && a.out.download() == want_a && b.out.download() == want_b &&
           same_bits(a.lse.download(), want_lse_a) && same_bits(b.lse.download(), want_lse_b);
    }
    report("in succession, h" + std::to_string(first) + " and h" + std::to_string(second), ok, "");
  }
  cudaStreamDestroy(stream);
}

__global__ void divide(cuda::Divisor divisor, std::int32_t* numbers, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) numbers[i] = divisor.quotient(numbers[i]);
}

// The division that is a multiplication, where its error is largest.
void check_divisor() {
  constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
  std::mt19937 random(9);
  std::vector<std::int32_t> divisors = {1, 2, 3, 5, 7, 48, 63, 64, 65, 100, 784, kMost - 1, kMost};
  for (int bits = 8; bits < 31; ++bits) {
    for (int around = -1; around <= 1; ++around) divisors.push_back((1 << bits) + around);
    divisors.push_back(1 + static_cast<std::int32_t>(random() % (1u << bits)));
  }
  bool ok = true;
  for (const std::int32_t divisor : divisors) {
    std::vector<std::int32_t> numbers = {0, 1, divisor - 1, divisor, kMost - 1, kMost};
    const std::int32_t largest = kMost / divisor;  // quotient
    for (int i = 0; i < 500; ++i) {
      const std::int32_t quotient =
          i < 250 ? std::max(1, largest - i) : 1 + static_cast<std::int32_t>(random() % largest);
      numbers.push_back(quotient * divisor);
      numbers.push_back(quotient * divisor - 1);
    }
    DeviceArray<std::int32_t> device(numbers);
    divide<<<1, 256>>>(cuda::Divisor(divisor), device.data(), static_cast<int>(numbers.size()));
    FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
    const std::vector<std::int32_t> got = device.download();
    for (std::size_t i = 0; i < numbers.size(); ++i) ok = ok && got[i] == numbers[i] / divisor;
  }
  report("division by multiplication", ok, std::to_string(divisors.size()) + " divisors");
}

// merge_attention_states on parts of one problem's tokens is what one softmax of all gives. The
// tensors are permuted and have gaps. `relative`: what rounding to the element type may cost.
template <class Element>
void check_merge(DType dtype, double relative) {
  constexpr std::int64_t kParts = 3, kBatch = 2, kTokens = 2, kQueryHeads = 5, kColumns = 512;
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  MergeProblem p{};
  p.dtype = dtype;
  p.num_parts = kParts;
  p.batch = kBatch;
  p.seq_len_q = kTokens;
  p.num_heads_q = kQueryHeads;
  p.head_dim_v = kColumns;
  std::vector<Element> outs(lay_out(
      kColumns, 1,
      std::array{Dimension{kTokens, &p.outs_strides[2]}, Dimension{kBatch, &p.outs_strides[1]},
                 Dimension{kQueryHeads, &p.outs_strides[3]}, Dimension{kParts, &p.outs_strides[0]}},
      false));
  std::vector<float> lses(lay_out(
      1, 1,
      std::array{Dimension{kQueryHeads, &p.lses_strides[2]}, Dimension{kParts, &p.lses_strides[0]},
                 Dimension{kTokens, &p.lses_strides[3]}, Dimension{kBatch, &p.lses_strides[1]}},
      false));
  for (Element& value : outs) value = static_cast<Element>(normal(random));
  for (float& value : lses) value = 3.0f * normal(random);
  const auto out_place = [&](std::int64_t part, std::int64_t b, std::int64_t t, std::int64_t h) {
    return part * p.outs_strides[0] + b * p.outs_strides[1] + t * p.outs_strides[2] +
           h * p.outs_strides[3];
  };
  const auto lse_place = [&](std::int64_t part, std::int64_t b, std::int64_t t, std::int64_t h) {
    return part * p.lses_strides[0] + b * p.lses_strides[1] + h * p.lses_strides[2] +
           t * p.lses_strides[3];
  };
  // The first query is empty in part 1, where out holds no number, the next in all of them.
  lses[lse_place(1, 0, 0, 0)] = INFINITY;
  for (int c = 0; c < kColumns; ++c) outs[out_place(1, 0, 0, 0) + c] = static_cast<Element>(NAN);
  for (int i = 0; i < kParts; ++i) lses[lse_place(i, 0, 1, 0)] = i == 0 ? -INFINITY : INFINITY;
  DeviceArray<Element> device_outs(outs),
      out(lay_out(
          kColumns, 3,
          std::array{Dimension{kBatch, &p.out_strides[0]}, Dimension{kTokens, &p.out_strides[1]},
                     Dimension{kQueryHeads, &p.out_strides[2]}},
          false));
  DeviceArray<float> device_lses(lses),
      lse(lay_out(
          1, 1,
          std::array{Dimension{kTokens, &p.lse_strides[2]}, Dimension{kBatch, &p.lse_strides[0]},
                     Dimension{kQueryHeads, &p.lse_strides[1]}},
          false));
  p.outs = device_outs.data();
  p.lses = device_lses.data();
  p.out = out.data();
  p.lse = lse.data();
  require(cuda::merge(p, nullptr));
  FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
  const std::vector<Element> got = out.download();
  const std::vector<float> got_lse = lse.download();
  bool ok = true;
  for (int b = 0; b < kBatch; ++b) {
    for (int t = 0; t < kTokens; ++t) {
      for (int h = 0; h < kQueryHeads; ++h) {
        double sum = 0.0;
        for (int i = 0; i < kParts; ++i) {
          const double part_lse = lses[lse_place(i, b, t, h)];
          if (!std::isinf(part_lse)) sum += std::exp(part_lse);
        }
        for (int c = 0; c < kColumns; ++c) {
          double want = 0.0;
          for (int i = 0; i < kParts; ++i) {
            const double part_lse = lses[lse_place(i, b, t, h)];
            if (std::isinf(part_lse)) continue;
            want += std::exp(part_lse) / sum * static_cast<float>(outs[out_place(i, b, t, h) + c]);
          }
          const double found = static_cast<float>(
              got[b * p.out_strides[0] + t * p.out_strides[1] + h * p.out_strides[2] + c]);
          ok = ok && std::abs(found - want) <= 1e-5 + relative * std::abs(want);
        }
        const double want_lse = sum == 0.0 ? INFINITY : std::log(sum);
        const double found =
            got_lse[b * p.lse_strides[0] + h * p.lse_strides[1] + t * p.lse_strides[2]];
        ok = ok && (found == want_lse || std::abs(found - want_lse) < 1e-5);
      }
    }
  }
  report("merge of partial results, " + type_name(dtype), ok, "");
}

}  // namespace
}  // namespace flashmla::cuda_test

int main(int argc, char** argv) {
  using namespace flashmla::cuda_test;
  using flashmla::DType;
  std::vector<std::string> names(argv + 1, argv + argc);
  if (names.empty()) names = {"all"};
  const bool small = names[0] == "small", all = names[0] == "all";
  const auto is_chosen = [&](const std::string& name) {
    return all || std::any_of(names.begin(), names.end(), [&](const std::string& part) {
             return name.find(part) != std::string::npos;
           });
  };
  require(flashmla::cuda::compute_capability(0).status());
  std::uint32_t seed = 1000;
  for (const Case& spec : cases(small)) {
    seed += 17;
    if (small || is_chosen(spec.name)) check_case(spec, seed, small ? 1 : 3, small);
  }
  if (small || is_chosen("hostile")) check_hostile(small);
  if (small || is_chosen("plans")) check_plans(small);
  if (!small) {
    if (is_chosen("merge-states")) {
      check_merge<float>(DType::kFloat32, 0.0);
      check_merge<__nv_bfloat16>(DType::kBFloat16, 0x1p-8);
      check_merge<__half>(DType::kFloat16, 0x1p-11);
    }
    if (is_chosen("divisor")) check_divisor();
    if (is_chosen("large-cache")) check_large_cache();
    if (is_chosen("large-strides")) check_large_strides();
    if (is_chosen("late-writes")) {
      check_late_writes();
      check_late_lengths();
    }
    if (is_chosen("succession")) {
      check_succession();
      check_replanning();
    }
    if (is_chosen("graph")) {
      for (const int heads : {16, 32, 128}) check_graph(heads, 500);
    }
  }
  const bool ok = failures == 0 && checks > 0;
  std::printf("%s: %d of %d failed\n", ok ? "PASSED" : "FAILED", failures, checks);
  return ok ? 0 : 1;
}
