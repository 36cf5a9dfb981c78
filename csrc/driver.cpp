#include "driver.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <thread>

#include "arena.h"
#include "threads.h"

namespace onestem {
namespace {

thread_local Arena t_workspace, t_scratch;

// Work from which other threads are worth waking: all of them or none, since an OpenMP runtime ends
// the threads that a smaller team leaves over and makes them anew for the next.
constexpr double kThreadWork = 10'000;  // nanoseconds
constexpr int64_t kThreadBytes = 64 << 10;

size_t state_bytes(const AttentionCall& call, const WorkList& work) {
  const size_t states = static_cast<size_t>(work.num_states) * call.q_heads;
  return states * (call.dim + 2) * sizeof(float);
}

void place_states(AttentionCall& call, const WorkList& work, char* memory) {
  const size_t states = static_cast<size_t>(work.num_states) * call.q_heads;
  call.state_out = reinterpret_cast<float*>(memory);
  call.state_top = call.state_out + states * call.dim;
  call.state_sum = call.state_top + states;
}

size_t scratch_bytes(const AttentionCall& call, const WorkList& work, const KernelsOf& kernels) {
  size_t bytes = 0;
  for (const Item& item : work.items) {
    bytes = std::max(bytes, item.wide ? kernels.wide_scratch(call.dim)
                                      : kernels.thin_scratch(call.dim, call.kv_heads));
  }
  return bytes;
}

void clear_rows(const AttentionCall& call, const WorkList& work, size_t element_bytes) {
  const size_t bytes = static_cast<size_t>(call.q_heads) * call.dim * element_bytes;
  for (int32_t row : work.empty_rows) {
    std::memset(static_cast<char*>(call.out) + static_cast<size_t>(row) * bytes, 0, bytes);
    std::fill_n(call.lse + int64_t{row} * call.q_heads, call.q_heads,
                -std::numeric_limits<float>::infinity());
  }
}

// Items are taken in turn by whichever thread is free. Who completes the last state of a row and a
// KV head merges them, so that no thread waits for the others; only what goes on from states that are
// left first waits for these, and all of that was begun before.
class Team {
 public:
  Team(const AttentionCall& call, const Plan& plan, const WorkList& work, const KernelsOf& kernels,
       size_t scratch, std::atomic<int32_t>* left)
      : call_(call), plan_(plan), work_(work), kernels_(kernels), scratch_(scratch), left_(left), leaving_(work.num_leaving) {}

  void operator()() {
    const int32_t count = static_cast<int32_t>(work_.items.size());
    for (int32_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) {
      const Item& item = work_.items[i];
      while (item.hand == kGoesOn && leaving_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
      kernels_.attend(call_, item, t_scratch.take(scratch_));
      if (item.hand == kLeaves) {
        leaving_.fetch_sub(1, std::memory_order_release);
      } else if (work_.num_states != 0) {
        merge(item);
      }
    }
  }

 private:
  void merge(const Item& item) {
    for (int32_t part = item.rows_at; part < item.rows_at + item.num_rows; ++part) {
      if (work_.states[part] < 0) continue;
      const int32_t row = plan_.row_of(work_.rows[part]);
      for (int32_t head = item.head; head < item.head + item.num_heads; ++head) {
        std::atomic<int32_t>& left = left_[int64_t{row} * call_.kv_heads + head];
        if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) kernels_.merge(call_, row, head);
      }
    }
  }

  const AttentionCall& call_;
  const Plan& plan_;
  const WorkList& work_;
  const KernelsOf& kernels_;
  size_t scratch_;
  std::atomic<int32_t>* left_;
  std::atomic<int32_t> leaving_, next_{0};
};

}  // namespace

int64_t PreparedPlan::last_page() const {
  int64_t last = -1;
  for (const Run& run : plan_.runs) {
    const int64_t pages = (int64_t{run.offset} + run.len + plan_.page_size - 1) / plan_.page_size;
    for (int64_t i = 0; i < pages; ++i) {
      last = std::max<int64_t>(last, plan_.run_pages[run.page_start + i]);
    }
  }
  return last;
}

CostModel PreparedPlan::cost_model(Dtype dtype) const {
  const int32_t bytes = dtype == kFloat32 ? 4 : 2;
  if (costs_.empty()) return {kernels_.of[dtype].rates, bytes};
  return {{costs_[0], costs_[1], costs_[2], costs_[3], costs_[4], costs_[5]},
          bytes,
          costs_[6],
          costs_[7],
          static_cast<int32_t>(costs_[8])};
}

const WorkList& PreparedPlan::work(Dtype dtype, const Heads& heads, int32_t threads) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& list = lists_[{dtype, heads.q_heads, heads.kv_heads, heads.dim, threads}];
  if (!list) {
    list = std::make_unique<WorkList>(
        make_work(plan_, rules_, heads, kernels(dtype), cost_model(dtype), threads));
  }
  return *list;
}

void attend(AttentionCall call, PreparedPlan& prepared, Dtype dtype, int32_t threads) {
  const WorkList& work = prepared.work(dtype, {call.q_heads, call.kv_heads, call.dim}, threads);
  const KernelsOf& kernels = prepared.kernels(dtype);
  call.work = work.view(prepared.plan());
  clear_rows(call, work, dtype == kFloat32 ? 4 : 2);
  const size_t states = state_bytes(call, work);
  const size_t counters = work.num_states == 0 ? 0 : work.merges.size() * call.kv_heads;
  char* memory = t_workspace.take(states + counters * sizeof(std::atomic<int32_t>));
  place_states(call, work, memory);
  auto* left = reinterpret_cast<std::atomic<int32_t>*>(memory + states);
  for (size_t i = 0; i < counters; ++i) {
    new (left + i) std::atomic<int32_t>(work.merges[i / call.kv_heads].count);
  }
  Team team(call, prepared.plan(), work, kernels, scratch_bytes(call, work, kernels), left);
  const bool alone = work.cost < kThreadWork || work.items.size() < 2;
  run_on_threads(alone ? 1 : threads, team);
}

void over_rows(int64_t rows, int64_t bytes, int32_t threads,
               const std::function<void(int64_t, int64_t)>& run) {
  if (threads == 1 || rows < 2 || bytes < kThreadBytes) return run(0, rows);
  std::atomic<int64_t> next{0};
  const int64_t pieces = int64_t{threads} * 4, step = (rows + pieces - 1) / pieces;
  run_on_threads(threads, [&] {
    for (int64_t at; (at = next.fetch_add(step)) < rows;) run(at, std::min(rows, at + step));
  });
}

}  // namespace onestem
