#include <algorithm>
#include <mutex>
#include <numeric>
#include <vector>

#include "arena.h"
#include "driver.h"
#include "threads.h"

namespace onestem {
namespace {

thread_local Arena t_scratch;

constexpr int64_t kChannels = 64;  // of a piece: whole lines of memory
constexpr int64_t kThreadBytes = 64 << 10;
// A thread takes this part of its share of what is left.
constexpr int32_t kShare = 4;

// Items (part, head) of parts in an order. Whoever is free takes neighbours, fewer towards the end.
class Items {
 public:
  Items(const DeltaCall& call, const std::vector<int32_t>& order, int32_t threads)
      : call_(call), order_(order), threads_(threads) {
    for (const int32_t part : order) left_ += int64_t{call.parts[part].count} * call.heads;
  }

  // Places begin..end-1 of the next ones, false where there are no more.
  bool take(int64_t& begin, int64_t& end) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t all = static_cast<int64_t>(order_.size()) * call_.heads;
    const int64_t share = left_ / (int64_t{threads_} * kShare);
    begin = end = next_;
    for (int64_t taken = 0; end < all && (end == begin || taken < share); ++end) {
      const int64_t rows = call_.parts[order_[end / call_.heads]].count;
      taken += rows;
      left_ -= rows;
    }
    next_ = end;
    return begin < end;
  }

  int64_t item(int64_t place) const {
    return int64_t{order_[place / call_.heads]} * call_.heads + place % call_.heads;
  }

 private:
  const DeltaCall& call_;
  const std::vector<int32_t>& order_;
  int32_t threads_;
  std::mutex mutex_;
  int64_t next_ = 0, left_ = 0;
};

}  // namespace

void convolve(const KernelsOf& kernels, const ConvCall& call, int64_t rows, int32_t element_bytes,
              int32_t threads) {
  const int64_t bytes = rows * call.channels * element_bytes * 2;
  const auto run = [&](const ConvCall& some, int64_t first, int64_t last) {
    // Where rows' inputs are, and zeros.
    const size_t scratch = (call.width - 1 + kConvRows) * sizeof(void*) + (last - first) * element_bytes;
    kernels.causal_conv(some, first, last, t_scratch.take(scratch));
  };
  if (rows <= call.num_parts) {  // states are most of the memory: each in one piece
    return over_rows(call.num_parts, bytes, threads, [&](int64_t begin, int64_t end) {
      ConvCall some = call;
      some.parts += begin;
      some.num_parts = end - begin;
      run(some, 0, call.channels);
    });
  }
  const int64_t pieces = (call.channels + kChannels - 1) / kChannels;
  over_rows(pieces, bytes, threads, [&](int64_t begin, int64_t end) {
    run(call, begin * kChannels, std::min(end * kChannels, call.channels));
  });
}

void apply_delta_rule(const KernelsOf& kernels, const DeltaCall& call, int32_t threads) {
  std::vector<int32_t> order(call.num_parts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return call.parts[a].count > call.parts[b].count;
  });
  while (!order.empty() && call.parts[order.back()].count == 0) order.pop_back();
  const int64_t bytes = int64_t{call.heads} * call.dk * call.dv * sizeof(float);
  if (static_cast<int64_t>(order.size()) * bytes < kThreadBytes) threads = 1;
  Items items(call, order, threads);
  const size_t scratch = kernels.delta_scratch(call);
  run_on_threads(threads, [&] {
    for (int64_t begin, end; items.take(begin, end);) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t next = items.item(std::min(i + 1, end - 1));
        kernels.delta_rule(call, items.item(i), next, t_scratch.take(scratch));
      }
    }
  });
}

}  // namespace onestem
