// Products with weights of 8 bits by dot products of four bytes (AVX-512 VNNI).
#pragma once

namespace onestem::ONESTEM_ISA {

struct ByteDots8 {
  using Code = int8_t;
  static constexpr int kOuts = 4;
  static int64_t place(int64_t i) { return i; }
  static vi dot(const uint8_t* w, const Code* a, vi sums) {
    return _mm512_dpbusd_epi32(sums, load_bytes(w), load_bytes(a));
  }
};

}  // namespace onestem::ONESTEM_ISA
