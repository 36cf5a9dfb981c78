// Products with weights of 8 bits by dot products of four bytes (AVX-512 VNNI).
#pragma once

namespace onestem::ONESTEM_ISA {

struct ByteDots8 {
  using Code = int8_t;
  static constexpr int kOuts = 4;
  template <class T>
  static int32_t round(Code* to, const T* x, int32_t count, float scale) {
    return round_codes_to(to, x, count, scale);
  }
  static void clear(Code* codes, int64_t begin, int64_t end) {
    __builtin_memset(codes + begin, 0, static_cast<size_t>(end - begin));
  }
  static vi dot(const uint8_t* w, const Code* a, vi sums) {
    return _mm512_dpbusd_epi32(sums, load_bytes(w), load_bytes(a));
  }
};

}  // namespace onestem::ONESTEM_ISA
