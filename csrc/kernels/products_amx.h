// The two matrix products of wide attention by tile products of bf16 (AMX): 16 x 16 float32 sums, 32
// deep. Scores [keys][lanes] are keys times queries, out [dim][lanes] values (transposed) times
// weights.
#pragma once

namespace onestem::ONESTEM_ISA {

// All eight tiles are 16 rows of 64 bytes. 0..3 hold sums, 4 and 5 left, 6 and 7 right operands.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compiler does not know that tile loads read memory.
inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

// Sixteen rows of a left operand, `bytes` apart.
struct Rows {
  const uint32_t* at;
  int64_t bytes;
};

struct AmxProducts {
  using Element = uint32_t;
  static constexpr bool kHasFew = false;
  static constexpr int kTileKeys = 256, kGridKeys = 256;
  static constexpr int kKeyStep = 32;
  static constexpr int kMaxVecs = 2;
  // Memory is asked for ahead between vector instructions and between products of weights: beside
  // tile loads of keys, which wait for caches themselves, it takes an eighth longer.
  static constexpr bool kFetchesWithScores = false;
  static constexpr bool kOutByLane = false;
  static int32_t fetches(int32_t dim) {
    return kTileKeys / kWeighStep + round_up(dim, 32) / 32 * (kTileKeys / 32);
  }
  static constexpr int32_t kLaneElements = 65536;

  static constexpr int32_t query_rows(int32_t dim) { return round_up(dim, 32) / 2; }
  static constexpr int32_t out_rows(int32_t dim) { return round_up(dim, 16); }
  // Copies of keys, and behind them where each sixteen of the tile's keys are read.
  static constexpr int64_t key_elements(int32_t dim) {
    return copied_elements(dim) + kTileKeys / 16 * int64_t{sizeof(Rows) / sizeof(Element)};
  }
  static constexpr int64_t value_elements(int32_t dim) {
    return int64_t{out_rows(dim)} * kValueStride;
  }
  static constexpr int64_t weight_elements() { return kTileKeys / 2 * kMaxVecs * kLanes; }

  static void begin_item() {
    // Static: to GCC the instruction reads the configuration's first bytes only, and it might leave
    // the others of a local one unwritten.
    static constexpr TileConfig config;
    _tile_loadconfig(&config);
  }
  static void end_item() { _tile_release(); }

  static void pack_query(const bf16* q, int32_t dim, uint32_t* to) {
    __builtin_memcpy(to, q, static_cast<size_t>(dim) * sizeof(bf16));
  }

  static void pack_keys(const bf16* pages, const int64_t* offsets, int32_t count, int32_t dim,
                        uint32_t* to) {
    const int32_t depth = query_rows(dim);
    Rows* rows = reinterpret_cast<Rows*>(to + copied_elements(dim));
    for (int32_t i = 0; i < count; i += 16, to += 16 * depth) {
      if (dim % 32 == 0 && evenly_spaced(offsets + i)) {
        const int64_t bytes = (offsets[i + 1] - offsets[i]) * int64_t{sizeof(bf16)};
        rows[i / 16] = {reinterpret_cast<const uint32_t*>(pages + offsets[i]), bytes};
      } else {
        copy_keys(pages, offsets + i, dim, to);
        rows[i / 16] = {to, int64_t{depth} * 4};
      }
    }
  }

  // Values transposed: [dim][pairs of keys].
  static void pack_values(const bf16* pages, const int64_t* offsets, int32_t count, int32_t dim,
                          uint32_t* to) {
    for (int32_t i = 0; i < count; i += 16) {
      for (int32_t d = 0; d < dim; d += 8) {
        alignas(64) uint32_t pairs[8][8];
        for (int32_t j = 0; j < 8; ++j) {
          interleave8(pages + offsets[i + 2 * j] + d, pages + offsets[i + 2 * j + 1] + d, pairs[j]);
        }
        transpose8(reinterpret_cast<const float*>(pairs), 8,
                   reinterpret_cast<float*>(to + int64_t{d} * kValueStride + i / 2), kValueStride);
      }
    }
    for (int32_t d = dim; d < out_rows(dim); ++d) {
      for (int32_t i = 0; i < count / 2; ++i) to[int64_t{d} * kValueStride + i] = 0;
    }
  }

  template <int VECS>
  static const uint32_t* weigh(float* scores, uint32_t* weights, int32_t k0, int32_t k1, vf scale,
                               const vf (&minus_top)[VECS], vf (&sums)[VECS], Fetch& fetch) {
    for (int32_t k = k0; k < k1; k += kWeighStep, fetch()) {
      weigh_pairs<VECS>(scores, weights, k, k + kWeighStep, scale, minus_top, sums);
    }
    return weights;
  }

  template <int VECS>
  static void scores(const uint32_t* queries, const uint32_t* keys, int32_t k, int32_t dim,
                     float* scores) {
    constexpr int kWidth = VECS * kLanes;
    const int32_t depth = query_rows(dim);
    const Rows* rows = reinterpret_cast<const Rows*>(keys + copied_elements(dim)) + k / 16;
    finish_stores();
    clear<VECS>();
    for (int32_t s = 0; s < depth; s += 16) {
      multiply<2, VECS>({rows[0].at + s, rows[0].bytes}, {rows[1].at + s, rows[1].bytes},
                        queries + s * kWidth);
    }
    store_sums<2, VECS>(scores + k * kWidth);
  }

