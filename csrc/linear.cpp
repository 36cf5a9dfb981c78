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

// Pieces of a weight for each thread, at least: whoever is free takes the next.
constexpr int32_t kPieces = 4;

const LinearPath& path_for(const LinearKernels& kernels, int64_t rows, Dtype x) {
  return rows <= kernels.most_few[x] ? kernels.few : kernels.many;
}

}  // namespace

void multiply(const Kernels& kernels, LinearCall call, Dtype x, Dtype y, int32_t threads) {
  if (call.rows == 0) return;
  const LinearKernels& of = call.weight.bits == 8 ? kernels.linear8 : kernels.linear4;
  const LinearPath& path = path_for(of, call.rows, x);
  const int64_t panels = (call.rows + path.panel - 1) / path.panel;
  const size_t scratch = path.scratch_bytes(call);
  call.packed = t_rows.take(static_cast<size_t>(panels) * path.panel_bytes(call.weight));
  if (call.rows * call.weight.chunks * kCodeBytes * 32 < kThreadBytes) threads = 1;
  over_rows(panels, panels * path.panel * call.weight.depth * 2, threads,
            [&](int64_t begin, int64_t end) {
              path.pack[x](call, begin, end, t_scratch.take(scratch));
            });
  const int32_t pairs = call.weight.pairs;
  const int32_t wanted = std::max(1, pairs / (threads * kPieces));
  const int32_t step = threads == 1 ? path.pairs(call) : std::min(path.pairs(call), wanted);
  std::atomic<int32_t> next{0};
  run_on_threads(threads, [&] {
    for (int32_t at; (at = next.fetch_add(step, std::memory_order_relaxed)) < pairs;) {
      path.multiply[y](call, at, std::min(pairs, at + step), t_scratch.take(scratch));
    }
  });
}

}  // namespace onestem
