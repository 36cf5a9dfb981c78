// AVX-512 F, BW, DQ and VL, as far as the kernels use them. Operators of vectors are the compiler's.
// Source: Intel's Software Developer's Manual, volume 2, "Operation" of each instruction.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace onestem {
namespace emulated {

typedef int32_t v16si __attribute__((vector_size(64)));
typedef uint32_t v16su __attribute__((vector_size(64)));
typedef uint16_t v16hu __attribute__((vector_size(32)));
typedef uint8_t v16qu __attribute__((vector_size(16)));
typedef uint64_t v8lu __attribute__((vector_size(64)));
typedef uint16_t v32hu __attribute__((vector_size(64)));
typedef uint8_t v16qu __attribute__((vector_size(16)));

// What the processor would answer with an exception, or what this file does not know.
[[noreturn]] inline void fault(const std::string& what) {
  throw std::logic_error("emulated instruction: " + what);
}

struct Halves {
  __m256 low, high;
};
inline Halves halves(__m512 x) { return __builtin_bit_cast(Halves, x); }
inline __m512 whole(__m256 low, __m256 high) { return __builtin_bit_cast(__m512, Halves{low, high}); }

inline v16si ints(__m512i x) { return __builtin_bit_cast(v16si, x); }
inline v16su words(__m512i x) { return __builtin_bit_cast(v16su, x); }
inline v16su words(__m512 x) { return __builtin_bit_cast(v16su, x); }
inline v8lu pairs(__m512i x) { return __builtin_bit_cast(v8lu, x); }
template <class Vector>
inline __m512i integers(Vector x) {
  return __builtin_bit_cast(__m512i, x);
}
template <class Vector>
inline __m512 floats(Vector x) {
  return __builtin_bit_cast(__m512, x);
}

// All bits of a lane where its bit of the mask is set, and the other way round.
inline v16su lanes_of(__mmask16 mask) {
  const v16su bit = {1,      2,      4,      8,      0x10,   0x20,   0x40,   0x80,
                     0x100,  0x200,  0x400,  0x800,  0x1000, 0x2000, 0x4000, 0x8000};
  return __builtin_bit_cast(v16su, ((v16su{} + mask) & bit) != 0);
}
inline __mmask16 mask_of(v16si lanes) {
  const Halves h = halves(floats(lanes));
  return static_cast<__mmask16>(_mm256_movemask_ps(h.low) | _mm256_movemask_ps(h.high) << 8);
}

}  // namespace emulated

inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512 _mm512_set1_ps(float x) {
  return emulated::whole(_mm256_set1_ps(x), _mm256_set1_ps(x));
}
inline __m512i _mm512_set1_epi32(int x) { return emulated::integers(emulated::v16si{} + x); }

inline __m512 _mm512_loadu_ps(const void* p) {
  __m512 x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline __m512i _mm512_loadu_si512(const void* p) { return emulated::integers(_mm512_loadu_ps(p)); }
inline void _mm512_storeu_ps(void* p, __m512 x) { __builtin_memcpy(p, &x, sizeof x); }
inline void _mm512_storeu_si512(void* p, __m512i x) { __builtin_memcpy(p, &x, sizeof x); }

inline __m512 _mm512_castsi512_ps(__m512i x) { return emulated::floats(x); }
inline __m512i _mm512_castps_si512(__m512 x) { return emulated::integers(x); }
inline __m512 _mm512_castps128_ps512(__m128 x) {
  return emulated::whole(_mm256_castps128_ps256(x), _mm256_setzero_ps());
}
inline __m512 _mm512_insertf32x4(__m512 x, __m128 part, int place) {
  __builtin_memcpy(reinterpret_cast<char*>(&x) + place * sizeof part, &part, sizeof part);
  return x;
}
inline __m256 _mm512_castps512_ps256(__m512 x) { return emulated::halves(x).low; }
inline __m256 _mm512_extractf32x8_ps(__m512 x, int half) {
  return half & 1 ? emulated::halves(x).high : emulated::halves(x).low;
}

inline __m512 _mm512_and_ps(__m512 a, __m512 b) {
  return emulated::floats(emulated::words(a) & emulated::words(b));
}
inline __m512 _mm512_or_ps(__m512 a, __m512 b) {
  return emulated::floats(emulated::words(a) | emulated::words(b));
}
inline __m512 _mm512_andnot_ps(__m512 a, __m512 b) {
  return emulated::floats(~emulated::words(a) & emulated::words(b));
}
inline __m512i _mm512_and_si512(__m512i a, __m512i b) {
  return emulated::integers(emulated::words(a) & emulated::words(b));
}
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) {
  return emulated::integers(emulated::words(a) + emulated::words(b));
}
inline __m512i _mm512_slli_epi32(__m512i x, unsigned count) {
  return count > 31 ? __m512i{} : emulated::integers(emulated::words(x) << count);
}
inline __m512i _mm512_srli_epi32(__m512i x, unsigned count) {
  return count > 31 ? __m512i{} : emulated::integers(emulated::words(x) >> count);
}

