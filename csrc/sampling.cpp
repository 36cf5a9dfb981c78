#include "sampling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

namespace onestem {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A place in the order of a row's tokens: higher logits first, equal ones by id.
struct Place {
  float logit;
  int64_t id;
};
constexpr Place kBehindAll{-kInfinity, std::numeric_limits<int64_t>::max()};
bool is_before(Place a, Place b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

uint32_t noise_word(const SamplingRow& row, uint32_t token, int64_t id, uint32_t stream) {
  std::array<uint32_t, 4> c{static_cast<uint32_t>(id / 4), token, row.sequence, stream};
  uint32_t k0 = row.seed_low, k1 = row.seed_high;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0], p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c[static_cast<size_t>(id % 4)];
}

// No wait is shorter than 2^-65: -log of it, and what rounding may take.
constexpr double kLongestLead = 45.06 + 1e-3;

// Exponentially distributed: -log u of u in (0, 1) with 64 bits, exact relative to its size.
double waiting_time(const SamplingRow& row, uint32_t token, int64_t id) {
  const uint64_t bits =
      uint64_t{noise_word(row, token, id, 0)} << 32 | noise_word(row, token, id, 1);
  if (bits >> 63 == 0) return -std::log1p(-(static_cast<double>(bits) + 0.5) * 0x1p-64);
  return -std::log((static_cast<double>(~bits) + 0.5) * 0x1p-64);
}

// A row's race among the tokens before a place, whose logit is at least `least`.
class Race {
 public:
  Race(const DrawCall& call, const Kernels& kernels, int64_t row)
      : kernels_(kernels),
        row_(call.rows[row]),
        logits_(call.logits + row * call.count),
        count_(call.count),
        token_(row_.token + call.steps),
        temperature_(row_.temperature) {}

  // The winner; false: a logit is not finite.
  bool run(Place end, double least) {
    end_ = end;
    least_ = least;
    best_ = -std::numeric_limits<double>::infinity();
    bound_ = -kInfinity;
    winner_ = kBehindAll;
    RaceCall call{};
    call.logits = logits_;
    call.count = count_;
    call.seed_low = row_.seed_low;
    call.seed_high = row_.seed_high;
    call.sequence = row_.sequence;
    call.token = token_;
    call.heat = static_cast<float>(1 / temperature_);
    // Rounded down: who is there is settled in `consider`.
    lowest_ = std::nextafter(std::max(end.logit, static_cast<float>(least)), -kInfinity);
    call.least = &lowest_;
    call.bound = &bound_;
    call.consider = [](void* race, int64_t id) { static_cast<Race*>(race)->consider(id); };
    call.context = this;
    return kernels_.race(call);
  }

  Place winner() const { return winner_; }

 private:
  void consider(int64_t id) {
    const float logit = logits_[id];
    if (logit == -kInfinity || double{logit} < least_ || !is_before({logit, id}, end_)) return;
    const double score = double{logit} / temperature_ - std::log(waiting_time(row_, token_, id));
    if (!(score > best_)) return;  // of equal ones the first
    best_ = score;
    winner_ = {logit, id};
    // What the bound of another one loses to rounding.
    bound_ = static_cast<float>(score - 1e-4 - 1e-6 * std::fabs(score));
    const auto far = static_cast<float>((double{bound_} - kLongestLead) * temperature_);
    lowest_ = std::max(lowest_, std::nextafter(far, -kInfinity));
  }

