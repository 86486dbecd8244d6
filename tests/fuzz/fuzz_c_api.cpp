// Hostile calls through the C ABI. Bytes become arguments: a valid call in which any size, stride,
// dtype, rank, pointer, table, length or plan may be spoilt. All memory is allocated to the byte
// and named by size_bytes, so AddressSanitizer sees the first step outside.
//
// A call must return, fault nowhere, write nothing when it fails, and give the same bits twice.
// Exhausted bytes read as zero and zero spoils nothing: the empty input is a valid call, so that no
// corpus is needed to begin.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "flashmla/flashmla.h"

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_c_api: %s\n", what);
  std::abort();
}

class Bytes {
 public:
  Bytes(const std::uint8_t* data, std::size_t size) : data_(data), end_(data + size) {}

  std::uint8_t byte() { return data_ == end_ ? 0 : *data_++; }
  // In [least, least + count); zero bytes give `least`.
  std::int64_t pick(std::int64_t least, std::int64_t count) { return least + byte() % count; }
  // True for one byte in `rarity`, never for zero.
  bool rarely(int rarity) { return byte() % rarity == rarity - 1; }
  // Sizes that break arithmetic, among others.
  std::int64_t hostile() {
    static constexpr std::int64_t kValues[] = {0,
                                               1,
                                               2,
                                               -1,
                                               -2,
                                               3,
                                               5,
                                               7,
                                               31,
                                               32,
                                               33,
                                               63,
                                               64,
                                               65,
                                               96,
                                               97,
                                               127,
                                               128,
                                               255,
                                               256,
                                               257,
                                               511,
                                               576,
                                               1 << 16,
                                               INT32_MAX,
                                               INT32_MIN,
                                               std::int64_t{INT32_MAX} + 1,
                                               std::int64_t{1} << 32,
                                               std::int64_t{1} << 62,
                                               INT64_MAX,
                                               INT64_MIN,
                                               INT64_MAX / 64};
    return kValues[byte() % (sizeof(kValues) / sizeof(kValues[0]))];
  }
  std::int32_t hostile32() { return static_cast<std::int32_t>(hostile()); }

 private:
  const std::uint8_t* data_;
  const std::uint8_t* end_;
};

constexpr std::size_t kMostBytes = 1 << 20;  // of one tensor
constexpr std::int64_t kMostWork = 1 << 26;  // multiplications of one call

std::int64_t element_size(std::int32_t dtype) {
  return dtype == FLASHMLA_BFLOAT16 || dtype == FLASHMLA_FLOAT16 ? 2 : 4;
}

// A tensor over memory of its own, which ends with its last element.
struct Tensor {
  flashmla_tensor view{};
  std::unique_ptr<std::uint8_t[]> memory;
  std::size_t bytes = 0;