inline __m512i _mm512_sub_epi32(__m512i a, __m512i b) {
  return emulated::integers(emulated::words(a) - emulated::words(b));
}
inline __m512i _mm512_srli_epi16(__m512i x, unsigned count) {
  return count > 15 ? __m512i{}
                    : emulated::integers(__builtin_bit_cast(emulated::v32hu, x) >> count);
}
// Of each pair the sum of products, which wraps where all four factors are -32768.
inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  const emulated::Halves x = emulated::halves(emulated::floats(a));
  const emulated::Halves y = emulated::halves(emulated::floats(b));
  const auto sums = [](__m256 p, __m256 q) {
    return _mm256_castsi256_ps(_mm256_madd_epi16(_mm256_castps_si256(p), _mm256_castps_si256(q)));
  };
  return emulated::integers(emulated::whole(sums(x.low, y.low), sums(x.high, y.high)));
}
inline __m512i _mm512_broadcast_i32x4(__m128i x) {
  const __m256 half = _mm256_castsi256_ps(_mm256_broadcastsi128_si256(x));
  return emulated::integers(emulated::whole(half, half));
}
// Bytes of each quarter of `x` by the low four bits of each index, 0 where its highest bit is set.
inline __m512i _mm512_shuffle_epi8(__m512i x, __m512i index) {
  const emulated::Halves a = emulated::halves(emulated::floats(x));
  const emulated::Halves b = emulated::halves(emulated::floats(index));
  const auto chosen = [](__m256 p, __m256 q) {
    return _mm256_castsi256_ps(_mm256_shuffle_epi8(_mm256_castps_si256(p), _mm256_castps_si256(q)));
  };
  return emulated::integers(emulated::whole(chosen(a.low, b.low), chosen(a.high, b.high)));
}
inline __m512i _mm512_cvtepi8_epi32(__m128i x) {
  return emulated::integers(
      emulated::whole(_mm256_castsi256_ps(_mm256_cvtepi8_epi32(x)),
                      _mm256_castsi256_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))));
}
inline __m512i _mm512_cvtepu8_epi32(__m128i x) {
  return emulated::integers(
      __builtin_convertvector(__builtin_bit_cast(emulated::v16qu, x), emulated::v16su));
}

// Bit i of `table` is the result where the bits of a, b and c read i as a number, a's first.
inline __m512i _mm512_ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {
  const emulated::v16su x = emulated::words(a), y = emulated::words(b), z = emulated::words(c);
  emulated::v16su result{};
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1) {
      result |= (i & 4 ? x : ~x) & (i & 2 ? y : ~y) & (i & 1 ? z : ~z);
    }
  }
  return emulated::integers(result);
}

