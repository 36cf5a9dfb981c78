// AVX-512 VNNI: products of neighbours, added to a 32-bit sum, which wraps.
#pragma once

#include "emulate/avx512.h"

namespace onestem {

// VPDPWSSD: of two 16-bit pairs.
inline __m512i _mm512_dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
}

namespace emulated {

// Of four unsigned bytes and four signed ones.
inline int32_t dot_bytes(uint32_t a, uint32_t b, int32_t sum) {
  uint32_t total = static_cast<uint32_t>(sum);
  for (int i = 0; i < 32; i += 8) {
    total += static_cast<uint32_t>(static_cast<uint8_t>(a >> i) * static_cast<int8_t>(b >> i));
  }
  return static_cast<int32_t>(total);
}

}  // namespace emulated

// VPDPBUSD.
inline __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
  emulated::v16si out = emulated::ints(sums);
  for (int i = 0; i < 16; ++i) {
    out[i] = emulated::dot_bytes(emulated::words(a)[i], emulated::words(b)[i], out[i]);
  }
  return emulated::integers(out);
}

}  // namespace onestem
