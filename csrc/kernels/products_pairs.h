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

// (2^f - 1) / f for 0 <= f < 1 as a polynomial: 2^f is exact at 0 and elsewhere off by at most 8.6e-5
// of itself, a fiftieth of what rounding to bf16 takes.
constexpr float kFloorPower[] = {0.695116758f, 0.22764498f, 0.0770670474f};

// 2^x for x <= 127 as 2^floor(x) times 2^f: two instructions less than `exp2`. 0 for -inf.
inline vf floor_exp2(vf x) {
  const vf f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  const vf slope = fma(fma(all(kFloorPower[2]), f, all(kFloorPower[1])), f, all(kFloorPower[0]));
  return _mm512_scalef_ps(fma(slope, f, all(1.0f)), x);
}

// Weights of keys k0..k1-1 (both even) as pairs of keys; adds what they sum to, unrounded.
template <int VECS>
inline void weigh_pairs(const float* scores, uint32_t* weights, int32_t k0, int32_t k1, vf scale,
                        const vf (&minus_top)[VECS], vf (&sums)[VECS]) {
  for (int32_t k = k0; k < k1; k += 2) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      const float* at = scores + (k * VECS + v) * kLanes;
      const vf low = floor_exp2(fma(load(at), scale, minus_top[v]));
      const vf high = floor_exp2(fma(load(at + VECS * kLanes), scale, minus_top[v]));
      sums[v] = sums[v] + (low + high);
      store_pairs(weights + (k / 2 * VECS + v) * kLanes, low, high);
    }
  }
}

}  // namespace onestem::ONESTEM_ISA