// 64-bit lanes.
inline __m512i _mm512_set1_epi64(long long x) {
  return emulated::integers(emulated::v8lu{} + static_cast<uint64_t>(x));
}
inline __m512i _mm512_add_epi64(__m512i a, __m512i b) {
  return emulated::integers(emulated::pairs(a) + emulated::pairs(b));
}
inline __m512i _mm512_mul_epu32(__m512i a, __m512i b) {
  return emulated::integers((emulated::pairs(a) & 0xffffffffu) * (emulated::pairs(b) & 0xffffffffu));
}
inline __m512i _mm512_slli_epi64(__m512i x, unsigned count) {
  return count > 63 ? __m512i{} : emulated::integers(emulated::pairs(x) << count);
}
inline __m512i _mm512_srli_epi64(__m512i x, unsigned count) {
  return count > 63 ? __m512i{} : emulated::integers(emulated::pairs(x) >> count);
}
inline __m512i _mm512_unpacklo_epi64(__m512i a, __m512i b) {
  const emulated::v8lu x = emulated::pairs(a), y = emulated::pairs(b);
  return emulated::integers(emulated::v8lu{x[0], y[0], x[2], y[2], x[4], y[4], x[6], y[6]});
}
inline __m512i _mm512_unpackhi_epi64(__m512i a, __m512i b) {
  const emulated::v8lu x = emulated::pairs(a), y = emulated::pairs(b);
  return emulated::integers(emulated::v8lu{x[1], y[1], x[3], y[3], x[5], y[5], x[7], y[7]});
}

inline __m512i _mm512_unpacklo_epi32(__m512i a, __m512i b) {
  const emulated::v16su x = emulated::words(a), y = emulated::words(b);
  return emulated::integers(emulated::v16su{x[0], y[0], x[1], y[1], x[4], y[4], x[5], y[5], x[8],
                                            y[8], x[9], y[9], x[12], y[12], x[13], y[13]});
}
inline __m512i _mm512_unpackhi_epi32(__m512i a, __m512i b) {
  const emulated::v16su x = emulated::words(a), y = emulated::words(b);
  return emulated::integers(emulated::v16su{x[2], y[2], x[3], y[3], x[6], y[6], x[7], y[7], x[10],
                                            y[10], x[11], y[11], x[14], y[14], x[15], y[15]});
}

// Towards zero; what an int32 does not hold becomes the lowest one.
inline __m512i _mm512_cvttps_epi32(__m512 x) {
  const emulated::Halves h = emulated::halves(x);
  return emulated::integers(emulated::whole(_mm256_castsi256_ps(_mm256_cvttps_epi32(h.low)),
                                            _mm256_castsi256_ps(_mm256_cvttps_epi32(h.high))));
}
inline __m512 _mm512_cvtepu32_ps(__m512i x) {
  __m512 out;
  for (int i = 0; i < 16; ++i) out[i] = static_cast<float>(emulated::words(x)[i]);
  return out;
}

inline __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const emulated::Halves x = emulated::halves(a), y = emulated::halves(b), z = emulated::halves(c);
  return emulated::whole(_mm256_fmadd_ps(x.low, y.low, z.low),
                         _mm256_fmadd_ps(x.high, y.high, z.high));
}
// The second operand where either is NaN or both are zeros, as in AVX.
inline __m512 _mm512_max_ps(__m512 a, __m512 b) {
  const emulated::Halves x = emulated::halves(a), y = emulated::halves(b);
  return emulated::whole(_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high));
}
inline __m512 _mm512_min_ps(__m512 a, __m512 b) {
  const emulated::Halves x = emulated::halves(a), y = emulated::halves(b);
  return emulated::whole(_mm256_min_ps(x.low, y.low), _mm256_min_ps(x.high, y.high));
}

// x - floor(x), with -inf and inf to 0.
inline __m512 _mm512_reduce_ps(__m512 x, int control) {
  if (control != _MM_FROUND_TO_NEG_INF) emulated::fault("VREDUCEPS rounds down to integers only");
  for (int i = 0; i < 16; ++i) x[i] = std::isinf(x[i]) ? 0.0f : x[i] - std::floor(x[i]);
  return x;
}
// x * 2^floor(power), rounded once.
inline __m512 _mm512_scalef_ps(__m512 x, __m512 power) {
  for (int i = 0; i < 16; ++i) {
    if (std::isnan(power[i])) {
      x[i] = power[i];
    } else if (std::isinf(power[i])) {
      x[i] *= power[i] < 0 ? 0.0f : power[i];
    } else {
      x[i] = std::ldexp(x[i], static_cast<int>(std::fmax(-1000, std::fmin(1000, std::floor(power[i])))));
    }
  }
  return x;
}

