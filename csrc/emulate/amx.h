// AMX: tiles and their products of bf16 and of bytes. What the processor refuses is a fault here, and so is all
// that a kernel can only mean by mistake: a tile that is not configured, shapes that do not fit.
#pragma once

#include "emulate/bf16.h"
#include "emulate/vnni.h"

namespace onestem {
namespace emulated {

constexpr int kNumTiles = 8, kMaxRows = 16, kMaxRowBytes = 64;

struct Tile {
  int rows = 0, row_bytes = 0;
  alignas(64) uint8_t data[kMaxRows][kMaxRowBytes] = {};
};

// A thread's tile registers.
struct Tiles {
  bool configured = false;
  Tile tile[kNumTiles];

  Tile& at(int number) {
    if (!configured) fault("a tile is used before LDTILECFG");
    if (number < 0 || number >= kNumTiles) fault("tile " + std::to_string(number) + " of 8");
    if (tile[number].rows == 0) fault("tile " + std::to_string(number) + " is not configured");
    return tile[number];
  }
};
inline thread_local Tiles t_tiles;

inline bool any_set(const uint8_t* bytes, int from, int to) {
  for (int i = from; i < to; ++i) {
    if (bytes[i] != 0) return true;
  }
  return false;
}

// Rows and row bytes of each tile: bytes 48 + n, and 16 + 2n of a configuration.
inline void configure(const uint8_t* bytes, Tiles& tiles) {
  if (bytes[1] != 0) fault("LDTILECFG: start_row is " + std::to_string(bytes[1]));
  if (any_set(bytes, 2, 16) || any_set(bytes, 32, 48) || any_set(bytes, 56, 64)) {
    fault("LDTILECFG: a reserved byte is not 0");
  }
  tiles.configured = true;
  for (int n = 0; n < kNumTiles; ++n) {
    Tile& tile = tiles.tile[n];
    tile.rows = bytes[48 + n];
    tile.row_bytes = bytes[16 + 2 * n] | bytes[17 + 2 * n] << 8;
    if (tile.rows > kMaxRows || tile.row_bytes > kMaxRowBytes) {
      fault("LDTILECFG: tile " + std::to_string(n) + " has " + std::to_string(tile.rows) +
            " rows of " + std::to_string(tile.row_bytes) + " bytes");
    }
    if ((tile.rows == 0) != (tile.row_bytes == 0)) fault("LDTILECFG: rows or their bytes are 0");
  }
}

// What is behind the configured rows and bytes is 0 after any write.
inline void clear(Tile& tile) { __builtin_memset(tile.data, 0, sizeof tile.data); }

}  // namespace emulated

// LDTILECFG; tiles are 0 afterwards.
inline void _tile_loadconfig(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  if (bytes[0] > 1) emulated::fault("LDTILECFG: palette " + std::to_string(bytes[0]));
  emulated::t_tiles = {};
  if (bytes[0] == 1) emulated::configure(bytes, emulated::t_tiles);
}

// TILERELEASE.
inline void _tile_release() { emulated::t_tiles = {}; }

// TILEZERO.
inline void _tile_zero(int number) { emulated::clear(emulated::t_tiles.at(number)); }

// TILELOADD: rows stand `stride` bytes apart.
inline void _tile_loadd(int number, const void* from, int64_t stride) {
  emulated::Tile& tile = emulated::t_tiles.at(number);
  emulated::clear(tile);
  for (int row = 0; row < tile.rows; ++row) {
    __builtin_memcpy(tile.data[row], static_cast<const char*>(from) + row * stride,
                     static_cast<size_t>(tile.row_bytes));
  }
}

// TILESTORED.
inline void _tile_stored(int number, void* to, int64_t stride) {
  const emulated::Tile& tile = emulated::t_tiles.at(number);
  for (int row = 0; row < tile.rows; ++row) {
    __builtin_memcpy(static_cast<char*>(to) + row * stride, tile.data[row],
                     static_cast<size_t>(tile.row_bytes));
  }
}

namespace emulated {

inline __m256 load_half(const uint8_t* row, int half) {
  return _mm256_loadu_ps(reinterpret_cast<const float*>(row + 32 * half));
}

inline bool fit(const Tile& sums, const Tile& left, const Tile& right) {
  return left.rows == sums.rows && right.row_bytes == sums.row_bytes &&
         left.row_bytes == 4 * right.rows && sums.row_bytes % 4 == 0;
}

// Eight columns of a product. Products at even and at odd places are summed apart, each from 0 in the
// order of the pairs; their sum is then added to what stood in the tile.
inline void multiply_half(const Tile& left, const Tile& right, int half, Tile& sums) {
  __m256 evens[kMaxRows], odds[kMaxRows];
  for (int k = 0; k < right.rows; ++k) {
    evens[k] = even_elements(load_half(right.data[k], half));
    odds[k] = odd_elements(load_half(right.data[k], half));
  }
  for (int m = 0; m < sums.rows; ++m) {
    __m256 even = _mm256_setzero_ps(), odd = even;
    for (int k = 0; k < right.rows; ++k) {
      float pair;
      __builtin_memcpy(&pair, left.data[m] + 4 * k, sizeof pair);
      even = multiply_add(even_elements(_mm256_set1_ps(pair)), evens[k], even);
      odd = multiply_add(odd_elements(_mm256_set1_ps(pair)), odds[k], odd);
    }
    const __m256 sum = flushed(flushed(load_half(sums.data[m], half)) + flushed(even + odd));
    _mm256_storeu_ps(reinterpret_cast<float*>(sums.data[m] + 32 * half), sum);
  }
}

}  // namespace emulated

// TDPBF16PS: sums [m][n] += left [m][k pairs] * right [k][n pairs].
inline void _tile_dpbf16ps(int sums, int left, int right) {
  using emulated::fault;
  if (sums == left || sums == right || left == right) fault("TDPBF16PS: two operands are one tile");
  emulated::Tile& c = emulated::t_tiles.at(sums);
  const emulated::Tile &a = emulated::t_tiles.at(left), &b = emulated::t_tiles.at(right);
  if (!emulated::fit(c, a, b)) fault("TDPBF16PS: shapes of the tiles do not fit");
  for (int half = 0; half < 2; ++half) emulated::multiply_half(a, b, half, c);
}

// TDPBUSD: sums [m][n] += left [m][k fours of unsigned bytes] * right [k][n fours of signed ones].
inline void _tile_dpbusd(int sums, int left, int right) {
  using emulated::fault;
  if (sums == left || sums == right || left == right) fault("TDPBUSD: two operands are one tile");
  emulated::Tile& c = emulated::t_tiles.at(sums);
  const emulated::Tile &a = emulated::t_tiles.at(left), &b = emulated::t_tiles.at(right);
  if (!emulated::fit(c, a, b)) fault("TDPBUSD: shapes of the tiles do not fit");
  const auto word = [](const emulated::Tile& tile, int row, int at) {
    uint32_t value;
    __builtin_memcpy(&value, tile.data[row] + 4 * at, sizeof value);
    return value;
  };
  for (int m = 0; m < c.rows; ++m) {
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      int32_t sum = static_cast<int32_t>(word(c, m, n));
      for (int k = 0; k < b.rows; ++k) {
        sum = emulated::dot_bytes(word(a, m, k), word(b, k, n), sum);
      }
      __builtin_memcpy(c.data[m] + 4 * n, &sum, sizeof sum);
    }
  }
}

}  // namespace onestem
