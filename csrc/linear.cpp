#include <algorithm>
#include <atomic>

#include "arena.h"
#include "driver.h"
#include "threads.h"

namespace onestem {
namespace {

thread_local Arena t_rows, t_scratch;

// Bytes of codes from which other threads are worth waking.
constexpr int64_t kThreadBytes = 128 << 10;

// A thread takes this part of its share of what is left.
constexpr int32_t kShare = 2;

const LinearPath& path_for(const LinearKernels& kernels, const LinearCall& call, Dtype x) {
  const LinearWays& ways = kernels.of[x];
  return call.rows <= ways.most_few ? ways.few : ways.many;
}

}  // namespace

void multiply(const Kernels& kernels, LinearCall call, Dtype x, Dtype y, int32_t threads) {
  if (call.rows == 0) return;
  const PackedCodes& w = call.weight;
  const LinearKernels& of = w.group == 0 ? kernels.channels : kernels.groups[w.kind];
  const LinearPath& path = path_for(of, call, x);
  const int64_t panels = (call.rows + path.panel - 1) / path.panel;
  const size_t scratch = path.scratch_bytes(call);
  call.packed = t_rows.take(static_cast<size_t>(panels) * path.panel_bytes(call.weight));
  const int64_t bytes = int64_t{call.weight.pairs} * call.weight.chunks * kCodeBytes * 32;
  if (call.rows * bytes < kThreadBytes) threads = 1;
  over_rows(panels, panels * path.panel * call.weight.depth * 2, threads,
            [&](int64_t begin, int64_t end) {
              path.pack[x](call, begin, end, t_scratch.take(scratch));
            });
  const int32_t pairs = call.weight.pairs;
  const int32_t step = path.pairs(call);
  // Whoever is free takes a part of what is left, smaller ones towards the end: long pieces are read
  // in order of memory, and all threads end together.
  std::atomic<int32_t> next{0};
  run_on_threads(threads, [&] {
    int32_t at = next.load(std::memory_order_relaxed);
    for (;;) {
      if (at >= pairs) break;
      const int32_t end = threads == 1 ? pairs : at + std::max(1, (pairs - at) / (threads * kShare));
      if (!next.compare_exchange_weak(at, end, std::memory_order_relaxed)) continue;
      for (; at < end; at += step) {
        path.multiply[y](call, at, std::min(end, at + step), t_scratch.take(scratch));
      }
      at = next.load(std::memory_order_relaxed);
    }
  });
}

}  // namespace onestem
