// 256-bit pieces that the AVX2 and AVX-512 vectors share. Included inside an instruction set's
// namespace, so that each translation unit has code of its own.

// out[i] = the sum of the eight lanes of parts[i].
inline void sum_each(const __m256 (&parts)[8], float* out) {
  __m256 halves[4];
  for (int i = 0; i < 4; ++i) {
    halves[i] = _mm256_permute2f128_ps(parts[i], parts[i + 4], 0x20) +
                _mm256_permute2f128_ps(parts[i], parts[i + 4], 0x31);
  }
  __m256 pairs[2];
  for (int i = 0; i < 2; ++i) {
    pairs[i] = _mm256_shuffle_ps(halves[2 * i], halves[2 * i + 1], 0x88) +
               _mm256_shuffle_ps(halves[2 * i], halves[2 * i + 1], 0xdd);
  }
  const __m256 sums =
      _mm256_shuffle_ps(pairs[0], pairs[1], 0x88) + _mm256_shuffle_ps(pairs[0], pairs[1], 0xdd);
  _mm256_storeu_ps(out, sums);
}

inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
inline __m256 load8(const bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline __m256 load8(const f16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

using v4 = __m128;
inline v4 load4(const float* p) { return _mm_loadu_ps(p); }
inline v4 load4(const bf16* p) {
  const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16));
}
inline v4 load4(const f16* p) {
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

template <class T>
inline void convert8(const T* from, float* to) {
  _mm256_storeu_ps(to, load8(from));
}

// to[i][j] = from[j][i] for an 8 x 8 block of 32-bit elements; rows are `stride` elements apart.
inline void transpose8(const float* from, ptrdiff_t from_stride, float* to, ptrdiff_t to_stride) {
  __m256 rows[8], quads[8];
  for (int i = 0; i < 4; ++i) {
    const float* a = from + i * from_stride;
    const float* b = from + (i + 4) * from_stride;
    // Row i: low halves of rows i and i + 4; row i + 4: their high halves.
    rows[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
    rows[i + 4] =
        _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a + 4)), _mm_loadu_ps(b + 4), 1);
  }
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    quads[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    quads[i + 2] = _mm256_unpacklo_ps(rows[i + 2], rows[i + 3]);
    quads[i + 3] = _mm256_unpackhi_ps(rows[i + 2], rows[i + 3]);
  }
  for (int i = 0; i < 8; i += 4) {
    float* row = to + i * to_stride;
    _mm256_storeu_ps(row, _mm256_shuffle_ps(quads[i], quads[i + 2], 0x44));
    _mm256_storeu_ps(row + to_stride, _mm256_shuffle_ps(quads[i], quads[i + 2], 0xee));
    _mm256_storeu_ps(row + 2 * to_stride, _mm256_shuffle_ps(quads[i + 1], quads[i + 3], 0x44));
    _mm256_storeu_ps(row + 3 * to_stride, _mm256_shuffle_ps(quads[i + 1], quads[i + 3], 0xee));
  }
}

// to[i] = (a[i], b[i]) as neighbouring 16-bit halves, i < 8.
inline void interleave8(const bf16* a, const bf16* b, uint32_t* to) {
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi16(low, high));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4), _mm_unpackhi_epi16(low, high));
}
