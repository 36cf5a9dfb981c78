// Eight float32 lanes in the vector extension of GCC and Clang: NEON, SSE2, or what there is.
#pragma once

#include "attention.h"

namespace onestem::ONESTEM_ISA {

typedef float vf __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
constexpr int kLanes = 8;
#ifdef __aarch64__
constexpr int kTileRows = 4;  // 24 of 32 registers hold sums
constexpr int kTileVecs = 3;
#else
constexpr int kTileRows = 4;
constexpr int kTileVecs = 1;
#endif
constexpr int kThinSums = 4;

inline float widen(bf16 x) { return __builtin_bit_cast(float, uint32_t{x.bits} << 16); }
inline float widen(f16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
  float value;
  if (rest >= 0x7c00) {  // infinity, NaN
    value = __builtin_bit_cast(float, 0x7f800000u | (rest & 0x3ff) << 13);
  } else {  // also subnormal: 2^112 moves the exponent's bias from 15 to 127
    value = __builtin_bit_cast(float, rest << 13) * __builtin_bit_cast(float, 0x77800000u);
  }
  return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, value) | sign);
}

inline void narrow(float x, bf16* to) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  to->bits = static_cast<uint16_t>(x == x ? rounded >> 16 : 0x7fc0);
}
inline void narrow(float x, f16* to) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = (bits >> 16) & 0x8000;
  const float size = __builtin_fabsf(x);
  uint32_t half;
  if (!(size < 65520.0f)) {
    half = x == x ? 0x7c00 : 0x7e00;
  } else if (size < 6.103515625e-5f) {  // subnormal: adding 0.5 rounds to multiples of 2^-24
    half = __builtin_bit_cast(uint32_t, size + 0.5f) - 0x3f000000u;
  } else {
    const uint32_t whole = bits & 0x7fffffff;
    half = (whole + 0xfff + ((whole >> 13) & 1) - 0x38000000u) >> 13;
  }
  to->bits = static_cast<uint16_t>(half | sign);
}

