// Eight float32 lanes with AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

#include "attention.h"

namespace onestem::ONESTEM_ISA {

using vf = __m256;
using vi = __m256i;
constexpr int kLanes = 8;
// A register tile of a product: rows (keys or elements of a head) x vectors of lanes. With the
// operands it fills the 16 registers.
constexpr int kTileRows = 4;
constexpr int kTileVecs = 3;
// Accumulators of a thin product: enough to hide the latency of a multiply-add.
constexpr int kThinSums = 8;

#include "kernels/vec_x86.h"

inline vf zeros() { return _mm256_setzero_ps(); }
inline vf all(float x) { return _mm256_set1_ps(x); }
inline vi all(int32_t x) { return _mm256_set1_epi32(x); }
inline vf load(const float* p) { return load8(p); }
inline vf load(const bf16* p) { return load8(p); }
inline vf load(const f16* p) { return load8(p); }

// to[j] lane i = element j of four(i).
template <class Four>
__attribute__((always_inline)) inline void transpose4(Four four, vf (&to)[4]) {
  vf rows[4];  // i: of i and i + 4
  for (int i = 0; i < 4; ++i) rows[i] = _mm256_set_m128(four(i + 4), four(i));
  const vf a = _mm256_unpacklo_ps(rows[0], rows[1]), b = _mm256_unpacklo_ps(rows[2], rows[3]);
  const vf c = _mm256_unpackhi_ps(rows[0], rows[1]), d = _mm256_unpackhi_ps(rows[2], rows[3]);
  to[0] = _mm256_shuffle_ps(a, b, 0x44);
  to[1] = _mm256_shuffle_ps(a, b, 0xee);
  to[2] = _mm256_shuffle_ps(c, d, 0x44);
  to[3] = _mm256_shuffle_ps(c, d, 0xee);
}

// Sixteen elements as two vectors, in whatever order is cheapest for the type (`in_order` restores
// that of memory): of bf16, those at even and at odd places.
template <class T>
inline void load_pair(const T* p, vf& low, vf& high) {
  low = load8(p);
  high = load8(p + kLanes);
}
inline void load_pair(const bf16* p, vf& low, vf& high) {
  const vi pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  low = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  high = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(~0xffff)));
}
inline vi load(const int32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf max(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf min(vf a, vf b) { return _mm256_min_ps(a, b); }
inline vf magnitude(vf x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline vf with_sign_of(vf x, vf sign) {
  return _mm256_or_ps(x, _mm256_and_ps(all(-0.0f), sign));
}
inline vf to_float(vi x) { return _mm256_cvtepi32_ps(x); }

inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline void store(f16* p, vf x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(bf16* p, vf x) {
  const vi bits = _mm256_castps_si256(x);
  const vi odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), all(1));
  vi rounded = _mm256_add_epi32(_mm256_add_epi32(bits, all(0x7fff)), odd);
  const vi nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, all(0x7fc00000), nan), 16);
  const vi packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

// value * 2^n, where n stands in the low bits of `shifted` (see exp2); 0 where x is below -125.
inline vf times_power(vf value, vf shifted, vf x) {
  const vi exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  const vf product = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), exponent));
  return _mm256_and_ps(product, _mm256_cmp_ps(x, all(-125.0f), _CMP_NLT_UQ));
}

// score where first <= t < end, else -inf.
inline vf visible(vf score, vi first, vi end, int32_t t) {
  const vi key = all(t);
  const vi seen = _mm256_andnot_si256(_mm256_cmpgt_epi32(first, key), _mm256_cmpgt_epi32(end, key));
  return _mm256_blendv_ps(all(-__builtin_inff()), score, _mm256_castsi256_ps(seen));
}

