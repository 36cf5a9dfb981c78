// Sixteen float32 lanes with AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

#include "attention.h"

namespace onestem::ONESTEM_ISA {

using vf = __m512;
using vi = __m512i;
constexpr int kLanes = 16;
// A register tile of a product (see vec_avx2.h); 24 of the 32 registers hold sums.
constexpr int kTileRows = 8;
constexpr int kTileVecs = 3;
constexpr int kThinSums = 16;

#include "kernels/vec_x86.h"

inline vf zeros() { return _mm512_setzero_ps(); }
inline vf all(float x) { return _mm512_set1_ps(x); }
inline vi all(int32_t x) { return _mm512_set1_epi32(x); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline vf load(const bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline vf load(const f16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline vi load(const int32_t* p) { return _mm512_loadu_si512(p); }

// to[j] lane i = element j of four(i).
template <class Four>
__attribute__((always_inline)) inline void transpose4(Four four, vf (&to)[4]) {
  vi rows[4];  // i: of i, i + 4, i + 8 and i + 12
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512 row = _mm512_castps128_ps512(four(i));
    row = _mm512_insertf32x4(row, four(i + 4), 1);
    row = _mm512_insertf32x4(row, four(i + 8), 2);
    rows[i] = _mm512_castps_si512(_mm512_insertf32x4(row, four(i + 12), 3));
  }
  const vi a = _mm512_unpacklo_epi32(rows[0], rows[1]), b = _mm512_unpacklo_epi32(rows[2], rows[3]);
  const vi c = _mm512_unpackhi_epi32(rows[0], rows[1]), d = _mm512_unpackhi_epi32(rows[2], rows[3]);
  to[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi64(a, b));
  to[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi64(a, b));
  to[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi64(c, d));
  to[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi64(c, d));
}

// 32 elements as two vectors (see vec_avx2.h).
template <class T>
inline void load_pair(const T* p, vf& low, vf& high) {
  low = load(p);
  high = load(p + kLanes);
}
inline void load_pair(const bf16* p, vf& low, vf& high) {
  const vi pairs = _mm512_loadu_si512(p);
  low = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  high = _mm512_castsi512_ps(_mm512_and_si512(pairs, all(~0xffff)));
}
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm512_min_ps(a, b); }
inline vf magnitude(vf x) { return _mm512_andnot_ps(all(-0.0f), x); }
inline vf with_sign_of(vf x, vf sign) {
  return _mm512_or_ps(x, _mm512_and_ps(all(-0.0f), sign));
}
inline vf to_float(vi x) { return _mm512_cvtepi32_ps(x); }

// float32 -> bf16 bits in the high half of each lane, to the nearest, ties to even.
inline vi round_to_bf16(vf x) {
  const vi bits = _mm512_castps_si512(x);
  const vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), all(1));
  const vi rounded = _mm512_add_epi32(_mm512_add_epi32(bits, all(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  return _mm512_mask_mov_epi32(rounded, nan, all(0x7fc00000));
}

inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
inline void store(f16* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bf16* p, vf x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_srli_epi32(round_to_bf16(x), 16)));
}

// value * 2^n, where n stands in the low bits of `shifted` (see exp2); 0 where x is below -125.
inline vf times_power(vf value, vf shifted, vf x) {
  const vi exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  const __mmask16 kept = _mm512_cmp_ps_mask(x, all(-125.0f), _CMP_NLT_UQ);
  return _mm512_castsi512_ps(
      _mm512_maskz_add_epi32(kept, _mm512_castps_si512(value), exponent));
}

// score where first <= t < end, else -inf.
inline vf visible(vf score, vi first, vi end, int32_t t) {
  const vi key = all(t);
  const __mmask16 seen = static_cast<__mmask16>(_mm512_cmple_epi32_mask(first, key) &
                                                _mm512_cmplt_epi32_mask(key, end));
  return _mm512_mask_mov_ps(all(-__builtin_inff()), seen, score);
}

// Lanes by a condition.
using Mask = __mmask16;
inline Mask all_lanes() { return 0xffff; }
inline Mask first_lanes(int32_t n) { return static_cast<Mask>((1u << n) - 1); }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Mask either(Mask a, Mask b) { return a | b; }
inline uint32_t lane_bits(Mask m) { return m; }
inline Mask not_below(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ); }
inline Mask above(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline vf chosen(Mask m, vf x, vf other) { return _mm512_mask_mov_ps(other, m, x); }
inline vi chosen(Mask m, vi x, vi other) { return _mm512_mask_mov_epi32(other, m, x); }

// Integers, and 32-bit words in 64-bit lanes.
inline void store(int32_t* p, vi x) { _mm512_storeu_si512(p, x); }
inline vi truncate(vf x) { return _mm512_cvttps_epi32(x); }
inline vi float_bits(vf x) { return _mm512_castps_si512(x); }
inline vf unsigned_to_float(vi x) { return _mm512_cvtepu32_ps(x); }
inline vi all_wide(uint32_t x) { return _mm512_set1_epi64(x); }
inline vi add_wide(vi a, vi b) { return _mm512_add_epi64(a, b); }
inline vi multiply_wide(vi a, vi b) { return _mm512_mul_epu32(a, b); }
inline vi high_words(vi x) { return _mm512_srli_epi64(x, 32); }
inline vi low_words(vi x) { return _mm512_and_si512(x, all_wide(0xffffffffu)); }
inline vi xor3(vi a, vi b, vi c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
inline vi pair_words(vi low, vi high) {
  return _mm512_mask_mov_epi32(_mm512_slli_epi64(high, 32), 0x5555, low);
}
inline vi even_pairs(vi a, vi b) { return _mm512_unpacklo_epi64(a, b); }
inline vi odd_pairs(vi a, vi b) { return _mm512_unpackhi_epi64(a, b); }

// Pairs of 16-bit integers in 32-bit lanes.
inline vi load_bytes(const void* p) { return _mm512_loadu_si512(p); }
template <int COUNT>
inline vi shift_words(vi x) {
  return _mm512_srli_epi16(x, COUNT);
}
inline vi both(vi a, vi b) { return _mm512_and_si512(a, b); }
inline vi subtract(vi a, vi b) { return _mm512_sub_epi32(a, b); }
inline vi add(vi a, vi b) { return _mm512_add_epi32(a, b); }
// sums + a[0] * b[0] + a[1] * b[1] in each lane.
inline vi multiply_pairs(vi a, vi b, vi sums) {
#ifdef ONESTEM_VNNI
  return _mm512_dpwssd_epi32(sums, a, b);
#else
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
}
inline vf load_codes(const uint8_t* p) {
  return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline vf load_codes(const int8_t* p) {
  return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Of each byte of `index`, which is below 16, the byte at that place in a table.
inline vi looked_up(const uint8_t* table, vi index) {
  const __m128i held = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(held), index);
}
// Their low 8 or 16 bits.
inline void store_codes(int8_t* p, vi x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
inline void store_codes(int16_t* p, vi x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
// As it is: the compiler may not round it together with what is done to it next.
template <class V>
inline V apart(V x) {
#ifdef ONESTEM_EMULATED
  __asm__("" : "+m"(x));  // no register holds it
#else
  __asm__("" : "+v"(x));
#endif
  return x;
}

inline int32_t sum(vi x) { return _mm512_reduce_add_epi32(x); }
inline float sum(vf x) { return _mm512_reduce_add_ps(x); }
inline float top_of(vf x) { return _mm512_reduce_max_ps(x); }

inline void sum_each(const vf (&parts)[8], float* out) {
  __m256 halves[8];
  for (int i = 0; i < 8; ++i) {
    halves[i] = _mm512_castps512_ps256(parts[i]) + _mm512_extractf32x8_ps(parts[i], 1);
  }
  sum_each(halves, out);
}

}  // namespace onestem::ONESTEM_ISA
