// Copies tiles of the cache and of the queries into stages: stacks of slices (see
// mma/descriptor.cuh) of 64 rows.
#pragma once

#include <cstdint>

#include "backends/cuda/common/entry_walk.cuh"
#include "backends/cuda/mma/descriptor.cuh"
#include "backends/cuda/ptx/memory.cuh"

namespace flashmla::cuda::sm90a {

inline constexpr int kTileRowsLog2 = 6;
inline constexpr int kTileSliceBytes = mma::kRowBytes << kTileRowsLog2;

// Page of a token of a row; -1, which the copy engine answers with zeros, past the end of the row,
// where the table may hold anything.
template <class Load = PlainLoad>
__device__ __forceinline__ std::int32_t page_of_token(const DecodeParams& params, std::int32_t row,
                                                      std::int32_t length, std::int32_t token,
                                                      const Load& load = {}) {
  if (token >= length) return -1;
  return load(params.block_table + row * params.block_table_batch_stride +
              params.page_size.quotient(token) * params.block_table_page_stride);
}

// Boxes of a slice of a tile.
__device__ __forceinline__ int boxes_of_slice(const DecodeParams& params) {
  return 1 << (kTileRowsLog2 - params.k_box_rows_log2);
}

// Page of box `box` of a tile, to be asked for ahead of the copy.
template <class Load = PlainLoad>
__device__ __forceinline__ std::int32_t page_of_box(const DecodeParams& params, std::int32_t row,
                                                    std::int32_t block, std::int32_t length,
                                                    int box, const Load& load = {}) {
  return page_of_token(params, row, length,
                       (block << kTileRowsLog2) + (box << params.k_box_rows_log2), load);
}

// Brings a tile of whole-tile boxes into L2. One lane.
__device__ __forceinline__ void prefetch_tile(const DecodeParams& params, std::int32_t block,
                                              std::int32_t kv_head, std::int32_t page) {
  ptx::prefetch_box(params.k_map, 0, params.page_size.remainder(block << kTileRowsLog2), 0, kv_head,
                    page);
}

// Copies slices of a tile from kBegin on, as many as the boxes of `map` hold, where a box holds 64
// tokens; their bytes are counted on `barrier`. One thread.
template <int kBegin>
__device__ __forceinline__ void copy_whole_tile(const DecodeParams& params, const CUtensorMap& map,
                                                std::int32_t block, std::int32_t kv_head,
                                                std::int32_t page, std::uint32_t stage,
                                                std::uint32_t barrier) {
  ptx::copy_box_once(stage + kBegin * kTileSliceBytes, map, barrier, 0,
                     params.page_size.remainder(block << kTileRowsLog2), kBegin, kv_head, page);
}

// Copies slices [kBegin, kEnd) of a tile by boxes of one slice and fewer tokens. All lanes of a
// warp. page(box) is what page_of_box() gave for it: a lane asks for box lane % boxes, and with
// boxes of one token for that 32 further too.
template <int kBegin, int kEnd, class PageOf>
__device__ __forceinline__ void copy_tile_by_boxes(const DecodeParams& params,
                                                   const CUtensorMap& map, std::int32_t block,
                                                   std::int32_t kv_head, const PageOf& page,
                                                   std::uint32_t stage, std::uint32_t barrier) {
  const std::int32_t first_token = block << kTileRowsLog2;
  const int boxes = boxes_of_slice(params);
  const int boxes_log2 = kTileRowsLog2 - params.k_box_rows_log2;
#pragma unroll 1
  for (int box = threadIdx.x % 32 & (boxes - 1); box < boxes; box += 32) {
    const std::int32_t row = box << params.k_box_rows_log2;
    const std::int32_t box_page = page(box);
    const std::int32_t in_page = params.page_size.remainder(first_token + row);
#pragma unroll 1
    for (int slice = kBegin + (threadIdx.x % 32 >> boxes_log2); slice < kEnd;
         slice += max(32 >> boxes_log2, 1)) {
      ptx::copy_box_once(stage + slice * kTileSliceBytes + row * mma::kRowBytes, map, barrier, 0,
                         in_page, slice, kv_head, box_page);
    }
  }
}

// Copies 64 query rows. All lanes of a warp. Rows past the last query lie at a token past the end
// and arrive as zeros.
template <int kSlices>
__device__ __forceinline__ void copy_queries(const DecodeParams& params, std::int32_t batch_row,
                                             std::int32_t kv_head, std::int32_t first_query_row,
                                             std::uint32_t stage, std::uint32_t barrier) {
  const int boxes_log2 = kTileRowsLog2 - params.q_box_rows_log2;
  const int copies = boxes_log2 == 0 ? 1 : kSlices << boxes_log2;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < copies; i += 32) {
    const int slice = i >> boxes_log2;
    const int row = (i - (slice << boxes_log2)) << params.q_box_rows_log2;
    const QueryRow query = query_row_at(params.shape, kv_head, first_query_row + row);
    ptx::copy_box(stage + slice * kTileSliceBytes + row * mma::kRowBytes, params.q_map, barrier, 0,
                  query.head, slice, query.token, batch_row);
  }
}

}  // namespace flashmla::cuda::sm90a
