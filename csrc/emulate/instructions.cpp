#include "emulate/instructions.h"

#include <immintrin.h>
#include <nanobind/stl/array.h>

#include <array>
#include <bit>
#include <vector>

namespace nb = nanobind;

namespace onestem {
namespace {

// A vector's elements as Python sees them.
template <class E>
using Lanes = std::array<E, 64 / sizeof(E)>;
using Floats = Lanes<float>;
using Words = Lanes<uint32_t>;
using Halfwords = std::array<uint16_t, 16>;

Floats max_ps(const Floats& a, const Floats& b) {
  return std::bit_cast<Floats>(_mm512_max_ps(std::bit_cast<__m512>(a), std::bit_cast<__m512>(b)));
}

Floats min_ps(const Floats& a, const Floats& b) {
  return std::bit_cast<Floats>(_mm512_min_ps(std::bit_cast<__m512>(a), std::bit_cast<__m512>(b)));
}

int cmp_ps_mask(const Floats& a, const Floats& b, int predicate) {
  return _mm512_cmp_ps_mask(std::bit_cast<__m512>(a), std::bit_cast<__m512>(b), predicate);
}

Floats mask_mov_ps(const Floats& other, int mask, const Floats& x) {
  return std::bit_cast<Floats>(_mm512_mask_mov_ps(
      std::bit_cast<__m512>(other), static_cast<__mmask16>(mask), std::bit_cast<__m512>(x)));
}

Floats reduce_ps(const Floats& x) {
  return std::bit_cast<Floats>(
      _mm512_reduce_ps(std::bit_cast<__m512>(x), _MM_FROUND_TO_NEG_INF));
}

Floats scalef_ps(const Floats& x, const Floats& power) {
  return std::bit_cast<Floats>(
      _mm512_scalef_ps(std::bit_cast<__m512>(x), std::bit_cast<__m512>(power)));
}

Words ternarylogic(const Words& a, const Words& b, const Words& c, int table) {
  return std::bit_cast<Words>(
      _mm512_ternarylogic_epi32(std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(b),
                                std::bit_cast<__m512i>(c), table));
}

Halfwords cvtps_ph(const Floats& x) {
  return std::bit_cast<Halfwords>(
      _mm512_cvtps_ph(std::bit_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
}

Floats cvtph_ps(const Halfwords& x) {
  return std::bit_cast<Floats>(_mm512_cvtph_ps(std::bit_cast<__m256i>(x)));
}

Floats dpbf16_ps(const Floats& sums, const Words& a, const Words& b) {
  return std::bit_cast<Floats>(_mm512_dpbf16_ps(
      std::bit_cast<__m512>(sums), std::bit_cast<__m512bh>(a), std::bit_cast<__m512bh>(b)));
}

using Bytes = std::array<uint8_t, 64>;
using Pairs = std::array<uint16_t, 32>;

template <class E>
__m512i vector_of(const std::array<E, 64 / sizeof(E)>& x) {
  return std::bit_cast<__m512i>(x);
}

Words madd_epi16(const Pairs& a, const Pairs& b) {
  return std::bit_cast<Words>(_mm512_madd_epi16(vector_of<uint16_t>(a), vector_of<uint16_t>(b)));
}

Words dpbusd(const Words& sums, const Bytes& a, const Bytes& b) {
  return std::bit_cast<Words>(_mm512_dpbusd_epi32(std::bit_cast<__m512i>(sums),
                                                  vector_of<uint8_t>(a), vector_of<uint8_t>(b)));
}

Words unpacklo_epi32(const Words& a, const Words& b) {
  return std::bit_cast<Words>(
      _mm512_unpacklo_epi32(std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(b)));
}

Words unpackhi_epi32(const Words& a, const Words& b) {
  return std::bit_cast<Words>(
      _mm512_unpackhi_epi32(std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(b)));
}

void tile_loadconfig(const nb::bytes& config) {
  if (config.size() != 64) throw nb::value_error("expected 64 bytes");
  _tile_loadconfig(config.c_str());
}

void tile_loadd(int tile, const nb::bytes& from, int64_t stride) {
  if (stride < 64 || static_cast<int64_t>(from.size()) < 15 * stride + 64) {
    throw nb::value_error("expected 16 rows");
  }
  _tile_loadd(tile, from.c_str(), stride);
}

// What TILESTORED writes into sixteen rows of `stride` bytes that were 0xff.
nb::bytes tile_stored(int tile, int64_t stride) {
  if (stride < 64) throw nb::value_error("expected a stride of at least 64");
  std::vector<char> to(static_cast<size_t>(16 * stride), static_cast<char>(0xff));
  _tile_stored(tile, to.data(), stride);
  return nb::bytes(to.data(), to.size());
}

}  // namespace

void add_instructions(nb::module_& m) {
  m.def("max_ps", max_ps);
  m.def("min_ps", min_ps);
  m.def("cmp_ps_mask", cmp_ps_mask);
  m.def("mask_mov_ps", mask_mov_ps);
  m.def("reduce_ps", reduce_ps);
  m.def("scalef_ps", scalef_ps);
  m.def("ternarylogic", ternarylogic);
  m.def("cvtps_ph", cvtps_ph);
  m.def("cvtph_ps", cvtph_ps);
  m.def("dpbf16_ps", dpbf16_ps);
  m.def("madd_epi16", madd_epi16);
  m.def("dpbusd", dpbusd);
  m.def("unpacklo_epi32", unpacklo_epi32);
  m.def("unpackhi_epi32", unpackhi_epi32);
  m.def("tile_loadconfig", tile_loadconfig);
  m.def("tile_release", [] { _tile_release(); });
  m.def("tile_zero", [](int tile) { _tile_zero(tile); });
  m.def("tile_loadd", tile_loadd);
  m.def("tile_stored", tile_stored);
  m.def("tile_dpbusd", [](int sums, int left, int right) { _tile_dpbusd(sums, left, right); });
  m.def("tile_dpbf16ps", [](int sums, int left, int right) { _tile_dpbf16ps(sums, left, right); });
}

}  // namespace onestem