  template <int VECS>
  static void accumulate(const uint32_t* values, const uint32_t* weights, int32_t k0, int32_t k1,
                         int32_t dim, const vf (&rescale)[VECS], float* out, Fetch& fetch) {
    const int32_t rows = out_rows(dim);
    scale_out<VECS>(rescale, rows, out);
    finish_stores();
    int32_t d = 0;
    for (; d + 32 <= rows; d += 32) accumulate_at<2, VECS>(values, weights, k0, k1, d, out, fetch);
    if (d < rows) accumulate_at<1, VECS>(values, weights, k0, k1, d, out, fetch);
  }

 protected:
  static constexpr int kWeighStep = 8;

  // A cache line more than a power of two.
  static constexpr int32_t kValueStride = kTileKeys / 2 + 16;

  static constexpr int64_t copied_elements(int32_t dim) {
    return int64_t{kTileKeys} * query_rows(dim);
  }

  // Whether sixteen keys stand at equal distances, as those of one page do: tile loads then read them
  // where they are.
  static bool evenly_spaced(const int64_t* offsets) {
    bool even = true;
    for (int32_t i = 2; i < 16; ++i) {
      even &= offsets[i] - offsets[i - 1] == offsets[1] - offsets[0];
    }
    return even;
  }

  static void copy_keys(const bf16* pages, const int64_t* offsets, int32_t dim, uint32_t* to) {
    const int32_t depth = query_rows(dim);
    for (int32_t i = 0; i < 16; ++i, to += depth) {
      pack_query(pages + offsets[i], dim, to);
      for (int32_t d = dim / 2; d < depth; ++d) to[d] = 0;
    }
  }

  template <int VECS>
  static void scale_out(const vf (&rescale)[VECS], int32_t rows, float* out) {
    bool changed = false;
    for (int v = 0; v < VECS; ++v) {
      changed |= _mm512_cmp_ps_mask(rescale[v], all(1.0f), _CMP_NEQ_UQ) != 0;
    }
    for (int32_t i = 0; changed && i < rows; ++i) {
      for (int v = 0; v < VECS; ++v) {
        float* at = out + (i * VECS + v) * kLanes;
        store(at, load(at) * rescale[v]);
      }
    }
  }

  template <int ROWS, int VECS>
  static void accumulate_at(const uint32_t* values, const uint32_t* weights, int32_t k0, int32_t k1,
                            int32_t d, float* out, Fetch& fetch) {
    constexpr int kWidth = VECS * kLanes;
    constexpr int64_t kBytes = int64_t{kValueStride} * 4;
    load_sums<ROWS, VECS>(out + d * kWidth);
    for (int32_t s = k0 / 2; s < k1 / 2; s += 16, fetch()) {
      const uint32_t* left = values + int64_t{d} * kValueStride + s;
      multiply<ROWS, VECS>({left, kBytes}, {left + 16 * kValueStride, kBytes},
                           weights + s * kWidth);
    }
    store_sums<ROWS, VECS>(out + d * kWidth);
  }

  template <int VECS>
  static void clear() {
    _tile_zero(0);
    _tile_zero(2);
    if constexpr (VECS == 2) {
      _tile_zero(1);
      _tile_zero(3);
    }
  }

  // 16 rows (`below` too: 32) times VECS x 16 lanes of `right`, 16 pairs deep.
  template <int ROWS, int VECS>
  static void multiply(Rows left, Rows below, const uint32_t* right) {
    constexpr int kRightBytes = VECS * kLanes * 4;
    _tile_loadd(4, left.at, left.bytes);
    _tile_loadd(6, right, kRightBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (VECS == 2) {
      _tile_loadd(7, right + kLanes, kRightBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (ROWS == 2) {
      _tile_loadd(5, below.at, below.bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (VECS == 2) _tile_dpbf16ps(3, 5, 7);
    }
  }

  template <int ROWS, int VECS>
  static void load_sums(const float* from) {
    constexpr int kWidth = VECS * kLanes;
    _tile_loadd(0, from, kWidth * 4);
    if constexpr (VECS == 2) _tile_loadd(1, from + kLanes, kWidth * 4);
    if constexpr (ROWS == 2) {
      _tile_loadd(2, from + 16 * kWidth, kWidth * 4);
      if constexpr (VECS == 2) _tile_loadd(3, from + 16 * kWidth + kLanes, kWidth * 4);
    }
  }

  template <int ROWS, int VECS>
  static void store_sums(float* to) {
    constexpr int kWidth = VECS * kLanes;
    _tile_stored(0, to, kWidth * 4);
    if constexpr (VECS == 2) _tile_stored(1, to + kLanes, kWidth * 4);
    if constexpr (ROWS == 2) {
      _tile_stored(2, to + 16 * kWidth, kWidth * 4);
      if constexpr (VECS == 2) _tile_stored(3, to + 16 * kWidth + kLanes, kWidth * 4);
    }
  }
};

}  // namespace onestem::ONESTEM_ISA
