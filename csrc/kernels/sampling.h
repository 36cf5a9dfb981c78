// What sampling computes of every token of a row of logits.
#pragma once

namespace onestem::ONESTEM_ISA {

// visit(x, i, there): logits i..i+kLanes-1 and which lanes of them there are, of tokens begin..end-1.
template <class Visit>
__attribute__((always_inline)) inline void for_tokens(const float* logits, int64_t begin,
                                                      int64_t end, Visit visit) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) visit(load(logits + i), i, all_lanes());
  const auto rest = static_cast<int32_t>(end - i);
  if (rest > 0) visit(load_some(logits + i, rest), i, first_lanes(rest));
}

// ------------------------------------------------------------------------------- the race

constexpr int kCounters = kLanes / 2;
constexpr uint32_t kMultipliers[2] = {0xD2511F53u, 0xCD9E8D57u};

// Philox4x32-10 (Salmon et al. 2011) at counters (c0, token, sequence, 0), kCounters at once: 32-bit
// words in the low halves of 64-bit lanes; nobody reads the high halves. Of the first two rounds half
// is the same for all c0, and is computed once.
class Philox {
 public:
  explicit Philox(const RaceCall& call) {
    uint32_t k0 = call.seed_low, k1 = call.seed_high;
    for (vi(&key)[2] : keys_) {
      key[0] = all_wide(k0);
      key[1] = all_wide(k1);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const uint64_t p1 = uint64_t{kMultipliers[1]} * call.sequence;
    low_ = static_cast<uint32_t>(p1);
    const uint32_t first = static_cast<uint32_t>(p1 >> 32) ^ call.token ^ call.seed_low;
    const uint64_t p0 = uint64_t{kMultipliers[0]} * first;
    product_low_ = static_cast<uint32_t>(p0);
    product_high_ = static_cast<uint32_t>(p0 >> 32);
  }

  // The words of the counters, as pairs: of[0] and of[1] in `p01`, of[2] and of[3] in `p23`.
  __attribute__((always_inline)) void words(vi c0, vi& p01, vi& p23) const {
    const vi m0 = all_wide(kMultipliers[0]), m1 = all_wide(kMultipliers[1]);
    const vi p0 = multiply_wide(c0, m0);
    const vi p1 = multiply_wide(xor3(high_words(p0), keys_[0][1], all_wide(0)), m1);
    vi c[4] = {xor3(high_words(p1), all_wide(low_), keys_[1][0]), p1,
               xor3(all_wide(product_high_), p0, keys_[1][1]), all_wide(product_low_)};
#pragma GCC unroll 8
    for (int round = 2; round < 10; ++round) {
      const vi q0 = multiply_wide(c[0], m0), q1 = multiply_wide(c[2], m1);
      c[0] = xor3(high_words(q1), c[1], keys_[round][0]);
      c[1] = q1;
      c[2] = xor3(high_words(q0), c[3], keys_[round][1]);
      c[3] = q0;
    }
    p01 = pair_words(c[0], c[1]);
    p23 = pair_words(c[2], c[3]);
  }

 private:
  vi keys_[10][2];
  uint32_t low_, product_low_, product_high_;
};

// Lane 2j holds counter j and lane 2j + 1 counter kCounters / 2 + j: then words that are interleaved
// by pairs stand in order of their ids.
inline vi counter_places() {
  int32_t lanes[kLanes] = {};
  for (int j = 0; j < kCounters; ++j) lanes[2 * j] = j / 2 + j % 2 * (kCounters / 2);
  return load(lanes);
}

// At least logit / T - log(wait), by 0.07 at most where the wait is short: it is at least its upper
// word's 1 - u, and the logarithm of a float at least its bits, read as a number.
inline vf race_bound(vf logit, vi word, vf heat) {
  constexpr float kUnit = kLn2 / 8388608.0f;  // of the bits: 2^-23 in log2
  const vf bits = to_float(float_bits(unsigned_to_float(word)));
  return fma(logit, heat, fma(bits, all(-kUnit), all((127 + 32) * kLn2 + 1e-4f)));
}

// Calls `consider` for each token that may be ahead of `bound`. False: a logit is not finite (-inf
// is: nobody draws it).
inline bool race(const RaceCall& call) {
  const Philox philox(call);
  const vi places = counter_places();
  const vf heat = all(call.heat), infinity = all(kInfinity);
  Mask bad = first_lanes(0);
  const auto visit = [&](vf x, vi word, int64_t at, Mask there) {
    const Mask ahead = both(there, not_below(race_bound(x, word, heat), all(*call.bound)));
    for (uint32_t lanes = lane_bits(ahead); lanes != 0; lanes &= lanes - 1) {
      call.consider(call.context, at + __builtin_ctz(lanes));
    }
  };
  const auto visit_two = [&](vf a, vf b, int64_t at, Mask in_a, Mask in_b) {
    bad = either(bad, either(both(in_a, not_below(a, infinity)), both(in_b, not_below(b, infinity))));
    const vf least = all(*call.least);
    in_a = both(in_a, not_below(a, least));
    in_b = both(in_b, not_below(b, least));
    if ((lane_bits(in_a) | lane_bits(in_b)) == 0) return;
    vi p01, p23;  // the upper words of the noise
    philox.words(add_wide(places, all_wide(static_cast<uint32_t>(at / 4))), p01, p23);
    visit(a, even_pairs(p01, p23), at, in_a);
    visit(b, odd_pairs(p01, p23), at + kLanes, in_b);
  };
  const float* x = call.logits;
  int64_t i = 0;
  for (; i + 2 * kLanes <= call.count; i += 2 * kLanes) {
    visit_two(load(x + i), load(x + i + kLanes), i, all_lanes(), all_lanes());
  }
  const auto rest = static_cast<int32_t>(call.count - i);
  if (rest > 0) {
    const int32_t in_a = smaller(rest, kLanes), in_b = rest - in_a;
    visit_two(load_some(x + i, in_a), load_some(x + i + in_a, in_b), i, first_lanes(in_a),
              first_lanes(in_b));
  }
  return lane_bits(bad) == 0;
}

// ------------------------------------------------------------------------------- sums

// The highest logit; NaN where one is NaN or +inf.
inline float top_logit(const float* logits, int64_t count) {
  vf best = all(-kInfinity);
  Mask bad = first_lanes(0);
  for_tokens(logits, 0, count, [&](vf x, int64_t, Mask there) {
    bad = either(bad, both(there, not_below(x, all(kInfinity))));
    best = max(best, chosen(there, x, all(-kInfinity)));
  });
  return lane_bits(bad) == 0 ? top_of(best) : __builtin_nanf("");
}

// Sum of exp(logit - top), in float32 over short stretches and in float64 beyond.
inline double sum_of_exp(const float* logits, int64_t count, float top) {
  constexpr int64_t kStretch = 64 * kLanes;
  double total = 0;
  for (int64_t begin = 0; begin < count; begin += kStretch) {
    vf part = zeros();
    for_tokens(logits, begin, begin + kStretch < count ? begin + kStretch : count,
               [&](vf x, int64_t, Mask there) {
                 part = part + chosen(there, exp2((x - all(top)) * all(kLog2e)), zeros());
               });
    total += sum(part);
  }
  return total;
}

// Sum of 64-bit lanes.
inline int64_t sum_wide(vi x) {
  int64_t lanes[kCounters], total = 0;
  __builtin_memcpy(lanes, &x, sizeof lanes);
  for (int64_t lane : lanes) total += lane;
  return total;
}
inline vi add_lanes(vi total, vi x) {
  return add_wide(total, add_wide(high_words(x), low_words(x)));
}

// Integer weights exp((logit - top) * heat) in units of 2^-30; gives their sum.
inline int64_t weigh(const float* logits, int64_t count, float top, float heat, int32_t* weights) {
  const vf scale = all(heat * kLog2e), unit = all(1073741824.0f);
  vi total = all_wide(0);
  for_tokens(logits, 0, count, [&](vf x, int64_t i, Mask there) {
    const vi weight =
        chosen(there, truncate(exp2((x - all(top)) * scale) * unit), all_wide(0));
    total = add_lanes(total, weight);
    const auto n = static_cast<int32_t>(count - i);
    if (n >= kLanes) {
      store(weights + i, weight);
    } else {
      int32_t lanes[kLanes];
      store(lanes, weight);
      for (int32_t j = 0; j < n; ++j) weights[i + j] = lanes[j];
    }
  });
  return sum_wide(total);
}

// Weight of the tokens that stand before a place in the order: a higher logit, or the same and a
// lower id. And how many there are.
inline int64_t weight_before(const float* logits, const int32_t* weights, int64_t count,
                             float logit, int64_t id) {
  vi total = all_wide(0);
  const auto add = [&](Mask before, int64_t i) {
    int32_t lanes[kLanes] = {};
    const auto n = static_cast<int32_t>(count - i);
    if (n < kLanes) {
      __builtin_memcpy(lanes, weights + i, static_cast<size_t>(n) * sizeof(int32_t));
    }
    total = add_lanes(
        total, chosen(before, load(n < kLanes ? lanes : weights + i), all_wide(0)));
  };
  for_tokens(logits, 0, id, [&](vf x, int64_t i, Mask there) {
    add(both(there, not_below(x, all(logit))), i);
  });
  for_tokens(logits, id, count, [&](vf x, int64_t i, Mask there) {
    add(both(there, above(x, all(logit))), i);
  });
  return sum_wide(total);
}
inline int64_t count_before(const float* logits, int64_t count, float logit, int64_t id) {
  int64_t found = 0;
  for_tokens(logits, 0, id, [&](vf x, int64_t, Mask there) {
    found += __builtin_popcount(lane_bits(both(there, not_below(x, all(logit)))));
  });
  for_tokens(logits, id, count, [&](vf x, int64_t, Mask there) {
    found += __builtin_popcount(lane_bits(both(there, above(x, all(logit)))));
  });
  return found;
}

// ------------------------------------------------------------------------------- leading tokens

// The highest logit of each of kLeadingGroups groups: token i is of group i % kLeadingGroups. The
// k-th highest of them is a lower bound of the k-th highest logit, and seldom far below it.
inline void group_tops(const float* logits, int64_t count, float* tops) {
  for (int32_t g = 0; g < kLeadingGroups; ++g) tops[g] = -kInfinity;
  for (int64_t begin = 0; begin < count; begin += kLeadingGroups) {
    const int64_t end = begin + kLeadingGroups < count ? begin + kLeadingGroups : count;
    for_tokens(logits, begin, end, [&](vf x, int64_t i, Mask there) {
      float* at = tops + (i - begin);
      store(at, max(load(at), chosen(there, x, all(-kInfinity))));
    });
  }
}

// Ids of the tokens whose logit is at least `least`; gives their number, of which at most `room` are
// written.
inline int64_t tokens_from(const float* logits, int64_t count, float least, int64_t room,
                           int32_t* ids) {
  int64_t found = 0;
  for_tokens(logits, 0, count, [&](vf x, int64_t i, Mask there) {
    for (uint32_t lanes = lane_bits(both(there, not_below(x, all(least)))); lanes != 0;
         lanes &= lanes - 1) {
      if (found < room) ids[found] = static_cast<int32_t>(i + __builtin_ctz(lanes));
      ++found;
    }
  });
  return found;
}

}  // namespace onestem::ONESTEM_ISA
