// The two matrix products of wide attention by float32 multiply-adds, for pages of any type.
#pragma once

namespace onestem::ONESTEM_ISA {

// sums[r][v] += sum over steps of a[r * a_row + s * a_step] (for all lanes) * b[s * b_step + v].
template <class Multiply, class Element, int ROWS, int VECS>
__attribute__((always_inline)) inline void product(const Element* a, ptrdiff_t a_row,
                                                   ptrdiff_t a_step, const Element* b,
                                                   int32_t steps, vf (&sums)[ROWS][VECS],
                                                   ptrdiff_t b_step = VECS * kLanes) {
  for (int32_t s = 0; s < steps; ++s) {
    vf right[VECS];
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      right[v] = load(reinterpret_cast<const float*>(b + v * kLanes));
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) {
        sums[r][v] = Multiply::add(a[r * a_row], right[v], sums[r][v]);
      }
    }
    a += a_step;
    b += b_step;
  }
}

struct MultiplyFloat {
  static vf add(float a, vf b, vf c) { return fma(all(a), b, c); }
};

// Where packed operands stand. An element holds kPack neighbours of the axis that is summed over.
// Queries [dim / kPack][lanes of a block], keys [tile][dim / kPack], values in panels of eight
// elements of the head, [dim / 8][tile / kPack][8], weights [tile / kPack][lanes of a block].
// Lanes are query rows: the running maxima, sums and masks of the softmax are then vectors, keys
// and values are read as scalars for all lanes, and neither needs transposing.
template <class Multiply, class Packed, int PACK>
struct LaneProducts {
  using Element = Packed;
  using Multiplier = Multiply;
  static constexpr bool kHasFew = true;  // `FewItem` takes them
  static constexpr int kPack = PACK;
  static constexpr int kTileKeys = 128;
  static constexpr int kGridKeys = 64;  // of a tile on the grid
  static constexpr int kKeyStep = 8;  // keys are computed in multiples of this
  static constexpr bool kFetchesWithScores = true;
  static constexpr bool kOutByLane = false;
  // How often a block's tile asks for memory ahead.
  static int32_t fetches(int32_t) { return kTileKeys / kKeyStep; }
  static constexpr int kMaxVecs = kTileVecs;
  // Lanes times elements of a head that an item takes: their queries and sums stay in the second
  // cache level.
  static constexpr int32_t kLaneElements = 32768;

  static void begin_item() {}
  static void end_item() {}

  static constexpr int32_t query_rows(int32_t dim) { return round_up(dim / kPack, 8); }
  static constexpr int32_t out_rows(int32_t dim) { return dim; }
  static constexpr int64_t key_elements(int32_t dim) { return int64_t{kTileKeys} * dim / kPack; }
  static constexpr int64_t value_elements(int32_t dim) { return dim / 8 * kPanel; }
  static constexpr int64_t weight_elements() {
    return kPack == 1 ? 0 : kTileKeys / kPack * kMaxVecs * kLanes;
  }