  // Contiguous but for `gap` elements between neighbours of the last dimension but one.
  void make(std::int32_t dtype, const std::vector<std::int64_t>& shape, std::int64_t gap) {
    view.dtype = dtype;
    view.rank = static_cast<std::int32_t>(shape.size());
    std::int64_t stride = 1, extent = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      view.shape[i] = shape[i];
      view.strides[i] = stride;
      extent = shape[i] == 0 ? 0 : extent + (shape[i] - 1) * stride;
      stride = stride * std::max<std::int64_t>(1, shape[i]) + (i + 1 == shape.size() ? gap : 0);
    }
    for (const std::int64_t size : shape) {
      if (size == 0) extent = 0;
    }
    bytes = static_cast<std::size_t>(extent * element_size(dtype));
    memory = std::make_unique<std::uint8_t[]>(std::max<std::size_t>(1, bytes));
    view.data = memory.get();
    // Zero would mean "unknown".
    view.size_bytes = std::max<std::size_t>(1, bytes);
  }
  void fill(Bytes& input) {
    std::uint32_t state = static_cast<std::uint32_t>(input.byte()) * 2654435761u + 1;
    for (std::size_t i = 0; i < bytes; ++i) {
      state = state * 1664525u + 1013904223u;
      memory[i] = static_cast<std::uint8_t>(state >> 24);
    }
  }
  std::int32_t* ints() { return reinterpret_cast<std::int32_t*>(memory.get()); }

  // At most the memory is named: whoever names more than there is has no claim.
  void spoil(Bytes& input) {
    switch (input.pick(0, 9)) {
      case 0:
        view.shape[input.pick(0, FLASHMLA_MAX_RANK)] = input.hostile();
        break;
      case 1:
        view.strides[input.pick(0, FLASHMLA_MAX_RANK)] = input.hostile();
        break;
      case 2:
        view.strides[input.pick(0, FLASHMLA_MAX_RANK)] = 0;
        view.shape[input.pick(0, FLASHMLA_MAX_RANK)] = input.hostile();
        break;
      case 3:
        view.rank = input.hostile32();
        break;
      case 4:
        view.dtype =
            input.rarely(2) ? input.hostile32() : static_cast<std::int32_t>(input.pick(0, 6));
        break;
      case 5:
        view.data = nullptr;
        break;
      case 6:
        view.size_bytes = std::min<std::uint64_t>(view.size_bytes, 1 + input.byte());
        break;
      case 7:
        view = {};
        break;
      case 8:
        // One byte further on, with one byte less.
        if (view.data != nullptr && view.size_bytes > 1) {
          view.data = static_cast<std::uint8_t*>(view.data) + 1;
          view.size_bytes -= 1;
        }
        break;
    }
  }
  std::vector<std::uint8_t> copy() const { return {memory.get(), memory.get() + bytes}; }
};

struct ExecutorChoice {
  flashmla_executor fields{};

  explicit ExecutorChoice(Bytes& input) {
    fields.struct_size = sizeof(fields);
    fields.num_threads = static_cast<std::int32_t>(input.pick(1, 9));
    fields.parallel_for = forward;
    if (input.rarely(2)) fields.parallel_for = backward;
    if (input.rarely(40)) fields.num_threads = input.hostile32();
    if (input.rarely(100)) fields.parallel_for = nullptr;
    if (input.rarely(100)) fields.struct_size = static_cast<std::size_t>(input.pick(0, 9));
  }
  static void forward(void*, std::int64_t count, void (*body)(void*, std::int64_t), void* data) {
    for (std::int64_t i = 0; i < count; ++i) body(data, i);
  }
  static void backward(void*, std::int64_t count, void (*body)(void*, std::int64_t), void* data) {
    for (std::int64_t i = count; i-- > 0;) body(data, i);
  }
};

void require_message(flashmla_status status) {
  require(status == FLASHMLA_OK || std::strlen(flashmla_last_error()) > 0, "an error says nothing");
}

const std::vector<std::string>& kernel_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> found = {"", "no_such_kernel"};
    for (std::int32_t i = 0; i < flashmla_num_kernels(); ++i) {
      flashmla_kernel_info info{};
      info.struct_size = sizeof(info);
      require(flashmla_kernel_at(i, &info) == FLASHMLA_OK, "a listed kernel has no row");
      found.emplace_back(info.name);
    }
    return found;
  }();
  return names;
}

