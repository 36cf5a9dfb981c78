// The two matrix products of wide attention by dot products of bf16 pairs (AVX-512 BF16).
#pragma once

namespace onestem::ONESTEM_ISA {

struct MultiplyPairs {
  static vf add(uint32_t a, vf b, vf c) {
    const vi pairs = all(static_cast<int32_t>(a));
    return _mm512_dpbf16_ps(c, __builtin_bit_cast(__m512bh, pairs),
                            __builtin_bit_cast(__m512bh, b));
  }
};

struct DotProducts : LaneProducts<MultiplyPairs, uint32_t, 2> {
  static void pack_query(const bf16* q, int32_t dim, uint32_t* to) {
    __builtin_memcpy(to, q, static_cast<size_t>(dim) * sizeof(bf16));
  }

  static void pack_keys(const bf16* pages, const int64_t* offsets, int32_t count, int32_t dim,
                        uint32_t* to) {
    for (int32_t i = 0; i < count; ++i) {
      pack_query(pages + offsets[i], dim, to + int64_t{i} * (dim / 2));
    }
  }

  static void pack_values(const bf16* pages, const int64_t* offsets, int32_t count, int32_t dim,
                          uint32_t* to) {
    for (int32_t i = 0; i < count; i += 2) {
      const bf16 *low = pages + offsets[i], *high = pages + offsets[i + 1];
      for (int32_t d = 0; d < dim; d += 8) {
        interleave8(low + d, high + d, to + d / 8 * kPanel + i / 2 * 8);
      }
    }
  }

  // Four words of a key from word w on.
  static v4 four_words(const bf16* key, int32_t w) {
    return load4(reinterpret_cast<const float*>(key) + w);
  }
  // 2 * kLanes elements of two keys' values, as pairs: those at even and at odd places.
  static void value_pair(const bf16* pages, const int64_t* offsets, vf& even, vf& odd) {
    const vi a = _mm512_loadu_si512(pages + offsets[0]), b = _mm512_loadu_si512(pages + offsets[1]);
    // x | (y & mask)
    even = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_slli_epi32(b, 16), a, all(0xffff), 0xf8));
    odd = _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_srli_epi32(a, 16), b, all(~0xffff), 0xf8));
  }
  // n elements of two keys' values, as pairs.
  static vf values(const bf16* pages, const int64_t* offsets, int32_t n) {
    const vi even = _mm512_castps_si512(get(pages + offsets[0], n));
    const vi odd = _mm512_castps_si512(get(pages + offsets[1], n));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_srli_epi32(even, 16), odd));
  }

  // What `weigh` does, key by key: a weight, its packed form, and the sum in the same order.
  static vf power(vf x) { return floor_exp2(x); }
  static void store_weights(uint32_t* to, vf weights) {
    const vi rounded = _mm512_add_epi32(_mm512_castps_si512(weights), all(0x8000));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
  }
  static float sum_of(const float* weights, int32_t count) {
    float sum = 0.0f;
    for (int32_t k = 0; k < count; k += 2) sum += weights[k] + weights[k + 1];
    return sum;
  }

  template <int VECS>
  static const uint32_t* weigh(float* scores, uint32_t* weights, int32_t k0, int32_t k1, vf scale,
                               const vf (&minus_top)[VECS], vf (&sums)[VECS], Fetch&) {
    weigh_pairs<VECS>(scores, weights, k0, k1, scale, minus_top, sums);
    return weights;
  }
};

}  // namespace onestem::ONESTEM_ISA