  // scores [tile][lanes]: the kKeyStep keys from k on times the block's queries.
  template <int VECS>
  static void scores(const Element* queries, const Element* keys, int32_t k, int32_t dim,
                     float* scores) {
    constexpr int kRows = rows(VECS);
    const int32_t steps = dim / kPack;
    for (const int32_t stop = k + kKeyStep; k < stop; k += kRows) {
      vf sums[kRows][VECS] = {};
      product<Multiply>(keys + int64_t{k} * steps, steps, 1, queries, steps, sums);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) store(scores + ((k + r) * VECS + v) * kLanes, sums[r][v]);
      }
    }
  }

  // out [dim][lanes] = out * rescale + values of keys k0..k1-1 times weights. A tile is summed apart:
  // one chain of sums over a long run would lose digits.
  template <int VECS>
  static void accumulate(const Element* values, const Element* weights, int32_t k0, int32_t k1,
                         int32_t dim, const vf (&rescale)[VECS], float* out, Fetch&) {
    constexpr int kRows = rows(VECS);
    const int32_t from = k0 / kPack, steps = (k1 - k0) / kPack;
    for (int32_t d = 0; d < dim; d += kRows) {
      float* to = out + int64_t{d} * VECS * kLanes;
      vf sums[kRows][VECS] = {};
      const Element* panel = values + d / 8 * kPanel + from * 8 + d % 8;
      product<Multiply>(panel, 1, 8, weights + int64_t{from} * VECS * kLanes, steps, sums);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) {
          float* at = to + (r * VECS + v) * kLanes;
          store(at, fma(load(at), rescale[v], sums[r][v]));
        }
      }
    }
  }

  // Panels stand a cache line more than a power of two apart: writing one row of values touches all
  // of them, and at a power of two they would share a cache set.
  static constexpr int32_t kPanel = kTileKeys / kPack * 8 + 16;

 private:
  // With one vector of lanes twice the rows, to have sums enough in flight.
  static constexpr int rows(int vecs) { return vecs == 1 ? larger(kTileRows, 8) : kTileRows; }
};

template <class T>
struct FloatProducts : LaneProducts<MultiplyFloat, float, 1> {
  static void pack_query(const T* q, int32_t dim, float* to) {
    for (int32_t d = 0; d < dim; d += 8) convert8(q + d, to + d);
  }

  static void pack_keys(const T* pages, const int64_t* offsets, int32_t count, int32_t dim,
                        float* to) {
    for (int32_t i = 0; i < count; ++i) pack_query(pages + offsets[i], dim, to + int64_t{i} * dim);
  }

  static void pack_values(const T* pages, const int64_t* offsets, int32_t count, int32_t dim,
                          float* to) {
    for (int32_t i = 0; i < count; ++i) {
      const T* from = pages + offsets[i];
      for (int32_t d = 0; d < dim; d += 8) {
        convert8(from + d, to + d / 8 * FloatProducts::kPanel + i * 8);
      }
    }
  }

  // Four words of a key from word w on.
  static v4 four_words(const T* key, int32_t w) { return load4(key + w); }
  // 2 * kLanes elements of a key's values, in the order of `load_pair`.
  static void value_pair(const T* pages, const int64_t* offsets, vf& low, vf& high) {
    load_pair(pages + offsets[0], low, high);
  }
  // n elements of a key's values.
  static vf values(const T* pages, const int64_t* offsets, int32_t n) {
    return get(pages + offsets[0], n);
  }

  // What `weigh` does, key by key: a weight, its packed form, and the sum in the same order.
  static vf power(vf x) { return exp2(x); }
  static void store_weights(float* to, vf weights) { store(to, weights); }
  static float sum_of(const float* weights, int32_t count) {
    float sum = 0.0f;
    for (int32_t k = 0; k < count; k += FloatProducts::kKeyStep) {
      float some = 0.0f;
      for (int32_t i = 0; i < FloatProducts::kKeyStep; ++i) some += weights[k + i];
      sum += some;
    }
    return sum;
  }

  // Scores become weights in place; returns through `sums` their sums per lane.
  template <int VECS>
  static const float* weigh(float* scores, float*, int32_t k0, int32_t k1, vf scale,
                            const vf (&minus_top)[VECS], vf (&sums)[VECS], Fetch&) {
    for (int32_t k = k0; k < k1; k += FloatProducts::kKeyStep) {
      vf some[VECS] = {};  // of a few keys: shorter chains of sums
      for (int32_t i = k; i < k + FloatProducts::kKeyStep; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) {
          float* at = scores + (i * VECS + v) * kLanes;
          const vf weight = exp2(fma(load(at), scale, minus_top[v]));
          some[v] = some[v] + weight;
          store(at, weight);
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < VECS; ++v) sums[v] = sums[v] + some[v];
    }
    return scores;
  }
};

}  // namespace onestem::ONESTEM_ISA