inline vf zeros() { return vf{}; }
inline vf all(float x) { return vf{} + x; }
inline vi all(int32_t x) { return vi{} + x; }
inline vf load(const float* p) {
  vf x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
inline vf load(const T* p) {
  vf x;
  for (int i = 0; i < kLanes; ++i) x[i] = widen(p[i]);
  return x;
}
inline vi load(const int32_t* p) {
  vi x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
struct v4 {
  float of[4];
};
template <class T>
inline v4 load4(const T* p) {
  return {{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}};
}
inline v4 load4(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }

// to[j] lane i = element j of four(i).
template <class Four>
inline void transpose4(Four four, vf (&to)[4]) {
  for (int i = 0; i < kLanes; ++i) {
    const v4 words = four(i);
    for (int j = 0; j < 4; ++j) to[j][i] = words.of[j];
  }
}
// Two vectors of neighbouring elements (see vec_avx2.h).
template <class T>
inline void load_pair(const T* p, vf& low, vf& high) {
  low = load(p);
  high = load(p + kLanes);
}
inline void load_pair(const bf16* p, vf& low, vf& high) {
  vi pairs;
  __builtin_memcpy(&pairs, p, sizeof pairs);
  low = __builtin_bit_cast(vf, pairs << 16);
  high = __builtin_bit_cast(vf, pairs & ~0xffff);
}
inline void store(float* p, vf x) { __builtin_memcpy(p, &x, sizeof x); }
template <class T>
inline void store(T* p, vf x) {
  for (int i = 0; i < kLanes; ++i) narrow(x[i], p + i);
}
inline vi bits_of(vf x) { return __builtin_bit_cast(vi, x); }
inline vf from_bits(vi x) { return __builtin_bit_cast(vf, x); }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf max(vf a, vf b) { return a > b ? a : b; }
inline vf min(vf a, vf b) { return a < b ? a : b; }
inline vf magnitude(vf x) { return from_bits(bits_of(x) & 0x7fffffff); }
inline vf with_sign_of(vf x, vf sign) {
  return from_bits(bits_of(x) | (bits_of(sign) & ~0x7fffffff));
}
inline vf to_float(vi x) { return __builtin_convertvector(x, vf); }

// value * 2^n, where n stands in the low bits of `shifted` (see exp2); 0 where x is below -125.
inline vf times_power(vf value, vf shifted, vf x) {
  const vf product = from_bits(bits_of(value) + (bits_of(shifted) << 23));
  return x < all(-125.0f) ? zeros() : product;
}

// score where first <= t < end, else -inf.
inline vf visible(vf score, vi first, vi end, int32_t t) {
  const vi key = all(t);
  const vi seen = (first <= key) & (key < end);
  return seen ? score : all(-__builtin_inff());
}

// Lanes by a condition: all bits of a lane, or none.
typedef uint64_t vw __attribute__((vector_size(32)));
typedef uint32_t vu __attribute__((vector_size(32)));
struct Mask {
  vi lanes;
};
inline Mask all_lanes() { return {vi{} - 1}; }
inline Mask first_lanes(int32_t n) { return {vi{0, 1, 2, 3, 4, 5, 6, 7} < all(n)}; }
inline Mask both(Mask a, Mask b) { return {a.lanes & b.lanes}; }
inline Mask either(Mask a, Mask b) { return {a.lanes | b.lanes}; }
inline uint32_t lane_bits(Mask m) {
  uint32_t bits = 0;
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(m.lanes[i] & 1) << i;
  return bits;
}
inline Mask not_below(vf a, vf b) { return {~(a < b)}; }
inline Mask above(vf a, vf b) { return {a > b}; }
inline vf chosen(Mask m, vf x, vf other) { return m.lanes ? x : other; }
inline vi chosen(Mask m, vi x, vi other) { return m.lanes ? x : other; }

// Integers, and 32-bit words in 64-bit lanes.
inline vw wide(vi x) { return __builtin_bit_cast(vw, x); }
inline vi narrow_lanes(vw x) { return __builtin_bit_cast(vi, x); }
inline void store(int32_t* p, vi x) { __builtin_memcpy(p, &x, sizeof x); }
inline vi truncate(vf x) { return __builtin_convertvector(x, vi); }
inline vi float_bits(vf x) { return bits_of(x); }
inline vf unsigned_to_float(vi x) {
  return __builtin_convertvector(__builtin_bit_cast(vu, x), vf);
}
inline vi all_wide(uint32_t x) { return narrow_lanes(vw{} + x); }
inline vi add_wide(vi a, vi b) { return narrow_lanes(wide(a) + wide(b)); }
inline vi multiply_wide(vi a, vi b) {
  return narrow_lanes((wide(a) & 0xffffffffu) * (wide(b) & 0xffffffffu));
}
inline vi high_words(vi x) { return narrow_lanes(wide(x) >> 32); }
inline vi low_words(vi x) { return narrow_lanes(wide(x) & 0xffffffffu); }
inline vi xor3(vi a, vi b, vi c) { return a ^ b ^ c; }
inline vi pair_words(vi low, vi high) {
  return narrow_lanes((wide(low) & 0xffffffffu) | wide(high) << 32);
}
inline vi even_pairs(vi a, vi b) {
  return narrow_lanes(vw{wide(a)[0], wide(b)[0], wide(a)[2], wide(b)[2]});
}
inline vi odd_pairs(vi a, vi b) {
  return narrow_lanes(vw{wide(a)[1], wide(b)[1], wide(a)[3], wide(b)[3]});
}

// Pairs of 16-bit integers in 32-bit lanes.
typedef uint16_t vh __attribute__((vector_size(32)));
inline vi load_bytes(const void* p) {
  vi x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <int COUNT>
inline vi shift_words(vi x) {
  return __builtin_bit_cast(vi, __builtin_bit_cast(vh, x) >> COUNT);
}
inline vi both(vi a, vi b) { return a & b; }
inline vi subtract(vi a, vi b) { return a - b; }
inline vi add(vi a, vi b) { return a + b; }
// sums + a[0] * b[0] + a[1] * b[1] in each lane.
inline vi multiply_pairs(vi a, vi b, vi sums) {
  const auto low = [](vi x) { return __builtin_bit_cast(vi, __builtin_bit_cast(vu, x) << 16) >> 16; };
  return sums + low(a) * low(b) + (a >> 16) * (b >> 16);
}
template <class Code>
inline vf load_codes(const Code* p) {
  vf x;
  for (int i = 0; i < kLanes; ++i) x[i] = p[i];
  return x;
}
// Of each byte of `index`, which is below 16, the byte at that place in a table.
inline vi looked_up(const uint8_t* table, vi index) {
  typedef uint8_t vb __attribute__((vector_size(32)));
  vb x = __builtin_bit_cast(vb, index);
  for (int i = 0; i < 32; ++i) x[i] = table[x[i]];
  return __builtin_bit_cast(vi, x);
}
// Their low 8 or 16 bits.
template <class Code>
inline void store_codes(Code* p, vi x) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<Code>(x[i]);
}
// As it is: the compiler may not round it together with what is done to it next.
inline vf apart(vf x) {
  __asm__("" : "+m"(x));
  return x;
}
inline vi apart(vi x) { return x; }

inline int32_t sum(vi x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
inline float sum(vf x) {
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
inline float top_of(vf x) {
  float top = x[0];
  for (int i = 1; i < kLanes; ++i) top = x[i] > top ? x[i] : top;
  return top;
}
inline void sum_each(const vf (&parts)[8], float* out) {
  for (int i = 0; i < 8; ++i) out[i] = sum(parts[i]);
}

template <class T>
inline void convert8(const T* from, float* to) {
  store(to, load(from));
}
inline void transpose8(const float* from, ptrdiff_t from_stride, float* to, ptrdiff_t to_stride) {
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 8; ++j) to[i * to_stride + j] = from[j * from_stride + i];
  }
}

}  // namespace onestem::ONESTEM_ISA
