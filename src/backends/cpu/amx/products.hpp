// Blocks of tile products: which register holds what, and when results leave.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "backends/cpu/amx/tile.hpp"

namespace flashmla::cpu::amx {
namespace {

// The four result registers, tmm0 to tmm3, and what is to become of their contents.
//
// Storing a result waits for its last product, and the next product into the register waits for the
// store. So results stay in their registers until the first step of the next block of products,
// where stores and products alternate: one's wait is the other's work (measured: 98% of the product
// rate instead of 86% for nine steps).
class ResultTiles {
 public:
  using Addresses = std::array<std::byte*, 4>;

  // `sink`: 4 KB that take the registers' first contents, which are nobody's result.
  explicit ResultTiles(std::byte* sink)
      : pending_{sink, sink + kTileBytes, sink + 2 * kTileBytes, sink + 3 * kTileBytes} {}

  // What the products that follow add up to belongs to `results`; they start from what is there or
  // from zero.
  void begin(const Addresses& results, bool accumulate) {
    next_ = results;
    accumulate_ = accumulate;
  }

  // Stores what register kTile holds and readies it. Once for each register after begin().
  template <int kTile>
  [[gnu::always_inline]] void turn() {
    store_tile<kTile>(pending_[kTile]);
    if (accumulate_) {
      load_tile<kTile>(next_[kTile]);
    } else {
      zero_tile<kTile>();
    }
    pending_[kTile] = next_[kTile];
  }

  // Stores all registers. Their contents may be stored again, to the same place, by the next turn:
  // flush before what they hold is changed in memory, and give a new begin after it.
  void flush(std::byte* sink) {
    store_tile<0>(pending_[0]);
    store_tile<1>(pending_[1]);
    store_tile<2>(pending_[2]);
    store_tile<3>(pending_[3]);
    for (int tile = 0; tile < 4; ++tile) pending_[tile] = sink + tile * kTileBytes;
  }

 private:
  Addresses pending_;
  Addresses next_{};
  bool accumulate_ = false;
};

// Calls body with the constants 0 to kCount - 1.
template <int kCount, class Body>
[[gnu::always_inline]] inline void for_each_constant(const Body& body) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (body(std::integral_constant<int, kIndex>()), ...);
  }
  (std::make_integer_sequence<int, kCount>());
}

// kTiles tiles, each a fixed distance further at each step. By value, so that addresses stay in
// registers.
template <int kTiles>
struct Operand {
  TileView first[kTiles];
  std::int64_t step_bytes;

  [[gnu::always_inline]] TileView operator()(std::int32_t step, int tile) const {
    return {first[tile].base + step * step_bytes, first[tile].stride};
  }
};

// Shapes of products: load(step) the operands of a step, then multiply<0>() to multiply<3>(). After
// each, load_next<part>(step) replaces operands that have had their last product by those of
// `step`. An operand gives the TileView of (step, tile).

// Two A tiles times two B tiles: results a0 b0, a0 b1, a1 b0, a1 b1. Streamed tiles take no place
// in the first-level cache, in which the other operand's are to stay.
template <bool kStreamA, bool kStreamB, class A, class B>
struct Products2x2 {
  A a;
  B b;

  [[gnu::always_inline]] void load(std::int32_t step) const {
    load_tile<6, kStreamB>(b(step, 0));
    load_tile<4, kStreamA>(a(step, 0));
    load_tile<7, kStreamB>(b(step, 1));
    load_tile<5, kStreamA>(a(step, 1));
  }
  template <int kPart>
  [[gnu::always_inline]] void multiply(std::int32_t) const {
    multiply_tiles<kPart, 4 + kPart / 2, 6 + kPart % 2>();
  }
  template <int kPart>
  [[gnu::always_inline]] void load_next(std::int32_t step) const {
    if constexpr (kPart == 1) load_tile<4, kStreamA>(a(step, 0));
    if constexpr (kPart == 2) load_tile<6, kStreamB>(b(step, 0));
    if constexpr (kPart == 3) {
      load_tile<7, kStreamB>(b(step, 1));
      load_tile<5, kStreamA>(a(step, 1));
    }
  }
};

// Four A tiles times one B tile. Three registers are left for A, so the last A tile takes the first
// one's place. A is streamed.
struct Products4x1 {
  Operand<4> a;
  Operand<1> b;

  [[gnu::always_inline]] void load(std::int32_t step) const {
    load_tile<4>(b(step, 0));
    load_tile<5, true>(a(step, 0));
    load_tile<6, true>(a(step, 1));
    load_tile<7, true>(a(step, 2));
  }
  template <int kPart>
  [[gnu::always_inline]] void multiply(std::int32_t step) const {
    multiply_tiles<kPart, 5 + kPart % 3, 4>();
    if constexpr (kPart == 0) load_tile<5, true>(a(step, 3));
  }
  template <int kPart>
  [[gnu::always_inline]] void load_next(std::int32_t step) const {
    if constexpr (kPart == 1) load_tile<6, true>(a(step, 1));
    if constexpr (kPart == 2) load_tile<7, true>(a(step, 2));
    if constexpr (kPart == 3) {
      load_tile<4>(b(step, 0));
      load_tile<5, true>(a(step, 0));
    }
  }
};

// One A tile times two B tiles (kA 1), or two times one, where an odd row tile is left over: the
// first two results.
template <int kA>
struct ProductsPair {
  Operand<kA> a;
  Operand<3 - kA> b;

  [[gnu::always_inline]] void load(std::int32_t step) const {
    load_tile<4>(a(step, 0));
    load_tile<6>(b(step, 0));
    if constexpr (kA == 2) {
      load_tile<5>(a(step, 1));
    } else {
      load_tile<7>(b(step, 1));
    }
  }
  template <int kPart>
  [[gnu::always_inline]] void multiply(std::int32_t) const {
    if constexpr (kPart < 2) {
      multiply_tiles<kPart, kA == 2 ? 4 + kPart : 4, kA == 2 ? 6 : 6 + kPart>();
    }
  }
  template <int kPart>
  [[gnu::always_inline]] void load_next(std::int32_t step) const {
    if constexpr (kPart == 1) load(step);
  }
};

// A step whose operands are loaded; kLast: no step follows. background(part) is other work after
// each product. Hardly two steps of tiles are in flight at once, and a tile load takes 16 of 192
// places for loads, so it pays to load early and to keep loads in that work few.
template <bool kLast, class Products, class Background>
[[gnu::always_inline]] inline void multiply_step(const Products& products, std::int32_t step,
                                                 const Background& background) {
  for_each_constant<4>([&](auto part) __attribute__((always_inline)) {
    products.template multiply<part>(step);
    if constexpr (!kLast) products.template load_next<part>(step + 1);
    background(part);
  });
}

// Step 0 of a block of products of `steps`, which stores all former results.
template <class Products, class Background>
[[gnu::always_inline]] inline void multiply_first_step(ResultTiles& results,
                                                       const Products& products, std::int32_t steps,
                                                       const Background& background) {
  products.load(0);
  for_each_constant<4>([&](auto part) __attribute__((always_inline)) {
    results.turn<part>();
    products.template multiply<part>(0);
    if (steps > 1) products.template load_next<part>(1);
    background(part);
  });
}

}  // namespace
}  // namespace flashmla::cpu::amx
