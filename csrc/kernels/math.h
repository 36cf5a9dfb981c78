// exp2, tanh and partial loads over an instruction set's vectors.
#pragma once

namespace onestem::ONESTEM_ISA {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kInfinity = __builtin_inff();

constexpr int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }
constexpr int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
constexpr int32_t clamp(int32_t x, int32_t low, int32_t high) {
  return smaller(larger(x, low), high);
}
constexpr int32_t round_up(int32_t x, int32_t step) { return (x + step - 1) / step * step; }

// x = n + f with n whole and |f| <= 1/2. `shifted` holds n in its low bits: at 1.5 * 2^23 a unit in
// the last place is 1.
struct Split {
  vf shifted, f;
};
inline Split split(vf x) {
  const vf magic = all(12582912.0f);
  const vf shifted = x + magic;
  return {shifted, x - (shifted - magic)};
}

// (2^f - 1) / f for |f| <= 1/2 as a polynomial, so that 2^f is exact at 0 and elsewhere off by at
// most 1.1e-7 of itself: a fit of least relative error.
constexpr float kPower[] = {0.693147004f, 0.240222424f, 0.0555073358f, 0.00967151299f,
                             0.00132647273f};
inline vf power_slope(vf f) {
  vf p = fma(all(kPower[4]), f, all(kPower[3]));
  p = fma(p, f, all(kPower[2]));
  p = fma(p, f, all(kPower[1]));
  return fma(p, f, all(kPower[0]));
}

// 2^x for x <= 127; 0 below -125, also for -inf. NaN stays NaN.
inline vf exp2(vf x) {
  const Split s = split(x);
  return times_power(fma(power_slope(s.f), s.f, all(1.0f)), s.shifted, x);
}

// tanh(y) = (1 - e^z) / (1 + e^z) with z = -2|y|. e^z - 1 = 2^n (2^f - 1) + (2^n - 1) loses nothing
// near 0.
inline vf tanh(vf y) {
  const vf z = max(magnitude(y) * all(-2.0f * kLog2e), all(-64.0f));
  const Split s = split(z);
  const vf power = times_power(all(1.0f), s.shifted, z);
  const vf rest = power_slope(s.f) * s.f * power;
  return with_sign_of((all(1.0f) - power - rest) / (all(1.0f) + power + rest), y);
}

// A state that is folded into another: what both are multiplied with, at the higher of two maxima.
// A state that saw nothing, whose maximum is -inf and whose sum is 0, changes no bit of the other.
struct Fold {
  vf top, old, more;
  Fold(vf top_so_far, vf top_of_more) : top(max(top_so_far, top_of_more)) {
    // Where nothing was seen yet, any finite stand-in for -inf makes all factors 0.
    const vf minus_top = zeros() - max(top, all(-3e38f));
    old = exp2(top_so_far + minus_top);
    more = exp2(top_of_more + minus_top);
  }
  vf operator()(vf sums, vf sums_of_more) const { return fma(sums_of_more, more, sums * old); }
};

// Restores the order of elements that were computed from what `load_pair` gave, a pair of vectors.
template <class T>
inline void in_order(float*) {}
template <>
inline void in_order<bf16>(float* p) {
  float pair[2 * kLanes];
  for (int32_t i = 0; i < kLanes; ++i) {
    pair[2 * i] = p[i];
    pair[2 * i + 1] = p[kLanes + i];
  }
  __builtin_memcpy(p, pair, sizeof pair);
}

// And the other way round.
template <class T>
inline void out_of_order(float*) {}
template <>
inline void out_of_order<bf16>(float* p) {
  float pair[2 * kLanes];
  for (int32_t i = 0; i < kLanes; ++i) {
    pair[i] = p[2 * i];
    pair[kLanes + i] = p[2 * i + 1];
  }
  __builtin_memcpy(p, pair, sizeof pair);
}
// visit(d) for each pair of vectors of a head that begins at element d.
template <class Visit>
inline void for_pairs(int32_t dim, Visit visit) {
  for (int32_t d = 0; d + 2 * kLanes <= dim; d += 2 * kLanes) visit(d);
}

// n < kLanes elements; the other lanes are 0.
template <class T>
inline vf load_some(const T* p, int32_t n) {
  T lanes[kLanes] = {};
  for (int32_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <class T>
inline void store_some(T* p, vf x, int32_t n) {
  T lanes[kLanes];
  store(lanes, x);
  for (int32_t i = 0; i < n; ++i) p[i] = lanes[i];
}

// visit(d, n): elements d..d+n-1 of `width`, a vector at a time (n < kLanes at the end).
template <class Visit>
__attribute__((always_inline)) inline void for_vectors(int64_t width, Visit visit) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) visit(d, kLanes);
  if (d < width) visit(d, static_cast<int32_t>(width - d));
}
template <class T>
__attribute__((always_inline)) inline vf get(const T* p, int32_t n) {
  return n == kLanes ? load(p) : load_some(p, n);
}
template <class T>
__attribute__((always_inline)) inline void put(T* p, vf x, int32_t n) {
  n == kLanes ? store(p, x) : store_some(p, x, n);
}

}  // namespace onestem::ONESTEM_ISA