  const Kernels& kernels_;
  const SamplingRow& row_;
  const float* logits_;
  int64_t count_;
  uint32_t token_;
  double temperature_;
  Place end_{}, winner_{};
  double least_ = 0, best_ = 0;
  float bound_ = 0, lowest_ = 0;
};

thread_local std::vector<int32_t> t_ids, t_weights;

// The tokens from about the `most`-th highest logit on, and no fewer than `most` of them. The leading
// `most` come first, in order if `sorted`; the last of them stands at its place in any case.
const std::vector<int32_t>& leading(const float* logits, int64_t count, int64_t most, bool sorted,
                                    const Kernels& kernels) {
  float least = -kInfinity;
  if (most <= kLeadingGroups && count > kLeadingGroups) {
    std::array<float, kLeadingGroups> tops;
    kernels.group_tops(logits, count, tops.data());
    std::nth_element(tops.begin(), tops.begin() + (most - 1), tops.end(), std::greater<>());
    least = tops[static_cast<size_t>(most - 1)];
  }
  std::vector<int32_t>& ids = t_ids;
  ids.resize(static_cast<size_t>(std::max<int64_t>(2 * most, 256)));
  const auto room = [&] { return static_cast<int64_t>(ids.size()); };
  int64_t found = kernels.tokens_from(logits, count, least, room(), ids.data());
  if (found > room()) {
    ids.resize(static_cast<size_t>(found));
    kernels.tokens_from(logits, count, least, found, ids.data());
  }
  ids.resize(static_cast<size_t>(found));
  const auto before = [&](int32_t a, int32_t b) {
    return is_before({logits[a], a}, {logits[b], b});
  };
  const auto end = ids.begin() + std::min(most, found);
  std::nth_element(ids.begin(), end - 1, ids.end(), before);
  if (sorted) std::sort(ids.begin(), end, before);
  return ids;
}

int32_t draw_row(const DrawCall& call, const Kernels& kernels, int64_t row, int64_t* id) {
  const SamplingRow& asked = call.rows[row];
  const float* logits = call.logits + row * call.count;
  const bool cuts_mass = asked.top_p < 1, draws = asked.temperature > 0;
  *id = 0;
  float top = 0;
  if (!draws || cuts_mass || asked.min_p > 0) {
    top = kernels.top_logit(logits, call.count);
    if (top != top) return kNotFinite;
    if (top == -kInfinity) return kMasked;
  }
  if (!draws) {
    kernels.tokens_from(logits, call.count, top, 1, t_ids.data());
    *id = t_ids[0];
    return kOk;
  }
  Place end = kBehindAll;
  if (asked.top_k > 0 && asked.top_k < call.count) {
    const int32_t last = leading(logits, call.count, asked.top_k, false, kernels)
        [static_cast<size_t>(asked.top_k - 1)];
    end = {logits[last], int64_t{last} + 1};
  }
  std::vector<int32_t>& weights = t_weights;
  const auto weight_before = [&](Place place) {
    return static_cast<double>(kernels.weight_before(logits, weights.data(), call.count,
                                                     place.logit,
                                                     std::min(place.id, call.count)));
  };
  double limit = 0;
  if (cuts_mass) {
    weights.resize(static_cast<size_t>(call.count));
    const int64_t all =
        kernels.weigh(logits, call.count, top, 1 / asked.temperature, weights.data());
    const bool whole = end.id == kBehindAll.id;
    limit = double{asked.top_p} * (whole ? static_cast<double>(all) : weight_before(end));
  }
  const double least = asked.min_p > 0 ? top + double{asked.temperature} * std::log(asked.min_p)
                                       : -std::numeric_limits<double>::infinity();
  Race race(call, kernels, row);
  for (;;) {
    if (!race.run(end, least)) return kNotFinite;
    if (race.winner().logit == -kInfinity) return kMasked;
    // Who wins among all and is kept wins among the kept; else it bounds who may run again.
    if (!cuts_mass || weight_before(race.winner()) < limit) break;
    end = race.winner();
  }
  *id = race.winner().id;
  return kOk;
}

}  // namespace

void draw_tokens(const DrawCall& call, const Kernels& kernels, int64_t begin, int64_t end) {
  t_ids.resize(std::max<size_t>(t_ids.size(), 1));
  for (int64_t row = begin; row < end; ++row) {
    call.status[row] = draw_row(call, kernels, row, call.ids + row);
  }
}

void log_sums(const LogSumCall& call, const Kernels& kernels, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* logits = call.logits + call.index[i] * call.count;
    const float top = kernels.top_logit(logits, call.count);
    call.sums[i] = top + std::log(kernels.sum_of_exp(logits, call.count, top));
  }
}

void leading_tokens(const LeadingCall& call, const Kernels& kernels, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* logits = call.logits + call.index[i] * call.count;
    const std::vector<int32_t>& ids = leading(logits, call.count, call.most, true, kernels);
    for (int64_t j = 0; j < call.most; ++j) {
      call.ids[i * call.most + j] = ids[static_cast<size_t>(j)];
      call.values[i * call.most + j] = logits[ids[static_cast<size_t>(j)]];
    }
  }
}

void token_ranks(const RankCall& call, const Kernels& kernels, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const float* logits = call.logits + call.index[i] * call.count;
    const int64_t id = call.ids[i];
    call.ranks[i] = kernels.count_before(logits, call.count, logits[id], id);
  }
}

}  // namespace onestem