inline __m512 _mm512_cvtepi32_ps(__m512i x) {
  return __builtin_convertvector(emulated::ints(x), __m512);
}
inline __m512i _mm512_cvtepu16_epi32(__m256i x) {
  return emulated::integers(
      __builtin_convertvector(__builtin_bit_cast(emulated::v16hu, x), emulated::v16su));
}
inline __m256i _mm512_cvtepi32_epi16(__m512i x) {
  return __builtin_bit_cast(__m256i,
                            __builtin_convertvector(emulated::words(x), emulated::v16hu));
}
inline __m128i _mm512_cvtepi32_epi8(__m512i x) {
  return __builtin_bit_cast(__m128i,
                            __builtin_convertvector(emulated::words(x), emulated::v16qu));
}
inline __m512 _mm512_cvtph_ps(__m256i x) {
  return emulated::whole(_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                         _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)));
}
inline __m256i _mm512_cvtps_ph(__m512 x, int rounding) {
  if (rounding != _MM_FROUND_TO_NEAREST_INT) emulated::fault("VCVTPS2PH rounds to nearest only");
  const emulated::Halves h = emulated::halves(x);
  return _mm256_set_m128i(_mm256_cvtps_ph(h.high, _MM_FROUND_TO_NEAREST_INT),
                          _mm256_cvtps_ph(h.low, _MM_FROUND_TO_NEAREST_INT));
}

inline __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int predicate) {
  const emulated::v16si unordered = (a != a) | (b != b);
  switch (predicate) {
    case _CMP_UNORD_Q: return emulated::mask_of(unordered);
    case _CMP_NEQ_UQ: return emulated::mask_of(unordered | (a != b));
    case _CMP_NLT_UQ: return emulated::mask_of(unordered | (a >= b));
    case _CMP_GT_OQ: return emulated::mask_of(a > b);
    default: emulated::fault("VCMPPS with predicate " + std::to_string(predicate));
  }
}
inline __mmask16 _mm512_cmple_epi32_mask(__m512i a, __m512i b) {
  return emulated::mask_of(emulated::ints(a) <= emulated::ints(b));
}
inline __mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b) {
  return emulated::mask_of(emulated::ints(a) < emulated::ints(b));
}
inline __m512i _mm512_mask_mov_epi32(__m512i other, __mmask16 mask, __m512i x) {
  const emulated::v16su kept = emulated::lanes_of(mask);
  return emulated::integers((kept & emulated::words(x)) | (~kept & emulated::words(other)));
}
inline __m512 _mm512_mask_mov_ps(__m512 other, __mmask16 mask, __m512 x) {
  return emulated::floats(_mm512_mask_mov_epi32(emulated::integers(other), mask,
                                                emulated::integers(x)));
}
inline __m512i _mm512_maskz_add_epi32(__mmask16 mask, __m512i a, __m512i b) {
  return emulated::integers(emulated::lanes_of(mask) & (emulated::words(a) + emulated::words(b)));
}

// Not instructions: compilers fold halves, in this order.
inline float _mm512_reduce_add_ps(__m512 x) {
  const emulated::Halves h = emulated::halves(x);
  const __m256 eight = _mm256_add_ps(h.high, h.low);
  const __m128 four = _mm_add_ps(_mm256_extractf128_ps(eight, 1), _mm256_castps256_ps128(eight));
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline int _mm512_reduce_add_epi32(__m512i x) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += emulated::words(x)[i];
  return static_cast<int>(sum);
}
inline float _mm512_reduce_max_ps(__m512 x) {
  const emulated::Halves h = emulated::halves(x);
  const __m256 eight = _mm256_max_ps(h.high, h.low);
  float top = eight[0];
  for (int i = 1; i < 8; ++i) top = eight[i] > top ? eight[i] : top;
  return top;
}

}  // namespace onestem
