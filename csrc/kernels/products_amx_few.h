// The products of wide attention by AMX where one vector of lanes is all: values stand on the right, as
// pairs of keys, which their rows are almost as they come. It is the weights that are transposed, and
// they are fewer. Scores are [keys][lanes] as there, out is [lanes][dim].
#pragma once

namespace onestem::ONESTEM_ISA {

struct AmxFewProducts : AmxProducts {
  static constexpr int kTileKeys = 128;  // pairs of their values fit in the first-level cache
  static constexpr int kMaxVecs = 1;
  static constexpr bool kOutByLane = true;

  static int32_t fetches(int32_t dim) {
    return kTileKeys / kWeighStep + (out_tiles(dim) + kSums - 1) / kSums * (kTileKeys / 32);
  }
  static constexpr int64_t value_elements(int32_t dim) {
    return int64_t{out_rows(dim)} * (kTileKeys / 2);
  }
  static constexpr int64_t weight_elements() { return kTileKeys / 2 * kLanes; }

  // For each 32 keys and 16 elements of a head a tile: [pairs of keys][elements].
  static void pack_values(const bf16* pages, const int64_t* offsets, int32_t count, int32_t dim,
                          uint32_t* to) {
    for (int32_t i = 0; i < count; i += 32, to += out_tiles(dim) * kTile) {
      for (int32_t j = 0; j < 16; ++j) {
        pair_values(pages + offsets[i + 2 * j], pages + offsets[i + 2 * j + 1], dim, to + j * 16);
      }
    }
  }

  // Weights of each 32 keys as a tile: [lanes][pairs of keys].
  template <int VECS>
  static const uint32_t* weigh(const float* scores, uint32_t* weights, int32_t k0, int32_t k1,
                               vf scale, const vf (&minus_top)[VECS], vf (&sums)[VECS],
                               Fetch& fetch) {
    static_assert(VECS == 1);
    alignas(64) uint32_t pairs[kTile];
    for (int32_t k = k0; k < k1; k += 32) {
      for (int32_t i = 0; i < 32; i += kWeighStep, fetch()) {
        weigh_pairs<VECS>(scores + k * kLanes, pairs, i, i + kWeighStep, scale, minus_top, sums);
      }
      transpose16(pairs, weights + k / 32 * kTile);
    }
    return weights;
  }

  template <int VECS>
  static void accumulate(const uint32_t* values, const uint32_t* weights, int32_t k0, int32_t k1,
                         int32_t dim, const vf (&rescale)[VECS], float* out, Fetch& fetch) {
    const int32_t tiles = out_tiles(dim);
    scale_lanes(rescale[0], 16 * tiles, out);
    finish_stores();
    for (int32_t first = 0; first < tiles; first += kSums) {
      const Columns columns{values, weights, k0 / 32, k1 / 32, first, tiles};
      switch (smaller(tiles - first, kSums)) {
        case 1: accumulate_at<1>(columns, out, fetch); break;
        case 2: accumulate_at<2>(columns, out, fetch); break;
        case 3: accumulate_at<3>(columns, out, fetch); break;
        default: accumulate_at<kSums>(columns, out, fetch);
      }
    }
  }

 private:
  static constexpr int kWeighStep = 4;
  static constexpr int32_t kTile = 16 * 16;  // elements
  static constexpr int32_t kSums = 4;        // tiles 0..3

  // Products of keys 32 * begin..32 * end - 1 for some of the `tiles` of out.
  struct Columns {
    const uint32_t *values, *weights;
    int32_t begin, end, first, tiles;
  };

  static constexpr int32_t out_tiles(int32_t dim) { return out_rows(dim) / 16; }

  // A row of each tile.
  static void pair_values(const bf16* a, const bf16* b, int32_t dim, uint32_t* to) {
    int32_t d = 0;
    for (; d + 16 <= dim; d += 16, to += kTile) {
      interleave8(a + d, b + d, to);
      interleave8(a + d + 8, b + d + 8, to + 8);
    }
    if (d == dim) return;
    interleave8(a + d, b + d, to);
    for (int32_t i = 8; i < 16; ++i) to[i] = 0;
  }

  static void transpose16(const uint32_t* from, uint32_t* to) {
    for (int32_t i = 0; i < 16; i += 8) {
      for (int32_t j = 0; j < 16; j += 8) {
        transpose8(reinterpret_cast<const float*>(from + i * 16 + j), 16,
                   reinterpret_cast<float*>(to + j * 16 + i), 16);
      }
    }
  }

  static void scale_lanes(vf rescale, int32_t width, float* out) {
    alignas(64) float by[kLanes];
    store(by, rescale);
    for (int32_t l = 0; l < kLanes; ++l, out += width) {
      for (int32_t d = 0; by[l] != 1.0f && d < width; d += kLanes) {
        store(out + d, load(out + d) * all(by[l]));
      }
    }
  }

  template <int COUNT>
  static void accumulate_at(const Columns& columns, float* out, Fetch& fetch) {
    const int64_t row_bytes = int64_t{columns.tiles} * 64;
    out += columns.first * 16;
    load_out<COUNT>(out, row_bytes);
    for (int32_t s = columns.begin; s < columns.end; ++s, fetch()) {
      const int64_t tile = int64_t{s} * columns.tiles + columns.first;
      multiply_at<COUNT>(columns.weights + s * kTile, columns.values + tile * kTile);
    }
    store_out<COUNT>(out, row_bytes);
  }

  template <int COUNT>
  static void multiply_at(const uint32_t* weights, const uint32_t* values) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, values, 64);
    _tile_dpbf16ps(0, 4, 5);
    if constexpr (COUNT > 1) {
      _tile_loadd(6, values + kTile, 64);
      _tile_dpbf16ps(1, 4, 6);
    }
    if constexpr (COUNT > 2) {
      _tile_loadd(7, values + 2 * kTile, 64);
      _tile_dpbf16ps(2, 4, 7);
    }
    if constexpr (COUNT > 3) {
      _tile_loadd(5, values + 3 * kTile, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }

  template <int COUNT>
  static void load_out(const float* out, int64_t row_bytes) {
    _tile_loadd(0, out, row_bytes);
    if constexpr (COUNT > 1) _tile_loadd(1, out + 16, row_bytes);
    if constexpr (COUNT > 2) _tile_loadd(2, out + 32, row_bytes);
    if constexpr (COUNT > 3) _tile_loadd(3, out + 48, row_bytes);
  }

  template <int COUNT>
  static void store_out(float* out, int64_t row_bytes) {
    _tile_stored(0, out, row_bytes);
    if constexpr (COUNT > 1) _tile_stored(1, out + 16, row_bytes);
    if constexpr (COUNT > 2) _tile_stored(2, out + 32, row_bytes);
    if constexpr (COUNT > 3) _tile_stored(3, out + 48, row_bytes);
  }
};

}  // namespace onestem::ONESTEM_ISA
