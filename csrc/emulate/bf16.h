// AVX-512 BF16: dot products of bf16 pairs.
#pragma once

#include "emulate/avx512.h"

namespace onestem {
namespace emulated {

// Denormals become zeros of their sign.
inline __m256 flushed(__m256 x) {
  const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7f800000));
  const __m256i denormal = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_srli_epi32(denormal, 1)), x);
}

// The bf16 elements at odd and at even places as float32, denormal ones as zeros.
inline __m256 odd_elements(__m256 pairs) {
  return flushed(_mm256_and_ps(pairs, _mm256_castsi256_ps(_mm256_set1_epi32(~0xffff))));
}
inline __m256 even_elements(__m256 pairs) {
  return flushed(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16)));
}

// c + a * b, rounded once to the nearest, ties to even; a denormal result becomes zero, whatever
// MXCSR says. (A result that rounds up to the least normal number stays one.)
inline __m256 multiply_add(__m256 a, __m256 b, __m256 c) {
  return flushed(_mm256_fmadd_ps(a, b, c));
}

// The product at the odd place is added first.
inline __m256 add_pairs(__m256 sums, __m256 a, __m256 b) {
  sums = multiply_add(odd_elements(a), odd_elements(b), flushed(sums));
  return multiply_add(even_elements(a), even_elements(b), sums);
}

}  // namespace emulated

// VDPBF16PS.
inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
  const auto c = emulated::halves(sums), x = __builtin_bit_cast(emulated::Halves, a),
             y = __builtin_bit_cast(emulated::Halves, b);
  return emulated::whole(emulated::add_pairs(c.low, x.low, y.low),
                         emulated::add_pairs(c.high, x.high, y.high));
}

}  // namespace onestem
