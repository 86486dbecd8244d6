/* flashmla: multi-head latent attention (MLA) over a paged key/value cache, C interface.
 *
 * Conventions
 *  - Every call returns a flashmla_status. On anything but FLASHMLA_OK nothing was written to the
 *    caller's tensors, and flashmla_last_error() explains, in this thread, until its next call.
 *  - The caller owns all memory. The library keeps no pointer after a call returns, except that
 *    work given to a CUDA stream reads and writes its tensors until the stream has passed it.
 *  - Structs start with their size: zero the struct, then set struct_size = sizeof(struct). Fields
 *    are only ever added at the end, and a field left zero has its documented default.
 *  - Shapes and strides are counted in elements. A tensor argument that is optional is absent when
 *    it is all zero.
 *  - What a call writes, workspace included, shares no memory with its other tensors; it may lie in
 *    their gaps.
 *  - Every call may be made from several threads at once.
 *  - Lengths, block ids and plans are checked on the CPU. On a GPU that would mean to wait for it:
 *    a call does so when the environment variable FLASHMLA_CHECK is 1, and is else harmless, its
 *    result unspecified, whatever they hold.
 *  - Every log-sum-exp is a natural logarithm. */
#ifndef FLASHMLA_FLASHMLA_H
#define FLASHMLA_FLASHMLA_H

#include <stddef.h>
#include <stdint.h>

#include "flashmla/version.h"

#if defined(_WIN32)
#define FLASHMLA_API
#else
#define FLASHMLA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Pinned values. */
typedef enum flashmla_status {
  FLASHMLA_OK = 0,
  FLASHMLA_INVALID_ARGUMENT = 1, /* an argument is wrong; the message names it */
  FLASHMLA_UNSUPPORTED = 2,      /* valid, but no kernel here computes it; the message says why */
  FLASHMLA_OUT_OF_MEMORY = 3,    /* the message says how much was asked for */
  FLASHMLA_INTERNAL = 4          /* a defect of the library or a failing driver */
} flashmla_status;

typedef enum flashmla_dtype {
  FLASHMLA_BFLOAT16 = 1,
  FLASHMLA_FLOAT16 = 2,
  FLASHMLA_FLOAT32 = 3,
  FLASHMLA_INT32 = 4
} flashmla_dtype;

typedef enum flashmla_device_type { FLASHMLA_CPU = 0, FLASHMLA_CUDA = 1 } flashmla_device_type;

#define FLASHMLA_MAX_RANK 5

/* Borrowed memory seen as a strided array. */
typedef struct flashmla_tensor {
  void* data;
  int32_t dtype; /* flashmla_dtype */
  int32_t rank;
  int64_t shape[FLASHMLA_MAX_RANK];
  int64_t strides[FLASHMLA_MAX_RANK]; /* in elements, non-negative */
  uint64_t size_bytes; /* bytes that may be touched from data on; 0: unknown, not checked */
} flashmla_tensor;

/* Threads for CPU work. parallel_for must call body(body_data, i) once for each i in [0, count),
 * in any order, on any threads, and return when all calls have returned. An exception of it, which
 * also waits for the calls that it made, ends the call in FLASHMLA_INTERNAL, when it may have
 * written some of its results. Without an executor OpenMP's threads work. Those of GNU's runtime do
 * not live on in a child of fork(), which must bring an executor once its parent has used them. */
typedef struct flashmla_executor {
  size_t struct_size;
  void* context;       /* handed to parallel_for */
  int32_t num_threads; /* how many of those calls may run at once; at least 1 */
  void (*parallel_for)(void* context, int64_t count, void (*body)(void* body_data, int64_t index),
                       void* body_data);
} flashmla_executor;

/* --- The plan --------------------------------------------------------------------------------- */

typedef struct flashmla_plan_args {
  size_t struct_size;
  int32_t device_type;           /* flashmla_device_type, of all tensors */
  int32_t device_index;          /* CUDA device number; 0 on the CPU */
  flashmla_tensor cache_seqlens; /* (batch) int32, in tokens */
  int64_t num_heads_per_head_k;  /* seq_len_q * num_heads_q / num_heads_k */
  int64_t num_heads_k;
  /* Written by flashmla_plan; contiguous. */
  flashmla_tensor tile_scheduler_metadata; /* (num_sm_parts, 8) int32 */
  flashmla_tensor num_splits;              /* (batch + 1) int32 */
  void* stream; /* CUDA stream (cudaStream_t); null: the default stream; ignored on the CPU */
} flashmla_plan_args;

