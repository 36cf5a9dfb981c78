// What a draw from a vocabulary computes of every token: its weight and its place among buckets.
#pragma once

namespace onestem::ONESTEM_ISA {

// Vectors of doubles as long as those of floats, and what goes with them.
constexpr int kDoubles = kLanes / 2;
typedef double vd __attribute__((vector_size(8 * kDoubles)));
typedef int64_t vl __attribute__((vector_size(8 * kDoubles)));
typedef float vh __attribute__((vector_size(4 * kDoubles)));
typedef int32_t vw __attribute__((vector_size(4 * kDoubles)));

// e^-d for d >= 0, to about a unit in the last place; 0 behind 700. e^-d = 2^n e^r with |r| <= ln2 / 2
// and e^r by its Taylor series.
__attribute__((always_inline)) inline vd exp_minus(vd d) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: a unit in the last place is 1
  constexpr double kLn2High = 0.693147180369123816490, kLn2Low = 1.90821492927058770002e-10;
  const vd x = d < 700.0 ? -d : vd{} - 700.0;
  const vd shifted = x * 1.44269504088896340736 + kMagic, n = shifted - kMagic;
  const vd r = (x - n * kLn2High) - n * kLn2Low;
  vd sum = vd{} + 1.0 / 6227020800.0;
  sum = sum * r + 1.0 / 479001600.0;
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r * r + r + 1.0;
  const vl exponent = __builtin_bit_cast(vl, shifted) << 52;
  return __builtin_bit_cast(vd, __builtin_bit_cast(vl, sum) + exponent);
}

// The whole part of 0 <= x <= 2^52. Not a conversion: AVX2 has none to 64 bits.
__attribute__((always_inline)) inline vl whole_part(vd x) {
  constexpr double kUnit = 4503599627370496.0;  // 2^52
  const vd near = (x + kUnit) - kUnit, whole = near > x ? near - 1.0 : near;
  return __builtin_bit_cast(vl, whole + kUnit) - __builtin_bit_cast(vl, vd{} + kUnit);
}

inline float largest(const float* x, int64_t count) {
  vf best = all(-kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) best = max(best, load(x + i));
  float top = top_of(best);
  for (; i < count; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// Weights and buckets of kDoubles tokens. Buckets hold tokens of like probability; they stand in the
// order of the logits.
__attribute__((always_inline)) inline void weigh_some(const WeighCall& call, vh logits, double top,
                                                      int64_t* weights, int32_t* buckets) {
  const vd distance = (top - __builtin_convertvector(logits, vd)) / call.temperature;
  const vd bucket = distance * kDrawBucketsPerUnit, last = vd{} + (kDrawBuckets - 1);
  const vw place = __builtin_convertvector(bucket < last ? bucket : last, vw);
  const vl weight = whole_part(exp_minus(distance) * static_cast<double>(int64_t{1} << call.bits));
  __builtin_memcpy(buckets, &place, sizeof place);
  __builtin_memcpy(weights, &weight, sizeof weight);
}

inline void weigh_tokens(const WeighCall& call) {
  const double top = largest(call.logits, call.count);
  vh logits;
  int64_t i = 0;
  for (; i + kDoubles <= call.count; i += kDoubles) {
    __builtin_memcpy(&logits, call.logits + i, sizeof logits);
    weigh_some(call, logits, top, call.weights + i, call.buckets + i);
  }
  const size_t rest = static_cast<size_t>(call.count - i);
  if (rest == 0) return;
  int64_t weights[kDoubles];
  int32_t buckets[kDoubles];
  logits = vh{};
  __builtin_memcpy(&logits, call.logits + i, rest * sizeof(float));
  weigh_some(call, logits, top, weights, buckets);
  __builtin_memcpy(call.weights + i, weights, rest * sizeof(int64_t));
  __builtin_memcpy(call.buckets + i, buckets, rest * sizeof(int32_t));
}

}  // namespace onestem::ONESTEM_ISA
