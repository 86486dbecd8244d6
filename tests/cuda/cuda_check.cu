// Checks the CUDA backend on a GPU against float64. Usage: cuda_check [all | small | NAME...].
// Exit status 0: every check passed.
#include <cinttypes>

#include "cuda/support.cuh"
#include "tuning/plan.hpp"

namespace flashmla::cuda_test {
namespace {

int failures = 0;

void report(const std::string& name, bool ok, const std::string& detail) {
  if (!ok) ++failures;
  std::printf("%-4s %-52s %s\n", ok ? "ok" : "FAIL", name.c_str(), detail.c_str());
  std::fflush(stdout);
}

std::string format(const char* pattern, double a, double b) {
  char text[128];
  std::snprintf(text, sizeof text, pattern, a, b);
  return text;
}

std::vector<std::int32_t> random_lengths(int count, std::int32_t most, std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::int32_t> lengths(count);
  for (std::int32_t& length : lengths) length = 1 + static_cast<std::int32_t>(random() % most);
  return lengths;
}

void disturb() {
  FLASHMLA_CUDA_REQUIRE(cudaFuncSetAttribute(
      poison_shared_memory, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 * 1024));
  poison_shared_memory<<<132, 256, 200 * 1024>>>();
}

// With `unwritten` the workspace stays so, for initcheck to see who reads it first; but not that of
// the wide kernel, which has the copy engine write there, and initcheck does not see that.
void poison_workspace(const Instance& instance, bool unwritten) {
  const bool is_wide = select_kernel(instance.problem, instance.spec.kernel).max_query_rows == 0;
  if (!unwritten || is_wide) instance.workspace.fill(0xff);
}

// Right, untouched where nobody walks and between the rows of out, the same bits on every run.
void check_case(const Case& spec, std::uint32_t seed, int runs, bool unwritten) {
  Instance instance = make_instance(spec, seed);
  const std::int32_t walked = spec.plan == "padded" || spec.plan == "stale"
                                  ? instance.problem.batch - 1
                                  : instance.problem.batch;
  std::vector<std::uint16_t> first_out;
  std::vector<float> first_lse;
  bool repeats = true;
  for (int run = 0; run < runs; ++run) {
    instance.out.fill(0xff);
    instance.lse.fill(0xff);
    poison_workspace(instance, unwritten);
    disturb();
    instance.launch();
    FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
    std::vector<std::uint16_t> out = instance.out.download();
    std::vector<float> lse = instance.lse.download();
    if (run == 0) {
      first_out = std::move(out);
      first_lse = std::move(lse);
    } else {
      repeats = repeats && out == first_out &&
                std::memcmp(lse.data(), first_lse.data(), lse.size() * sizeof(float)) == 0;
    }
  }
  bool untouched = true;
  for (std::size_t i = walked * instance.problem.out_batch_stride; i < first_out.size(); ++i) {
    untouched = untouched && first_out[i] == 0xffff;
  }
  const Problem& p = instance.problem;
  for (std::int64_t row = 0; row < p.batch; ++row) {
    for (std::int64_t query = 0; query < p.seq_len_q * p.num_heads_q; ++query) {
      for (std::int64_t i = p.head_dim_v; i < p.out_head_stride; ++i) {
        untouched = untouched &&
                    first_out[row * p.out_batch_stride + query * p.out_head_stride + i] == 0xffff;
      }
    }
  }
  const Errors errors = compare_with_reference(instance, walked);
  const bool peaky = spec.q_scale > 1.0f;
  const double bound =
      spec.dtype == DType::kBFloat16 ? (peaky ? 6e-3 : 3e-3) : (peaky ? 1e-3 : 5e-4);
  const double lse_bound = peaky ? 2e-5 * spec.q_scale : 2e-5;
  const bool ok = errors.out <= bound && errors.lse <= lse_bound && !errors.has_bad_values &&
                  repeats && untouched && (!spec.apart || errors.worst_query_row <= 6e-3);
  report(spec.name, ok,
         format("out %.2e lse %.2e", errors.out, errors.lse) +
             (errors.has_bad_values ? " BAD VALUES" : "") + (repeats ? "" : " NOT REPEATABLE") +
             (untouched ? "" : " TOUCHED"));
}

std::string type_name(DType dtype) {
  return dtype == DType::kBFloat16 ? "bf16" : "fp16";
}

std::vector<Case> cases(bool small) {
  std::vector<Case> list;
  const auto add = [&](Case spec) {
    std::string name = type_name(spec.dtype) + " d" + std::to_string(spec.head_dim) + " b" +
                       std::to_string(spec.lengths.size()) + " s" + std::to_string(spec.seq_len_q) +
                       " h" + std::to_string(spec.num_heads_q) + "/" +
                       std::to_string(spec.num_heads_k) + " page" + std::to_string(spec.page_size) +
                       " " + spec.plan;
    if (spec.num_parts > 0) name += " parts" + std::to_string(spec.num_parts);
    if (spec.causal) name += " causal";
    if (spec.visible_lens) name += " visible";
    if (spec.strided) name += " strided";
    if (spec.tight) name += " tight";
    if (spec.q_scale != 1.0f) name += " q*" + std::to_string(static_cast<int>(spec.q_scale));
    if (spec.softmax_scale < 0.0f) name += " negative-scale";
    if (spec.apart) name += " apart";
    if (!spec.kernel.empty()) name += " " + spec.kernel;
    spec.name = name;
    list.push_back(spec);
  };
  const std::vector<std::int32_t> mixed = {1, 63, 64, 65, 0, 700, 128, 1500, 2};
  if (small) {
    for (const int heads : {16, 32, 128}) {
      Case c;
      c.lengths = {65, 0, 200};
      c.num_heads_q = heads;
      c.num_parts = 3;
      add(c);
      c.page_size = 16;
      c.causal = true;
      c.seq_len_q = 2;
      c.head_dim = 512;
      c.dtype = DType::kFloat16;
      add(c);
      c.plan = "stale";
      add(c);
    }
    for (const int page : {16, 64}) {
      Case c;  // the table ends with the page that holds the last token
      c.lengths = {page + 1};
      c.page_size = page;
      c.num_heads_q = 4;
      c.tight = true;
      add(c);
    }
    for (const int tokens : {1, 2}) {
      Case c;
      c.lengths = {1, 2, 3, 4, 5, 6, 7, 8, 9};
      c.num_heads_q = 8;
      c.seq_len_q = tokens;
      c.causal = tokens > 1;
      add(c);
    }
    return list;
  }
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const int head_dim : {576, 512}) {
      for (const int heads : {1, 3, 16, 20, 32, 63, 64, 128}) {
        Case c;
        c.dtype = dtype;
        c.head_dim = head_dim;
        c.lengths = mixed;
        c.num_heads_q = heads;
        add(c);
        c.causal = true;
        c.seq_len_q = 3;
        c.page_size = heads % 2 == 0 ? 784 : 1;
        c.plan = "random";
        c.num_parts = 7;
        add(c);
      }
    }
  }
  for (const int page : {1, 16, 32, 64, 100, 128, 784}) {
    for (const int heads : {16, 128}) {
      Case c;
      c.lengths = random_lengths(5, 1000, page);
      c.page_size = page;
      c.num_heads_q = heads;
      c.strided = page % 32 == 0;
      add(c);
    }
  }
  for (const int kv_heads : {2, 3, 8}) {
    for (const int per_head : {4, 32, 64}) {
      Case c;
      c.lengths = {500, 3, 77};
      c.num_heads_k = kv_heads;
      c.num_heads_q = kv_heads * per_head;
      c.seq_len_q = 2;
      c.causal = true;
      add(c);
    }
  }
  for (const char* plan : {"one", "random", "reversed", "padded"}) {
    for (const int heads : {16, 32, 128}) {
      for (const int parts : {2, 13, 200}) {
        Case c;
        c.lengths = mixed;
        c.num_heads_q = heads;
        c.plan = plan;
        c.num_parts = parts;
        add(c);
        c.visible_lens = true;
        c.seq_len_q = 4;
        add(c);
      }
    }
  }
  for (const int heads : {16, 32, 128}) {
    Case c;
    c.lengths = {1500, 130};
    c.num_heads_q = heads;
    c.apart = true;
    add(c);
    c.apart = false;
    c.plan = "stale";
    add(c);
  }
  for (const float scale : {4.0f, 40.0f}) {
    for (const int heads : {16, 32, 128}) {
      for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        Case c;
        c.lengths = {777, 3000};
        c.dtype = dtype;
        c.num_heads_q = heads;
        c.q_scale = scale;
        add(c);
      }
    }
  }
  for (const int heads : {16, 128}) {
    Case c;
    c.lengths = {4641, 9000, 1730, 1696};
    c.num_heads_q = heads;
    add(c);
    c.seq_len_q = 4;
    add(c);
    c.seq_len_q = 1;
    c.softmax_scale = -0.05f;
    add(c);
    c.softmax_scale = 0.0f;
    c.lengths = random_lengths(130, 300, 9);
    add(c);
    c.lengths = {20000};
    add(c);
    c.kernel = "sm90a_wide_bf16_576";
    add(c);
  }
  return list;
}