/* How many parts (rows of tile_scheduler_metadata) suit the device. num_threads is the number of
 * CPU threads that will run the attention call (0: the OpenMP runtime's number); ignored on a GPU.
 */
FLASHMLA_API flashmla_status flashmla_plan_num_parts(int32_t device_type, int32_t device_index,
                                                     int64_t num_heads_per_head_k,
                                                     int64_t num_heads_k, int32_t num_threads,
                                                     int32_t* num_parts);

/* Divides the cached tokens of a batch over the parts. See docs/scheduling.md for the format. */
FLASHMLA_API flashmla_status flashmla_plan(const flashmla_plan_args* args);

/* --- Attention -------------------------------------------------------------------------------- */

/* Multi-head latent attention of a decoding step, in absorbed form (DeepSeek-V2, arXiv:2405.04434):
 * a cached vector is key, all of it, and value, its first head_dim_v components. For query token t
 * and query head h of batch row i, with g = h / (num_heads_q / num_heads_k) and the cached tokens
 *
 *     k_j = k_cache[block_table[i][j / page_block_size]][j % page_block_size][g]
 *
 * for j in [0, cache_seqlens[i]):
 *
 *     score_j              = softmax_scale * dot(q[i][t][h], k_j)
 *     softmax_lse[i][h][t] = lse = log(sum over visible j of exp(score_j))
 *     out[i][t][h]         = sum over visible j of exp(score_j - lse) * k_j[:head_dim_v]
 *
 * A query that sees no token has out 0 and softmax_lse +inf. A row that no part of the plan walks
 * keeps what its results held. Entries of block_table past a row's last page may hold anything.
 *
 * (head_dim, head_dim_v) is one of (576, 512), (512, 512), (320, 256), (288, 256), (192, 128),
 * (128, 128), (96, 64), (64, 64). q, k_cache and out step by 1 along their last dimension. On a GPU
 * it is one of the first two pairs, and q and k_cache lie at and step by multiples of 16 bytes. */
typedef struct flashmla_decode_args {
  size_t struct_size;
  int32_t device_type;
  int32_t device_index;
  flashmla_tensor q;           /* (batch, seq_len_q, num_heads_q, head_dim) bf16, fp16; fp32: CPU */
  flashmla_tensor k_cache;     /* (num_blocks, page_block_size, num_heads_k, head_dim), as q */
  flashmla_tensor block_table; /* (batch, max_num_blocks_per_seq) int32 */
  flashmla_tensor cache_seqlens; /* (batch) int32, in tokens */
  flashmla_tensor visible_lens;  /* optional (batch, seq_len_q) int32: leading cached tokens that a
                                    query sees, in place of causal; non-decreasing along seq_len_q */
  flashmla_tensor tile_scheduler_metadata; /* (num_sm_parts, 8) int32 */
  flashmla_tensor num_splits;              /* (batch + 1) int32 */
  flashmla_tensor out;         /* written: (batch, seq_len_q, num_heads_q, head_dim_v), as q */
  flashmla_tensor softmax_lse; /* written: (batch, num_heads_q, seq_len_q) float32 */
  int64_t head_dim_v;
  double softmax_scale;      /* used when has_softmax_scale is set */
  int32_t has_softmax_scale; /* 0: head_dim ** -0.5 */
  int32_t causal;            /* nonzero: query t sees tokens j <= length - seq_len_q + t */
  const char* kernel;        /* null: the library chooses; else the name of a kernel to force */
  void* stream;              /* CUDA stream; ignored on the CPU */
  /* Optional: where flashmla_decode takes its workspace from when it is given none. Called once at
   * most, in the caller's thread, with the bytes that are needed; returns memory of the device,
   * aligned as that of flashmla_decode, or null when there is none. The memory is the caller's. */
  void* (*allocate)(void* allocate_context, size_t bytes);
  void* allocate_context;
} flashmla_decode_args;

/* Bytes of workspace that flashmla_decode needs for these arguments. On the CPU it reads the plan,
 * and num_threads is that of the executor (0: the OpenMP runtime's number). */
FLASHMLA_API flashmla_status flashmla_decode_workspace_size(const flashmla_decode_args* args,
                                                            int32_t num_threads,
                                                            size_t* workspace_bytes);