// Multiplies what a call may loop over; saturates.
std::int64_t times(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  a = std::max<std::int64_t>(a, 1);
  b = std::max<std::int64_t>(b, 1);
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

class DecodeCall {
 public:
  explicit DecodeCall(Bytes& input) {
    static constexpr std::int64_t kDims[][2] = {{64, 64},   {96, 64},   {128, 128}, {192, 128},
                                                {288, 256}, {320, 256}, {512, 512}, {576, 512}};
    const std::int64_t* dims = kDims[input.pick(0, 8)];
    const auto dtype = static_cast<std::int32_t>(input.pick(FLASHMLA_BFLOAT16, 3));
    const std::int64_t batch = input.pick(1, 6) - (input.rarely(50) ? 1 : 0);
    const std::int64_t tokens = input.pick(1, 3), kv_heads = input.pick(1, 2);
    const std::int64_t heads = kv_heads * input.pick(1, 5), page = input.pick(1, 80);
    const std::int64_t blocks = input.pick(1, 6), pages = input.pick(1, 5);
    const std::int64_t parts = input.pick(1, 8);
    q.make(dtype, {batch, tokens, heads, dims[0]}, input.pick(0, 3));
    k_cache.make(dtype, {blocks, page, kv_heads, dims[0]}, input.pick(0, 3));
    table.make(FLASHMLA_INT32, {batch, pages}, input.pick(0, 3));
    lengths.make(FLASHMLA_INT32, {batch}, 0);
    visible.make(FLASHMLA_INT32, {batch, tokens}, 0);
    rows.make(FLASHMLA_INT32, {parts, 8}, 0);
    splits.make(FLASHMLA_INT32, {batch + 1}, 0);
    out.make(dtype, {batch, tokens, heads, dims[1]}, input.pick(0, 3));
    lse.make(FLASHMLA_FLOAT32, {batch, heads, tokens}, input.pick(0, 3));
    q.fill(input);
    k_cache.fill(input);
    out.fill(input);
    lse.fill(input);
    for (std::int64_t i = 0; i < batch; ++i) {
      lengths.ints()[i] = static_cast<std::int32_t>(input.byte() * page * pages / 255);
      std::int32_t seen = 0;
      for (std::int64_t t = 0; t < tokens; ++t) {
        seen = std::max(seen, static_cast<std::int32_t>(input.byte() * lengths.ints()[i] / 255));
        visible.ints()[i * tokens + t] = seen;
      }
    }
    for (std::size_t i = 0; i < table.bytes / 4; ++i) {
      table.ints()[i] = static_cast<std::int32_t>(input.pick(0, blocks));
    }
    plan(input, kv_heads);

    args.struct_size = sizeof(args);
    args.head_dim_v = dims[1];
    args.causal = input.rarely(3);
    args.has_softmax_scale = input.rarely(3);
    if (args.has_softmax_scale != 0) {
      static constexpr double kScales[] = {0.1, 0.0, -1.0, 1e4, 1e38, 1e300, -1e-300};
      args.softmax_scale = kScales[input.pick(0, 7)];
    }
    use_visible_ = args.causal == 0 && input.rarely(3);
    kernel_ = kernel_names()[static_cast<std::size_t>(
        input.pick(0, static_cast<std::int64_t>(kernel_names().size())))];
    spoil(input);
    args.q = q.view;
    args.k_cache = k_cache.view;
    args.block_table = table.view;
    args.cache_seqlens = lengths.view;
    if (use_visible_) args.visible_lens = visible.view;
    args.tile_scheduler_metadata = rows.view;
    args.num_splits = splits.view;
    args.out = out.view;
    args.softmax_lse = lse.view;
    if (!kernel_.empty()) args.kernel = kernel_.c_str();
  }

  // Zero strides let a few bytes stand for any amount of work. Not what is tested here.
  bool affordable() const {
    std::int64_t longest = 1;
    for (std::size_t i = 0; i < lengths.bytes / 4; ++i) {
      longest = std::max<std::int64_t>(
          longest, reinterpret_cast<const std::int32_t*>(lengths.memory.get())[i]);
    }
    std::int64_t work = longest;
    for (int i = 0; i < 4; ++i) work = times(work, q.view.shape[i]);
    return work <= kMostWork && rows.view.shape[0] <= 4096;
  }

  void run(Bytes& input) {
    const char *kernel = nullptr, *report = nullptr;
    require_message(flashmla_explain_selection(&args, &kernel, &report));
    ExecutorChoice executor(input);
    std::size_t bytes = 0;
    flashmla_status status =
        flashmla_decode_workspace_size(&args, executor.fields.num_threads, &bytes);
    require_message(status);
    if (status != FLASHMLA_OK || bytes > (kMostBytes << 4)) bytes = input.byte();
    if (input.rarely(30)) bytes = std::min<std::size_t>(bytes, input.byte());
    const std::vector<std::uint8_t> out_before = out.copy(), lse_before = lse.copy();
    status = decode_in(bytes, executor.fields);
    if (status != FLASHMLA_OK) {
      require(out.copy() == out_before && lse.copy() == lse_before, "a failing call wrote");
      return;
    }
    const std::vector<std::uint8_t> out_after = out.copy(), lse_after = lse.copy();
    executor.fields.parallel_for = executor.fields.parallel_for == ExecutorChoice::forward
                                       ? ExecutorChoice::backward
                                       : ExecutorChoice::forward;
    require(decode_in(bytes, executor.fields) == FLASHMLA_OK,
            "the same call fails the second time");
    require(out.copy() == out_after && lse.copy() == lse_after, "the same call gave other bits");
  }

 private:
  flashmla_status decode_in(std::size_t bytes, const flashmla_executor& executor) {
    // Sizes of the library are multiples of 64, so the end is exact.
    const std::size_t whole = (bytes + 63) / 64 * 64;
    std::unique_ptr<void, decltype(&std::free)> workspace(
        bytes == 0 ? nullptr : std::aligned_alloc(64, whole), std::free);
    if (bytes != 0) std::memset(workspace.get(), 0xff, whole);
    const flashmla_status status = flashmla_decode(&args, workspace.get(), bytes, &executor);
    require_message(status);
    return status;
  }

  void plan(Bytes& input, std::int64_t kv_heads) {
    flashmla_plan_args plan{};
    plan.struct_size = sizeof(plan);
    plan.cache_seqlens = lengths.view;
    plan.num_heads_per_head_k = 1;
    plan.num_heads_k = kv_heads;
    plan.tile_scheduler_metadata = rows.view;
    plan.num_splits = splits.view;
    if (lengths.bytes != 0) {
      require(flashmla_plan(&plan) == FLASHMLA_OK, "a valid batch has no plan");
    }
    if (!input.rarely(3)) return;
    for (int edits = 1 + input.byte() % 6; edits > 0; --edits) {
      const std::size_t field = static_cast<std::size_t>(input.byte()) % (rows.bytes / 4);
      rows.ints()[field] =
          input.rarely(3) ? input.hostile32() : static_cast<std::int32_t>(input.pick(-1, 8));
    }
  }

  void spoil(Bytes& input) {
    for (int edits = input.byte() % 4; edits > 0; --edits) {
      Tensor* tensors[] = {&q, &k_cache, &table, &lengths, &visible, &rows, &splits, &out, &lse};
      Tensor* contents[] = {&table, &lengths, &visible, &splits};
      switch (input.pick(0, 8)) {
        case 0:
        case 1:
        case 2:
          tensors[input.pick(0, 9)]->spoil(input);
          break;
        case 3:
        case 4: {
          Tensor& tensor = *contents[input.pick(0, 4)];
          if (tensor.bytes != 0) {
            tensor.ints()[input.byte() % (tensor.bytes / 4)] = input.hostile32();
          }
          break;
        }
        case 5:
          args.head_dim_v = input.hostile();
          break;
        case 6:
          args.device_type = input.hostile32();
          args.device_index = input.hostile32();
          break;
        case 7:
          args.struct_size = std::min<std::size_t>(input.byte(), sizeof(args));
          break;
      }
    }
  }

  Tensor q, k_cache, table, lengths, visible, rows, splits, out, lse;
  flashmla_decode_args args{};
  bool use_visible_ = false;
  std::string kernel_;
};

void fuzz_decode(Bytes& input) {
  DecodeCall call(input);
  if (call.affordable()) call.run(input);
}

void fuzz_plan(Bytes& input) {
  Tensor lengths, rows, splits;
  const std::int64_t batch = input.pick(0, 200), parts = input.pick(1, 200);
  lengths.make(FLASHMLA_INT32, {batch}, 0);
  rows.make(FLASHMLA_INT32, {parts, 8}, 0);
  splits.make(FLASHMLA_INT32, {batch + 1}, 0);
  for (std::int64_t i = 0; i < batch; ++i) {
    lengths.ints()[i] = input.rarely(20) ? input.hostile32() : input.byte() * 37;
  }
  rows.fill(input);
  splits.fill(input);
  for (int edits = input.byte() % 3; edits > 0; --edits) {
    Tensor* tensors[] = {&lengths, &rows, &splits};
    tensors[input.pick(0, 3)]->spoil(input);
  }
  flashmla_plan_args args{};
  args.struct_size = sizeof(args);
  args.cache_seqlens = lengths.view;
  args.num_heads_per_head_k = input.rarely(20) ? input.hostile() : input.pick(1, 128);
  args.num_heads_k = input.rarely(20) ? input.hostile() : input.pick(1, 8);
  args.tile_scheduler_metadata = rows.view;
  args.num_splits = splits.view;
  const std::vector<std::uint8_t> rows_before = rows.copy(), splits_before = splits.copy();
  const flashmla_status status = flashmla_plan(&args);
  require_message(status);
  require(status == FLASHMLA_OK || (rows.copy() == rows_before && splits.copy() == splits_before),
          "a failing plan wrote");
  std::int32_t num_parts = 0;
  const auto threads =
      input.rarely(4) ? input.hostile32() : static_cast<std::int32_t>(input.byte());
  if (flashmla_plan_num_parts(FLASHMLA_CPU, 0, args.num_heads_per_head_k, args.num_heads_k, threads,
                              &num_parts) == FLASHMLA_OK) {
    require(num_parts >= 1, "a plan without parts");
  }
}

void fuzz_merge(Bytes& input) {
  Tensor outs, lses, out, lse;
  const auto dtype = static_cast<std::int32_t>(input.pick(FLASHMLA_BFLOAT16, 3));
  const std::int64_t parts = input.pick(1, 5), batch = input.pick(0, 4), tokens = input.pick(1, 3);
  const std::int64_t heads = input.pick(1, 5), columns = input.pick(1, 200);
  outs.make(dtype, {parts, batch, tokens, heads, columns}, input.pick(0, 3));
  lses.make(FLASHMLA_FLOAT32, {parts, batch, heads, tokens}, input.pick(0, 3));
  out.make(dtype, {batch, tokens, heads, columns}, input.pick(0, 3));
  lse.make(FLASHMLA_FLOAT32, {batch, heads, tokens}, input.pick(0, 3));
  outs.fill(input);
  lses.fill(input);
  for (int edits = input.byte() % 3; edits > 0; --edits) {
    Tensor* tensors[] = {&outs, &lses, &out, &lse};
    tensors[input.pick(0, 4)]->spoil(input);
  }
  std::int64_t work = 1;
  for (const std::int64_t size : outs.view.shape) work = times(work, size);
  if (work > kMostWork) return;
  flashmla_merge_args args{};
  args.struct_size = sizeof(args);
  args.outs = outs.view;
  args.lses = lses.view;
  args.out = out.view;
  args.lse = lse.view;
  const ExecutorChoice executor(input);
  const std::vector<std::uint8_t> out_before = out.copy(), lse_before = lse.copy();
  const flashmla_status status = flashmla_merge(&args, &executor.fields);
  require_message(status);
  require(status == FLASHMLA_OK || (out.copy() == out_before && lse.copy() == lse_before),
          "a failing merge wrote");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes input(data, size);
  switch (input.pick(0, 8)) {
    case 6:
      fuzz_plan(input);
      break;
    case 7:
      fuzz_merge(input);
      break;
    default:
      fuzz_decode(input);
  }
  return 0;
}
