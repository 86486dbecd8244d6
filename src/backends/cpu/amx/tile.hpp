// The AMX instructions that the kernel uses, one function each. Tile registers are named by
// template argument; a tile in memory is 16 rows of 64 bytes, `stride` bytes apart.
//
// GCC's own wrappers print their argument into the instruction, so they cannot take a template
// argument, and they do not tell the compiler that they touch memory: these do.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashmla::cpu::amx {
namespace {

inline constexpr std::int32_t kTileRows = 16;
inline constexpr std::int32_t kTileRowBytes = 64;
inline constexpr std::int32_t kTileBytes = kTileRows * kTileRowBytes;
inline constexpr std::int32_t kTileRegisters = 8;
// A row of a tile holds this many of each.
inline constexpr std::int32_t kTileFloats = 16;
inline constexpr std::int32_t kTileElements = 32;  // bf16

// A tile in memory.
struct TileView {
  const std::byte* base;
  std::int64_t stride;  // bytes between rows
};

// kStream: without a place in the first-level cache.
template <int kTile, bool kStream = false>
[[gnu::always_inline]] inline void load_tile(TileView view) {
  if constexpr (kStream) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(view.base), "r"(view.stride)
                 : "memory");
  } else {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(view.base), "r"(view.stride)
                 : "memory");
  }
}

// Contiguous: 1 KB at `base`.
template <int kTile>
[[gnu::always_inline]] inline void load_tile(const void* base) {
  load_tile<kTile>({static_cast<const std::byte*>(base), kTileRowBytes});
}

template <int kTile>
[[gnu::always_inline]] inline void store_tile(void* base) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(base),
               "r"(std::int64_t{kTileRowBytes})
               : "memory");
}

template <int kTile>
[[gnu::always_inline]] inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// C[m][n] += sum over k of A[m][2k] * B[k][2n] + A[m][2k + 1] * B[k][2n + 1]: C is float (16, 16),
// A bf16 (16, 32), and B bf16 (16, 32), which is (32, 16) with its rows in pairs.
template <int kC, int kA, int kB>
[[gnu::always_inline]] inline void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
}

// Owns the tile registers for its lifetime: all eight are whole tiles, zero at the start. Gives
// them back at the end, so that a context switch has no tile data to save and other users of AMX in
// the process find the registers as they expect them, unconfigured.
class TileSession {
 public:
  TileSession() {
    Configuration configuration;
    for (int tile = 0; tile < kTileRegisters; ++tile) {
      configuration.row_bytes[tile] = kTileRowBytes;
      configuration.rows[tile] = kTileRows;
    }
    asm volatile("ldtilecfg %0" ::"m"(configuration));
  }
  ~TileSession() { asm volatile("tilerelease"); }
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

 private:
  // The operand of ldtilecfg.
  struct alignas(64) Configuration {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};
  };
  static_assert(sizeof(Configuration) == 64);
};

}  // namespace
}  // namespace flashmla::cpu::amx