/* Computes attention. workspace (64-byte aligned on the CPU, 256-byte on a GPU, may be null when no
 * bytes are needed) is scratch for this call alone. Null with args->allocate set: that is asked,
 * which spares a caller the call for the size. executor null: OpenMP. */
FLASHMLA_API flashmla_status flashmla_decode(const flashmla_decode_args* args, void* workspace,
                                             size_t workspace_bytes,
                                             const flashmla_executor* executor);

/* --- Merge ------------------------------------------------------------------------------------ */

typedef struct flashmla_merge_args {
  size_t struct_size;
  int32_t device_type;
  int32_t device_index;
  flashmla_tensor outs; /* (parts, batch, seq_len_q, num_heads_q, head_dim_v) bf16, fp16 or fp32 */
  flashmla_tensor lses; /* (parts, batch, num_heads_q, seq_len_q) float32; +-inf: an empty part */
  flashmla_tensor out;  /* written: (batch, seq_len_q, num_heads_q, head_dim_v), as outs */
  flashmla_tensor lse;  /* written: (batch, num_heads_q, seq_len_q) float32 */
  void* stream;         /* CUDA stream; ignored on the CPU */
} flashmla_merge_args;

/* Merges attention over disjoint sets of tokens into attention over their union:
 *
 *     lse = log(sum over parts p of exp(lses[p]))
 *     out = sum over parts p of exp(lses[p] - lse) * outs[p]
 *
 * Of an empty part out is not read; where all are empty, out is 0 and lse +inf. executor null:
 * OpenMP. */
FLASHMLA_API flashmla_status flashmla_merge(const flashmla_merge_args* args,
                                            const flashmla_executor* executor);

/* --- Checks ----------------------------------------------------------------------------------- */

/* What the calls above refuse without reading a tensor, for who has none yet, such as a compiler of
 * programs: the same status and message, contents apart. No memory of a tensor is touched; its
 * address may be any that is not null, is aligned to its elements, and keeps apart what will be.
 * Where there is no GPU, what one declines is left to the call. */
FLASHMLA_API flashmla_status flashmla_check_plan(const flashmla_plan_args* args);
FLASHMLA_API flashmla_status flashmla_check_decode(const flashmla_decode_args* args);
FLASHMLA_API flashmla_status flashmla_check_merge(const flashmla_merge_args* args);

/* --- About the library ------------------------------------------------------------------------ */

/* Why this thread's last call did not return FLASHMLA_OK; empty when it did, never null. Valid
 * until this thread's next call. */
FLASHMLA_API const char* flashmla_last_error(void);

/* "major.minor.patch". */
FLASHMLA_API const char* flashmla_version(void);

/* Whether attention runs on a device: FLASHMLA_OK, or FLASHMLA_UNSUPPORTED with a message that
 * names what was found and what is needed (FLASHMLA_INVALID_ARGUMENT: there is no such type of
 * device, or FLASHMLA_ISA holds a word that is not known). Creates no CUDA context. */
FLASHMLA_API flashmla_status flashmla_device_supported(int32_t device_type, int32_t device_index);

/* What the process may use on the CPU after FLASHMLA_ISA, such as "AVX2 AVX512 AVX512_BF16"; "none"
 * for the baseline alone. If FLASHMLA_ISA holds a word that is not known, what is wrong with it.
 * The text is valid until this thread's next call. */
FLASHMLA_API const char* flashmla_cpu_features(void);

typedef struct flashmla_kernel_info {
  size_t struct_size;
  const char* name;            /* what flashmla_decode_args.kernel accepts */
  const char* instruction_set; /* "avx512", "sm90a", ... */
  int32_t device_type;
  int32_t dtype;  /* of q and k_cache */
  int32_t usable; /* nonzero when this machine, of its GPUs the first, can run it now */
} flashmla_kernel_info;

/* Kernels compiled into the library, in order of preference. */
FLASHMLA_API int32_t flashmla_num_kernels(void);
FLASHMLA_API flashmla_status flashmla_kernel_at(int32_t index, flashmla_kernel_info* info);

/* The name of the kernel that flashmla_decode would use, and why those before it decline: lines
 * "name: reason" in *report. Both texts are valid until this thread's next call. */
FLASHMLA_API flashmla_status flashmla_explain_selection(const flashmla_decode_args* args,
                                                        const char** kernel, const char** report);

#ifdef __cplusplus
}
#endif

#endif /* FLASHMLA_FLASHMLA_H */
