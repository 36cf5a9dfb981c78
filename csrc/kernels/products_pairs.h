// What products of bf16 pairs share: operands are bf16, sums float32, and the softmax's weights are
// rounded to bf16 (as flash kernels do). A 32-bit element holds two neighbours of the axis that is
// summed over.
#pragma once

namespace onestem::ONESTEM_ISA {

// Two rows of weights as pairs, `low` in the low halves, to the nearest and ties upwards.
inline void store_pairs(uint32_t* to, vf low, vf high) {
  const vi half = all(0x8000);
  const vi even = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(low), half), 16);
  const vi odd = _mm512_add_epi32(_mm512_castps_si512(high), half);
  // even | (odd & 0xffff0000)
  _mm512_storeu_si512(to, _mm512_ternarylogic_epi32(even, odd, all(~0xffff), 0xf8));
}

// Weights of keys k0..k1-1 (both even) as pairs of keys; adds what they sum to, unrounded.
template <int VECS>
inline void weigh_pairs(const float* scores, uint32_t* weights, int32_t k0, int32_t k1, vf scale,
                        const vf (&minus_top)[VECS], vf (&sums)[VECS]) {
  for (int32_t k = k0; k < k1; k += 2) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      const float* at = scores + (k * VECS + v) * kLanes;
      const vf low = exp2<3>(fma(load(at), scale, minus_top[v]));
      const vf high = exp2<3>(fma(load(at + VECS * kLanes), scale, minus_top[v]));
      sums[v] = sums[v] + (low + high);
      store_pairs(weights + (k / 2 * VECS + v) * kLanes, low, high);
    }
  }
}

}  // namespace onestem::ONESTEM_ISA