// Lanes by a condition: all bits of a lane, or none.
struct Mask {
  __m256 lanes;
};
inline Mask all_lanes() { return {_mm256_castsi256_ps(all(-1))}; }
inline Mask first_lanes(int32_t n) {
  const vi lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(all(n), lane))};
}
inline Mask both(Mask a, Mask b) { return {_mm256_and_ps(a.lanes, b.lanes)}; }
inline Mask either(Mask a, Mask b) { return {_mm256_or_ps(a.lanes, b.lanes)}; }
inline uint32_t lane_bits(Mask m) { return static_cast<uint32_t>(_mm256_movemask_ps(m.lanes)); }
inline Mask not_below(vf a, vf b) { return {_mm256_cmp_ps(a, b, _CMP_NLT_UQ)}; }
inline Mask above(vf a, vf b) { return {_mm256_cmp_ps(a, b, _CMP_GT_OQ)}; }
inline vf chosen(Mask m, vf x, vf other) { return _mm256_blendv_ps(other, x, m.lanes); }
inline vi chosen(Mask m, vi x, vi other) {
  return _mm256_blendv_epi8(other, x, _mm256_castps_si256(m.lanes));
}

// Integers, and 32-bit words in 64-bit lanes.
inline void store(int32_t* p, vi x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline vi truncate(vf x) { return _mm256_cvttps_epi32(x); }
inline vi float_bits(vf x) { return _mm256_castps_si256(x); }
inline vf unsigned_to_float(vi x) {  // both halves are exact, and their sum is rounded once
  const vf high = to_float(_mm256_srli_epi32(x, 16));
  return fma(high, all(65536.0f), to_float(_mm256_and_si256(x, all(0xffff))));
}
inline vi all_wide(uint32_t x) { return _mm256_set1_epi64x(x); }
inline vi add_wide(vi a, vi b) { return _mm256_add_epi64(a, b); }
inline vi multiply_wide(vi a, vi b) { return _mm256_mul_epu32(a, b); }
inline vi high_words(vi x) { return _mm256_srli_epi64(x, 32); }
inline vi low_words(vi x) { return _mm256_and_si256(x, all_wide(0xffffffffu)); }
inline vi xor3(vi a, vi b, vi c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
inline vi pair_words(vi low, vi high) {
  return _mm256_blend_epi32(_mm256_slli_epi64(high, 32), low, 0x55);
}
inline vi even_pairs(vi a, vi b) { return _mm256_unpacklo_epi64(a, b); }
inline vi odd_pairs(vi a, vi b) { return _mm256_unpackhi_epi64(a, b); }

// Pairs of 16-bit integers in 32-bit lanes.
inline vi load_bytes(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
template <int COUNT>
inline vi shift_words(vi x) {
  return _mm256_srli_epi16(x, COUNT);
}
inline vi both(vi a, vi b) { return _mm256_and_si256(a, b); }
inline vi subtract(vi a, vi b) { return _mm256_sub_epi32(a, b); }
inline vi add(vi a, vi b) { return _mm256_add_epi32(a, b); }
// sums + a[0] * b[0] + a[1] * b[1] in each lane.
inline vi multiply_pairs(vi a, vi b, vi sums) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
}
inline vf load_codes(const uint8_t* p) {
  return to_float(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline vf load_codes(const int8_t* p) {
  return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
// Of each byte of `index`, which is below 16, the byte at that place in a table.
inline vi looked_up(const uint8_t* table, vi index) {
  const __m128i held = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(held), index);
}
// Their low 8 or 16 bits.
template <class Code>
inline void store_codes(Code* p, vi x) {
  int32_t lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<Code>(lanes[i]);
}
// As it is: the compiler may not round it together with what is done to it next.
template <class V>
inline V apart(V x) {
  __asm__("" : "+x"(x));
  return x;
}

inline int32_t sum(vi x) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  half = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 1)));
}
inline float sum(vf x) {
  __m128 half = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
  half += _mm_movehl_ps(half, half);
  return _mm_cvtss_f32(half + _mm_movehdup_ps(half));
}
inline float top_of(vf x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ps(half, _mm_movehdup_ps(half)));
}

}  // namespace onestem::ONESTEM_ISA
