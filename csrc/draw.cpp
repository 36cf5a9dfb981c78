#include "draw.h"

#include <algorithm>
#include <array>
#include <vector>

namespace onestem {
namespace {

// Of the thread: their memory is touched once.
struct Buffers {
  std::vector<int64_t> weights;
  std::vector<int32_t> buckets, ids;
};
thread_local Buffers t_buffers;

// The tokens of a row in order. Only buckets in which something is decided are sorted: of a
// vocabulary these are a few hundred tokens.
class Order {
 public:
  Order(const DrawCall& call, const Kernels& kernels, int64_t row, Buffers& buffers)
      : logits_(call.logits + row * call.count), count_(call.count), ids_(buffers.ids) {
    buffers.weights.resize(count_);
    buffers.buckets.resize(count_);
    weights_ = buffers.weights.data();
    buckets_ = buffers.buckets.data();
    kernels.weigh_tokens(
        {logits_, count_, call.temperature[row], call.bits, weights_, buckets_});
    std::array<int64_t, kDrawBuckets> tokens{}, sums{};
    for (int64_t i = 0; i < count_; ++i) {
      ++tokens[buckets_[i]];
      sums[buckets_[i]] += weights_[i];
    }
    for (int32_t b = 0; b < kDrawBuckets; ++b) {
      rank_[b + 1] = rank_[b] + tokens[b];
      before_[b + 1] = before_[b] + sums[b];
    }
  }

  int64_t total() const { return before_[kDrawBuckets]; }

  // Weight of the first `ranks` tokens.
  int64_t mass_of(int64_t ranks) {
    if (ranks >= count_) return total();
    const int32_t b = last_where(rank_, [&](int64_t first) { return first <= ranks; });
    int64_t mass = before_[b];
    const std::vector<int32_t>& ids = sorted(b);
    for (int64_t i = 0; i < ranks - rank_[b]; ++i) mass += weights_[ids[i]];
    return mass;
  }

  // Tokens before which less than `limit` stands.
  int64_t ranks_below(double limit) {
    const int32_t b =
        last_where(before_, [&](int64_t mass) { return static_cast<double>(mass) < limit; });
    int64_t mass = before_[b], rank = rank_[b];
    for (int32_t id : sorted(b)) {
      if (!(static_cast<double>(mass) < limit)) break;
      mass += weights_[id];
      ++rank;
    }
    return rank;
  }

  int64_t ranks_of_at_least(double share) const {
    const double least =
        share * static_cast<double>(*std::max_element(weights_, weights_ + count_));
    return std::count_if(weights_, weights_ + count_, [&](int64_t weight) {
      return static_cast<double>(weight) >= least;
    });
  }

  // The token at which the cumulative weight exceeds `target`, which is below the total.
  int32_t token_at(int64_t target) {
    const int32_t b = last_where(before_, [&](int64_t mass) { return mass <= target; });
    int64_t mass = before_[b];
    for (int32_t id : sorted(b)) {
      mass += weights_[id];
      if (mass > target) return id;
    }
    return 0;  // not reached
  }

 private:
  using Bounds = std::array<int64_t, kDrawBuckets + 1>;

  // The last bucket that is not empty and whose bound satisfies a condition that holds for the
  // leading ones.
  template <class Condition>
  int32_t last_where(const Bounds& bounds, Condition holds) const {
    int32_t found = 0;
    for (int32_t b = 0; b < kDrawBuckets && holds(bounds[b]); ++b) {
      if (rank_[b + 1] > rank_[b]) found = b;
    }
    return found;
  }

  const std::vector<int32_t>& sorted(int32_t bucket) {
    if (bucket == sorted_bucket_) return ids_;
    sorted_bucket_ = bucket;
    ids_.clear();
    for (int64_t i = 0; i < count_; ++i) {
      if (buckets_[i] == bucket) ids_.push_back(static_cast<int32_t>(i));
    }
    std::stable_sort(ids_.begin(), ids_.end(),
                     [&](int32_t a, int32_t b) { return logits_[a] > logits_[b]; });
    return ids_;
  }

  const float* logits_;
  int64_t count_;
  Bounds rank_{}, before_{};  // of each bucket's first token
  int32_t sorted_bucket_ = -1;
  int64_t* weights_;
  int32_t* buckets_;
  std::vector<int32_t>& ids_;  // of the bucket sorted last
};

int32_t draw_row(const DrawCall& call, const Kernels& kernels, int64_t row) {
  Order order(call, kernels, row, t_buffers);
  int64_t kept = std::min(call.top_k[row], call.count);
  if (call.top_p[row] < 1.0) {
    const double mass = static_cast<double>(order.mass_of(kept));
    kept = std::min(kept, order.ranks_below(call.top_p[row] * mass));
  }
  if (call.min_p[row] > 0.0) kept = std::min(kept, order.ranks_of_at_least(call.min_p[row]));
  const int64_t mass = order.mass_of(std::max<int64_t>(kept, 1));
  const auto target = static_cast<int64_t>(call.uniform[row] * static_cast<double>(mass));
  return order.token_at(std::min(target, mass - 1));
}

}  // namespace

void draw(const DrawCall& call, const Kernels& kernels, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) call.ids[row] = draw_row(call, kernels, row);
}

}  // namespace onestem