// The device planner's bytes against the host's.
void check_plans() {
  std::mt19937 random(5);
  for (const int batch : {0, 1, 2, 7, 128, 1000, 1025, 8192, 65536, 100000}) {
    for (const int parts : {1, 66, 132, 1500}) {
      // Random lengths up to `most`; and, where that is negative, lengths that are nearly alike.
      for (const int most : {0, 1, 100, 200000, -4096, -8192}) {
        std::vector<std::int32_t> lengths(batch);
        for (std::int32_t& length : lengths) {
          length = most >= 0 ? static_cast<std::int32_t>(random() % (most + 1))
                             : -most - static_cast<std::int32_t>(random() % 64);
        }
        std::vector<std::int32_t> want_rows(parts * kPlanRowFields), want_splits(batch + 1);
        PlanProblem plan{};
        plan.batch = batch;
        plan.num_heads_per_head_k = parts == 66 ? 128 : 16;
        plan.cache_seqlens = lengths.data();
        plan.cache_seqlens_stride = 1;
        plan.plan_rows = want_rows.data();
        plan.num_parts = parts;
        plan.num_splits = want_splits.data();
        schedule::plan_on_host(plan, tuning::cuda_plan(plan.num_heads_per_head_k));
        DeviceArray<std::int32_t> device_lengths(lengths), rows(want_rows.size()),
            splits(want_splits.size());
        rows.fill(0xff);
        splits.fill(0xff);
        plan.cache_seqlens = device_lengths.data();
        plan.plan_rows = rows.data();
        plan.num_splits = splits.data();
        require(cuda::plan(plan, nullptr));
        FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
        const bool ok = rows.download() == want_rows && splits.download() == want_splits;
        if (!ok) {
          report("plan b" + std::to_string(batch) + " parts" + std::to_string(parts) + " most" +
                     std::to_string(most),
                 false, "differs from the host's");
        }
      }
    }
  }
  report("plans equal the host's", true, "240 plans");
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
  PlanProblem plan{};
  plan.batch = instance.problem.batch;
  plan.num_heads_per_head_k = instance.problem.query_rows();
  plan.cache_seqlens = instance.problem.cache_seqlens;
  plan.cache_seqlens_stride = 1;
  plan.plan_rows = instance.plan_rows.data();
  plan.num_parts = instance.problem.num_parts;
  plan.num_splits = instance.num_splits.data();
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
    const Errors errors = compare_with_reference(instance, instance.problem.batch);
    ok = ok && errors.out <= 3e-3 && errors.lse <= 2e-5 && !errors.has_bad_values;

    // The same plan on two streams, each with its own workspace and result.
    Problem second = instance.problem;
    DeviceArray<std::uint16_t> out(instance.out.size());
    DeviceArray<float> lse(instance.lse.size());
    DeviceArray<std::uint8_t> workspace(instance.workspace.size());
    second.out = out.data();
    second.lse = lse.data();
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

// Garbage ids in use: any result, but no fault. Meant for a memory checker too.
void check_hostile(bool unwritten) {
  for (const int heads : {16, 32, 128}) {
    for (const int page : {1, 16, 64}) {
      Case spec;
      spec.lengths = {300, 65};
      spec.num_heads_q = heads;
      spec.page_size = page;
      Instance instance = make_instance(spec, 11, true);
      poison_workspace(instance, unwritten);
      instance.launch();
      const cudaError_t error = cudaDeviceSynchronize();
      report("hostile block ids h" + std::to_string(heads) + " page" + std::to_string(page),
             error == cudaSuccess, cudaGetErrorString(error));
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

// merge_attention_states on halves of one problem's tokens is what the reference says of all.
void check_merge() {
  const int parts = 3, batch = 2, tokens = 2, heads = 5, columns = 512;
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  const std::size_t queries = batch * tokens * heads;
  std::vector<float> outs(parts * queries * columns), lses(parts * queries);
  for (float& value : outs) value = normal(random);
  for (float& value : lses) value = 3.0f * normal(random);
  // (parts, batch, heads, tokens): query 0 empty in part 1, query 1 everywhere.
  lses[queries] = INFINITY;
  for (int i = 0; i < parts; ++i) lses[i * queries + 1] = i == 0 ? -INFINITY : INFINITY;
  for (int c = 0; c < columns; ++c) outs[queries * columns + c] = NAN;
  DeviceArray<float> device_outs(outs), device_lses(lses), out(queries * columns), lse(queries);
  MergeProblem p{};
  p.dtype = DType::kFloat32;
  p.num_parts = parts;
  p.batch = batch;
  p.seq_len_q = tokens;
  p.num_heads_q = heads;
  p.head_dim_v = columns;
  p.outs = device_outs.data();
  p.lses = device_lses.data();
  p.out = out.data();
  p.lse = lse.data();
  const std::int64_t out_strides[4] = {static_cast<std::int64_t>(queries) * columns,
                                       tokens * heads * columns, heads * columns, columns};
  const std::int64_t lse_strides[4] = {static_cast<std::int64_t>(queries), tokens * heads, tokens,
                                       1};
  std::copy(out_strides, out_strides + 4, p.outs_strides);
  std::copy(lse_strides, lse_strides + 4, p.lses_strides);
  std::copy(out_strides + 1, out_strides + 4, p.out_strides);
  std::copy(lse_strides + 1, lse_strides + 4, p.lse_strides);
  require(cuda::merge(p, nullptr));
  FLASHMLA_CUDA_REQUIRE(cudaDeviceSynchronize());
  const std::vector<float> got = out.download(), got_lse = lse.download();
  bool ok = true;
  for (int b = 0; b < batch; ++b) {
    for (int t = 0; t < tokens; ++t) {
      for (int h = 0; h < heads; ++h) {
        const std::size_t l = (b * heads + h) * tokens + t, o = ((b * tokens + t) * heads + h);
        double sum = 0.0;
        for (int i = 0; i < parts; ++i) {
          if (!std::isinf(lses[i * queries + l])) sum += std::exp(double{lses[i * queries + l]});
        }
        for (int c = 0; c < columns; ++c) {
          double want = 0.0;
          for (int i = 0; i < parts; ++i) {
            if (std::isinf(lses[i * queries + l])) continue;
            want += std::exp(double{lses[i * queries + l]}) / sum *
                    outs[(i * queries + o) * columns + c];
          }
          ok = ok && std::abs(got[o * columns + c] - want) < 1e-5;
        }
        const double want_lse = sum == 0.0 ? INFINITY : std::log(sum);
        ok = ok && (got_lse[l] == want_lse || std::abs(got_lse[l] - want_lse) < 1e-5);
      }
    }
  }
  report("merge of partial results", ok, "");
}

}  // namespace
}  // namespace flashmla::cuda_test

int main(int argc, char** argv) {
  using namespace flashmla::cuda_test;
  const std::string mode = argc > 1 ? argv[1] : "all";
  require(flashmla::cuda::compute_capability(0).status());
  const bool small = mode == "small";
  std::uint32_t seed = 1000;
  for (const Case& spec : cases(small)) {
    seed += 17;
    if (mode != "all" && mode != "small" && spec.name.find(mode) == std::string::npos) continue;
    check_case(spec, seed, small ? 1 : 3, small);
  }
  if (mode == "all" || mode == "small") {
    check_hostile(small);
    if (!small) {
      check_merge();
      check_plans();
      check_large_cache();
      for (const int heads : {16, 32, 128}) check_graph(heads, 500);
    }
  }
  std::printf("%s: %d failed\n", failures == 0 ? "PASSED" : "FAILED", failures);
  return failures == 0 ? 0 : 1;
}
